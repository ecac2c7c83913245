"""The machine behind `virtual_gpus`: it runs ops, moves tensors, and keeps the time.

Read `course_utils/virtual_gpus/__init__.py` first: it says how the parts fit together.
"""

from __future__ import annotations

import bisect
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from course_utils.theory import costs
from course_utils.virtual_gpus import autocast, errors, tensors
from course_utils.virtual_gpus.ledger import Ledger
from course_utils.virtual_gpus.modes import Dispatch, Function, Move, as_above
from course_utils.virtual_gpus.parts import (
    CPU,
    Clock,
    Op,
    Tensor,
    aten,
    blocks,
    key_of,
    tensors_in,
    truth,
)
from course_utils.virtual_gpus.records import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Transfer,
)

Parameter = torch.nn.Parameter

# What the CPU of a machine with GPUs does, where `compute` is a rate.
HOST_FLOPS, HOST_BANDWIDTH = 100e9, 50e9


class VirtualMachine(Ledger):
    """Devices `cuda:0 ... cuda:n-1`: what is where, and what it costs."""

    def __init__(
        self,
        n: int,
        *,
        memory: Sequence[int],
        bandwidth: float,
        latency: float,
        compute: float | None,
        memory_bandwidth: float,
        overhead: float,
    ) -> None:
        super().__init__(n, memory)
        self.bandwidth, self.latency = bandwidth, latency
        self.compute, self.overhead = compute, overhead
        self.memory_bandwidth = memory_bandwidth
        self.pinned: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self._ops: dict[Any, Op] = {}
        self.host = Clock("cpu")
        self.transfers: list[Transfer] = []
        self.autocast = autocast.AutocastState()

    def anywhere(self, function: Callable) -> Callable:
        """`function`, to be called in whatever thread: modes belong to one thread.

        A thread that has them not gets them for the call, with the label, the modules
        and the time of here and now.
        """
        here = self.thread
        host, label, modules = here.host, here.label, list(here.modules)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = self.thread
            if thread.entered or not self.is_on:
                return function(*args, **kwargs)
            if label:
                thread.set_label(label)
            with (
                thread.having(host=host, modules=list(modules), entered=True),
                Function(self),
                Dispatch(self),
            ):
                return function(*args, **kwargs)

        return call

    # ---- what an op is doing ---------------------------------------------------------

    def _phase(self) -> str:
        thread = self.thread
        if thread.backward:
            return "backward"
        if thread.optimizer:
            return "optimizer"
        return "setup" if thread.setup else "forward"

    def module_name(self) -> str:
        """The running module's name: the outermost class and the path from there."""
        if self.thread.module is not None:
            return self.thread.module
        names: list[str] = []
        parent = None
        for module in self.thread.modules:
            inside = parent.named_modules() if parent is not None else ()
            found = next((name for name, m in inside if m is module), "")
            names.append(found or type(module).__name__)
            parent = module
        return ".".join(names)

    def _label(self) -> str:
        thread = self.thread
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

    def clock_of(self, device: torch.device) -> Clock:
        return self.gpus[device.index].clock if device.type == "cuda" else self.host

    def clocks(self) -> list[Clock]:
        return [*(gpu.clock for gpu in self.gpus), self.host]

    def transfer(
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
        thread = self.thread
        if source == destination or thread.quiet:
            return
        seconds = costs.transfer_seconds(
            nbytes, latency=self.latency, bandwidth=self.bandwidth
        )
        phase, label, module = self._phase(), self._label(), self.module_name()
        ends = {"send": self.clock_of(source), "receive": self.clock_of(destination)}
        gpus = {kind: clock for kind, clock in ends.items() if clock is not self.host}
        start = max(thread.host, *(clock.free for clock in gpus.values()))
        stop = start + seconds
        if waits and gpus != ends:
            thread.host = stop
        for kind, clock in (ends if waits else gpus).items():
            clock.work(start, stop, kind, phase, label, module)
        self.transfers.append(
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

    def _modelled(
        self, op: Op, on_host: bool, args: Any, kwargs: Any, out: Any
    ) -> float:
        """Seconds for an op from its FLOPs and bytes: the slower of the two counts."""
        if op.flops is False:
            op.flops = tensors.flop_formula(op.func)
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
        rate = self.compute
        return self.overhead + max(flops / rate, moved / self.memory_bandwidth)

    def _spend(
        self,
        op: Op,
        device: torch.device,
        seconds: float,
        args: Any,
        kwargs: dict,
        out: Any = None,
    ) -> None:
        """A device was busy with an op: for so long, or as the model says."""
        thread, on_host = self.thread, device.type != "cuda"
        if thread.quiet:
            return
        if self.compute is not None:
            seconds = self._modelled(op, on_host, args, kwargs, out)
        if seconds <= 0:
            return
        clock = self.clock_of(device)
        start = max(thread.host, clock.free)
        if on_host:
            thread.host = start + seconds
        module = type(thread.modules[-1]).__name__ if thread.modules else ""
        phase, label = self._phase(), self._label()
        clock.work(start, start + seconds, "compute", phase, label, module)

    def synchronize(self, device: Any = None) -> None:
        """The host waits until a GPU has done what it was given."""
        with self.lock:
            clock = self.gpus[self.index(device)].clock
            self.thread.host = max(self.thread.host, clock.free)

    # ---- moving tensors --------------------------------------------------------------

    def copy(
        self, x: Tensor, destination: torch.device, cause: str, waits: bool = True
    ) -> Tensor:
        """A copy of plain data on another device, without autograd."""
        __tracebackhide__ = True
        with truth(), self.lock, torch._C._DisableTorchDispatch():
            source = self.where(x)
            if x.layout is not torch.strided or x.is_nested:
                kind = "a nested tensor" if x.is_nested else x.layout
                raise NotImplementedError(errors.layout(kind))
            if source.type == "meta":  # Module.to() looks for these words
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            nbytes = x.numel() * x.element_size()
            if destination is not CPU:
                self.room(destination, blocks(nbytes))
            copy = x.detach().clone()
            if destination is not CPU:
                owned = self.entry(x)
                if isinstance(x, Parameter):
                    kind = PARAMETERS
                elif owned is not None:
                    kind = owned.kind
                else:
                    kind = OTHER
                if kind in (GRADIENTS, OPTIMIZER) and cause != "reduce":
                    kind = OTHER
                self.adopt(copy, destination, kind)
                self.thread.last = destination
            if destination is CPU:  # PyTorch pins what the host does not wait for
                if not waits:
                    self.mark_pinned(copy)
            elif source is CPU:
                waits = waits or not self.is_pinned(x)
            self.transfer(nbytes, source, destination, cause, waits)
            return copy

    def moved(
        self, x: Tensor, destination: torch.device, cause: str = "", waits: bool = True
    ) -> Tensor:
        """`x` on another device, differentiable; `x` itself if it is there."""
        __tracebackhide__ = True
        cause = cause or self.thread.cause
        if self.device_of(x) == destination:
            return x
        if not waits:
            with truth():
                plain = not x.requires_grad and tensors.is_plain(x)
            if plain:
                return self.copy(x, destination, cause, waits)
        if isinstance(x, Parameter):
            self.remember(x)
        return Move.apply(x, destination, self, cause, waits)

    def coalesced(
        self, tensors: Sequence[Tensor], destinations: Sequence[torch.device]
    ) -> list[Tensor]:
        """Many small tensors as one flat one, which goes to each device in turn."""
        if not destinations:
            return []
        flat = torch._utils._flatten_dense_tensors(tensors)
        copies = [self.copy(flat, to, self.thread.cause) for to in destinations]
        with truth(), self.lock:
            kinds = self.kinds_of(tensors)
            kind = kinds.pop() if len(kinds) == 1 else OTHER
            for copy in copies:
                self.classify(copy, kind)
        return copies

    def storage_on(self, storage: Any, device: torch.device) -> Any:
        """A storage that was just read from a file goes to a device."""
        with truth(), self.lock, torch._C._DisableTorchDispatch():
            plain = getattr(storage, "_untyped_storage", storage)
            x = torch.empty(0, dtype=torch.uint8).set_(plain)
            owned = self.owned.get(plain._cdata)
            if owned is None or owned.drifts:
                self.adopt(x, device, OTHER)
                with self.thread.having(setup=True):
                    self.transfer(plain.nbytes(), CPU, device, "load")
        return storage

    def is_pinned(self, x: Tensor) -> bool:
        with truth():
            return key_of(x) in self.pinned

    def pin(self, x: Tensor) -> Tensor:
        """A copy that answers `is_pinned()` with True, as page-locked memory does."""
        if self.device_of(x) is not CPU and self.device_of(x).type == "cuda":
            raise RuntimeError(errors.cannot_pin(x))
        if self.is_pinned(x):
            return x
        copy = x.clone()
        self.mark_pinned(copy)
        return copy

    def mark_pinned(self, x: Tensor) -> None:
        with truth():
            self.pinned[key_of(x)] = x.untyped_storage()

    def _send_gradients_back(self, inputs: list[Tensor]) -> None:
        """The gradient of a CPU number beside a GPU's tensors is on the CPU."""
        for x in inputs if torch.is_grad_enabled() else ():
            if x.requires_grad and not x.dim() and self.where(x) is CPU:
                if self._to_host not in (x._backward_hooks or {}).values():
                    x.register_hook(self._to_host)

    @torch.utils.hooks.unserializable_hook
    def _to_host(self, grad: Tensor) -> Tensor | None:
        return self.moved(grad, CPU) if self.is_on and not self.drifts(grad) else None

    # ---- calls from Python -----------------------------------------------------------

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A PyTorch function, called from Python: factories get their device here."""
        __tracebackhide__ = True
        if isinstance(func, torch._ops.OpOverload):  # from another mode: not a user
            return func(*args, **kwargs)
        if self.autocast.active:
            return autocast.autocasted(self, func, args, kwargs)
        if func is torch.device:  # a build without CUDA has no device for a number
            return tensors.named_device(*args, **kwargs)
        if func in tensors.FACTORIES or (
            kwargs.get("device") is not None and func is not tensors.PARSE_TO
        ):
            made = tensors.factory(self, func, args, kwargs)
            if made is not NotImplemented:
                return made
        elif func in tensors.CHECKS:
            tensors.CHECKS[func](self, args)
        elif func in tensors.CTC:
            args, kwargs = tensors.plain_lengths(args, kwargs)
        if kwargs.get("generator") is not None:
            tensors.check_generator(self, args, kwargs)
        with self.thread.called_with(args):
            out = func(*args, **kwargs)
        if func is torch._VF._pad_packed_sequence:
            self.release(out[1])  # the lengths are on the CPU, on real GPUs as well
        return out

    def made_on(
        self, device: torch.device, func: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Call a factory: what it makes belongs to `device`."""
        __tracebackhide__ = True
        with self.thread.having(force=device), truth():
            out = func(*args, **kwargs)
        if device is not CPU and isinstance(out, Tensor):
            with truth(), self.lock:
                if out.layout is not torch.strided:
                    raise NotImplementedError(errors.layout(out.layout))
                if out.untyped_storage()._cdata not in self.owned:
                    self.adopt(out, device, OTHER)
        if kwargs.get("requires_grad"):
            self.remember(out)
        return out

    # ---- ops -------------------------------------------------------------------------

    def run(self, func: Any, args: tuple, kwargs: dict, mode: Dispatch) -> Any:
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
            with mode, as_above(op):
                return func._op_dk(key, *args, **kwargs)
        book = self._book_lists if op.foreach else self._book
        if op.waits:
            return book(op, args, kwargs)
        with self.lock:
            return book(op, args, kwargs)

    def _book(self, op: Op, args: tuple, kwargs: dict) -> Any:
        __tracebackhide__ = True
        thread, owned_by = self.thread, self.owned
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
                    self.gpus[owned.device.index].classify(owned, PARAMETERS)
                    self.remember(x)
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
                self.adopt(x, home, ACTIVATIONS)
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
            adrift = target is None and thread.backward
        elif target is None and drifting and host is None:
            adrift = True
        if target is CPU:
            target = None
        if target is not None and op.sized:
            self.room(target, tensors.factory_bytes(args, kwargs))

        try:
            out, seconds = self._kernel(op, args, kwargs)
        except RuntimeError as error:
            if target is not None:
                self.room(target, errors.refused_bytes(error))
                errors.raise_as_on_cuda(error)
            raise

        if target is not None or adrift:
            kind = OTHER if home is None or thread.optimizer else ACTIVATIONS
            if thread.cause == "reduce":  # what DataParallel adds up
                kind = GRADIENTS
            gradients = self.gradients_of_now(inputs) if thread.backward else ()
            for x in (out,) if isinstance(out, Tensor) else tensors_in((out,), []):
                if x.layout is not torch.strided:
                    raise NotImplementedError(errors.layout(x.layout))
                if x.untyped_storage()._cdata in owned_by:
                    continue
                if target is None:
                    self.drift(x)
                elif op.name != "_pack_padded_sequence" or x is not out[1]:
                    self.adopt(x, target, GRADIENTS if x.shape in gradients else kind)
        if pinned:
            self.mark_pinned(out)
        if op.resizes and home is not None:
            for x in inputs:
                self.resized(x.untyped_storage())
        if thread.quiet:
            return out
        if op.name == "_local_scalar_dense" and home is not None:
            self.transfer(args[0].element_size(), home, CPU, "item")
        elif op.foreach:  # most change their lists in place: these count once
            lists = [x for x in args if isinstance(x, list)]
            self._spend(op, home or target or CPU, seconds, lists, {})
        elif not op.free:
            self._spend(op, home or target or CPU, seconds, args, kwargs, out)
        if op.waited_for and home is not None and op.host_waits(args, kwargs):
            self.synchronize(home)
        return out

    def _kernel(self, op: Op, args: tuple, kwargs: dict) -> tuple[Any, float]:
        """What the CPU computes, and the seconds that it took."""
        __tracebackhide__ = True
        started = time.perf_counter()
        try:
            with self.thread.having(plain=self.thread.plain or op.custom):
                out = op.func(*args, **kwargs)
        except NotImplementedError as error:
            if "from the 'CPU' backend" not in str(error):
                raise
            raise NotImplementedError(errors.no_kernel(op.name)) from error
        return out, time.perf_counter() - started

    def _caller(self) -> torch.device | None:
        """Device of the tensors that the PyTorch function around this op was given.

        The CPU for a function that was given others, or none. None where no function
        was called from Python, as in a backward.
        """
        call = self.thread.call
        if call is None:
            return None
        found = tensors_in(call, [])
        for x in found:
            where = self.where(x)
            if where.type == "cuda":
                return where
        return CPU

    def _host_is_fine(self, op: Op, args: tuple, kwargs: dict) -> bool:
        """May the CPU tensors in this call stand beside those on a GPU?"""
        for name, x in op.named(args, kwargs):
            if self.where(x).type == "cuda" or name in op.host_arguments:
                continue
            if x.dim() or name in op.written or not errors.takes_numbers(op):
                return False
        return not op.indexes or self.where(args[0]).type == "cuda"

    def _book_cross(
        self, op: Op, args: tuple, kwargs: dict, home: torch.device | None
    ) -> Any:
        """copy_ and _to_copy: their tensors may be on different devices."""
        cause, waits = self.thread.cause, True
        if op.func is aten._to_copy.default:
            source = destination = self.where(args[0])
            wanted = kwargs.get("device")
            if wanted is not None and wanted != CPU:  # C++'s "cpu" says nothing
                destination = self.resolve(wanted)
                if destination is None:  # "meta"
                    return op.func(*args, **kwargs)
                kwargs = {**kwargs, "device": None}
            out, seconds = self._kernel(op, args, kwargs)
            if destination.type == "cuda":
                self.adopt(out, destination, OTHER if home is None else ACTIVATIONS)
        else:
            destination, source = self.where(args[0]), self.where(args[1])
            out, seconds = self._kernel(op, args, kwargs)
            on_host = args[0] if destination is CPU else args[1]
            may_go_on = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            waits = not (may_go_on and self.is_pinned(on_host))
            cause = "copy_" if cause == "to" else cause
        if source != destination and "cuda" in (source.type, destination.type):
            nbytes = out.numel() * out.element_size()
            self.transfer(nbytes, source, destination, cause, waits)
        else:
            self._spend(op, destination, seconds, args, kwargs, out)
        return out

    def _book_lists(self, op: Op, args: tuple, kwargs: dict) -> Any:
        """Lists of tensors, as optimizers hand over: each GPU works on its own."""
        __tracebackhide__ = True
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, list))
        homes = [self.where(x) for x in first]
        if len(set(homes)) < 2:
            return self._book(op, args, kwargs)

        def part(value: Any, places: list[int]) -> Any:
            has_all = isinstance(value, list) and len(value) == len(homes)
            return [value[i] for i in places] if has_all else value

        made: dict[int, Tensor] = {}
        for home in dict.fromkeys(homes):
            places = [i for i, other in enumerate(homes) if other == home]
            here = {name: part(value, places) for name, value in kwargs.items()}
            out = self._book(op, tuple(part(value, places) for value in args), here)
            made.update(zip(places, out or (), strict=False))
        return [made[i] for i in range(len(homes))] if made else None

    def _not_strided(
        self, op: Op, args: tuple, kwargs: dict, inputs: list[Tensor]
    ) -> Any:
        """Sparse and other layouts are for CPU tensors alone."""
        for x in inputs:
            if x.layout is torch.strided and self.where(x).type == "cuda":
                kind = next(y.layout for y in inputs if y.layout != x.layout)
                raise NotImplementedError(errors.layout(kind))
        return op.func(*args, **kwargs)
