"""Lesson 08, FSDP: the tasks of its exercise."""

import contextlib
import functools
import gc
import math
import re
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from course_utils.checks.mistakes import (
    first_wrong,
    out_of_step,
    right_but,
    says,
    wrong_in,
)
from course_utils.checks.task import ANYTHING, Mistake, Such, Task
from course_utils.messages import put_back, recorded
from course_utils.notebook.compare import difference
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.messages import (
    NO_SUCH_RANK,
    NOT_WAITED_FOR,
    STILL_BUSY,
    TO_ITSELF,
    WAITED,
    all_waited_for,
)
from course_utils.traffic import Sent, Watch

in_eighths = functools.partial(linear, divided_by=8)
# ------------------------------------------------------------------------- zero_table


def zero_table(parameters, world_size, optimizer_bytes):
    psi, n, k = parameters, world_size, optimizer_bytes
    return [
        (2 + 2 + k) * psi,
        (2 + 2 + k / n) * psi,
        (2 + (2 + k) / n) * psi,
        (2 + 2 + k) / n * psi,
    ]


def gradients_first(parameters, world_size, optimizer_bytes):
    psi, n, k = parameters, world_size, optimizer_bytes
    right = zero_table(parameters, world_size, optimizer_bytes)
    return [right[0], (2 + 2 / n + k) * psi, right[2], right[3]]


def one_part_each(parameters, world_size, optimizer_bytes):
    psi, n, k = parameters, world_size, optimizer_bytes
    return [
        (4 + k) * psi,
        (4 + k / n) * psi,
        (2 + 2 / n + k) * psi,
        (2 / n + 2 + k) * psi,
    ]


def scaled(factor):
    return lambda *args: [value * factor for value in zero_table(*args)]


ZERO_TABLE = Task(
    id="08.zero_table",
    title="The ZeRO table",
    stars=1,
    cases=(
        (7.5e9, 64, 12),
        (1.3e9, 8, 12),
        (1000, 1, 12),
        (350e6, 4, 8),
        (1e12, 1024, 4),
    ),
    expect=zero_table,
    instead="Four lines of arithmetic are enough.",
    mistakes=(
        Mistake(
            like=lambda psi, n, k: zero_table(psi, n, 12),
            says="The optimizer's bytes are an argument, optimizer_bytes. They are not "
            "always 12.",
        ),
        Mistake(
            like=gradients_first,
            says="Stage 1 shards the optimizer's state, which is the largest part. The "
            "gradients follow in stage 2.",
        ),
        Mistake(
            like=one_part_each,
            says="Each stage keeps what the one before has sharded, and adds a part: "
            "optimizer; optimizer and gradients; optimizer, gradients and parameters.",
        ),
        Mistake(
            like=lambda psi, n, k: [
                4 * psi + k * psi,
                4 * psi + k * psi / n,
                2 * psi + (2 + k) * psi / n,
                2 * psi + (2 + k) * psi / n,
            ],
            says="In stage 3 the parameters are sharded, too.",
        ),
        Mistake(
            like=lambda psi, n, k: [
                (4 + k) * psi,
                (4 + 4 + (k - 4) / n) * psi,
                (2 + 4 + (2 + k - 4) / n) * psi,
                (4 + (4 + k - 4) / n) * psi,
            ],
            says="The float32 copy of the weights is the optimizer's, and shared out "
            "with the rest of its state: all of optimizer_bytes, from stage 1 on.",
        ),
        Mistake(
            like=lambda psi, n, k: [
                (4 + k) * psi,
                k / n * psi,
                (2 + k) / n * psi,
                (4 + k) / n * psi,
            ],
            says="What is not shared out is still there, whole: in stage 1 weights and "
            "gradients, in stage 2 the weights.",
        ),
        Mistake(
            like=lambda psi, n, k: [
                (8 + k) * psi,
                (8 + k / n) * psi,
                (4 + (4 + k) / n) * psi,
                (8 + k) / n * psi,
            ],
            says="Weights and gradients are in bfloat16: 2 bytes each, not 4.",
        ),
        *(
            Mistake(
                like=like,
                says="`//` rounds down: 12 // 64 is 0. Divide with `/`.",
            )
            for like in (
                lambda psi, n, k: [
                    (4 + k) * psi,
                    (4 + k // n) * psi,
                    (2 + (2 + k) // n) * psi,
                    (4 + k) // n * psi,
                ],
                lambda psi, n, k: [
                    (4 + k) * psi,
                    (4 + k // n) * psi,
                    (2 + 2 / n + k // n) * psi,
                    (4 / n + k // n) * psi,
                ],
            )
        ),
        Mistake(
            like=lambda *args: zero_table(*args)[::-1],
            says="That is the table upside down: stage 0, DDP, comes first.",
        ),
        Mistake(
            like=lambda psi, n, k: zero_table(1, n, k),
            says="That is for one parameter. The model has `parameters` of them.",
        ),
        Mistake(
            like=lambda psi, n, k: zero_table(psi, n, k / psi),
            says="optimizer_bytes is for one parameter. Multiply it by `parameters`, "
            "too.",
        ),
        Mistake(like=scaled(8), says="That is in bits. The task asks for bytes."),
        Mistake(like=scaled(1e-9), says="That is in GB. The task asks for bytes."),
        Mistake(like=scaled(2.0**-30), says="That is in GiB. The task asks for bytes."),
        Mistake(
            like=lambda *args: [
                per_gpu * n
                for per_gpu, n in zip(
                    zero_table(*args), [1, *[args[1]] * 3], strict=True
                )
            ],
            says="That is all GPUs together. How much is on each?",
        ),
    ),
    otherwise="Per parameter there are 2 bytes of weight, 2 of gradient, and "
    "optimizer_bytes. Which of them are divided by world_size in each stage?",
    hints=(
        "In stage 0 (DDP) everything is on each GPU. Stage 1 shares out one part, "
        "stage 2 a second one, stage 3 the last one.",
        "Stage 1 divides the optimizer's bytes by world_size, stage 2 also those of "
        "the gradients, stage 3 also those of the weights.",
        "The shape of it:\n"
        "  return [\n"
        "      (2 + 2 + optimizer_bytes) * parameters,\n"
        "      (2 + 2 + optimizer_bytes / world_size) * parameters,\n"
        "      ...,\n"
        "      ...,\n"
        "  ]",
    ),
)

# ----------------------------------------------------------------------- predict_peak

LAYERS, LAYER_MB, GPUS = 32, 500, 8
SHARDS_MB = LAYERS * LAYER_MB // GPUS
PEAKS_MB = SHARDS_MB + LAYER_MB, SHARDS_MB + 2 * LAYER_MB


def answered(*values):
    return lambda attempt: tuple(attempt.got) == values


def first_is(value):
    """Of two numbers, is this the first?"""
    return lambda attempt: len(attempt.got) == 2 and attempt.got[0] == value


PREDICT_PEAK = Task(
    id="08.predict_peak",
    title="Predict the peak",
    stars=1,
    where="value",
    expect=lambda: PEAKS_MB,
    unit="MB",
    mistakes=(
        Mistake(
            when=answered(*(mb / 1000 for mb in PEAKS_MB)),
            says="That is right, in GB. The task asks for MB.",
        ),
        Mistake(
            when=answered(*(mb * 1_000_000 for mb in PEAKS_MB)),
            says="That is right, in bytes. The task asks for MB.",
        ),
        Mistake(
            when=first_is(LAYER_MB),
            says="That is the layer that is whole. The shards of all layers lie there "
            "as well, all the time.",
        ),
        Mistake(
            when=first_is(SHARDS_MB),
            says="Those are the shards of all layers. While a layer computes, it is "
            "whole, in memory of its own.",
        ),
        Mistake(
            when=first_is(LAYER_MB + LAYER_MB / GPUS),
            says="That is one layer, whole, and its shard. The shards of the other "
            "layers lie there as well.",
        ),
        Mistake(
            when=first_is(LAYERS * LAYER_MB + LAYER_MB),
            says="Only an eighth of each layer lies there all the time. The rest comes "
            "while the layer computes.",
        ),
        Mistake(
            when=first_is(LAYERS * LAYER_MB),
            says="That is the whole model. Never is all of it there at once.",
        ),
        Mistake(
            when=first_is(SHARDS_MB + LAYER_MB - LAYER_MB / GPUS),
            says="You took the layer's own shard away. But shard and whole layer are "
            "in memory at the same time: the shard is what the optimizer changes.",
        ),
        Mistake(
            when=answered(SHARDS_MB + LAYER_MB, SHARDS_MB + LAYER_MB),
            says="The first is right. With prefetch, the next layer is already being "
            "gathered while this one computes. It needs memory for a whole layer.",
        ),
        Mistake(
            when=answered(SHARDS_MB + LAYER_MB, SHARDS_MB + LAYER_MB + LAYER_MB / GPUS),
            says="The first is right. What is gathered ahead is a whole layer, not "
            "one shard of it.",
        ),
        Mistake(
            when=answered(SHARDS_MB + 2 * LAYER_MB, SHARDS_MB + LAYER_MB),
            says="The two are swapped: without prefetch comes first.",
        ),
        Mistake(
            when=first_is(SHARDS_MB + LAYER_MB),
            says="The first is right. How many layers are whole at the same time if "
            "one is gathered ahead?",
        ),
    ),
    otherwise="Add what lies there all the time (the shards of all layers), and what "
    "is whole while one layer computes.",
    hints=(
        "Two kinds of memory: shards, which are always there, and whole layers, which "
        "come and go.",
        "A GPU has an eighth of each layer, all the time. How many whole layers are "
        "there at the worst moment?",
        "For 10 layers of 80 MB on 4 GPUs it goes like this:\n"
        "  shards            10 × 80 / 4 = 200 MB\n"
        "  without prefetch  200 + 80 = 280 MB\n"
        "  with prefetch     200 + 2 × 80 = 360 MB",
    ),
)

# ------------------------------------------------------------------------- flat_shard

EXAMPLE = "tensors of 3 and 4 numbers"
MATRICES = "two matrices and a vector, 26 numbers"
ONE = "a single number, without a dimension"
EVEN = "12 numbers in one tensor"

SHAPES = {
    EXAMPLE: ((3,), (4,)),
    MATRICES: ((3, 5), (2, 4), (3,)),
    ONE: ((),),
    EVEN: ((4, 3),),
}


GIVEN = "the given tensors are as they were"
WHOLE_SHARD = "bytes that the object keeps"
AFTERWARDS = "bytes that the object keeps after unshard()"


def tensors_of(kind):
    """The same on every rank."""
    return [whole_numbers(shape, 3 + i) for i, shape in enumerate(SHAPES[kind])]


def alive():
    """The memory of all tensors of this process, each once; kept while this is kept.

    Only those of floating point: sizes, the ranks of a mesh and the state of a random
    generator are whole numbers, and may be kept.

    What was there before a case may go meanwhile (gloo lets go of a tensor late), and
    a new tensor may take its place. To count what is new, hold on to the old.
    """
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    tensors = [
        one for one in tensors if one.is_floating_point() and one.device.type != "meta"
    ]
    storages = (one.untyped_storage() for one in tensors)
    return {storage._cdata: storage for storage in storages}


def new_bytes(before):
    """Bytes of the tensors that were not there `before`."""
    return sum(one.nbytes() for key, one in alive().items() if key not in before)


def listed_bytes(value):
    """Bytes of NumPy arrays, and of numbers in lists and the like, as float32.

    Whole numbers do not count, which may be sizes; nor do tensors, or what only looks
    at their memory.
    """
    if isinstance(value, np.ndarray):
        return value.nbytes * value.flags.owndata * (value.dtype.kind == "f")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return sum(map(listed_bytes, value))
    return 4 * isinstance(value, float)


def listed_in(unit):
    """The same of all attributes of an object and of its class."""
    return listed_bytes([getattr(unit, "__dict__", {}), dict(vars(type(unit)))])


def settled(count, limit, seconds=2.0):
    """The count when it is no more than the limit, or after some seconds.

    gloo lets go of the tensors of a collective a little after its end.
    """
    end = time.monotonic() + seconds
    while (found := count()) > limit and time.monotonic() < end:
        time.sleep(0.01)
    return found


def copied(whole):
    """On one rank unshard() may return views of the shard, which is changed below."""
    if not isinstance(whole, list):
        return whole
    return [one.detach().clone() if torch.is_tensor(one) else one for one in whole]


def try_flat_shard(answer, kind):
    rank = dist.get_rank()
    before = alive()
    tensors = tensors_of(kind)
    unit = answer(tensors)
    are_as_they_were = difference(tensors, tensors_of(kind), 0.0) is None
    del tensors
    report = {
        GIVEN: are_as_they_were,
        WHOLE_SHARD: settled(lambda: new_bytes(before), unit.shard.detach().nbytes)
        + listed_in(unit),
    }
    report["the shard"] = unit.shard.detach().clone()
    noted = report["the shard"].untyped_storage().nbytes()
    unit.unshard()  # what it returns is thrown away
    report[AFTERWARDS] = settled(
        lambda: new_bytes(before) - noted, unit.shard.detach().nbytes
    ) + listed_in(unit)
    report["unshard()"] = copied(unit.unshard())
    report["the shard after unshard()"] = unit.shard.detach().clone()
    with torch.no_grad():
        unit.shard += rank + 1  # as an optimizer would
    report["unshard() after each rank r has added r + 1 to its shard"] = unit.unshard()
    return report


def flat_of(kind):
    return torch.cat([tensor.reshape(-1) for tensor in tensors_of(kind)])


def shards_of(kind, n):
    flat = flat_of(kind)
    size = -(-len(flat) // n)
    return list(F.pad(flat, (0, n * size - len(flat))).split(size))


def whole_again(kind, flat):
    shapes = SHAPES[kind]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def sharded(rank, inputs):
    (kind,), n = inputs[rank], len(inputs)
    shards = shards_of(kind, n)
    changed = torch.cat([shard + r + 1 for r, shard in enumerate(shards)])
    return {
        "the shard": shards[rank],
        GIVEN: True,
        "bytes that the object keeps": shards[rank].nbytes,
        "unshard()": tensors_of(kind),
        "the shard after unshard()": shards[rank],
        "unshard() after each rank r has added r + 1 to its shard": whole_again(
            kind, changed
        ),
        AFTERWARDS: Such(
            f"at most {shards[rank].nbytes}", lambda value: value <= shards[rank].nbytes
        ),
    }


def shard_is(make):
    """Is the shard what this mistake makes of the tensors?"""

    def test(attempt):
        (kind,) = attempt.args
        like = make(kind, attempt.rank, attempt.world_size)
        same = difference(attempt.got["the shard"], like, 0.0) is None
        return first_wrong(attempt) == "the shard" and same

    return test


def each_by_itself(kind, rank, n):
    parts = []
    for tensor in tensors_of(kind):
        size = -(-tensor.numel() // n)
        flat = F.pad(tensor.reshape(-1), (0, n * size - tensor.numel()))
        parts.append(flat[rank * size : (rank + 1) * size])
    return torch.cat(parts)


def padded_always(kind, rank, n):
    """With zeros behind it even where the length is divided already."""
    flat = flat_of(kind)
    return F.pad(flat, (0, n - len(flat) % n)).chunk(n)[rank]


def padded_in_front(kind, rank, n):
    flat = flat_of(kind)
    return F.pad(flat, (-len(flat) % n, 0)).chunk(n)[rank]


def interleaved(kind, rank, n):
    flat = flat_of(kind)
    return F.pad(flat, (0, -len(flat) % n))[rank::n]


def unpadded(cut):
    """The shards that `chunk` or `tensor_split` make of the flat tensor."""

    def like(kind, rank, n):
        parts = cut(flat_of(kind), n)
        return parts[rank] if rank < len(parts) else flat_of(kind)[:0]

    return like


def numbers_left(message):
    """How many numbers split() or view() had too many, according to its error."""
    found = re.search(r"split_sizes to sum exactly to (\d+).*=\[([\d, ]*)\]", message)
    if found:
        return int(found[1]) - sum(map(int, found[2].split(",")))
    found = re.search(
        r"shape '\[([\d, ]*)\]' is invalid for input of size (\d+)", message
    )
    if found:
        return int(found[2]) - math.prod(map(int, re.findall(r"\d+", found[1])))
    return 0


def rounded_down(attempt):
    """Are just those numbers missing that a size rounded down leaves out?"""
    rest = len(flat_of(attempt.args[0])) % attempt.world_size
    return 0 < rest == -numbers_left(attempt.message)


FLAT_SHARD = Task(
    id="08.flat_shard",
    title="Shard and unshard",
    stars=2,
    where="ranks",
    run=try_flat_shard,
    seconds=10.0,  # it may have to wait for gloo
    world_sizes=(1, 2, 3, 4),
    cases=((EXAMPLE,), (MATRICES,), (ONE,), (EVEN,)),
    expect=sharded,
    keeps_inputs=False,
    instead="`torch.cat`, `F.pad`, slices and an all-gather are enough.",
    mistakes=(
        Mistake(
            when=says("has no attribute 'shard'"),
            says="This rank's piece must be in `self.shard`: there an optimizer finds "
            "it, and so does the check.",
        ),
        Mistake(
            when=lambda attempt: (
                shard_is(unpadded(torch.chunk))(attempt)
                or shard_is(unpadded(torch.tensor_split))(attempt)
            ),
            says="Without padding the shards have different sizes, and an all-gather "
            "wants one size. Append zeros until world_size divides the length, then "
            "cut.",
        ),
        Mistake(
            when=out_of_step,
            says="An all-gather wants a shard of the same size from every rank: append "
            "zeros before you cut, then cut from rank · size to (rank + 1) · size. And "
            "every rank must call it, also one that has nothing but padding.",
        ),
        Mistake(
            when=shard_is(padded_always),
            says="world_size divides the length already, and still zeros were "
            "appended: `n - len(flat) % n` is n then, and `len(flat) // n + 1` one too "
            "many. `-len(flat) % n` is 0.",
        ),
        Mistake(
            when=shard_is(padded_in_front),
            says="The zeros stand in front. They belong behind the numbers: "
            "`F.pad(flat, (0, zeros))`.",
        ),
        Mistake(
            when=shard_is(interleaved),
            says="That is every n-th number. A shard is a piece without gaps: rank 0 "
            "has the first size numbers, rank 1 the next, and so on.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("unshard()")(attempt)
                and attempt.rank == 0 < attempt.world_size - 1
                and difference(
                    attempt.got["unshard()"],
                    whole_again(
                        attempt.args[0],
                        attempt.got["the shard"].repeat(attempt.world_size),
                    ),
                    0.0,
                )
                is None
            ),
            says="Each rank has rank 0's shard. Which piece is this rank's?",
        ),
        Mistake(
            when=shard_is(each_by_itself),
            says="You sharded each tensor by itself. The task makes one flat tensor of "
            "all of them first: it needs less padding, and one all-gather.",
        ),
        Mistake(
            when=lambda attempt: (
                shard_is(lambda kind, rank, n: torch.cat(shards_of(kind, n)))(attempt)
                or shard_is(lambda kind, rank, n: flat_of(kind))(attempt)
            ),
            says="That is the whole flat tensor. Cut out this rank's piece.",
        ),
        Mistake(
            when=wrong_in(GIVEN),
            says="The shard is right, but the given tensors have changed. They are not "
            "yours: copy from them, and let them be. It is enough to keep no reference "
            "to them.",
        ),
        Mistake(
            when=wrong_in(AFTERWARDS),
            says="What unshard() has gathered stays in the object. Between two calls "
            "there may be nothing but the shard: keep it in a local variable.",
        ),
        Mistake(
            when=right_but(WHOLE_SHARD),
            says="The shard is right, but more than the shard stays in memory. Of the "
            "given tensors, keep the shapes only. And is the shard a slice? A slice is "
            "a view: it keeps the memory of the whole flat tensor (`clone()` it).",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("unshard()")(attempt)
                and torch.is_tensor(attempt.got["unshard()"])
            ),
            says="unshard() returns a list with a tensor for each of those that were "
            "given, in their shapes.",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt) == "unshard()"
                and difference(
                    attempt.got["unshard()"],
                    [one.reshape(-1) for one in attempt.expected["unshard()"]],
                    0.0,
                )
                is None
            ),
            says="The numbers are there, but in one dimension each. Give them the "
            "shapes of the tensors that were given.",
        ),
        Mistake(
            when=says(
                "Sizes of tensors must match",
                "same number of dimensions",
                "zero-dimensional tensor",
            ),
            says="The tensors have several shapes, and some have no dimension at all. "
            "Make each of them flat first: `tensor.reshape(-1)`.",
        ),
        Mistake(
            when=lambda attempt: (
                numbers_left(attempt.message) > 0
                or attempt.world_size > 1  # one rank alone has no padding
                and numbers_left(attempt.message) == 0
                and "is invalid for input of size" in attempt.message
            ),
            says="After the all-gather the padding is still there. Cut it off before "
            "you split.",
        ),
        Mistake(
            when=rounded_down,
            says="Numbers got lost: the shards together have fewer than the tensors. "
            "Their size must be rounded *up*.",
        ),
        Mistake(
            when=lambda attempt: numbers_left(attempt.message) < 0,
            says="Numbers got lost: the shards together have fewer than the tensors. "
            "The shard is the piece from rank · size to (rank + 1) · size of all "
            "numbers, with the zeros behind them.",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt) == "unshard()"
                and isinstance(attempt.got["unshard()"], list)
            ),
            says="The shard is right, what unshard() makes of all shards is not. It "
            "gathers them, puts them behind each other, cuts the zeros off, and gives "
            "the tensors their shapes back, in their order.",
        ),
        Mistake(
            when=wrong_in("the shard after unshard()"),
            says="unshard() has changed the shard. It is the memory of this rank: "
            "gather into other memory.",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt).startswith("unshard() after")
                and difference(
                    attempt.got[first_wrong(attempt)],
                    attempt.expected["unshard()"],
                    0.0,
                )
                is None
            ),
            says="The shards have been changed in the meantime, but unshard() still "
            "returns the old numbers. It must gather what is in the shards now.",
        ),
    ),
    otherwise="Make one flat tensor of all, append zeros until world_size divides it, "
    "and keep a copy of this rank's piece. unshard() gathers the pieces, cuts the "
    "zeros off, and gives the tensors their shapes back.",
    hints=(
        "How many numbers are in all tensors together, and how many in a shard? All "
        "shards have the same size.",
        "size = ceil(numbers / world_size). Append zeros up to size · world_size. Rank "
        "r has the numbers from r · size on, in a copy (a slice would keep all the "
        "memory). unshard: all_gather, cat, cut off, split, view.",
        "The shape of it:\n"
        "  flat = torch.cat([t.reshape(-1) for t in tensors])\n"
        "  size = -(-len(flat) // n)          # rounded up\n"
        "  flat = F.pad(flat, (0, ...))\n"
        "  self.shard = flat[...].clone()\n"
        "and of unshard:\n"
        "  shards = [torch.empty_like(self.shard) for _ in range(n)]\n"
        "  dist.all_gather(shards, ...)\n"
        "  flat = torch.cat(shards)[: ...]\n"
        "  return [part.view(shape) for part, shape in zip(flat.split(...), ...)]",
    ),
)

# --------------------------------------------------------------------- reduce_scatter

LONG = 1000
OWN = "torch's own reduce-scatters"
SOURCES = "each recv takes a message of this call, whoever is ahead"
HELD = "bytes of memory that its part holds on to"


def gradient_of(size, rank, n):
    # With these numbers no rank's own piece is also the largest of all ranks.
    gradient = whole_numbers((n * size,), 21 + rank)
    # The long one has numbers that 16 bits cannot hold, so rounding would show.
    return (gradient * (1 + 2.0**-12) if size == LONG else gradient,)


def sent_bytes(sent, calls):
    """What a rank sent: by collectives, and by messages, also those of its threads."""
    messages = sum(call.nbytes for call in calls if call.kind == "send")
    return messages + round(sum(part for name, part in sent.calls if name != "send"))


def at_least_half(limit):
    """Every byte may not be seen: an all-to-all with sizes is counted as one without.

    What went another way altogether is.
    """
    return Such(f"at least {limit // 2:,}", lambda value: value >= limit // 2)


@contextlib.contextmanager
def called(*names):
    """Yields a list: which of these methods of process groups are called meanwhile."""
    found = []

    def noted(name, original):
        def method(*args, **kwargs):
            found.append(name)
            return original(*args, **kwargs)

        return method

    with put_back(dist.ProcessGroup, names) as originals:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, noted(name, original))
        yield found


def knows_its_sources(calls, methods):
    """Can no recv take a message of the next call, which a rank ahead has sent?

    A recv from anybody is fine where only one rank sends, as in a ring; or if a barrier
    keeps the ranks together.
    """
    sources = {call.peer for call in calls if call.kind == "recv"}
    return not ("recv_anysource" in methods and len(sources) > 1) or (
        "barrier" in methods
    )


def try_reduce_scatter(answer, gradient):
    with called("recv_anysource", "barrier") as methods:
        with Sent() as sent, recorded() as calls:
            part = answer(gradient)
    others = [name for name, _ in sent.calls if name not in ("send", "all-to-all")]
    nbytes = sent_bytes(sent, calls)
    return {
        WAITED: all_waited_for(calls),
        "its part": part,
        OWN: sent.count("reduce-scatter"),
        "bytes sent": nbytes,
        "bytes that were seen to be sent": nbytes,
        "collectives": len(others),
        SOURCES: knows_its_sources(calls, methods),
        HELD: part.untyped_storage().nbytes() if torch.is_tensor(part) else 0,
    }


def part_of(combine):
    """This rank's part of what `combine` makes of all gradients."""

    def like(rank, inputs):
        gradients = [gradient for (gradient,) in inputs]
        return combine(gradients, rank).chunk(len(inputs))[rank]

    return like


def scattered(rank, inputs):
    n, nbytes = len(inputs), inputs[rank][0].nbytes
    limit = nbytes * (n - 1) // n
    return {
        WAITED: True,
        "its part": part_of(lambda gradients, rank: sum(gradients) / n)(rank, inputs),
        OWN: 0,
        "bytes sent": Such(
            f"at most {limit:,} (the gradient has {nbytes:,})",
            lambda value: value <= limit,
        ),
        "bytes that were seen to be sent": at_least_half(limit),
        "collectives": ANYTHING,
        SOURCES: True,
        HELD: Such(f"at most {nbytes // n}", lambda value: value <= nbytes // n),
    }


def part_is(make):
    """Is the part what this mistake makes, on the first wrong rank?"""

    def test(attempt):
        n, rank = attempt.world_size, attempt.rank
        size = len(attempt.args[0]) // n
        gradients = [gradient_of(size, r, n)[0] for r in range(n)]
        like = make(gradients, rank)
        same = difference(attempt.got["its part"], like, 1e-5) is None
        return first_wrong(attempt) == "its part" and same

    return test


def chunk_of(tensor, gradients, rank):
    return tensor.chunk(len(gradients))[rank]


def mean(gradients):
    return sum(gradients) / len(gradients)


# Only what the installed version has: their names have changed.
REDUCE_SCATTERS = tuple(
    name
    for name in ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
    if hasattr(dist, name)
)

UNSEEN = Mistake(
    when=wrong_in("bytes that were seen to be sent"),
    says="The result is right, but this rank was seen to send less than the others "
    "need of it. The numbers went another way: by the store, or by a backend's own "
    "methods? Send each rank its piece with `isend` and `irecv`, or "
    "`all_to_all_single`.",
)

REDUCE_SCATTER = Task(
    id="08.reduce_scatter",
    title="Reduce-scatter a gradient",
    stars=2,
    where="ranks",
    run=try_reduce_scatter,
    inputs=gradient_of,
    world_sizes=(1, 2, 3, 4),
    cases=(4, 1, LONG),
    expect=scattered,
    forbids=(
        *REDUCE_SCATTERS,
        "torch.distributed._functional_collectives.reduce_scatter_tensor",
    ),
    instead="`isend` and `irecv` to and from every other rank, or a ring, or "
    "`all_to_all_single`.",
    mistakes=(
        NOT_WAITED_FOR,
        TO_ITSELF,
        NO_SUCH_RANK,
        STILL_BUSY,
        Mistake(
            when=wrong_in(OWN),
            says="It would work: but it is what you build here. Send the pieces with "
            "`isend` and `irecv`, or `all_to_all_single`.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("its part")(attempt)
                and difference(
                    attempt.got["its part"].float(), attempt.expected["its part"], 1e-2
                )
                is None
            ),
            says="Nearly right, but rounded. Are the numbers sent, or added up, with "
            "16 bits? They come in float32: leave them so.",
        ),
        Mistake(
            when=part_is(lambda g, rank: chunk_of(sum(g), g, rank)),
            says="That is the sum over the ranks. A gradient is averaged: divide by "
            "the world size.",
        ),
        Mistake(
            when=part_is(lambda g, rank: chunk_of(mean(g) / len(g), g, rank)),
            says="It is divided by the world size twice.",
        ),
        Mistake(
            when=part_is(lambda g, rank: mean(g)),
            says="That is the whole mean. Each rank returns its part only: rank r the "
            "r-th of n pieces.",
        ),
        Mistake(
            when=part_is(lambda g, rank: chunk_of(mean(g), g, 0)),
            says="Every rank has the first piece. Rank r returns the r-th.",
        ),
        Mistake(
            when=part_is(
                lambda g, rank: chunk_of((sum(g) - g[rank]) / len(g), g, rank)
            ),
            says="This rank's own part is missing in the sum. It does not travel, but "
            "it counts.",
        ),
        Mistake(
            when=part_is(
                lambda g, rank: chunk_of((sum(g) + g[rank]) / len(g), g, rank)
            ),
            says="This rank's own part is in the sum twice.",
        ),
        Mistake(
            when=lambda attempt: any(
                part_is(
                    lambda g, rank, n=n: (
                        sum(chunk_of(each, g, r) for r, each in enumerate(g)) / n
                    )
                )(attempt)
                for n in {1, attempt.world_size}
            ),
            says="Each rank has sent its own piece, rank r the r-th. But rank j needs "
            "the j-th piece of every gradient: send it that one.",
        ),
        Mistake(
            when=part_is(lambda g, rank: chunk_of(torch.stack(g).amax(0), g, rank)),
            says="That is the largest number of all ranks in each place. A gradient is "
            "averaged: add the numbers up, and divide by the world size.",
        ),
        Mistake(
            when=part_is(lambda g, rank: chunk_of(g[rank], g, rank)),
            says="That is this rank's own piece: nothing of the others is in it.",
        ),
        Mistake(
            when=part_is(lambda g, rank: chunk_of(g[rank] / len(g), g, rank)),
            says="That is this rank's own piece, divided: nothing of the others is in "
            "it.",
        ),
        Mistake(
            when=lambda attempt: any(
                part_is(lambda g, rank, k=k: chunk_of(mean(g), g, (rank + k) % len(g)))(
                    attempt
                )
                for k in range(1, attempt.world_size)
            ),
            says="That is another rank's piece. Rank r returns the r-th, and so it "
            "needs the r-th piece of every other rank's gradient.",
        ),
        Mistake(
            when=lambda attempt: wrong_in("bytes sent")(attempt) and attempt.right,
            says="The result is right, but everything passes through one rank, and "
            "some ranks send more than their share. No rank needs all gradients: send "
            "each piece straight to the rank that it belongs to.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("bytes sent")(attempt) and attempt.got["collectives"] > 0
            ),
            says="The result is right, but too much was sent. An all-reduce brings "
            "every rank the whole sum, an all-gather all gradients, and most of it is "
            "thrown away. Send each rank only the piece that it needs.",
        ),
        UNSEEN,
        Mistake(
            when=wrong_in(SOURCES),
            says="The result is right here. But a recv without a source takes whatever "
            "comes first. FSDP calls this for one unit after the other, and a rank "
            "that is ahead has sent the next piece already: that would be added, too, "
            "without an error. Name the source: `dist.recv(piece, other)`.",
        ),
        Mistake(
            when=wrong_in(HELD),
            says="The result is right, but it is a view of a larger tensor, such as a "
            "copy of the whole gradient, and keeps all of that in memory. Return a "
            "tensor of its own: `clone()`, or the result of a sum or a division that "
            "is not in place.",
        ),
        Mistake(
            when=wrong_in("bytes sent"),
            says="The result is right, but too much was sent. Each rank needs one "
            "piece of your gradient, not all of it, and in float32.",
        ),
        Mistake(
            when=out_of_step,
            says="Somebody waits for a message that nobody sends, or everybody sends "
            "and nobody receives. Start all with `isend` and `irecv`, then wait for "
            "all.",
        ),
    ),
    otherwise="Rank r gets the r-th of n pieces of the mean over all ranks' gradients.",
    hints=(
        "Cut the gradient into n pieces. Who needs which of yours, and which do you "
        "need of the others?",
        "Piece r of every rank's gradient goes to rank r, directly. Start all sends "
        "(`isend`) and all receives (`irecv`, into a row for each rank), wait for all "
        "of them, add up, divide by n.",
        "The shape of it:\n"
        "  pieces = gradient.chunk(n)\n"
        "  rows = torch.empty(n, len(pieces[0]))\n"
        "  rows[rank] = pieces[rank]\n"
        "  for other in range(n):\n"
        "      if other != rank:\n"
        "          requests += [dist.isend(..., other), dist.irecv(..., other)]\n"
        "  ...                        # wait for all requests\n"
        "  return rows.mean(0)",
    ),
)

# --------------------------------------------------------------------------- one_unit

TWO_LAYERS = "two linear layers, 242 numbers"
TIED = "two layers with one weight"
NORMED = "a linear layer and a layer norm"

ZERO = "zero_grad()"
NEVER = "no zero_grad()"
STEPS = 3
RATE = 2.0**-4


def module_of(kind):
    """The same on every rank."""
    if kind == TIED:
        module = nn.Sequential(in_eighths(3, 3, 11), nn.Tanh(), in_eighths(3, 3, 12))
        module[2].weight = module[0].weight
        return module
    if kind == NORMED:
        return nn.Sequential(in_eighths(3, 4, 13), nn.LayerNorm(4))
    return nn.Sequential(
        in_eighths(3, 40, 14), nn.Tanh(), in_eighths(40, 2, 15), nn.Tanh()
    )


def batch_of(rank, step, kind):
    """What a unit is called with. In the midst of a model it wants a gradient."""
    batch = whole_numbers((2, 3), 200 + 10 * rank + step) / 8
    return batch.requires_grad_(kind != TWO_LAYERS)


def memory_of(module):
    """Bytes behind the parameters of the module, each memory counted once."""
    storages = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    return sum(p.untyped_storage().nbytes() for p in storages.values())


GATHERED = "all-gather"
BEFORE = "bytes of whole parameters between two steps"
BETWEEN = "bytes of whole parameters between forward and backward"
COPIES = "bytes of all tensors between forward and backward"
IN_FORWARD = "all-gathers in the forward"
IN_BACKWARD = "all-gathers in the backward"
LEFT = "whole gradients that are left after the backward"
SENT = "bytes sent in the backward"
ALL_REDUCES = "all-reduces in the backward"
LATER = "all-gathers in the last step"
KEPT = "bytes of all tensors that are left after the backward"


def noted(report):
    """Bytes of the tensors that the check itself keeps."""
    return sum(value.nbytes for value in report.values() if torch.is_tensor(value))


def try_unit(answer, kind, zero):
    rank, before = dist.get_rank(), alive()
    module = module_of(kind)
    unit, report, most, copies = answer(module), {}, {}, 0
    for step in range(STEPS):
        if zero == ZERO:
            unit.shard.grad = None
        batch = batch_of(rank, step, kind)
        with Sent() as forward:
            output = unit(batch)
        between = memory_of(module)
        if step == 0 and kind == TWO_LAYERS:
            limit = between_may_stay(kind, dist.get_world_size())
            copies = settled(lambda: new_bytes(before), limit)
        with Sent() as backward, recorded() as calls:
            output.sum().backward()
        report[f"step {step}: the output"] = output.detach().clone()
        report[f"step {step}: gradient of the input"] = batch.grad
        del output, batch
        gathered = sum(nbytes for name, nbytes in backward.calls if name == GATHERED)
        found = {
            BETWEEN: between,
            BEFORE: memory_of(module),
            LEFT: sum(p.grad is not None for p in module.parameters()),
            SENT: sent_bytes(backward, calls) - round(gathered),
            ALL_REDUCES: backward.count("all-reduce"),
        }
        most |= {name: max(most.get(name, 0), value) for name, value in found.items()}
        report[LATER] = forward.count(GATHERED) + backward.count(GATHERED)
        if step == 0:
            report[IN_FORWARD] = forward.count(GATHERED)
            report[IN_BACKWARD] = backward.count(GATHERED)
            limit = may_stay(kind, dist.get_world_size())
            report[KEPT] = settled(lambda: new_bytes(before) - noted(report), limit)
        grad = unit.shard.grad
        report[f"step {step}: gradient of the shard"] = (
            None if grad is None else grad.clone()
        )
        if grad is not None:
            with torch.no_grad():  # SGD; an optimizer of torch would import much
                unit.shard -= RATE * grad
        report[f"step {step}: the shard"] = unit.shard.detach().clone()
    report[COPIES] = copies
    return report | most | {"bytes that were seen to be sent": most[SENT]}


@functools.lru_cache(maxsize=64)
def stepped(kind, zero, n, combine=mean):
    """The shards and their gradients after each step, of n ranks in one process."""
    module = module_of(kind)
    parameters = list(module.parameters())
    numbers = sum(p.numel() for p in parameters)
    size = -(-numbers // n)
    gradient, steps = torch.zeros(numbers), []

    def shards(flat):
        return list(F.pad(flat.detach(), (0, n * size - numbers)).split(size))

    for step in range(STEPS):
        if zero == ZERO:
            gradient = torch.zeros(numbers)
        each, outside = [], []
        for rank in range(n):
            module.zero_grad()
            batch = batch_of(rank, step, kind)
            output = module(batch)
            output.sum().backward()
            outside.append((output.detach(), batch.grad))
            each.append(torch.cat([p.grad.reshape(-1) for p in parameters]))
        gradient = gradient + combine(each)
        with torch.no_grad():
            start = 0
            for p in parameters:
                stop = start + p.numel()
                p -= RATE * gradient[start:stop].view_as(p)
                start = stop
            flat = torch.cat([p.reshape(-1) for p in parameters])
        steps.append((shards(gradient), shards(flat), outside))
    return steps


def may_stay(kind, n):
    """Bytes: a shard, its gradient, and trifles; but not a whole gradient."""
    numbers = sum(p.numel() for p in module_of(kind).parameters())
    return 2 * 4 * -(-numbers // n) + 2 * numbers


def between_may_stay(kind, n):
    """Bytes: a shard, and half as much as the whole for what the layers note."""
    numbers = sum(p.numel() for p in module_of(kind).parameters())
    return 4 * -(-numbers // n) + 2 * numbers


def stepped_right(rank, inputs):
    (kind, zero), n = inputs[rank], len(inputs)
    size = len(stepped(kind, zero, n)[0][0][0])
    limit = 4 * size * (n - 1)
    expected = {
        IN_FORWARD: 1,
        BETWEEN: 0,
        COPIES: ANYTHING,
        IN_BACKWARD: 1,
        BEFORE: 0,
        LEFT: 0,
        SENT: Such(f"at most {limit}", lambda value: value <= limit),
        ALL_REDUCES: ANYTHING,
        LATER: 2,
    }
    if kind == TWO_LAYERS:  # its weights are larger than what it notes
        most = between_may_stay(kind, n)
        expected[COPIES] = Such(f"at most {most}", lambda value: value <= most)
    room = may_stay(kind, n)
    expected[KEPT] = Such(f"at most {room}", lambda value: value <= room)
    for step, (gradients, shards, outside) in enumerate(stepped(kind, zero, n)):
        output, grad = outside[rank]
        expected[f"step {step}: the output"] = output
        expected[f"step {step}: gradient of the input"] = grad
        expected[f"step {step}: gradient of the shard"] = gradients[rank]
        expected[f"step {step}: the shard"] = shards[rank]
    expected["bytes that were seen to be sent"] = at_least_half(limit)
    return expected


def shard_gradient_is(combine):
    """Is the first step's gradient what the mistake makes of the ranks' gradients?"""
    name = "step 0: gradient of the shard"

    def test(attempt):
        kind, zero = attempt.args
        like = stepped(kind, zero, attempt.world_size, combine)[0][0][attempt.rank]
        return (
            first_wrong(attempt) == name
            and difference(attempt.got[name], like, 1e-5) is None
        )

    return test


def by_parameter(each):
    """The mean of TWO_LAYERS on 2 ranks, each parameter cut into shards by itself."""
    sizes = [p.numel() for p in module_of(TWO_LAYERS).parameters()]
    pieces = [part.chunk(2) for part in mean(each).split(sizes)]
    return torch.cat([of_one[rank] for rank in range(2) for of_one in pieces])


def each_parameter_by_itself(attempt):
    """Was each parameter reduce-scattered, and the pieces put behind each other?"""
    applies = attempt.args[0] == TWO_LAYERS and attempt.world_size == 2
    return applies and shard_gradient_is(by_parameter)(attempt)


def of_the_others_nothing(attempt):
    """Is it this rank's own gradient, with or without a division?"""
    kind, zero = attempt.args
    n, rank = attempt.world_size, attempt.rank
    name = "step 0: gradient of the shard"
    likes = (
        stepped(kind, zero, n, lambda each, part=part: each[rank] / part)[0][0][rank]
        for part in (1, n)
    )
    return first_wrong(attempt) == name and any(
        difference(attempt.got[name], like, 1e-5) is None for like in likes
    )


ONE_UNIT = Task(
    id="08.one_unit",
    title="FSDP for one unit",
    stars=3,
    where="ranks",
    run=try_unit,
    seconds=15.0,
    world_sizes=(1, 2, 3),
    cases=((TWO_LAYERS, ZERO), (TIED, ZERO), (NORMED, NEVER)),
    expect=stepped_right,
    keeps_inputs=False,
    forbids=(
        *REDUCE_SCATTERS,
        "torch.distributed._functional_collectives.reduce_scatter_tensor",
    ),
    instead="The methods of Unit, a hook on the output, and your tasks 3 and 4.",
    mistakes=(
        Mistake(
            when=lambda attempt: (
                attempt.error in ("SIGSEGV", "SIGBUS")
                or "out of bounds for storage" in attempt.message
            ),
            says="Somebody computed with parameters whose memory had been given back: "
            "between `free()` and `gather()` they are gone. Gather before the forward, "
            "and again before the backward. (A hook on the module works from its next "
            "call on: register it in `__init__`, or use `output.register_hook`. A full "
            "backward hook is called after the module's backward, a full backward "
            "pre-hook before it.)",
        ),
        Mistake(
            when=says(
                "name 'FlatShard' is not defined",
                "name 'reduce_scatter' is not defined",
            ),
            says="This unit is built on tasks 3 and 4. Solve them first, and run their "
            "cells, once more after a restart of the kernel.",
        ),
        Mistake(
            when=says("gather() takes 1 positional argument but 2 were given"),
            says="The hook is called with the gradient of the output, and `gather` "
            "takes nothing: `output.register_hook(lambda grad: self.gather())`.",
        ),
        Mistake(
            when=says("'NoneType' object is not callable"),
            says="`register_hook(self.gather())` gathers at once, and registers None. "
            "Hand over a function: `lambda grad: self.gather()`.",
        ),
        Mistake(
            when=says("but hook returned"),
            says="What a hook on a tensor returns takes the place of the gradient. It "
            "must return None.",
        ),
        Mistake(
            when=says("'NoneType' object has no attribute 'sum'"),
            says="forward returns nothing. It must return what the module returns.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.world_size > 1  # one rank alone needs no padding
                and says(
                    "must match the size of tensor",
                    "must match the existing size",
                    "stack expects each tensor to be equal size",
                    "is invalid for input of size",
                    "Sizes of tensors must match",
                    "does not divide equally",
                    "must be divisible",
                    "the same number of elements",  # of a send and a recv
                )(attempt)
            ),
            says="Is the flat gradient padded before the reduce-scatter? It must be as "
            "long as `self.whole`, so that the ranks can share it equally.",
        ),
        Mistake(
            when=says("same number of dimensions"),
            says="The gradients have the shapes of their parameters: a matrix and a "
            "vector cannot be put behind each other. Make each flat first: "
            "`p.grad.reshape(-1)`.",
        ),
        Mistake(
            when=says("assign a gradient of size"),
            says="What is put into `self.shard.grad` must be as long as the shard: the "
            "rank's part of a flat gradient that is as long as `self.whole`.",
        ),
        Mistake(
            when=says(
                "'NoneType' object has no attribute 'reshape'",
                "'NoneType' object has no attribute 'flatten'",
                "'NoneType' object has no attribute 'view'",
            ),
            says="Something is None that should be a gradient. Put the gradients "
            "behind each other before you set `.grad` to None.",
        ),
        Mistake(
            when=says("+=: 'NoneType'", "+: 'NoneType'"),
            says="In the first step the shard has no gradient yet: then put the part "
            "there. Add to one that is there already.",
        ),
        Mistake(
            when=says("cannot register a hook on a tensor that doesn't require"),
            says="The hook is on a tensor without a graph. It belongs on the output, "
            "not on an input. And if it is there: was the forward run under no_grad?",
        ),
        Mistake(
            when=says("does not require grad and does not have a grad_fn"),
            says="The output has no graph. Was the forward run under no_grad?",
        ),
        Mistake(
            when=says("must be Tensor, not tuple"),
            says="`args` is a tuple of what forward was called with. Hand them on one "
            "by one: `self.module(*args)`.",
        ),
        Mistake(
            when=out_of_step,
            says="The ranks have called different collectives. All must gather and "
            "reduce-scatter at the same places.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(IN_FORWARD)(attempt) and attempt.got[IN_FORWARD] == 0
            ),
            says="Nothing was gathered in the forward. The unit has a shard only, and "
            "must be whole before its module computes.",
        ),
        Mistake(
            when=wrong_in(IN_FORWARD),
            says="One all-gather is enough for a forward.",
        ),
        Mistake(
            when=wrong_in(BETWEEN),
            says="After the forward the parameters are still whole. Free them: until "
            "the backward comes to this unit, others need the memory.",
        ),
        Mistake(
            when=wrong_in(COPIES),
            says="The parameters are freed after the forward, but something as large "
            "is still there: a copy of them? An attribute may hold it, or the graph: "
            "what the module computed with, autograd keeps until the backward.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(IN_BACKWARD)(attempt) and attempt.got[IN_BACKWARD] == 0
            ),
            says="Nothing was gathered in the backward. The parameters must be whole "
            "again before it comes to this unit: `output.register_hook(...)` is called "
            "at that moment.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(IN_BACKWARD)(attempt) and attempt.got[IN_BACKWARD] > 1
            ),
            says="More than one all-gather in the backward. One is needed, before the "
            "unit's backward; what is summed up afterwards is a reduce-scatter.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(BEFORE)(attempt)
                and attempt.got[LEFT] == 0
                and attempt.got["step 0: gradient of the shard"] is None
            ),
            says="After the backward the parameters are still whole. And neither they "
            "nor the shard have a gradient: did the backward come to the module at "
            "all? It does not if what forward returns is cut off from the graph, by "
            "`detach()` for example.",
        ),
        Mistake(
            when=wrong_in(BEFORE),
            says="After the backward the parameters are still whole. Free them, too.",
        ),
        Mistake(
            when=wrong_in(LEFT),
            says="The whole gradients are still in memory after the backward. Set "
            "`.grad` of each parameter to None when its part is in the shard.",
        ),
        Mistake(
            when=lambda attempt: wrong_in(SENT)(attempt) and attempt.got[ALL_REDUCES],
            says="An all-reduce sends twice as much as is needed: it brings every rank "
            "the whole gradient, and a rank needs its part. Use your reduce_scatter "
            "of task 4.",
        ),
        Mistake(
            when=wrong_in(SENT),
            says="More was sent than a reduce-scatter of one flat gradient needs. Is "
            "it called once, with all gradients together?",
        ),
        Mistake(
            when=wrong_in(KEPT),
            says="Something as large as all gradients is left after the backward. Is "
            "it kept as an attribute? Or is the shard's gradient a view of it, which "
            "keeps all of its memory? `clone()` it.",
        ),
        Mistake(
            when=wrong_in(LATER),
            says="Step 0 has two all-gathers, a later one has not. If there are more "
            "with each step: a hook on the module stays, so register it once, in "
            "`__init__`; one on the output goes with the output.",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt).endswith("gradient of the shard")
                and attempt.got[first_wrong(attempt)] is None
            ),
            says="The shard has no gradient after the backward. When the last gradient "
            "of the unit is there, put the rank's part into `self.shard.grad`.",
        ),
        Mistake(
            when=shard_gradient_is(sum),
            says="That is the sum over the ranks, not their mean.",
        ),
        Mistake(
            when=shard_gradient_is(lambda each: mean(each) / len(each)),
            says="It is divided by the world size twice: your reduce_scatter of task 4 "
            "returns the mean already.",
        ),
        Mistake(
            when=each_parameter_by_itself,
            says="Each parameter's gradient was cut into pieces by itself. The shard "
            "is a piece of one flat tensor of all parameters: put all gradients behind "
            "each other first, then reduce-scatter them, once.",
        ),
        Mistake(
            when=of_the_others_nothing,
            says="That is the rank's own gradient: nothing of the others is in it.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[1] == NEVER
                and first_wrong(attempt)
                in ("step 1: gradient of the shard", "step 2: gradient of the shard")
            ),
            says="Step 0 is right, a later one is not. Here nobody called zero_grad(): "
            "as always in PyTorch, a gradient that is there already must be added to, "
            "not replaced. (And `self.zero_grad()` drops that of the shard, too; "
            "`self.module.zero_grad()` does not.)",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt)
                in ("step 1: gradient of the shard", "step 2: gradient of the shard")
            ),
            says="Step 0 is right, a later one is not. What is left over from the step "
            "before? The parameters' own gradients must be gone.",
        ),
        UNSEEN,
        Mistake(
            when=lambda attempt: first_wrong(attempt).endswith(": the output"),
            says="forward must return what the module returns, as it is.",
        ),
        Mistake(
            when=lambda attempt: first_wrong(attempt).endswith(" of the input"),
            says="The layers before this unit do not get their gradient: what it is "
            "called with is cut off from the graph. Call the module with the arguments "
            "themselves, not with copies or `detach()`.",
        ),
        Mistake(
            when=lambda attempt: first_wrong(attempt).endswith(": the shard"),
            says="The gradient is right, but the shard has changed by something else "
            "than the optimizer's step.",
        ),
    ),
    otherwise="The gradient of the shard is this rank's part of the flat mean "
    "gradient, with zeros for the padding.",
    hints=(
        "Four moments: before the forward, after it, before the backward, after it. "
        "Which method of Unit belongs to each?",
        "forward: gather, compute, free, and `register_hook` on the output for the "
        "second gather. after_backward: make the gradients flat, set `.grad` to None, "
        "free, pad to the length of `self.whole`, reduce-scatter, and add the result "
        "to `self.shard.grad`.",
        "The shape of it:\n"
        "  forward: self.gather(); output = self.module(*args); self.free()\n"
        "           output.register_hook(lambda grad: self.gather())\n"
        "  after_backward:\n"
        "           flat = torch.cat([p.grad.reshape(-1) for p in self.members])\n"
        "           flat = F.pad(flat, (0, ...))\n"
        "           part = reduce_scatter(flat)      # your task 4\n"
        "           self.shard.grad = ...            # add, if there is one\n"
        "           ...                              # .grad = None, free",
    ),
)

# ----------------------------------------------------------------- spot_the_optimizer

WIDTHS = (6, 16, 16, 3)
TRAIN_RATE = 0.05


def network():
    """The same on every rank. Two ranks can't share its last layer evenly."""
    generator = torch.Generator().manual_seed(4)
    layers = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / inputs**0.5)
        layers += [layer, nn.LayerNorm(outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-2])


def layers_of(model):
    """Those that have parameters."""
    return [layer for layer in model if list(layer.parameters())]


def rows_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, WIDTHS[0], generator=generator)
    return x, (torch.arange(8) + step + rank) % WIDTHS[-1]


def sharded_batches(steps, rank, n):
    return (steps,)


LARGEST = "the largest all-gather, in bytes"
AGAIN = "all-gathers in all backwards"
OF_OTHERS = "the result of the other ranks"
KEPT_WHOLE = "whole tensors that a rank keeps which returns nothing"
FEW = 4  # of the ten; one is left from the last round of a loop


class Gathers(Watch):
    """Notes the largest tensor that an all-gather makes, and those of the backward.

    Attributes:
        nbytes: of the largest one.
        in_backward: how many all-gathers autograd has called.
    """

    def __init__(self):
        super().__init__()
        self.nbytes = self.in_backward = 0

    def note(self, name, nbytes):
        n = dist.get_world_size()
        if name == "all-gather":  # a rank sends its part to n - 1 others
            self.nbytes = max(self.nbytes, round(nbytes * n / (n - 1)))
            self.in_backward += torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def announced():
    """Let a `full_tensor()` that others do not call be found within seconds.

    Its all-gather does not pass torch.distributed, where a rank is seen to wait.

    Yields a list: of each call, how many of the tensors before it were still there.
    """
    from torch.distributed.tensor import DTensor

    original, made, kept = DTensor.full_tensor, [], []

    def full_tensor(self, *args, **kwargs):
        gathered = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.ones(1))
        kept.append(
            settled(lambda: sum(not one.expired() for one in made), FEW, seconds=0.2)
        )
        whole = original(self, *args, **kwargs)
        made.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    DTensor.full_tensor = full_tensor
    try:
        yield kept
    finally:
        DTensor.full_tensor = original


def try_training(answer, steps):
    rank = dist.get_rank()
    model = network()
    batches = [rows_of(rank, step) for step in range(steps)]
    with Gathers() as gathers, announced() as kept:
        state = answer(model, batches, TRAIN_RATE)
    is_none = rank == 0 or state is None
    return {
        LARGEST: gathers.nbytes,
        AGAIN: gathers.in_backward,
        "rank 0's result": whole_state(state) if rank == 0 else "of rank 0",
        OF_OTHERS: "None" if is_none else f"a {type(state).__name__}",
        KEPT_WHOLE: max(kept, default=0) if rank else 0,
    }


def whole_state(state):
    if not isinstance(state, dict):
        return state
    return {
        name: value.to_local() if hasattr(value, "to_local") else value
        for name, value in state.items()
    }


def clip_by_own_norm(model, n):
    """What n ranks do that look at their shards of the gradients alone."""
    pieces = [p.grad.chunk(n) for p in model.parameters()]
    for rank in range(n):
        own = [of_one[rank] for of_one in pieces if rank < len(of_one)]
        norm = torch.cat([gradient.reshape(-1) for gradient in own]).norm()
        for gradient in own:
            gradient *= (0.5 / (norm + 1e-6)).clamp(max=1.0)


@functools.lru_cache(maxsize=16)
def trained_alone(steps, n, *, first=0, clip=True, by_own_norm=False):
    """What one process makes of all ranks' rows, from step ``first`` on."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TRAIN_RATE)
    for step in range(first, steps):
        x, y = (
            torch.cat(parts)
            for parts in zip(*[rows_of(r, step) for r in range(n)], strict=True)
        )
        F.cross_entropy(model(x), y).backward()
        if by_own_norm:
            clip_by_own_norm(model, n)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def largest_layer(n):
    """Bytes of the largest layer, each of its parameters padded in dimension 0."""
    return max(
        sum(4 * n * -(-p.shape[0] // n) * p[0].numel() for p in layer.parameters())
        for layer in layers_of(network())
    )


def trained_right(rank, inputs):
    (steps,), n = inputs[rank], len(inputs)
    limit = largest_layer(n)
    smallest = largest_layer(1)  # without padding
    least = steps * (len(layers_of(network())) - 1)  # the last layer may stay whole
    return {
        LARGEST: Such(
            f"{limit} (the largest layer)",
            lambda value: smallest <= value <= limit,
        ),
        AGAIN: Such(f"at least {least}", lambda value: value >= least),
        "rank 0's result": (trained_alone(steps, n) if rank == 0 else "of rank 0"),
        OF_OTHERS: "None",
        KEPT_WHOLE: Such(f"at most {FEW}", lambda value: value <= FEW),
    }


def result_is(expect):
    def test(attempt):
        (steps,) = attempt.args
        got = attempt.got["rank 0's result"]
        return difference(got, expect(steps, attempt.world_size), 1e-4) is None

    return test


def untrained(steps, n):
    return {name: p.detach() for name, p in network().named_parameters()}


SPOT_THE_OPTIMIZER = Task(
    id="08.spot_the_optimizer",
    title="Spot the bugs of a copied script",
    stars=2,
    where="ranks",
    run=try_training,
    inputs=sharded_batches,
    seconds=30.0,
    imports=("torch._dynamo", "torch.distributed.fsdp"),
    world_sizes=(2, 3),
    cases=(4,),
    expect=trained_right,
    keeps_inputs=False,
    tolerance=1e-4,
    mistakes=(
        Mistake(
            when=out_of_step,
            says="`full_tensor()` is an all-gather: every rank must call it, for every "
            "parameter, also those ranks that return nothing.",
        ),
        Mistake(
            when=says("can only be applied to a module once"),
            says="fully_shard was called twice for the same module. Call it for each "
            "layer, then for the model, once.",
        ),
        Mistake(
            when=says("Invariant encountered"),
            says="fully_shard of the whole model takes all parameters that are in no "
            "unit yet. Layers first, then the model.",
        ),
        Mistake(
            when=wrong_in(KEPT_WHOLE),
            says="All ranks call full_tensor(), as they must. But this one returns "
            "nothing, and still keeps one whole tensor after the other: in the end the "
            "whole model, on every rank. Go tensor by tensor, and let only rank 0 put "
            "them into a dictionary.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(LARGEST)(attempt)
                and attempt.got[LARGEST] < largest_layer(1)
                and attempt.got[AGAIN] > 0
            ),
            says="Layers were gathered, but the largest one never whole and in "
            "float32. Is it sharded? Or is there a MixedPrecisionPolicy, with which "
            "half of the bytes are gathered? This script computes in float32.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(LARGEST)(attempt) and attempt.got[LARGEST] < largest_layer(1)
            ),
            says="No layer was gathered. Is the model still sharded?",
        ),
        Mistake(
            when=wrong_in(LARGEST),
            says="Several layers were gathered together, and are in memory together. "
            "The unit of the whole model takes all that are in no other one. Each "
            "layer should be a unit of its own: `fully_shard(layer)` for the layers "
            "first, then for the model.",
        ),
        Mistake(
            when=lambda attempt: any(
                result_is(lambda steps, n, k=k: trained_alone(k, n))(attempt)
                for k in range(1, attempt.args[0])
            ),
            says="The result is right for the first batches, but not all of them were "
            "trained with. Does a `return` or a `break` stand inside the loop?",
        ),
        Mistake(
            when=lambda attempt: any(
                result_is(lambda steps, n, k=k: trained_alone(steps, n, first=k))(
                    attempt
                )
                for k in range(1, attempt.args[0])
            ),
            says="The result is right for the last batches alone: the first were left "
            "out. Train with every batch of the list.",
        ),
        Mistake(
            when=wrong_in(AGAIN),
            says="Layers stay whole from the forward to the backward: too few are "
            "gathered again. That is what `reshard_after_forward=False` does. It also "
            "comes of leaving out `fully_shard(model)`: then each layer is a root, and "
            "a root stays whole. And a layer that is no unit of its own (every one "
            "with parameters counts, not nn.Linear alone) goes to the root.",
        ),
        Mistake(
            when=wrong_in(OF_OTHERS),
            says="All ranks call full_tensor(), but only rank 0 keeps the result. The "
            "others return None: else each of them holds the whole model. (An empty "
            "dictionary, which get_model_state_dict returns there, is not None.)",
        ),
        Mistake(
            when=result_is(untrained),
            says="The parameters are those of the start. Was the optimizer made before "
            "`fully_shard`? Then it holds parameters that nobody uses any more. They "
            "get no gradient, so its steps do nothing.",
        ),
        Mistake(
            when=lambda attempt: any(
                value.shape != attempt.expected["rank 0's result"][name].shape
                for name, value in attempt.got["rank 0's result"].items()
            ),
            says="Rank 0 returns its shards. `full_tensor()` makes a parameter whole.",
        ),
        Mistake(
            when=result_is(lambda steps, n: trained_alone(steps, n, clip=False)),
            says="The optimizer's steps were made with gradients that were not "
            "clipped. Leave that line between `backward()` and `step()`.",
        ),
        Mistake(
            when=result_is(lambda steps, n: trained_alone(steps, n, by_own_norm=True)),
            says="Each rank has clipped by the norm of its own shards. What counts is "
            "the norm over all ranks: `clip_grad_norm_` of torch takes it.",
        ),
    ),
    otherwise="Rank 0 returns the whole parameters, trained as one process trains them "
    "with the rows of all ranks.",
    hints=(
        "Print the loss of each step: does it fall? Then look at the order of the "
        "first lines. And which ranks take part in the last ones?",
        "fully_shard makes *new* parameters. It groups all that are in no unit yet. "
        "And `full_tensor()` is a collective.",
        "The three repairs:\n"
        "  for layer in model: fully_shard(layer)     # before the model\n"
        "  optimizer = ...                            # after fully_shard\n"
        "  for name, p in ...:\n"
        "      whole = p.full_tensor()                # on all ranks\n"
        "      ...                                    # rank 0 alone keeps it\n"
        "and the other ranks return None.",
    ),
)

# --------------------------------------------------------------------- spot_the_pile

ROWS, WIDTH = 3, 4
WITHOUT_COPIES = "the same without copies"


class Counts:
    """What of a model is in memory, counted in units.

    Attributes:
        handed_out: weak references to the memory of the gradients that units returned.
        on_their_way: the tensors of the requests that nobody has waited for.
        most_gradients: different ones of these in memory at once, at most.
        without_copies: the same, if what is sent were never a copy of what was
            returned.
    """

    def __init__(self):
        self.whole = self.most_whole = self.requests = 0
        self.handed_out, self.on_their_way = [], []
        self.most_gradients = self.without_copies = 0

    def note_whole(self):
        self.most_whole = max(self.most_whole, self.whole)

    def note_gradients(self, new=0):
        """Count whole gradients: those on their way, and those that somebody keeps."""
        kept = {one.cdata for one in self.handed_out if not one.expired()}
        sent = {one.untyped_storage()._cdata for one in self.on_their_way}
        self.most_gradients = max(self.most_gradients, len(kept | sent))
        most = max(len(kept), len(sent) + new)
        self.without_copies = max(self.without_copies, most)


class Request:
    """A reduce-scatter on its way; it keeps the whole gradient until it is awaited."""

    def __init__(self, gradient, counts):
        n = dist.get_world_size()
        self._whole, self._counts = gradient, counts
        counts.on_their_way.append(gradient)
        counts.requests += 1
        counts.note_gradients()
        self._rows = torch.empty(n, gradient.numel() // n)
        send = gradient.reshape(-1).clone()  # gloo lets go of it late
        self._work = dist.all_to_all_single(self._rows.view(-1), send, async_op=True)

    def wait(self):
        """This rank's part of the sum over the ranks. Frees the whole gradient."""
        self._work.wait()
        under_way = self._counts.on_their_way
        under_way[:] = [one for one in under_way if one is not self._whole]
        self._whole = None
        return self._rows.sum(0)


class LinearUnit:
    """x @ weight, where each rank has a part of the weight's rows."""

    def __init__(self, weight, counts):
        n, rank = dist.get_world_size(), dist.get_rank()
        self.shard = weight.reshape(n, -1)[rank].clone()
        self.grad = None
        self._counts, self._whole = counts, None

    def gather(self):
        if self._whole is not None:
            raise RuntimeError("This unit is whole already.")
        pieces = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, self.shard)
        self._whole = torch.cat(pieces).view(-1, WIDTH)
        self._counts.whole += 1
        self._counts.note_whole()

    def free(self):
        if self._whole is None:
            raise RuntimeError("This unit is not whole: there is nothing to free.")
        self._whole = None
        self._counts.whole -= 1

    def forward(self, x):
        self._input = x
        return x @ self._need()

    def backward(self, grad):
        gradient = self._input.t() @ grad
        self._counts.handed_out.append(StorageWeakRef(gradient.untyped_storage()))
        self._counts.note_gradients(new=1)
        return grad @ self._need().t(), gradient

    def reduce_scatter(self, gradient):
        return Request(gradient, self._counts)

    def _need(self):
        if self._whole is None:
            raise RuntimeError("This unit is not whole: call gather() first.")
        return self._whole


def weights(count):
    """One for each unit, the same on every rank; 1, 2 and 4 ranks can share it."""
    return [whole_numbers((WIDTH, WIDTH), 60 + i) / 4 for i in range(count)]


def try_backward(answer, n_units):
    rank, counts = dist.get_rank(), Counts()
    units = [LinearUnit(weight, counts) for weight in weights(n_units)]
    x = whole_numbers((ROWS, WIDTH), 70 + rank)
    for unit in units:
        unit.gather()
        x = unit.forward(x)
        unit.free()
    counts.most_whole = 0
    answer(units, torch.ones_like(x))
    return {
        "whole units at once, at most": counts.most_whole,
        "reduce-scatters": counts.requests,
        "whole gradients at once, at most": counts.most_gradients,
        WITHOUT_COPIES: counts.without_copies,
        "whole units in the end": counts.whole,
    } | {f"gradient of unit {i}": unit.grad for i, unit in enumerate(units)}


def backwards(rank, inputs, *, combine=mean):
    (count,), n = inputs[rank], len(inputs)
    each = []
    for r in range(n):
        layers = [w.clone().requires_grad_() for w in weights(count)]
        x = whole_numbers((ROWS, WIDTH), 70 + r)
        for weight in layers:
            x = x @ weight
        x.sum().backward()
        each.append([weight.grad for weight in layers])
    gradients = [combine(list(of_ranks)) for of_ranks in zip(*each, strict=True)]
    return {
        "whole units at once, at most": Such("1 or 2", lambda value: value <= 2),
        "reduce-scatters": count,
        "whole gradients at once, at most": Such("1 or 2", lambda value: value <= 2),
        WITHOUT_COPIES: ANYTHING,
        "whole units in the end": 0,
    } | {
        f"gradient of unit {i}": gradient.reshape(n, -1)[rank]
        for i, gradient in enumerate(gradients)
    }


def unit_gradients_are(combine):
    def test(attempt):
        inputs = [attempt.args] * attempt.world_size
        like = backwards(attempt.rank, inputs, combine=combine)
        name = first_wrong(attempt)
        return (
            name.startswith("gradient of unit")
            and difference(attempt.got[name], like[name], 1e-5) is None
        )

    return test


def divided_by_the_units(attempt):
    (count,) = attempt.args
    return count != attempt.world_size and unit_gradients_are(
        lambda each: sum(each) / count
    )(attempt)


def is_another_units(attempt):
    """Did this unit get what another one should, as a mean or as a sum?"""
    name, inputs = first_wrong(attempt), [attempt.args] * attempt.world_size
    if not name.startswith("gradient of unit") or attempt.got[name] is None:
        return False
    others = [
        value
        for combine in (mean, sum)
        for unit, value in backwards(attempt.rank, inputs, combine=combine).items()
        if unit.startswith("gradient of unit") and unit != name
    ]
    return any(difference(attempt.got[name], value, 1e-5) is None for value in others)


SPOT_THE_PILE = Task(
    id="08.spot_the_pile",
    title="Spot what piles up",
    stars=2,
    where="ranks",
    run=try_backward,
    world_sizes=(1, 2, 4),
    cases=((6,), (1,), (3,)),
    expect=backwards,
    keeps_inputs=False,
    mistakes=(
        Mistake(
            when=says("there is nothing to free"),
            says="free() was called for a unit that is not whole. Call it once for "
            "each gather().",
        ),
        Mistake(
            when=says("call gather() first"),
            says="A unit computes with its whole weight: gather it before its "
            "backward, and free it after that.",
        ),
        Mistake(
            when=wrong_in("whole units at once"),
            says="Too many units are whole at the same time; if nobody frees them, in "
            "the end the whole model. Gather a unit when its turn comes. Its weight is "
            "not needed any more when its backward is over.",
        ),
        Mistake(
            when=wrong_in("reduce-scatters"),
            says="Each unit's gradient goes through `unit.reduce_scatter(gradient)`, "
            "once. An all-reduce would bring every rank the whole gradient, with twice "
            "the traffic.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("whole gradients at once")(attempt)
                and attempt.got[WITHOUT_COPIES] <= 2
            ),
            says="What is sent is a copy: `gradient / n` is a new tensor, as large, "
            "beside the one that the unit returned. With the next unit's there are "
            "three. Divide in place (`gradient /= n`), or divide what wait() returns.",
        ),
        Mistake(
            when=wrong_in("whole gradients at once"),
            says="The whole gradients pile up. A request keeps its gradient until you "
            "wait for it: wait for the one before when the next one is ready to go, or "
            "at once. And keep no gradient yourself, in a list for example.",
        ),
        Mistake(
            when=wrong_in("whole units in the end"),
            says="A unit is still whole when the backward is over.",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt).startswith("gradient of unit")
                and getattr(attempt.got[first_wrong(attempt)], "kind", "") == "Request"
            ),
            says="That is the request. The gradient is what its wait() returns.",
        ),
        Mistake(
            when=unit_gradients_are(sum),
            says="The memory is right. But that is the sum over the ranks: wait() "
            "returns the sum, and a gradient is the mean.",
        ),
        Mistake(
            when=is_another_units,
            says="That is the gradient of another unit. A request belongs to the unit "
            "that started it: keep both together, as a pair.",
        ),
        Mistake(
            when=divided_by_the_units,
            says="It is divided by the number of units. A mean over the ranks is "
            "divided by the world size.",
        ),
        Mistake(
            when=unit_gradients_are(lambda each: mean(each) / len(each)),
            says="It is divided by the world size twice.",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt).startswith("gradient of unit")
                and all(
                    value is None
                    for name, value in attempt.got.items()
                    if name.startswith("gradient of unit")
                )
            ),
            says="No unit of this rank has a gradient in the end. What wait() returns "
            "goes into `unit.grad`, on every rank.",
        ),
        Mistake(
            when=lambda attempt: (
                first_wrong(attempt).startswith("gradient of unit")
                and attempt.got[first_wrong(attempt)] is None
            ),
            says="A unit has no gradient in the end. Is the last reduce-scatter "
            "awaited as well, after the loop?",
        ),
    ),
    otherwise="Each unit's grad is this rank's part of the mean gradient.",
    hints=(
        "Count, line by line: what is whole after two rounds of the loop, and what "
        "after six?",
        "Three repairs: free a unit when its backward is over; let at most one "
        "reduce-scatter be on its way while the next unit computes; take the mean.",
        "The shape of it:\n"
        "  before = None                       # the unit on its way, and its request\n"
        "  for unit in reversed(units):\n"
        "      unit.gather()\n"
        "      grad, gradient = unit.backward(grad)\n"
        "      ...                             # free it\n"
        "      ...                             # wait for `before`, if there is one\n"
        "      before = unit, unit.reduce_scatter(gradient)\n"
        "  ...                                 # wait for the last one\n"
        "where to wait is: unit.grad = request.wait() / ...",
    ),
)

TASKS = (
    ZERO_TABLE,
    PREDICT_PEAK,
    FLAT_SHARD,
    REDUCE_SCATTER,
    ONE_UNIT,
    SPOT_THE_OPTIMIZER,
    SPOT_THE_PILE,
)
