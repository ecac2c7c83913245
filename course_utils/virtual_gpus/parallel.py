"""`nn.DataParallel`, and `DistributedDataParallel` over gloo."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.parallel

from course_utils.virtual_gpus import errors, refusals
from course_utils.virtual_gpus.parts import CPU, Tensor
from course_utils.virtual_gpus.patches import Patches, copy_of

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine


BUCKET = 10 * 2**20  # bytes that DataParallel sends at once (torch.nn.parallel.comm)


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Replace the C++ below `nn.DataParallel` and around gloo."""
    _data_parallel(machine, patches)
    _distributed(machine, patches)


def _data_parallel(machine: VirtualMachine, patches: Patches) -> None:
    """The C++ below torch.nn.parallel.comm; all its Python stays as it is."""
    utils = torch._utils

    def device(i: Any) -> torch.device:
        return CPU if i == -1 else machine.devices[machine.index(i)]

    def broadcast(x: Tensor, devices: list[int]) -> list[Tensor]:
        with torch.no_grad():
            return [machine.moved(x, device(i), "broadcast") for i in devices]

    def broadcast_coalesced(
        tensors: list[Tensor], devices: list[int], buffer_size: int = BUCKET
    ) -> list[list[Tensor]]:
        for x in tensors:
            if machine.device_of(x) != device(devices[0]):
                raise RuntimeError(f"all tensors must be on devices[0]: {devices[0]}")
        others = [device(i) for i in devices[1:]]
        found: list[dict[int, Tensor]] = [{} for _ in others]
        with torch.no_grad(), machine.thread.having(cause="broadcast"):
            for chunk in utils._take_tensors(tensors, buffer_size):
                flats = machine.coalesced(chunk, others)
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
                machine.moved(chunk, device(i), "scatter", waits=False)
                for chunk, i in zip(chunks, devices, strict=False)
            ]

    def gather(tensors: list[Tensor], dim: int = 0, destination: Any = None) -> Tensor:
        place = device(machine.thread.current if destination is None else destination)
        size = list(tensors[0].shape)
        size[dim] = sum(x.size(dim) for x in tensors)
        out = torch.empty(size, dtype=tensors[0].dtype, device=place)
        with torch.no_grad(), machine.thread.having(cause="gather"):
            parts = out.split([x.size(dim) for x in tensors], dim)
            for part, x in zip(parts, tensors, strict=True):
                part.copy_(x, non_blocking=True)
        return out

    no_out = refusals.refusing("torch.cuda.comm with out=", "results are always new")
    patches.set(
        torch._C,
        _broadcast=broadcast,
        _broadcast_out=no_out,
        _broadcast_coalesced=broadcast_coalesced,
        _scatter=scatter,
        _scatter_out=no_out,
        _gather=gather,
        _gather_out=no_out,
    )

    def named(original: Callable, cause: str) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with machine.thread.having(cause=cause):
                return original(*args, **kwargs)

        return call

    broadcast_backward = copy_of(torch.nn.parallel._functions.Broadcast.backward)

    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """Zeros, for a replica that was not used, are on the replica's GPU."""
        for i, grad in enumerate(grads):
            machine.belongs_to(grad, device(ctx.target_gpus[i // ctx.num_inputs]))
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
    patches.callback(defaults.update, defaults.copy())
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
        refuse = refusals.refusing("the backend nccl", why)
        patches.set(nccl, __init__=refuse)


def _distributed(machine: VirtualMachine, patches: Patches) -> None:
    """DDP's C++ makes its buckets from nothing: they are where the module is."""
    if not torch.distributed.is_available():
        return
    _backends(patches)
    parallel = torch.nn.parallel.DistributedDataParallel
    reducer = torch.distributed.Reducer
    places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    start, helper = copy_of(parallel.__init__), copy_of(parallel._ddp_init_helper)
    rebuild = reducer._rebuild_buckets

    @functools.wraps(start)
    def of_one_device(
        self: Any, module: torch.nn.Module, *args: Any, **kw: Any
    ) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        if len(set(map(machine.device_of, tensors))) > 1:
            raise RuntimeError(
                errors.not_here(
                    "DistributedDataParallel of a module on several GPUs",
                    "its buckets are made in C++, for one",
                )
            )
        start(self, module, *args, **kw)

    @functools.wraps(helper)
    def make(self: Any, parameters: list, *args: Any, **kw: Any) -> None:
        place = machine.device_of(parameters[0])
        place = None if place is CPU else place
        with machine.thread.having(force=place):
            helper(self, parameters, *args, **kw)
        places[self.reducer] = place

    @functools.wraps(rebuild)
    def make_again(self: Any) -> bool:
        with machine.thread.having(force=places.get(self)):
            return rebuild(self)

    patches.set(parallel, __init__=of_one_device, _ddp_init_helper=make)
    patches.set(reducer, _rebuild_buckets=make_again)
