"""`torch.cuda` and `torch.accelerator`: queries, memory, random numbers, streams."""

from __future__ import annotations

import functools
import os
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.accelerator

from course_utils.virtual_gpus import refusals
from course_utils.virtual_gpus.parts import CPU
from course_utils.virtual_gpus.patches import Patches, copy_of

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what has no effect on virtual GPUs."""


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Answer for virtual GPUs where `torch.cuda` asks `torch._C`.

    All of its Python stays as it is, but for what asks the driver past `torch._C`.
    """
    _devices(machine, patches)
    _memory(machine, patches)
    _random_numbers(machine, patches)
    _streams_and_events(machine, patches)
    _profiler(patches)


# --- devices --------------------------------------------------------------------------


class _Properties(refusals.Partial, types.SimpleNamespace):
    stands_for = torch.cuda._CudaDeviceProperties


def _devices(machine: VirtualMachine, patches: Patches) -> None:
    thread = machine.thread

    def exchange(device: int) -> int:
        before = thread.current
        if device >= 0:
            thread.current = machine.index(device)
        return before

    def properties(index: int) -> _Properties:
        return _Properties(
            name="Virtual GPU",
            major=9,
            minor=0,
            total_memory=machine.gpus[index].capacity,
            multi_processor_count=132,
        )

    here = torch.device("cuda")
    patches.set(
        torch._C,
        _cuda_getDevice=lambda: thread.current,
        _cuda_setDevice=exchange,
        _cuda_canDeviceAccessPeer=lambda device, peer: (
            machine.index(device) != machine.index(peer)
        ),
        _cuda_getArchFlags=nothing,
        _cuda_synchronize=machine.synchronize,
        _cuda_ipc_collect=nothing,
        _cuda_get_sync_debug_mode=lambda: 0,
        _get_accelerator=lambda check=None: here,
        _accelerator_getAccelerator=lambda: here,
        _accelerator_getDeviceIndex=lambda: thread.current,
        _accelerator_setDeviceIndex=exchange,
        _accelerator_exchangeDevice=exchange,
        _accelerator_maybeExchangeDevice=exchange,
        _accelerator_synchronizeDevice=machine.synchronize,
    )
    patches.set(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=nothing,
        _lazy_init=nothing,
        _is_in_bad_fork=lambda: os.getpid() != machine.process,
        device_count=lambda: machine.n,
        _exchange_device=exchange,
        _maybe_exchange_device=exchange,
        _get_device_properties=properties,
        is_bf16_supported=lambda including_emulation=True: True,
    )
    marks = "rangePushA rangePop rangeStartA rangeEnd markA"  # for a profiler
    marks += " deviceRangeStart deviceRangeEnd"
    no_marks = dict.fromkeys(marks.split(), lambda *_: 0)
    patches.set(torch.cuda.nvtx, _nvtx=types.SimpleNamespace(**no_marks))
    patches.set(torch.cuda.profiler, start=nothing, stop=nothing)
    patches.set(torch.cuda.nccl, is_available=lambda tensors: False)
    patches.set(torch.backends.cudnn, is_acceptable=lambda x: False)


def _memory(machine: VirtualMachine, patches: Patches) -> None:
    def stats(device: int) -> dict[str, Any]:
        """What C++ keeps for `torch.cuda.memory_stats`, nested."""
        with machine.lock:
            machine.settle()
            gpu = machine.gpus[device]
            count = sum(
                owned.device is gpu.device and not owned.drifts
                for owned in list(machine.owned.values())
            )
        none = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        size = {"current": gpu.now, "peak": gpu.peak, "allocated": gpu.now, "freed": 0}
        tensors = {
            "current": count,
            "peak": count,
            "allocated": gpu.allocations,
            "freed": gpu.allocations - count,
        }
        numbers = {
            **dict.fromkeys(("allocation", "segment", "active"), tensors),
            **dict.fromkeys(("allocated_bytes", "reserved_bytes"), size),
            **dict.fromkeys(("active_bytes", "requested_bytes"), size),
            **dict.fromkeys(("inactive_split", "inactive_split_bytes"), none),
        }
        found = {
            what: {"all": all_pools, "large_pool": none, "small_pool": none}
            for what, all_pools in numbers.items()
        }
        found |= dict.fromkeys(("oversize_allocations", "oversize_segments"), none)
        return {**found, "num_alloc_retries": 0, "num_ooms": gpu.failures}

    def info(device: Any = None) -> tuple[int, int]:
        with machine.lock:
            machine.settle()
            gpu = machine.gpus[machine.index(device)]
            return gpu.capacity - gpu.now, gpu.capacity

    patches.set(
        torch._C,
        _cuda_memoryStats=stats,
        _cuda_resetPeakMemoryStats=machine.reset_peak,
        _cuda_resetAccumulatedMemoryStats=nothing,
        _cuda_emptyCache=nothing,
        _accelerator_isAllocatorInitialized=lambda: True,
        _accelerator_getDeviceStats=stats,
        _accelerator_getMemoryInfo=info,
        _accelerator_resetPeakStats=machine.reset_peak,
        _accelerator_resetAccumulatedStats=nothing,
        _accelerator_emptyCache=nothing,
        _accelerator_emptyHostCache=nothing,
    )
    patches.set(torch.cuda.memory, mem_get_info=info)


# --- random numbers -------------------------------------------------------------------


def _random_numbers(machine: VirtualMachine, patches: Patches) -> None:
    """One generator for the CPU and all GPUs: a split model drops the same values."""
    default = torch.default_generator

    class AllGenerators(type(torch.Generator)):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, original)

    class Generator(torch.Generator, metaclass=AllGenerators):
        """A CPU generator that says it is on a GPU."""

        def __new__(cls, device: Any = "cpu") -> Any:
            place = machine.resolve(device)
            if place is None or place is CPU:
                return original(device)
            made = super().__new__(cls)
            made._place = place
            return made

        @property
        def device(self) -> torch.device:
            return self._place

    original = torch.Generator
    patches.set(torch, Generator=Generator)
    patches.set(torch.cuda, default_generators=(default,) * machine.n)
    patches.set(torch._C, _accelerator_getDefaultGenerator=lambda device: default)


# --- streams and events: one queue a GPU ----------------------------------------------


POLL_SECONDS = 1e-6  # of the host, for a look: a loop of looks comes to its end


def _streams_and_events(machine: VirtualMachine, patches: Patches) -> None:
    def is_done(at: float) -> bool:
        """Has the host come so far? It runs ahead of the GPUs until it waits."""
        machine.thread.host += POLL_SECONDS
        return at <= machine.thread.host

    def hold(device: int, until: float) -> None:
        """What this GPU is given from now on starts no earlier."""
        with machine.lock:
            clock = machine.gpus[device].clock
            clock.free = max(clock.free, until)

    class Stream(refusals.Partial):
        """All streams of a GPU are one queue here: the order of the calls."""

        stands_for = torch.cuda.Stream
        __class__ = property(lambda self: self.stands_for)  # for isinstance
        cuda_stream = stream_id = priority = 0
        device_type = 1

        def __init__(
            self, device: Any = None, priority: int = 0, **kwargs: Any
        ) -> None:
            device = kwargs.get("device_index", device)
            self.device = torch.device("cuda", machine.index(device))
            self.device_index = self.device.index
            self.priority = priority

        def query(self) -> bool:
            return is_done(machine.gpus[self.device.index].clock.free)

        def synchronize(self) -> None:
            machine.synchronize(self.device)

        # These are PyTorch's, made of what events do.
        wait_event = torch.cuda.Stream.wait_event
        wait_stream = torch.cuda.Stream.wait_stream
        record_event = torch.cuda.Stream.record_event

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Stream:
            self._before = machine.thread.current
            machine.thread.current = self.device.index
            return self

        def __exit__(self, *error: object) -> None:
            machine.thread.current = self._before

        def __eq__(self, other: object) -> bool:
            return type(other) is Stream and self.device == other.device

        __hash__ = torch.cuda.Stream.__hash__
        __repr__ = torch.cuda.Stream.__repr__

    class Event(refusals.Partial):
        """Its times are those of `gpus.timeline()`."""

        stands_for = torch.cuda.Event
        __class__ = property(lambda self: self.stands_for)

        def __init__(self, *args: Any, enable_timing: bool = False, **_: Any) -> None:
            self._time: float | None = None
            self._timed = enable_timing or args[:1] == (True,)

        def record(self, stream: Any = None) -> None:
            device = machine.thread.current if stream is None else stream.device.index
            clock = machine.gpus[device].clock
            self._time = max(clock.free, machine.thread.host)

        def elapsed_time(self, end: Any) -> float:
            if not (self._timed and end._timed):
                raise ValueError(
                    "Both events must be created with argument 'enable_timing=True'."
                )
            if self._time is None or end._time is None:
                raise ValueError(
                    "Both events must be recorded before calculating elapsed time."
                )
            if not (self.query() and end.query()):
                raise RuntimeError(
                    "Both events must be completed before calculating elapsed time. "
                    "(Call torch.cuda.synchronize() first.)"
                )
            return (end._time - self._time) * 1e3

        def synchronize(self) -> None:
            machine.thread.host = max(machine.thread.host, self._time or 0.0)

        def query(self) -> bool:
            return is_done(self._time or 0.0)

        def wait(self, stream: Any = None) -> None:
            device = machine.thread.current if stream is None else stream.device.index
            hold(device, self._time or 0.0)

    def make(kind: type, *args: Any, **kwargs: Any) -> Any:
        return (Stream if issubclass(kind, torch.cuda.Stream) else Event)(
            *args, **kwargs
        )

    # The classes stay, for isinstance and whoever has imported them.
    patches.set(torch.cuda.Stream, __new__=make)
    patches.set(torch.cuda.Event, __new__=make)
    patches.set(torch, Stream=Stream, Event=Event)

    def numbers(device: int) -> tuple[int, int, int]:
        return Stream.stream_id, device, Stream.device_type

    def use(device_index: int, **numbers: Any) -> None:
        machine.thread.current = device_index

    patches.set(
        torch._C,
        _cuda_getCurrentStream=numbers,
        _cuda_getDefaultStream=numbers,
        _cuda_setStream=use,
        _accelerator_getStream=Stream,
        _accelerator_setStream=lambda stream: use(stream.device_index),
    )
    patches.set(torch.cuda, is_current_stream_capturing=lambda: False)
    functions = torch.nn.parallel._functions
    patches.set(functions, _get_stream=Stream, _streams=None)


# --- torch.profiler -------------------------------------------------------------------


def _profiler(patches: Patches) -> None:
    """It takes the CPU's time alone: CUDA's events would come from the driver."""
    kinds = torch.autograd.profiler.ProfilerState
    start = copy_of(torch.autograd.profiler.profile.__init__)

    @functools.wraps(start)
    def on_the_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **{**kwargs, "use_cpu": True})
        if self.profiler_kind == kinds.KINETO_GPU_FALLBACK:
            self.profiler_kind = kinds.KINETO

    patches.set(torch.autograd.profiler.profile, __init__=on_the_cpu)
    patches.set(
        torch.autograd.profiler,
        _supported_activities=lambda: {torch.profiler.ProfilerActivity.CPU},
    )
