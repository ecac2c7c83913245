"""Lesson 11: different right answers, and wrong ones that no near miss tells of."""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.answers import Answers

ANSWERS = Answers()

# ----------------------------------------------------------------------- 11.coordinates


@ANSWERS.right("11.coordinates")
def by_divmod(rank, sizes):
    places = []
    for size in sizes[::-1]:
        rank, place = divmod(rank, size)
        places.insert(0, place)
    return places


@ANSWERS.wrong("11.coordinates", "wrong", "with % and //")
def by_unravel(rank, sizes):
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(rank), sizes))


@ANSWERS.wrong("11.coordinates", "wrong", "with % and //")
def by_numpy(rank, sizes):
    return tuple(map(int, np.unravel_index(rank, sizes)))


ANSWERS.wrong("11.coordinates", "wrong", "the last place is rank % sizes[-1]")(
    lambda rank, sizes: tuple(rank for _ in sizes)
)

# ----------------------------------------------------------------------- 11.mesh_groups


@ANSWERS.right("11.mesh_groups")
def by_an_array(sizes, axis):
    ranks = torch.arange(math.prod(sizes)).view(*sizes)
    return ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()


@ANSWERS.right("11.mesh_groups")
def by_places(sizes, axis):
    groups = {}
    for rank in range(math.prod(sizes)):
        places = list(by_divmod(rank, sizes))
        places[axis] = 0
        groups.setdefault(tuple(places), []).append(rank)
    return tuple(groups.values())


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


SUM = "dist.all_reduce(squares)"
ANSWERS.edited(
    "11.norm",
    right=[
        ("squares.sqrt()", "math.sqrt(squares)"),
        ("return squares.sqrt()", "return squares.double().sqrt()"),
    ],
    wrong=[
        ("then over the ranks", SUM, "dist.all_reduce(squares, dist.ReduceOp.MAX)"),
        ("Norms do not add up", SUM, f"squares.sqrt_(); {SUM}; squares.square_()"),
    ],
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


ANSWERS.edited(
    "11.online_softmax",
    wrong=[
        ("both shrink", "torch.exp(largest - new)", "torch.ones_like(new)"),
        ("largest score so far", "return new, ", "return new + 1, "),
    ],
    crashed=[
        ("write `x[:, None]`", "shrunk[:, None]", "shrunk"),
        ("write `x[:, None]`", "new[:, None]", "new"),
        ("[queries, keys]", "keys.T", "keys", "scores.amax", "scores.sum(0).amax"),
    ],
)

# --------------------------------------------------------------------- 11.spot_the_mesh


@ANSWERS.right("11.spot_the_mesh")
def without_groups(gradient, tp):
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient)
    mine = parts[dist.get_rank() % tp :: tp]
    gradient.copy_(torch.stack(mine).mean(0))


@ANSWERS.right("11.spot_the_mesh")
def by_enumeration(gradient, tp):
    n = dist.get_world_size()
    columns = [list(range(column, n, tp)) for column in range(tp)]
    mine, _ = dist.new_subgroups_by_enumeration(columns)
    dist.all_reduce(gradient, group=mine)
    gradient /= dist.get_world_size(mine)


@ANSWERS.wrong("11.spot_the_mesh", "wrong", "Make the groups with `new_group`")
def by_pytorchs_mesh(gradient, tp):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp))
    dist.all_reduce(gradient, group=mesh.get_group(0))
    gradient /= mesh.size(0)


MADE = "made = dist.new_group(members)  # a call of all ranks, members or not"
BY_MEMBERS = MADE, "pass", "group = made", "group = dist.new_group(members)"
ANSWERS.edited("11.spot_the_mesh", stuck=[("is a call of *all* ranks", *BY_MEMBERS)])

test_wrong, test_right = ANSWERS.tests()
