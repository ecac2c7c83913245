"""Lesson 10: different right answers, and wrong ones that no near miss tells of."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.answers import Answers

ANSWERS = Answers()

# ---------------------------------------------------------------------- 10.one_f_one_b


@ANSWERS.wrong("10.one_f_one_b", "wrong", "as pairs such as")
def nothing(rank, ranks, micro_batches):
    return []


@ANSWERS.right("10.one_f_one_b")
def by_counting(rank, ranks, micro_batches):
    order, forwards, backwards = [], 0, 0
    while backwards < micro_batches:
        kept = forwards - backwards
        if forwards < micro_batches and kept < ranks - rank:
            order.append(("F", forwards))
            forwards += 1
        else:
            order.append(("B", backwards))
            backwards += 1
    return order


# ---------------------------------------------------------------------- 10.step_seconds

ANSWERS.wrong("10.step_seconds", "wrong", "The work is micro_batches")(
    lambda ranks, micro_batches, chunks, forward, backward: forward + backward
)


@ANSWERS.right("10.step_seconds")
def work_and_bubble(ranks, micro_batches, chunks, forward, backward):
    one = forward + backward
    ideal = micro_batches * one
    return ideal * (1 + (ranks - 1) / (micro_batches * chunks))


# ----------------------------------------------------------------------- 10.gpipe_step


@ANSWERS.wrong("10.gpipe_step", "wrong", "only one rank works at a time")
def one_at_a_time(stage, inputs, targets, micro_batches, rows):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    loss = 0.0
    for i in range(micro_batches):
        part = slice(i * rows, (i + 1) * rows)
        x, grad = torch.empty(rows, 4), None
        if rank:
            dist.recv(x, rank - 1)
        else:
            x = inputs[part]
        y = stage(x.requires_grad_())
        if rank < last:
            dist.send(y.detach(), rank + 1)
            grad = torch.empty(rows, 4)
            dist.recv(grad, rank + 1)
        else:
            y = F.mse_loss(y, targets[part]) / micro_batches
            loss += y.detach()
        y.backward(grad)
        if rank:
            dist.send(x.grad, rank - 1)
    return loss if rank == last else None


@ANSWERS.right("10.gpipe_step")
def newest_first(stage, inputs, targets, micro_batches, rows):
    """Backwards from the last micro-batch to the first, on all ranks."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    xs, ys, loss = [], [], None
    for i in range(micro_batches):
        x = torch.empty(rows, 4)
        if rank:
            dist.recv(x, src=rank - 1)
        else:
            x = inputs.chunk(micro_batches)[i].clone()
        xs.append(x.requires_grad_())
        ys.append(stage(x))
        if rank < last:
            dist.send(ys[-1].detach(), dst=rank + 1)
    if rank == last:
        parts = targets.chunk(micro_batches)
        losses = [F.mse_loss(y, t) for y, t in zip(ys, parts, strict=True)]
        loss = torch.stack(losses).mean()
        loss.backward()
    for x, y in reversed(list(zip(xs, ys, strict=True))):
        if rank < last:
            grad = torch.empty(rows, 4)
            dist.recv(grad, src=rank + 1)
            y.backward(grad)
        if rank:
            dist.send(x.grad, dst=rank - 1)
    return None if loss is None else loss.detach()


OTHER_CALLS = (
    *("dist.send(y.detach(), rank + 1)", "dist.isend(y.detach(), rank + 1).wait()"),
    *("y.backward(grad)", "torch.autograd.backward(y, grad)"),
    *("return sum(losses) if rank", "return sum(losses).item() if rank"),
)
# All gradients are asked for before they are needed.
AHEAD = """    grads = [torch.empty(rows, 4) for _ in kept]
    ahead = [dist.irecv(g, rank + 1) for g in grads if rank < last]
    for i, (x, y) in enumerate(kept):
"""
ASKED_AHEAD = (
    *(
        "    for x, y in kept:\n",
        AHEAD,
        "grad = torch.empty(rows, 4)",
        "grad = grads[i]",
    ),
    *("dist.recv(grad, rank + 1)", "ahead[i].wait()"),
)
RETURN = "return sum(losses) if rank == last else None"
FOR_ALL = (  # to report it, rank 0 needs the loss as well
    "loss = sum(losses) if losses else torch.empty(())\n"
    "    dist.broadcast(loss, last)\n"
    "    return loss if rank == last else None"
)
TWICE = (
    "extra = dist.isend(torch.zeros(rows, 4), rank + 1) if rank < last else None\n"
    "    rank and dist.recv(torch.zeros(rows, 4), rank - 1)\n"
    f"    extra and extra.wait()\n    {RETURN}"
)
UPDATED = f"torch.optim.SGD(stage.parameters(), 0.1).step()\n    {RETURN}"
HARD_CODED = ("x = torch.empty(rows, 4)", "x = torch.empty(2, 4)")
# Activations are computed a second time, and not kept.
AGAIN = """    for i, x in enumerate(kept):
        y = stage(x)
        if rank == last:
            part = slice(i * rows, (i + 1) * rows)
            y = F.mse_loss(y, targets[part]) / micro_batches
"""
BY_HAND = ("kept.append((x, y))", "kept.append(x)", "    for x, y in kept:\n", AGAIN)
FORWARD = ("y = stage(x)", "y = stage.forward(x)")
SEND_BACK = "        if rank > 0:\n            dist.send(x.grad, rank - 1)\n"
ANSWERS.edited(
    "10.gpipe_step",
    right=[OTHER_CALLS, ASKED_AHEAD, BY_HAND, (RETURN, FOR_ALL), FORWARD],
    wrong=[
        ("does not travel in micro-batches", RETURN, TWICE),
        ("weights have changed", RETURN, UPDATED),
        ("times too large", "y.backward(grad)", "(2 * y).backward(grad)"),
        ("it still has its graph", "losses.append(y.detach())", "losses.append(y)"),
        ("others None", RETURN, "return sum(losses)"),
    ],
    crashed=[
        ("must fit what the other receives", *HARD_CODED),
        ("What `recv` fills", "            x.requires_grad_()\n", ""),
        ("has no graph", "kept.append((x, y))", "kept.append((x, y.detach()))"),
        ("has two ends", "        if rank == 0:\n", "        if False:\n"),
    ],
    stuck=[("`x.grad` to the one before", SEND_BACK, "")],
)


@ANSWERS.wrong("10.gpipe_step", "wrong", "does not travel in micro-batches")
def the_whole_batch_at_once(stage, inputs, targets, micro_batches, rows):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.empty(micro_batches * rows, 4) if rank else inputs
    if rank:
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank < last:
        dist.send(y.detach(), rank + 1)
        grad = torch.empty_like(y)
        dist.recv(grad, rank + 1)
        y.backward(grad)
    else:
        y = F.mse_loss(y, targets)
        y.backward()
    if rank:
        dist.send(x.grad, rank - 1)
    return y.detach() if rank == last else None


# ----------------------------------------------------------------- 10.spot_the_pipeline

LATER, AT_ONCE = "requests.append(dist.isend({}))", "dist.send({})"
ONWARD = tuple(form.format("y.detach(), rank + 1") for form in (LATER, AT_ONCE))
BACK = tuple(form.format("x.grad, rank - 1") for form in (LATER, AT_ONCE))
BEFORE = "before = min(last - rank, micro_batches)"
ANSWERS.edited(
    "10.spot_the_pipeline",
    right=[BACK, ONWARD],
    stuck=[("Two ranks send to each other", *ONWARD, *BACK)],
    wrong=[
        ("it is no longer 1F1B", BEFORE, "before = 0", *ONWARD, *BACK),
        ("it has become GPipe", BEFORE, "before = micro_batches", *ONWARD, *BACK),
    ],
)

test_wrong, test_right = ANSWERS.tests()
