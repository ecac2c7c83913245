"""DistributedDataParallel, built in four rungs. Each trains like one process would.

    1  broadcast_module     all ranks start from the parameters and buffers of rank 0
    2  average_gradients    after backward(): one all-reduce after the other
    3  HookedDDP            during backward(): each gradient as soon as it is there
    4  DDP                  the same in buckets, for any model

    model = DDP(model)
    for inputs, labels in batches_of_this_rank:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

Every rank makes the same calls, with the same model and batches of the same size. A
gradient is divided by n before the sum, as in torch's DistributedDataParallel.

Cost of a step for gradients of S bytes: an all-reduce of S, in one call for each
parameter (rungs 2 and 3) or for each bucket (rung 4).

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 13 (2020), arXiv 2006.15704; torch/nn/parallel/distributed.py.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from .refusals import (
    NotCopied,
    gradients_of,
    refuse_sparse_gradients,
    refuse_unlike,
    refuse_unlike_models,
)
from .tensors import refuse_unsendable

MiB = 1 << 20


# ---------------------------------------------------------------------------- rung 1
def broadcast_module(module: nn.Module, src: int = 0) -> None:
    """Give all ranks the parameters *and the buffers* of rank `src`. Every rank calls.

    Without it each rank trains a model of its own: averaged gradients do not help.

    Raises:
        ValueError: the ranks' models differ in more than their values.

    Cost: one broadcast for each dtype, of all its bytes. Before it an all-gather of
    names and shapes, of each module once.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    refuse_unlike_models(module, "model", named, strides=True)
    _broadcast(named, src)


@torch.no_grad()
def _broadcast(named: Mapping[str, Tensor], src: int = 0) -> None:
    """Overwrite the tensors with those of rank `src`, all of a dtype in one message."""
    for name, tensor in named.items():
        refuse_unsendable(tensor, name, written=True)
    for alike in _by_dtype(named.values()):
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, src)
        values = flat.split([tensor.numel() for tensor in alike])
        for tensor, value in zip(alike, values, strict=True):
            tensor.copy_(value.view_as(tensor))


# ---------------------------------------------------------------------------- rung 2
def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks. Every rank calls it.

    Call it between backward() and step(). Nothing else happens in the meantime: all
    computing is over, and the network has only just begun. A parameter must have a
    gradient on all ranks or on none: otherwise those of different ones would meet.

    Raises:
        ValueError: the ranks have gradients of different parameters or shapes.
        TypeError: a gradient is sparse.
    """
    grads = gradients_of(module)
    refuse_unlike_models(module, "gradients", grads, strides=True)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


# ---------------------------------------------------------------------------- rung 3
class HookedDDP(NotCopied, nn.Module):
    """Sends each gradient off as soon as it is ready, while backward() goes on.

    Call `wait()` between backward() and step(): until then a gradient may still be a
    sum in the making. Every parameter that requires a gradient must get one on every
    rank. A rank that has none leaves an all-reduce out: its next one meets that of
    another parameter, or the others wait for ever.

    Raises:
        ValueError: the ranks' models differ, or nothing in them is trained.
        TypeError: backward() comes to a sparse gradient; or this is to be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.sent: list[dist.Work] = []
        broadcast_module(module)
        refuse_sparse_gradients(module)
        for parameter in _trained(module):
            parameter.register_post_accumulate_grad_hook(self._send)

    def _send(self, parameter: nn.Parameter) -> None:
        # The hook gets the parameter, not the gradient: that is in .grad by now.
        parameter.grad /= dist.get_world_size()
        self.sent.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        """Wait until all gradients are averaged."""
        for request in self.sent:
            request.wait()
        self.sent.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        return self.module(*args, **kwargs)


# ---------------------------------------------------------------------------- rung 4
class DDP(NotCopied, nn.Module):
    """Averages gradients in buckets, during backward(). Afterwards all are averaged.

    The last layers' gradients are ready first, so buckets are filled from the last
    parameter to the first. A full bucket is all-reduced while backward() goes on; at
    its end the rest is sent, and all answers are awaited.

    A parameter that this rank has not used counts as zeros in the mean. One that no
    rank has used keeps the gradient that it has, mostly None. But the backward() of
    each rank must come to a parameter. If it does not, it sends nothing, and the others
    wait. Frozen parameters are not sent; tied ones are one parameter. Each dtype has
    buckets of its own.

    Args:
        module: the model, the same on every rank; overwritten with that of rank 0.
        bucket_bytes: a bucket that has reached them is closed. Smaller ones leave
            earlier, larger ones pay fewer latencies.
        first_bucket_bytes: the same for the first one, which should leave early.
        broadcast_buffers: whether the buffers of rank 0 (such as BatchNorm's means)
            replace those of the others before each forward that is to be synchronised.

    Raises:
        ValueError: the ranks' models or arguments differ, or nothing is trained.
        TypeError: backward() comes to a sparse gradient; or this is to be copied. Copy
            or save the module inside.

    Cost of a step: one all-reduce for each bucket, of its gradients and one number for
    each; one broadcast of the buffers. Memory: a copy of the gradients. The buckets
    keep it, and each `.grad` is a part of it afterwards, as with torch's
    `gradient_as_bucket_view=True`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int = 1 * MiB,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers and bool(list(module.buffers()))
        self._sync = True
        settings = {
            "bucket_bytes": str(bucket_bytes),
            "first_bucket_bytes": str(first_bucket_bytes),
            "broadcast_buffers": str(broadcast_buffers),
        }
        refuse_unlike(settings)  # or buckets of different parameters would meet
        broadcast_module(module)
        refuse_sparse_gradients(module)
        self.buckets = [
            _Bucket(members)
            for alike in _by_dtype(reversed(_trained(module)))
            for members in _cut(alike, bucket_bytes, first_bucket_bytes)
        ]
        self._begin()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = self._hook_of(bucket)
                parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module. In a forward without gradients nothing is sent."""
        if self._sync and torch.is_grad_enabled():
            self._begin()
            if self.broadcast_buffers:
                self._broadcast_buffers()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank, for the next backward() outside to send.

        Forward and backward both belong inside: torch's DDP goes by the forward, this
        one by the backward(). The gradients of k batches add up: divide each loss by k
        for their mean.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _broadcast_buffers(self) -> None:
        named = dict(self.module.named_buffers())
        refuse_unlike_models(self.module, "buffers", named)
        # A backward() may still need what an earlier forward saw. Autograd does not
        # notice what is written to `data`. So, as with torch's DDP, a model with
        # BatchNorm can be called twice before one backward().
        _broadcast({name: buffer.data for name, buffer in named.items()})

    def _begin(self) -> None:
        self._next, self._in_backward = 0, False
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _hook_of(self, bucket: "_Bucket") -> Any:
        def hook(parameter: nn.Parameter) -> None:
            bucket.used.add(parameter)
            if not self._sync:
                return
            if not self._in_backward:
                self._in_backward = True
                Variable._execution_engine.queue_callback(self._finish)
            bucket.missing -= 1
            if bucket.missing == 0:
                self._send_full()

        return hook

    def _send_full(self) -> None:
        # All ranks must send in one order: a full bucket waits for those before it.
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send_next()

    def _send_next(self) -> None:
        self.buckets[self._next].send()
        self._next += 1

    def _finish(self) -> None:
        """At the end of backward()."""
        while self._next < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            bucket.receive()
        self._begin()


class _Bucket:
    """Parameters of one dtype whose gradients travel together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.used: set[nn.Parameter] = set()
        # The gradients come one after another, and then a 1 for each parameter that
        # was used. The memory stays: to get it anew in each step would cost more.
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].detach().new_empty(sum(sizes) + len(sizes))
        *parts, used_by = self.flat.split([*sizes, len(sizes)])
        self.used_by = used_by.real  # itself, unless the parameters are complex
        self.means = [_like(p, part) for p, part in zip(parameters, parts, strict=True)]

    @torch.no_grad()
    def send(self) -> None:
        """Divide the gradients by n, and send them off."""
        n = dist.get_world_size()
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            if parameter.grad is None:
                mean.zero_()
            else:
                torch.div(parameter.grad, n, out=mean)
        used = [float(parameter in self.used) for parameter in self.parameters]
        self.used_by.copy_(torch.tensor(used))
        self.work = dist.all_reduce(self.flat, async_op=True)

    def receive(self) -> None:
        """Wait: the means are the gradients now, and need not be copied back."""
        self.work.wait()
        used_by = self.used_by.tolist()
        for parameter, mean, users in zip(
            self.parameters, self.means, used_by, strict=True
        ):
            if users > 0:
                parameter.grad = mean
        self.used.clear()


# ------------------------------------------------------------------------ what it takes
def _trained(module: nn.Module) -> list[nn.Parameter]:
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            f"no parameter of this {type(module).__name__} requires a gradient: there "
            "is nothing to average. Use it as it is, without DDP"
        )
    return trained


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """Part of a flat tensor, in the shape of a parameter and as that lies in memory."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _cut(
    parameters: list[nn.Parameter], bucket_bytes: int, first_bucket_bytes: int
) -> Iterator[list[nn.Parameter]]:
    members, held, limit = [], 0, first_bucket_bytes
    for parameter in parameters:
        members.append(parameter)
        held += parameter.numel() * parameter.element_size()
        if held >= limit:
            yield members
            members, held, limit = [], 0, bucket_bytes
    if members:
        yield members
