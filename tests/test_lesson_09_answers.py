"""Lesson 09: different right answers, and wrong ones that no near miss tells of."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as tracked
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch import tensor_parallel
from tests.answers import Answers, Edited

ANSWERS = Answers()


def me():
    return dist.get_rank(), dist.get_world_size()


class CopyToRanks(torch.autograd.Function):
    """As many write it: in place where that is safe."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = part.clone()
        dist.all_reduce(parts)
        return parts

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


# ----------------------------------------------------------------- 09.predict_bytes

ANSWERS.wrong("09.predict_bytes", "wrong", "There are 32.")(70)
ANSWERS.wrong("09.predict_bytes", "wrong", "what does each send")(99)
ANSWERS.right("09.predict_bytes")(2240)

# ---------------------------------------------------------------------- 09.f_and_g


@ANSWERS.right("09.f_and_g")
def in_place_backward(x, compute):
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


@ANSWERS.wrong("09.f_and_g", "wrong", "was summed, and is n times too large")
def with_pytorchs_tracked_all_reduce(x, compute):
    """Its backward is an all-reduce, too."""
    return tracked.all_reduce(compute(CopyToRanks.apply(x)))


@ANSWERS.wrong("09.f_and_g", "wrong", "a part. Sum over the ranks")
def without_f(x, compute):
    return SumOverRanks.apply(compute(x))


@ANSWERS.wrong("09.f_and_g", "crashed", "The result has no graph")
def without_a_graph(x, compute):
    with torch.no_grad():
        return SumOverRanks.apply(compute(x))


@ANSWERS.wrong("09.f_and_g", "wrong", "It would work: but it is what you build")
def the_courses_own(x, compute):
    part = compute(tensor_parallel.copy_to_ranks(x))
    return tensor_parallel.sum_over_ranks(part)


@ANSWERS.wrong("09.f_and_g", "not attempted", "It still raises NotImplementedError")
def stub(x, compute):
    raise NotImplementedError


# ------------------------------------------------------------------ 09.column_slice

ANSWERS.right("09.column_slice")(
    Edited(
        "mine = linear.weight.chunk(n)[rank]",
        "mine = linear.weight.tensor_split(n)[rank]",
    )
)


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


ANSWERS.wrong("09.column_slice", "crashed", "Cut both weight and bias")(
    Edited("linear.bias.detach().chunk(n)[rank]", "linear.bias.detach()")
)
ANSWERS.wrong("09.column_slice", "crashed", "Keep the slice as `self.weight`")(
    Edited("self.weight", "self.w")
)
ANSWERS.wrong("09.column_slice", "wrong", "more is sent than nothing in the forward")(
    Edited(
        "CopyToRanks.apply(x)",
        "SumOverRanks.apply(CopyToRanks.apply(x) / dist.get_world_size())",
    )
)

# --------------------------------------------------------------------- 09.row_slice

SUM = "SumOverRanks.apply(F.linear(x, self.weight)) + self.bias"

for new in (
    "self.bias + SumOverRanks.apply(x @ self.weight.T)",
    "torch.add(SumOverRanks.apply(F.linear(x, self.weight)), self.bias)",
):
    ANSWERS.right("09.row_slice")(Edited(SUM, new))
ANSWERS.wrong("09.row_slice", "wrong", "Every rank has the whole bias")(
    Edited(
        SUM,
        "SumOverRanks.apply(F.linear(x, self.weight, self.bias if dist.get_rank() == 0 "
        "else self.bias * 0))",
    )
)
ANSWERS.wrong("09.row_slice", "crashed", "cut dimension 1 of weight")(
    Edited("chunk(n, 1)", "chunk(n)")
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


ANSWERS.right("09.vocabulary_slice")(
    Edited(
        "rows = F.embedding(here.clamp(0, size - 1), self.weight)",
        "rows = F.embedding(torch.where(mine, here, 0), self.weight)",
    )
)
ANSWERS.wrong("09.vocabulary_slice", "crashed", "F.embedding wants 0 to size - 1")(
    Edited("here.clamp(0, size - 1)", "symbols")
)
ANSWERS.wrong("09.vocabulary_slice", "wrong", "The symbols have changed")(
    Edited("here, size = symbols - self.first", "here, size = symbols.sub_(self.first)")
)

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


@ANSWERS.right("09.cross_entropy")
def two_in_one_message(scores, targets):
    (rank, _), size = me(), scores.shape[-1]
    largest = scores.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    shifted, here = scores - largest[:, None], targets - rank * size
    mine = (here >= 0) & (here < size)
    found = shifted[torch.arange(len(here)), here.clamp(0, size - 1)] * mine
    both = SumOverRanks.apply(torch.stack([shifted.exp().sum(-1), found]))
    return (both[0].log() - both[1]).mean()


@ANSWERS.wrong("09.cross_entropy", "wrong", "but the scores were gathered")
def gathered(scores, targets):
    rank, n = me()
    parts = [torch.empty_like(scores) for _ in range(n)]
    dist.all_gather(parts, scores.detach())
    parts[rank] = scores
    return F.cross_entropy(torch.cat(parts, -1), targets)


@ANSWERS.wrong("09.cross_entropy", "wrong", "autograd does not know")
def denominator_without_a_graph(scores, targets):
    (rank, _), size = me(), scores.shape[-1]
    total = scores.detach().double().exp().sum(-1)
    dist.all_reduce(total)
    here = targets - rank * size
    mine = (here >= 0) & (here < size)
    found = scores.gather(-1, here.clamp(0, size - 1)[:, None])[:, 0] * mine
    return (total.log().float() - SumOverRanks.apply(found)).mean()


ANSWERS.wrong("09.cross_entropy", "wrong", "over the whole vocabulary")(
    Edited("total.log() - found", "total - found")
)

# ------------------------------------------------------------ 09.spot_the_attention

CUT = "fused.view(3, -1, width).chunk(n, 1)[rank].reshape(-1, width)"

for new in (
    "torch.cat([kind.chunk(n)[rank] for kind in fused.chunk(3)])",
    "fused.view(3, n, -1, width)[:, rank].reshape(-1, width)",
):
    ANSWERS.right("09.spot_the_attention")(Edited(CUT, new))
ANSWERS.wrong(
    "09.spot_the_attention", "wrong", "Write down for two ranks and two heads"
)(
    Edited(
        CUT,
        "torch.cat([k.chunk(n)[rank] for k in (*fused.chunk(3)[1:], fused[:width])])",
    )
)
ANSWERS.wrong("09.spot_the_attention", "wrong", "everything before this layer")(
    Edited("CopyToRanks.apply(x)", "x.clone()")
)

test_wrong, test_right = ANSWERS.tests()
