"""`torch.save`, `torch.load` and tensors for other processes."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

from course_utils.virtual_gpus import errors
from course_utils.virtual_gpus.parts import Tensor
from course_utils.virtual_gpus.patches import Patches

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Let files remember devices, and keep tensors in this process."""

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
