"""`torch.cuda` and `torch.accelerator`: queries, memory, random numbers, streams."""

from __future__ import annotations

import functools
import os
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.accelerator

from course_utils.virtual_gpus import refusals
from course_utils.virtual_gpus.parts import CPU, Tensor
from course_utils.virtual_gpus.patches import Patches, copy_of

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import Machine


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what has no effect on virtual GPUs."""


def install(machine: Machine, patches: Patches) -> None:
    """Let `torch.cuda` answer for virtual GPUs."""
    _cuda_queries(machine, patches)
    _cuda_memory(machine, patches)
    _random_numbers(machine, patches)
    _streams_and_events(machine, patches)
    _profiler(patches)


# --- torch.cuda, torch.accelerator ----------------------------------------------------


class _Properties(refusals.Partial, types.SimpleNamespace):
    stands_for = torch.cuda._CudaDeviceProperties


def _cuda_queries(machine: Machine, patches: Patches) -> None:
    thread = machine.thread

    def exchange(device: int) -> int:
        before = thread.current
        if device >= 0:
            thread.current = machine.index(device)
        return before

    def set_device(device: Any) -> None:
        exchange(torch.cuda._utils._get_device_index(device))

    def set_index(device: Any) -> None:
        exchange(torch.accelerator._utils._get_device_index(device))

    def properties(device: Any = None) -> _Properties:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        if not 0 <= index < machine.n:
            raise AssertionError("Invalid device id")
        gpu = machine.gpus[index]
        return _Properties(
            name="Virtual GPU",
            major=9,
            minor=0,
            total_memory=gpu.capacity,
            multi_processor_count=132,
        )

    cuda = torch.cuda
    patches.set(
        cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=nothing,
        _lazy_init=nothing,
        _is_in_bad_fork=lambda: os.getpid() != machine.process,
        device_count=lambda: machine.n,
        current_device=lambda: thread.current,
        set_device=set_device,
        _exchange_device=exchange,
        _maybe_exchange_device=exchange,
        get_device_properties=properties,
        can_device_access_peer=lambda device, peer: (
            machine.index(device) != machine.index(peer)
        ),
        is_bf16_supported=lambda including_emulation=True: True,
        get_arch_list=lambda: [],
        synchronize=lambda device=None: machine.synchronize(device),
        ipc_collect=nothing,
    )
    patches.set(  # marks for a profiler
        cuda.nvtx,
        range_push=lambda msg: 0,
        range_pop=lambda: 0,
        range_start=lambda msg: 0,
        range_end=nothing,
        mark=nothing,
        _device_range_start=nothing,
        _device_range_end=nothing,
    )
    patches.set(cuda.profiler, start=nothing, stop=nothing)
    patches.set(cuda.nccl, is_available=lambda tensors: False)
    patches.set(torch.backends.cudnn, is_acceptable=lambda x: False)
    here = torch.device("cuda")
    patches.set(
        torch._C,
        _accelerator_getAccelerator=lambda: here,
        _get_accelerator=lambda check=None: here,
        _accelerator_exchangeDevice=exchange,
        _accelerator_maybeExchangeDevice=exchange,
        _cuda_get_sync_debug_mode=lambda: 0,
    )

    patches.replace(
        (torch.accelerator,),
        current_accelerator=lambda check_available=False: here,
        is_available=lambda: True,
        device_count=lambda: machine.n,
        current_device_index=lambda: thread.current,
        current_device_idx=lambda: thread.current,
        set_device_index=set_index,
        set_device_idx=set_index,
        synchronize=lambda device=None: machine.synchronize(device),
    )


def _cuda_memory(machine: Machine, patches: Patches) -> None:
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
        values = {
            "allocated_bytes": size,
            "reserved_bytes": size,
            "active_bytes": size,
            "requested_bytes": size,
            "inactive_split_bytes": none,
            "allocation": tensors,
            "segment": tensors,
            "active": tensors,
            "inactive_split": none,
        }
        return {
            "num_alloc_retries": 0,
            "num_ooms": gpu.failures,
            "oversize_allocations": none,
            "oversize_segments": none,
        } | {
            what: {"all": numbers, "large_pool": none, "small_pool": none}
            for what, numbers in values.items()
        }

    def reset_peak(device: Any = None) -> None:
        with machine.lock:
            machine.settle()
            machine.gpus[machine.index(device)].set_peak(next(machine.births))

    def info(device: Any = None) -> tuple[int, int]:
        with machine.lock:
            machine.settle()
            gpu = machine.gpus[machine.index(device)]
            return gpu.capacity - gpu.now, gpu.capacity

    memory = torch.cuda.memory
    patches.replace(
        (torch.cuda, memory, torch.accelerator, torch.accelerator.memory),
        reset_peak_memory_stats=reset_peak,
        reset_accumulated_memory_stats=nothing,
        mem_get_info=info,
        get_memory_info=info,
        empty_cache=nothing,
    )
    patches.set(
        torch._C,
        _cuda_memoryStats=stats,
        _accelerator_getDeviceStats=stats,
        _accelerator_isAllocatorInitialized=lambda: True,
        _accelerator_emptyHostCache=nothing,
    )


# --- random numbers -------------------------------------------------------------------


def _random_numbers(machine: Machine, patches: Patches) -> None:
    """One generator for the CPU and all GPUs: a split model drops the same values."""
    default = torch.default_generator

    def seed_with(seed: int) -> None:
        default.manual_seed(int(seed))

    def set_state(state: Tensor, device: Any = "cuda") -> None:
        default.set_state(state)

    def set_states(states: Any) -> None:
        for state in states:
            default.set_state(state)

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
    patches.replace(
        (torch.cuda, torch.cuda.random),
        get_rng_state=lambda device="cuda": default.get_state(),
        get_rng_state_all=lambda: [default.get_state() for _ in range(machine.n)],
        set_rng_state=set_state,
        set_rng_state_all=set_states,
        manual_seed=seed_with,
        manual_seed_all=seed_with,
        seed=lambda: default.seed() and None,
        seed_all=lambda: default.seed() and None,
        initial_seed=default.initial_seed,
    )
    patches.set(torch.cuda, default_generators=(default,) * machine.n)
    patches.set(torch._C, _accelerator_getDefaultGenerator=lambda device: default)


# --- streams and events: one queue a GPU ----------------------------------------------


POLL_SECONDS = 1e-6  # of the host, for a look: a loop of looks comes to its end


def _streams_and_events(machine: Machine, patches: Patches) -> None:
    def is_done(at: float) -> bool:
        """Has the host come so far? It runs ahead of the GPUs until it waits."""
        machine.thread.host += POLL_SECONDS
        return at <= machine.thread.host

    def hold(device: torch.device, until: float) -> None:
        """What this GPU is given from now on starts no earlier."""
        with machine.lock:
            clock = machine.gpus[device.index].clock
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

        def wait_stream(self, stream: Any) -> None:
            hold(self.device, machine.gpus[stream.device.index].clock.free)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

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

        def __hash__(self) -> int:
            return hash(self.device)

        def __repr__(self) -> str:
            return f"<torch.cuda.Stream device={self.device} cuda_stream=0x0>"

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
            hold(stream_of(stream and stream.device).device, self._time or 0.0)

    def stream_of(device: Any = None) -> Stream:
        return Stream(device)

    def use(stream: Any) -> None:
        if stream is not None:
            machine.thread.current = stream.device.index

    def make(kind: type, *args: Any, **kwargs: Any) -> Any:
        return (Stream if issubclass(kind, torch.cuda.Stream) else Event)(
            *args, **kwargs
        )

    # The classes stay, for isinstance and whoever has imported them.
    patches.set(torch.cuda.Stream, __new__=make)
    patches.set(torch.cuda.Event, __new__=make)
    patches.set(
        torch.cuda,
        set_stream=use,
        current_stream=stream_of,
        default_stream=stream_of,
        is_current_stream_capturing=lambda: False,
    )
    patches.set(torch, Stream=Stream, Event=Event)
    patches.replace((torch.accelerator,), current_stream=stream_of, set_stream=use)
    functions = torch.nn.parallel._functions
    patches.set(functions, _get_stream=lambda device: Stream(device), _streams=None)


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
