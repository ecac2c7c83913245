"""The errors of virtual GPUs: in PyTorch's own words where CUDA has such an error."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from course_utils.virtual_gpus.parts import CPU, tensors_in
from course_utils.virtual_gpus.records import size_in_words

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine
    from course_utils.virtual_gpus.parts import Op

FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
    "multiprocessing, you must use the 'spawn' start method"
)
OLD_TYPES = "old types of tensors have no device: use dtype= and device="
DENSE = "they hold only dense (strided) tensors"

# An op of the CPU -> the one that runs on CUDA in its place, and its arguments' names.
_ON_CUDA = {
    "convolution": ("cudnn_convolution", {"input": "self"}),
    "convolution_overrideable": ("cudnn_convolution", {"input": "self"}),
    "embedding": ("index_select", {"weight": "self", "indices": "index"}),
    "stack": ("cat", {}),
    "allclose": ("eq.Tensor", {}),  # what it begins with
    "native_batch_norm": ("cudnn_batch_norm", {}),
    "_native_batch_norm_legit": ("cudnn_batch_norm", {}),
    "_batch_norm_with_update": ("cudnn_batch_norm", {}),
    # Its inputs are on one device: see `check_attention`. With a mask it is this one.
    "_scaled_dot_product_flash_attention_for_cpu": (
        "_scaled_dot_product_efficient_attention",
        {"attn_mask": "attn_bias"},
    ),
}


def already_on(on: VirtualMachine, new: VirtualMachine) -> str:
    if on is new:
        return f"{on.n} virtual GPU(s) are on already. Call off() before on() again."
    return (
        f"{on.n} virtual GPU(s) are on already, and there can be only one such machine "
        "at a time. Leave its `with` block first."
    )


def other_version(tested: tuple[str, ...], missing: Exception) -> str:
    return (
        f"Virtual GPUs do not work with PyTorch {torch.__version__}: {missing}. They "
        f"were tested with PyTorch {tested[0]} to {tested[-1]}: install one of these."
    )


def refused_bytes(error: RuntimeError) -> int:
    """What the host could not allocate, in bytes; 0 if it says something else."""
    found = re.search(
        r"can't allocate memory: you tried to allocate (\d+) bytes", str(error)
    )
    return int(found[1]) if found else 0


def raise_as_on_cuda(error: RuntimeError) -> None:
    """Say it in the words of CUDA's kernel, where the CPU's has others.

    Raises:
        RuntimeError: it has others.
    """
    __tracebackhide__ = True
    text = str(error)
    in_cuda = text.replace(
        "expected m1 and m2 to have", "expected mat1 and mat2 to have"
    )
    if in_cuda != text:
        raise RuntimeError(in_cuda) from None


def invalid_ordinal(index: int, n: int) -> str:
    return (
        "CUDA error: invalid device ordinal\n"
        f"(cuda:{index} was asked for; there are {n} virtual GPU(s), cuda:0 to "
        f"cuda:{n - 1}.)"
    )


def out_of_memory(index: int, wanted: int, used: int, capacity: int) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {size_in_words(wanted)}. GPU {index} "
        f"has a total capacity of {size_in_words(capacity)} of which "
        f"{size_in_words(capacity - used)} is free. Of the allocated memory "
        f"{size_in_words(used)} is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated."
    )


def not_here(what: str, why: str) -> str:
    """How everything is refused that virtual GPUs do not have."""
    return (
        f"not on virtual GPUs: {what}, because {why}. Leave the virtual GPUs first "
        "(off()), or use a machine with real ones."
    )


def layout(kind: Any) -> str:
    what = kind if isinstance(kind, str) else f"a tensor of layout {kind}"
    return not_here(what, DENSE)


def no_kernel(name: str) -> str:
    return not_here(f"the operator aten::{name}", "the CPU has no kernel for it")


def unseen(name: str) -> str:
    return not_here(name, "other libraries see no virtual GPU")


def cannot_pin(x: torch.Tensor) -> str:
    kind = type_name(x.dtype, "cuda")
    return f"cannot pin '{kind}' only dense CPU tensors can be pinned"


def not_numpy(device: torch.device) -> str:
    return (
        f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy "
        "the tensor to host memory first."
    )


def two_devices(a: torch.device, b: torch.device) -> str:
    return (
        "Expected all tensors to be on the same device, but found at least two "
        f"devices, {a} and {b}!"
    )


_TYPE_NAMES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def type_name(dtype: torch.dtype, device_type: str) -> str:
    """`"torch.cuda.FloatTensor"`, what `tensor.type()` says."""
    place = "torch.cuda" if device_type == "cuda" else "torch"
    return f"{place}.{_TYPE_NAMES.get(dtype, str(dtype).removeprefix('torch.'))}Tensor"


@functools.cache
def _declarations() -> str:
    """PyTorch's own list of its ops, which is part of every installation."""
    import torchgen

    place = (
        Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    )
    try:
        return place.read_text("utf-8")
    except OSError:
        return ""


@functools.cache
def _declaration(name: str) -> str:
    """What stands in that list below the signature of an op; "" if it is not there."""
    found = re.search(
        rf"^- func: {re.escape(name)}\(.*\n((?:[ #].*\n|\n)*)", _declarations(), re.M
    )
    return found[1] if found else ""


def _kind(name: str) -> str:
    """How an op on CUDA checks its devices: "iterator", "structured" or "plain"."""
    declared = _declaration(name)
    if "device_check: NoCheck" in declared:
        return "iterator"
    return "structured" if "  structured" in declared else "plain"


def _checks_devices(name: str) -> bool:
    """Does CUDA's kernel for an op want all its tensors on one device?

    PyTorch makes that check for every such kernel (torchgen's `gen_device_check`), but
    for those that say `NoCheck`.
    """
    declared = _declaration(name)
    has_kernel = re.search(r"\bCUDA\b.*:|  structured_delegate:", declared)
    return has_kernel is not None and "device_check: NoCheck" not in declared


def takes_numbers(op: Op) -> bool:
    """May a CPU tensor without dimensions stand beside tensors on a GPU?

    For `gpu + cpu_number` it may, for `torch.stack([gpu_number, cpu_number])` not.
    """
    if op.numbers is None:
        name, _ = _ON_CUDA.get(op.name, (full_name(op), {}))
        op.numbers = op.custom or not _checks_devices(name)
    return op.numbers


def full_name(op: Op) -> str:
    """`"add.Tensor"`; without an overload's name where there is none."""
    overload = op.func._schema.overload_name
    return f"{op.name}.{overload}" if overload else op.name


def mismatch(
    machine: VirtualMachine, op: Op, args: tuple, kwargs: dict
) -> RuntimeError:
    """The error for tensors that are not all on one device."""
    named = [(name, x, machine.where(x)) for name, x in op.named(args, kwargs)]
    first = named[0][2]
    if any(n == "indices" and d not in (first, CPU) for n, _, d in named):
        if op.indexes:
            return RuntimeError(
                "indices should be either on cpu or on the same device as the indexed "
                f"tensor ({first})"
            )
    if op.name == "convolution" and len({d.type for _, _, d in named[:2]}) == 2:
        (_, x, on), (_, weight, weight_on) = named[:2]
        mkldnn = (
            " or input should be a MKLDNN tensor and weight is a dense tensor"
            if on.type == "cpu"
            else ""
        )
        return RuntimeError(
            f"Input type ({type_name(x.dtype, on.type)}) and weight type "
            f"({type_name(weight.dtype, weight_on.type)}) should be the same{mkldnn}"
        )
    full = full_name(op)
    name, renamed = _ON_CUDA.get(op.name, (op.name, {}))
    if name == "cudnn_batch_norm" and first.type == "cpu":
        name = "native_batch_norm"  # cuDNN is chosen by the input
    kind = _kind(full if name == op.name else name)
    checks = _checks_devices(full)
    if kind == "iterator" or torch.Tag.pointwise in op.func.tags and not checks:
        common = next((d for _, _, d in named if d.type != "cpu"), first)
        other = next(
            (
                d
                for n, x, d in named
                if d != common and (x.dim() or d.type != "cpu" or n in op.written)
            ),
            CPU,
        )
        return RuntimeError(two_devices(common, other))
    overload = op.func._schema.overload_name if name == op.name else ""
    if kind == "structured":
        method = f"wrapper_CUDA_{name}" + (f"_{overload}" if overload else "")
    else:
        method = f"wrapper_CUDA_{overload}_{name}"
    argument, _, device = next(
        (entry for entry in named if entry[2] != first), named[-1]
    )
    return RuntimeError(
        "Expected all tensors to be on the same device, but got "
        f"{renamed.get(argument, argument)} is on {device}, different from other "
        f"tensors on {first} (when checking argument in method {method})"
    )


def check_generator(generator: torch.Generator | None, place: torch.device) -> None:
    """What an op says of random numbers from elsewhere.

    Raises:
        RuntimeError: the generator is for another type of device.
    """
    if generator is not None and generator.device.type != place.type:
        raise RuntimeError(
            f"Expected a '{place.type}' device type for generator but found "
            f"'{generator.device.type}'"
        )


def check_gradient(machine: VirtualMachine, args: tuple) -> None:
    """What `tensor.grad = gradient` says of one from another device.

    Raises:
        RuntimeError: the gradient is not where the tensor is.
    """
    x, grad = args
    if not isinstance(grad, torch.Tensor) or machine.drifts(grad):
        return
    here, there = machine.device_of(x), machine.device_of(grad)
    if here == there or "cuda" not in (here.type, there.type):
        return
    if here.type != there.type:
        differs = (
            f"with device type '{there.type}' to a tensor with device type "
            f"'{here.type}'"
        )
    else:
        differs = (
            f"located on device with index '{there.index}' to a tensor located on "
            f"device with index '{here.index}'"
        )
    raise RuntimeError(
        f"attempting to assign a gradient {differs}. Please ensure that the gradient "
        "and the tensor are on the same device"
    )


def check_recurrent(machine: VirtualMachine, args: tuple) -> None:
    """What `nn.LSTM` and its like check before they begin.

    Raises:
        RuntimeError: the input is not where the hidden state or the weights are.
    """
    place = machine.device_of(args[0])
    packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))
    hidden, weights = (args[2], args[3]) if packed else (args[1], args[2])
    for name, values in (("hidden", hidden), ("parameter", weights)):
        for x in tensors_in((values,), []):
            if machine.device_of(x) != place:
                raise RuntimeError(
                    f"Input and {name} tensors are not at the same device, found input "
                    f"tensor at {place} and {name} tensor at {machine.device_of(x)}"
                )


def check_attention(machine: VirtualMachine, args: tuple) -> None:
    """What `scaled_dot_product_attention` checks before it chooses a kernel.

    Raises:
        RuntimeError: queries, keys and values are on several devices.
    """
    query, key, value = (machine.device_of(x) for x in args[:3])
    if not query == key == value:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {query} key.device: {key} and value.device: {value} "
            "instead."
        )


def check_lengths(machine: VirtualMachine, args: tuple) -> None:
    """What `pack_padded_sequence` says of lengths on a GPU.

    Raises:
        RuntimeError: the lengths are not on the CPU.
    """
    place = machine.device_of(args[1])
    if place.type != "cpu":
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{args[1].dim()}D {place} {_TYPE_NAMES[args[1].dtype]} tensor"
        )
