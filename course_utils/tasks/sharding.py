"""For the tasks about FSDP: what is gathered, what is sent, what is whole."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from course_utils.measure.alive import settled
from course_utils.measure.taps import tap
from course_utils.measure.traffic import Watch
from course_utils.tasks.inputs import linear

FEW = 4  # tensors; one is left from the last round of a loop
# Only what the installed version has: their names have changed.
REDUCE_SCATTERS = (
    *(name for name in vars(dist) if name.startswith("reduce_scatter")),
    "torch.distributed._functional_collectives.reduce_scatter_tensor",
)

TWO_LAYERS = "two linear layers, 242 numbers"
TIED = "two layers with one weight"
NORMED = "a module of two inputs, without zero_grad()"


class Scaled(nn.Module):
    """A linear layer and a layer norm; the second input scales what comes out."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = linear(3, 4, 13, divided_by=8), nn.LayerNorm(4)

    def forward(self, x, scale):
        return self.norm(self.linear(x)) * scale


def module_of(kind):
    """The same on every rank."""
    if kind == NORMED:
        return Scaled()
    width, outputs = (3, 3) if kind == TIED else (40, 2)
    first = linear(3, width, 11, divided_by=8)
    last = linear(width, outputs, 12, divided_by=8)
    if kind == TIED:
        last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Tanh())


def bytes_behind(module):
    """Bytes of the memory of the module's parameters, each memory counted once."""
    storages = [p.untyped_storage() for p in module.parameters()]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


@contextlib.contextmanager
def called(*names):
    """Yields a list: which of these methods of process groups are called meanwhile."""
    found = []

    def around(call):
        found.append(call.name)
        return call.go()

    with tap(around, names):
        yield found


class Gathers(Watch):
    """Notes the bytes of the largest all-gather, and how many a backward calls."""

    def __init__(self):
        super().__init__()
        self.nbytes = self.in_backward = 0

    def note(self, name, nbytes, size):
        n = dist.get_world_size()
        if name == "all-gather":  # a rank sends its part to n - 1 others
            self.nbytes = max(self.nbytes, round(nbytes * n / (n - 1)))
            self.in_backward += torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def announced():
    """Let a `full_tensor()` that others do not call be found within seconds.

    Its all-gather does not pass torch.distributed, where a rank is seen to wait.

    Yields a list: of each call of other ranks than 0, how many of the tensors before
    it were still there.
    """
    from torch.distributed.tensor import DTensor

    original, made, kept = DTensor.full_tensor, [], []

    def full_tensor(self, *args, **kwargs):
        gathered = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.ones(1))
        if dist.get_rank() > 0:  # rank 0 keeps them all
            there = settled(lambda: sum(not one.expired() for one in made), FEW, 0.2)
            kept.append(there)
        whole = original(self, *args, **kwargs)
        made.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    DTensor.full_tensor = full_tensor
    try:
        yield kept
    finally:
        DTensor.full_tensor = original


# --------------------------------------------------------- layers that can be counted


class Counts:
    """What of a model is in memory, counted in units.

    Attributes:
        handed_out: weak references to the memory of the gradients that units returned.
        on_their_way: the tensors of the requests that nobody has waited for.
        most_gradients: different ones of these in memory at once, at most.
    """

    def __init__(self):
        self.whole = self.most_whole = self.requests = self.most_gradients = 0
        self.handed_out, self.on_their_way = [], []

    def note_gradients(self):
        """Count whole gradients: those on their way, and those that somebody keeps."""
        kept = {one.cdata for one in self.handed_out if not one.expired()}
        sent = {one.untyped_storage()._cdata for one in self.on_their_way}
        self.most_gradients = max(self.most_gradients, len(kept | sent))


class ReduceScatter:
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
        self._shape, self._counts, self._whole = weight.shape, counts, None

    def gather(self):
        if self._whole is not None:
            raise RuntimeError("This unit is whole already.")
        pieces = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, self.shard)
        self._whole = torch.cat(pieces).view(self._shape)
        self._counts.whole += 1
        self._counts.most_whole = max(self._counts.most_whole, self._counts.whole)

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
        self._counts.note_gradients()
        return grad @ self._need().t(), gradient

    def reduce_scatter(self, gradient):
        return ReduceScatter(gradient, self._counts)

    def _need(self):
        if self._whole is None:
            raise RuntimeError("This unit is not whole: call gather() first.")
        return self._whole
