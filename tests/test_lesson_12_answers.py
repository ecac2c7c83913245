"""Lesson 12: different right answers, and wrong ones that no near miss tells of."""

import copy
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.notebook import ours
from tests.answers import Answers

ANSWERS = Answers()


def given(task_id):
    """The broken job, as the learner gets it."""
    job = ours.solved(task_id)
    names = {}
    for source in (*ours.defined_above(job), job.given):
        exec(compile(source, "<ipython-given>", "exec"), names)
    return names[job.name]


def diagnosed(task_id, status, says):
    ANSWERS.wrong(task_id, status, says)(given(task_id))


# ------------------------------------------------------------------- 12.uneven_batches

diagnosed("12.uneven_batches", "stuck", "Let the ranks agree on that number")


@ANSWERS.wrong("12.uneven_batches", "wrong", "SGD with averaged gradients")
def each_alone(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return len(batches)


@ANSWERS.wrong("12.uneven_batches", "wrong", "Let the ranks agree on that number")
def zeros_for_those_without(model, batches):
    """As many steps as the rank with the most batches: another job than was asked."""
    most = torch.tensor(len(batches))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(int(most)):
        x, y = batches[i] if i < len(batches) else (torch.zeros(1, 4),) * 2
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return int(most)


@ANSWERS.right("12.uneven_batches")
def asked_in_every_step(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    while True:
        ready = torch.tensor(float(step < len(batches)))
        dist.all_reduce(ready)
        if ready < dist.get_world_size():
            return step
        x, y = batches[step]
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        together = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(together)
        together /= dist.get_world_size()
        for grad, part in zip(
            grads, together.split([g.numel() for g in grads]), strict=True
        ):
            grad.copy_(part.view_as(grad))
        optimizer.step()
        step += 1


# ----------------------------------------------------------------------- 12.save_hangs

diagnosed("12.save_hangs", "stuck", "All ranks gather; only the writing")


@ANSWERS.right("12.save_hangs")
def gathered_on_rank_0(shards, path):
    n, first = dist.get_world_size(), dist.get_rank() == 0
    whole = {}
    for name, shard in shards.items():
        pieces = [torch.empty_like(shard) for _ in range(n)] if first else None
        dist.gather(shard, pieces, dst=0)
        whole[name] = torch.cat(pieces) if first else None
    if first:
        torch.save(whole, path)
    dist.broadcast(torch.zeros(1), src=0)


@ANSWERS.wrong("12.save_hangs", "wrong", "All ranks must wait until rank 0 has written")
def barrier_before_the_file(shards, path):
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, shards)
    dist.barrier()
    if dist.get_rank() == 0:
        whole = {name: torch.cat([piece[name] for piece in pieces]) for name in shards}
        torch.save(whole, path)


ANSWERS.edited(
    "12.save_hangs",
    wrong=[
        (
            "All ranks must wait",
            "    dist.barrier()",
            "    import time; time.sleep(0.5)",
        ),
        ("a reader may find a mixture", "if dist.get_rank() == 0:", "if True:"),
        ("the pieces of all ranks, joined", "= torch.cat(pieces)", "= shard"),
    ],
)

# ---------------------------------------------------------------------- 12.three_seeds

diagnosed("12.three_seeds", "wrong", "Some items are on two ranks")


@ANSWERS.right("12.three_seeds")
def without_a_sampler(n_items, epochs, seed):
    rank, n = dist.get_rank(), dist.get_world_size()
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * seed + rank + 1)
    drawn = []
    for _ in range(epochs):
        order = torch.randperm(n_items, generator=shared).tolist()
        items = order[rank::n]
        drawn.append((items, torch.randn(len(items), generator=own)))
    return drawn


RESEED, ITEMS = "torch.manual_seed(seed + rank)", "items = list(sampler)"
COUNTED_UP = (
    *("        sampler.set_epoch(epoch)\n", ""),
    *(ITEMS, f"{ITEMS}\n        sampler.epoch += 1"),
)
BY_NUMPY = (  # its ranks draw a few of their items again, by chance
    *(RESEED, "torch.manual_seed(1000 * seed + rank)"),
    *(
        ITEMS,
        "import numpy; order = numpy.random.RandomState(seed + epoch)\n"
        "        items = order.permutation(n_items)[rank :: dist.get_world_size()]",
    ),
)
ANSWERS.edited(
    "12.three_seeds",
    right=[COUNTED_UP, BY_NUMPY],
    wrong=[
        ("and a tensor", "torch.randn(len(items))", "torch.randn(len(items)).tolist()"),
        ("Return a pair for each epoch", "return drawn", "return drawn[:1]"),
        ("Return a pair for each epoch", "return drawn", "return drawn[0]"),
        ("Two ranks draw the same noise", RESEED, "torch.manual_seed(seed)"),
        ("draw different things", f"    {RESEED}\n", ""),
        ("The noise is the same in every epoch", ITEMS, f"{ITEMS}; {RESEED}"),
        ("Two epochs have the same order", "sampler.set_epoch(epoch)", "pass"),
        ("Order and noise must both", "shuffle=True, seed=seed", "shuffle=True"),
    ],
)

# ------------------------------------------------------------------------- 12.new_head

diagnosed("12.new_head", "wrong", "the optimizer does not hold its parameters")
WRAP = "    model[1] = new_head\n    ddp = DDP(model)\n"
TOO_EARLY = "    ddp = DDP(model)\n    model[1] = new_head\n"
ANSWERS.edited(
    "12.new_head",
    crashed=[("DDP was made before the head was replaced", WRAP, TOO_EARLY)],
    wrong=[
        ("without DDP around it", "    return model", "    return ddp"),
        ("The body has not moved", "        optimizer.step()\n", ""),
        ("The body has not moved", "ddp.parameters()", "new_head.parameters()"),
        ("does not hold its parameters", "ddp.parameters()", "body.parameters()"),
    ],
)


@ANSWERS.right("12.new_head")
def added_to_the_optimizer(body, old_head, new_head, batches):
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    model = nn.Sequential(body, new_head)
    optimizer.add_param_group({"params": list(new_head.parameters())})
    ddp = DDP(model)
    for x, y in batches:
        ddp.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return model


# -------------------------------------------------------------------- 12.mean_of_means

diagnosed("12.mean_of_means", "wrong", "That is a mean of means")


@ANSWERS.right("12.mean_of_means")
def weighted(model, inputs, targets):
    """The mean of each rank, weighted by its share of the tokens."""
    own = int((targets != -100).sum())
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, own)
    loss = model(inputs).sum() * 0
    if own:
        loss = F.cross_entropy(model(inputs), targets) * own / sum(counts)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole.item()


@ANSWERS.right("12.mean_of_means")
def by_ddp(model, inputs, targets):
    n = dist.get_world_size()
    tokens = (targets != -100).sum()
    dist.all_reduce(tokens)
    ddp = DDP(model)
    total = F.cross_entropy(ddp(inputs), targets, reduction="sum") / tokens
    (total * n).backward()
    loss = total.detach().clone()
    dist.all_reduce(loss)
    return loss


CLEARED = "targets[targets == -100] = 0; loss = loss.detach()"
ANSWERS.edited(
    "12.mean_of_means",
    wrong=[
        ("not those of this loss", "dist.all_reduce(parameter.grad)", "pass"),
        ("is not what it was", "    loss = loss.detach()", f"    {CLEARED}"),
    ],
)


def loss_of_all(model, inputs, targets):
    """Loss and tokens, both summed over all ranks."""
    logits = model(inputs).detach()
    both = torch.stack(
        [F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()]
    )
    dist.all_reduce(both)
    return float(both[0] / both[1])


@ANSWERS.right("12.mean_of_means")
def divided_at_the_end(model, inputs, targets):
    F.cross_entropy(model(inputs), targets, reduction="sum").backward()
    tokens = (targets != -100).sum()
    dist.all_reduce(tokens)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= tokens
    return loss_of_all(model, inputs, targets)


# -------------------------------------------------------------------- 12.cannot_resume

diagnosed("12.cannot_resume", "wrong", "The optimizer's state is missing")
MODEL = "ddp.module.state_dict()"
WITHOUT_BUFFERS = "{k: v.detach() for k, v in ddp.module.named_parameters()}"
CUT = "{{k.{}: v.clone() for k, v in ddp.state_dict().items()}}"
HALVES = "{k: v.half() for k, v in ddp.module.state_dict().items()}"
ANSWERS.edited(
    "12.cannot_resume",
    wrong=[
        ("names of the model inside DDP", MODEL, WITHOUT_BUFFERS),
        ("names of the model inside DDP", MODEL, CUT.format("replace('module.', '')")),
        ("names of the model inside DDP", MODEL, CUT.format("lstrip('module.')")),
        ("not what state_dict() returns", MODEL, HALVES),
        ("dict with three state_dicts", "copy.deepcopy(state)", "list(state.values())"),
        ("A part is missing", '"model": ', '"state_dict": '),
        ("The scheduler's state is missing", '"scheduler": ', '"lr": '),
        ("The names begin with `module.`", "ddp.module.", "ddp."),
        ("changes while training goes on", "copy.deepcopy(state)", "state"),
    ],
)


@ANSWERS.right("12.cannot_resume")
def sent_by_rank_0(ddp, optimizer, scheduler):
    parts = {"model": ddp.module, "optimizer": optimizer, "scheduler": scheduler}
    state = [{name: part.state_dict() for name, part in parts.items()}]
    dist.broadcast_object_list(state, src=0)
    return copy.deepcopy(state[0])


@ANSWERS.wrong("12.cannot_resume", "wrong", "not the object itself")
def the_objects(ddp, optimizer, scheduler):
    model = copy.deepcopy(ddp.module.state_dict())
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@ANSWERS.right("12.cannot_resume")
def through_bytes(ddp, optimizer, scheduler):
    names = ("model", "optimizer", "scheduler")
    parts = (ddp.module, optimizer, scheduler)
    file = io.BytesIO()
    torch.save({n: p.state_dict() for n, p in zip(names, parts, strict=True)}, file)
    file.seek(0)
    return torch.load(file, weights_only=False) | {"step": 3}


@ANSWERS.right("12.cannot_resume")
def prefix_removed(ddp, optimizer, scheduler):
    model = {k.removeprefix("module."): v.clone() for k, v in ddp.state_dict().items()}
    rest = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    return {"model": model, "optimizer": rest[0], "scheduler": rest[1]}


test_wrong, test_right = ANSWERS.tests()
