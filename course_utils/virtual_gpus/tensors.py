"""What makes, moves and reads tensors, replaced while virtual GPUs are on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from course_utils.virtual_gpus import errors
from course_utils.virtual_gpus.parts import CPU, Tensor, tensors_in, truth, unwrapped
from course_utils.virtual_gpus.patches import Patches, copy_of
from course_utils.virtual_gpus.records import OTHER

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine

Base = torch._C.TensorBase

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
    torch.nn.functional.scaled_dot_product_attention: errors.check_attention,
    Tensor.grad.__set__: errors.check_gradient,
    Tensor.requires_grad_: lambda machine, args: machine.remember(args[0]),
}


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Replace what makes and moves tensors and storages."""
    _factories(machine, patches)
    _tensor_methods(machine, patches)
    patches.callback(_forget_default_device)


# --- small questions about tensors and ops --------------------------------------------


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
    return math.prod(size) * dtype.itemsize


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


def _forget_default_device() -> None:
    device = default_device()
    if device is not None and device.type == "cuda":
        torch.set_default_device(None)


def check_generator(machine: VirtualMachine, args: tuple, kwargs: dict) -> None:
    """What ops say of random numbers from elsewhere; factories do it by themselves."""
    tensors = tensors_in((*args, *kwargs.values()), [])
    if tensors and not tensors[0].is_meta:
        errors.check_generator(kwargs["generator"], machine.device_of(tensors[0]))


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


def factory(machine: VirtualMachine, func: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function that makes a tensor; NotImplemented if that is PyTorch's job."""
    __tracebackhide__ = True
    device = kwargs.get("device")
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    from_tensor = func in _FROM_DATA and isinstance(data, Tensor)
    if device is None:
        if kwargs.get("out") is not None:
            return NotImplemented
        if func in (Tensor.new_tensor, Tensor.new):
            device = machine.device_of(data)
        else:
            device = default_device()
            if device is None and from_tensor:
                device = machine.device_of(data)
    place = CPU if device is None else machine.resolve(device)
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
    if from_tensor and machine.device_of(data) != place:
        out = _copied_there(machine, place, func, data, kwargs)
    elif func in (_AS_TENSOR, _ASARRAY) and not from_tensor and place is not CPU:
        # On the CPU these may share the memory of an array.
        plain = {k: v for k, v in kwargs.items() if k != "requires_grad"}
        here = machine.made_on(CPU, func, args, plain)
        out = _copied_there(machine, place, func, here, kwargs)
    else:
        out = machine.made_on(place, func, args, kwargs)
        if func is _TENSOR and not from_tensor and place is not CPU:
            nbytes = out.numel() * out.element_size()
            machine.transfer(nbytes, CPU, place, machine.thread.cause)
    if pinned:
        machine.mark_pinned(out)
    return out


def _copied_there(
    machine: VirtualMachine, place: torch.device, func: Any, x: Tensor, kwargs: dict
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
        machine.remember(out.requires_grad_())
    return out


def _factories(machine: VirtualMachine, patches: Patches) -> None:
    """These ask the CUDA driver before any mode of ours sees them.

    PyTorch's own Python calls them where our function mode is off for a moment.
    """

    def through(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return machine.call(original, args, kwargs)

        return call

    for original in _FROM_DATA:
        patches.set(torch, **{original.__name__: through(original)})

    def parse_to(device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if type(device) is int:  # builds without CUDA know no device of that name
            device = named_device(device)
        return PARSE_TO(*(() if device is None else (device,)), *args, **kwargs)

    patches.set(torch._C._nn, _parse_to=parse_to)


# --- torch.Tensor ---------------------------------------------------------------------


def _tensor_methods(machine: VirtualMachine, patches: Patches) -> None:
    where = machine.device_of

    def direct(name: str) -> Callable:
        """PyTorch's own method, past our function mode: we are what it would call."""
        original = getattr(Base, name)

        @functools.wraps(original)
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with machine.thread.called_with((x, *args)), truth():
                return original(x, *args, **kwargs)

        return call

    plain_to, plain_copy_ = direct("to"), direct("copy_")
    plain_setitem, plain_tolist = direct("__setitem__"), direct("tolist")
    plain_type = direct("type")

    uninitialized = torch.nn.parameter.UninitializedTensorMixin

    def as_kind_of(x: Tensor, out: Tensor) -> Tensor:
        """A subclass of Tensor stays what it is."""
        if type(x) is Tensor or isinstance(x, (torch.nn.Parameter, uninitialized)):
            return out
        out = out.as_subclass(type(x))
        vars(out).update(vars(x))
        return out

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
        place = machine.resolve(device)
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
        return as_kind_of(x, machine.moved(x, place, waits=blocking))

    def cuda(x, device=None, non_blocking=False, memory_format=torch.preserve_format):
        __tracebackhide__ = True
        place = machine.resolve("cuda" if device is None else device)
        if place is CPU or place is None:
            raise RuntimeError(
                f"Invalid device, must be cuda device"  # noqa: F541 - PyTorch's words
            )
        return to(x, place, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(x, memory_format=torch.preserve_format):
        return to(x, CPU, memory_format=memory_format)

    def type_(x, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            return errors.type_name(x.dtype, where(x).type)
        if ".cuda." in str(dtype):
            raise RuntimeError(errors.not_here(f"the type {dtype}", errors.OLD_TYPES))
        return plain_type(x, dtype, non_blocking)

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
            with machine.thread.having(cause="item"):
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
            return machine.moved(value, where(x), "copy_")
        return value

    def copy_(x, source, non_blocking=False):
        return plain_copy_(x, with_source_here(x, source), non_blocking)

    def index_here(x: Tensor, index: Any) -> Any:
        """An index from the CPU is copied to the GPU, as C++ does it for CUDA."""
        if isinstance(index, tuple):
            return tuple(index_here(x, part) for part in index)
        if isinstance(index, Tensor) and index.dim() and where(index) is CPU:
            return machine.moved(index, where(x), "index")
        return index

    def __setitem__(x, index, value):
        if where(x).type == "cuda":
            index = index_here(x, index)
        plain_setitem(x, index, with_source_here(x, value))

    def no_array_interface(x: Tensor) -> Any:
        # An AttributeError, so that hasattr() says no, as for CPU tensors.
        raise AttributeError(errors.unseen("__cuda_array_interface__"))

    dlpack = copy_of(Tensor.__dlpack__)
    patches.set(
        Tensor,
        device=property(lambda x: where(x)),
        is_cuda=property(lambda x: where(x).type == "cuda"),
        is_cpu=property(lambda x: where(x).type == "cpu"),
        get_device=lambda x: where(x).index if where(x).index is not None else -1,
        to=to,
        cuda=cuda,
        cpu=cpu,
        type=type_,
        type_as=lambda x, other: to(x, other),
        numpy=on_host_only(Tensor.numpy),
        __array__=on_host_only(copy_of(Tensor.__array__)),
        __dlpack__=no_dlpack,
        tolist=tolist,
        copy_=copy_,
        __setitem__=__setitem__,
        __cuda_array_interface__=property(no_array_interface),
        pin_memory=lambda x, *_, **__: machine.pin(x),
        is_pinned=lambda x, *_, **__: machine.is_pinned(x),
        record_stream=lambda x, stream: None,
    )

    show = copy_of(torch._tensor_str._str)

    def waiting_str(x: Tensor, **kwargs: Any) -> str:
        """Its many small ops and copies are left out. What counts is the wait."""
        place = where(x)
        if place.type == "cuda":
            machine.synchronize(place)
        with machine.thread.having(quiet=True):
            return show(x, **kwargs)

    patches.set(torch._tensor_str, _str=waiting_str)

    # A storage is where its tensors are: copy.deepcopy and torch.load ask storages.
    Storage = torch.UntypedStorage
    storage_device = Storage.device

    def owner(storage: torch.UntypedStorage) -> torch.device:
        owned = machine.owned.get(storage._cdata)
        return storage_device.__get__(storage) if owned is None else owned.device

    def clone(storage):
        place = owner(storage)
        if place.type != "cuda":
            return storage_clone(storage)
        return machine.storage_on(Storage(storage.nbytes()).copy_(storage), place)

    def storage_cuda(storage, device=None, non_blocking=False):
        place = machine.resolve("cuda" if device is None else device)
        if owner(storage) == place:
            return storage
        return machine.storage_on(Storage(storage.nbytes()).copy_(storage), place)

    def resize_(storage, nbytes):
        """FSDP frees and fills its parameters with this."""
        return machine.resize(storage, lambda: storage_resize_(storage, nbytes), nbytes)

    def new(cls, *args, device=None, **kwargs):
        place = None if device is None else machine.resolve(device)
        if place is None or place is CPU:
            return storage_new(cls, *args, device=device, **kwargs)
        storage = storage_new(cls, *args, **kwargs)
        machine.adopt(torch.empty(0, dtype=torch.uint8).set_(storage), place, OTHER)
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
