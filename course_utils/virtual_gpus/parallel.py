"""`nn.DataParallel`, and `DistributedDataParallel` over gloo."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.parallel

from course_utils.virtual_gpus import refusals
from course_utils.virtual_gpus.parts import CPU, Tensor
from course_utils.virtual_gpus.patches import Patches, copy_of

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import Machine


BUCKET = 10 * 2**20  # bytes that DataParallel sends at once (torch.nn.parallel.comm)


def install(machine: Machine, patches: Patches) -> None:
    """Replace the C++ below `nn.DataParallel` and around gloo."""
    _data_parallel(machine, patches)
    _distributed(machine, patches)


def _data_parallel(machine: Machine, patches: Patches) -> None:
    """The C++ below torch.nn.parallel.comm; all its Python stays as it is."""
    utils = torch._utils

    def device(i: Any) -> torch.device:
        return CPU if i == -1 else machine.devices[machine.index(i)]

    def broadcast(x: Tensor, devices: list[int]) -> list[Tensor]:
        with torch.no_grad():
            return [machine.moved(x, device(i), "broadcast") for i in devices]

    def broadcast_out(x: Tensor, out: list[Tensor]) -> list[Tensor]:
        with torch.no_grad(), machine.because("broadcast"):
            return [o.copy_(x) for o in out]

    def broadcast_coalesced(
        tensors: list[Tensor], devices: list[int], buffer_size: int = BUCKET
    ) -> list[list[Tensor]]:
        for x in tensors:
            if machine.device_of(x) != device(devices[0]):
                raise RuntimeError(f"all tensors must be on devices[0]: {devices[0]}")
        others = [device(i) for i in devices[1:]]
        found: list[dict[int, Tensor]] = [{} for _ in others]
        with torch.no_grad(), machine.because("broadcast"):
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

    def scatter_out(
        x: Tensor, out: list[Tensor], dim: int = 0, streams: Any = None
    ) -> list[Tensor]:
        chunks = x.split([o.size(dim) for o in out], dim)
        with torch.no_grad(), machine.because("scatter"):
            for o, chunk in zip(out, chunks, strict=True):
                o.copy_(chunk)
        return list(out)

    def gather(tensors: list[Tensor], dim: int = 0, destination: Any = None) -> Tensor:
        place = device(machine.thread.current if destination is None else destination)
        size = list(tensors[0].shape)
        size[dim] = sum(x.size(dim) for x in tensors)
        out = torch.empty(size, dtype=tensors[0].dtype, device=place)
        return gather_out(tensors, out, dim)

    def gather_out(tensors: list[Tensor], out: Tensor, dim: int = 0) -> Tensor:
        with torch.no_grad(), machine.because("gather"):
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
            with machine.because(cause):
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


def _distributed(machine: Machine, patches: Patches) -> None:
    """The C++ of torch.distributed groups tensors by device, and sees only the CPU."""
    if not torch.distributed.is_available():
        return
    dist, reducer = torch.distributed, torch.distributed.Reducer
    _backends(patches)
    parallel = torch.nn.parallel.DistributedDataParallel

    def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
        groups: dict[torch.device, list[int]] = {}
        for i, x in enumerate(tensors):
            groups.setdefault(machine.device_of(x), []).append(i)
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
            machine.thread.last = machine.thread.last or devices[0]
            with machine.counting("backward"), machine.called_with(None):
                yield
            return
        place = devices[0] if devices[0].type == "cuda" else None
        before, machine.thread.force = machine.thread.force, place
        try:
            yield
        finally:
            machine.thread.force = before

    @functools.wraps(helper)
    def make(self: Any, parameters: list, *args: Any, **kwargs: Any) -> None:
        devices = list(dict.fromkeys(map(machine.device_of, parameters)))
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
