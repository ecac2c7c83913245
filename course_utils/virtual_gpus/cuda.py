"""`torch.cuda` and what stands on it, for virtual GPUs; `surface.py` says how.

Queries, memory, random numbers, streams, autocast, files, `nn.DataParallel`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.accelerator
import torch.nn.parallel

from course_utils.virtual_gpus import errors, refusals
from course_utils.virtual_gpus.parts import tensors_in
from course_utils.virtual_gpus.patches import copy_of

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import Machine
    from course_utils.virtual_gpus.patches import Patches

Tensor = torch.Tensor
CPU = errors.CPU
BUCKET = 10 * 2**20  # bytes that DataParallel sends at once (torch.nn.parallel.comm)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what has no effect on virtual GPUs."""


def install(gpus: Machine, patches: Patches) -> None:
    """Replace all that has to know of virtual GPUs."""
    _cuda_queries(gpus, patches)
    _cuda_memory(gpus, patches)
    _random_numbers(gpus, patches)
    _streams_and_events(gpus, patches)
    _autocast(gpus, patches)
    _files_and_processes(gpus, patches)
    _torchscript_files(gpus, patches)
    _profiler(patches)
    _data_parallel(gpus, patches)
    _distributed(gpus, patches)
    refusals.install(gpus, patches)


# --- torch.cuda, torch.accelerator ----------------------------------------------------


class _Properties(refusals.Partial, types.SimpleNamespace):
    stands_for = torch.cuda._CudaDeviceProperties

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, "
            f"minor={self.minor}, total_memory={self.total_memory // 2**20}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )


def _cuda_queries(gpus: Machine, patches: Patches) -> None:
    thread = gpus._thread

    def exchange(device: int) -> int:
        before = thread.current
        if device >= 0:
            thread.current = gpus._index(device)
        return before

    def set_device(device: Any) -> None:
        exchange(torch.cuda._utils._get_device_index(device))

    def set_index(device: Any) -> None:
        exchange(torch.accelerator._utils._get_device_index(device))

    def properties(device: Any = None) -> _Properties:
        gpu = gpus._gpus[gpus._index(device)]
        return _Properties(  # but for the memory, an H100's
            name="Virtual GPU",
            major=9,
            minor=0,
            total_memory=gpu.capacity,
            multi_processor_count=132,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            regs_per_multiprocessor=64 * 2**10,
            shared_memory_per_block=48 * 2**10,
            shared_memory_per_block_optin=227 * 2**10,
            shared_memory_per_multiprocessor=228 * 2**10,
            L2_cache_size=50 * 2**20,
            clock_rate=1_980_000,  # kHz, as the next one
            memory_clock_rate=2_619_000,
            memory_bus_width=5120,
            uuid=uuid.uuid5(uuid.NAMESPACE_DNS, f"virtual GPU {gpu.device.index}"),
            is_integrated=False,
            is_multi_gpu_board=False,
            gcnArchName="",
        )

    def synchronize(device: Any = None) -> None:
        gpus._synchronize(device)

    cuda = torch.cuda
    patches.set(
        cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=nothing,
        _lazy_init=nothing,
        _is_in_bad_fork=lambda: os.getpid() != gpus._process,
        device_count=lambda: gpus.n,
        current_device=lambda: thread.current,
        set_device=set_device,
        _exchange_device=exchange,
        _maybe_exchange_device=exchange,
        get_device_properties=properties,
        can_device_access_peer=lambda device, peer: (
            gpus._index(device) != gpus._index(peer)
        ),
        is_bf16_supported=lambda including_emulation=True: True,
        get_arch_list=lambda: [],
        synchronize=synchronize,
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
        device_count=lambda: gpus.n,
        current_device_index=lambda: thread.current,
        current_device_idx=lambda: thread.current,
        set_device_index=set_index,
        set_device_idx=set_index,
        synchronize=synchronize,
    )


def _cuda_memory(gpus: Machine, patches: Patches) -> None:
    def stats(device: int) -> dict[str, Any]:
        """What C++ keeps for `torch.cuda.memory_stats`, nested."""
        with gpus._lock:
            gpus._settle()
            gpu = gpus._gpus[device]
            count = sum(
                owned.device is gpu.device and not owned.drifts
                for owned in list(gpus._owned.values())
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
        with gpus._lock:
            gpus._settle()
            gpus._gpus[gpus._index(device)].set_peak(next(gpus._births))

    def info(device: Any = None) -> tuple[int, int]:
        with gpus._lock:
            gpus._settle()
            gpu = gpus._gpus[gpus._index(device)]
            return gpu.capacity - gpu.now, gpu.capacity

    whole = [gpu.capacity for gpu in gpus._gpus]

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        i = gpus._index(device)
        gpus._gpus[i].capacity = int(whole[i] * fraction)

    def give_back() -> None:
        for gpu, capacity in zip(gpus._gpus, whole, strict=True):
            gpu.capacity = capacity

    patches.later(give_back)
    memory = torch.cuda.memory
    patches.replace(
        (torch.cuda, memory, torch.accelerator, torch.accelerator.memory),
        reset_peak_memory_stats=reset_peak,
        reset_accumulated_memory_stats=nothing,
        mem_get_info=info,
        get_memory_info=info,
        empty_cache=nothing,
        set_per_process_memory_fraction=set_fraction,
        memory_snapshot=lambda *a, **k: [],
    )
    patches.set(
        torch._C,
        _cuda_memoryStats=stats,
        _cuda_getMemoryFraction=lambda i: gpus._gpus[i].capacity / whole[i],
        _accelerator_getDeviceStats=stats,
        _accelerator_isAllocatorInitialized=lambda: True,
        _accelerator_emptyHostCache=nothing,
    )


# --- random numbers -------------------------------------------------------------------


def _random_numbers(gpus: Machine, patches: Patches) -> None:
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
            place = gpus.resolve(device)
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
        get_rng_state_all=lambda: [default.get_state() for _ in range(gpus.n)],
        set_rng_state=set_state,
        set_rng_state_all=set_states,
        manual_seed=seed_with,
        manual_seed_all=seed_with,
        seed=lambda: default.seed() and None,
        seed_all=lambda: default.seed() and None,
        initial_seed=default.initial_seed,
    )
    patches.set(torch.cuda, default_generators=(default,) * gpus.n)
    patches.set(torch._C, _accelerator_getDefaultGenerator=lambda device: default)


# --- streams and events: one queue a GPU ----------------------------------------------

POLL_SECONDS = 1e-6  # of the host, for a look: a loop of looks comes to its end


def _streams_and_events(gpus: Machine, patches: Patches) -> None:
    def is_done(at: float) -> bool:
        """Has the host come so far? It runs ahead of the GPUs until it waits."""
        gpus._thread.host += POLL_SECONDS
        return at <= gpus._thread.host

    def hold(device: torch.device, until: float) -> None:
        """What this GPU is given from now on starts no earlier."""
        with gpus._lock:
            clock = gpus._gpus[device.index].clock
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
            self.device = torch.device("cuda", gpus._index(device))
            self.device_index = self.device.index
            self.priority = priority

        def query(self) -> bool:
            return is_done(gpus._gpus[self.device.index].clock.free)

        def synchronize(self) -> None:
            gpus._synchronize(self.device)

        def wait_stream(self, stream: Any) -> None:
            hold(self.device, gpus._gpus[stream.device.index].clock.free)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Stream:
            self._before = gpus._thread.current
            gpus._thread.current = self.device.index
            return self

        def __exit__(self, *error: object) -> None:
            gpus._thread.current = self._before

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
            device = gpus._thread.current if stream is None else stream.device.index
            clock = gpus._gpus[device].clock
            self._time = max(clock.free, gpus._thread.host)

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
            gpus._thread.host = max(gpus._thread.host, self._time or 0.0)

        def query(self) -> bool:
            return is_done(self._time or 0.0)

        def wait(self, stream: Any = None) -> None:
            hold(stream_of(stream and stream.device).device, self._time or 0.0)

    def stream_of(device: Any = None) -> Stream:
        return Stream(device)

    def use(stream: Any) -> None:
        if stream is not None:
            gpus._thread.current = stream.device.index

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


# --- autocast -------------------------------------------------------------------------


_set_enabled, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype


class AutocastState(threading.local):
    """What this thread has set for the GPUs (`on`, `dtype`) and for the CPU (`host`).

    PyTorch's autocast for the CPU does the work for both. While `autocast("cuda")` is
    on, it is set to that, except during calls without a GPU's tensor.
    """

    on, dtype, host = False, torch.float16, (False, torch.bfloat16)
    active = False  # is one of them on, so that calls need a look?

    def rest(self) -> tuple[bool, torch.dtype]:
        """What PyTorch's autocast for the CPU is set to between calls."""
        return (True, self.dtype) if self.on else self.host

    def settle(self) -> None:
        self.active = self.on or self.host[0]
        _set_for_cpu(*self.rest())


def _set_for_cpu(enabled: bool, dtype: torch.dtype) -> None:
    _set_enabled("cpu", enabled)
    _set_dtype("cpu", dtype)


# What CUDA's autocast does where the CPU's does something else: the lists of PyTorch's
# include/ATen/autocast_mode.h, with the names that Python has for these functions.
FLOAT32 = frozenset(
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits "
    "cosh cosine_embedding_loss cdist cosine_similarity cross_entropy cumprod cumsum "
    "dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss "
    "interpolate kl_div l1_loss layer_norm linalg_matrix_norm linalg_norm "
    "linalg_vector_norm log log10 log_softmax log1p log2 logsumexp margin_ranking_loss "
    "mse_loss multilabel_margin_loss multi_margin_loss native_layer_norm nll_loss norm "
    "normalize nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm rms_norm "
    "rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan "
    "triplet_margin_loss upsample upsample_bilinear upsample_nearest".split()
)
LOWER = frozenset(
    "addmv addr chain_matmul einsum gru gru_cell linalg_multi_dot lstm lstm_cell mv "
    "rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell".split()
)
WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot grid_sample grid_sampler index_put "
    "scatter_add tensordot vdot".split()
)
AS_IT_IS = frozenset(
    "_max_pool3d adaptive_avg_pool3d max_pool3d max_pool3d_with_indices max_unpool1d "
    "max_unpool2d max_unpool3d pad trace".split()
)
_HALF = (torch.float16, torch.bfloat16)
_CAST = (*_HALF, torch.float32)


def autocasted(gpus: Machine, func: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function with the autocast of the device that its tensors are on.

    Raises:
        RuntimeError: CUDA's autocast calls the function unsafe.
    """
    __tracebackhide__ = True
    state = gpus._autocast
    tensors = tensors_in((*args, *kwargs.values()), [])
    setting = state.rest()
    if any(gpus.device_of(x).type == "cuda" for x in tensors):
        dtype, differs = _cuda_casts(state, func, tensors)
        if dtype is not None:
            args = _cast(gpus, args, dtype)
            kwargs = {name: _cast(gpus, x, dtype) for name, x in kwargs.items()}
        setting = (state.on and not differs, state.dtype)
    elif tensors:
        setting = state.host
    state.active = False  # for calls inside of this one
    if setting != state.rest():
        _set_for_cpu(*setting)
    try:
        return gpus._call(func, args, kwargs)
    finally:
        state.settle()


def _cuda_casts(
    state: AutocastState, func: Any, tensors: list[Tensor]
) -> tuple[torch.dtype | None, bool]:
    """What CUDA's autocast casts to here, and whether it differs from the CPU's."""
    name = getattr(func, "__name__", "")
    if not state.on:
        return None, False
    if name == "binary_cross_entropy":
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe "
            "to autocast."
        )
    if name in FLOAT32:
        return torch.float32, True
    if name in LOWER:
        return state.dtype, True
    if name in WIDEST:
        wide = any(x.dtype == torch.float32 for x in tensors)
        return torch.float32 if wide else None, True
    return None, name in AS_IT_IS


def _cast(gpus: Machine, value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        casts = value.dtype in _CAST and gpus.device_of(value).type == "cuda"
        return value.to(dtype) if casts else value
    if type(value) in (list, tuple):
        return type(value)(_cast(gpus, x, dtype) for x in value)
    return value


def _autocast(gpus: Machine, patches: Patches) -> None:
    """Let `autocast("cuda")` and `autocast("cpu")` be two things."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    state = gpus._autocast
    state.host = (enabled("cpu"), dtype("cpu"))
    state.settle()

    def is_enabled(device_type: str = "cuda") -> bool:
        if device_type == "cuda":
            return state.on
        return state.host[0] if device_type == "cpu" else enabled(device_type)

    def switch(device_type: Any, value: Any = None) -> None:
        if value is None:  # the older form: set_autocast_enabled(True) means CUDA
            device_type, value = "cuda", device_type
        if device_type == "cuda":
            state.on = value
        elif device_type == "cpu":
            state.host = (value, state.host[1])
        else:
            _set_enabled(device_type, value)
        state.settle()

    def get_dtype(device_type: str) -> torch.dtype:
        if device_type == "cuda":
            return state.dtype
        return state.host[1] if device_type == "cpu" else dtype(device_type)

    def choose(device_type: str, value: torch.dtype) -> None:
        if device_type == "cuda":
            state.dtype = value
        elif device_type == "cpu":
            state.host = (state.host[0], value)
        else:
            _set_dtype(device_type, value)
        state.settle()

    patches.replace(
        (torch,),
        is_autocast_enabled=is_enabled,
        set_autocast_enabled=switch,
        get_autocast_dtype=get_dtype,
        set_autocast_dtype=choose,
        get_autocast_gpu_dtype=lambda: state.dtype,
        set_autocast_gpu_dtype=lambda value: choose("cuda", value),
        is_autocast_cpu_enabled=lambda: is_enabled("cpu"),
        set_autocast_cpu_enabled=lambda value: switch("cpu", value),
        get_autocast_cpu_dtype=lambda: get_dtype("cpu"),
        set_autocast_cpu_dtype=lambda value: choose("cpu", value),
    )


# --- files, other processes -----------------------------------------------------------


def _files_and_processes(gpus: Machine, patches: Patches) -> None:
    def tag(storage: Any) -> str | None:
        owned = gpus._owned.get(getattr(storage, "_untyped_storage", storage)._cdata)
        return None if owned is None else str(owned.device)

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        device = torch.device(location)
        index = gpus._thread.current if device.index is None else device.index
        if index >= gpus.n:
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but "
                f"torch.cuda.device_count() is {gpus.n}. Please use torch.load with "
                "map_location to map your storages to an existing device."
            )
        return gpus._storage_on(storage, gpus._devices[index])

    registry = [(0, tag, restore), *torch.serialization._package_registry]
    patches.set(torch.serialization, _package_registry=registry)

    def guarded(reduce: Callable) -> Callable:
        def call(x: Tensor) -> Any:
            if gpus.device_of(x).type == "cuda":
                raise RuntimeError(
                    errors.not_here(
                        f"sharing a tensor on {gpus.device_of(x)} with another process",
                        "it is known to this process alone, so send x.cpu()",
                    )
                )
            return reduce(x)

        return call

    reducers = dict(ForkingPickler._extra_reducers)
    for kind, reduce in reducers.items():
        if isinstance(kind, type) and issubclass(kind, Tensor):
            reducers[kind] = guarded(reduce)
    patches.set(ForkingPickler, _extra_reducers=reducers)


DEVICES = "devices_of_virtual_gpus.json"  # in a file of TorchScript


def _torchscript_files(gpus: Machine, patches: Patches) -> None:
    """C++ writes into a file of TorchScript where it sees a tensor: on the CPU.

    So a file has the devices of parameters and buffers beside it, by name.
    """

    def tensors_of(module: Any) -> dict[str, Tensor]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def with_devices(save: Callable) -> Callable:
        @functools.wraps(save)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = {n: str(gpus.device_of(x)) for n, x in tensors_of(self).items()}
            extra = {**(kwargs.get("_extra_files") or {}), DEVICES: json.dumps(found)}
            return save(self, *args, **{**kwargs, "_extra_files": extra})

        return call

    kind = torch.jit.RecursiveScriptModule
    if hasattr(kind, "save_to_buffer"):
        patches.set(
            kind,
            save=with_devices(copy_of(kind.save)),
            save_to_buffer=with_devices(copy_of(kind.save_to_buffer)),
        )
    load = copy_of(torch.jit.load)

    @functools.wraps(load)
    def load_there(
        f: Any, map_location: Any = None, _extra_files: Any = None, **kwargs: Any
    ) -> Any:
        extra = {} if _extra_files is None else _extra_files
        extra[DEVICES] = ""
        try:
            module = load(f, map_location, extra, **kwargs)
        except torch.AcceleratorError as error:
            raise RuntimeError(
                errors.not_here(
                    "torch.jit.load of a file from a real GPU",
                    "it goes straight there; with map_location= it works",
                )
            ) from error
        found = extra.pop(DEVICES)
        for name, place in json.loads(found or "{}").items():
            device = gpus.resolve(place) if map_location is None else CPU
            if device is not CPU:
                gpus._storage_on(tensors_of(module)[name].untyped_storage(), device)
        return module

    patches.set(torch.jit, load=load_there)


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
    nvtx = torch.autograd.profiler.emit_nvtx  # marks, as those of torch.cuda.nvtx
    patches.set(nvtx, __enter__=lambda self: self, __exit__=nothing)
    patches.set(
        torch.autograd.profiler,
        _supported_activities=lambda: {torch.profiler.ProfilerActivity.CPU},
    )


# --- nn.DataParallel ------------------------------------------------------------------


def _data_parallel(gpus: Machine, patches: Patches) -> None:
    """The C++ below torch.nn.parallel.comm; all its Python stays as it is."""
    utils = torch._utils

    def device(i: Any) -> torch.device:
        return CPU if i == -1 else gpus._devices[gpus._index(i)]

    def broadcast(x: Tensor, devices: list[int]) -> list[Tensor]:
        with torch.no_grad():
            return [gpus._moved(x, device(i), "broadcast") for i in devices]

    def broadcast_out(x: Tensor, out: list[Tensor]) -> list[Tensor]:
        with torch.no_grad(), gpus._because("broadcast"):
            return [o.copy_(x) for o in out]

    def broadcast_coalesced(
        tensors: list[Tensor], devices: list[int], buffer_size: int = BUCKET
    ) -> list[list[Tensor]]:
        for x in tensors:
            if gpus.device_of(x) != device(devices[0]):
                raise RuntimeError(f"all tensors must be on devices[0]: {devices[0]}")
        others = [device(i) for i in devices[1:]]
        found: list[dict[int, Tensor]] = [{} for _ in others]
        with torch.no_grad(), gpus._because("broadcast"):
            for chunk in utils._take_tensors(tensors, buffer_size):
                flats = gpus._coalesced(chunk, others)
                for there, flat in zip(found, flats, strict=True):
                    copies = utils._unflatten_dense_tensors(flat, chunk)
                    there.update(zip(map(id, chunk), copies, strict=True))
        return [list(tensors), *([there[id(x)] for x in tensors] for there in found)]

    def scatter(
        x: Tensor,
        devices: list[int],
        sizes: list[int] | None = None,
        dim: int = 0,
        streams: Any = None,
    ) -> list[Tensor]:
        chunks = x.split(list(sizes), dim) if sizes else x.chunk(len(devices), dim)
        with torch.no_grad():
            return [
                gpus._moved(chunk, device(i), "scatter", waits=False)
                for chunk, i in zip(chunks, devices, strict=False)
            ]

    def scatter_out(
        x: Tensor, out: list[Tensor], dim: int = 0, streams: Any = None
    ) -> list[Tensor]:
        chunks = x.split([o.size(dim) for o in out], dim)
        with torch.no_grad(), gpus._because("scatter"):
            for o, chunk in zip(out, chunks, strict=True):
                o.copy_(chunk)
        return list(out)

    def gather(tensors: list[Tensor], dim: int = 0, destination: Any = None) -> Tensor:
        place = device(gpus._thread.current if destination is None else destination)
        size = list(tensors[0].shape)
        size[dim] = sum(x.size(dim) for x in tensors)
        out = torch.empty(size, dtype=tensors[0].dtype, device=place)
        return gather_out(tensors, out, dim)

    def gather_out(tensors: list[Tensor], out: Tensor, dim: int = 0) -> Tensor:
        with torch.no_grad(), gpus._because("gather"):
            parts = out.split([x.size(dim) for x in tensors], dim)
            for part, x in zip(parts, tensors, strict=True):
                part.copy_(x, non_blocking=True)
        return out

    patches.set(
        torch._C,
        _broadcast=broadcast,
        _broadcast_out=broadcast_out,
        _broadcast_coalesced=broadcast_coalesced,
        _scatter=scatter,
        _scatter_out=scatter_out,
        _gather=gather,
        _gather_out=gather_out,
    )

    def named(original: Callable, cause: str) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with gpus._because(cause):
                return original(*args, **kwargs)

        return call

    broadcast_backward = copy_of(torch.nn.parallel._functions.Broadcast.backward)

    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """Zeros, for a replica that was not used, are on the replica's GPU."""
        for i, grad in enumerate(grads):
            gpus._belongs_to(grad, device(ctx.target_gpus[i // ctx.num_inputs]))
        return broadcast_backward(ctx, *grads)

    patches.set(torch.nn.parallel._functions.Broadcast, backward=staticmethod(backward))
    comm = torch.nn.parallel.comm
    patches.set(
        comm,
        reduce_add=named(copy_of(comm.reduce_add), "reduce"),
        reduce_add_coalesced=named(copy_of(comm.reduce_add_coalesced), "reduce"),
    )


def _backends(patches: Patches) -> None:
    """gloo is the backend of virtual GPUs: `init_process_group()` chooses it."""
    dist = torch.distributed
    defaults = dist.Backend.default_device_backend_map
    patches.later(functools.partial(defaults.update, defaults.copy()))
    defaults["cuda"] = "gloo"
    config = dist.distributed_c10d.BackendConfig
    start = copy_of(config.__init__)

    @functools.wraps(start)
    def with_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self.device_backend_map.get("cuda") == "gloo":  # C++ sees CPU tensors
            self.device_backend_map.setdefault("cpu", "gloo")

    patches.set(config, __init__=with_cpu)
    if nccl := getattr(dist, "ProcessGroupNCCL", None):
        why = "NCCL needs real ones; gloo works here"
        refuse = refusals.refusing("the backend nccl", why, exactly=True)
        patches.set(nccl, __init__=refuse)


def _distributed(gpus: Machine, patches: Patches) -> None:
    """The C++ of torch.distributed groups tensors by device, and sees only the CPU."""
    if not torch.distributed.is_available():
        return
    dist, reducer = torch.distributed, torch.distributed.Reducer
    _backends(patches)
    parallel = torch.nn.parallel.DistributedDataParallel

    def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
        groups: dict[torch.device, list[int]] = {}
        for i, x in enumerate(tensors):
            groups.setdefault(gpus.device_of(x), []).append(i)
        return list(groups.values())

    broadcast = dist._broadcast_coalesced
    assign = dist._compute_bucket_assignment_by_size

    def broadcast_by_device(
        group: Any, tensors: list[Tensor], buffer_size: int, src: int = 0
    ) -> None:
        for indices in by_device(tensors):
            broadcast(group, [tensors[i] for i in indices], buffer_size, src)

    def assign_by_device(
        tensors: list[Tensor],
        sizes: list[int],
        expect_sparse_gradient: Sequence[bool] = (),
        tensor_indices: Sequence[int] = (),
        logger: Any = None,
    ) -> tuple[list[list[int]], list[int]]:
        found = []
        for indices in by_device(tensors):

            def chosen(values: Sequence) -> list:
                return [values[i] for i in indices] if values else []  # noqa: B023

            buckets, limits = assign(
                chosen(tensors), sizes, chosen(expect_sparse_gradient)
            )
            names = chosen(tensor_indices) or indices
            for bucket, limit in zip(buckets, limits, strict=True):
                found.append(([names[i] for i in bucket], limit))
        if not tensor_indices:  # then they are in the order of the tensors
            found.sort(key=lambda pair: min(pair[0]))
        return [bucket for bucket, _ in found], [limit for _, limit in found]

    places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    helper, rebuild = copy_of(parallel._ddp_init_helper), reducer._rebuild_buckets

    @contextlib.contextmanager
    def buckets_on(devices: list[torch.device]) -> Iterator[None]:
        """What C++ makes from nothing is on the one device, or goes with its bucket."""
        if len(devices) > 1:
            gpus._thread.last = gpus._thread.last or devices[0]
            with gpus._counting("backward"), gpus._called_with(None):
                yield
            return
        place = devices[0] if devices[0].type == "cuda" else None
        before, gpus._thread.force = gpus._thread.force, place
        try:
            yield
        finally:
            gpus._thread.force = before

    @functools.wraps(helper)
    def make(self: Any, parameters: list, *args: Any, **kwargs: Any) -> None:
        devices = list(dict.fromkeys(map(gpus.device_of, parameters)))
        with buckets_on(devices):
            helper(self, parameters, *args, **kwargs)
        places[self.reducer] = devices

    @functools.wraps(rebuild)
    def make_again(self: Any) -> bool:
        devices = places.get(self, [CPU])
        if len(devices) > 1:  # it would mix devices: the first buckets stay
            self._check_reducer_finalized()
            return False
        with buckets_on(devices):
            return rebuild(self)

    patches.set(parallel, _ddp_init_helper=make)
    patches.set(reducer, _rebuild_buckets=make_again)
    patches.set(
        dist,
        _broadcast_coalesced=broadcast_by_device,
        _compute_bucket_assignment_by_size=assign_by_device,
    )
