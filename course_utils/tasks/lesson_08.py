"""Lesson 08, FSDP: the tasks of its exercise."""

import torch
import torch.distributed as dist
from torch import nn

from course_utils.measure.alive import alive, listed_in, new_bytes, settled
from course_utils.measure.state import modes_of
from course_utils.measure.traffic import Sent, everything_sent
from course_utils.questions.lesson_08 import PREDICT_PEAK
from course_utils.tasks import sharding
from course_utils.tasks.compare import difference
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.task import OUT_OF_STEP, AtMost, Miss, Task

ZERO_TABLE = Task(
    id="08.zero_table",
    title="The ZeRO table",
    stars=1,
    where="here",
    cases=((7.5e9, 64, 12), (1000, 1, 12), (350e6, 4, 8), (1e12, 99, 4)),
    misses=(
        Miss(
            "optimizer_bytes *",
            "12 *",
            "`optimizer_bytes` is an argument, and not always 12.",
        ),
        Miss(
            "weights + gradients + optimizer / n",
            "weights + gradients / n + optimizer",
            "Stage 1 shards the optimizer's state. The gradients follow in stage 2.",
        ),
        Miss(
            "weights + (gradients + optimizer) / n",
            "weights + gradients / n + optimizer",
            "Stage 2 shards the gradients, and also what stage 1 shards: the "
            "optimizer's state.",
        ),
        Miss(
            "        (weights + gradients + optimizer) / n",
            "weights + (gradients + optimizer) / n",
            "In stage 3 the parameters are sharded, too.",
        ),
        Miss("2 * parameters", "4 * parameters", "bfloat16 has 2 bytes, not 4."),
    ),
    otherwise="In bytes: each parameter has 2 of weight, 2 of gradient, and "
    "optimizer_bytes. Each stage splits one more part.",
    hints=(
        "In stage 0 everything is on each GPU. Each stage splits one more part.",
        "Stage 1 divides the optimizer's bytes by world_size, stage 2 also those of "
        "the gradients, stage 3 also those of the weights.",
        "The shape of it:\n"
        "  weights, gradients, optimizer = 2 * parameters, ..., ...\n"
        "  return [\n"
        "      weights + gradients + optimizer,\n"
        "      ...,                          # divide one more in each line\n"
        "  ]",
    ),
)

# ------------------------------------------------------------------------- flat_shard

SHAPES = {
    "tensors of 3 and 4 numbers": ((3,), (4,)),
    "two matrices and a vector, 26 numbers": ((3, 5), (2, 4), (3,)),
    "a single number, without a dimension": ((),),
    "12 numbers in one tensor": ((4, 3),),
}


def tensors_of(kind):
    return [whole_numbers(shape, 3 + i) for i, shape in enumerate(SHAPES[kind])]


def observe_shard(answer, kind):
    before, tensors = alive(), tensors_of(kind)
    unit = answer(tensors)
    untouched = difference(tensors, tensors_of(kind), 0.0) is None
    del tensors
    shard = unit.shard.detach().clone()
    unit.unshard()  # what it returns is thrown away
    limit = 2 * shard.nbytes
    held = settled(lambda: new_bytes(before), limit, 0.2) - shard.nbytes
    held, whole = held + listed_in(unit), unit.unshard()
    if isinstance(whole, list | tuple):  # on one rank, perhaps views of the shard
        whole = [one.detach().clone() if torch.is_tensor(one) else one for one in whole]
    same = torch.equal(unit.shard.detach(), shard)
    with torch.no_grad():
        unit.shard += dist.get_rank() + 1  # as an optimizer would
    return {
        "numbers in the shard": shard.numel(),
        "the shard": shard,
        "the given tensors are as they were": untouched,
        "bytes that the object keeps": AtMost(held),
        "unshard()": whole,
        "the shard is the same after unshard()": same,
        "unshard() when each rank r has added r + 1 to its shard": unit.unshard(),
    }


PIECE = "flat[rank * size : (rank + 1) * size]"
CUT_OFF = "Cut the padding off before you split, and round the size of a shard *up*."

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
            "(0, n * size - len(flat))",
            "(n * size - len(flat), 0)",
            "The zeros come first. They belong at the end.",
        ),
        Miss(PIECE, "flat[rank::n]", "That is every n-th number. A shard has no gaps."),
        Miss(PIECE, "flat[:size]", "Each rank has rank 0's shard. Cut out its own."),
        Miss(PIECE, "flat", "That is the whole flat tensor. Cut out a piece."),
    ),
    because={
        "in the shard": "Each shard has ceil(numbers / world_size) numbers. Append "
        "zeros where the division leaves a remainder, then cut.",
        "as they were": "The given list or its tensors have changed. `torch.cat` and "
        "`F.pad` make new tensors: write into those.",
        "object keeps": "The shard is right, but more is kept. A slice is a view, and "
        "keeps the memory of the whole flat tensor: `clone()` it. Keep only the shapes "
        "of the given tensors. Keep nothing of what unshard() gathers.",
        "the same": "unshard() has changed the shard. Gather into other memory.",
        "has added": "unshard() must gather what is in the shards now.",
    },
    errors={
        "split_sizes": CUT_OFF,
        "for input of size": CUT_OFF,
        "dimension": "Join flat tensors: `tensor.reshape(-1)`.",
        OUT_OF_STEP: "An all-gather wants a shard of the same size from every rank: "
        "append zeros before you cut.",
    },
    otherwise="The shard is a copy of this rank's piece of one flat, padded tensor. "
    "unshard() returns the tensors in their order and shapes, without the padding.",
    hints=(
        "Which of your tensors is a view, and what does a view keep in memory?",
        "Append zeros up to size · world_size, where size = ceil(numbers / "
        "world_size), and copy this rank's slice. unshard: gather, cut off, split.",
        "The shape of it:\n"
        "  flat = torch.cat(...)              # all tensors, flat\n"
        "  flat = F.pad(flat, (0, ...))\n"
        "  self.shard = ...                   # a copy of this rank's slice\n"
        "and of unshard:\n"
        "  dist.all_gather(shards, ...)\n"
        "  ...                                # join, cut off the zeros, split, view",
    ),
)

# --------------------------------------------------------------------- reduce_scatter


def gradient_of(size, rank, n):
    # The long one has numbers that 16 bits cannot hold, so rounding would show.
    return (whole_numbers((n * size,), 21 + rank) * (1 + 2.0**-12 * (size > 4)),)


def observe_part(answer, gradient):
    with sharding.called("recv_anysource", "barrier") as methods:
        with everything_sent() as sent:
            part = answer(gradient)
    if not torch.is_tensor(part):
        return part
    sources = {call.peer for call in sent.messages if call.kind == "recv"}
    from_anybody = "recv_anysource" in methods and len(sources) > 1  # not in a ring
    return {
        "its part": part,
        "torch's own reduce-scatters": sent.count("reduce-scatter"),
        "pieces sent, of 4,000 bytes": AtMost(sent.nbytes // 4000),  # but for trifles
        "each recv names its source": not from_anybody or "barrier" in methods,
        "bytes of memory that it holds on to": AtMost(part.untyped_storage().nbytes()),
    }


REDUCE_SCATTER = Task(
    id="08.reduce_scatter",
    title="Reduce-scatter a gradient",
    stars=2,
    inputs=gradient_of,
    cases=(4, 1, 1000),
    observe=observe_part,
    forbids=sharding.REDUCE_SCATTERS,
    instead="Use `isend` and `irecv`, or a ring, or `all_to_all_single`.",
    misses=(
        Miss("= pieces[rank]", "= 0", "Its own piece is missing."),
        Miss(
            "mean(0)", "sum(0).add(rows[rank]).div(n)", "It adds its own piece twice."
        ),
        Miss(
            "isend(pieces[other]", "isend(pieces[rank]", "Send rank j the j-th piece."
        ),
        Miss("rows.mean(0)", "pieces[rank].clone()", "Nothing of the others is in it."),
    ),
    because={
        "torch's own": "That is what you build here. Send the pieces.",
        "pieces sent": "The result is right, but too much was sent. An all-reduce "
        "brings every rank the whole sum, a reduce brings it to one rank, and an "
        "all-gather brings all gradients. Send each rank only the piece it needs.",
        "its source": "The result is right here, but a recv without a source may take "
        "a piece of the next gradient. Name the source: `dist.recv(piece, other)`.",
        "holds on": "The result is right, but it is a view of a larger tensor, and "
        "keeps all of that in memory. `clone()` it.",
    },
    errors={
        "should not be the same as the rank": "A rank cannot send to itself.",
        OUT_OF_STEP: "Somebody waits for a message that nobody sends, or everybody "
        "sends and nobody receives. Start all, then wait for all.",
    },
    otherwise="Rank r gets the r-th of n pieces of the mean gradient, in float32.",
    hints=(
        "Cut the gradient into n pieces. Who needs which of yours?",
        "Piece r of every rank's gradient goes to rank r, directly. Start all sends "
        "and all receives, wait for all of them, then take the mean.",
        "The shape of it:\n"
        "  pieces = gradient.chunk(n)\n"
        "  rows = torch.empty(n, len(pieces[0]))  # one row for each rank's piece\n"
        "  for other in range(n):\n"
        "      ...                    # isend and irecv, unless it is this rank\n"
        "  ...                        # wait for all of them, take the mean",
    ),
)

# --------------------------------------------------------------------------- one_unit


def observe_unit(answer, kind):
    rank, before, module = dist.get_rank(), alive(), sharding.module_of(kind)
    numbers = sum(p.numel() for p in module.parameters())
    modes, unit, report = modes_of(module), answer(module), {}
    room = unit.shard.nbytes + 2 * numbers  # half as much as the whole, for trifles

    def is_large(*known):  # what is there beside the parameters and these
        known = sum(tensor.nbytes for tensor in known if tensor is not None)
        known += sharding.bytes_behind(module)
        return settled(lambda: new_bytes(before) - known, room) > room

    for step in range(3):
        if kind != sharding.NORMED:
            unit.shard.grad = None
        batch = whole_numbers((2, 3), 200 + 10 * rank + step) / 8
        batch.requires_grad_(kind != sharding.TWO_LAYERS)  # as in the midst of a model
        scale = (torch.tensor(2.0),) if kind == sharding.NORMED else ()
        with Sent() as forward:
            output = unit(batch, *scale)
        if output is None:
            return None
        seen = {
            "all-gathers in the forward": forward.count("all-gather"),
            "whole bytes between forward and backward": sharding.bytes_behind(module),
        }
        if step == 0 and kind == sharding.TWO_LAYERS:  # larger than what layers note
            seen["a copy of the parameters"] = is_large()
        with everything_sent() as backward:
            output.sum().backward()
        sent = sum(part for name, part in backward.calls if name != "all-gather")
        seen |= {
            "all-gathers in the backward": backward.count("all-gather"),
            "whole bytes after the backward": sharding.bytes_behind(module),
            "whole gradients": sum(p.grad is not None for p in module.parameters()),
            "pieces sent in the backward": AtMost(round(sent) // unit.shard.nbytes),
        }
        result, of_input, grad = output.detach().clone(), batch.grad, unit.shard.grad
        del output, batch
        if step == 0:
            seen["a copy of all gradients"] = is_large(result, of_input, grad)
        seen |= {
            "gradient of the shard": None if grad is None else grad.clone(),
            "the output": result,
            "the module computes in training mode": False not in modes,
            "gradient of the input": of_input,
        }
        if grad is not None:
            with torch.no_grad():  # SGD; an optimizer of torch would import much
                unit.shard -= grad / 16
        report |= {f"step {step}: {name}": value for name, value in seen.items()}
    return report


ADD = "part if grad is None else grad + part"
GONE = (
    "Somebody computed with parameters that had been freed. Gather before the forward, "
    "and again before the backward: `output.register_hook`."
)
RETURNS_NONE = "A hook must return None: all else replaces the gradient."
PADDED = "Join all gradients to one, padded: it must be as long as `self.whole`."

ONE_UNIT = Task(
    id="08.one_unit",
    title="FSDP for one unit",
    stars=3,
    ranks=(3, 1, 2),
    cases=((sharding.TWO_LAYERS,), (sharding.TIED,), (sharding.NORMED,)),
    observe=observe_unit,
    seconds=15.0,
    forbids=sharding.REDUCE_SCATTERS,
    instead="Use the methods of Unit, a hook on the output, and your tasks 3 and 4.",
    misses=(
        Miss(
            "reduce_scatter(flat)",
            "flat.chunk(dist.get_world_size())[dist.get_rank()].clone()",
            "That is the rank's own gradient. Nothing of the others is in it.",
        ),
        Miss(
            ADD, "part", "Nobody called zero_grad(): add to the gradient that is there."
        ),
        Miss(f"self.shard.grad = {ADD}", "pass", "The shard needs a gradient."),
    ),
    because={
        "in the forward": "A forward takes one all-gather, before the module computes.",
        "between forward": "After the forward the parameters are still whole. Free "
        "them: the backward comes much later.",
        "copy of the parameters": "A copy of the parameters is still there: in an "
        "attribute, or in the graph because the module computed with the copy.",
        "gathers in the backward": "A backward of the unit takes one all-gather, "
        "before it. (A hook on the module is registered once, in `__init__`.)",
        "after the backward": "After each backward, free the parameters.",
        "whole gradients": "Whole ones are left: set each parameter's `.grad` to None.",
        "pieces sent": "More is sent than a reduce-scatter of one flat gradient needs. "
        "Call yours of task 4 once. (An all-reduce sends twice as much.)",
        "copy of all": "Something as large as all gradients is left. Is it an "
        "attribute? Or is the shard's gradient a view of it? `clone()` it.",
        "the output": "forward must return what the module returns, as it is.",
        "training mode": "The module has computed in eval mode: leave its mode alone.",
        "of the input": "The layers before get no gradient: is the input cut off?",
    },
    errors={
        OUT_OF_STEP: f"The ranks' collectives do not fit. {PADDED}",
        "SIG": GONE,  # SIGSEGV or SIGBUS
        "out of bounds for storage": GONE,
        "'NoneType' object is not": "`register_hook(self.gather())` gathers at once. "
        "Hand over a function: `lambda grad: self.gather()`.",
        "but hook returned": RETURNS_NONE,
        "has changed the size": RETURNS_NONE,
        "assign a gradient of size": "The shard's gradient has the shape of the shard: "
        "it is this rank's piece, as `reduce_scatter` returns it.",
        "is invalid for input of size": "What was freed is to be used, or a flat "
        "tensor is too short. Does your FlatShard of task 3 pass its check?",
        " size": PADDED,
    },
    otherwise="The gradient of the shard is this rank's part of the flat mean "
    "gradient, with zeros for the padding at the end.",
    hints=(
        "Four moments: before the forward, after it, before the backward, after it. "
        "Which method of Unit belongs to each?",
        "forward: gather, compute, free, and a hook on the output for the second "
        "gather. after_backward: what must be gone before reduce_scatter needs memory? "
        "And which length must it get?",
        "The shape of it:\n"
        "  forward:         ...                          # three calls, and a hook:\n"
        "                   output.register_hook(lambda grad: ...)\n"
        "  after_backward:  flat = torch.cat(...)        # all gradients\n"
        "                   ...                          # drop them, free; pad to\n"
        "                                                # the length of self.whole\n"
        "                   part = reduce_scatter(flat)  # your task 4\n"
        "                   ...                          # add to the shard's .grad",
    ),
)

# ----------------------------------------------------------------- spot_the_optimizer


def observe_training(answer):
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)  # everywhere the same; 2 ranks can't halve the last layer
    first, middle = [nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh()], nn.Linear(16, 16)
    model = nn.Sequential(*first, middle, nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    largest = 4 * 17 * n * -(-16 // n)  # weight and bias of the middle one, padded
    modes = modes_of(model)
    torch.manual_seed(rank)
    labels = torch.arange(rank, rank + 8) % 3
    batches = [(torch.randn(8, 6), (labels + step) % 3) for step in range(3)]
    with sharding.Gathers() as gathers, sharding.announced() as kept:
        state = answer(model, batches, 0.05)
    if rank == 0 and not isinstance(state, dict):
        return state
    mine = state.items() if rank == 0 else ()
    others = "None" if rank == 0 or state is None else f"a {type(state).__name__}"
    return {
        "the largest layer is gathered in float32": gathers.nbytes >= largest,
        "bytes of the largest all-gather": AtMost(gathers.nbytes),
        **{
            f"rank 0's {k}": p.to_local() if hasattr(p, "to_local") else p
            for k, p in mine
        },
        # In 3 steps, of five layers; the last may stay whole: its backward comes next.
        "layers are gathered again": gathers.in_backward >= 3 * 4,
        "the model trains in training mode": False not in modes,
        "the result of the other ranks": others,
        "whole tensors that others keep": AtMost(max([4, *kept]) if rank else 0),
    }


UNITS = """\
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
"""
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)\n"

SPOT_THE_OPTIMIZER = Task(
    id="08.spot_the_optimizer",
    title="Spot the bugs in a copied script",
    stars=2,
    ranks=(2, 3),  # with 3, FSDP's first steps take twice as long
    observe=observe_training,
    seconds=30.0,
    imports=("torch._dynamo", "torch.distributed.fsdp"),
    tolerance=1e-4,
    misses=(
        Miss(
            UNITS + OPTIMIZER,
            OPTIMIZER + UNITS,
            "The parameters are those of the start. Make the optimizer after "
            "`fully_shard`, call zero_grad() after the step, and gather what you "
            "return after the last step.",
        ),
        Miss("p.full_tensor()", "p.to_local()", "These are shards, not whole."),
        Miss(
            "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
            "pass",
            "The gradients' norm was not clipped between `backward()` and `step()`.",
        ),
        Miss("optimizer.zero_grad()", "break", "Only one batch was trained with."),
    ),
    because={
        "layers are gathered again": "Layers stay whole from the forward to the "
        "backward, as with `reshard_after_forward=False`. Each layer with parameters "
        "should be a unit, and so should the model: the outermost unit stays whole.",
        "in float32": "The largest layer was never gathered whole and in float32. Is "
        "the model still sharded? Or is there a MixedPrecisionPolicy?",
        "training mode": "A model in eval mode does not train as it should.",
        "largest all-gather": "Several layers were gathered together. Call "
        "`fully_shard(layer)` for each layer first, then for the model.",
        "other ranks": "All ranks call full_tensor(), but only rank 0 keeps the "
        "result. The others return None, not an empty dictionary.",
        "others keep": "This rank keeps one whole tensor after the other: in the end "
        "the whole model. Let only rank 0 put them into a dictionary.",
    },
    errors={
        "Invariant encountered": "fully_shard takes all parameters that are in no unit "
        "yet. Layers first, then the model.",
        OUT_OF_STEP: "`full_tensor()` is an all-gather: every rank must call it.",
    },
    otherwise="Rank 0 returns the whole parameters, trained as one process trains them "
    "with the rows of all ranks.",
    hints=(
        "Does the loss fall? Look at the order of the first lines. And which ranks "
        "take part in the last ones?",
        "fully_shard makes *new* parameters. It groups all that are in no unit yet. "
        "And `full_tensor()` is a collective.",
        "The shape of it:\n"
        "  ...                            # units first: each layer, then the model\n"
        "  optimizer = ...\n"
        "  ...                            # train, as it is\n"
        "  for name, p in model.named_parameters():\n"
        "      ...                        # every rank calls it, only rank 0 keeps it",
    ),
)

# --------------------------------------------------------------------- spot_the_pile


def observe_backward(answer, n_units):
    counts = sharding.Counts()
    weights = [whole_numbers((12, 12), 60 + i) / 8 for i in range(n_units)]
    units = [sharding.LinearUnit(weight, counts) for weight in weights]
    x = whole_numbers((3, 12), 70 + dist.get_rank())
    for unit in units:
        unit.gather()
        x = unit.forward(x)
        unit.free()
    counts.most_whole = 0
    given, grad = list(units), torch.ones_like(x)
    answer(given, grad)
    as_given = given == units and torch.equal(grad, torch.ones_like(x))
    return {
        "whole units at once": AtMost(max(2, counts.most_whole)),
        "reduce-scatters": counts.requests,
        "whole gradients at once": AtMost(max(2, counts.most_gradients)),
        "whole units in the end": counts.whole,
        "units without a gradient": sum(unit.grad is None for unit in units),
        **{f"gradient of unit {i}": unit.grad for i, unit in enumerate(units)},
        "`units` and `grad` are as they were": as_given,
    }


SPOT_THE_PILE = Task(
    id="08.spot_the_pile",
    title="Spot what piles up",
    stars=2,
    cases=((6,), (1,), (3,)),
    observe=observe_backward,
    misses=(
        Miss(" / n", "", "wait() returns the sum over the ranks: divide it."),
        Miss(" / n", " / len(units)", "It is divided by the number of units."),
        Miss("before.grad =", "unit.grad =", "That is another unit's gradient."),
    ),
    because={
        "whole units at once": "Too many units are whole. Gather a unit when its turn "
        "comes, and free it when its backward is over.",
        "reduce-scatters": "Each unit's gradient goes through "
        "`unit.reduce_scatter(gradient)`, once, not through an all-reduce.",
        "whole gradients": "The whole gradients pile up. A request keeps its gradient "
        "until you wait for it: wait for each before you start the next. And keep no "
        "gradient yourself, in a list for example. `gradient / n` is one more: divide "
        "what wait() returns.",
        "in the end": "A unit is still whole when the backward is over.",
        "without a gradient": "A unit has no gradient in the end. What wait() returns "
        "goes into `unit.grad`, on every rank. Is the last one awaited, too?",
        "as they were": "The result is right, but an argument is not what it was: "
        "`pop` and `grad /= n` change what the caller may still need.",
    },
    otherwise="Each unit's grad is this rank's part of the mean gradient: what wait() "
    "returns, divided by the world size.",
    hints=(
        "What is whole after two rounds of the loop, and what after six?",
        "Free a unit when its backward is over. Let at most one reduce-scatter run "
        "while the next unit computes. Take the mean.",
        "The shape of it:\n"
        "  for unit in reversed(units):\n"
        "      ...                  # gather, backward, free\n"
        "      ...                  # wait for the one that runs, if there is one\n"
        "      running = ...        # start this one\n"
        "  ...                      # wait for the last one",
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
