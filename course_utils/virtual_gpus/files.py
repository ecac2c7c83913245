"""`torch.save`, `torch.load` and tensors for other processes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

from course_utils.virtual_gpus import errors
from course_utils.virtual_gpus.parts import CPU, Tensor
from course_utils.virtual_gpus.patches import Patches, copy_of

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import Machine


def install(machine: Machine, patches: Patches) -> None:
    """Let files remember devices, and keep tensors in this process."""
    _files_and_processes(machine, patches)
    _torchscript_files(machine, patches)


def _files_and_processes(machine: Machine, patches: Patches) -> None:
    def tag(storage: Any) -> str | None:
        owned = machine.owned.get(getattr(storage, "_untyped_storage", storage)._cdata)
        return None if owned is None else str(owned.device)

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        device = torch.device(location)
        index = machine.thread.current if device.index is None else device.index
        if index >= machine.n:
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but "
                f"torch.cuda.device_count() is {machine.n}. Please use torch.load with "
                "map_location to map your storages to an existing device."
            )
        return machine.storage_on(storage, machine.devices[index])

    registry = [(0, tag, restore), *torch.serialization._package_registry]
    patches.set(torch.serialization, _package_registry=registry)

    def guarded(reduce: Callable) -> Callable:
        def call(x: Tensor) -> Any:
            if machine.device_of(x).type == "cuda":
                raise RuntimeError(
                    errors.not_here(
                        f"sharing a tensor on {x.device} with another process",
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


def _torchscript_files(machine: Machine, patches: Patches) -> None:
    """C++ writes into a file of TorchScript where it sees a tensor: on the CPU.

    So a file has the devices of parameters and buffers beside it, by name.
    """

    def tensors_of(module: Any) -> dict[str, Tensor]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def with_devices(save: Callable) -> Callable:
        @functools.wraps(save)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = {n: str(machine.device_of(x)) for n, x in tensors_of(self).items()}
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
            device = machine.resolve(place) if map_location is None else CPU
            if device is not CPU:
                machine.storage_on(tensors_of(module)[name].untyped_storage(), device)
        return module

    patches.set(torch.jit, load=load_there)
