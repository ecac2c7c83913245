"""What of PyTorch is replaced while virtual GPUs are on, and how it is put back.

Everything that this package uses of PyTorch and that PyTorch does not promise to keep
stands in `PRIVATE`. It was tested with the versions in `TESTED`.
"""

from __future__ import annotations

import _thread
import functools
import sys
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.accelerator
import torch.nn.parallel
import torch.optim.optimizer as optimizer_module
from torch.utils._device import DeviceContext, _device_constructors

from course_utils.virtual_gpus import cuda, errors
from course_utils.virtual_gpus.parts import tensors_in
from course_utils.virtual_gpus.patches import Patches, copy_of
from course_utils.virtual_gpus.records import (
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    OTHER,
    DeviceMemory,
    Memory,
)

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import Machine

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

# Not part of PyTorch's public interface. All must be there, or nothing is switched on.
PRIVATE = (
    "torch._C.DisableTorchFunction",
    "torch._C.Future",
    "torch._C.DispatchKey.ADInplaceOrView",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch._C.DispatchKey.Conjugate",
    "torch._C.DispatchKey.Negative",
    "torch._C._DisableTorchDispatch",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C.TensorBase.device",
    "torch._C._current_autograd_node",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._get_dispatch_stack_at",
    "torch._C._get_function_stack_at",
    "torch._C._group_tensors_by_device_and_dtype",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._nn._parse_to",
    "torch._ops.OpOverload",
    "torch._tensor_str._str",
    "torch._utils._flatten_dense_tensors",
    "torch._utils._take_tensors",
    "torch._utils._unflatten_dense_tensors",
    "torch._VF._pack_padded_sequence",
    "torch._VF._pad_packed_sequence",
    "torch.Tensor._backward_hooks",
    "torch.accelerator._utils._get_device_index",
    "torch.autograd.Function._backward_cls",
    "torch.autograd._engine_run_backward",
    "torch.autograd._get_sequence_nr",
    "torch.autograd.graph._engine_run_backward",
    "torch.cuda._CudaDeviceProperties",
    "torch.cuda._exchange_device",
    "torch.cuda._is_in_bad_fork",
    "torch.cuda._lazy_init",
    "torch.cuda._maybe_exchange_device",
    "torch.cuda._utils._get_device_index",
    "torch.nn.Module._apply",
    "torch.nn.parallel.DistributedDataParallel._ddp_init_helper",
    "torch.nn.parallel._functions.Broadcast.backward",
    "torch.nn.parallel._functions._get_stream",
    "torch.nn.parallel._functions._streams",
    "torch.ops.aten.linear.default._op_dk",
    "torch.overrides.TorchFunctionMode",
    "torch.serialization._package_registry",
    "torch.utils._device.DeviceContext",
    "torch.utils._device._device_constructors",
    "torch.utils._python_dispatch.TorchDispatchMode",
)

# The C++ below torch.nn.parallel.comm. Builds of PyTorch without CUDA do not have it.
PRIVATE_WITH_CUDA = (
    "torch._C._broadcast",
    "torch._C._broadcast_coalesced",
    "torch._C._broadcast_out",
    "torch._C._gather",
    "torch._C._gather_out",
    "torch._C._scatter",
    "torch._C._scatter_out",
)

Tensor, Base = torch.Tensor, torch._C.TensorBase
CPU = errors.CPU

FACTORIES = _device_constructors() | {Tensor.new_tensor, Tensor.new}
PARSE_TO = torch._C._nn._parse_to  # has a device, but makes nothing: Module.to asks it
_TENSOR, _AS_TENSOR, _ASARRAY = torch.tensor, torch.as_tensor, torch.asarray
_FROM_DATA = {_TENSOR, _AS_TENSOR, _ASARRAY}
CTC = {torch.ctc_loss, torch.nn.functional.ctc_loss}
# What C++ checks before it calls an op that we could see.
CHECKS = {
    torch.lstm: errors.check_recurrent,
    torch.gru: errors.check_recurrent,
    torch.rnn_tanh: errors.check_recurrent,
    torch.rnn_relu: errors.check_recurrent,
    torch._VF._pack_padded_sequence: errors.check_lengths,
    torch.tensor_split: errors.check_sections,
    Tensor.tensor_split: errors.check_sections,
    Tensor.grad.__set__: errors.check_gradient,
    Tensor.requires_grad_: lambda gpus, args: gpus._remember(args[0]),
}


# --- versions, real GPUs --------------------------------------------------------------


@functools.cache
def check_version() -> None:
    """Warn of a version that was not tested.

    Raises:
        RuntimeError: names in PyTorch that are needed are not there.
    """
    missing = []
    for name in PRIVATE:
        place: Any = torch
        for part in name.split(".")[1:]:
            place = getattr(place, part, missing)
            if place is missing:
                missing.append(name)
                break
    if missing:
        raise RuntimeError(
            f"Virtual GPUs do not work with PyTorch {torch.__version__}: it has no "
            f"{', '.join(missing)}. They were tested with PyTorch {TESTED[0]} to "
            f"{TESTED[-1]}: install one of these."
        )
    if ".".join(torch.__version__.split(".")[:2]) not in TESTED:
        warnings.warn(
            f"Virtual GPUs were tested with PyTorch {TESTED[0]} to {TESTED[-1]}, not "
            f"with {torch.__version__}. If something goes wrong, try one of these.",
            stacklevel=4,
        )


def real_gpus() -> int:
    """How many real GPUs PyTorch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def real_memory(n: int) -> Memory:
    """The memory of real GPUs, for a machine that has them."""
    rows = []
    for i in range(n):
        now, peak = torch.cuda.memory_allocated(i), torch.cuda.max_memory_allocated(i)
        capacity = torch.cuda.get_device_properties(i).total_memory
        none = dict.fromkeys(KINDS, 0)
        by_now, by_peak = {**none, OTHER: now}, {**none, OTHER: peak}
        rows.append(DeviceMemory(f"cuda:{i}", capacity, now, peak, by_now, by_peak))
    return Memory(tuple(rows))


def check_modes(modes: tuple) -> None:
    """Raise unless our modes are the innermost ones.

    Raises:
        RuntimeError: something that was entered since is open.
    """
    function, dispatch = modes
    c = torch._C
    functions, dispatches = c._len_torch_function_stack(), c._len_torch_dispatch_stack()
    here = (
        functions
        and dispatches
        and c._get_function_stack_at(functions - 1) is function
        and c._get_dispatch_stack_at(dispatches - 1) is dispatch
    )
    if not here:
        raise RuntimeError(
            "Virtual GPUs can be switched off only where they were switched on: leave "
            "the `with` blocks that were entered since, and call off() in the same "
            "thread as on()."
        )


# --- small questions about tensors and ops --------------------------------------------


def unwrapped(x: Tensor) -> Tensor | None:
    """The tensor inside a torch.func wrapper; None for another tensor."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(x):
        return functorch.get_unwrapped(x)
    return None


def is_plain(x: Tensor) -> bool:
    """Is this a tensor that no transform of torch.func or forward AD has wrapped?"""
    return (
        unwrapped(x) is None
        and torch.autograd.forward_ad.unpack_dual(x).tangent is None
    )


def factory_bytes(args: tuple, kwargs: dict) -> int:
    """Bytes of the tensor that a factory is asked for; 0 if its size is not plain."""
    size = args[0] if args else kwargs.get("size")
    if not isinstance(size, (list, tuple)) or not all(type(n) is int for n in size):
        return 0
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    count = 1
    for n in size:
        count *= n
    return count * dtype.itemsize


def flop_formula(func: Any) -> Callable | None:
    """PyTorch's formula for the floating-point operations of an op, or None."""
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    aten = torch.ops.aten
    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet]
    if packet is getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None):
        return lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape)
    backward = "_scaled_dot_product_flash_attention_for_cpu_backward"
    if packet is getattr(aten, backward, None):
        # Scores, two gradients through them, and one each for queries, keys, values.
        return lambda g, q, k, v, *_, **__: (
            5 * sdpa_flop_count(q.shape, k.shape, v.shape) // 2
        )
    return None


def default_device() -> torch.device | None:
    """What `set_default_device` or `with torch.device(...)` says; None without them."""
    for i in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(i)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def check_generator(gpus: Machine, args: tuple, kwargs: dict) -> None:
    """What ops say of random numbers from elsewhere; factories do it by themselves."""
    tensors = tensors_in((*args, *kwargs.values()), [])
    if tensors and not tensors[0].is_meta:
        errors.check_generator(kwargs["generator"], gpus.device_of(tensors[0]))


def plain_lengths(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of `ctc_loss` with its lengths, often CPU tensors, as numbers."""

    def plain(x: Any) -> Any:
        return x.tolist() if isinstance(x, Tensor) else x

    args = (*args[:2], *map(plain, args[2:4]), *args[4:])
    lengths = ("input_lengths", "target_lengths")
    return args, {k: plain(v) if k in lengths else v for k, v in kwargs.items()}


# --- factories ------------------------------------------------------------------------


def named_device(*args: Any, **kwargs: Any) -> torch.device:
    """`torch.device(...)`; a number alone is that of a GPU, in every build of torch."""
    if len(args) == 1 and not kwargs and type(args[0]) is int:
        return torch.device("cuda", args[0])
    return torch.device(*args, **kwargs)


def factory(gpus: Machine, func: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function that makes a tensor; NotImplemented if that is PyTorch's job."""
    __tracebackhide__ = True
    device = kwargs.get("device")
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    from_tensor = func in _FROM_DATA and isinstance(data, Tensor)
    if device is None:
        if kwargs.get("out") is not None:
            return NotImplemented
        if func in (Tensor.new_tensor, Tensor.new):
            device = gpus.device_of(data)
        else:
            device = default_device()
            if device is None and from_tensor:
                device = gpus.device_of(data)
    place = CPU if device is None else gpus.resolve(device)
    if place is None:
        return NotImplemented
    errors.check_generator(kwargs.get("generator"), place)
    pinned = kwargs.get("pin_memory")
    if pinned and place is not CPU:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    kwargs = {**kwargs, "device": CPU}
    if pinned:
        kwargs["pin_memory"] = False
    if func is Tensor.new:
        del kwargs["device"]
    if from_tensor and gpus.device_of(data) != place:
        out = _copied_there(gpus, place, func, data, kwargs)
    elif func in (_AS_TENSOR, _ASARRAY) and not from_tensor and place is not CPU:
        # On the CPU these may share the memory of an array.
        plain = {k: v for k, v in kwargs.items() if k != "requires_grad"}
        here = gpus._made_on(CPU, func, args, plain)
        out = _copied_there(gpus, place, func, here, kwargs)
    else:
        out = gpus._made_on(place, func, args, kwargs)
        if func is _TENSOR and not from_tensor and place is not CPU:
            nbytes = out.numel() * out.element_size()
            gpus._transfer(nbytes, CPU, place, gpus._thread.cause)
    if pinned:
        gpus._mark_pinned(out)
    return out


def _copied_there(
    gpus: Machine, place: torch.device, func: Any, x: Tensor, kwargs: dict
) -> Tensor:
    """What `tensor`, `as_tensor` or `asarray` makes of a tensor from elsewhere.

    Raises:
        ValueError: `asarray` is told not to copy.
    """
    __tracebackhide__ = True
    if func is _ASARRAY and kwargs.get("copy") is False:
        raise ValueError(f"can't alias tensor from device '{x.device}' to '{place}'.")
    out = x.to(place, kwargs.get("dtype"))
    wants_grad = kwargs.get("requires_grad", False)
    if func is _TENSOR or func is _ASARRAY and not wants_grad:
        out = out.detach()
    if wants_grad:
        gpus._remember(out.requires_grad_())
    return out


def _factories(gpus: Machine, patches: Patches) -> None:
    """These ask the CUDA driver before any mode of ours sees them.

    PyTorch's own Python calls them where our function mode is off for a moment.
    """

    def through(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return gpus._call(original, args, kwargs)

        return call

    for original in _FROM_DATA:
        patches.set(torch, **{original.__name__: through(original)})

    def parse_to(device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if type(device) is int:  # builds without CUDA know no device of that name
            device = named_device(device)
        return PARSE_TO(*(() if device is None else (device,)), *args, **kwargs)

    patches.set(torch._C._nn, _parse_to=parse_to)


def install(gpus: Machine, patches: Patches) -> None:
    """Replace all that has to know of virtual GPUs."""
    _factories(gpus, patches)
    _tensor_methods(gpus, patches)
    _modules_and_optimizers(gpus, patches)
    _autograd_and_threads(gpus, patches)
    _gradients(gpus, patches)
    cuda.install(gpus, patches)
    patches.later(_forget_default_device)
    patches.follow()


def _forget_default_device() -> None:
    device = default_device()
    if device is not None and device.type == "cuda":
        torch.set_default_device(None)


# --- torch.Tensor ---------------------------------------------------------------------


class _Standin:
    """A method in the place of another, and equal to it.

    Subclasses of Tensor look up the method that they are asked for in sets of methods.
    Such a set may be older than this machine, or outlive it.
    """

    def __init__(self, original: Callable, function: Callable) -> None:
        self.original, self.function = original, function
        functools.update_wrapper(self, original)

    def __get__(self, x: Any, kind: Any = None) -> Callable:
        return self if x is None else types.MethodType(self, x)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __hash__(self) -> int:
        return hash(self.original)


def _tensor_methods(gpus: Machine, patches: Patches) -> None:
    where = gpus.device_of
    truth = torch._C.DisableTorchFunction

    def direct(name: str) -> Callable:
        """PyTorch's own method, past our function mode: we are what it would call."""
        original = getattr(Base, name)

        @functools.wraps(original)
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with gpus._called_with((x, *args)), truth():
                return original(x, *args, **kwargs)

        return call

    plain_to, plain_copy_ = direct("to"), direct("copy_")
    plain_setitem, plain_tolist = direct("__setitem__"), direct("tolist")

    uninitialized = torch.nn.parameter.UninitializedTensorMixin

    def overridden(x: Tensor) -> bool:
        return (
            type(x) not in (Tensor, torch.nn.Parameter)
            and not isinstance(x, uninitialized)
            and torch.overrides.has_torch_function_unary(x)
        )

    def method(function: Callable) -> _Standin:
        """For a subclass of Tensor, its own `__torch_function__` comes first."""
        original = getattr(Tensor, function.__name__)

        @functools.wraps(original)
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if overridden(self):
                return torch.overrides.handle_torch_function(
                    standin, (self,), self, *args, **kwargs
                )
            return function(self, *args, **kwargs)

        standin = _Standin(original, call)
        return standin

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        __tracebackhide__ = True
        device, dtype, rest = kwargs.get("device"), kwargs.get("dtype"), list(args)
        other = kwargs.get("other")
        if rest and isinstance(rest[0], Tensor):
            other = rest.pop(0)
        elif rest and isinstance(rest[0], torch.dtype):
            dtype = rest.pop(0)
        elif rest:
            device = rest.pop(0)
            if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
                dtype = rest.pop(0)
        if other is not None:
            device, dtype = where(other), other.dtype
        if device is None:
            return plain_to(x, *args, **kwargs)
        place = gpus.resolve(device)
        source = where(x)
        if place is None or "cuda" not in (place.type, source.type):
            return plain_to(x, *args, **kwargs)
        blocking = not (rest[0] if rest else kwargs.get("non_blocking", False))
        copy = rest[1] if len(rest) > 1 else kwargs.get("copy", False)
        form = {k: kwargs[k] for k in ("memory_format",) if kwargs.get(k) is not None}
        if dtype is not None and dtype != x.dtype:
            x, copy = plain_to(x, dtype, **form), False
        elif form:
            x = plain_to(x, x.dtype, **form)
        if source == place:
            return plain_to(x, x.dtype, copy=True, **form) if copy else x
        return gpus._moved(x, place, waits=blocking)

    def cuda(x, device=None, non_blocking=False, memory_format=torch.preserve_format):
        __tracebackhide__ = True
        place = gpus.resolve("cuda" if device is None else device)
        if place is CPU or place is None:
            raise RuntimeError(
                f"Invalid device, must be cuda device"  # noqa: F541 - PyTorch's words
            )
        return to(x, place, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(x, memory_format=torch.preserve_format):
        return to(x, CPU, memory_format=memory_format)

    def type_as(x, other):
        return to(x, other)

    def type_(x, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            return errors.type_name(x.dtype, where(x).type)
        if isinstance(dtype, torch.dtype):
            return plain_to(x, dtype)
        name = (
            dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        )
        kind = name.rpartition(".")[2].removesuffix("Tensor")
        if kind not in errors.DTYPES:
            return Base.type(x, dtype)
        place = "cuda" if ".cuda." in name else "cpu"
        place = where(x) if place == where(x).type else gpus.resolve(place)
        return to(x, place, errors.DTYPES[kind], non_blocking)

    type_.__name__ = "type"

    def on_host_only(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if where(x).type == "cuda":
                if kwargs.pop("force", False):
                    return original(cpu(x.detach()), *args, **kwargs)
                raise TypeError(errors.not_numpy(where(x)))
            return original(x, *args, **kwargs)

        return call

    def no_dlpack(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if where(x).type == "cuda":
            raise BufferError(errors.unseen("__dlpack__"))
        return dlpack(x, *args, **kwargs)

    def tolist(x):
        if where(x).type == "cuda":
            with gpus._because("item"):
                x = cpu(x)
        return plain_tolist(x)

    def with_source_here(x: Tensor, value: Any) -> Any:
        """The gradient of a value from another device has to find its way back."""
        if (
            isinstance(value, Tensor)
            and value.requires_grad
            and torch.is_grad_enabled()
            and where(value) != where(x)
        ):
            return gpus._moved(value, where(x), "copy_")
        return value

    def copy_(x, source, non_blocking=False):
        return plain_copy_(x, with_source_here(x, source), non_blocking)

    def index_here(x: Tensor, index: Any) -> Any:
        """An index from the CPU is copied to the GPU, as C++ does it for CUDA."""
        if isinstance(index, tuple):
            return tuple(index_here(x, part) for part in index)
        if isinstance(index, Tensor) and index.dim() and where(index) is CPU:
            return gpus._moved(index, where(x), "index")
        return index

    def __setitem__(x, index, value):
        if where(x).type == "cuda":
            index = index_here(x, index)
        plain_setitem(x, index, with_source_here(x, value))

    def share_memory_(x):
        return x if where(x).type == "cuda" else share(x)

    def is_shared(x):
        return where(x).type == "cuda" or shared(x)

    def no_array_interface(x: Tensor) -> Any:
        if where(x).type == "cuda":  # so that hasattr() says no, as for CPU tensors
            raise AttributeError(errors.unseen("__cuda_array_interface__"))
        return array_interface.__get__(x)

    dlpack = copy_of(Tensor.__dlpack__)
    share, shared = copy_of(Tensor.share_memory_), copy_of(Tensor.is_shared)
    array_interface = Tensor.__cuda_array_interface__
    patches.set(
        Tensor,
        device=property(lambda x: where(x)),
        is_cuda=property(lambda x: where(x).type == "cuda"),
        is_cpu=property(lambda x: where(x).type == "cpu"),
        get_device=lambda x: where(x).index if where(x).index is not None else -1,
        to=method(to),
        cuda=method(cuda),
        cpu=method(cpu),
        type=method(type_),
        type_as=method(type_as),
        numpy=on_host_only(Tensor.numpy),
        __array__=on_host_only(copy_of(Tensor.__array__)),
        __dlpack__=no_dlpack,
        tolist=method(tolist),
        copy_=method(copy_),
        __setitem__=__setitem__,
        share_memory_=share_memory_,
        is_shared=method(is_shared),
        __cuda_array_interface__=property(no_array_interface),
        pin_memory=lambda x, *_, **__: gpus._pin(x),
        is_pinned=lambda x, *_, **__: gpus._is_pinned(x),
        record_stream=lambda x, stream: None,
    )

    show = copy_of(torch._tensor_str._str)

    def waiting_str(x: Tensor, **kwargs: Any) -> str:
        """Its many small ops and copies are left out. What counts is the wait."""
        place = where(x)
        if place.type == "cuda":
            gpus._synchronize(place)
        with gpus._counting("quiet"):
            return show(x, **kwargs)

    patches.set(torch._tensor_str, _str=waiting_str)

    # A storage is where its tensors are: copy.deepcopy and torch.load ask storages.
    Storage = torch.UntypedStorage
    storage_device = Storage.device

    def owner(storage: torch.UntypedStorage) -> torch.device:
        owned = gpus._owned.get(storage._cdata)
        return storage_device.__get__(storage) if owned is None else owned.device

    def clone(storage):
        place = owner(storage)
        if place.type != "cuda":
            return storage_clone(storage)
        return gpus._storage_on(Storage(storage.nbytes()).copy_(storage), place)

    def storage_cuda(storage, device=None, non_blocking=False):
        place = gpus.resolve("cuda" if device is None else device)
        if owner(storage) == place:
            return storage
        return gpus._storage_on(Storage(storage.nbytes()).copy_(storage), place)

    def resize_(storage, nbytes):
        """FSDP frees and fills its parameters with this."""
        return gpus._resize(storage, lambda: storage_resize_(storage, nbytes), nbytes)

    def new(cls, *args, device=None, **kwargs):
        place = None if device is None else gpus.resolve(device)
        if place is None or place is CPU:
            return storage_new(cls, *args, device=device, **kwargs)
        storage = storage_new(cls, *args, **kwargs)
        gpus._adopt(torch.empty(0, dtype=torch.uint8).set_(storage), place, OTHER)
        return storage

    storage_new = Storage.__new__
    storage_clone, storage_resize_ = Storage.clone, Storage.resize_
    patches.set(
        Storage,
        __new__=new,
        device=property(owner),
        clone=clone,
        cuda=storage_cuda,
        resize_=resize_,
    )

    _old_tensor_types(gpus, patches)


def _old_tensor_types(gpus: Machine, patches: Patches) -> None:
    """`torch.cuda.FloatTensor` and its like, which older code still uses."""

    class Kind(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return (
                isinstance(x, Tensor)
                and x.dtype == cls.dtype
                and gpus.device_of(x).type == cls.place
            )

        def __call__(cls, *args: Any, **kwargs: Any) -> Tensor:
            place = gpus.resolve(kwargs.pop("device", None) or cls.place)
            return gpus._made_on(place, cls.original, args, kwargs)

    for name, dtype in errors.DTYPES.items():
        original = getattr(torch, f"{name}Tensor", None)
        for module, place in ((torch, "cpu"), (torch.cuda, "cuda")):
            if original is None or not hasattr(module, f"{name}Tensor"):
                continue
            members = {"dtype": dtype, "place": place, "original": original}
            kind = Kind(f"{name}Tensor", (), members)
            kind.__module__ = module.__name__
            patches.set(module, **{f"{name}Tensor": kind})

    def set_default(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        dtype = errors.DTYPES.get(name.rpartition(".")[2].removesuffix("Tensor"))
        if dtype is None:
            raise TypeError(f"invalid type object: {kind}")
        torch.set_default_dtype(dtype)
        torch.set_default_device("cuda" if ".cuda." in name else None)

    patches.set(torch, set_default_tensor_type=set_default)


# --- nn.Module, optimizers ------------------------------------------------------------


def _modules_and_optimizers(gpus: Machine, patches: Patches) -> None:
    Module = torch.nn.Module  # noqa: N806
    module_call, apply = copy_of(Module.__call__), copy_of(Module._apply)

    @functools.wraps(module_call)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        thread = gpus._thread
        modules = thread.modules
        if not modules:
            thread.optimizer = 0  # a step that failed has not said that it is over
        modules.append(self)
        try:
            return module_call(self, *args, **kwargs)
        finally:
            modules.pop()

    @functools.wraps(apply)
    def setup(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with gpus._counting("setup"):
            return apply(self, *args, **kwargs)

    patches.set(torch.nn.Module, __call__=call, _apply=setup)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gpus._thread.optimizer = 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gpus._remember(parameter)
                if parameter.grad is not None:
                    gpus._classify(parameter.grad, GRADIENTS)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gpus._thread.optimizer = 0
        for state in optimizer.state.values():
            if isinstance(state, dict):
                for x in tensors_in(state.values(), []):
                    gpus._classify(x, OPTIMIZER)

    def grouped(lists: list[list], with_indices: bool = False) -> dict:
        """Optimizers work device by device: group lists of tensors by that."""
        groups: dict = {}
        for i, x in enumerate(lists[0]):
            parts, places = groups.setdefault(
                (gpus.device_of(x), x.dtype), ([[] for _ in lists], [])
            )
            for part, values in zip(parts, lists, strict=True):
                if values:
                    part.append(values[i])
            if with_indices:
                places.append(i)
        return groups

    swap = copy_of(torch.utils.swap_tensors)

    @functools.wraps(swap)
    def swap_unwatched(*pair: Tensor) -> None:
        """PyTorch refuses to swap a tensor that somebody has a weak reference to."""
        leaves = [x for x in pair if gpus._leaves.pop(id(x), None)]
        try:
            swap(*pair)
        finally:
            for x in leaves:
                gpus._remember(x)

    patches.set(torch.utils, swap_tensors=swap_unwatched)
    patches.set(torch._C, _group_tensors_by_device_and_dtype=grouped)
    patches.later(optimizer_module.register_optimizer_step_pre_hook(before).remove)
    patches.later(optimizer_module.register_optimizer_step_post_hook(after).remove)


# --- autograd, threads ----------------------------------------------------------------


def _autograd_and_threads(gpus: Machine, patches: Patches) -> None:
    from course_utils.virtual_gpus.machine import _Function

    engine = copy_of(torch.autograd.graph._engine_run_backward)

    @functools.wraps(engine)
    def backward(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # What `backward(gradient)` or `grad(…, grad_outputs=…)` begins with.
        args = (args[0], _at_home(gpus, args[1], _homes(gpus, args[0])), *args[2:])
        # `loss.backward()` came through our function mode, which PyTorch has switched
        # off for the time of the call: a backward that is written in Python needs it.
        try:
            with (
                gpus._counting("backward"),
                gpus._called_with(None),
                _Function(gpus),
            ):
                return engine(*args, **kwargs)
        finally:
            with gpus._lock:
                gpus._find_gradients()

    hooks = torch.autograd.graph.saved_tensors_hooks
    make = copy_of(hooks.__init__)

    def awake(hook: Callable) -> Callable:
        @functools.wraps(hook)
        def call(x: Any) -> Any:
            with gpus._called_with(None), _Function(gpus):
                return hook(x)

        return call

    @functools.wraps(make)
    def make_awake(self: Any, pack_hook: Callable, unpack_hook: Callable) -> None:
        make(self, awake(pack_hook), awake(unpack_hook))

    patches.set(hooks, __init__=make_awake)
    patches.set(torch.autograd.graph, _engine_run_backward=backward)

    for kind in (torch.jit.ScriptFunction, torch.jit.ScriptModule):
        patches.set(kind, __call__=_scripted(gpus, kind.__call__))

    _threads(gpus, patches)


def _threads(gpus: Machine, patches: Patches) -> None:
    """What other threads are given to call; some of them are started by C++."""
    for name in ("start_new_thread", "start_joinable_thread"):  # of all of threading
        if start := getattr(_thread, name, None):

            def inside(function: Callable, *args: Any, _start=start, **kw: Any) -> Any:
                return _start(gpus._anywhere(function), *args, **kw)

            patches.set(_thread, **{name: inside})

    submit = copy_of(ThreadPoolExecutor.submit)

    @functools.wraps(submit)
    def submit_anywhere(self: Any, function: Callable, /, *args: Any, **kw: Any) -> Any:
        return submit(self, gpus._anywhere(function), *args, **kw)

    patches.set(ThreadPoolExecutor, submit=submit_anywhere)

    def with_callback(register: Callable) -> Callable:
        def call(self: Any, callback: Callable) -> Any:
            return register(self, gpus._anywhere(callback))

        return call

    future = torch._C.Future
    patches.set(
        future,
        then=with_callback(future.then),
        add_done_callback=with_callback(future.add_done_callback),
    )
    if rpc := sys.modules.get("torch.distributed.rpc.internal"):
        answer = copy_of(rpc._run_function)
        patches.set(rpc, _run_function=lambda call: gpus._anywhere(answer)(call))


# --- gradients: what autograd's engine checks, but it sees CPU tensors only -----------


def _at_home(gpus: Machine, grads: Any, places: Any, whose: str = "") -> tuple:
    """Gradients, if they are where they belong; those without dimensions are moved.

    Raises:
        RuntimeError: one is on another device.
    """
    __tracebackhide__ = True
    found = list(grads)
    if not gpus.is_on:
        return tuple(found)
    for i, (grad, place) in enumerate(zip(grads, places, strict=False)):
        if grad is None or place is None:
            continue
        there = gpus.device_of(grad)
        if there == place or gpus.drifts(grad):
            continue
        if grad.dim():
            raise RuntimeError(
                f"{whose}invalid gradient at index {i} - expected device {place} but "
                f"got {there}"
            )
        found[i] = gpus._moved(grad, place)
    return tuple(found)


def _homes(gpus: Machine, values: Any) -> list[torch.device | None]:
    """Where the gradients of tensors belong; None where nothing says it."""
    with torch._C.DisableTorchFunction():
        return [
            gpus.device_of(x)
            if isinstance(x, Tensor) and x.requires_grad and not gpus.drifts(x)
            else None
            for x in values
        ]


def _gradients(gpus: Machine, patches: Patches) -> None:
    """Check the gradients that a Function of yours and the hooks of tensors return."""
    from course_utils.virtual_gpus.machine import _Move

    apply = vars(torch.autograd.Function)["apply"]  # of classes, so not yet bound
    register, truth = copy_of(Tensor.register_hook), torch._C.DisableTorchFunction
    written_in_python = torch.autograd.function.BackwardCFunction

    def watch(node: Any, places: list, once: bool = False) -> None:
        """Check what an autograd node returns, the gradients of its inputs."""
        whose = f"Function {node.name()} returned an "

        def check(grads: tuple, _: tuple) -> tuple:
            if once:
                handle.remove()
            return _at_home(gpus, grads, places, whose)

        handle = node.register_hook(check)

    @functools.wraps(apply)
    def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        call = apply.__get__(None, cls)
        if cls is _Move:
            return call(*args, **kwargs)
        places = _homes(gpus, (x for x in args if isinstance(x, Tensor)))
        out = call(*args, **kwargs)
        with truth():
            for x in tensors_in((out,), []):
                if isinstance(x.grad_fn, cls._backward_cls):
                    watch(x.grad_fn, places)
                    break
        return out

    def after_hook(hook: Callable, grad: Tensor, new: Tensor) -> None:
        here, there = gpus.device_of(grad), gpus.device_of(new)
        if here == there or gpus.drifts(grad) or gpus.drifts(new):
            return
        if here.type != there.type:
            raise RuntimeError(
                f"hook '{getattr(hook, '__name__', hook)}' has changed the type of "
                f"value (was {errors.type_name(grad.dtype, here.type)} got "
                f"{errors.type_name(new.dtype, there.type)})"
            )
        # PyTorch notices another GPU only when the gradient has gone on.
        node = torch._C._current_autograd_node()
        if node is not None and not isinstance(node, written_in_python):
            watch(node, [here] * len(node.next_functions), once=True)

    @functools.wraps(register)
    def register_hook(x: Tensor, hook: Callable) -> Any:
        @functools.wraps(hook)
        def call(grad: Tensor) -> Any:
            __tracebackhide__ = True
            new = hook(grad)
            if isinstance(new, Tensor) and gpus.is_on:
                after_hook(hook, grad, new)
            return new

        with truth():
            return register(x, call)

    patches.set(torch.autograd.Function, apply=classmethod(watched))
    patches.set(Tensor, register_hook=register_hook)


def _scripted(gpus: Machine, original: Callable) -> Callable:
    """TorchScript calls no Python, so a factory in it has only these arguments."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with gpus._called_with((*args, *kwargs.values())):
            return original(self, *args, **kwargs)

    return call
