"""The books of a machine: on which GPU each storage is, and what fills its memory."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from course_utils.virtual_gpus import errors
from course_utils.virtual_gpus.parts import (
    CPU,
    Device,
    Owned,
    Ref,
    Tensor,
    ThreadState,
    blocks,
    key_of,
    truth,
    unwrapped,
)
from course_utils.virtual_gpus.records import GRADIENTS, OTHER, PARAMETERS


class Ledger:
    """Who owns which storage, on devices `cuda:0 ... cuda:n-1`."""

    def __init__(self, n: int, memory: Sequence[int]) -> None:
        self.n = n
        self.is_on = False
        self.devices = [torch.device("cuda", i) for i in range(n)]
        self.gpus = [Device(d, m) for d, m in zip(self.devices, memory, strict=True)]
        self.owned: dict[int, Owned] = {}
        self.freed: deque[Owned] = deque()
        # Tensors that may have a gradient
        self.leaves: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self.births = itertools.count(1)
        self.thread = ThreadState()
        self.lock = threading.RLock()
        self.process = 0

    # ---- devices ---------------------------------------------------------------------

    def device_of(self, x: Tensor) -> torch.device:
        """Where a tensor is; what `tensor.device` answers while this machine is on."""
        with truth():
            if self.thread.plain:
                return torch._C.TensorBase.device.__get__(x)
            return self.where(x)

    def drifts(self, x: Tensor) -> bool:
        """Is this a helper of C++ of which nothing says where it is? See `drift`.

        Wrappers without a storage count as such: PyTorch does not check them either.
        """
        with truth():
            key = key_of(x)
            owned = self.owned.get(key)
            return key is None or owned is not None and owned.drifts

    def entry(self, x: Tensor) -> Owned | None:
        """What is known of a tensor's storage; None for one on the CPU."""
        return self.owned.get(key_of(x))

    def where(self, x: Tensor) -> torch.device:
        owned = self.entry(x)
        if owned is not None:
            return owned.device
        inner = unwrapped(x)
        if inner is not None and inner is not x:
            return self.where(inner)
        device = torch._C.TensorBase.device.__get__(x)
        return CPU if device == CPU else device

    def resolve(self, device: Any) -> torch.device | None:
        """A virtual GPU, or the CPU; None for a device that is neither ("meta").

        Raises:
            RuntimeError: there is no such GPU, in PyTorch's words.
        """
        __tracebackhide__ = True
        if not isinstance(device, torch.device):
            if isinstance(device, int) and not isinstance(device, bool):
                if device < 0:
                    raise RuntimeError("Device index must not be negative")
                device = torch.device("cuda", device)
            else:
                device = torch.device(device)
        if device.type == "cpu":
            return CPU
        if device.type != "cuda":
            return None
        if os.getpid() != self.process:
            raise RuntimeError(errors.FORKED)
        index = self.thread.current if device.index is None else device.index
        if index >= self.n:
            raise torch.AcceleratorError(errors.invalid_ordinal(index, self.n))
        return self.devices[index]

    def index(self, device: Any = None) -> int:
        """Number of a GPU; of the current one for None."""
        if device is None:
            return self.thread.current
        resolved = self.resolve(device)
        if resolved is None or resolved is CPU:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return resolved.index

    # ---- storages --------------------------------------------------------------------

    def settle(self) -> None:
        """Take off the books what has been freed."""
        while self.freed:
            owned = self.freed.popleft()
            self.gpus[owned.device.index].remove(owned)

    def reset_peak(self, device: Any = None) -> None:
        """From now on, the peak of a GPU is the most since now."""
        with self.lock:
            self.settle()
            self.gpus[self.index(device)].set_peak(next(self.births))

    def _free(self, ref: Ref) -> None:
        # Called by Python whenever a storage dies, in any thread, also in the middle of
        # another call: only what needs no lock.
        owned = self.owned.pop(ref.key, None)
        if owned is not None:
            self.freed.append(owned)

    def enter(self, storage: Any, owned: Owned) -> None:
        owned.ref = Ref(storage, self._free)
        owned.ref.key = owned.key
        self.owned[owned.key] = owned

    def room(self, device: torch.device, nbytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if so much more does not fit."""
        __tracebackhide__ = True
        gpu = self.gpus[device.index]
        if gpu.now + nbytes > gpu.capacity:
            self.settle()
            if gpu.now + nbytes > gpu.capacity:
                gpu.failures += 1
                raise torch.OutOfMemoryError(
                    errors.out_of_memory(device.index, nbytes, gpu.now, gpu.capacity)
                )

    def adopt(self, x: Tensor, device: torch.device, kind: str) -> Owned:
        """A new storage now belongs to a device."""
        __tracebackhide__ = True
        storage = x.untyped_storage()
        nbytes = blocks(storage.nbytes())
        if self.freed:
            self.settle()
        self.room(device, nbytes)
        owned = self.owned.get(storage._cdata)
        if owned is None:
            owned = Owned(storage._cdata, device, nbytes, next(self.births))
            self.enter(storage, owned)
        else:  # it has drifted until now
            owned.device, owned.nbytes, owned.drifts = device, nbytes, False
            owned.born = next(self.births)
        owned.kind = kind
        self.gpus[device.index].add(owned)
        return owned

    def drift(self, x: Tensor) -> None:
        """A helper made by C++ in a backward, from no tensor at all: say, zeros.

        Nothing tells where a GPU would have made it. It counts as on the device of the
        last op, and belongs to the first device whose tensors it meets.
        """
        storage = x.untyped_storage()
        device = self.thread.last
        if device is not None and storage._cdata not in self.owned:
            owned = Owned(storage._cdata, device, 0, next(self.births))
            owned.drifts = True
            self.enter(storage, owned)

    def belongs_to(self, x: Tensor, device: torch.device) -> None:
        """Say where a helper of C++ is; see `drift`."""
        if self.drifts(x):
            with truth(), self.lock:
                self.adopt(x, device, OTHER)

    def resized(self, storage: Any) -> None:
        owned = self.owned.get(storage._cdata)
        nbytes = blocks(storage.nbytes())
        if owned is not None and not owned.drifts and nbytes != owned.nbytes:
            gpu = self.gpus[owned.device.index]
            self.settle()
            gpu.remove(owned)
            owned.nbytes, owned.born = nbytes, next(self.births)
            gpu.add(owned)

    def resize(self, storage: Any, resize: Callable[[], Any], nbytes: int) -> Any:
        """A storage changes its size; one that grows needs room for old and new."""
        __tracebackhide__ = True
        with truth(), self.lock:
            owned = self.owned.get(storage._cdata)
            if owned is not None and not owned.drifts and nbytes > storage.nbytes():
                self.room(owned.device, blocks(nbytes))
            out = resize()
            self.resized(storage)
            return out

    def release(self, x: Tensor) -> None:
        with truth(), self.lock:
            owned = self.owned.pop(key_of(x), None)
            if owned is not None and not owned.drifts:
                self.freed.append(owned)

    # ---- what storages hold ----------------------------------------------------------

    def classify(self, x: Tensor, kind: str) -> None:
        """Whatever holds these bytes, it is now known as `kind`."""
        with truth():
            owned = self.entry(x)
            if owned is not None and owned.kind != kind and not owned.drifts:
                self.gpus[owned.device.index].classify(owned, kind)

    def kinds_of(self, tensors: Iterable[Tensor]) -> set[str]:
        """What all these hold."""
        entries = map(self.entry, tensors)
        return {OTHER if owned is None else owned.kind for owned in entries}

    def remember(self, leaf: Tensor) -> None:
        """Its `.grad` will be looked up after a backward."""
        self.leaves[id(leaf)] = leaf

    def find_gradients(self) -> None:
        with truth():
            for leaf in list(self.leaves.values()):
                grad = leaf.grad
                owned = None if grad is None else self.entry(grad)
                if owned is None or owned.kind == GRADIENTS:
                    continue
                if owned.drifts:
                    home = self.where(leaf)
                    if home is CPU or home.type != "cuda":
                        self.owned.pop(owned.key, None)
                        continue
                    self.adopt(grad, home, GRADIENTS)
                elif owned.kind != PARAMETERS:
                    self.gpus[owned.device.index].classify(owned, GRADIENTS)

    def gradients_of_now(self, inputs: list[Tensor]) -> set[torch.Size]:
        """The shapes of what the running part of a backward makes for leaves.

        With micro-batches, such a gradient waits for the others of its leaf, and is not
        in `.grad` yet. By its shape it is told from the gradient of an activation.
        """
        node = torch._C._current_autograd_node()
        if node is None:  # autograd adds up gradients of one leaf
            only_gradients = self.kinds_of(inputs) == {GRADIENTS}
            return {x.shape for x in inputs} if only_gradients else set()
        shapes = set()
        for after, _ in node.next_functions:
            if after is None:
                continue
            shapes |= self._shapes_of_leaves(after)
            if after.name() == "TBackward0":  # the weight of a linear layer
                for leaf, _ in after.next_functions:
                    for shape in self._shapes_of_leaves(leaf):
                        shapes |= {shape, torch.Size(reversed(shape))}
        return shapes

    def _shapes_of_leaves(self, node: Any) -> set[torch.Size]:
        """Those of a leaf; those of all, for the node that replicated them."""
        if hasattr(node, "variable"):  # a torch::autograd::AccumulateGrad
            return {node.variable.shape}
        if node is None or node.name() != "BroadcastBackward":
            return set()
        leaves = [leaf for leaf, _ in node.next_functions]
        return {leaf.variable.shape for leaf in leaves if hasattr(leaf, "variable")}
