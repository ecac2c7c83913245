"""Collectives under way: nobody has their results until somebody waits for them."""

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from course_utils.measure.taps import put_back, tap


class Pending:
    """A collective under way. Its result is held back until somebody waits for it.

    So code that does not wait never finds the result there by chance, and code that
    changes a tensor under way always loses the change.
    """

    def __init__(self, step: int, tensors: list[torch.Tensor]):
        self.step = step
        self.tensors = tensors
        self.copies = [tensor.detach().clone() for tensor in tensors]
        self.versions = versions_of(tensors)
        self.numbers = sum(tensor.numel() for tensor in tensors)
        self.work = None
        self.handed_over = self.changed = False

    def hand_over(self) -> None:
        """The result, to whom it belongs; and was that left alone until now?"""
        if self.handed_over:
            return
        self.handed_over = True
        self.changed = self.versions != versions_of(self.tensors)
        for tensor, result in zip(self.tensors, self.copies, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(result)


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """A number for each that grows with every change; inference tensors have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass
class Promise:
    """A future, and what is done for its value when somebody waits: not before.

    Attributes:
        future: what the learner's code holds.
        sent: the collectives that must have ended.
        make: computes the value.
        step: in which it was made.
        is_more: is it a function's value, which `then` has promised?
    """

    future: torch.futures.Future
    sent: list[Pending]
    make: Callable[[], object]
    step: int
    is_more: bool = False
    kept: bool = False

    def keep(self) -> None:
        """Compute the value, once; an error is raised where somebody waits."""
        if self.kept:
            return
        self.kept = True
        try:
            value = self.make()
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


# Where collectives end whose results can be held back, as methods of a process group.
REDUCING = ("allreduce", "allreduce_coalesced", "reduce", "broadcast")


class Log:
    """Notes the collectives of this rank, by whatever name they go.

    Args:
        methods: which ones, as methods of a process group: there all functions end.
    """

    def __init__(self, *methods: str):
        self.methods = methods or ("allreduce",)
        self.step, self.sent, self.promises = -1, [], []
        self.after = []  # how many gradients were there when each of the step began
        self.ready = self.trained = 0
        self.waits_in_backward = 0  # while gradients were still missing

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._wait = vars(dist.Work)["wait"]
            stack.enter_context(tap(self._send, self.methods))
            self._answer(
                stack,
                dist.Work,
                wait=self._work_waits,
                is_completed=self._work_is_completed,
                get_future=self._work_gets_future,
            )
            self._answer(
                stack,
                torch._C.Future,
                wait=self._future_waits,
                done=self._future_is_done,
                then=self._future_goes_on,
            )
            functions = stack.enter_context(put_back(torch._C, ["_collect_all"]))
            torch._C._collect_all = partial(self._collect, *functions.values())
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._open.close()

    def _answer(self, stack, owner, **asked):
        stack.enter_context(tap(lambda call: asked[call.name](call), asked, owner))

    def _send(self, call):
        sent = Pending(self.step, call.tensors)
        sent.work = call.go(sent.copies)
        self.sent.append(sent)
        self.after.append(self.ready)
        return sent.work

    def _work_waits(self, call):
        done = call.go()
        for sent in self._of(call.group):
            self._note_wait()
            self._end(sent)
        return done

    def _work_is_completed(self, call):
        done = call.go()
        # A hook that asks again and again stops the backward as wait() does.
        if done and self.ready >= self.trained:
            for sent in self._of(call.group):
                self._end(sent)
        return done

    def _work_gets_future(self, call):
        sent = next(iter(self._of(call.group)), None)
        if sent is None:
            return call.go()
        return self._promise([sent], lambda: self._result(sent))

    def _future_waits(self, call):
        promise = self._promise_of(call.group)
        if promise:
            self._note_wait()
            promise.keep()
        return call.go()

    def _future_is_done(self, call):
        promise = self._promise_of(call.group)
        if promise and all(sent.work.is_completed() for sent in promise.sent):
            promise.keep()
        return call.go()

    def _future_goes_on(self, call):
        future, (callback,) = call.group, call.args
        before = self._promise_of(future)
        if before is None:
            return call.go()

        def make():
            before.keep()
            return callback(future)

        return self._promise(before.sent, make, is_more=True)

    def _collect(self, original, all_futures):
        promises = [self._promise_of(future) for future in all_futures]
        if None in promises or not promises:
            return original(all_futures)

        def make():
            for promise in promises:
                promise.keep()
            return list(all_futures)

        return self._promise([s for p in promises for s in p.sent], make)

    def _promise(self, sent, make, is_more=False):
        future = torch.futures.Future()
        promise = Promise(future, sent, make, self.step, is_more)
        self.promises.append(promise)
        if all(one.handed_over for one in sent):
            promise.keep()
        return future

    def _promise_of(self, future):
        return next((p for p in self.promises if p.future is future), None)

    def _of(self, work):
        return [sent for sent in self.sent if sent.work is work]

    def _note_wait(self):
        self.waits_in_backward += self.ready < self.trained

    def _result(self, sent):
        self._wait(sent.work)
        sent.hand_over()
        return sent.tensors

    def _end(self, sent):
        """Its result, and what `then` makes of it: with gloo, wait() ends after it."""
        sent.hand_over()
        for promise in list(self.promises):
            if all(one.handed_over for one in promise.sent):
                promise.keep()

    def begin(self, step: int) -> None:
        """What comes now belongs to this step."""
        self.step, self.ready, self.waits_in_backward = step, 0, 0
        self.after.clear()

    @property
    def now(self) -> list[Pending]:
        """What this step has sent."""
        return [sent for sent in self.sent if sent.step == self.step]

    def missing(self) -> int:
        """For how many of them, or of what comes `then`, nobody has waited."""
        promises = [p for p in self.promises if p.is_more and p.step == self.step]
        return sum(not sent.handed_over for sent in self.now) + sum(
            not promise.kept for promise in promises
        )

    def kept(self) -> int:
        """How many requests of earlier steps somebody else still holds."""
        old = [sent for sent in self.sent if sent.step < self.step and sent.work]

        def held():
            ours = Counter(id(sent.work) for sent in old)
            return sum(
                sys.getrefcount(sent.work) - 1 > ours[id(sent.work)] for sent in old
            )

        if held():  # perhaps by what is garbage already
            gc.collect()
        return held()

    def watch(self, module: torch.nn.Module) -> None:
        """Count this module's gradients as they get ready."""

        def hook(parameter):
            self.ready += 1

        for parameter in module.parameters():
            if parameter.requires_grad:
                self.trained += 1
                parameter.register_post_accumulate_grad_hook(hook)
