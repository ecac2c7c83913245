"""Data parallelism in one process, from four primitives, as `nn.DataParallel` does it.

    scatter          cut the batch into pieces, one for each device
    replicate        copy the module to each device
    parallel_apply   run each copy on its piece, each in a thread
    gather           bring the outputs together on one device

`data_parallel` is these four. Names and arguments are those of `torch.nn.parallel`.
Every step is made of operations that autograd knows. The backward of a copy is a copy
back, and a parameter that was copied to four devices gets the sum of four gradients.

A device is a number (of a CUDA device; -1 is the CPU), a name or a `torch.device`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

Device = int | str | torch.device


def scatter(inputs: Any, target_gpus: Sequence[Device], dim: int = 0) -> Sequence[Any]:
    """Cut tensors along `dim`, one piece for each device; nested ones as well.

    Pieces have ceil(size / devices) rows, the last one the rest. So there may be
    fewer pieces than devices: 9 rows on 4 devices are 3 + 3 + 3. Where two tensors
    give different numbers of pieces, the surplus is dropped: PyTorch does so, too.

    Args:
        inputs: tensors, also in tuples, lists and dicts. Whatever else is in these
            goes to every device as it is.

    Cost: one message of about 1 / devices of the bytes to each other device.
    """
    devices = [_device(gpu) for gpu in target_gpus]
    if isinstance(inputs, Tensor):
        pieces = inputs.chunk(len(devices), dim)
        return tuple(p.to(device) for p, device in zip(pieces, devices, strict=False))
    if not isinstance(inputs, dict | list | tuple) or not inputs:
        return [inputs] * len(devices)
    values = inputs.values() if isinstance(inputs, dict) else inputs
    parts = zip(*(scatter(value, devices, dim) for value in values), strict=False)
    return [_like(inputs, part) for part in parts]


def replicate(
    network: nn.Module, devices: Sequence[Device], detach: bool = False
) -> list[nn.Module]:
    """Copy a module to each device. Gradients flow back to the one module.

    A replica has no parameters of its own: its `weight` is a copy that, for autograd,
    comes from the module's. On the module's own device it is no copy: it shares the
    memory. So what a forward writes into a buffer is kept there, and lost elsewhere.

    Args:
        detach: without gradients, as under `torch.no_grad()`.

    Cost: all parameters and buffers to each other device, at every call.
    """
    return [_replica(network, _device(device), detach) for device in devices]


def _replica(network: nn.Module, device: torch.device, detach: bool) -> nn.Module:
    # One copy of each: what is shared in the network stays shared in the replica. As
    # plain tensors: a Parameter would be a leaf with a `grad` of its own.
    tensors = [*network.parameters(), *network.buffers()]
    plain = {tensor: tensor.detach() for tensor in tensors}
    wanted = [t for t in tensors if t.requires_grad and not detach]
    if wanted:
        plain |= zip(wanted, _Together.apply(*wanted), strict=True)
    copies = {tensor: value.to(device) for tensor, value in plain.items()}
    # The method makes a module without parameters; nn.LSTM, for one, has its own.
    twins = {m: m._replicate_for_data_parallel() for m in network.modules()}
    for module, twin in twins.items():
        for name, child in module._modules.items():
            setattr(twin, name, twins.get(child))
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            setattr(twin, name, copies.get(tensor))
    return twins[network]


class _Together(torch.autograd.Function):
    """Tensors as they are. Where one gets a gradient, the others get one of zeros.

    So a parameter that no replica has used has zeros, as with `nn.DataParallel`.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Call each module on its input, each in a thread; return the outputs in order.

    Args:
        inputs: for each module an argument, or a tuple or list of arguments.
        kwargs_tup: for each module its keyword arguments.
        devices: for each module the CUDA device that is the current one meanwhile.

    Raises:
        ValueError: the four are not of one length.
        Exception: of the first module that failed, when all threads have ended.
    """
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    devices = [_device(device) for device in devices or [-1] * len(modules)]
    lengths = [len(each) for each in (modules, inputs, kwargs_tup, devices)]
    if len(set(lengths)) > 1:
        raise ValueError(
            "There must be as many modules as inputs, kwargs_tup and devices; "
            f"got {lengths}."
        )
    # Each thread has settings of its own, and a new one begins with the defaults.
    grad, amp = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda")
    outputs: list[Any] = [None] * len(modules)
    errors: dict[int, Exception] = {}

    def call(i: int) -> None:
        args = inputs[i] if isinstance(inputs[i], list | tuple) else (inputs[i],)
        on_gpu = devices[i].type == "cuda"
        try:
            with (
                torch.set_grad_enabled(grad),
                torch.cuda.device(devices[i]) if on_gpu else nullcontext(),
                torch.autocast("cuda", dtype) if amp else nullcontext(),
            ):
                outputs[i] = modules[i](*args, **kwargs_tup[i])
        except Exception as error:  # left in the thread, nobody would hear of it
            errors[i] = error

    threads = [Thread(target=call, args=(i,)) for i in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, error in sorted(errors.items()):
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"This was replica {i}, on {devices[i]}.")
        raise error
    return outputs


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Join the outputs along `dim` on one device; nested ones as well.

    Tensors without dimensions, such as a loss, are joined to a vector.

    Args:
        outputs: one of each device, all of one form: a tensor, None, or tuples, lists
            and dicts of them.

    Raises:
        TypeError, ValueError: there is something else in them, or they differ in form.

    Cost: one message from each other device.
    """
    first, device = outputs[0], _device(target_device)
    if isinstance(first, Tensor):
        tensors = [output.to(device) for output in outputs]
        numbers = dim == 0 and all(tensor.dim() == 0 for tensor in tensors)
        return torch.stack(tensors) if numbers else torch.cat(tensors, dim)
    if first is None:
        return None
    if not isinstance(first, dict | list | tuple):
        raise TypeError(
            f"A replica returned an object of type {type(first).__name__}: expected a "
            "tensor, None, or tuples, lists and dicts of them."
        )
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            raise ValueError(f"Not all replicas returned the keys {list(first)}.")
        outputs = [[output[key] for key in first] for output in outputs]
    groups = zip(*outputs, strict=True)
    return _like(first, [gather(group, device, dim) for group in groups])


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a module on a batch that is split over several devices.

    Args:
        module: all of it on the first device.
        inputs: its argument, or a tuple of arguments, on any device; None for none.
        device_ids: the devices; default: all CUDA devices.
        output_device: where the outputs are joined; default: the first device.

    Raises:
        ValueError: there is no device; or the tensors among the positional and those
            among the keyword arguments make different numbers of pieces.
        RuntimeError: a parameter or buffer is not on the first device.
        Exception: whatever the module raises.

    Cost: the module's bytes to each other device in every forward, its gradients back
    in every backward; besides, inputs, outputs and their gradients. All of it goes
    through the first device. Source: torch/nn/parallel/data_parallel.py.
    """
    ids = range(torch.cuda.device_count()) if device_ids is None else device_ids
    devices = [_device(device) for device in ids]
    if not devices:
        raise ValueError("device_ids is empty: give at least one device.")
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device != devices[0]:
            raise RuntimeError(
                f"The module must be on {devices[0]}, the first device, but a part of "
                f"it is on {tensor.device}. Call module.to({str(devices[0])!r}) first."
            )
    args = () if inputs is None else inputs
    args = args if isinstance(args, tuple) else (args,)
    if not args and not module_kwargs:
        devices = devices[:1]  # there is nothing to split
    keywords = module_kwargs or {}
    first, second = (scatter(each, devices, dim) for each in (args, keywords))
    if len(first) != len(second) and _has_tensors(args) and _has_tensors(keywords):
        raise ValueError(
            f"The positional arguments make {len(first)} pieces, the keyword arguments "
            f"{len(second)}. Give their tensors the same size along dimension {dim}."
        )
    pieces = list(zip(first, second, strict=False))
    if len(devices) == 1:
        return module(*pieces[0][0], **pieces[0][1])
    used = devices[: len(pieces)]  # a small batch does not reach all of them
    replicas = replicate(module, used, detach=not torch.is_grad_enabled())
    outputs = parallel_apply(replicas, *zip(*pieces, strict=True), used)
    return gather(outputs, devices[0] if output_device is None else output_device, dim)


def _device(name: Device) -> torch.device:
    if isinstance(name, int):
        return torch.device("cpu") if name == -1 else torch.device("cuda", name)
    device = torch.device(name)
    if device == torch.device("cuda"):  # the GPU that is current, as tensors take it
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        values = value.values() if isinstance(value, dict) else value
        return any(map(_has_tensors, values))
    return isinstance(value, Tensor)


def _like(form: Any, values: Any) -> Any:
    """The values in a list, tuple, named tuple or dict of the same form."""
    if isinstance(form, dict):
        return type(form)(zip(form, values, strict=True))
    return type(form)(*values) if hasattr(form, "_fields") else type(form)(values)
