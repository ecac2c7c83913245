"""Pipeline schedules: a stage of the model on each rank, and who works on what when.

    1  gpipe            all forwards, then all backwards
    2  one_f_one_b      a backward as soon as there can be one (1F1B)
    3  interleaved      the same with several smaller stages on each rank
    4  zero_bubble      1F1B with its backward cut in two

Each gives the actions of one rank, in order. `Pipeline` carries out those of the first
three: it computes, and sends activations forward and gradients back.

    pipeline = Pipeline(stages, shape=(8, 64), loss=F.cross_entropy)
    loss = pipeline.step(one_f_one_b(rank, n, 8), inputs, targets)
    optimizer.step()

All ranks make the same calls. The gradients are those of the whole model in one
process, if the loss is a mean and micro-batches have the same size.

For CPU tensors and gloo: every `isend` is away before its `recv` is called for. NCCL
carries out the calls of a pair of ranks in their order, and two sends that meet wait
for each other: there take `torch.distributed.pipelining`.

Sources: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al., SC21, arXiv
2104.04473, section 2.2 (1F1B, interleaved); Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv 2401.10241, section 2.1 (zero_bubble is its ZB-H1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Action(NamedTuple):
    """What a rank does next.

    Attributes:
        kind: "F", a forward; "B", a backward. Where the backward is cut in two, "B"
            finds the gradient of the stage's input, and "W" those of its weights.
        micro_batch: which one, from 0.
        chunk: which of the rank's stages, from 0.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        """Such as "F3", or "F3'" in the second chunk."""
        return f"{self.kind}{self.micro_batch}{chr(39) * self.chunk}"


# ---------------------------------------------------------------------- the schedules
def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards. At their meeting, all activations are kept."""
    _refuse(rank, ranks, micro_batches)
    return [Action(kind, i) for kind in "FB" for i in range(micro_batches)]


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """After a few forwards, a backward and a forward in turns.

    The last rank begins its first backward at once. One that has k ranks behind it
    does k more forwards before. So rank r keeps the activations of `ranks - r`
    micro-batches at most, however many there are. The bubble is that of `gpipe`.
    """
    _refuse(rank, ranks, micro_batches)
    return _in_turns(min(ranks - rank - 1, micro_batches), micro_batches, Action)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B with `chunks` stages on each rank: chunk c of rank r is stage c * ranks + r.

    Each stage is smaller, so the next rank begins earlier: the bubble is `chunks` times
    smaller, and there are about `chunks` times as many messages.

    Raises:
        ValueError: the number of micro-batches is no multiple of the ranks.
    """
    _refuse(rank, ranks, micro_batches)
    if chunks < 1:
        raise ValueError(f"Each rank has {chunks} stages: expected 1 or more.")
    if micro_batches % ranks:
        raise ValueError(
            f"There are {micro_batches} micro-batches: expected a multiple of the "
            f"{ranks} ranks."
        )
    total = micro_batches * chunks

    def action(kind: str, k: int) -> Action:
        """One micro-batch for each rank goes through a chunk, then through the next."""
        turn, place = divmod(k, ranks * chunks)
        chunk, i = divmod(place, ranks)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Action(kind, turn * ranks + i, chunk)

    before = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
    return _in_turns(min(before, total), total, action)


def zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """1F1B in which the gradients of the weights fill the gaps at the end.

    The rank before waits for the gradient of this rank's input alone. So "B" finds
    that one, and "W" those of the weights, `rank` backwards later.
    """
    done = []
    for action in one_f_one_b(rank, ranks, micro_batches):
        done.append(action)
        if action.kind == "B" and action.micro_batch >= rank:
            done.append(Action("W", action.micro_batch - rank))
    late = range(max(0, micro_batches - rank), micro_batches)
    return done + [Action("W", i) for i in late]


def _in_turns(
    before: int, total: int, action: Callable[[str, int], Action]
) -> list[Action]:
    """`before` forwards; a forward and a backward in turns; the other backwards."""
    actions = [action("F", k) for k in range(before)]
    for k in range(total - before):
        actions += [action("F", before + k), action("B", k)]
    return actions + [action("B", k) for k in range(total - before, total)]


def _refuse(rank: int, ranks: int, micro_batches: int) -> None:
    if not 0 <= rank < ranks or micro_batches < 1:
        raise ValueError(
            f"This is rank {rank} of {ranks}, with {micro_batches} micro-batches: "
            "expected a rank from 0 up, below the number of ranks, and 1 or more."
        )


# --------------------------------------------------------------------- carry them out
class Done(NamedTuple):
    """An action that was carried out, in seconds of `time.perf_counter()`.

    On Linux and macOS all processes of a machine share that clock.
    """

    action: Action
    start: float  # when what it needs was there
    stop: float


class Pipeline:
    """This rank's stages, and the messages between them.

    Args:
        stages: chunk 0, chunk 1, ... of this rank.
        shape: of what one stage hands to the next, for one micro-batch.
        loss: takes the last stage's output and the targets; gives a mean.
        dtype: of what is handed over.
        group: the ranks, in the order of the stages.

    Attributes:
        done: the actions of the last step, with their times.
        most_kept: for how many micro-batches this rank kept activations at once.

    Cost of a step: for each micro-batch one message at each boundary, forward and back.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        shape: Sequence[int],
        loss: Callable[[Tensor, Tensor], Tensor],
        dtype: torch.dtype = torch.float32,
        group: ProcessGroup | None = None,
    ) -> None:
        self.stages, self.loss, self.group = list(stages), loss, group
        self.shape, self.dtype = tuple(shape), dtype
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.done: list[Done] = []
        self.most_kept = 0

    def step(
        self,
        actions: Sequence[Action],
        inputs: Tensor | None,
        targets: Tensor | None,
    ) -> Tensor | None:
        """Forward and backward of a batch. Every rank calls it, with its own actions.

        Args:
            actions: as one of the schedules gives them, without "W".
            inputs: the whole batch, on the rank of the first stage.
            targets: the whole batch's, on the rank of the last stage.

        Returns: the loss, on the rank of the last stage; None on the others.
        """
        micro_batches = 1 + max(action.micro_batch for action in actions)
        self.micro_batches = micro_batches
        self.parts = _parts(inputs, micro_batches)
        self.targets = _parts(targets, micro_batches)
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.here: dict[int, Tensor] = {}
        self.sent: list[tuple[dist.Work, Tensor]] = []
        self.done, self.most_kept = [], 0
        losses = []
        for action in actions:
            stage = action.chunk * self.ranks + self.rank
            if action.kind == "F":
                x = self._input(stage, action.micro_batch)
                start = time.perf_counter()
                y = self.stages[action.chunk](x)
                if self._is_last(stage):
                    y = self.loss(y, self.targets[action.micro_batch]) / micro_batches
                    losses.append(y.detach())
                else:
                    self._send(y.detach(), stage, stage + 1, action.micro_batch)
                self.kept[stage, action.micro_batch] = x, y
                self.most_kept = max(self.most_kept, len(self.kept))
            else:
                x, y = self.kept.pop((stage, action.micro_batch))
                grad = None
                if not self._is_last(stage):
                    grad = self._receive(stage + 1, stage, action.micro_batch)
                start = time.perf_counter()
                torch.autograd.backward(y, grad)
                if stage > 0:
                    self._send(x.grad, stage, stage - 1, action.micro_batch)
            self.done.append(Done(action, start, time.perf_counter()))
        for request, _ in self.sent:
            request.wait()
        return sum(losses) if losses else None

    def _is_last(self, stage: int) -> bool:
        return stage == self.ranks * len(self.stages) - 1

    def _input(self, stage: int, micro_batch: int) -> Tensor:
        if stage == 0:
            return self.parts[micro_batch]
        return self._receive(stage - 1, stage, micro_batch).requires_grad_()

    def _send(self, x: Tensor, stage: int, to: int, micro_batch: int) -> None:
        """From one stage to another. Nobody waits: two may send to each other."""
        tag = self._tag(stage, to, micro_batch)
        if to % self.ranks == self.rank:  # both stages are on this rank
            self.here[tag] = x
            return
        x = x.contiguous()
        request = dist.isend(x, group=self.group, group_dst=to % self.ranks, tag=tag)
        self.sent.append((request, x))  # x must stay until it has gone

    def _receive(self, stage: int, to: int, micro_batch: int) -> Tensor:
        tag = self._tag(stage, to, micro_batch)
        if stage % self.ranks == self.rank:
            return self.here.pop(tag)
        x = torch.empty(self.shape, dtype=self.dtype)
        dist.recv(x, group=self.group, group_src=stage % self.ranks, tag=tag)
        return x

    def _tag(self, stage: int, to: int, micro_batch: int) -> int:
        """A number for each message: several may be on the way between two ranks."""
        return (2 * stage + (to < stage)) * self.micro_batches + micro_batch


def _parts(batch: Tensor | None, micro_batches: int) -> list[Tensor]:
    """The micro-batches of a batch; none where there is none.

    Raises:
        ValueError: they would not have the same size, so their mean would not be that
            of the batch.
    """
    if batch is None:
        return []
    if len(batch) % micro_batches:
        raise ValueError(
            f"The batch has {len(batch)} samples: expected a multiple of the "
            f"{micro_batches} micro-batches."
        )
    return list(batch.chunk(micro_batches))
