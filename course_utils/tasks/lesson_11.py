"""Lesson 11, meshes: the tasks of its exercise."""

import math
import operator

import torch

from course_utils.questions.lesson_11 import PREDICT_GROUP
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.task import OUT_OF_STEP, Miss, Task

# ------------------------------------------------------------------------- coordinates

COORDINATES = Task(
    id="11.coordinates",
    title="A place in the mesh",
    stars=1,
    where="here",
    cases=((13, (2, 2, 4)), (5, (2, 4)), (0, (3,)), (23, (2, 3, 4)), (7, (8, 1))),
    misses=(
        Miss(
            "reversed(sizes)",
            "sizes",
            "The *last* axis changes fastest: begin with its size.",
        ),
        Miss("places[::-1]", "places", "The order is that of the axes, not reversed."),
        Miss(
            "rank % size",
            "rank // size",
            "The remainder is the place along this axis. The quotient goes on to the "
            "axes before it.",
        ),
        Miss("rank //= size", "rank -= size", "Divide, without a remainder."),
    ),
    forbids=("torch.unravel_index", "numpy.unravel_index"),
    instead="Compute the places with % and //.",
    otherwise="As a number has digits: the last place is rank % sizes[-1], and what is "
    "left, rank // sizes[-1], has the places before it.",
    hints=(
        "How do you find the digits of a number?",
        "From the last axis to the first: the remainder is the place, the quotient "
        "goes on.",
        "  for size in reversed(sizes):\n"
        "      places.append(rank % ...)\n"
        "      rank //= ...\n"
        "  return tuple(...)",
    ),
)

# ------------------------------------------------------------------------- mesh_groups

IGNORES_THE_AXIS = (
    "These are groups of ranks that follow each other, as along the last axis. Along "
    "this axis neighbours are further apart."
)
ANY_ORDER, IN_ORDER = "the groups, in any order", "the groups, in their order"


def observe_groups(answer, sizes, axis):
    made = answer(sizes, axis)
    try:
        groups = [[operator.index(rank) for rank in group] for group in made]
    except TypeError:
        return made
    return {ANY_ORDER: sorted(map(sorted, groups)), IN_ORDER: groups}


MESH_GROUPS = Task(
    id="11.mesh_groups",
    title="The groups of an axis",
    stars=2,
    where="here",
    observe=observe_groups,
    cases=(
        ((2, 2, 3), 1),  # axes before and behind, of other sizes
        ((2, 3, 2), 0),
        ((2, 4), 0),
        ((2, 4), 1),
        ((3, 1), 1),
        ((4,), 0),
    ),
    misses=(
        Miss("math.prod(sizes[axis + 1 :])", "1", IGNORES_THE_AXIS),
        Miss("step = ", "axis = len(sizes) - 1\n    step = ", IGNORES_THE_AXIS),
        Miss(
            "sizes[axis + 1 :]",
            "sizes[axis:]",
            "Neighbours along an axis are as far apart as the product of the sizes "
            "*after* it.",
        ),
        Miss(
            "sizes[axis + 1 :]",
            "sizes[:axis]",
            "How far neighbours are apart depends on the axes behind, not on those "
            "before.",
        ),
        Miss(
            "if first // step % sizes[axis] == 0",
            "",
            "Every rank begins a group here. A group begins where the place along the "
            "axis is 0.",
        ),
        Miss(
            "range(sizes[axis])", "range(len(sizes))", "A group has sizes[axis] ranks."
        ),
    ),
    because={
        IN_ORDER: "The groups are right, their order is not. The ranks of a group go "
        "up, and so do the first ranks of the groups. (With tensors, move the axis to "
        "the end by `movedim`; do not swap it with the last one.)",
    },
    otherwise="A group along an axis: its ranks are a fixed step apart, the product of "
    "the sizes behind that axis. Every rank is in exactly one group.",
    hints=(
        "How far apart are two ranks that are neighbours along this axis?",
        "The step is the product of the sizes behind the axis. A group begins at each "
        "rank whose place along the axis is 0.",
        "  step = math.prod(sizes[...])\n"
        "  return [\n"
        "      [first + k * step for k in range(...)]\n"
        "      for first in range(...)\n"
        "      if ...\n"
        "  ]",
    ),
)

# ----------------------------------------------------------------------------- the norm


def slices_and_whole(case, rank, n):
    """Gradients of slices, which differ from rank to rank, and of whole parameters."""
    sliced = [whole_numbers((case, 2), rank), whole_numbers((3,), rank + 10)]
    whole = [whole_numbers((case,), 50), whole_numbers((2, 2), 51)]
    return sliced, whole if case > 1 else []


def in_float32(value):
    """A norm may as well be computed, and returned, in float64."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_float else value


NORM = Task(
    id="11.norm",
    title="The norm of a sliced model",
    stars=2,
    cases=(2, 5, 1),
    inputs=slices_and_whole,
    observe=lambda answer, sliced, whole: in_float32(answer(sliced, whole)),
    misses=(
        Miss(
            "dist.all_reduce(squares)",
            "pass",
            "That is the norm of what this rank has. Add up the squares of the slices "
            "of all ranks.",
        ),
        Miss(
            "    squares = squares + sum",
            "    squares = squares + dist.get_world_size() * sum",
            "The whole parameters are counted once for each rank. They are the same "
            "ones everywhere: once is enough.",
        ),
        Miss(
            "squares.sqrt()", "squares", "These are the squares. The norm is the root."
        ),
        Miss(
            " for g in whole)",
            " for g in whole[:0])",
            "The parameters that every rank has whole are missing.",
        ),
    ),
    errors={
        OUT_OF_STEP: "All ranks make the same calls: one all-reduce of one number.",
    },
    otherwise="Norms do not add up, their squares do. Add up the squares of this "
    "rank's slices, then over the ranks; then the squares of the whole parameters, "
    "once; and take the root of the sum.",
    hints=(
        "Which numbers does only this rank know, and which do all ranks know?",
        "All-reduce the sum of the squares of slices. Then add that of the whole ones.",
        "  squares = sum(... for g in sliced)\n"
        "  dist.all_reduce(...)\n"
        "  squares = squares + ...\n"
        "  return ...",
    ),
)

# ------------------------------------------------------------------- the online softmax

PIECES, LARGEST = "attention over all pieces", "the largest scores"


def a_sequence(case):
    generator = torch.Generator().manual_seed(sum(case))
    length, pieces, scale = case
    width = 3 + pieces
    queries = scale * torch.randn(2 + pieces, width, generator=generator)
    keys = torch.randn(length, width, generator=generator)
    values = torch.randn(length, 1 + pieces, generator=generator)
    return queries, keys.chunk(pieces), values.chunk(pieces)


def observe_softmax(answer, length, pieces, scale):
    """Hand over the pieces one by one, as they come around in a ring."""
    queries, keys, values = a_sequence((length, pieces, scale))
    n = len(queries)
    state = torch.full((n,), -math.inf), torch.zeros(n), torch.zeros(n, 1 + pieces)
    for k, v in zip(keys, values, strict=True):
        state = answer(*state, queries, k, v)
        if state is None:
            return None
    largest, total, mixed = state
    return {PIECES: in_float32(mixed / total[:, None]), LARGEST: in_float32(largest)}


ONLINE_SOFTMAX = Task(
    id="11.online_softmax",
    title="Attention, piece by piece",
    stars=3,
    where="here",
    cases=((6, 3, 1), (5, 1, 1), (8, 4, 30), (4, 2, 3)),
    observe=observe_softmax,
    misses=(
        Miss(
            "total * shrunk +",
            "total +",
            "The old sum belongs to the old largest score. Rescale it to the new one.",
        ),
        Miss(
            "mixed * shrunk[:, None] +",
            "mixed +",
            "What was mixed so far belongs to the old largest score. Rescale it, too.",
        ),
        Miss(
            "torch.maximum(largest, scores.amax(dim=1))",
            "scores.amax(dim=1)",
            "That is the largest score of this piece. Subtract the largest *so far*: "
            "the larger of `largest` and this piece's. Otherwise exp() may overflow.",
        ),
        Miss(
            "scores - new[:, None]",
            "scores",
            "Subtract the largest score before exp(): large scores overflow.",
        ),
        Miss(
            "return new, total, mixed",
            "return new, total, mixed / total[:, None]",
            "The caller divides at the end: return `mixed` as a sum.",
        ),
        Miss(
            "weights @ values",
            "weights.softmax(1) @ values",
            (
                "A softmax of one piece forgets the others. Keep sums of exp(score - "
                "largest); who calls you divides at the end."
            ),
        ),
    ),
    because={
        LARGEST: "The attention is right. Return each query's largest score so far, "
        "too.",
    },
    errors={
        "cannot unpack": "Return three things: the largest score, the sum of the "
        "weights, and the sum of the weighted values.",
        "mat1 and mat2 shapes": "Scores are `queries @ keys.T`: [queries, keys].",
        "must match the size of tensor": "`largest` and `total` have one number for "
        "each query. To use one with a table that has a row for each query, write "
        "`x[:, None]`. A sum over the keys is `sum(dim=1)`. Return largest, total, "
        "mixed.",
    },
    otherwise="With m each query's own largest score so far: total is the sum of "
    "exp(score - m), and mixed that of exp(score - m) times the value. When m grows, "
    "both shrink by exp(old m - new m).",
    hints=(
        "What changes in the old sums when a larger score arrives?",
        "new = max(old, this piece's). Multiply the old sums by exp(old - new), then "
        "add this piece's, with exp(scores - new).",
        "  scores = queries @ keys.T\n"
        "  new = torch.maximum(...)\n"
        "  shrunk = torch.exp(...)\n"
        "  weights = torch.exp(...)\n"
        "  return new, total * shrunk + ..., mixed * ... + ...",
    ),
)

# ------------------------------------------------------------------------ spot_the_mesh


def a_gradient(case, rank, n):
    """A gradient, and a number of slices that divides the ranks."""
    return whole_numbers((case[0],), rank), case[1] if n % case[1] == 0 else 1


SPOT_MESH = Task(
    id="11.spot_the_mesh",
    title="Spot the bugs in a mesh",
    stars=2,
    ranks=(4, 1, 2, 6),
    cases=((3, 2), (5, 1), (2, 3)),
    inputs=a_gradient,
    keeps_inputs=False,
    observe=lambda answer, gradient, tp: {
        "the gradient": (answer(gradient, tp), gradient)[1]
    },
    seconds=10.0,
    misses=(
        Miss(
            "range(column, n, tp)",
            "range(column * (n // tp), (column + 1) * (n // tp))",
            "These ranks share one replica: they hold different slices. Who has the "
            "same slice is tp ranks away.",
        ),
        Miss(
            "gradient /= n // tp",
            "gradient /= n",
            "A mean over the replicas divides by their number, n // tp, and once: not "
            "by all ranks, and not again where the all-reduce takes the mean.",
        ),
        Miss(
            "gradient /= n // tp",
            "gradient /= tp",
            "tp is how many ranks share a model. The sum has a term from each replica: "
            "divide by n // tp.",
        ),
        Miss(
            "        made = dist.new_group(members)"
            "  # a call of all ranks, members or not\n"
            "        if rank in members:\n"
            "            group = made\n",
            "        group = dist.new_group(members)\n",
            "`group` is overwritten: each rank ends with the last group. Keep the one "
            "that this rank is in.",
        ),
        Miss(
            "gradient /= n // tp",
            "gradient = gradient / (n // tp)",
            "The sum is right, but `gradient = ...` makes a new tensor. Divide the "
            "argument in place: `/=`.",
        ),
        Miss(
            "dist.all_reduce(gradient, group=group)\n    gradient /= n // tp",
            "dist.all_reduce(gradient)\n    gradient /= n",
            "That is the mean over all ranks. Only those with the same slice count.",
        ),
    ),
    errors={
        "UnboundLocalError": "This rank is in none of the groups that you made. There "
        "are tp of them, and the ranks of one are tp apart.",
        OUT_OF_STEP: "`new_group` is a call of *all* ranks of the job, also of those "
        "that will not be in the group: each makes every group, in the same order. "
        "There are tp, and no rank is in two of them.",
    },
    forbids=(
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed.device_mesh.init_device_mesh",
    ),
    instead="Make the groups with `new_group`, as the given code does.",
    otherwise="Print the members of each group for 4 ranks and tp = 2. Ranks 0 and 2 "
    "have the same slice, and so have 1 and 3.",
    hints=(
        "On 4 ranks with tp = 2: which two ranks hold the same slice?",
        "Columns, not rows: ranks that are tp apart. All ranks make all groups. And "
        "the mean is over the replicas.",
        "  for column in range(tp):\n"
        "      members = list(range(column, ...))\n"
        "      made = dist.new_group(members)      # every rank, every time\n"
        "      if rank in members:\n"
        "          ...",
    ),
)

TASKS = (PREDICT_GROUP, COORDINATES, MESH_GROUPS, NORM, ONLINE_SOFTMAX, SPOT_MESH)
