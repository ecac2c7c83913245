"""Distributed SGD by hand: n ranks that train like one process with the whole batch.

    start alike              broadcast_parameters
    share the data           DataPartitioner, rank_batches
    average the gradients    average_gradients, between backward() and step()
    count over all ranks     sum_over_ranks, evaluate
    a larger batch           linear_scaled_lr, warmup_lr

A whole training with them: course_utils/workers/train_sgd.py.

Why the average? The loss of a batch is the mean over its rows, so its gradient is the
mean of the rows' gradients. Cut the batch into n shares of one size: the mean over all
rows is then the mean of the shares' means. So each rank computes the gradient of its
share, the ranks average, and all hold the gradient of the whole batch. From the same
start the same step follows on every rank, and the models never part.

It needs a mean (or a sum) over rows that do not look at each other. BatchNorm looks at
all rows of a share, and dropout draws other numbers: with these n ranks still train,
but not exactly as one process does. Shares of different size need weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import fsum, isclose
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .refusals import gradients_of, refuse_unlike_models
from .tensors import in_memory, refuse_unsendable, write


# --------------------------------------------------------------------- share the data
class Partition:
    """Some items of a data set, as a data set: `partition[i]` is `data[indices[i]]`.

    Args:
        data: anything with `len` and `[]`, such as a `Dataset`, a list or a tensor.
        indices: the items of `data` that belong to it, in order.
    """

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> Any:
        return self.data[self.indices[i]]


class DataPartitioner:
    """A data set, shuffled and cut into parts: every item is in exactly one of them.

    All ranks make it with the same arguments, and each uses its own part. The order
    comes from `seed` alone, so all ranks cut alike without a message, and the global
    random numbers stay as they are.

    >>> parts = DataPartitioner(range(10), [1 / 3] * 3, seed=0)
    >>> [len(parts.use(rank)) for rank in range(3)]
    [4, 3, 3]

    Args:
        data: anything with `len` and `[]`.
        sizes: for each part its share of the items: fractions that sum to 1. Where
            they do not come out even, the parts that lose most by rounding down get
            one item more; among equals, the first.

    Raises:
        ValueError: the sizes do not use every item exactly once.

    Source: after "Writing Distributed Applications with PyTorch", whose version
    rounds all parts down and loses the items that are left.
    """

    def __init__(self, data: Any, sizes: Sequence[float], seed: int = 1234) -> None:
        order = iter(_shuffled(len(data), seed).tolist())
        self.data = data
        self.partitions = [list(islice(order, n)) for n in _counts(sizes, len(data))]

    def use(self, rank: int) -> Partition:
        """The part of this rank. Raises IndexError if there is none."""
        if not 0 <= rank < len(self.partitions):
            raise IndexError(
                f"There are {len(self.partitions)} parts, one for each rank from 0 on; "
                f"there is none for rank {rank}."
            )
        return Partition(self.data, self.partitions[rank])


def _counts(sizes: Sequence[float], total: int) -> list[int]:
    """The number of items of each part."""
    if len(sizes) == 0 or min(sizes) < 0:
        raise ValueError(f"sizes must be one or more numbers from 0 on, not {sizes}.")
    if not isclose(fsum(sizes), 1):
        raise ValueError(
            f"The fractions {list(sizes)} sum to {fsum(sizes):g}, not to 1: items "
            "would be lost or used twice."
        )
    counts = [int(size * total) for size in sizes]
    lost = [size * total - count for size, count in zip(sizes, counts, strict=True)]
    by_loss = sorted(range(len(sizes)), key=lambda part: -lost[part])
    for part in by_loss[: total - sum(counts)]:
        counts[part] += 1
    return counts


def rank_batch_size(batch_size: int, world_size: int, rank: int) -> int:
    """How many rows of a batch this rank works on: always an integer.

    Where the division leaves rows over, the first ranks take one more each. So the
    ranks together have exactly `batch_size` rows.

    >>> [rank_batch_size(128, 3, rank) for rank in range(3)]
    [43, 43, 42]

    Raises:
        ValueError: `rank` is not one of the ranks, or a rank would have no row.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"There is no rank {rank} among {world_size}: they are numbered from 0 on."
        )
    if not isinstance(batch_size, int) or batch_size < world_size:
        raise ValueError(
            f"A batch of {batch_size} rows cannot be shared by {world_size} ranks: "
            f"expected an integer from {world_size} on, one row or more for each."
        )
    return batch_size // world_size + (rank < batch_size % world_size)


def rank_batches(
    n: int,
    batch_size: int,
    world_size: int,
    rank: int,
    *,
    seed: int = 0,
    epoch: int = 0,
) -> Iterator[Tensor]:
    """This rank's rows of each batch of an epoch, as index tensors.

    The k-th batches of all ranks together are the k-th batch of one process, whatever
    `world_size` is. All `n` rows are used once. Every rank gets the same number of
    batches, or some would wait for ever in an all-reduce that the others never call;
    so its share of a small last batch can be empty.

    Where `world_size` divides `batch_size`, these are the batches that a DataLoader
    with a `DistributedSampler` gives, except the last one, which that pads.

    Args:
        batch_size: rows of all ranks together; see `rank_batch_size` for one rank's.

    Raises:
        ValueError: `rank` is not one of the ranks, or a rank would have no row.
    """
    rank_batch_size(batch_size, world_size, rank)  # raises what is said above
    for batch in _shuffled(n, seed + epoch).split(batch_size):
        yield batch[rank::world_size]


def _shuffled(n: int, seed: int) -> Tensor:
    """0 to n-1 in an order that follows from `seed` alone; no other draw changes."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------ start alike
@torch.no_grad()
def broadcast_parameters(model: nn.Module, src: int = 0) -> None:
    """Make all models equal to the one of rank `src`: parameters and buffers.

    Every rank calls it, with models of the same shapes, once before the training. The
    same seed on every rank does it as well, until a rank draws one number more.

    Raises:
        ValueError: the ranks' models differ in more than their values.

    Cost: one broadcast for each parameter and buffer. Before it an all-gather of names
    and shapes, for each model once.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in named.items():
        refuse_unsendable(tensor, name, written=True)
    refuse_unlike_models(model, "model", named)
    for tensor in named.values():
        # Ranks exchange memory, so its order must be the same on all of them.
        values = in_memory(tensor)  # the tensor itself, if it is so already
        dist.broadcast(values, src)
        write(tensor, values)


# -------------------------------------------------------------- average the gradients
@torch.no_grad()
def average_gradients_naive(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks: one all-reduce a parameter.

    Every rank calls it, after `backward()` and before `step()`. A rank that has no
    gradient for a parameter takes part with zeros: if it stayed away, the others would
    wait for it, or get its next tensor in its place. So a parameter that no rank has
    used gets zeros, where one process leaves None. Momentum and weight decay move it
    then.

    Raises:
        TypeError: a gradient is sparse.
        ValueError: the ranks train other parameters, or gradients share memory.

    Cost: one all-reduce of its bytes for each parameter that requires a gradient.
    Before the first one an all-gather of names and shapes, for each model once.
    """
    for parameter in _trained(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean = in_memory(parameter.grad) / dist.get_world_size()
        dist.all_reduce(mean)
        parameter.grad.copy_(mean)


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks: one all-reduce in all.

    Every rank calls it, after `backward()` and before `step()`. The gradients are laid
    behind each other in one flat tensor. Behind them comes one number for each: above 0
    if this rank has that gradient. After the sum it is above 0 if any rank has it.

    A rank without a gradient counts as zeros, so it gets the others' share; a parameter
    that no rank has used keeps None, as in one process, and the optimizer leaves it
    alone. Frozen parameters are not sent. Tied ones are one parameter: sent once.

    Raises:
        TypeError: a gradient is sparse.
        ValueError: the ranks train other parameters, or gradients share memory.

    Cost: one all-reduce for each dtype and device among the parameters, of the bytes of
    the gradients and one number for each. Before the first one an all-gather of names
    and shapes, for each model once. Memory: a copy of the gradients.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in _trained(model):
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for (dtype, device), parameters in groups.items():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        has_grad = [float(p.grad is not None) for p in parameters]
        grads.append(torch.tensor(has_grad, dtype=dtype, device=device))
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        # Before the sum, as DDP does: n float16 gradients might overflow in it.
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        *means, used = flat.split([grad.numel() for grad in grads])
        for parameter, mean, is_used in zip(
            parameters, means, (used != 0).tolist(), strict=True
        ):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(mean.view_as(parameter))


@torch.no_grad()
def average_gradients_weighted(
    model: nn.Module,
    rows: int,
    average: Callable[[nn.Module], None] = average_gradients,
) -> None:
    """The mean over all rows of all ranks, where ranks have different numbers of rows.

    Every rank calls it, after `backward()` of the *mean* loss of its rows. A gradient
    counts rows times; so a rank with no rows takes part, and has no backward to run.
    With the same number everywhere it is `average_gradients`.

    Args:
        rows: how many rows this rank's loss is the mean of; 0 is fine.
        average: what does the rest: `average_gradients` or `average_gradients_naive`.

    Raises:
        ValueError: rows is negative, or no rank has a row; and as in `average`.
        TypeError: a gradient is sparse.

    Cost: that of `average`, and an all-reduce of one number (8 bytes).
    """
    if rows < 0:
        raise ValueError(f"rows must be 0 or more, not {rows}.")
    parameters = _trained(model)
    device = parameters[0].device if parameters else "cpu"
    (all_rows,) = sum_over_ranks(rows, device=device)
    if all_rows == 0:
        raise ValueError("No rank has a row: there is nothing to average.")
    for parameter in parameters:
        if rows == 0:
            parameter.grad = None  # it counts for nothing, even if it is nan
        elif parameter.grad is not None:
            parameter.grad *= rows * dist.get_world_size() / all_rows
    average(model)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient, each once, in the model's order."""
    gradients_of(model)  # refuses sparse ones
    refuse_unlike_models(model, "parameters", dict(model.named_parameters()))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# --------------------------------------------------------------- count over all ranks
def sum_over_ranks(*numbers: float, device: torch.device | str = "cpu") -> list[float]:
    """Each number summed over all ranks, in float64. Every rank calls it.

    For a mean, sum what is above and what is below the line, then divide. The mean of
    the ranks' means is wrong as soon as one rank has counted more rows than another.

    Args:
        device: where the message is made: nccl needs the rank's GPU, gloo "cpu".

    Cost: one all-reduce of 8 bytes for each number.
    """
    totals = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """Mean loss and accuracy over the rows of all ranks.

    Every rank calls it, with its own share of the data. The shares may differ in size,
    and one may be empty: nothing is sent before the end. Do not pad them, as
    `DistributedSampler` does by default: the repeated rows would count twice.

    Args:
        batches: pairs of inputs and classes (int64 [rows]), such as a DataLoader.

    Raises:
        ValueError: no rank has a row.

    Cost: one all-reduce of 24 bytes.
    """
    device = next(model.parameters(), torch.empty(0)).device
    loss_sum, correct, rows = 0.0, 0, 0
    with _evaluating(model):
        for inputs, labels in batches:
            labels = labels.to(device)
            logits = model(inputs.to(device))
            loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(dim=1) == labels).sum().item()
            rows += len(labels)
    loss_sum, correct, rows = sum_over_ranks(loss_sum, correct, rows, device=device)
    if rows == 0:
        raise ValueError("No rank has a row: there is nothing to evaluate.")
    return loss_sum / rows, correct / rows


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards each module is in the mode that it was in before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, was_training in modes:  # such as a frozen BatchNorm
            module.training = was_training


# --------------------------------------------------------------------- a larger batch
def linear_scaled_lr(base_lr: float, batch_size: int, base_batch_size: int) -> float:
    """The learning rate for another batch size, by the linear scaling rule.

    "When the minibatch size is multiplied by k, multiply the learning rate by k." One
    step with k times the rows then goes about as far as k steps did, as long as the
    gradient hardly changes on the way. It is a rule of thumb: early in the training it
    does not hold (hence `warmup_lr`), nor for very large batches.

    >>> linear_scaled_lr(0.1, batch_size=8192, base_batch_size=256)
    3.2

    Args:
        base_lr: the rate that is good for batches of `base_batch_size` rows, counted
            over all ranks, as is `batch_size`.

    Raises:
        ValueError: a batch size is not above 0.

    Source: Goyal et al. 2017, arXiv 1706.02677, section 2.1.
    """
    if batch_size <= 0 or base_batch_size <= 0:
        raise ValueError(
            f"Batch sizes must be above 0; got {batch_size} and {base_batch_size}."
        )
    return base_lr * batch_size / base_batch_size


def warmup_lr(step: int, warmup_steps: int, base_lr: float, lr: float) -> float:
    """The learning rate of a step in a gradual warm-up: from `base_lr` up to `lr`.

    It starts with the small rate, grows by the same amount at each step, and is `lr`
    from step `warmup_steps` on. (The paper takes the steps of 5 epochs.)

    >>> [warmup_lr(step, 4, base_lr=0.1, lr=0.5) for step in (0, 1, 4, 100)]
    [0.1, 0.2, 0.5, 0.5]

    Args:
        step: the number of steps taken so far, 0 for the first one.

    `torch.optim.SGD` multiplies the velocity by the rate when it steps, so the paper's
    momentum correction (section 3) is not needed.

    Source: Goyal et al. 2017, arXiv 1706.02677, section 2.2.
    """
    if step >= warmup_steps:
        return lr
    return base_lr + (lr - base_lr) * step / warmup_steps
