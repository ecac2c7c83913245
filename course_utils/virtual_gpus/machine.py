"""The machine behind `virtual_gpus`: who owns which storage, memory, time, checks.

Read `course_utils/virtual_gpus/__init__.py` first: it says how the parts fit together.
`VirtualGPUs` in `gpus.py` is this machine with its switches and its records.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils.theory import costs
from course_utils.virtual_gpus import cuda, errors, surface
from course_utils.virtual_gpus.parts import (
    BLOCK,
    Call,
    Clock,
    Device,
    Op,
    Owned,
    Ref,
    ThreadState,
    tensors_in,
)
from course_utils.virtual_gpus.patches import copy_of
from course_utils.virtual_gpus.records import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Transfer,
)

CPU = surface.CPU  # one object, so that `is` may compare
Tensor, Parameter = torch.Tensor, torch.nn.Parameter
aten = torch.ops.aten
_register_hook = copy_of(Tensor.register_hook)  # it is replaced, see surface.py

# Inside it PyTorch's own C++ answers, past every mode and every patched method.
truth = torch._C.DisableTorchFunction

# What the CPU of a machine with GPUs does, where `compute` is a rate.
HOST_FLOPS, HOST_BANDWIDTH = 100e9, 50e9

active: Machine | None = None  # the machine that is on in this process


def _as_above(op: Op) -> contextlib.AbstractContextManager:
    """For taking an op apart here, below autograd, as PyTorch does it above.

    What C++ keeps from a mode comes back: conjugates that are not computed yet, and, in
    inference mode, how a view is one of a parameter (`matmul` asks for that).
    """
    c = torch._C
    out = c._dispatch_tls_local_exclude_set()
    for key in (c.DispatchKey.Conjugate, c.DispatchKey.Negative):
        out = out.remove(key)
    if torch.is_inference_mode_enabled() and not op.makes_view:
        out = out.remove(c.DispatchKey.ADInplaceOrView)
    return c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), out)


# --- the two modes that PyTorch calls -------------------------------------------------


class _Dispatch(TorchDispatchMode):
    """Sees every ATen op, below autograd."""

    supports_higher_order_operators = True

    def __init__(self, gpus: Machine) -> None:
        super().__init__()
        self.gpus = gpus

    # Otherwise the first op imports torch._dynamo, which takes 2 seconds.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        __tracebackhide__ = True  # IPython and pytest leave these frames out
        if not isinstance(func, torch._ops.OpOverload) or self.gpus is not active:
            return func(*args, **(kwargs or {}))
        with truth():
            return self.gpus._run(func, args, kwargs or {}, self)


class _Function(TorchFunctionMode):
    """Sees every call of a PyTorch function from Python, above autograd."""

    def __init__(self, gpus: Machine) -> None:
        super().__init__()
        self.gpus = gpus

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        __tracebackhide__ = True
        if self.gpus is not active:
            return func(*args, **(kwargs or {}))
        return self.gpus._call(func, args, kwargs or {})


class _Move(torch.autograd.Function):
    """A copy to another device; its gradient is copied back."""

    @staticmethod
    def forward(x, destination, gpus, cause, waits):
        __tracebackhide__ = True
        return gpus._copy(x, destination, cause, waits)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, destination, ctx.gpus, cause, _ = inputs
        ctx.source, ctx.destination = ctx.gpus.device_of(x), destination
        ctx.module, ctx.cause = ctx.gpus._module(), cause

    @staticmethod
    def backward(ctx, grad):
        with ctx.gpus._as_in(ctx.module):
            back = ctx.gpus._moved(grad, ctx.source, ctx.cause)
        return back, None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return ctx.gpus._moved(tangent, ctx.destination, ctx.cause)

    @staticmethod
    def vmap(info, in_dims, x, *rest):
        return _Move.apply(x, *rest), in_dims[0]


# --- the machine ----------------------------------------------------------------------


def _after_fork() -> None:
    # Another thread may have held the lock at that moment; it is not in the child.
    if active is not None:
        active._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Machine:
    """Devices `cuda:0 ... cuda:n-1`: what is where, and what it costs."""

    def __init__(
        self,
        n: int,
        *,
        memory: Sequence[int],
        bandwidth: float,
        host_bandwidth: float,
        latency: float,
        compute: float | None,
        memory_bandwidth: float,
        overhead: float,
    ) -> None:
        self.n = n
        self._devices = [torch.device("cuda", i) for i in range(n)]
        self._gpus = [Device(d, m) for d, m in zip(self._devices, memory, strict=True)]
        self._bandwidth, self._host_bandwidth = bandwidth, host_bandwidth
        self._latency, self._compute = latency, compute
        self._memory_bandwidth, self._overhead = memory_bandwidth, overhead
        self._owned: dict[int, Owned] = {}
        self._pinned: dict[int, weakref.ref] = {}
        self._freed: deque[Owned] = deque()
        self._leaves: dict[int, weakref.ref] = {}  # that may have a gradient
        self._ops: dict[Any, Op] = {}
        self._births = itertools.count(1)
        self._host = Clock("cpu")
        self._transfers: list[Transfer] = []
        self._thread = ThreadState()
        self._autocast = cuda.AutocastState()
        self._lock = threading.RLock()
        self._process = 0

    def _anywhere(self, function: Callable) -> Callable:
        """`function`, to be called in whatever thread: modes belong to one thread.

        A thread that has them not gets them for the call, with the label, the modules
        and the time of here and now.
        """
        here = self._thread
        host, label, modules = here.host, here.label, list(here.modules)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            if thread.entered or not self.is_on:
                return function(*args, **kwargs)
            thread.host, thread.modules, thread.entered = host, list(modules), True
            if label:
                thread.set_label(label)
            try:
                with _Function(self), _Dispatch(self):
                    return function(*args, **kwargs)
            finally:
                thread.entered = False

        return call

    @property
    def is_on(self) -> bool:
        """Is it this machine that is on?"""
        return self is active

    # ---- devices ---------------------------------------------------------------------

    def device_of(self, x: Tensor) -> torch.device:
        """Where a tensor is; what `tensor.device` answers while this machine is on."""
        with truth():
            if self._thread.plain:
                return torch._C.TensorBase.device.__get__(x)
            return self._where(x)

    def drifts(self, x: Tensor) -> bool:
        """Is this a helper of C++ of which nothing says where it is? See `_drift`.

        Wrappers without a storage count as such: PyTorch does not check them either.
        """
        with truth():
            try:
                owned = self._owned.get(x.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):
                return True
            return owned is not None and owned.drifts

    def _where(self, x: Tensor) -> torch.device:
        if self._owned:
            try:
                owned = self._owned.get(x.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):  # a wrapper without a storage
                inner = surface.unwrapped(x)
                if inner is not None and inner is not x:
                    return self._where(inner)
            else:
                if owned is not None:
                    return owned.device
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
        if os.getpid() != self._process:
            raise RuntimeError(errors.FORKED)
        index = self._thread.current if device.index is None else device.index
        if index >= self.n:
            raise torch.AcceleratorError(errors.invalid_ordinal(index, self.n))
        return self._devices[index]

    def _index(self, device: Any = None) -> int:
        """Number of a GPU; of the current one for None."""
        if device is None:
            return self._thread.current
        resolved = self.resolve(device)
        if resolved is None or resolved is CPU:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return resolved.index

    # ---- the ledger ------------------------------------------------------------------

    def _settle(self) -> None:
        """Take off the books what has been freed."""
        while self._freed:
            owned = self._freed.popleft()
            self._gpus[owned.device.index].remove(owned)

    def _free(self, ref: Ref) -> None:
        # Called by Python whenever a storage dies, in any thread, also in the middle of
        # another call: only what needs no lock.
        owned = self._owned.pop(ref.key, None)
        if owned is not None:
            self._freed.append(owned)

    def _enter(self, storage: Any, owned: Owned) -> None:
        owned.ref = Ref(storage, self._free)
        owned.ref.key = owned.key
        self._owned[owned.key] = owned

    def _room(self, device: torch.device, nbytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if so much more does not fit."""
        __tracebackhide__ = True
        gpu = self._gpus[device.index]
        if gpu.now + nbytes > gpu.capacity:
            self._settle()
            if gpu.now + nbytes > gpu.capacity:
                gpu.failures += 1
                raise torch.OutOfMemoryError(
                    errors.out_of_memory(device.index, nbytes, gpu.now, gpu.capacity)
                )

    def _adopt(self, x: Tensor, device: torch.device, kind: str) -> Owned:
        """A new storage now belongs to a device."""
        __tracebackhide__ = True
        storage = x.untyped_storage()
        nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
        if self._freed:
            self._settle()
        self._room(device, nbytes)
        owned = self._owned.get(storage._cdata)
        if owned is None:
            owned = Owned(storage._cdata, device, nbytes, next(self._births))
            self._enter(storage, owned)
        else:  # it has drifted until now
            owned.device, owned.nbytes, owned.drifts = device, nbytes, False
            owned.born = next(self._births)
        owned.kind = kind
        self._gpus[device.index].add(owned)
        return owned

    def _drift(self, x: Tensor) -> None:
        """A helper made by C++ in a backward, from no tensor at all: say, zeros.

        Nothing tells where a GPU would have made it. It counts as on the device of the
        last op, and belongs to the first device whose tensors it meets.
        """
        storage = x.untyped_storage()
        device = self._thread.last
        if device is not None and storage._cdata not in self._owned:
            owned = Owned(storage._cdata, device, 0, next(self._births))
            owned.drifts = True
            self._enter(storage, owned)

    def _resized(self, storage: Any) -> None:
        owned = self._owned.get(storage._cdata)
        nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
        if owned is not None and not owned.drifts and nbytes != owned.nbytes:
            gpu = self._gpus[owned.device.index]
            self._settle()
            gpu.remove(owned)
            owned.nbytes, owned.born = nbytes, next(self._births)
            gpu.add(owned)

    def _resize(self, storage: Any, resize: Callable[[], Any], nbytes: int) -> Any:
        """A storage changes its size; one that grows needs room for old and new."""
        __tracebackhide__ = True
        with truth(), self._lock:
            owned = self._owned.get(storage._cdata)
            if owned is not None and not owned.drifts and nbytes > storage.nbytes():
                self._room(owned.device, -(-nbytes // BLOCK) * BLOCK)
            out = resize()
            self._resized(storage)
            return out

    def _classify(self, x: Tensor, kind: str) -> None:
        """Whatever holds these bytes, it is now known as `kind`."""
        with truth():
            if x.layout is not torch.strided:
                return
            owned = self._owned.get(x.untyped_storage()._cdata)
            if owned is not None and owned.kind != kind and not owned.drifts:
                self._gpus[owned.device.index].classify(owned, kind)

    def _remember(self, leaf: Tensor) -> None:
        """Its `.grad` will be looked up after a backward."""
        key = id(leaf)
        if key not in self._leaves:
            self._leaves[key] = weakref.ref(
                leaf, lambda _: self._leaves.pop(key, None) and None
            )

    def _send_gradients_back(self, inputs: list[Tensor]) -> None:
        """The gradient of a CPU number beside a GPU's tensors is on the CPU."""
        for x in inputs if torch.is_grad_enabled() else ():
            if x.requires_grad and not x.dim() and self._where(x) is CPU:
                if self._to_host not in (x._backward_hooks or {}).values():
                    _register_hook(x, self._to_host)

    @torch.utils.hooks.unserializable_hook
    def _to_host(self, grad: Tensor) -> Tensor | None:
        return self._moved(grad, CPU) if self.is_on and not self.drifts(grad) else None

    def _find_gradients(self) -> None:
        with truth():
            for ref in list(self._leaves.values()):
                leaf = ref()
                grad = None if leaf is None else leaf.grad
                if grad is None or grad.layout is not torch.strided:
                    continue
                owned = self._owned.get(grad.untyped_storage()._cdata)
                if owned is None or owned.kind == GRADIENTS:
                    continue
                if owned.drifts:
                    home = self._where(leaf)
                    if home is CPU or home.type != "cuda":
                        self._owned.pop(owned.key, None)
                        continue
                    self._adopt(grad, home, GRADIENTS)
                elif owned.kind != PARAMETERS:
                    self._gpus[owned.device.index].classify(owned, GRADIENTS)

    def _gradients_of_now(self, inputs: list[Tensor]) -> set[torch.Size]:
        """The shapes of what the running part of a backward makes for leaves.

        With micro-batches, such a gradient waits for the others of its leaf, and is not
        in `.grad` yet. By its shape it is told from the gradient of an activation.
        """
        node = torch._C._current_autograd_node()
        if node is None:  # autograd adds up gradients of one leaf
            kinds = {
                owned.kind if owned is not None else OTHER
                for owned in (
                    self._owned.get(x.untyped_storage()._cdata) for x in inputs
                )
            }
            return {x.shape for x in inputs} if kinds == {GRADIENTS} else set()
        shapes = set()
        for after, _ in node.next_functions:
            if after is None:
                continue
            if after.name() == "torch::autograd::AccumulateGrad":
                shapes.add(after.variable.shape)
            elif after.name() == "TBackward0":  # the weight of a linear layer
                for leaf, _ in after.next_functions:
                    if leaf is not None and hasattr(leaf, "variable"):
                        shape = leaf.variable.shape
                        shapes |= {shape, torch.Size(reversed(shape))}
        return shapes

    # ---- what an op is doing ---------------------------------------------------------

    def _phase(self) -> str:
        thread = self._thread
        if thread.backward:
            return "backward"
        if thread.optimizer:
            return "optimizer"
        return "setup" if thread.setup else "forward"

    def _module(self) -> str:
        """The running module's name: the outermost class and the path from there."""
        if self._thread.module is not None:
            return self._thread.module
        names: list[str] = []
        parent = None
        for module in self._thread.modules:
            inside = parent.named_modules() if parent is not None else ()
            found = next((name for name, m in inside if m is module), "")
            names.append(found or type(module).__name__)
            parent = module
        return ".".join(names)

    @contextlib.contextmanager
    def _as_in(self, module: str) -> Iterator[None]:
        """A copy in a backward goes under the name of the module in its forward."""
        thread = self._thread
        before, thread.module = thread.module, module
        try:
            yield
        finally:
            thread.module = before

    def _belongs_to(self, x: Tensor, device: torch.device) -> None:
        """Say where a helper of C++ is; see `_drift`."""
        if self.drifts(x):
            with truth(), self._lock:
                self._adopt(x, device, OTHER)

    @contextlib.contextmanager
    def _because(self, cause: str) -> Iterator[None]:
        before, self._thread.cause = self._thread.cause, cause
        try:
            yield
        finally:
            self._thread.cause = before

    @contextlib.contextmanager
    def _counting(self, what: str) -> Iterator[None]:
        """`what` is "backward", "optimizer", "setup" or "quiet" (nothing is logged)."""
        thread = self._thread
        setattr(thread, what, getattr(thread, what) + 1)
        try:
            yield
        finally:
            setattr(thread, what, getattr(thread, what) - 1)

    def _label(self) -> str:
        thread = self._thread
        node = torch._C._current_autograd_node() if thread.backward else None
        if node is None or not thread.labels:
            return thread.label
        # Autograd numbers its nodes in the order in which forward made them.
        number = node._sequence_nr()
        if number > thread.labels[-1][0] + 2**48:  # adds to .grad: has no forward
            return thread.backward_label
        place = bisect.bisect_right(thread.labels, number, key=lambda entry: entry[0])
        thread.backward_label = thread.labels[place - 1][1] if place else ""
        return thread.backward_label

    # ---- time ------------------------------------------------------------------------

    def _clocks(self) -> list[Clock]:
        return [*(gpu.clock for gpu in self._gpus), self._host]

    def _transfer(
        self,
        nbytes: int,
        source: torch.device,
        destination: torch.device,
        cause: str,
        waits: bool = True,
    ) -> None:
        """Log one copy. Both devices are busy with it, as in PyTorch (see `__init__`).

        `waits`: the host waits for the end of a copy from or to it.
        """
        thread = self._thread
        if source == destination or thread.quiet:
            return
        on_host = CPU in (source, destination)
        bandwidth = self._host_bandwidth if on_host else self._bandwidth
        seconds = costs.transfer_seconds(
            nbytes, latency=self._latency, bandwidth=bandwidth
        )
        phase, label, module = self._phase(), self._label(), self._module()
        ends = [
            self._gpus[d.index].clock for d in (source, destination) if d is not CPU
        ]
        start = max(thread.host, *(clock.free for clock in ends))
        stop = start + seconds
        for clock, device, kind in (
            (ends[0], source, "send"),
            (ends[-1], destination, "receive"),
        ):
            if device is not CPU:
                clock.work(start, stop, kind, phase, label, module)
        if on_host and waits:
            kind = "send" if source is CPU else "receive"
            self._host.work(start, stop, kind, phase, label, module)
            thread.host = stop
        self._transfers.append(
            Transfer(
                str(source),
                str(destination),
                nbytes,
                seconds,
                phase,
                module,
                cause,
                label,
                start,
            )
        )

    def _computed(self, device: torch.device, seconds: float, module: str) -> None:
        thread = self._thread
        if thread.quiet or seconds <= 0:
            return
        if device is CPU:
            start = max(thread.host, self._host.free)
            thread.host = start + seconds
            clock = self._host
        else:
            clock = self._gpus[device.index].clock
            start = max(thread.host, clock.free)
        phase, label = self._phase(), self._label()
        clock.work(start, start + seconds, "compute", phase, label, module)

    def _modelled(
        self, op: Op, on_host: bool, args: Any, kwargs: Any, out: Any
    ) -> float:
        """Seconds for an op from its FLOPs and bytes: the slower of the two counts."""
        if op.flops is False:
            op.flops = surface.flop_formula(op.func)
        flops = 0.0
        if op.flops is not None:
            try:
                flops = op.flops(*args, **kwargs, out_val=out)
            except (TypeError, ValueError, AssertionError, AttributeError):
                op.flops = None  # a formula for other arguments than these
        moved = 0
        for x in tensors_in((*args, *kwargs.values(), out), []):
            if x.layout is torch.strided:
                full = x.numel() * x.element_size()
                moved += min(full, x.untyped_storage().nbytes())
        if on_host:
            return max(flops / HOST_FLOPS, moved / HOST_BANDWIDTH)
        rate = self._compute
        return self._overhead + max(flops / rate, moved / self._memory_bandwidth)

    def _synchronize(self, device: Any = None) -> None:
        """The host waits until a GPU has done what it was given."""
        with self._lock:
            clock = self._gpus[self._index(device)].clock
            self._thread.host = max(self._thread.host, clock.free)

    # ---- moving tensors --------------------------------------------------------------

    def _copy(
        self, x: Tensor, destination: torch.device, cause: str, waits: bool = True
    ) -> Tensor:
        """A copy of plain data on another device, without autograd."""
        __tracebackhide__ = True
        with truth(), self._lock, torch._C._DisableTorchDispatch():
            source = self._where(x)
            if x.layout is not torch.strided or x.is_nested:
                kind = "a nested tensor" if x.is_nested else x.layout
                raise NotImplementedError(errors.layout(kind))
            if source.type == "meta":  # Module.to() looks for these words
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            if source.type not in ("cpu", "cuda"):
                raise NotImplementedError(errors.other_device(source))
            nbytes = x.numel() * x.element_size()
            if destination is not CPU:
                self._room(destination, -(-nbytes // BLOCK) * BLOCK)
            copy = x.detach().clone()
            if destination is not CPU:
                owned = self._owned.get(x.untyped_storage()._cdata)
                if isinstance(x, Parameter):
                    kind = PARAMETERS
                elif owned is not None:
                    kind = owned.kind
                else:
                    kind = OTHER
                if kind in (GRADIENTS, OPTIMIZER):
                    kind = OTHER
                self._adopt(copy, destination, kind)
                self._thread.last = destination
            if destination is CPU:  # PyTorch pins what the host does not wait for
                if not waits:
                    self._mark_pinned(copy)
            elif source is CPU:
                waits = waits or not self._is_pinned(x)
            self._transfer(nbytes, source, destination, cause, waits)
            return copy

    def _moved(
        self, x: Tensor, destination: torch.device, cause: str = "", waits: bool = True
    ) -> Tensor:
        """`x` on another device, differentiable; `x` itself if it is there."""
        __tracebackhide__ = True
        cause = cause or self._thread.cause
        if self.device_of(x) == destination:
            return x
        if not waits:
            with truth():
                plain = not x.requires_grad and surface.is_plain(x)
            if plain:
                return self._copy(x, destination, cause, waits)
        if isinstance(x, Parameter):
            self._remember(x)
        return _Move.apply(x, destination, self, cause, waits)

    def _coalesced(
        self, tensors: Sequence[Tensor], destinations: Sequence[torch.device]
    ) -> list[Tensor]:
        """Many small tensors as one flat one, which goes to each device in turn."""
        if not destinations:
            return []
        flat = torch._utils._flatten_dense_tensors(tensors)
        copies = [self._copy(flat, to, self._thread.cause) for to in destinations]
        with truth(), self._lock:
            owned = [self._owned.get(x.untyped_storage()._cdata) for x in tensors]
            kinds = {OTHER if one is None else one.kind for one in owned}
            kind = kinds.pop() if len(kinds) == 1 else OTHER
            for copy in copies:
                self._classify(copy, kind)
        return copies

    def _storage_on(self, storage: Any, device: torch.device) -> Any:
        """A storage that was just read from a file goes to a device."""
        with truth(), self._lock, torch._C._DisableTorchDispatch():
            plain = getattr(storage, "_untyped_storage", storage)
            x = torch.empty(0, dtype=torch.uint8).set_(plain)
            owned = self._owned.get(plain._cdata)
            if owned is None or owned.drifts:
                self._adopt(x, device, OTHER)
                with self._counting("setup"):
                    self._transfer(plain.nbytes(), CPU, device, "load")
        return storage

    def _is_pinned(self, x: Tensor) -> bool:
        with truth():
            try:
                return x.untyped_storage()._cdata in self._pinned
            except (NotImplementedError, RuntimeError):
                return False

    def _pin(self, x: Tensor) -> Tensor:
        """A copy that answers `is_pinned()` with True, as page-locked memory does."""
        if self.device_of(x) is not CPU and self.device_of(x).type == "cuda":
            raise RuntimeError(errors.cannot_pin(x))
        if self._is_pinned(x):
            return x
        copy = x.clone()
        self._mark_pinned(copy)
        return copy

    def _mark_pinned(self, x: Tensor) -> None:
        with truth():
            storage = x.untyped_storage()
            key = storage._cdata
            self._pinned[key] = weakref.ref(
                storage, lambda _: self._pinned.pop(key, None) and None
            )

    # ---- calls from Python -----------------------------------------------------------

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A PyTorch function, called from Python: factories get their device here."""
        __tracebackhide__ = True
        if isinstance(func, torch._ops.OpOverload):  # from another mode: not a user
            return func(*args, **kwargs)
        if self._autocast.active:
            return cuda.autocasted(self, func, args, kwargs)
        if func is torch.device:  # a build without CUDA has no device for a number
            return surface.named_device(*args, **kwargs)
        if func in surface.FACTORIES or (
            kwargs.get("device") is not None and func is not surface.PARSE_TO
        ):
            made = surface.factory(self, func, args, kwargs)
            if made is not NotImplemented:
                return made
        elif func in surface.CHECKS:
            surface.CHECKS[func](self, args)
        elif func in surface.CTC:
            args, kwargs = surface.plain_lengths(args, kwargs)
        if kwargs.get("generator") is not None:
            surface.check_generator(self, args, kwargs)
        with self._called_with(args):
            out = func(*args, **kwargs)
        if func is torch._VF._pad_packed_sequence:
            self._release(out[1])  # the lengths are on the CPU, on real GPUs as well
        return out

    def _called_with(self, args: tuple | None) -> Call:
        """Remember the arguments of the outermost function; None: there is none."""
        return Call(self._thread, args)

    def _release(self, x: Tensor) -> None:
        with truth(), self._lock:
            owned = self._owned.pop(x.untyped_storage()._cdata, None)
            if owned is not None and not owned.drifts:
                self._freed.append(owned)

    def _made_on(
        self, device: torch.device, func: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Call a factory: what it makes belongs to `device`."""
        __tracebackhide__ = True
        thread = self._thread
        before, thread.force = thread.force, device
        try:
            with truth():
                out = func(*args, **kwargs)
        finally:
            thread.force = before
        if device is not CPU and isinstance(out, Tensor):
            with truth(), self._lock:
                if out.layout is not torch.strided:
                    raise NotImplementedError(errors.layout(out.layout))
                if out.untyped_storage()._cdata not in self._owned:
                    self._adopt(out, device, OTHER)
        if kwargs.get("requires_grad"):
            self._remember(out)
        return out

    # ---- ops -------------------------------------------------------------------------

    def _run(self, func: Any, args: tuple, kwargs: dict, mode: _Dispatch) -> Any:
        """One op: check the devices, run the CPU's kernel, book what is new."""
        __tracebackhide__ = True
        if func is aten._efficientzerotensor.default:
            # Zeros without memory: PyTorch may crash when a mode sees them again.
            func = aten.zeros.default
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = Op(func)
        if op.composite:
            key = torch._C.DispatchKey.CompositeImplicitAutograd
            with mode, _as_above(op):
                return func._op_dk(key, *args, **kwargs)
        if op.waits:
            return self._book(op, args, kwargs)
        with self._lock:
            return self._book(op, args, kwargs)

    def _book(self, op: Op, args: tuple, kwargs: dict) -> Any:
        __tracebackhide__ = True
        if op.foreach:
            return self._book_foreach(op, args, kwargs)
        thread, owned_by = self._thread, self._owned
        inputs = tensors_in(args, [])
        if kwargs:
            tensors_in(kwargs.values(), inputs)
        home = host = number = None
        drifting = []
        for x in inputs:
            if x.layout is not torch.strided:
                return self._not_strided(op, args, kwargs, inputs)
            owned = owned_by.get(x.untyped_storage()._cdata)
            if owned is None:
                if x.dim() or home is None and op.written:
                    host = x
                else:
                    number = x
            elif owned.drifts:
                drifting.append(x)
            else:
                if home is None:
                    home = owned.device
                elif owned.device is not home and not op.cross:
                    raise errors.mismatch(self, op, args, kwargs)
                if owned.kind is not PARAMETERS and isinstance(x, Parameter):
                    self._gpus[owned.device.index].classify(owned, PARAMETERS)
                    self._remember(x)
        if home is not None:
            if number is not None and host is None and not errors.takes_numbers(op):
                host = number
            if number is not None and number.requires_grad:
                self._send_gradients_back(inputs)
            if (
                host is not None
                and not op.cross
                and not self._host_is_fine(op, args, kwargs)
            ):
                raise errors.mismatch(self, op, args, kwargs)
            for x in drifting:
                self._adopt(x, home, ACTIVATIONS)
            thread.last = home
        if op.cross:
            return self._book_cross(op, args, kwargs, home)

        # C++ asks for the CPU where it means "where the input is": only a GPU counts.
        wanted = kwargs.get("device")
        if wanted is not None and wanted.type == "cuda":
            wanted = self.resolve(wanted)
            kwargs = {**kwargs, "device": CPU}
        elif wanted is not None:
            wanted = None if wanted == CPU else CPU
        pinned = kwargs.get("pin_memory")
        if pinned:
            wanted, kwargs = CPU, {**kwargs, "pin_memory": False}
        target = wanted or thread.force or home
        adrift = False
        if target is None and not inputs and not op.written:
            target = self._caller()
            adrift = target is None and thread.backward > 0
        elif target is None and drifting and host is None:
            adrift = True
        if target is CPU:
            target = None
        if target is not None and op.sized:
            self._room(target, surface.factory_bytes(args, kwargs))

        out, seconds = self._kernel(op, args, kwargs)

        if target is not None or adrift:
            kind = OTHER if home is None or thread.optimizer else ACTIVATIONS
            gradients = self._gradients_of_now(inputs) if thread.backward else ()
            for x in (out,) if isinstance(out, Tensor) else tensors_in((out,), []):
                if x.layout is not torch.strided:
                    raise NotImplementedError(errors.layout(x.layout))
                if x.untyped_storage()._cdata in owned_by:
                    continue
                if target is None:
                    self._drift(x)
                elif not self._stays_on_host(op, x, out):
                    self._adopt(x, target, GRADIENTS if x.shape in gradients else kind)
        if pinned:
            self._mark_pinned(out)
        if op.resizes and home is not None:
            for x in inputs:
                self._resized(x.untyped_storage())
        if thread.quiet:
            return out
        if op.name == "_local_scalar_dense" and home is not None:
            self._transfer(args[0].element_size(), home, CPU, "item")
        elif not op.free:
            where = home or target or CPU
            if self._compute is not None:
                seconds = self._modelled(op, where is CPU, args, kwargs, out)
            module = thread.modules[-1] if thread.modules else None
            self._computed(where, seconds, type(module).__name__ if module else "")
        if op.waited_for and home is not None and op.host_waits(args, kwargs):
            self._synchronize(home)
        return out

    def _kernel(self, op: Op, args: tuple, kwargs: dict) -> tuple[Any, float]:
        """What the CPU computes, and the seconds that it took."""
        __tracebackhide__ = True
        thread = self._thread
        thread.plain += op.custom
        started = time.perf_counter()
        try:
            out = op.func(*args, **kwargs)
        except NotImplementedError as error:
            if "from the 'CPU' backend" not in str(error):
                raise
            raise NotImplementedError(errors.no_kernel(op.name)) from error
        finally:
            thread.plain -= op.custom
        return out, time.perf_counter() - started

    def _caller(self) -> torch.device | None:
        """Device of the tensors that the PyTorch function around this op was given.

        The CPU for a function that was given others, or none. None where no function
        was called from Python, as in a backward.
        """
        call = self._thread.call
        if call is None:
            return None
        found = tensors_in(call, [])
        for x in found:
            where = self._where(x)
            if where.type == "cuda":
                return where
        return CPU

    @staticmethod
    def _stays_on_host(op: Op, x: Tensor, out: Any) -> bool:
        """Is this the result of an op on a GPU that CUDA, too, leaves on the CPU?"""
        return op.name == "_pack_padded_sequence" and x is out[1]

    def _host_is_fine(self, op: Op, args: tuple, kwargs: dict) -> bool:
        """May the CPU tensors in this call stand beside those on a GPU?"""
        for name, value in (*zip(op.names, args), *kwargs.items()):  # noqa: B905
            for x in tensors_in((value,), []):
                if self._where(x).type == "cuda":
                    continue
                if name in op.host_arguments:
                    continue
                if x.dim() or name in op.written or not errors.takes_numbers(op):
                    return False
        return (
            op.name not in op.HOST_ARGUMENTS
            or not op.name.endswith(
                ("index", "index_put", "index_put_", "_index_put_impl_")
            )
            or self._where(args[0]).type == "cuda"
        )

    def _book_cross(
        self, op: Op, args: tuple, kwargs: dict, home: torch.device | None
    ) -> Any:
        """copy_, _to_copy and set_: their tensors may be on different devices."""
        thread = self._thread
        if op.func is aten._to_copy.default:
            source = self._where(args[0])
            wanted, target = kwargs.get("device"), source
            if wanted is not None and wanted != CPU:  # C++'s "cpu" says nothing
                target = self.resolve(wanted)
                if target is not None:
                    kwargs = {**kwargs, "device": None}
            out, seconds = self._kernel(op, args, kwargs)
            if target is not None and target.type == "cuda":
                kind = ACTIVATIONS if home is not None else OTHER
                self._adopt(out, target, kind)
            moves = target is not None and source != target
            if moves and "cuda" in (source.type, target.type):
                nbytes = out.numel() * out.element_size()
                self._transfer(nbytes, source, target, thread.cause)
            elif target is not None:
                self._spend(op, target, seconds, args, kwargs, out)
            return out
        destination, source = self._where(args[0]), self._where(args[1])
        if op.func is aten.set_.source_Tensor:
            if destination != source and not any(map(self.drifts, args[:2])):
                raise RuntimeError(errors.other_storage(destination, source))
            return op.func(*args, **kwargs)
        out, seconds = self._kernel(op, args, kwargs)
        if destination != source:
            nbytes = args[0].numel() * args[0].element_size()
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            on_host = args[0] if destination is CPU else args[1]
            waits = waits or not self._is_pinned(on_host)
            cause = "copy_" if thread.cause == "to" else thread.cause
            self._transfer(nbytes, source, destination, cause, waits)
        else:
            self._spend(op, destination, seconds, args, kwargs, out)
        return out

    def _spend(
        self,
        op: Op,
        device: torch.device,
        seconds: float,
        args: tuple,
        kwargs: dict,
        out: Any,
    ) -> None:
        if self._compute is not None:
            seconds = self._modelled(op, device.type == "cpu", args, kwargs, out)
        where = device if device.type == "cuda" else CPU
        module = self._thread.modules[-1] if self._thread.modules else None
        name = type(module).__name__ if module else ""
        self._computed(where, seconds, name)

    def _book_foreach(self, op: Op, args: tuple, kwargs: dict) -> Any:
        """Optimizers hand over lists; the devices must agree position by position."""
        lists = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, (list, tuple))
            and value
            and isinstance(value[0], Tensor)
        ]
        homes: list[torch.device] = []
        for row in itertools.zip_longest(*lists):
            devices = []
            for x in row:
                if x is None:
                    continue
                where = self._where(x)
                if (x.dim() or where.type == "cuda") and where not in devices:
                    devices.append(where)
            if len(devices) > 1:
                raise RuntimeError(errors.two_devices(*devices[:2]))
            homes.append(devices[0] if devices else CPU)
        known = {x.untyped_storage()._cdata for x in tensors_in(args, [])}
        out, seconds = self._kernel(op, args, kwargs)
        made = list(zip(out or (), homes, strict=False))
        for x, home in made:
            if not isinstance(x, Tensor) or home is CPU:
                continue
            if x.untyped_storage()._cdata not in known:
                self._adopt(x, home, OTHER)
        places = list(dict.fromkeys(homes))
        for place in places:  # the work is shared out by the number of tensors
            share = seconds * homes.count(place) / len(homes)
            if self._compute is not None:
                rows = [
                    [
                        value[i]
                        for i, home in enumerate(homes)
                        if home == place and i < len(value)
                    ]
                    for value in lists
                ]
                share = self._modelled_foreach(rows, place is CPU)
            self._computed(place, share, "")
        return out

    def _modelled_foreach(self, rows: list[list[Tensor]], on_host: bool) -> float:
        moved = sum(
            min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            for x in tensors_in(rows, [])
        )
        if on_host:
            return moved / HOST_BANDWIDTH
        return self._overhead + moved / self._memory_bandwidth

    def _not_strided(
        self, op: Op, args: tuple, kwargs: dict, inputs: list[Tensor]
    ) -> Any:
        """Sparse and other layouts are for CPU tensors alone."""
        for x in inputs:
            if x.layout is torch.strided and self._where(x).type == "cuda":
                raise NotImplementedError(
                    errors.layout(
                        next(y.layout for y in inputs if y.layout != x.layout)
                    )
                )
        return op.func(*args, **kwargs)
