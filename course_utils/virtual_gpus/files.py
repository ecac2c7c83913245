"""`torch.save` and `torch.load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from course_utils.virtual_gpus.patches import Patches

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Let files remember devices."""

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
