"""Lesson 08: what learners may hand in, and what they must be told."""

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from course_utils import costs
from course_utils.checks import lesson_08
from course_utils.from_scratch import fsdp
from course_utils.notebook.check import find_task
from tests.answers import Answers

ANSWERS = Answers()

# ------------------------------------------------------------------- 08.zero_table


@ANSWERS.wrong("08.zero_table", "not attempted", "still raises NotImplementedError")
def table_stub(parameters, world_size, optimizer_bytes):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong(
    "08.zero_table",
    "wrong",
    "They are not always 12.",
    did="12 instead of the argument",
)
def always_adam(parameters, world_size, optimizer_bytes):
    return right_table(parameters, world_size, 12)


@ANSWERS.wrong("08.zero_table", "wrong", "gradients follow in stage 2")
def gradients_first(psi, n, k):
    return [
        (4 + k) * psi,
        (2 + 2 / n + k) * psi,
        (2 + (2 + k) / n) * psi,
        (4 + k) / n * psi,
    ]


@ANSWERS.wrong("08.zero_table", "wrong", "Each stage keeps what the one before")
def one_part_each(psi, n, k):
    return [
        (4 + k) * psi,
        (4 + k / n) * psi,
        (2 + 2 / n + k) * psi,
        (2 / n + 2 + k) * psi,
    ]


@ANSWERS.wrong("08.zero_table", "wrong", "the parameters are sharded, too")
def stage_two_twice(psi, n, k):
    right = right_table(psi, n, k)
    return [*right[:3], right[2]]


@ANSWERS.wrong("08.zero_table", "wrong", "The float32 copy of the weights is the")
def copy_on_every_rank(psi, n, k):
    means = k - 4
    return [
        (4 + k) * psi,
        (4 + 4 + means / n) * psi,
        (2 + 4 + (2 + means) / n) * psi,
        (4 + (4 + means) / n) * psi,
    ]


@ANSWERS.wrong("08.zero_table", "wrong", "What is not shared out is still there")
def shared_parts_alone(psi, n, k):
    return [(4 + k) * psi, k / n * psi, (2 + k) / n * psi, (4 + k) / n * psi]


@ANSWERS.wrong("08.zero_table", "wrong", "2 bytes each, not 4")
def in_float32(psi, n, k):
    return [
        (8 + k) * psi,
        (8 + k / n) * psi,
        (4 + (4 + k) / n) * psi,
        (8 + k) / n * psi,
    ]


@ANSWERS.wrong("08.zero_table", "wrong", "The task asks for bytes.")
def in_gigabytes(psi, n, k):
    return [value / 1e9 for value in right_table(psi, n, k)]


@ANSWERS.wrong("08.zero_table", "wrong", "all GPUs together")
def of_all_gpus(psi, n, k):
    first, *others = right_table(psi, n, k)
    return [first, *(n * value for value in others)]


@ANSWERS.wrong("08.zero_table", "wrong", "`//` rounds down")
def rounded_down(psi, n, k):
    return [
        (4 + k) * psi,
        (4 + k // n) * psi,
        (2 + (2 + k) // n) * psi,
        (4 + k) // n * psi,
    ]


@ANSWERS.wrong("08.zero_table", "wrong", "`//` rounds down")
def optimizer_rounded_down(psi, n, k):
    part = k // n
    return [
        (4 + k) * psi,
        (4 + part) * psi,
        (2 + 2 / n + part) * psi,
        (4 / n + part) * psi,
    ]


@ANSWERS.wrong("08.zero_table", "wrong", "upside down")
def stage_three_first(psi, n, k):
    return right_table(psi, n, k)[::-1]


@ANSWERS.wrong("08.zero_table", "wrong", "That is for one parameter.")
def without_parameters(psi, n, k):
    return right_table(1, n, k)


@ANSWERS.wrong("08.zero_table", "wrong", "optimizer_bytes is for one parameter.")
def optimizer_of_one_parameter(psi, n, k):
    return [
        4 * psi + k,
        4 * psi + k / n,
        2 * psi + (2 * psi + k) / n,
        (4 * psi + k) / n,
    ]


@ANSWERS.wrong("08.zero_table", "wrong", "3 items; 4 were expected")
def without_ddp(psi, n, k):
    return right_table(psi, n, k)[1:]


@ANSWERS.wrong("08.zero_table", "wrong", "It would work: but it is what you build")
def the_courses_formula(psi, n, k):
    return [costs.zero_memory(psi, gpus=n, stage=stage).total for stage in range(4)]


def right_table(psi, n, k):
    return [
        (4 + k) * psi,
        (4 + k / n) * psi,
        (2 + (2 + k) / n) * psi,
        (4 + k) / n * psi,
    ]


ANSWERS.right("08.zero_table")(right_table)


@ANSWERS.right("08.zero_table")
def by_stages(psi, n, k):
    parts = torch.tensor([k, 2, 2], dtype=torch.float64) * psi
    divided = [[1, 1, 1], [n, 1, 1], [n, n, 1], [n, n, n]]
    return (parts / torch.tensor(divided)).sum(1)


# ------------------------------------------------------------------ 08.predict_peak


ANSWERS.wrong("08.predict_peak", "not attempted", "Set the answer")(...)
ANSWERS.wrong(
    "08.predict_peak",
    "wrong",
    "The shards of all layers lie there",
    did="only the whole layer",
)((500, 1000))
ANSWERS.wrong("08.predict_peak", "wrong", "Those are the shards of all layers")(
    (2000, 2500)
)
ANSWERS.wrong("08.predict_peak", "wrong", "Never is all of it there")((16000, 16000))
ANSWERS.wrong("08.predict_peak", "wrong", "Only an eighth of each layer lies there")(
    (16500, 17000)
)
ANSWERS.wrong("08.predict_peak", "wrong", "The shards of the other layers lie there")(
    (562.5, 1062.5)
)
ANSWERS.wrong("08.predict_peak", "wrong", "You took the layer's own shard away")(
    (2437.5, 2875)
)
ANSWERS.wrong("08.predict_peak", "wrong", "It needs memory for a whole layer")(
    (2500, 2500)
)
ANSWERS.wrong("08.predict_peak", "wrong", "not one shard of it")((2500, 2562.5))
ANSWERS.wrong("08.predict_peak", "wrong", "The two are swapped")((3000, 2500))
ANSWERS.wrong("08.predict_peak", "wrong", "How many layers are whole")((2500, 3500))
ANSWERS.wrong("08.predict_peak", "wrong", "That is right, in GB.")((2.5, 3))
ANSWERS.wrong("08.predict_peak", "wrong", "That is right, in bytes.")((2.5e9, 3e9))
ANSWERS.wrong("08.predict_peak", "wrong", "a number; a tuple was expected")(2500)
ANSWERS.wrong("08.predict_peak", "wrong", "It has 1 item; 2 were expected.")((2500,))
ANSWERS.wrong("08.predict_peak", "wrong", "It has 3 items; 2 were expected.")(
    (2500, 3000, 1)
)
ANSWERS.right("08.predict_peak")((2500, 3000))
ANSWERS.right("08.predict_peak")([2500.0, 3000.0])


def test_the_predicted_peak_is_that_of_the_formula():
    for prefetch, peak in zip(
        (0, 1), find_task("08.predict_peak").expect(), strict=True
    ):
        memory = costs.fsdp_memory([250_000_000] * 32, 8, prefetch=prefetch)
        assert memory.parameter_peak / 2 == peak * 1_000_000  # in bfloat16


# -------------------------------------------------------------------- 08.flat_shard


@ANSWERS.wrong("08.flat_shard", "not attempted", "still raises NotImplementedError")
class ShardStub:
    def __init__(self, tensors):
        raise NotImplementedError("Write your code here.")


class Shard:
    """What the wrong answers below are made from, by changing one thing."""

    def __init__(self, tensors):
        self.shapes = [tensor.shape for tensor in tensors]
        flat = self.pad(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        self.shard = self.cut(flat)

    def pad(self, flat):
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()))

    def cut(self, flat):
        return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def gathered(self):
        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard)
        return torch.cat(shards)

    def unshard(self):
        flat, tensors = self.gathered(), []
        for shape in self.shapes:
            part, flat = flat[: shape.numel()], flat[shape.numel() :]
            tensors.append(part.reshape(shape))
        return tensors


@ANSWERS.wrong("08.flat_shard", "wrong", "Without padding the shards")
class NoPadding(Shard):
    def cut(self, flat):
        return flat.tensor_split(dist.get_world_size())[dist.get_rank()].clone()

    def pad(self, flat):
        return flat

    def gathered(self):
        shards = [None] * dist.get_world_size()
        dist.all_gather_object(shards, self.shard)
        return torch.cat(shards)


@ANSWERS.wrong(
    "08.flat_shard", "crashed", "append zeros before you cut", did="no padding"
)
class ChunksOfAnySize(NoPadding):
    gathered = Shard.gathered


@ANSWERS.wrong(
    "08.flat_shard",
    "wrong",
    "a view: it keeps the memory of the whole",
    did="a slice as the shard",
)
class AView(Shard):
    def cut(self, flat):
        return flat.chunk(dist.get_world_size())[dist.get_rank()]


@ANSWERS.wrong("08.flat_shard", "wrong", "Of the given tensors, keep the shapes only")
class KeepsTheTensors(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        self.tensors = tensors


@ANSWERS.wrong("08.flat_shard", "wrong", "Of the given tensors, keep the shapes only")
class KeepsTheNumbersInLists(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        self.numbers = [tensor.tolist() for tensor in tensors]


@ANSWERS.wrong("08.flat_shard", "wrong", "What unshard() has gathered stays")
class KeepsTheWholeInAList(Shard):
    def gathered(self):
        self.whole = super().gathered().tolist()
        return torch.tensor(self.whole)


@ANSWERS.wrong("08.flat_shard", "wrong", "Of the given tensors, keep the shapes only")
class KeepsANumPyArray(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        self.numbers = np.concatenate([tensor.numpy().ravel() for tensor in tensors])


@ANSWERS.wrong("08.flat_shard", "wrong", "What unshard() has gathered stays")
class KeepsTheWholeInNumPy(Shard):
    def gathered(self):
        self.whole = super().gathered().numpy().copy()
        return torch.tensor(self.whole)


@ANSWERS.wrong("08.flat_shard", "wrong", "Of the given tensors, keep the shapes only")
class KeepsTheNumbersInTheClass(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        type(self).kept = [tensor.tolist() for tensor in tensors]


@ANSWERS.wrong("08.flat_shard", "wrong", "the given tensors have changed")
class ClearsWhatItWasGiven(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        tensors.clear()


@ANSWERS.wrong("08.flat_shard", "wrong", "the given tensors have changed")
class FreesWhatItWasGiven(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        for tensor in tensors:
            tensor.zero_()


@ANSWERS.wrong("08.flat_shard", "wrong", "`-len(flat) % n` is 0")
class PaddedAlways(Shard):
    def pad(self, flat):
        n = dist.get_world_size()
        return F.pad(flat, (0, n - len(flat) % n))


@ANSWERS.wrong("08.flat_shard", "wrong", "The zeros stand in front.")
class PaddedInFront(Shard):
    def pad(self, flat):
        return F.pad(flat, (-len(flat) % dist.get_world_size(), 0))


@ANSWERS.wrong("08.flat_shard", "crashed", "Make each of them flat first")
class NotFlattened(Shard):
    def __init__(self, tensors):
        self.shapes = [tensor.shape for tensor in tensors]
        self.shard = self.cut(self.pad(torch.cat(tensors)))


@ANSWERS.wrong("08.flat_shard", "crashed", "then cut from rank · size to (rank + 1)")
class CutAtOneEnd(Shard):
    def cut(self, flat):
        return flat[: (dist.get_rank() + 1) * len(flat) // dist.get_world_size()]


@ANSWERS.wrong("08.flat_shard", "wrong", "That is the whole flat tensor.")
class NotCut(Shard):
    def cut(self, flat):
        return flat.clone()

    def gathered(self):
        return self.shard.clone()


@ANSWERS.wrong("08.flat_shard", "wrong", "That is the whole flat tensor.")
class NeitherPaddedNorCut(NotCut):
    def pad(self, flat):
        return flat


@ANSWERS.wrong("08.flat_shard", "wrong", "every n-th number")
class EveryNth(Shard):
    def cut(self, flat):
        return flat[dist.get_rank() :: dist.get_world_size()].clone()

    def gathered(self):
        return super().gathered().view(dist.get_world_size(), -1).t().reshape(-1)


@ANSWERS.wrong("08.flat_shard", "wrong", "Each rank has rank 0's shard.")
class RankZeros(Shard):
    def cut(self, flat):
        return flat.chunk(dist.get_world_size())[0].clone()


@ANSWERS.wrong("08.flat_shard", "wrong", "You sharded each tensor by itself.")
class EachByItself(Shard):
    def __init__(self, tensors):
        self.parts = [Shard([tensor]) for tensor in tensors]
        self.shard = torch.cat([part.shard for part in self.parts])
        for part in self.parts:
            part.size, part.shard = len(part.shard), None

    def unshard(self):
        shards = self.shard.split([part.size for part in self.parts])
        for part, shard in zip(self.parts, shards, strict=True):
            part.shard = shard
        return [part.unshard()[0] for part in self.parts]


@ANSWERS.wrong("08.flat_shard", "wrong", "in one dimension each")
class ShapesLost(Shard):
    def unshard(self):
        return [tensor.reshape(-1) for tensor in super().unshard()]


@ANSWERS.wrong("08.flat_shard", "crashed", "the padding is still there")
class PaddingLeft(Shard):
    def unshard(self):
        parts = self.gathered().split([shape.numel() for shape in self.shapes])
        return [p.view(shape) for p, shape in zip(parts, self.shapes, strict=True)]


@ANSWERS.wrong("08.flat_shard", "crashed", "Their size must be rounded *up*.")
class RoundedDownAndSliced(Shard):
    def pad(self, flat):
        return flat[: len(flat) - len(flat) % dist.get_world_size()]


@ANSWERS.wrong("08.flat_shard", "crashed", "no fixed number fits all of them")
class RoomForFour(Shard):
    def gathered(self):
        shards = [torch.empty_like(self.shard) for _ in range(4)]
        dist.all_gather(shards, self.shard)
        return torch.cat(shards)


@ANSWERS.wrong("08.flat_shard", "crashed", "no fixed number fits all of them")
class RoomForFourInOne(Shard):
    def gathered(self):
        whole = torch.empty(4 * len(self.shard))
        dist.all_gather_into_tensor(whole, self.shard)
        return whole


@ANSWERS.wrong("08.flat_shard", "crashed", "fewer than the tensors. The shard is the")
class AlwaysTwoRanks(Shard):
    def cut(self, flat):
        return flat[: -(-len(flat) // 2)].clone()


@ANSWERS.wrong("08.flat_shard", "wrong", "a list with a tensor for each")
class OneTensor(Shard):
    def unshard(self):
        return self.gathered()


@ANSWERS.wrong("08.flat_shard", "wrong", "still returns the old numbers")
class Remembers(Shard):
    def unshard(self):
        if not hasattr(self, "before"):
            self.before = super().unshard()
        return self.before


@ANSWERS.wrong("08.flat_shard", "crashed", "Their size must be rounded *up*.")
class RoundedDown(PaddingLeft):
    def pad(self, flat):
        return flat[: len(flat) // dist.get_world_size() * dist.get_world_size()]


@ANSWERS.wrong("08.flat_shard", "crashed", "The shard is the piece from rank · size")
class CutFromItsEnd(PaddingLeft):
    def cut(self, flat):
        size = len(flat) // dist.get_world_size()
        return flat[(dist.get_rank() + 1) * size : (dist.get_rank() + 2) * size]


@ANSWERS.wrong("08.flat_shard", "wrong", "The shard is right, what unshard() makes")
class ShardsInReverse(Shard):
    def gathered(self):
        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard)
        return torch.cat(shards[::-1])


@ANSWERS.wrong("08.flat_shard", "wrong", "their shapes back, in their order")
class InReverse(Shard):
    def unshard(self):
        return super().unshard()[::-1]


@ANSWERS.wrong("08.flat_shard", "crashed", "must be in `self.shard`")
class ByAnotherName(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        self.piece = self.__dict__.pop("shard")


@ANSWERS.wrong("08.flat_shard", "wrong", "What unshard() has gathered stays")
class KeepsTheWhole(Shard):
    def gathered(self):
        self.whole = super().gathered()
        return self.whole


@ANSWERS.wrong("08.flat_shard", "wrong", "It would work: but it is what you build")
class TheCourses(Shard):
    def cut(self, flat):
        return fsdp.shard(flat)


@ANSWERS.right("08.flat_shard")
class WithSizesInATensor(Shard):
    """Whole numbers, of which each tensor has one: no copy of anything."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.sizes = torch.tensor([tensor.numel() for tensor in tensors])
        self.ends = np.cumsum([tensor.numel() for tensor in tensors])


@ANSWERS.right("08.flat_shard")
class Sharded(Shard):
    pass


@ANSWERS.right("08.flat_shard")
class WithTemplates(Shard):
    """Keeps tensors without memory, for the shapes."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.templates = [tensor.to("meta") for tensor in tensors]


@ANSWERS.right("08.flat_shard")
class ViewsOnOneRank(Shard):
    """Nothing to gather there: views of the shard are the tensors."""

    def unshard(self):
        if dist.get_world_size() > 1:
            return super().unshard()
        sizes = [shape.numel() for shape in self.shapes]
        parts = self.shard[: sum(sizes)].split(sizes)
        return [p.view(s) for p, s in zip(parts, self.shapes, strict=True)]


@ANSWERS.right("08.flat_shard")
class InAnotherWay:
    """Copies into zeros, and gathers into one tensor by sending to everybody."""

    def __init__(self, tensors):
        n, rank = dist.get_world_size(), dist.get_rank()
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        numbers = [x for tensor in tensors for x in tensor.flatten().tolist()]
        size = (len(numbers) + n - 1) // n
        mine = numbers[rank * size : (rank + 1) * size]
        self.shard = torch.zeros(size)
        self.shard[: len(mine)] = torch.tensor(mine)

    def unshard(self):
        n, rank = dist.get_world_size(), dist.get_rank()
        rows = torch.zeros(n, len(self.shard))
        rows[rank] = self.shard
        dist.all_reduce(rows)
        whole, start, tensors = rows.flatten(), 0, []
        for shape in self.shapes:
            stop = start + torch.Size(shape).numel()
            tensors.append(whole[start:stop].clone().reshape(shape))
            start = stop
        return tuple(tensors)


# ---------------------------------------------------------------- 08.reduce_scatter


@ANSWERS.wrong("08.reduce_scatter", "not attempted", "still raises NotImplemented")
def scatter_stub(gradient):
    raise NotImplementedError("Write your code here.")


def rows_of(gradient):
    """The n pieces that belong to this rank, one of each rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    rows = [torch.empty_like(pieces[0]) for _ in range(n)]
    rows[rank] = pieces[rank].clone()
    others = [other for other in range(n) if other != rank]
    requests = [dist.isend(pieces[other], other) for other in others]
    requests += [dist.irecv(rows[other], other) for other in others]
    for request in requests:
        request.wait()
    return rows


@ANSWERS.wrong("08.reduce_scatter", "wrong", "a view of a larger tensor")
def a_view_of_the_gradients_copy(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = list(gradient.clone().chunk(n))
    pieces[rank] += sum(rows_of(gradient)) - pieces[rank]
    return pieces[rank].div_(n)


@ANSWERS.wrong("08.reduce_scatter", "wrong", "a view of a larger tensor")
def a_row_of_all_rows(gradient):
    rows = torch.stack(rows_of(gradient))
    for row in rows[1:]:
        rows[0] += row
    return rows[0].div_(len(rows))


@ANSWERS.wrong("08.reduce_scatter", "wrong", "everything passes through one rank")
def through_rank_0(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    total = gradient / n
    dist.reduce(total, 0)
    part = torch.empty(len(gradient) // n)
    dist.scatter(part, list(total.chunk(n)) if rank == 0 else None)
    return part


@ANSWERS.wrong("08.reduce_scatter", "wrong", "everything passes through one rank")
def gathered_by_the_last(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    rows = [torch.empty_like(gradient) for _ in range(n)] if rank == n - 1 else None
    dist.gather(gradient, rows, n - 1)
    if rank < n - 1:
        part = torch.empty(len(gradient) // n)
        dist.recv(part, n - 1)
        return part
    *others, mine = (sum(rows) / n).chunk(n)
    for other, part in enumerate(others):
        dist.send(part, other)
    return mine


@ANSWERS.wrong("08.reduce_scatter", "wrong", "But rank j needs the j-th piece of")
def its_own_piece_to_everybody(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    piece = gradient.chunk(n)[rank].clone()
    return sum(rows_of(piece.repeat(n))) / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "That is the sum over the ranks.")
def summed(gradient):
    return sum(rows_of(gradient))


@ANSWERS.wrong("08.reduce_scatter", "wrong", "the largest number of all ranks")
def the_largest_of_all(gradient):
    return torch.stack(rows_of(gradient)).amax(0)


@ANSWERS.wrong(
    "08.reduce_scatter",
    "wrong",
    "too much was sent. An all-reduce",
    did="an all-reduce and a slice",
)
def all_reduced(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    n = dist.get_world_size()
    return total.chunk(n)[dist.get_rank()] / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "too much was sent. An all-reduce")
def all_reduced_functionally(gradient):
    from torch import ops  # `torch.ops` in a function cannot be copied to a rank

    n, functional = dist.get_world_size(), ops._c10d_functional
    total = functional.all_reduce(gradient, "avg", dist.group.WORLD.group_name)
    return functional.wait_tensor(total).chunk(n)[dist.get_rank()].clone()


@ANSWERS.wrong("08.reduce_scatter", "wrong", "too much was sent. An all-reduce")
def all_reduced_as_a_list(gradient):
    total, n = gradient.clone(), dist.get_world_size()
    dist.all_reduce_coalesced([total])
    return total.chunk(n)[dist.get_rank()] / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "too much was sent. An all-reduce")
def gathered_as_a_list(gradient):
    n = dist.get_world_size()
    rows = [[torch.empty_like(gradient)] for _ in range(n)]
    dist.all_gather_coalesced(rows, [gradient])
    return sum(row for (row,) in rows).chunk(n)[dist.get_rank()] / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "or by a backend's own methods?")
def by_the_backend(gradient):
    n = dist.get_world_size()
    piece = torch.empty(len(gradient) // n)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._reduce_scatter_base(piece, gradient).wait()
    return piece / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "The numbers went another way: by the")
def through_the_store(gradient):
    import pickle

    store, n = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    key = f"gradient of {len(gradient)}"
    store.set(f"{key} {dist.get_rank()}", pickle.dumps(gradient))
    total = sum(pickle.loads(store.get(f"{key} {other}")) for other in range(n))
    return total.chunk(n)[dist.get_rank()] / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "Nearly right, but rounded.")
def in_16_bits(gradient):
    return direct(gradient.half()).float()


@ANSWERS.wrong("08.reduce_scatter", "crashed", "There is no such rank: they go from 0")
def for_two_ranks_only(gradient):
    rank = dist.get_rank()
    pieces = gradient.chunk(2)
    piece = torch.empty_like(pieces[0])
    request = dist.isend(pieces[1 - rank], 1 - rank)
    dist.recv(piece, 1 - rank)
    request.wait()
    return (piece + pieces[rank]) / 2


@ANSWERS.wrong("08.reduce_scatter", "wrong", "It would work: but it is what you")
def by_a_private_name(gradient):
    n = dist.get_world_size()
    piece = torch.empty(len(gradient) // n)
    dist.group.WORLD._reduce_scatter_base(piece, gradient).wait()
    return piece / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "Each rank needs one piece")
def whole_to_all(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    total = gradient.clone()
    for step in range(1, n):
        other = torch.empty_like(gradient)
        request = dist.isend(gradient, (rank + step) % n)
        dist.recv(other, (rank - step) % n)
        request.wait()
        total += other
    return total.chunk(n)[rank] / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "own part is missing")
def without_mine(gradient):
    rows = rows_of(gradient)
    rows[dist.get_rank()].zero_()
    return sum(rows) / len(rows)


@ANSWERS.wrong("08.reduce_scatter", "wrong", "own part is in the sum twice")
def mine_twice(gradient):
    rows = rows_of(gradient)
    return (sum(rows) + rows[dist.get_rank()]) / len(rows)


@ANSWERS.wrong("08.reduce_scatter", "wrong", "That is the whole mean.")
def whole_mean(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@ANSWERS.wrong("08.reduce_scatter", "wrong", "That is another rank's piece.")
def of_the_next(gradient):
    n = dist.get_world_size()
    return sum(rows_of(gradient.view(n, -1).roll(-1, 0).reshape(-1))) / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "That is this rank's own piece")
def only_mine(gradient):
    return gradient.chunk(dist.get_world_size())[dist.get_rank()].clone()


@ANSWERS.wrong("08.reduce_scatter", "wrong", "Wait for every request")
def sends_not_waited_for(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces, requests = gradient.chunk(n), []
    total = pieces[rank].clone()
    for step in range(1, n):
        piece = torch.empty_like(total)
        requests.append(dist.isend(pieces[(rank + step) % n], (rank + step) % n))
        dist.recv(piece, (rank - step) % n)
        total += piece
    dist.barrier()  # gloo takes back a send that nobody holds, and others would wait
    return total / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "Name the source:")
def from_anybody(gradient):
    """With two calls in a row, a piece of the second may be added in the first."""
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    total, piece = pieces[rank].clone(), torch.empty_like(pieces[rank])
    others = [other for other in range(n) if other != rank]
    requests = [dist.isend(pieces[other], other) for other in others]
    for _ in others:
        dist.recv(piece)
        total += piece
    for request in requests:
        request.wait()
    return total / n


@ANSWERS.wrong("08.reduce_scatter", "crashed", "A rank cannot send to itself.")
def also_to_itself(gradient):
    n = dist.get_world_size()
    rows = torch.empty(n, len(gradient) // n)
    for other, piece in enumerate(gradient.chunk(n)):
        request = dist.isend(piece, other)
        dist.recv(rows[other], other)
        request.wait()
    return rows.mean(0)


@ANSWERS.wrong("08.reduce_scatter", "stuck", "everybody sends and nobody receives")
def received_first(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    total = pieces[rank].clone()
    for other in range(n):
        if other != rank:
            piece = torch.empty_like(total)
            dist.recv(piece, other)
            dist.send(pieces[other], other)
            total += piece
    return total / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "It would work: but it is what you")
def torchs_own(gradient):
    n = dist.get_world_size()
    piece = torch.empty(len(gradient) // n)
    dist.reduce_scatter(piece, [one.clone() for one in gradient.chunk(n)])
    return piece / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "It would work: but it is what you")
def the_courses_own(gradient):
    return fsdp.reduce_scatter(gradient) / dist.get_world_size()


@ANSWERS.right("08.reduce_scatter")
def direct(gradient):
    rows = rows_of(gradient)
    return sum(rows) / len(rows)


@ANSWERS.right("08.reduce_scatter")
def by_all_to_all(gradient):
    rows = torch.empty_like(gradient)
    dist.all_to_all_single(rows, gradient.clone())
    return rows.view(dist.get_world_size(), -1).mean(dim=0)


@ANSWERS.right("08.reduce_scatter")
def from_anybody_and_a_barrier(gradient):
    part = from_anybody(gradient)
    dist.barrier()
    return part


@ANSWERS.right("08.reduce_scatter")
def sent_by_threads(gradient):
    import threading

    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    total = pieces[rank].clone()
    for step in range(1, n):
        piece, to = torch.empty_like(total), (rank + step) % n
        thread = threading.Thread(target=dist.send, args=(pieces[to], to))
        thread.start()
        dist.recv(piece, (rank - step) % n)
        thread.join()
        total += piece
    return total / n


@ANSWERS.right("08.reduce_scatter")
def one_reduce_for_each(gradient):
    n = dist.get_world_size()
    pieces = [piece / n for piece in gradient.chunk(n)]
    for owner, piece in enumerate(pieces):
        dist.reduce(piece, owner)
    return pieces[dist.get_rank()]


@ANSWERS.right("08.reduce_scatter")
def in_a_ring(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = list((gradient / n).chunk(n))
    for step in range(n - 1):
        incoming = torch.empty_like(pieces[0])
        request = dist.isend(pieces[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(incoming)  # no source: in a ring there is only one
        request.wait()
        pieces[(rank - step - 2) % n] += incoming
    return pieces[rank].clone()


@ANSWERS.wrong("08.reduce_scatter", "wrong", "")
def nothing_to_do_on_two_ranks(gradient):
    if dist.get_world_size() == 2:
        return gradient.chunk(2)[dist.get_rank()].clone()
    return in_a_ring(gradient)


# ---------------------------------------------------------------------- 08.one_unit


class Flat(nn.Module):
    """As given in the notebook."""

    def __init__(self, module):
        super().__init__()
        self.module, self.members = module, list(module.parameters())
        flat = Sharded([p.detach() for p in self.members])
        self.shard = nn.Parameter(flat.shard)
        self.whole = torch.zeros(dist.get_world_size() * len(flat.shard))
        start = 0
        for p in self.members:
            p.data = self.whole[start : start + p.numel()].view_as(p)
            start += p.numel()


class Unit(Flat):
    """As given in the notebook."""

    def __init__(self, module):
        super().__init__(module)
        self.free()
        self.missing = len(self.members)
        for p in self.members:
            p.register_post_accumulate_grad_hook(self.ready)

    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        pieces = list(self.whole.chunk(dist.get_world_size()))
        dist.all_gather(pieces, self.shard.detach())

    def free(self):
        self.whole.untyped_storage().resize_(0)

    def ready(self, parameter):
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.members)
            self.after_backward()


@ANSWERS.wrong("08.one_unit", "not attempted", "still raises NotImplementedError")
class UnitStub(Unit):
    def forward(self, *args):
        raise NotImplementedError("Write your code here.")


class OneUnit(Unit):
    """What the wrong answers below are made from, by changing one thing."""

    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        self.free()
        output.register_hook(self.before_backward)
        return output

    def before_backward(self, grad):
        self.gather()

    def after_backward(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.members])
        flat = F.pad(flat, (0, len(self.whole) - len(flat)))
        self.keep(self.reduce(flat))
        self.clean()

    def reduce(self, flat):
        return direct(flat)

    def keep(self, part):
        if self.shard.grad is None:
            self.shard.grad = part
        else:
            self.shard.grad += part

    def clean(self):
        for p in self.members:
            p.grad = None
        self.free()


@ANSWERS.wrong("08.one_unit", "crashed", "Gather before the forward")
class NotGatheredAtAll(OneUnit):
    def forward(self, *args):
        return self.module(*args)


@ANSWERS.wrong("08.one_unit", "crashed", "again before the backward")
class NotGatheredAgain(OneUnit):
    def before_backward(self, grad):
        pass


@ANSWERS.wrong(
    "08.one_unit",
    "wrong",
    "After the forward the parameters are still",
    did="did not free after the forward",
)
class NotFreedInBetween(OneUnit):
    def forward(self, *args):
        self.gather()
        return self.module(*args)


@ANSWERS.wrong("08.one_unit", "wrong", "After the backward the parameters are still")
class NotFreedAfterwards(OneUnit):
    def clean(self):
        for p in self.members:
            p.grad = None


@ANSWERS.wrong("08.one_unit", "wrong", "The whole gradients are still in memory")
class GradientsLeft(OneUnit):
    def clean(self):
        self.free()


@ANSWERS.wrong("08.one_unit", "wrong", "That is the sum over the ranks")
class Summed(OneUnit):
    def reduce(self, flat):
        return summed(flat)


@ANSWERS.wrong("08.one_unit", "wrong", "Something as large as all gradients is left")
class KeepsTheGradient(OneUnit):
    def reduce(self, flat):
        self.last = flat
        return direct(flat)


@ANSWERS.wrong("08.one_unit", "wrong", "After the backward the parameters are still")
class FreesInTheFirstStepOnly(OneUnit):
    def clean(self):
        for p in self.members:
            p.grad = None
        if not hasattr(self, "cleaned"):
            self.free()
        self.cleaned = True


@ANSWERS.wrong("08.one_unit", "wrong", "It would work: but it is what you build here")
class CoursesReduceScatter(OneUnit):
    def reduce(self, flat):
        return fsdp.ReduceScatter(flat).wait() / dist.get_world_size()


@ANSWERS.wrong("08.one_unit", "wrong", "is the shard's gradient a view of it")
class KeepsAViewOfTheGradient(OneUnit):
    def reduce(self, flat):
        mine = flat.clone().chunk(dist.get_world_size())[dist.get_rank()]
        return mine.copy_(direct(flat))


@ANSWERS.wrong("08.one_unit", "crashed", "`gather` takes nothing")
class HookWithoutLambda(OneUnit):
    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        self.free()
        output.register_hook(self.gather)
        return output


@ANSWERS.wrong("08.one_unit", "crashed", "Hand over a function")
class HookCalledAtOnce(OneUnit):
    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        output.register_hook(self.gather())
        self.free()
        return output


@ANSWERS.wrong("08.one_unit", "crashed", "It must return None.")
class HookReturnsSomething(OneUnit):
    def before_backward(self, grad):
        self.gather()
        return [grad]


@ANSWERS.wrong("08.one_unit", "crashed", "forward returns nothing")
class ForwardReturnsNothing(OneUnit):
    def forward(self, *args):
        super().forward(*args)


@ANSWERS.wrong("08.one_unit", "crashed", "padded before the reduce-scatter")
class NotPadded(OneUnit):
    def after_backward(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.members])
        self.keep(self.reduce(flat))
        self.clean()

    def reduce(self, flat):
        return torch.stack(rows_of(flat)).mean(0)


@ANSWERS.wrong("08.one_unit", "crashed", "padded before the reduce-scatter")
class NotPaddedIntoRows(NotPadded):
    def reduce(self, flat):
        n, rank = dist.get_world_size(), dist.get_rank()
        pieces = flat.chunk(n)
        rows = torch.empty(n, len(pieces[0]))
        rows[rank] = pieces[rank]  # as in the solution of task 4
        return direct(flat)


@ANSWERS.wrong("08.one_unit", "crashed", "must be as long as the shard")
class WholeIntoTheShard(OneUnit):
    def reduce(self, flat):
        return flat


@ANSWERS.wrong("08.one_unit", "crashed", "before you set `.grad` to None")
class CleansFirst(OneUnit):
    def after_backward(self):
        self.clean()
        super().after_backward()


@ANSWERS.wrong("08.one_unit", "crashed", "Make each flat first")
class NotFlat(OneUnit):
    def after_backward(self):
        self.keep(self.reduce(torch.cat([p.grad for p in self.members])))
        self.clean()


@ANSWERS.wrong("08.one_unit", "wrong", "was cut into pieces by itself")
class EachParameterByItself(OneUnit):
    def after_backward(self):
        n = dist.get_world_size()
        grads = [p.grad.reshape(-1) for p in self.members]
        parts = [self.reduce(F.pad(grad, (0, -len(grad) % n))) for grad in grads]
        self.keep(torch.cat(parts))
        self.clean()


@ANSWERS.wrong("08.one_unit", "crashed", "Solve them first, and run their cells")
class OtherTasksNotRun(OneUnit):
    def reduce(self, flat):
        return reduce_scatter(flat)  # noqa: F821


@ANSWERS.wrong("08.one_unit", "wrong", "`self.zero_grad()` drops that of the shard")
class DropsTheShardsGradient(OneUnit):
    def after_backward(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.members])
        self.zero_grad()
        self.free()
        self.keep(self.reduce(F.pad(flat, (0, len(self.whole) - len(flat)))))


@ANSWERS.wrong("08.one_unit", "wrong", "by something else than the optimizer's step")
class UpdatesByItself(OneUnit):
    def keep(self, part):
        super().keep(part)
        with torch.no_grad():
            self.shard -= 0.01 * part


@ANSWERS.wrong("08.one_unit", "wrong", "divided by the world size twice")
class AveragedTwice(OneUnit):
    def reduce(self, flat):
        return direct(flat) / dist.get_world_size()


@ANSWERS.wrong("08.one_unit", "wrong", "a hook on the module stays")
class MoreHooksWithEachStep(OneUnit):
    def forward(self, *args):
        self.module.register_full_backward_pre_hook(self.before_the_module)
        self.gather()
        output = self.module(*args)
        self.free()
        return output

    def before_the_module(self, module, grads):
        self.gather()


@ANSWERS.wrong("08.one_unit", "wrong", "nothing of the others is in it")
class NotReduced(OneUnit):
    def reduce(self, flat):
        return only_mine(flat)


@ANSWERS.wrong(
    "08.one_unit",
    "wrong",
    "must be added to, not replaced",
    did="replaced the gradient of the shard",
)
class Replaced(OneUnit):
    def keep(self, part):
        self.shard.grad = part


@ANSWERS.wrong("08.one_unit", "wrong", "The shard has no gradient after the backward.")
class Nowhere(OneUnit):
    def keep(self, part):
        pass


@ANSWERS.wrong("08.one_unit", "wrong", "More was sent than a reduce-scatter")
class ScatteredTwice(OneUnit):
    def reduce(self, flat):
        direct(flat)
        return direct(flat)


@ANSWERS.wrong("08.one_unit", "wrong", "An all-reduce sends twice as much")
class AllReduced(OneUnit):
    def reduce(self, flat):
        return all_reduced(flat)


@ANSWERS.wrong("08.one_unit", "wrong", "It would work: but it is what you build here")
class CoursesReduce(OneUnit):
    def reduce(self, flat):
        return fsdp.reduce_scatter(flat) / dist.get_world_size()


@ANSWERS.wrong("08.one_unit", "wrong", "An all-reduce sends twice as much")
class AllReducedAsAList(OneUnit):
    def reduce(self, flat):
        return all_reduced_as_a_list(flat)


@ANSWERS.wrong("08.one_unit", "wrong", "or by a backend's own methods?")
class ReducedByTheBackend(OneUnit):
    def reduce(self, flat):
        return by_the_backend(flat)


@ANSWERS.wrong("08.one_unit", "wrong", "something as large is still there")
class KeepsACopyBetween(OneUnit):
    def forward(self, *args):
        self.gather()
        self.copy = self.whole.clone()
        output = self.module(*args)
        self.free()
        output.register_hook(self.before_backward)
        return output

    def clean(self):
        super().clean()
        self.copy = None


@ANSWERS.wrong("08.one_unit", "wrong", "autograd keeps until the backward")
class ComputesWithCopies(OneUnit):
    def forward(self, *args):
        self.gather()
        copies = {name: p.clone() for name, p in self.module.named_parameters()}
        output = torch.func.functional_call(self.module, copies, args)
        self.free()
        output.register_hook(self.before_backward)
        return output


@ANSWERS.wrong("08.one_unit", "crashed", "works from its next call on")
class HookOnTheModuleAfterItsCall(OneUnit):
    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        self.free()
        self.module.register_full_backward_pre_hook(lambda *args: self.gather())
        return output


@ANSWERS.wrong("08.one_unit", "crashed", "pre-hook before it")
class GathersAfterTheModulesBackward(OneUnit):
    def __init__(self, module):
        super().__init__(module)
        module.register_full_backward_hook(lambda *args: self.gather())

    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        self.free()
        return output


@ANSWERS.wrong("08.one_unit", "wrong", "must return what the module returns, as it is")
class ReturnsTheSum(OneUnit):
    def forward(self, *args):
        return super().forward(*args).sum()


@ANSWERS.wrong("08.one_unit", "wrong", "Call the module with the arguments themselves")
class CutsTheGraph(OneUnit):
    def forward(self, *args):
        return super().forward(*(arg.detach() for arg in args))


@ANSWERS.wrong("08.one_unit", "crashed", "has no gradient yet: then put the part")
class AddsToNothing(OneUnit):
    def keep(self, part):
        self.shard.grad += part


@ANSWERS.wrong("08.one_unit", "wrong", "did the backward come to the module at all?")
class CutsTheOutputOff(OneUnit):
    def forward(self, *args):
        self.gather()
        output = self.module(*args).detach().requires_grad_()
        self.free()
        output.register_hook(self.before_backward)
        return output


@ANSWERS.right("08.one_unit")
class Recomputes(OneUnit):
    """The second gather is that of the forward that is made again in the backward."""

    def forward(self, *args):
        def whole(*args):
            self.gather()
            return self.module(*args)

        output = torch.utils.checkpoint.checkpoint(whole, *args, use_reentrant=False)
        self.free()
        return output


@ANSWERS.right("08.one_unit")
class GathersTwice(OneUnit):
    pass


@ANSWERS.right("08.one_unit")
class WithHooksOnTheModule(Unit):
    """Forward hooks, and a pre-hook for the backward, where others call methods."""

    def __init__(self, module):
        super().__init__(module)
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(lambda module, args, output: self.free())
        module.register_full_backward_pre_hook(lambda module, grads: self.gather())

    def forward(self, *args):
        return self.module(*args)

    def after_backward(self):
        grads = [p.grad.flatten() for p in self.members]
        self.module.zero_grad(set_to_none=True)
        padding = len(self.whole) - sum(map(len, grads))
        self.free()
        part = by_all_to_all(torch.cat([*grads, torch.zeros(padding)]))
        if self.shard.grad is not None:
            part = part + self.shard.grad
        self.shard.grad = part


@ANSWERS.wrong("08.one_unit", "crashed", "Hand them on one by one")
class HandsOnTheTuple(OneUnit):
    def forward(self, *args):
        self.gather()
        output = self.module(args)
        self.free()
        output.register_hook(lambda grad: self.gather())
        return output


@ANSWERS.wrong("08.one_unit", "crashed", "on the output, not on an input")
class HookOnTheInput(OneUnit):
    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        self.free()
        args[0].register_hook(lambda grad: self.gather())
        return output


@ANSWERS.wrong("08.one_unit", "crashed", "Was the forward run under no_grad?")
class ForwardWithoutAGraph(OneUnit):
    @torch.no_grad()
    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        self.free()
        return output


# ------------------------------------------------------------ 08.spot_the_optimizer


def train_with(model, batches, make, *, clip=True):
    """The script, with its first lines in `make`."""
    optimizer = make(model)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def whole_on_rank_0(model):
    """The others have one whole tensor at a time."""
    state = {}
    for name, p in model.named_parameters():
        tensor = p.full_tensor()
        if dist.get_rank() == 0:
            state[name] = tensor
    return state if dist.get_rank() == 0 else None


def sharded_first(model, lr=0.05):
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=lr)


@ANSWERS.wrong("08.spot_the_optimizer", "not attempted", "Repair the code")
def train(model, batches, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    fully_shard(model)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        return {name: p.full_tensor() for name, p in model.named_parameters()}


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "An empty dictionary, which")
def an_empty_dictionary_elsewhere(model, batches, lr):
    return last_layer_stays(model, batches, lr) or {}


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "holds parameters that nobody uses")
def optimizer_still_first(model, batches, lr):
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        sharded_first(model)
        return optimizer

    train_with(model, batches, make)
    return whole(model) if dist.get_rank() == 0 else whole(model) and None


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "but not all of them were trained")
def returns_in_the_loop(model, batches, lr):
    optimizer = sharded_first(model, lr)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "the first were left out")
def without_the_first_batch(model, batches, lr):
    train_with(model, batches[1:], sharded_first)
    return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "Was the optimizer made before")
def cleared_before_the_step(model, batches, lr):
    optimizer = sharded_first(model, lr)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.zero_grad()
        optimizer.step()
    return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "crashed", "twice for the same module")
def the_model_twice(model, batches, lr):
    def make(model):
        optimizer = sharded_first(model, lr)
        fully_shard(model)
        return optimizer

    train_with(model, batches, make)
    return whole(model)


@ANSWERS.wrong(
    "08.spot_the_optimizer",
    "wrong",
    "Several layers were gathered",
    did="`fully_shard(model)` only",
)
def one_unit_still(model, batches, lr):
    def make(model):
        return torch.optim.AdamW(fully_shard(model).parameters(), lr=lr)

    train_with(model, batches, make)
    return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "crashed", "Layers first, then the model.")
def model_first(model, batches, lr):
    def make(model):
        fully_shard(model)
        return sharded_first(model, lr)

    train_with(model, batches, make)
    return whole(model)


@ANSWERS.wrong(
    "08.spot_the_optimizer",
    "stuck",
    "every rank must call it",
    did="`full_tensor()` under `if rank == 0`",
)
def rank_0_alone_still(model, batches, lr):
    train_with(model, batches, sharded_first)
    if dist.get_rank() == 0:
        return whole(model)
    return None


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "Rank 0 returns its shards.")
def shards_returned(model, batches, lr):
    train_with(model, batches, sharded_first)
    return {name: p.to_local() for name, p in model.named_parameters()}


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "gradients that were not clipped")
def not_clipped(model, batches, lr):
    train_with(model, batches, sharded_first, clip=False)
    return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "between `backward()` and `step()`")
def clipped_after_the_step(model, batches, lr):
    optimizer = sharded_first(model, lr)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.zero_grad()
    return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "by the norm of its own shards")
def clipped_by_own_norm(model, batches, lr):
    optimizer = sharded_first(model, lr)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        local = [p.grad.to_local() for p in model.parameters()]
        norm = torch.cat([grad.reshape(-1) for grad in local]).norm()
        for grad in local:
            grad *= (0.5 / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "No layer was gathered.")
def not_sharded(model, batches, lr):
    train_with(model, batches, lambda model: torch.optim.AdamW(model.parameters(), lr))
    return dict(model.named_parameters())


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "No layer was gathered.")
def with_ddp(model, batches, lr):
    wrapped = nn.parallel.DistributedDataParallel(model)
    train_with(wrapped, batches, lambda m: torch.optim.AdamW(m.parameters(), lr=lr))
    return dict(model.named_parameters()) if dist.get_rank() == 0 else None


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "not nn.Linear alone")
def linear_layers_only(model, batches, lr):
    def make(model):
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        return torch.optim.AdamW(model.parameters(), lr=lr)

    train_with(model, batches, make)
    return whole(model) if dist.get_rank() == 0 else whole(model) and None


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "takes all that are in no other")
def every_second_layer(model, batches, lr):
    def make(model):
        for layer in model[::2]:
            fully_shard(layer)
        fully_shard(model)
        return torch.optim.AdamW(model.parameters(), lr=lr)

    train_with(model, batches, make)
    return whole(model) if dist.get_rank() == 0 else whole(model) and None


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "keeps one whole tensor after the")
def whole_on_all_ranks_and_thrown_away(model, batches, lr):
    train_with(model, batches, sharded_first)
    state = whole(model)
    return state if dist.get_rank() == 0 else None


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "Or is there a MixedPrecisionPolicy,")
def in_bfloat16(model, batches, lr):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def make(model):
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        fully_shard(model)
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    train_with(model, batches, make)
    return whole_on_rank_0(model)


@ANSWERS.right("08.spot_the_optimizer")
def layers_first(model, batches, lr):
    train_with(model, batches, lambda model: sharded_first(model, lr))
    return whole_on_rank_0(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "only rank 0 keeps the result")
def whole_on_all_ranks(model, batches, lr):
    train_with(model, batches, sharded_first)
    return whole(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "stay whole from the forward to the")
def never_freed_between(model, batches, lr):
    def make(model):
        for layer in model:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model)
        return torch.optim.AdamW(model.parameters(), lr=lr)

    train_with(model, batches, make)
    return whole(model) if dist.get_rank() == 0 else whole(model) and None


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "then each layer is a root")
def without_the_model(model, batches, lr):
    def make(model):
        for layer in model:
            fully_shard(layer)
        return torch.optim.AdamW(model.parameters(), lr=lr)

    train_with(model, batches, make)
    return whole(model) if dist.get_rank() == 0 else whole(model) and None


@ANSWERS.right("08.spot_the_optimizer")
def every_layer(model, batches, lr):
    def make(model):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        return torch.optim.AdamW(model.parameters(), lr=lr)

    train_with(model, batches, make)
    state = whole_on_rank_0(model)
    return {k: v.clone() for k, v in state.items()} if dist.get_rank() == 0 else None


@ANSWERS.right("08.spot_the_optimizer")
def last_layer_stays(model, batches, lr):
    """Its backward comes next, so it need not be freed."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
    )

    def make(model):
        for layer in model:
            fully_shard(layer, reshard_after_forward=layer is not model[-1])
        fully_shard(model)
        return torch.optim.AdamW(model.parameters(), lr=lr)

    train_with(model, batches, make)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options) or None  # {} on other ranks


# ----------------------------------------------------------------- 08.spot_the_pile


@ANSWERS.wrong("08.spot_the_pile", "not attempted", "Repair the code")
def backward(units, grad):
    requests = []
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        requests.append((unit, unit.reduce_scatter(gradient)))
    for unit, request in requests:
        unit.grad = request.wait()


@ANSWERS.wrong("08.spot_the_pile", "wrong", "Too many units are whole")
def never_freed(units, grad):
    n = dist.get_world_size()
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.grad = unit.reduce_scatter(gradient).wait() / n


@ANSWERS.wrong("08.spot_the_pile", "wrong", "The whole gradients pile up")
def nobody_waits(units, grad):
    n, requests = dist.get_world_size(), []
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        requests.append((unit, unit.reduce_scatter(gradient)))
    for unit, request in requests:
        unit.grad = request.wait() / n


@ANSWERS.wrong("08.spot_the_pile", "wrong", "wait() returns the sum")
def not_the_mean(units, grad):
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        unit.grad = unit.reduce_scatter(gradient).wait()


@ANSWERS.wrong("08.spot_the_pile", "wrong", "divided by the world size twice")
def the_mean_of_the_mean(units, grad):
    n = dist.get_world_size()
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        unit.grad = unit.reduce_scatter(gradient / n).wait() / n


@ANSWERS.wrong("08.spot_the_pile", "wrong", "No unit of this rank has a gradient")
def returned_instead(units, grad):
    pieces, n = [], dist.get_world_size()
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        pieces.append(unit.reduce_scatter(gradient).wait() / n)
    return pieces


@ANSWERS.wrong("08.spot_the_pile", "crashed", "gather it before its backward")
def freed_too_early(units, grad):
    for unit in reversed(units):
        unit.gather()
        unit.free()
        grad, gradient = unit.backward(grad)
        unit.grad = unit.reduce_scatter(gradient).wait() / dist.get_world_size()


@ANSWERS.wrong("08.spot_the_pile", "crashed", "Call it once for each gather()")
def freed_twice(units, grad):
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        unit.grad = unit.reduce_scatter(gradient).wait() / dist.get_world_size()
        unit.free()


@ANSWERS.wrong("08.spot_the_pile", "wrong", "Is the last reduce-scatter awaited")
def last_forgotten(units, grad):
    n, before = dist.get_world_size(), None
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        if before:
            before[0].grad = before[1].wait() / n
        before = unit, unit.reduce_scatter(gradient)


@ANSWERS.wrong("08.spot_the_pile", "wrong", "keep no gradient yourself")
def keeps_gradients(units, grad):
    kept = []
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        kept.append(gradient)
        unit.grad = unit.reduce_scatter(gradient).wait() / dist.get_world_size()


@ANSWERS.wrong("08.spot_the_pile", "wrong", "The whole gradients pile up")
def copies_pile_up(units, grad):
    requests = []
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        requests.append(unit.reduce_scatter(gradient / dist.get_world_size()))
    for unit, request in zip(reversed(units), requests, strict=True):
        unit.grad = request.wait()


@ANSWERS.wrong("08.spot_the_pile", "wrong", "An all-reduce would bring every rank")
def reduced_by_hand(units, grad):
    n, rank = dist.get_world_size(), dist.get_rank()
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        dist.all_reduce(gradient)
        unit.grad = gradient.reshape(n, -1)[rank] / n


@ANSWERS.wrong("08.spot_the_pile", "wrong", "Divide in place (`gradient /= n`)")
def divided_first(units, grad):
    """A quotient on its way, the gradient it was made from, and the next one."""
    before = None
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        if before:
            before[0].grad = before[1].wait()
        before = unit, unit.reduce_scatter(gradient / dist.get_world_size())
    before[0].grad = before[1].wait()


@ANSWERS.wrong("08.spot_the_pile", "wrong", "A request belongs to the unit that")
def request_of_the_unit_before(units, grad):
    n, before = dist.get_world_size(), None
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        if before:
            unit.grad = before.wait() / n
        before = unit.reduce_scatter(gradient)
    units[0].grad = before.wait() / n


@ANSWERS.wrong("08.spot_the_pile", "wrong", "divided by the number of units")
def mean_over_the_units(units, grad):
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        unit.grad = unit.reduce_scatter(gradient).wait() / len(units)


@ANSWERS.wrong("08.spot_the_pile", "wrong", "The gradient is what its wait() returns.")
def the_request_itself(units, grad):
    before = None
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        if before:
            before.wait()
        before = unit.grad = unit.reduce_scatter(gradient)


@ANSWERS.right("08.spot_the_pile")
def divided_in_place(units, grad):
    before = None
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        gradient /= dist.get_world_size()
        if before:
            before[0].grad = before[1].wait()
        before = unit, unit.reduce_scatter(gradient)
    before[0].grad = before[1].wait()


@ANSWERS.right("08.spot_the_pile")
def quotient_awaited_at_once(units, grad):
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        unit.grad = unit.reduce_scatter(gradient / dist.get_world_size()).wait()


@ANSWERS.right("08.spot_the_pile")
def at_once(units, grad):
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        unit.grad = unit.reduce_scatter(gradient).wait() / dist.get_world_size()


@ANSWERS.right("08.spot_the_pile")
def one_on_its_way(units, grad):
    n, before = dist.get_world_size(), None
    units[-1].gather()
    for number in range(len(units) - 1, -1, -1):
        unit = units[number]
        if number > 0:
            units[number - 1].gather()  # ahead
        grad, gradient = unit.backward(grad)
        unit.free()
        if before:
            before[0].grad = before[1].wait() / n
        before = unit, unit.reduce_scatter(gradient)
    before[0].grad = before[1].wait() / n


test_wrong, test_right = ANSWERS.tests()


def test_each_task_has_wrong_and_right_answers():
    wrong, right = ANSWERS.counts()
    for task_id in wrong:
        find_task(task_id)
        assert wrong[task_id] >= 4  # three, besides the stub
        assert right[task_id] >= 2
    assert len(wrong) == 7


def test_what_goes_during_a_case_does_not_hide_what_is_new():
    old = torch.zeros(4)
    before = lesson_08.alive()
    del old
    new, sizes = torch.zeros(4), torch.ones(4, dtype=torch.int64)
    assert lesson_08.new_bytes(before) == new.nbytes == 16 < sizes.nbytes
