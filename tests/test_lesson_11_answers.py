"""Lesson 11: different right answers, and wrong ones that no near miss tells of."""

import math

import torch
import torch.distributed as dist

from tests.answers import Answers, Edited

ANSWERS = Answers()

# --------------------------------------------------------------------- 11.predict_group

ANSWERS.wrong("11.predict_group", "wrong", "two stages of one model")(5)
ANSWERS.wrong("11.predict_group", "wrong", "Only dp differs")(3)
for number in (9, "9", torch.tensor(9)):
    ANSWERS.right("11.predict_group")(number)

# ----------------------------------------------------------------------- 11.coordinates


@ANSWERS.right("11.coordinates")
def by_unravel(rank, sizes):
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(rank), sizes))


@ANSWERS.right("11.coordinates")
def by_products(rank, sizes):
    return tuple(
        rank // math.prod(sizes[axis + 1 :]) % size for axis, size in enumerate(sizes)
    )


ANSWERS.wrong("11.coordinates", "wrong", "the last place is rank % sizes[-1]")(
    lambda rank, sizes: tuple(rank for _ in sizes)
)

# ----------------------------------------------------------------------- 11.mesh_groups


@ANSWERS.right("11.mesh_groups")
def by_an_array(sizes, axis):
    ranks = torch.arange(math.prod(sizes)).view(*sizes)
    return ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()


ANSWERS.wrong("11.mesh_groups", "wrong", "Every rank is in exactly one group")(
    lambda sizes, axis: [list(range(math.prod(sizes)))]
)

# ------------------------------------------------------------------------------ 11.norm


@ANSWERS.right("11.norm")
def by_gathering(sliced, whole):
    mine = torch.cat([g.flatten() for g in sliced])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat([*parts, *(g.flatten() for g in whole)]).norm()


ANSWERS.right("11.norm")(Edited("squares.sqrt()", "math.sqrt(squares)"))
ANSWERS.wrong("11.norm", "wrong", "then the root")(
    Edited("dist.all_reduce(squares)", "dist.all_reduce(squares, dist.ReduceOp.MAX)")
)

# -------------------------------------------------------------------- 11.online_softmax


@ANSWERS.right("11.online_softmax")
def by_log_sum_exp(largest, total, mixed, queries, keys, values):
    scores = queries @ keys.mT
    new = torch.cat([largest[:, None], scores], dim=1).max(dim=1).values
    old = (largest - new).exp()
    weights = (scores - new.unsqueeze(1)).exp()
    return [new, old * total + weights.sum(1), old[:, None] * mixed + weights @ values]


@ANSWERS.wrong("11.online_softmax", "wrong", "both shrink by exp(old m - new m)")
def the_last_piece(largest, total, mixed, queries, keys, values):
    scores = queries @ keys.T
    weights = scores.softmax(dim=1)
    return scores.amax(1), weights.sum(1), weights @ values


ANSWERS.wrong("11.online_softmax", "crashed", "[queries, keys]")(
    Edited("keys.T", "keys", "scores.amax", "scores.sum(0).amax")
)

# --------------------------------------------------------------------- 11.spot_the_mesh


@ANSWERS.right("11.spot_the_mesh")
def without_groups(gradient, tp):
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient)
    mine = parts[dist.get_rank() % tp :: tp]
    gradient.copy_(torch.stack(mine).mean(0))


ANSWERS.wrong("11.spot_the_mesh", "stuck", "is a call of *all* ranks")(
    Edited(
        "        made = dist.new_group(members)"
        "  # a call of all ranks, members or not\n"
        "        if rank in members:\n"
        "            group = made\n",
        "        if rank in members:\n            group = dist.new_group(members)\n",
    )
)

test_wrong, test_right = ANSWERS.tests()
