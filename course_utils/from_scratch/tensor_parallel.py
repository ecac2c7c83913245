"""Tensor parallelism: each rank has a slice of every large weight; all work at once.

    1  copy_to_ranks, sum_over_ranks     what stands before and behind the slices
    2  ColumnParallel, RowParallel       a linear layer, cut in two ways
    3  parallelize                       a whole model, by a plan
    4  VocabularyParallel, cross_entropy the first and the last layer
    5  gather_sequence, scatter_sequence the same bytes, and less memory between layers

    model = parallelize(model, {
        "blocks.*.perceptron.0": ColumnParallel,
        "blocks.*.perceptron.2": RowParallel,
    })

All ranks of the group build the same model, and get the same batch. Forward, loss and
gradients are then those of the whole model in one process; the gradient of a slice is
the slice of the gradient.

`x` is [N, T, width] below: N sequences of T symbols. Every rank of `group` makes each
call.

Sources: M. Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3 (f and g are its
names for the first pair of functions); V. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.2 (the second
pair).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

Group = ProcessGroup | None


# --------------------------------------------------- before and behind the slices
class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Give every rank's slice the same `x`. In the paper: f.

    Forward does nothing: all have x already. Each slice answers with a gradient of its
    own, so backward adds them up: one all-reduce of x's size.
    """
    return _CopyToRanks.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Add up what the slices have computed. In the paper: g.

    Forward is one all-reduce of x's size. Backward does nothing: a sum hands its
    gradient to every term, and all ranks have that gradient.
    """
    return _SumOverRanks.apply(x, group)


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


# ------------------------------------------------------ a linear layer, cut in two ways
class ColumnParallel(nn.Module):
    """A part of the outputs, from all inputs: [..., inputs] -> [..., outputs / n].

    The paper writes XA, and this cuts the columns of A. PyTorch's weight is A
    transposed, so here they are rows of `weight`.

    Args:
        linear: the whole layer, the same on every rank.
        sequence: whether x comes in slices of the sequence, which are gathered first.

    Raises:
        ValueError: the outputs cannot be shared out evenly.

    Cost: forward nothing, backward an all-reduce of x; with `sequence` an all-gather
    and a reduce-scatter, which together send the same bytes.
    """

    def __init__(
        self, linear: nn.Linear, group: Group = None, *, sequence: bool = False
    ) -> None:
        super().__init__()
        self.enter = partial(
            gather_sequence if sequence else copy_to_ranks, group=group
        )
        self.weight = slice_of(linear.weight, 0, group)
        self.bias = None if linear.bias is None else slice_of(linear.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs."""
        return F.linear(self.enter(x), self.weight, self.bias)


class RowParallel(nn.Module):
    """A part of each output, from a part of the inputs: the parts are added up.

    [..., inputs / n] -> [..., outputs]. The input is what a `ColumnParallel` gives, so
    between the two nothing needs to be sent. The bias is added once, to the sum.

    Args:
        linear: the whole layer, the same on every rank.
        sequence: whether each rank shall get a slice of the sequence only.

    Raises:
        ValueError: the inputs cannot be shared out evenly.

    Cost: forward an all-reduce of the output, backward nothing; with `sequence` a
    reduce-scatter and an all-gather, which together send the same bytes.
    """

    def __init__(
        self, linear: nn.Linear, group: Group = None, *, sequence: bool = False
    ) -> None:
        super().__init__()
        self.leave = partial(
            scatter_sequence if sequence else sum_over_ranks, group=group
        )
        # Of a slice of the sequence comes a part of the bias's gradient.
        self.whole = partial(copy_to_ranks, group=group) if sequence else _as_it_is
        self.weight = slice_of(linear.weight, 1, group)
        self.bias = _parameter(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """All outputs, or this rank's slice of the sequence."""
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.whole(self.bias)


def slice_of(whole: Tensor, dim: int, group: Group = None) -> nn.Parameter:
    """This rank's slice of a parameter that all ranks have, as one of its own.

    Raises:
        ValueError: the dimension cannot be shared out evenly.
    """
    n = dist.get_world_size(group)
    if whole.shape[dim] % n:
        raise ValueError(
            f"Dimension {dim} of {list(whole.shape)} has {whole.shape[dim]} elements: "
            f"expected a multiple of the {n} ranks."
        )
    mine = whole.detach().chunk(n, dim)[dist.get_rank(group)]
    return nn.Parameter(mine.clone(), requires_grad=whole.requires_grad)


def _parameter(whole: Tensor | None) -> nn.Parameter | None:
    if whole is None:
        return None
    return nn.Parameter(whole.detach().clone(), requires_grad=whole.requires_grad)


def _as_it_is(x: Tensor) -> Tensor:
    return x


# ------------------------------------------------------------- a whole model, by a plan
def parallelize(
    model: nn.Module, plan: Mapping[str, Callable[[nn.Module], nn.Module]]
) -> nn.Module:
    """Replace layers of the model by their slices, in place; return the model.

    Args:
        plan: from the name of a layer to what takes it and gives its slice. `*` stands
            for anything, as in {"blocks.*.mix": RowParallel}.

    Raises:
        ValueError: a name of the plan fits no layer.

    Attention is cut by heads: its queries, keys and values by `ColumnParallel`, if the
    outputs of a head lie together, and what mixes the heads by `RowParallel`.
    """
    unused = set(plan)
    for name, module in list(model.named_modules()):
        for pattern, make in plan.items():
            if fnmatchcase(name, pattern):
                unused.discard(pattern)
                model.set_submodule(name, make(module))
    if unused:
        names = ", ".join(name for name, _ in model.named_modules() if name)
        what = f"No layer is called {sorted(unused)[0]!r}"
        raise ValueError(f"{what}. There are: {names}.")
    return model


# ------------------------------------------------------------- the first and last layer
class VocabularyParallel(nn.Module):
    """An embedding, of which each rank has the rows of some symbols.

    int [N, T] -> [N, T, width]. A symbol of another rank gives zeros here, so the sum
    over the ranks has the row of the one that knows it.

    Raises:
        ValueError: the symbols cannot be shared out evenly.

    Cost: forward an all-reduce of the output, backward nothing; with `sequence` a
    reduce-scatter and an all-gather.
    """

    def __init__(
        self, embedding: nn.Embedding, group: Group = None, *, sequence: bool = False
    ) -> None:
        super().__init__()
        self.leave = partial(
            scatter_sequence if sequence else sum_over_ranks, group=group
        )
        self.weight = slice_of(embedding.weight, 0, group)
        self.first = dist.get_rank(group) * len(self.weight)

    def forward(self, symbols: Tensor) -> Tensor:
        """The rows of all symbols, or of this rank's slice of the sequence."""
        here, theirs = _mine_of(symbols, self.first, len(self.weight))
        rows = F.embedding(here, self.weight)
        return self.leave(rows.masked_fill(theirs[..., None], 0.0))


def cross_entropy(scores: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """The mean cross-entropy, if each rank has the scores of some symbols only.

    Args:
        scores: [M, vocabulary / n], what a `ColumnParallel` gives, in rank order.
        targets: int [M], in the whole vocabulary, the same on all ranks.

    Returns: the loss, the same on all ranks.

    Cost: three all-reduces of M numbers; gathering the scores would send vocabulary
    times as many.
    """
    # The largest score is subtracted so that exp() stays finite. It cancels out.
    largest = scores.detach().amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    scores = scores - largest[:, None]
    denominators = sum_over_ranks(scores.exp().sum(dim=-1), group)

    size = scores.shape[-1]
    here, theirs = _mine_of(targets, dist.get_rank(group) * size, size)
    found = scores.gather(-1, here[:, None]).squeeze(-1)
    found = sum_over_ranks(found.masked_fill(theirs, 0.0), group)
    return (denominators.log() - found).mean()


def _mine_of(symbols: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Their places among this rank's symbols, and which belong to another rank."""
    theirs = (symbols < first) | (symbols >= first + size)
    return (symbols - first).masked_fill(theirs, 0), theirs


# ---------------------------------------------------------------- sequence parallelism
class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


def gather_sequence(x: Tensor, group: Group = None) -> Tensor:
    """[N, T / n, width] -> [N, T, width]: from a slice on each rank, the whole on all.

    In place of `copy_to_ranks`. Forward is an all-gather, backward a reduce-scatter:
    the gradients of all slices are added up, and each rank keeps its part of the sum.
    """
    return _GatherSequence.apply(x, group)


def scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """[N, T, width] -> [N, T / n, width]: add up, and keep this rank's slice.

    In place of `sum_over_ranks`. Forward is a reduce-scatter, backward an all-gather.

    Raises:
        ValueError: the sequence cannot be shared out evenly.
    """
    return _ScatterSequence.apply(x, group)


class SequencePositions(nn.Module):
    """An embedding of places: int [T] -> [T / n, width], for a slice of the sequence.

    All ranks have it whole. Each finds a part of its gradient, and backward adds these
    parts up, in an all-reduce.
    """

    def __init__(self, embedding: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.weight, self.group = _parameter(embedding.weight), group

    def forward(self, places: Tensor) -> Tensor:
        """The rows of the places in this rank's slice."""
        mine = places.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        return F.embedding(mine, copy_to_ranks(self.weight, self.group))


class SequenceNorm(nn.Module):
    """A LayerNorm of slices of the sequence: all ranks have its parameters whole.

    Each finds a part of their gradients, and backward adds them up: two small
    all-reduces.
    """

    def __init__(self, norm: nn.LayerNorm, group: Group = None) -> None:
        super().__init__()
        self.weight, self.bias = _parameter(norm.weight), _parameter(norm.bias)
        self.group, self.eps = group, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Each symbol is normalized by itself, so nothing is sent."""
        weight = copy_to_ranks(self.weight, self.group)
        bias = copy_to_ranks(self.bias, self.group)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def _gathered(x: Tensor, group: Group) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, dim=1)


def _scattered(x: Tensor, group: Group) -> Tensor:
    n = dist.get_world_size(group)
    if x.shape[1] % n:
        raise ValueError(
            f"The sequence has {x.shape[1]} symbols: expected a multiple of the {n} "
            "ranks."
        )
    parts = [part.contiguous() for part in x.chunk(n, dim=1)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group)
    return mine
