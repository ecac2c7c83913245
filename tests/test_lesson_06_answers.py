"""Lesson 06: different right answers, and wrong ones that no near miss covers."""

import contextlib
import math
import time
from itertools import accumulate as running_sums

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_utils import Ranks
from course_utils.measure.data import load_data
from course_utils.notebook.exercises import reference
from course_utils.theory import costs
from tests.answers import Answers

ANSWERS = Answers()

# --------------------------------------------------------------- 06.predict_bucket

ANSWERS.right("06.predict_bucket")(30)
ANSWERS.right("06.predict_bucket")(torch.tensor(30.0))

# ------------------------------------------------------------- 06.broadcast_module


@ANSWERS.wrong("06.broadcast_module", "wrong", "these are new tensors")
def new_parameters(module):
    for child in (module, *module.modules()):
        for name, parameter in list(child.named_parameters(recurse=False)):
            value = parameter.detach().clone()
            dist.broadcast(value, src=0)
            setattr(child, name, nn.Parameter(value, parameter.requires_grad))
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


@ANSWERS.wrong("06.broadcast_module", "wrong", "`module.children()` leaves it out")
def of_the_children(module):
    for child in module.children():
        for tensor in (*child.parameters(), *child.buffers()):
            dist.broadcast(tensor.data, src=0)


@ANSWERS.right("06.broadcast_module")
@torch.no_grad()
def those_of_a_dtype_together(module):
    by_dtype = {}
    for tensor in (*module.parameters(), *module.buffers()):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@ANSWERS.right("06.broadcast_module")
def all_at_once(module):
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers())]
    requests = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
    for request in requests:
        request.wait()


@ANSWERS.right("06.broadcast_module")
def one_by_one(module):
    for tensor in [*module.buffers(), *module.parameters()]:
        dist.broadcast(tensor.data, 0)


@ANSWERS.right("06.broadcast_module")
@torch.no_grad()
def by_all_reduce(module):
    for tensor in (*module.parameters(), *module.buffers()):
        if dist.get_rank() > 0:
            tensor.zero_()
        dist.all_reduce(tensor)


@ANSWERS.right("06.broadcast_module")
@torch.no_grad()
def as_objects(module):
    tensors = [*module.parameters(), *module.buffers()]
    message = [[tensor.detach().clone() for tensor in tensors]]
    dist.broadcast_object_list(message, src=0)
    for tensor, value in zip(tensors, message[0], strict=True):
        tensor.copy_(value)


@ANSWERS.right("06.broadcast_module")
def gathered(module):
    """Everybody gets all models, and takes the first."""
    for _, tensor in sorted([*module.named_parameters(), *module.named_buffers()]):
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.detach())
        tensor.data.copy_(copies[0])


@ANSWERS.right("06.broadcast_module")
def by_messages(module):
    for tensor in (*module.parameters(), *module.buffers()):
        if dist.get_rank() > 0:
            dist.recv(tensor.data, 0)
        else:
            for rank in range(1, dist.get_world_size()):
                dist.send(tensor.data, rank)


# ------------------------------------------------------------------ 06.cut_buckets


def with_caps(nbytes, bucket_bytes, first_bucket_bytes):
    buckets = [[]]
    for number in range(len(nbytes) - 1, -1, -1):
        cap = bucket_bytes if len(buckets) > 1 else first_bucket_bytes
        if sum(nbytes[i] for i in buckets[-1]) >= cap:
            buckets.append([])
        buckets[-1].append(number)
    return buckets


ANSWERS.right("06.cut_buckets")(with_caps)


@ANSWERS.wrong("06.cut_buckets", "wrong", "no float can be an index")
def in_lists_of_floats(*args):
    return [list(map(float, bucket)) for bucket in with_caps(*args)]


@ANSWERS.wrong("06.cut_buckets", "wrong", "It would work: but it is what you build")
def the_courses_formula(nbytes, bucket_bytes, first_bucket_bytes):
    return costs.ddp_buckets(nbytes, cap=bucket_bytes, first_cap=first_bucket_bytes)


@ANSWERS.right("06.cut_buckets")
def by_popping(nbytes, bucket_bytes, first_bucket_bytes):
    left, cap, buckets = list(range(len(nbytes))), first_bucket_bytes, []
    while left:
        bucket = (left.pop(),)
        while left and sum(nbytes[i] for i in bucket) < cap:
            bucket += (left.pop(),)
        buckets.append(bucket)
        cap = bucket_bytes
    return tuple(buckets)


@ANSWERS.right("06.cut_buckets")
def by_recursion(nbytes, bucket_bytes, first_bucket_bytes):
    if not nbytes:
        return []
    sums = list(running_sums(reversed(nbytes)))
    n = next((i for i, s in enumerate(sums, 1) if s >= first_bucket_bytes), len(sums))
    rest = nbytes[:-n]
    bucket = list(range(len(nbytes) - 1, len(rest) - 1, -1))
    return [bucket, *by_recursion(rest, bucket_bytes, bucket_bytes)]


@ANSWERS.right("06.cut_buckets")
def in_tensors(nbytes, bucket_bytes, first_bucket_bytes):
    order, sizes = torch.arange(len(nbytes)).flip(0), torch.tensor(nbytes).flip(0)
    cap, buckets = first_bucket_bytes, []
    while len(order):
        n = int((sizes.cumsum(0) < cap).sum()) + 1
        buckets.append(order[:n])
        order, sizes, cap = order[n:], sizes[n:], bucket_bytes
    return buckets


# ------------------------------------------------ 06.async_ddp, 06.spot_the_hook


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


class HookByHook(Wrapped):
    """What many answers below are made from, by changing one thing."""

    def __init__(self, module):
        super().__init__(module)
        self.requests = []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                self.hook_up(parameter)

    def hook_up(self, parameter):
        parameter.register_post_accumulate_grad_hook(self.send)

    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for request in self.requests:
            request.wait()
        self.requests.clear()


ANSWERS.right("06.async_ddp")(HookByHook)


@ANSWERS.wrong("06.async_ddp", "wrong", "What is sent is the parameter itself")
class SendsParametersAndDividesGradients(HookByHook):
    def send(self, parameter):
        request = dist.all_reduce(parameter.data, async_op=True)
        self.requests.append((parameter, request))

    def finish(self):
        for parameter, request in self.requests:
            request.wait()
            parameter.grad /= dist.get_world_size()
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "requests of earlier steps are still kept")
class WaitsForTheNewOnly(HookByHook):
    done = 0

    def finish(self):
        for request in self.requests[self.done :]:
            request.wait()
        self.done = len(self.requests)


@ANSWERS.wrong("06.async_ddp", "wrong", "`then()` do not wait")
class Sleeps(HookByHook):
    def finish(self):
        time.sleep(0.05)
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "A hook of `register_hook`")
class TensorHooks(HookByHook):
    def hook_up(self, parameter):
        parameter.register_hook(self.send)

    def send(self, gradient):
        mean = gradient / dist.get_world_size()
        self.requests.append(dist.all_reduce(mean, async_op=True))
        return mean


@ANSWERS.right("06.async_ddp")
class Promises(HookByHook):
    """The idiom of communication hooks; finish() waits for all of them."""

    def send(self, parameter):
        gradient, n = parameter.grad, dist.get_world_size()
        future = dist.all_reduce(gradient, async_op=True).get_future()
        self.requests.append(future.then(lambda _: gradient.div_(n)))


@ANSWERS.right("06.async_ddp")
class EmptiedByTheNextBackward(HookByHook):
    """The last step's requests stay until then, and no longer."""

    new = True

    def send(self, parameter):
        if self.new:
            self.requests, self.new = [], False
        super().send(parameter)

    def finish(self):
        for request in self.requests:
            request.wait()
        self.new = True


@ANSWERS.right("06.async_ddp")
class DividesAfterwards(HookByHook):
    def send(self, parameter):
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests.append((parameter, request.get_future()))

    def finish(self):
        there, self.requests = self.requests, []
        for parameter, future in there:
            future.wait()
            parameter.grad /= dist.get_world_size()


@ANSWERS.right("06.async_ddp")
class InInferenceMode(HookByHook):
    """What travels is an inference tensor, which has no number of its changes."""

    @torch.inference_mode()
    def send(self, parameter):
        mean = parameter.grad / dist.get_world_size()
        request = dist.all_reduce(mean, async_op=True)
        self.requests.append((parameter, mean, request))

    def finish(self):
        for parameter, mean, request in self.requests:
            request.wait()
            parameter.grad.copy_(mean)
        self.requests.clear()


@ANSWERS.right("06.async_ddp")
class AllPromises(Promises):
    def finish(self):
        torch.futures.wait_all(self.requests)
        self.requests.clear()


@ANSWERS.right("06.async_ddp")
class ValueAfterWaiting(DividesAfterwards):
    def finish(self):
        for parameter, future in self.requests:
            future.wait()
            parameter.grad = future.value()[0] / dist.get_world_size()
        self.requests.clear()


@ANSWERS.right("06.async_ddp")
class AllFutures(AllPromises):
    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests.append(request.get_future())


@ANSWERS.right("06.async_ddp")
class WaitsAtTheEndOfTheBackward(HookByHook):
    """As torch's DDP does: nothing is left for finish()."""

    def send(self, parameter):
        if not self.requests:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: HookByHook.finish(self))
        super().send(parameter)

    def finish(self):
        pass


@ANSWERS.right("06.async_ddp")
class WithMeans(HookByHook):
    """ReduceOp.AVG, and closures instead of methods."""

    def hook_up(self, parameter):
        def send(parameter):
            gradient, mean = parameter.grad, dist.ReduceOp.AVG
            self.requests.append(dist.all_reduce(gradient, op=mean, async_op=True))

        parameter.register_post_accumulate_grad_hook(send)


@ANSWERS.right("06.async_ddp")
class MeansInADictionary(HookByHook):
    def send(self, parameter):
        mean = parameter.grad / dist.get_world_size()
        self.requests = dict(self.requests)
        self.requests[parameter] = mean, dist.all_reduce(mean, async_op=True)

    def finish(self):
        while self.requests:
            parameter, (mean, request) = self.requests.popitem()
            request.wait()
            parameter.grad = mean


@ANSWERS.right("06.async_ddp")
class HooksOfTheGraph(HookByHook):
    """At the nodes that add to .grad, as it was done before torch 2.1."""

    def hook_up(self, parameter):
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: self.send(parameter))
        self.nodes = [*getattr(self, "nodes", []), node]  # or they are gone


class Repaired(Wrapped):
    """The copied class without its bugs."""

    def __init__(self, module):
        super().__init__(module)
        self.gradients, self.requests = [], []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        self.gradients.append(parameter.grad)
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for gradient, request in zip(self.gradients, self.requests, strict=True):
            request.wait()
            gradient /= dist.get_world_size()
        self.gradients.clear()
        self.requests.clear()


ANSWERS.right("06.spot_the_hook")(Repaired)


@ANSWERS.right("06.spot_the_hook")
class DividedFirst(Repaired):
    def reduce(self, parameter):
        parameter.grad.div_(dist.get_world_size())
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        requests, self.requests = self.requests, []
        for request in requests:
            request.wait()


@ANSWERS.right("06.spot_the_hook")
class EmptiedOneByOne(Repaired):
    def finish(self):
        while self.requests:
            self.requests.pop().wait()
            self.gradients.pop().div_(dist.get_world_size())


@ANSWERS.right("06.spot_the_hook")
class OnlyAListOfPairs(Repaired):
    def reduce(self, parameter):
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests += [(parameter, request)]

    def finish(self):
        for parameter, request in self.requests:
            request.wait()
            parameter.grad = parameter.grad / dist.get_world_size()
        self.requests = []


@ANSWERS.wrong("06.spot_the_hook", "wrong", "a later one is not")
class OnlyTheRequestsCleared(Repaired):
    def finish(self):
        for request in self.requests:
            request.wait()
        self.requests.clear()
        for gradient in self.gradients:
            gradient /= dist.get_world_size()


# ----------------------------------------------------------------- 06.bucketed_ddp


class InBuckets(nn.Module):
    """What the answers below are made from, by changing one thing."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
        self.buckets, held = [[]], 0
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            if held >= bucket_bytes:
                self.buckets, held = [*self.buckets, []], 0
            self.buckets[-1].append(parameter)
            held += 4 * parameter.numel()
        self.begin()
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, number=number: self.ready(number)
                )

    def begin(self):
        self.next, self.sent = 0, []
        self.missing = [len(bucket) for bucket in self.buckets]

    def ready(self, number):
        self.missing[number] -= 1
        while self.next < len(self.buckets) and self.missing[self.next] == 0:
            self.send(self.buckets[self.next])
            self.next += 1

    def send(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def forward(self, *args):
        return self.module(*args)

    def finish(self):
        for bucket, flat, request in self.sent:
            request.wait()
            parts = flat.split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad.copy_(part.view_as(p))
        self.begin()


ANSWERS.right("06.bucketed_ddp")(InBuckets)


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "a later one is not")
class CountersNotReset(InBuckets):
    """finish() sends what is left: from step 1 on that is all."""

    def finish(self):
        while self.next < len(self.buckets):
            self.send(self.buckets[self.next])
            self.next += 1
        missing = self.missing
        super().finish()
        self.missing = missing


@ANSWERS.right("06.bucketed_ddp")
class PromisedBuckets(InBuckets):
    def send(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
        future = dist.all_reduce(flat, async_op=True).get_future()
        self.sent.append((bucket, flat, future.then(lambda future: future.value())))


@ANSWERS.right("06.bucketed_ddp")
class InPlace(InBuckets):
    """Flat tensors that live as long as the model; hooks copy into them."""

    def __init__(self, module, bucket_bytes):
        super().__init__(module, bucket_bytes)
        sizes = [sum(p.numel() for p in bucket) for bucket in self.buckets]
        self.flats = [torch.empty(size) for size in sizes]

    def send(self, bucket):
        flat = self.flats[self.next]
        torch.cat([p.grad.reshape(-1) for p in bucket], out=flat)
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, flat, request in self.sent:
            request.wait()
            flat /= dist.get_world_size()
            at = 0
            for p in bucket:
                p.grad = flat[at : at + p.numel()].view_as(p).clone()
                at += p.numel()
        self.begin()


@ANSWERS.right("06.bucketed_ddp")
class AsksAllCountersInTurn(InBuckets):
    def ready(self, number):
        self.missing[number] -= 1
        for i in range(len(self.buckets)):
            if i == self.next and self.missing[i] == 0:
                self.send(self.buckets[i])
                self.next = i + 1


@ANSWERS.right("06.bucketed_ddp")
class GradientsAreViews(InBuckets):
    """After finish() each .grad is a part of its flat tensor."""

    def finish(self):
        while self.sent:
            bucket, flat, request = self.sent.pop()
            request.wait()
            for p in bucket:
                p.grad, flat = flat[: p.numel()].view(p.shape), flat[p.numel() :]
        self.begin()


# ------------------------------------------------------------------- 06.accumulate


def accumulated(model, micro_batches, quiet=lambda i, last: i < last):
    last = len(micro_batches) - 1
    for i, (inputs, labels) in enumerate(micro_batches):
        with model.no_sync() if quiet(i, last) else contextlib.nullcontext():
            (F.cross_entropy(model(inputs), labels) / (last + 1)).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "should go through the model once")
def looks_at_all_of_them_first(model, micro_batches):
    with torch.no_grad():
        for inputs, _ in micro_batches:
            model(inputs)
    accumulated(model, micro_batches)


@ANSWERS.wrong("06.accumulate", "wrong", "the caller's list is not what it was")
def pops(model, micro_batches):
    k = len(micro_batches)
    while micro_batches:
        inputs, labels = micro_batches.pop()
        with model.no_sync() if micro_batches else contextlib.nullcontext():
            (F.cross_entropy(model(inputs), labels) / k).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "the mean loss over all rows")
def always_seven_rows(model, micro_batches):
    k = len(micro_batches)
    for i, (inputs, labels) in enumerate(micro_batches, 1):
        model.require_backward_grad_sync = i == k
        losses = F.cross_entropy(model(inputs), labels, reduction="sum")
        losses.div(7 * k).backward()


@ANSWERS.right("06.accumulate")
def last_one_outside(model, micro_batches):
    *others, last = micro_batches
    with model.no_sync():
        for inputs, labels in others:
            (F.cross_entropy(model(inputs), labels) / len(micro_batches)).backward()
    inputs, labels = last
    (F.cross_entropy(model(inputs), labels) / len(micro_batches)).backward()


@ANSWERS.right("06.accumulate")
def by_switching(model, micro_batches):
    k = len(micro_batches)
    for i, (inputs, labels) in enumerate(micro_batches, 1):
        model.require_backward_grad_sync = i == k
        losses = F.cross_entropy(model(inputs), labels, reduction="sum")
        losses.div(len(labels) * k).backward()


@ANSWERS.right("06.accumulate")
def scaled_at_the_end(model, micro_batches):
    """The sum is divided where it lies, before the last one is added and sent."""
    k = len(micro_batches)
    with model.no_sync():
        for inputs, labels in micro_batches[:-1]:
            F.cross_entropy(model(inputs), labels).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= k
    inputs, labels = micro_batches[-1]
    F.cross_entropy(model(inputs), labels).backward(torch.tensor(1 / k))


@ANSWERS.right("06.accumulate")
def from_the_end(model, micro_batches):
    rows = sum(len(labels) for _, labels in micro_batches)
    for inputs, labels in reversed(micro_batches):
        is_last = labels is micro_batches[0][1]
        context = contextlib.nullcontext if is_last else model.no_sync
        with context():
            chosen = model(inputs).log_softmax(1)[range(len(labels)), labels]
            (-chosen.sum() / rows).backward()


test_wrong, test_right = ANSWERS.tests()


def train_copied():
    """The loss of each step, of the class with all three bugs."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    images, labels, _, _ = load_data("digits")
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    names = {"Wrapped": Wrapped, "dist": dist}
    exec(reference("06.spot_the_hook").given, names)
    model, losses = names["CopiedDDP"](nn.Sequential(nn.Flatten(), *layers)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(12):
        rows = slice(64 * step + rank, 64 * (step + 1), 2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        model.finish()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_copied_ddp_learns_nothing_as_the_exercise_says():
    with Ranks(2, backend="gloo", quiet=True) as two:
        losses = two.run(train_copied)[0]
    assert losses[6:] == pytest.approx([math.log(10)] * 6, abs=0.02)
