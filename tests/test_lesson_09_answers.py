"""Lesson 09: different right answers, and wrong ones that no near miss tells of."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch import tensor_parallel
from tests.answers import Answers

ANSWERS = Answers()


def me():
    return dist.get_rank(), dist.get_world_size()


class CopyToRanks(torch.autograd.Function):
    """f gives x itself."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        total = grad + 0
        dist.all_reduce(total)
        return total


class InPlace(CopyToRanks):
    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad


class NoReturn(CopyToRanks):
    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad.clone())


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = part.clone()
        dist.all_reduce(parts)
        return parts

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


# ---------------------------------------------------------------------- 09.f_and_g


@ANSWERS.right("09.f_and_g")
def x_itself(x, compute):
    return SumOverRanks.apply(compute(CopyToRanks.apply(x)))


@ANSWERS.right("09.f_and_g")
def by_a_hook(x, compute):
    """f as a hook on a view of x."""

    def summed(grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total

    view = x.view_as(x)
    view.register_hook(summed)
    return SumOverRanks.apply(compute(view))


@ANSWERS.wrong("09.f_and_g", "wrong", "a gradient that others still use")
def in_place(x, compute):
    """Wrong also beside a g whose backward gives a copy."""
    return SumOverRanks.apply(compute(InPlace.apply(x)))


@ANSWERS.wrong("09.f_and_g", "wrong", "no gradient arrives")
def backward_without_return(x, compute):
    return SumOverRanks.apply(compute(NoReturn.apply(x)))


@ANSWERS.wrong("09.f_and_g", "crashed", "The result has no graph")
def without_a_graph(x, compute):
    with torch.no_grad():
        return SumOverRanks.apply(compute(x))


@ANSWERS.wrong("09.f_and_g", "wrong", "It would work: but it is what you build")
def the_courses_own(x, compute):
    part = compute(tensor_parallel.copy_to_ranks(x))
    return tensor_parallel.sum_over_ranks(part)


ANSWERS.edited(
    "09.f_and_g",
    wrong=[
        ("f's forward gives x as it is", "return x\n", "return x + x\n"),
        ("g has overwritten the part", "total = part.clone()", "total = part"),
        ("nothing to divide", "grad  # as it is", "grad / dist.get_world_size()"),
        ("g's forward must give the sum", "total\n\n    @", "part + 0\n\n    @"),
    ],
)

# ------------------------------------------------------------------ 09.column_slice

A_VIEW = "keeps more than its slices", ".clone())  # weight", ")"


@ANSWERS.right("09.column_slice")
class LinearInside(nn.Module):
    """The slice as an nn.Linear of its own, whose parameters it shows."""

    def __init__(self, linear):
        super().__init__()
        (rank, n), size = me(), linear.out_features // me()[1]
        self.linear = nn.Linear(linear.in_features, size)
        with torch.no_grad():
            self.linear.weight.copy_(linear.weight.chunk(n)[rank])
            self.linear.bias.copy_(linear.bias.chunk(n)[rank])
        self.weight, self.bias = self.linear.weight, self.linear.bias

    def forward(self, x):
        return self.linear(CopyToRanks.apply(x))


OURS = "return F.linear(CopyToRanks.apply(x), self.weight, self.bias)"
GATHERED = """y = F.linear(CopyToRanks.apply(x), self.weight, self.bias)
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y.detach())
        parts[dist.get_rank()] = y
        return torch.cat(parts, -1)"""
F_OF_X = "CopyToRanks.apply(x)"
SUMMED = f"SumOverRanks.apply({F_OF_X} / dist.get_world_size())"
ANSWERS.edited(
    "09.column_slice",
    right=[("linear.weight.chunk(n)", "linear.weight.tensor_split(n)")],
    wrong=[
        ("Is each slice an", "nn.Parameter(mine.detach().clone())", "mine.clone()"),
        ("more is sent than nothing in the forward", F_OF_X, SUMMED),
        ("everything before this layer", F_OF_X, "x"),
        A_VIEW,
        ("keeps more than its slices", "[rank].clone()", "[rank]"),  # of the bias
    ],
    crashed=[
        ("no more and no fewer", OURS, GATHERED),
        ("Cut both weight and bias", "bias.detach().chunk(n)[rank]", "bias.detach()"),
        ("Keep the slice as `self.weight`", "self.weight", "self.w"),
        ("That cuts the inputs", "weight.chunk(n)", "weight.chunk(n, 1)"),
    ],
)

# --------------------------------------------------------------------- 09.row_slice

SUM = "SumOverRanks.apply(F.linear(x, self.weight)) + self.bias"

ON_RANK_0 = (
    "SumOverRanks.apply(F.linear(x, self.weight, self.bias * (dist.get_rank() == 0)))"
)
CUT_AGAIN = "F.linear(x.chunk(dist.get_world_size(), -1)[0],"
ANSWERS.edited(
    "09.row_slice",
    right=[(SUM, "self.bias + SumOverRanks.apply(x @ self.weight.T)")],
    wrong=[
        ("Every rank has the whole bias", SUM, ON_RANK_0),
        ("no gradient arrives", "F.linear(x,", "F.linear(x.detach(),"),
        ("f would add up", "F.linear(x,", "F.linear(CopyToRanks.apply(x),"),
        A_VIEW,
    ],
    crashed=[
        ("Of the weight, cut dimension 1", "chunk(n, 1)", "chunk(n)"),
        ("x arrives already cut", "F.linear(x,", CUT_AGAIN),
    ],
)

# -------------------------------------------------------------- 09.vocabulary_slice


@ANSWERS.right("09.vocabulary_slice")
class OneHot(nn.Module):
    """As the linear layer that it is: a row slice."""

    def __init__(self, embedding):
        super().__init__()
        rank, n = me()
        self.weight = nn.Parameter(embedding.weight.detach().chunk(n)[rank].clone())

    def forward(self, symbols):
        (rank, n), size = me(), len(self.weight)
        ones = F.one_hot(symbols, n * size).float()
        return SumOverRanks.apply(
            ones[..., rank * size : (rank + 1) * size] @ self.weight
        )


CLAMPED = "here.clamp(0, size - 1)"
ANSWERS.edited(
    "09.vocabulary_slice",
    right=[(CLAMPED, "torch.where(mine, here, 0)")],
    wrong=[
        ("The symbols have changed", "s - self.first", "s.sub_(self.first)"),
        ("and then the sum", "SumOverRanks.apply(rows", "(rows"),
        A_VIEW,
    ],
    crashed=[
        ("F.embedding wants 0 to size - 1", CLAMPED, "symbols"),
        ("lacks the last dimension", "rows * mine[..., None]", "rows * mine"),
    ],
)


@ANSWERS.wrong("09.vocabulary_slice", "wrong", "Does a rank keep, or get")
class WholeTableKept(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.table = [embedding.weight.detach().clone()]
        own = self.table[0].chunk(dist.get_world_size())[dist.get_rank()]
        self.weight = nn.Parameter(own.clone())

    def forward(self, symbols):
        rows = list(self.table[0].chunk(dist.get_world_size()))
        rows[dist.get_rank()] = self.weight
        return F.embedding(symbols, torch.cat(rows))


# ----------------------------------------------------------------- 09.cross_entropy


@ANSWERS.right("09.cross_entropy")
def of_logarithms(scores, targets):
    """log-sum-exp of each rank, and then of the ranks."""
    (rank, n), size = me(), scores.shape[-1]
    mine = scores.logsumexp(-1)
    largest = mine.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    total = SumOverRanks.apply((mine - largest).exp()).log() + largest
    ones = F.one_hot(targets, n * size)[:, rank * size : (rank + 1) * size]
    return (total - SumOverRanks.apply((scores * ones).sum(-1))).mean()


@ANSWERS.wrong("09.cross_entropy", "wrong", "but the scores were gathered")
def gathered(scores, targets):
    rank, n = me()
    parts = [torch.empty_like(scores) for _ in range(n)]
    dist.all_gather(parts, scores.detach())
    parts[rank] = scores
    return F.cross_entropy(torch.cat(parts, -1), targets)


TOTAL = "SumOverRanks.apply(scores.exp().sum(-1))"
IN_PLACE = "scores.data -= largest[:, None]; scores = scores + 0"
ANSWERS.edited(
    "09.cross_entropy",
    wrong=[
        ("which autograd follows", TOTAL, f"{TOTAL}.detach()"),
        ("need only their own", "scores.gather(", "CopyToRanks.apply(scores).gather("),
        ("It cancels out", "scores = scores - largest[:, None]", "pass"),
        ("over the whole vocabulary", "total.log() - found", "total - found"),
        ("Work on copies", "scores = scores - largest[:, None]", IN_PLACE),
    ],
)

# ------------------------------------------------------------ 09.spot_the_attention

CUT = "fused.view(3, -1, width).chunk(n, 1)[rank].reshape(-1, width)"

OF_EACH_KIND = "torch.cat([kind.chunk(n)[rank] for kind in {}])"
QUERIES_LAST = OF_EACH_KIND.format("(*fused.chunk(3)[1:], fused[:width])")
HEADS = "fused.view(3, heads, -1, width).transpose(0, 1).chunk(n)[rank]"
HEADS_FIRST = (
    *(CUT, f"{HEADS}.reshape(-1, width)"),
    *(".chunk(3, -1)", ".unflatten(-1, (-1, 3, self.head_size)).unbind(-2)"),
    *(
        "part.unflatten(-1, (-1, self.head_size)) for part in parts",
        "part for part in parts",
    ),
)
IN_THREE_PARAMETERS = (
    *(
        "self.fused = nn.Parameter(mine.clone())",
        "self.q, self.k, self.v = map(nn.Parameter, mine.clone().chunk(3))",
    ),
    *("self.fused)", "torch.cat([self.q, self.k, self.v]))"),
)
ANSWERS.edited(
    "09.spot_the_attention",
    right=[
        (CUT, OF_EACH_KIND.format("fused.chunk(3)")),
        HEADS_FIRST,
        IN_THREE_PARAMETERS,
    ],
    wrong=[
        ("split into queries, keys and values as they lie", CUT, QUERIES_LAST),
        ("everything before this layer", F_OF_X, "x.clone()"),
        ("what comes out of mix, once", "(2), self.mix))", "(2), self.mix)) / 2"),
    ],
    crashed=[
        ("which are its outputs", CUT, "fused.chunk(n, 1)[rank]"),
        ("which are its inputs", "mix.chunk(n, 1)[rank]", "mix.chunk(n, 0)[rank]"),
    ],
)

test_wrong, test_right = ANSWERS.tests()
