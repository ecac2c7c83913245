"""Lesson 08, FSDP: the tasks of its exercise."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from course_utils.messages import put_back, recorded
from course_utils.notebook.compare import difference
from course_utils.questions import NumberTask, Slip
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.memory import alive, listed_in, new_bytes, settled
from course_utils.tasks.task import OUT_OF_STEP, AtMost, Miss, Task
from course_utils.traffic import Sent, Watch

STAGES = """\
        weights + gradients + optimizer / n,
        weights + (gradients + optimizer) / n,
"""
LAST_STAGE = "        (weights + gradients + optimizer) / n,\n"

ZERO_TABLE = Task(
    id="08.zero_table",
    title="The ZeRO table",
    stars=1,
    where="here",
    cases=(
        (7.5e9, 64, 12),
        (1.3e9, 8, 12),
        (1000, 1, 12),
        (350e6, 4, 8),
        (1e12, 1024, 4),
    ),
    instead="Four lines of arithmetic are enough.",
    misses=(
        Miss(
            "optimizer_bytes * parameters",
            "12 * parameters",
            "The optimizer's bytes are an argument, optimizer_bytes. They are not "
            "always 12.",
        ),
        Miss(
            "weights + gradients + optimizer / n",
            "weights + gradients / n + optimizer",
            "Stage 1 shards the optimizer's state, which is the largest part. The "
            "gradients follow in stage 2.",
        ),
        Miss(
            STAGES + LAST_STAGE,
            STAGES.replace("(gradients + optimizer) / n", "gradients / n + optimizer")
            + "weights / n + gradients + optimizer",
            "Each stage keeps what the one before has sharded, and adds a part: "
            "optimizer; optimizer and gradients; optimizer, gradients and parameters.",
        ),
        Miss(
            LAST_STAGE,
            "weights + (gradients + optimizer) / n",
            "In stage 3 the parameters are sharded, too.",
        ),
        Miss(
            STAGES,
            STAGES.replace("weights + gradients +", "").replace("weights +", ""),
            "What is not shared out is still there, whole: in stage 1 weights and "
            "gradients, in stage 2 the weights.",
        ),
        Miss(
            "2 * parameters",
            "4 * parameters",
            "Weights and gradients are in bfloat16: 2 bytes each, not 4.",
        ),
        Miss(
            "/ n",
            "/ parameters // n * parameters",
            "`//` rounds down: 12 // 64 is 0. Divide with `/`.",
        ),
        Miss(
            "2 * parameters, 2 * parameters\n    optimizer, n = optimizer_bytes * "
            "parameters",
            "2, 2\n    optimizer, n = optimizer_bytes",
            "That is for one parameter. The model has `parameters` of them.",
        ),
        Miss(
            "optimizer_bytes * parameters",
            "optimizer_bytes",
            "optimizer_bytes is for one parameter. Multiply it by `parameters`, too.",
        ),
        Miss(
            STAGES + LAST_STAGE,
            "n * (weights + gradients) + optimizer, n * weights + gradients + "
            "optimizer, weights + gradients + optimizer",
            "That is all GPUs together. How much is on each?",
        ),
    ),
    otherwise="Per parameter there are 2 bytes of weight, 2 of gradient, and "
    "optimizer_bytes. Which of them are divided by world_size in each stage?",
    hints=(
        "In stage 0 (DDP) everything is on each GPU. Stage 1 shares out one part, "
        "stage 2 a second one, stage 3 the last one.",
        "Stage 1 divides the optimizer's bytes by world_size, stage 2 also those of "
        "the gradients, stage 3 also those of the weights.",
        "The shape of it:\n"
        "  return [\n"
        "      (2 + 2 + optimizer_bytes) * parameters,\n"
        "      (2 + 2 + optimizer_bytes / world_size) * parameters,\n"
        "      ...,\n"
        "      ...,\n"
        "  ]",
    ),
)

PREDICT_PEAK = NumberTask(
    "08.predict_peak",
    "A model has 32 layers with 500 MB of weights each. FSDP on 8 GPUs; each layer is "
    "a unit, and is freed after its forward and after its backward. With prefetch: the "
    "next layer's all-gather runs while a layer computes. How many MB of weights "
    "(shards and whole layers) are on a GPU at the worst moment? (Weights only: no "
    "gradients, no optimizer, no activations.)",
    answer=3000,
    unit="MB",
    title="Predict the peak",
    stars=1,
    why="The shards of all layers, 32 × 500 / 8 = 2,000 MB, are always there. A layer "
    "that computes is whole in memory of its own, 500 MB, and prefetch has a second "
    "one on its way.",
    hint="Add what lies there all the time (the shards of all layers), and what is "
    "whole while one layer computes.",
    slips=[
        Slip(
            2500,
            "That is the peak without prefetch. With it, the next layer is "
            "already being gathered while this one computes, and needs memory for a whole "
            "layer.",
        ),
        Slip(
            1000,
            "Those are the layers that are whole. The shards of all layers lie "
            "there as well, all the time.",
        ),
        Slip(
            500,
            "That is the layer that is whole. The shards of all layers lie there "
            "as well, and a second layer is on its way.",
        ),
        Slip(
            2000,
            "Those are the shards of all layers. While a layer computes, it is "
            "whole, in memory of its own; so is the next one.",
        ),
        Slip(2562.5, "What is gathered ahead is a whole layer, not one shard of it."),
        Slip(
            2875,
            "You took the layer's own shard away. But shard and whole layer are "
            "in memory at the same time: the shard is what the optimizer changes.",
        ),
        Slip(
            2750,
            "You took the shards of the two layers away. But shard and whole "
            "layer are in memory at the same time.",
        ),
        Slip(16000, "That is the whole model. Never is all of it there at once."),
        Slip(
            17000,
            "Only an eighth of each layer lies there all the time. The rest "
            "comes while the layer computes.",
        ),
        Slip(
            3500, "How many layers are whole at the same time if one is gathered ahead?"
        ),
    ],
    hints=(
        "Two kinds of memory: shards, which are always there, and whole layers, which "
        "come and go.",
        "A GPU has an eighth of each layer, all the time. How many whole layers are "
        "there at the worst moment?",
        "For 10 layers of 80 MB on 4 GPUs it goes like this:\n"
        "  shards            10 × 80 / 4 = 200 MB\n"
        "  without prefetch  200 + 80 = 280 MB\n"
        "  with prefetch     200 + 2 × 80 = 360 MB",
    ),
)

# ------------------------------------------------------------------------- flat_shard

SHAPES = {
    "tensors of 3 and 4 numbers": ((3,), (4,)),
    "two matrices and a vector, 26 numbers": ((3, 5), (2, 4), (3,)),
    "a single number, without a dimension": ((),),
    "12 numbers in one tensor": ((4, 3),),
}
NUMBERS = "numbers in the shard"
UNTOUCHED = "the given tensors are as they were"
KEPT = "bytes that the object keeps"
KEPT_AFTERWARDS = "bytes that are kept after unshard()"
NOT_OVERWRITTEN = "the shard is the same after unshard()"
NOW = "unshard() when each rank r has added r + 1 to its shard"


def tensors_of(kind):
    """The same on every rank."""
    return [whole_numbers(shape, 3 + i) for i, shape in enumerate(SHAPES[kind])]


def observe_shard(answer, kind):
    before, tensors = alive(), tensors_of(kind)
    unit = answer(tensors)
    untouched = difference(tensors, tensors_of(kind), 0.0) is None
    del tensors
    size = unit.shard.detach().nbytes
    kept = settled(lambda: new_bytes(before), size) + listed_in(unit)
    shard = unit.shard.detach().clone()
    unit.unshard()  # what it returns is thrown away
    afterwards = settled(lambda: new_bytes(before) - shard.nbytes, size)
    afterwards += listed_in(unit)
    whole = unit.unshard()
    if isinstance(whole, list | tuple):  # on one rank, perhaps views of the shard
        whole = [one.detach().clone() if torch.is_tensor(one) else one for one in whole]
    same = torch.equal(unit.shard.detach(), shard)
    with torch.no_grad():
        unit.shard += dist.get_rank() + 1  # as an optimizer would
    return {
        NUMBERS: shard.numel(),
        "the shard": shard,
        UNTOUCHED: untouched,
        KEPT: AtMost(kept),
        "unshard()": whole,
        NOT_OVERWRITTEN: same,
        NOW: unit.unshard(),
        KEPT_AFTERWARDS: AtMost(afterwards),
    }


PIECE = "flat[rank * size : (rank + 1) * size]"
FLAT_FIRST = "The tensors have several shapes, and some have no dimension at all. Make each of them flat first: `tensor.reshape(-1)`."
CUT_OFF = "After the all-gather the padding is still there: cut it off before you split. Or numbers got lost: the size of a shard must be rounded *up*, and the shard is the piece from rank · size to (rank + 1) · size."

FLAT_SHARD = Task(
    id="08.flat_shard",
    title="Shard and unshard",
    stars=2,
    observe=observe_shard,
    seconds=10.0,  # it may have to wait for gloo
    cases=tuple((kind,) for kind in SHAPES),
    instead="`torch.cat`, `F.pad`, slices and an all-gather are enough.",
    misses=(
        Miss(
            ".clone()",
            "",
            "The numbers are right, but the shard is a slice. A slice is a view: it "
            "keeps the memory of the whole flat tensor. `clone()` it.",
        ),
        Miss(
            "-(-len(flat) // n)",
            "len(flat) // n + 1",
            "world_size divides the length already, and still zeros were appended: `n "
            "- len(flat) % n` is n then, and `len(flat) // n + 1` one too many. "
            "`-len(flat) % n` is 0.",
        ),
        Miss(
            "(0, n * size - len(flat))",
            "(n * size - len(flat), 0)",
            "The zeros stand in front. They belong behind the numbers: `F.pad(flat, "
            "(0, zeros))`.",
        ),
        Miss(
            PIECE,
            "flat[rank::n]",
            "That is every n-th number. A shard is a piece without gaps: rank 0 has "
            "the first size numbers, rank 1 the next, and so on.",
        ),
        Miss(
            PIECE,
            "flat[:size]",
            "Each rank has rank 0's shard. Which piece is this rank's?",
        ),
        Miss(
            PIECE,
            "torch.cat([F.pad(t.reshape(-1), (0, -t.numel() % n)).chunk(n)[rank] for t "
            "in tensors])",
            "You sharded each tensor by itself. The task makes one flat tensor of all "
            "of them first: it needs less padding, and one all-gather.",
        ),
        Miss(
            PIECE,
            "flat",
            "That is the whole flat tensor. Cut out this rank's piece.",
        ),
        Miss(
            "part.view(s)",
            "part",
            "The numbers are there, but in one dimension each. Give them the shapes of "
            "the tensors that were given.",
        ),
    ),
    because={
        NUMBERS: "A shard has ceil(numbers / world_size) numbers, on every rank: an "
        "all-gather wants one size. Append zeros until world_size divides the length, "
        "then cut.",
        UNTOUCHED: "The shard is right, but the given tensors have changed. They are "
        "not yours: copy from them, and let them be. It is enough to keep no reference "
        "to them.",
        KEPT_AFTERWARDS: "What unshard() has gathered stays in the object. Between two "
        "calls there may be nothing but the shard: keep it in a local variable.",
        KEPT: "The shard is right, but more than the shard stays in memory. Of the "
        "given tensors, keep the shapes only.",
        NOT_OVERWRITTEN: "unshard() has changed the shard. It is the memory of this "
        "rank: gather into other memory.",
        NOW: "The shards have been changed in the meantime, but unshard() still "
        "returns the old numbers. It must gather what is in the shards now.",
    },
    errors={
        "has no attribute 'shard'": "This rank's piece must be in `self.shard`: there "
        "an optimizer finds it, and so does the check.",
        "Sizes of tensors must match": FLAT_FIRST,
        "same number of dimensions": FLAT_FIRST,
        "zero-dimensional tensor": FLAT_FIRST,
        "split_sizes to sum": CUT_OFF,
        "is invalid for input of size": CUT_OFF,
        OUT_OF_STEP: "An all-gather wants a shard of the same size from every rank: "
        "append zeros before you cut, then cut from rank · size to (rank + 1) · size. "
        "And every rank must call it, also one that has nothing but padding.",
    },
    otherwise="Make one flat tensor of all, append zeros until world_size divides it, "
    "and keep a copy of this rank's piece. unshard() gathers the pieces, cuts the "
    "zeros off, and gives the tensors their shapes back, in their order.",
    hints=(
        "How many numbers are in all tensors together, and how many in a shard? All "
        "shards have the same size.",
        "size = ceil(numbers / world_size). Append zeros up to size · world_size. Rank "
        "r has the numbers from r · size on, in a copy (a slice would keep all the "
        "memory). unshard: all_gather, cat, cut off, split, view.",
        "The shape of it:\n"
        "  flat = torch.cat([t.reshape(-1) for t in tensors])\n"
        "  size = -(-len(flat) // n)          # rounded up\n"
        "  flat = F.pad(flat, (0, ...))\n"
        "  self.shard = flat[...].clone()\n"
        "and of unshard:\n"
        "  shards = [torch.empty_like(self.shard) for _ in range(n)]\n"
        "  dist.all_gather(shards, ...)\n"
        "  flat = torch.cat(shards)[: ...]\n"
        "  return [part.view(shape) for part, shape in zip(flat.split(...), ...)]",
    ),
)

# --------------------------------------------------------------------- reduce_scatter

LONG = 1000
OWN = "torch's own reduce-scatters"
SENT = "bytes sent"
SEEN = "the numbers were seen to be sent"
SOURCES = "each recv takes a message of this call, whoever is ahead"
HELD = "bytes of memory that its part holds on to"


def gradient_of(size, rank, n):
    gradient = whole_numbers((n * size,), 21 + rank)
    # The long one has numbers that 16 bits cannot hold, so rounding would show.
    return (gradient * (1 + 2.0**-12) if size == LONG else gradient,)


def sent_bytes(sent, calls):
    """What a rank sent: by collectives, and by messages, also those of its threads."""
    messages = sum(call.nbytes for call in calls if call.kind == "send")
    return messages + round(sum(part for name, part in sent.calls if name != "send"))


@contextlib.contextmanager
def called(*names):
    """Yields a list: which of these methods of process groups are called meanwhile."""
    found = []

    def noted(name, original):
        def method(*args, **kwargs):
            found.append(name)
            return original(*args, **kwargs)

        return method

    with put_back(dist.ProcessGroup, names) as originals:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, noted(name, original))
        yield found


def observe_part(answer, gradient):
    with called("recv_anysource", "barrier") as methods:
        with Sent() as sent, recorded() as calls:
            part = answer(gradient)
    if not torch.is_tensor(part):
        return part
    nbytes = sent_bytes(sent, calls)
    sources = {call.peer for call in calls if call.kind == "recv"}
    from_anybody = "recv_anysource" in methods and len(sources) > 1  # not in a ring
    n = dist.get_world_size()
    return {
        "its part": part,
        OWN: sent.count("reduce-scatter"),
        SENT: AtMost(nbytes),
        # Not every byte is: an all-to-all with sizes is counted as one without.
        SEEN: nbytes >= gradient.nbytes * (n - 1) // n // 2,
        SOURCES: not from_anybody or "barrier" in methods,
        HELD: AtMost(part.untyped_storage().nbytes()),
    }


# Only what the installed version has: their names have changed.
REDUCE_SCATTERS = (
    *(
        name
        for name in ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
        if hasattr(dist, name)
    ),
    "torch.distributed._functional_collectives.reduce_scatter_tensor",
)
NOT_SEEN = "The result is right, but this rank was seen to send less than the others need of it. The numbers went another way: by the store, or by a backend's own methods? Send each rank its piece with `isend` and `irecv`, or `all_to_all_single`."
ITSELF = "A rank cannot send to itself. Its own piece does not travel. And one rank alone has nothing to send at all."
FIRST = "rows[rank] = pieces[rank]"

REDUCE_SCATTER = Task(
    id="08.reduce_scatter",
    title="Reduce-scatter a gradient",
    stars=2,
    inputs=gradient_of,
    cases=(4, 1, LONG),
    observe=observe_part,
    forbids=REDUCE_SCATTERS,
    instead="`isend` and `irecv` to and from every other rank, or a ring, or "
    "`all_to_all_single`.",
    misses=(
        Miss(
            "rows.mean(0)",
            "rows.sum(0)",
            "That is the sum over the ranks. A gradient is averaged: divide by the "
            "world size.",
        ),
        Miss(
            FIRST,
            "rows[rank] = 0",
            "This rank's own part is missing in the sum. It does not travel, but it "
            "counts.",
        ),
        Miss(
            "rows.mean(0)",
            "(rows.sum(0) + pieces[rank]) / n",
            "This rank's own part is in the sum twice.",
        ),
        Miss(
            "isend(pieces[other]",
            "isend(pieces[rank]",
            "Each rank has sent its own piece, rank r the r-th. But rank j needs the "
            "j-th piece of every gradient: send it that one.",
        ),
        Miss(
            "rows.mean(0)",
            "pieces[rank].clone()",
            "That is this rank's own piece: nothing of the others is in it.",
        ),
        Miss(
            FIRST,
            "total = gradient.clone(); dist.all_reduce(total); return "
            "total.chunk(n)[rank] / n",
            "The result is right, but too much was sent. An all-reduce brings every "
            "rank the whole sum, and most of it is thrown away. Send each rank only "
            "the piece that it needs.",
        ),
        Miss(
            FIRST,
            "dist.reduce(total := gradient / n, 0); part = rows[0].clone(); "
            "dist.scatter(part, list(total.chunk(n)) if rank == 0 else None); return "
            "part",
            "The result is right, but everything passes through one rank, which sends "
            "more than its share. Send each piece straight to the rank that it belongs "
            "to.",
        ),
        Miss(
            "rows.mean(0)",
            "rows.cumsum(0)[-1].div_(n)",
            "The result is right, but it is a view of a larger tensor, and keeps all "
            "of that in memory. Return a tensor of its own: `clone()`, or the result "
            "of a sum or a division that is not in place.",
        ),
    ),
    because={
        OWN: "It would work: but it is what you build here. Send the pieces with "
        "`isend` and `irecv`, or `all_to_all_single`.",
        SENT: "The result is right, but too much was sent. Each rank needs one piece "
        "of your gradient, not all of it, and in float32: send it straight to the rank "
        "that it belongs to. An all-gather brings everybody all gradients, and where "
        "everything passes through one rank, that one sends more than its share.",
        SEEN: NOT_SEEN,
        SOURCES: "The result is right here. But a recv without a source takes whatever "
        "comes first. FSDP calls this for one unit after the other, and a rank that is "
        "ahead has sent the next piece already: that would be added, too. Name the "
        "source: `dist.recv(piece, other)`.",
        HELD: "The result is right, but it is a view of a larger tensor, such as a "
        "copy of the whole gradient, and keeps all of that in memory. Return a tensor "
        "of its own: `clone()`, or the result of a division that is not in place.",
    },
    errors={
        "should not be the same as the rank": ITSELF,
        "is this rank itself": ITSELF,
        "there is no rank": "There is no such rank: they go from 0 to world size - 1. "
        "Ask dist.get_world_size().",
        OUT_OF_STEP: "Somebody waits for a message that nobody sends, or everybody "
        "sends and nobody receives. Start all with `isend` and `irecv`, then wait for "
        "all.",
    },
    otherwise="Rank r gets the r-th of n pieces of the mean over all ranks' gradients, "
    "and nothing is rounded: they come in float32.",
    hints=(
        "Cut the gradient into n pieces. Who needs which of yours, and which do you "
        "need of the others?",
        "Piece r of every rank's gradient goes to rank r, directly. Start all sends "
        "(`isend`) and all receives (`irecv`, into a row for each rank), wait for all "
        "of them, add up, divide by n.",
        "The shape of it:\n"
        "  pieces = gradient.chunk(n)\n"
        "  rows = torch.empty(n, len(pieces[0]))\n"
        "  rows[rank] = pieces[rank]\n"
        "  for other in range(n):\n"
        "      if other != rank:\n"
        "          requests += [dist.isend(..., other), dist.irecv(..., other)]\n"
        "  ...                        # wait for all requests\n"
        "  return rows.mean(0)",
    ),
)

# --------------------------------------------------------------------------- one_unit

TWO_LAYERS = "two linear layers, 242 numbers"
TIED = "two layers with one weight"
NORMED = "a linear layer and a layer norm"
ZERO, NEVER = "zero_grad() in each step", "no zero_grad()"
STEPS = 3
RATE = 2.0**-4


def in_eighths(inputs, outputs, seed):
    return linear(inputs, outputs, seed, divided_by=8)


def module_of(kind):
    """The same on every rank."""
    if kind == TIED:
        module = nn.Sequential(in_eighths(3, 3, 11), nn.Tanh(), in_eighths(3, 3, 12))
        module[2].weight = module[0].weight
        return module
    if kind == NORMED:
        return nn.Sequential(in_eighths(3, 4, 13), nn.LayerNorm(4))
    return nn.Sequential(
        in_eighths(3, 40, 14), nn.Tanh(), in_eighths(40, 2, 15), nn.Tanh()
    )


def memory_of(module):
    """Bytes behind the parameters of the module, each memory counted once."""
    storages = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    return sum(p.untyped_storage().nbytes() for p in storages.values())


GATHERED = "all-gather"
IN_FORWARD = "all-gathers in the forward"
BETWEEN = "bytes of whole parameters between forward and backward"
NO_COPY = "no copy of the parameters between forward and backward"
IN_BACKWARD = "all-gathers in the backward"
BEFORE = "bytes of whole parameters between two steps"
LEFT = "whole gradients that are left after the backward"
NOTHING_LEFT = "nothing as large as all gradients is left in memory"
OF_SHARD = "gradient of the shard"


def observe_unit(answer, kind, zero):
    rank, before = dist.get_rank(), alive()
    module = module_of(kind)
    numbers = sum(p.numel() for p in module.parameters())
    unit, report = answer(module), {}
    room = unit.shard.nbytes + 2 * numbers  # half as much as the whole, for trifles
    for step in range(STEPS):
        if zero == ZERO:
            unit.shard.grad = None
        batch = whole_numbers((2, 3), 200 + 10 * rank + step) / 8
        batch.requires_grad_(kind != TWO_LAYERS)  # as in the midst of a model
        with Sent() as forward:
            output = unit(batch)
        if output is None:
            return None
        seen = {IN_FORWARD: forward.count(GATHERED), BETWEEN: memory_of(module)}
        if step == 0 and kind == TWO_LAYERS:  # larger than what its layers note
            seen[NO_COPY] = settled(lambda: new_bytes(before), room) <= room
        with Sent() as backward, recorded() as calls:
            output.sum().backward()
        gathered = sum(nbytes for name, nbytes in backward.calls if name == GATHERED)
        sent = sent_bytes(backward, calls) - round(gathered)
        seen |= {
            IN_BACKWARD: backward.count(GATHERED),
            BEFORE: memory_of(module),
            LEFT: sum(p.grad is not None for p in module.parameters()),
            SENT: AtMost(sent),
        }
        result, of_input, grad = output.detach().clone(), batch.grad, unit.shard.grad
        del output, batch
        if step == 0:
            mine = sum(t.nbytes for t in (result, of_input, grad) if t is not None)
            seen[NOTHING_LEFT] = (
                settled(lambda mine=mine: new_bytes(before) - mine, room) <= room
            )
        seen |= {OF_SHARD: None if grad is None else grad.clone(), "the output": result}
        seen |= {"gradient of the input": of_input}
        if grad is not None:
            with torch.no_grad():  # SGD; an optimizer of torch would import much
                unit.shard -= RATE * grad
        seen["the shard after the step"] = unit.shard.detach().clone()
        seen[SEEN] = 2 * sent >= unit.shard.nbytes * (dist.get_world_size() - 1)
        report |= {f"step {step}: {name}": value for name, value in seen.items()}
    return report


ADD = "part if grad is None else grad + part"
CALL = "self.module(*args)"
HOOK = "output.register_hook(lambda grad: self.gather())"
GONE = "Somebody computed with parameters whose memory had been given back. Gather before the forward, and again before the backward: `output.register_hook` comes just before it. (A hook on the module works from its next call on: register it in `__init__`. A full backward hook is called after the module's backward, a full backward pre-hook before it.)"
PADDED = "Is the flat gradient padded before the reduce-scatter? It must be as long as `self.whole`, so that the ranks can share it equally."
BUILT_ON = "This unit is built on tasks 3 and 4. Solve them first, and run their cells, once more after a restart of the kernel."
NO_GRAPH = "The hook is on a tensor without a graph. It belongs on the output, not on an input. And if it is there: was the forward run under no_grad?"

ONE_UNIT = Task(
    id="08.one_unit",
    title="FSDP for one unit",
    stars=3,
    ranks=(3, 1, 2),
    cases=((TWO_LAYERS, ZERO), (TIED, ZERO), (NORMED, NEVER)),
    observe=observe_unit,
    seconds=15.0,
    forbids=REDUCE_SCATTERS,
    instead="The methods of Unit, a hook on the output, and your tasks 3 and 4.",
    misses=(
        Miss(
            "reduce_scatter(flat)",
            "reduce_scatter(flat) * dist.get_world_size()",
            "That is the sum over the ranks, not their mean.",
        ),
        Miss(
            "reduce_scatter(flat)",
            "reduce_scatter(flat) / dist.get_world_size()",
            "It is divided by the world size twice: your reduce_scatter of task 4 "
            "returns the mean already.",
        ),
        Miss(
            "reduce_scatter(flat)",
            "flat.chunk(dist.get_world_size())[dist.get_rank()].clone()",
            "That is the rank's own gradient: nothing of the others is in it.",
        ),
        Miss(
            ADD,
            "part",
            "Step 0 is right, a later one is not. Here nobody called zero_grad(): a "
            "gradient that is there already must be added to, not replaced. (And "
            "`self.zero_grad()` drops that of the shard, too; "
            "`self.module.zero_grad()` does not.)",
        ),
        Miss(
            f"self.shard.grad = {ADD}",
            "pass",
            "The shard has no gradient after the backward. When the last gradient of "
            "the unit is there, put the rank's part into `self.shard.grad`.",
        ),
        Miss(
            "self.free()\n        flat",
            "flat",
            "After the backward the parameters are still whole. Free them, too.",
        ),
        Miss(
            CALL,
            f"{CALL}.detach().requires_grad_()",
            "After the backward the parameters are still whole: did it come to the "
            "module at all? It does not if what forward returns is cut off from the "
            "graph, by `detach()` for example.",
        ),
        Miss(
            HOOK,
            "pass",
            GONE,
        ),
    ),
    because={
        IN_FORWARD: "One all-gather, before the module computes, is what a forward "
        "takes.",
        BETWEEN: "After the forward the parameters are still whole. Free them: until "
        "the backward comes to this unit, others need the memory.",
        NO_COPY: "The parameters are freed after the forward, but something as large "
        "is still there: a copy of them? An attribute may hold it, or the graph: what "
        "the module computed with, autograd keeps until the backward.",
        IN_BACKWARD: "One all-gather, before the unit's backward, is what it takes: "
        "`output.register_hook(...)` is called at that moment. (A hook on the module "
        "stays, so that there are more with each step: register it once, in "
        "`__init__`.)",
        BEFORE: "After the backward the parameters are still whole. Free them, in "
        "every step.",
        LEFT: "The whole gradients are still in memory after the backward. Set `.grad` "
        "of each parameter to None when its part is in the shard.",
        SENT: "More was sent than a reduce-scatter of one flat gradient needs. Is "
        "yours of task 4 called once, with all gradients together? (An all-reduce "
        "sends twice as much: it brings every rank the whole gradient.)",
        NOTHING_LEFT: "Something as large as all gradients is left after the backward. "
        "Is it kept as an attribute? Or is the shard's gradient a view of it, which "
        "keeps all of its memory? `clone()` it.",
        "the output": "forward must return what the module returns, as it is.",
        "of the input": "The layers before this unit do not get their gradient: what "
        "it is called with is cut off from the graph. Call the module with the "
        "arguments themselves, not with copies or `detach()`.",
        "after the step": "The gradient is right, but the shard has changed by "
        "something else than the optimizer's step.",
        SEEN: NOT_SEEN,
    },
    errors={
        "SIGSEGV": GONE,
        "SIGBUS": GONE,
        "out of bounds for storage": GONE,
        "name 'FlatShard' is not defined": BUILT_ON,
        "name 'reduce_scatter' is not defined": BUILT_ON,
        "takes 1 positional argument but 2 were given": "The hook is called with the "
        "gradient of the output, and `gather` takes nothing: "
        "`output.register_hook(lambda grad: self.gather())`.",
        "'NoneType' object is not callable": "`register_hook(self.gather())` gathers "
        "at once, and registers None. Hand over a function: `lambda grad: "
        "self.gather()`.",
        "but hook returned": "What a hook on a tensor returns takes the place of the "
        "gradient. It must return None.",
        **dict.fromkeys(
            (
                "must match the size of tensor",
                "must match the existing size",
                "stack expects each tensor to be equal size",
                "is invalid for input of size",
                "Sizes of tensors must match",
                "does not divide equally",
                "must be divisible",
                "the same number of elements",  # of a send and a recv
            ),
            PADDED,
        ),
        "same number of dimensions": "The gradients have the shapes of their "
        "parameters: a matrix and a vector cannot be put behind each other. Make each "
        "flat first: `p.grad.reshape(-1)`.",
        "assign a gradient of size": "What is put into `self.shard.grad` must be as "
        "long as the shard: the rank's part of a flat gradient that is as long as "
        "`self.whole`.",
        "'NoneType' object has no attribute": "Something is None that should be a "
        "gradient. Put the gradients behind each other before you set `.grad` to None.",
        "+=: 'NoneType'": "In the first step the shard has no gradient yet: then put "
        "the part there. Add to one that is there already.",
        "cannot register a hook on a tensor": NO_GRAPH,
        "does not have a grad_fn": NO_GRAPH,
        "must be Tensor, not tuple": "`args` is a tuple of what forward was called "
        "with. Hand them on one by one: `self.module(*args)`.",
        OUT_OF_STEP: "The ranks have called different collectives, or with other "
        "sizes. All must gather and reduce-scatter at the same places, a flat gradient "
        "as long as `self.whole`.",
    },
    otherwise="The gradient of the shard is this rank's part of the flat mean "
    "gradient, with zeros for the padding. In a later step the parameters' own "
    "gradients of the one before must be gone.",
    hints=(
        "Four moments: before the forward, after it, before the backward, after it. "
        "Which method of Unit belongs to each?",
        "forward: gather, compute, free, and `register_hook` on the output for the "
        "second gather. after_backward: make the gradients flat, set `.grad` to None, "
        "free, pad to the length of `self.whole`, reduce-scatter, and add the result "
        "to `self.shard.grad`.",
        "The shape of it:\n"
        "  forward: self.gather(); output = self.module(*args); self.free()\n"
        "           output.register_hook(lambda grad: self.gather())\n"
        "  after_backward:\n"
        "           flat = torch.cat([p.grad.reshape(-1) for p in self.members])\n"
        "           flat = F.pad(flat, (0, ...))\n"
        "           part = reduce_scatter(flat)      # your task 4\n"
        "           self.shard.grad = ...            # add, if there is one\n"
        "           ...                              # .grad = None, free",
    ),
)

# ----------------------------------------------------------------- spot_the_optimizer

STEPS_TRAINED = 4
FEW = 4  # whole tensors, of the ten; one is left from the last round of a loop
GATHERS = "layers are gathered"
WHOLE_LAYERS = "the largest layer is gathered, whole and in float32"
LARGEST = "bytes of the largest all-gather"
RESULT = "rank 0's result"
FREED = "layers are gathered again in the backward"
OF_OTHERS = "the result of the other ranks"
KEPT_WHOLE = "whole tensors that a rank keeps which returns nothing"


def network():
    """The same on every rank. Two ranks can't share its last layer evenly."""
    generator = torch.Generator().manual_seed(4)
    layers = []
    for inputs, outputs in ((6, 16), (16, 16), (16, 3)):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / inputs**0.5)
        layers += [layer, nn.LayerNorm(outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-2])


def rows_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 6, generator=generator)
    return x, (torch.arange(8) + step + rank) % 3


class Gathers(Watch):
    """Notes the bytes of the largest all-gather, and how many a backward calls."""

    def __init__(self):
        super().__init__()
        self.nbytes = self.in_backward = 0

    def note(self, name, nbytes):
        n = dist.get_world_size()
        if name == GATHERED:  # a rank sends its part to n - 1 others
            self.nbytes = max(self.nbytes, round(nbytes * n / (n - 1)))
            self.in_backward += torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def announced():
    """Let a `full_tensor()` that others do not call be found within seconds.

    Its all-gather does not pass torch.distributed, where a rank is seen to wait.

    Yields a list: of each call, how many of the tensors before it were still there.
    """
    from torch.distributed.tensor import DTensor

    original, made, kept = DTensor.full_tensor, [], []

    def full_tensor(self, *args, **kwargs):
        gathered = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.ones(1))
        kept.append(
            settled(lambda: sum(not one.expired() for one in made), FEW, seconds=0.2)
        )
        whole = original(self, *args, **kwargs)
        made.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    DTensor.full_tensor = full_tensor
    try:
        yield kept
    finally:
        DTensor.full_tensor = original


def observe_training(answer):
    rank, model = dist.get_rank(), network()
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model]
    batches = [rows_of(rank, step) for step in range(STEPS_TRAINED)]
    with Gathers() as gathers, announced() as kept:
        state = answer(model, batches, 0.05)
    # The last layer may stay whole.
    again = STEPS_TRAINED * (sum(size > 0 for size in layers) - 1)
    if isinstance(state, dict) and rank == 0:
        own = {k: v.to_local() for k, v in state.items() if hasattr(v, "to_local")}
        state = state | own
    return {
        GATHERS: gathers.nbytes > 0,
        WHOLE_LAYERS: gathers.nbytes >= max(layers),
        LARGEST: AtMost(gathers.nbytes),
        RESULT: "of rank 0" if rank else state,
        FREED: gathers.in_backward >= again,
        OF_OTHERS: "None" if rank == 0 or state is None else f"a {kind_of(state)}",
        KEPT_WHOLE: AtMost(max([FEW, *kept] if rank else [0])),
    }


def kind_of(value):
    return type(value).__name__


UNITS = """\
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
"""
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)\n"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
BY_OWN_NORM = """\
own = [p.grad.to_local() for p in model.parameters()]
        norm = torch.cat([grad.reshape(-1) for grad in own]).norm()
        [grad.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0)) for grad in own]"""

SPOT_THE_OPTIMIZER = Task(
    id="08.spot_the_optimizer",
    title="Spot the bugs of a copied script",
    stars=2,
    ranks=(3, 2),
    observe=observe_training,
    seconds=30.0,
    imports=("torch._dynamo", "torch.distributed.fsdp"),
    tolerance=1e-4,
    misses=(
        Miss(
            UNITS,
            "    fully_shard(model)\n",
            "Several layers were gathered together, and are in memory together. The "
            "unit of the whole model takes all that are in no other one. Each layer "
            "should be a unit of its own: `fully_shard(layer)` for the layers first, "
            "then for the model.",
        ),
        Miss(
            UNITS + OPTIMIZER,
            OPTIMIZER + UNITS,
            "The parameters are those of the start. Was the optimizer made before "
            "`fully_shard`? Then it holds parameters that nobody uses any more. They "
            "get no gradient, so its steps do nothing. (Nor do they if zero_grad() "
            "comes before step().)",
        ),
        Miss(
            "p.full_tensor()",
            "p.to_local()",
            "Rank 0 returns its shards. `full_tensor()` makes a parameter whole.",
        ),
        Miss(
            CLIP,
            "pass",
            "The optimizer's steps were made with gradients that were not clipped. "
            "Leave that line between `backward()` and `step()`.",
        ),
        Miss(
            CLIP,
            BY_OWN_NORM,
            "Each rank has clipped by the norm of its own shards. What counts is the "
            "norm over all ranks: `clip_grad_norm_` of torch takes it.",
        ),
        Miss(
            "optimizer.zero_grad()",
            "break",
            "The result is right for the first batch, but not all of them were trained "
            "with. Does a `return` or a `break` stand inside the loop?",
        ),
        Miss(
            "in batches",
            "in batches[1:]",
            "The result is right for the last batches alone. Train with every batch of "
            "the list.",
        ),
        Miss(
            "            fully_shard(layer)",
            "            fully_shard(layer, reshard_after_forward=False)",
            "Layers stay whole from the forward to the backward. That is what "
            "`reshard_after_forward=False` does. It also comes of leaving out "
            "`fully_shard(model)`: then each layer is a root, and a root stays whole.",
        ),
    ),
    because={
        GATHERS: "No layer was gathered. Is the model still sharded?",
        WHOLE_LAYERS: "Layers were gathered, but the largest one never whole and in "
        "float32. Is it sharded? Or is there a MixedPrecisionPolicy, with which half "
        "of the bytes are gathered? This script computes in float32.",
        LARGEST: "Several layers were gathered together, and are in memory together. "
        "The unit of the whole model takes all that are in no other one. Each layer "
        "should be a unit of its own: `fully_shard(layer)` for the layers first, then "
        "for the model.",
        FREED: "Too few layers are gathered again: they stay whole from the forward to "
        "the backward. A layer that is no unit of its own (every one with parameters "
        "counts, not nn.Linear alone) goes to the root, and a root stays whole.",
        OF_OTHERS: "All ranks call full_tensor(), but only rank 0 keeps the result. "
        "The others return None: else each of them holds the whole model. (An empty "
        "dictionary, which get_model_state_dict returns there, is not None.)",
        KEPT_WHOLE: "All ranks call full_tensor(), as they must. But this one returns "
        "nothing, and still keeps one whole tensor after the other: in the end the "
        "whole model, on every rank. Go tensor by tensor, and let only rank 0 put them "
        "into a dictionary.",
    },
    errors={
        "can only be applied to a module once": "fully_shard was called twice for the "
        "same module. Call it for each layer, then for the model, once.",
        "Invariant encountered": "fully_shard of the whole model takes all parameters "
        "that are in no unit yet. Layers first, then the model.",
        OUT_OF_STEP: "`full_tensor()` is an all-gather: every rank must call it, for "
        "every parameter, also those ranks that return nothing.",
    },
    otherwise="Rank 0 returns the whole parameters, trained as one process trains them "
    "with the rows of all ranks.",
    hints=(
        "Print the loss of each step: does it fall? Then look at the order of the "
        "first lines. And which ranks take part in the last ones?",
        "fully_shard makes *new* parameters. It groups all that are in no unit yet. "
        "And `full_tensor()` is a collective.",
        "The three repairs:\n"
        "  for layer in model: fully_shard(layer)     # before the model\n"
        "  optimizer = ...                            # after fully_shard\n"
        "  for name, p in ...:\n"
        "      whole = p.full_tensor()                # on all ranks\n"
        "      ...                                    # rank 0 alone keeps it\n"
        "and the other ranks return None.",
    ),
)

# --------------------------------------------------------------------- spot_the_pile

ROWS, WIDTH = 3, 12
UNITS_AT_ONCE = "whole units at once"
GRADIENTS_AT_ONCE = "whole gradients at once"
WHOLE_IN_THE_END = "whole units in the end"
WITHOUT_GRADIENT = "units without a gradient"


class Counts:
    """What of a model is in memory, counted in units.

    Attributes:
        handed_out: weak references to the memory of the gradients that units returned.
        on_their_way: the tensors of the requests that nobody has waited for.
        most_gradients: different ones of these in memory at once, at most.
    """

    def __init__(self):
        self.whole = self.most_whole = self.requests = self.most_gradients = 0
        self.handed_out, self.on_their_way = [], []

    def note_gradients(self):
        """Count whole gradients: those on their way, and those that somebody keeps."""
        kept = {one.cdata for one in self.handed_out if not one.expired()}
        sent = {one.untyped_storage()._cdata for one in self.on_their_way}
        self.most_gradients = max(self.most_gradients, len(kept | sent))


class Request:
    """A reduce-scatter on its way; it keeps the whole gradient until it is awaited."""

    def __init__(self, gradient, counts):
        n = dist.get_world_size()
        self._whole, self._counts = gradient, counts
        counts.on_their_way.append(gradient)
        counts.requests += 1
        counts.note_gradients()
        self._rows = torch.empty(n, gradient.numel() // n)
        send = gradient.reshape(-1).clone()  # gloo lets go of it late
        self._work = dist.all_to_all_single(self._rows.view(-1), send, async_op=True)

    def wait(self):
        """This rank's part of the sum over the ranks. Frees the whole gradient."""
        self._work.wait()
        under_way = self._counts.on_their_way
        under_way[:] = [one for one in under_way if one is not self._whole]
        self._whole = None
        return self._rows.sum(0)


class LinearUnit:
    """x @ weight, where each rank has a part of the weight's rows."""

    def __init__(self, number, counts):
        n, rank = dist.get_world_size(), dist.get_rank()
        weight = whole_numbers((WIDTH, WIDTH), 60 + number) / 8
        self.shard = weight.reshape(n, -1)[rank].clone()
        self.grad = None
        self._counts, self._whole = counts, None

    def gather(self):
        if self._whole is not None:
            raise RuntimeError("This unit is whole already.")
        pieces = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, self.shard)
        self._whole = torch.cat(pieces).view(-1, WIDTH)
        self._counts.whole += 1
        self._counts.most_whole = max(self._counts.most_whole, self._counts.whole)

    def free(self):
        if self._whole is None:
            raise RuntimeError("This unit is not whole: there is nothing to free.")
        self._whole = None
        self._counts.whole -= 1

    def forward(self, x):
        self._input = x
        return x @ self._need()

    def backward(self, grad):
        gradient = self._input.t() @ grad
        self._counts.handed_out.append(StorageWeakRef(gradient.untyped_storage()))
        self._counts.note_gradients()
        return grad @ self._need().t(), gradient

    def reduce_scatter(self, gradient):
        return Request(gradient, self._counts)

    def _need(self):
        if self._whole is None:
            raise RuntimeError("This unit is not whole: call gather() first.")
        return self._whole


def observe_backward(answer, n_units):
    counts = Counts()
    units = [LinearUnit(number, counts) for number in range(n_units)]
    x = whole_numbers((ROWS, WIDTH), 70 + dist.get_rank())
    for unit in units:
        unit.gather()
        x = unit.forward(x)
        unit.free()
    counts.most_whole = 0
    answer(units, torch.ones_like(x))
    return {
        UNITS_AT_ONCE: AtMost(max(2, counts.most_whole)),
        "reduce-scatters": counts.requests,
        GRADIENTS_AT_ONCE: AtMost(max(2, counts.most_gradients)),
        WHOLE_IN_THE_END: counts.whole,
        WITHOUT_GRADIENT: sum(unit.grad is None for unit in units),
    } | {f"gradient of unit {i}": unit.grad for i, unit in enumerate(units)}


SPOT_THE_PILE = Task(
    id="08.spot_the_pile",
    title="Spot what piles up",
    stars=2,
    cases=((6,), (1,), (3,)),
    observe=observe_backward,
    misses=(
        Miss(
            "        unit.free()\n",
            "",
            "Nobody frees the units, so in the end the whole model is in memory. A "
            "unit's weight is not needed any more when its backward is over.",
        ),
        Miss(
            "if on_its_way",
            "if False",
            "The whole gradients pile up. A request keeps its gradient until you wait "
            "for it: wait for the one before when the next one is ready to go, or at "
            "once. And keep no gradient yourself, in a list for example.",
        ),
        Miss(
            "reduce_scatter(gradient)",
            "reduce_scatter(gradient / n)",
            "What is sent is a copy: `gradient / n` is a new tensor, as large, beside "
            "the one that the unit returned. With the next unit's there are three. "
            "Divide in place (`gradient /= n`), or divide what wait() returns.",
        ),
        Miss(
            " / n",
            "",
            "The memory is right. But that is the sum over the ranks: wait() returns "
            "the sum, and a gradient is the mean.",
        ),
        Miss(
            " / n",
            " / len(units)",
            "It is divided by the number of units. A mean over the ranks is divided by "
            "the world size.",
        ),
        Miss(
            "before.grad =",
            "unit.grad =",
            "That is the gradient of another unit. A request belongs to the unit that "
            "started it: keep both together, as a pair.",
        ),
        Miss(
            "gradient = unit.backward(grad)",
            "gradient = unit.backward(grad)\n        dist.all_reduce(gradient); "
            "unit.grad = gradient.view(n, -1)[dist.get_rank()] / n; unit.free(); "
            "continue",
            "An all-reduce brings every rank the whole gradient, with twice the "
            "traffic. Each unit's gradient goes through "
            "`unit.reduce_scatter(gradient)`, once.",
        ),
    ),
    because={
        UNITS_AT_ONCE: "Too many units are whole at the same time. Gather a unit when "
        "its turn comes, and free it when its backward is over.",
        "reduce-scatters": "Each unit's gradient goes through "
        "`unit.reduce_scatter(gradient)`, once.",
        GRADIENTS_AT_ONCE: "The whole gradients pile up. A request keeps its gradient "
        "until you wait for it: wait for the one before when the next one is ready to "
        "go, or at once. And keep no gradient yourself, in a list for example.",
        WHOLE_IN_THE_END: "A unit is still whole when the backward is over.",
        WITHOUT_GRADIENT: "A unit has no gradient in the end. What wait() returns goes "
        "into `unit.grad`, on every rank. Is the last reduce-scatter awaited as well, "
        "after the loop?",
    },
    errors={
        "there is nothing to free": "free() was called for a unit that is not whole. "
        "Call it once for each gather().",
        "call gather() first": "A unit computes with its whole weight: gather it "
        "before its backward, and free it after that.",
        "whole already": "gather() was called for a unit that is whole. Call it once, "
        "before its backward.",
    },
    otherwise="Each unit's grad is this rank's part of the mean gradient: what wait() "
    "of its own request returns, divided by the world size.",
    hints=(
        "Count, line by line: what is whole after two rounds of the loop, and what "
        "after six?",
        "Three repairs: free a unit when its backward is over; let at most one "
        "reduce-scatter be on its way while the next unit computes; take the mean.",
        "The shape of it:\n"
        "  before = None                       # the unit on its way, and its request\n"
        "  for unit in reversed(units):\n"
        "      unit.gather()\n"
        "      grad, gradient = unit.backward(grad)\n"
        "      ...                             # free it\n"
        "      ...                             # wait for `before`, if there is one\n"
        "      before = unit, unit.reduce_scatter(gradient)\n"
        "  ...                                 # wait for the last one\n"
        "where to wait is: unit.grad = request.wait() / ...",
    ),
)

TASKS = (
    ZERO_TABLE,
    PREDICT_PEAK,
    FLAT_SHARD,
    REDUCE_SCATTER,
    ONE_UNIT,
    SPOT_THE_OPTIMIZER,
    SPOT_THE_PILE,
)
