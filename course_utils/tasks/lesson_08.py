"""Lesson 08, FSDP: the tasks of its exercise."""

import torch
import torch.distributed as dist
from torch import nn

from course_utils.measure.messages import recorded
from course_utils.measure.traffic import Sent
from course_utils.questions.lesson_08 import PREDICT_PEAK
from course_utils.tasks import sharding
from course_utils.tasks.compare import difference
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.memory import alive, listed_in, new_bytes, settled
from course_utils.tasks.task import OUT_OF_STEP, AtMost, Miss, Task

ZERO_TABLE = Task(
    id="08.zero_table",
    title="The ZeRO table",
    stars=1,
    where="here",
    cases=((7.5e9, 64, 12), (1000, 1, 12), (350e6, 4, 8), (1e12, 99, 4)),
    misses=(
        Miss(
            "optimizer_bytes * parameters",
            "12 * parameters",
            "The optimizer's bytes are an argument. They are not always 12.",
        ),
        Miss(
            "weights + gradients + optimizer / n",
            "weights + gradients / n + optimizer",
            "Stage 1 shards the optimizer's state. The gradients follow in stage 2.",
        ),
        Miss(
            "        (weights + gradients + optimizer) / n",
            "weights + (gradients + optimizer) / n",
            "In stage 3 the parameters are sharded, too.",
        ),
        Miss(
            "weights + gradients + optimizer / n,\n        weights + (",
            "optimizer / n, (",
            "What is not shared out is still there, whole. Add it.",
        ),
        Miss("2 * parameters", "4 * parameters", "bfloat16 has 2 bytes, not 4."),
        Miss("/ n", "/ parameters // n * parameters", "`//` rounds down. Take `/`."),
    ),
    otherwise="In bytes: each parameter has 2 of weight, 2 of gradient, and "
    "optimizer_bytes. Each stage shares out one part more.",
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
    size = unit.shard.detach().nbytes
    held, listed = settled(lambda: new_bytes(before), size, 0.2), listed_in(unit)
    shard = unit.shard.detach().clone()
    unit.unshard()  # what it returns is thrown away
    left = settled(lambda: new_bytes(before) - shard.nbytes - held, 0)
    more, whole = listed_in(unit) - listed, unit.unshard()
    if isinstance(whole, list | tuple):  # on one rank, perhaps views of the shard
        whole = [one.detach().clone() if torch.is_tensor(one) else one for one in whole]
    same = torch.equal(unit.shard.detach(), shard)
    with torch.no_grad():
        unit.shard += dist.get_rank() + 1  # as an optimizer would
    return {
        "numbers in the shard": shard.numel(),
        "the shard": shard,
        "the given tensors are as they were": untouched,
        "bytes that the object keeps": AtMost(held + listed),
        "unshard()": whole,
        "the shard is the same after unshard()": same,
        "unshard() when each rank r has added r + 1 to its shard": unit.unshard(),
        "bytes that unshard() leaves behind": AtMost(left + more),
    }


PIECE = "flat[rank * size : (rank + 1) * size]"
FLAT_FIRST = "Make each tensor flat before you join them: `tensor.reshape(-1)`."
CUT_OFF = (
    "Is the padding still there? Cut it off before you split. Or are numbers lost? "
    "Round the size of a shard *up*."
)

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
            "-(-len(flat) // n)",
            "len(flat) // n + 1",
            "Where world_size divides the length, no zeros are needed: `-len(flat) % "
            "n` is 0, `n - len(flat) % n` is n.",
        ),
        Miss(
            "(0, n * size - len(flat))",
            "(n * size - len(flat), 0)",
            "The zeros stand in front. They belong behind.",
        ),
        Miss(PIECE, "flat[rank::n]", "That is every n-th number. A shard has no gaps."),
        Miss(PIECE, "flat[:size]", "Each rank has rank 0's shard. Cut out its own."),
        Miss(PIECE, "flat", "That is the whole flat tensor. Cut out a piece."),
    ),
    because={
        "in the shard": "Each shard has ceil(numbers / world_size) numbers. Append "
        "zeros, then cut.",
        "as they were": "The given tensors have changed. It is enough to keep no "
        "reference to them.",
        "object keeps": "The shard is right, but more is kept. Is it a slice? A slice "
        "is a view: it keeps the memory of the whole flat tensor. `clone()` it. And "
        "of the given tensors, keep the shapes only.",
        "behind": "What unshard() has gathered stays. Keep it in a local variable.",
        "the same": "unshard() has changed the shard. Gather into other memory.",
        "has added": "The shards have been changed in the meantime, but unshard() "
        "still returns the old numbers. It must gather what is in them now.",
    },
    errors={
        "no attribute 'shard'": "The piece must be in `self.shard`.",
        "split_sizes": CUT_OFF,
        "for input of size": CUT_OFF,
        "dimension": FLAT_FIRST,
        OUT_OF_STEP: "An all-gather wants a shard of the same size from every rank, "
        "also from one that has nothing but padding: append zeros before you cut.",
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


def gradient_of(size, rank, n):
    # The long one has numbers that 16 bits cannot hold, so rounding would show.
    return (whole_numbers((n * size,), 21 + rank) * (1 + 2.0**-12 * (size > 4)),)


def observe_part(answer, gradient):
    with sharding.called("recv_anysource", "barrier") as methods:
        with Sent() as sent, recorded() as calls:
            part = answer(gradient)
    if not torch.is_tensor(part):
        return part
    n, nbytes = dist.get_world_size(), sharding.sent_bytes(sent, calls)
    limit = gradient.nbytes * (n - 1) // n
    sources = {call.peer for call in calls if call.kind == "recv"}
    from_anybody = "recv_anysource" in methods and len(sources) > 1  # not in a ring
    return {
        "its part": part,
        "torch's own reduce-scatters": sent.count("reduce-scatter"),
        "bytes sent": AtMost(nbytes),
        # Not every byte is: an all-to-all with sizes is counted as one without.
        "the numbers were seen to be sent": 2 * nbytes >= limit,
        "each recv names its source": not from_anybody or "barrier" in methods,
        "bytes of memory that it holds on to": AtMost(part.untyped_storage().nbytes()),
    }


NOT_SEEN = (
    "The result is right, but this rank was seen to send less than the others need of "
    "it. Did the numbers go another way, by the store or by a backend's own methods? "
    "Send with `isend` and `irecv`, or `all_to_all_single`."
)
ITSELF = "A rank cannot send to itself. Its own piece does not travel."

REDUCE_SCATTER = Task(
    id="08.reduce_scatter",
    title="Reduce-scatter a gradient",
    stars=2,
    inputs=gradient_of,
    cases=(4, 1, 1000),
    observe=observe_part,
    forbids=sharding.REDUCE_SCATTERS,
    instead="`isend` and `irecv` to and from every other rank, or a ring, or "
    "`all_to_all_single`.",
    misses=(
        Miss(
            "rows[rank] = pieces[rank]", "rows[rank] = 0", "Its own piece is missing."
        ),
        Miss(
            "mean(0)", "sum(0).add(rows[rank]).div(n)", "Its own piece is added twice."
        ),
        Miss(
            "isend(pieces[other]",
            "isend(pieces[rank]",
            "Each rank has sent its own piece. But rank j needs the j-th.",
        ),
        Miss("rows.mean(0)", "pieces[rank].clone()", "Nothing of the others is in it."),
    ),
    because={
        "torch's own": "It would work: but it is what you build here. Send the pieces.",
        "bytes sent": "The result is right, but too much was sent. An all-reduce "
        "brings every rank the whole sum, an all-gather all gradients; and where "
        "everything passes through one rank, that one sends more than its share. Send "
        "each rank only the piece that it needs.",
        "were seen": NOT_SEEN,
        "its source": "The result is right here. But a recv without a source takes "
        "whatever comes first, and a rank that is ahead has sent its piece of the "
        "next unit already. Name the source: `dist.recv(piece, other)`.",
        "holds on": "The result is right, but it is a view of a larger tensor, such as "
        "a copy of the whole gradient, and keeps all of that in memory. `clone()` it.",
    },
    errors={
        "should not be the same as the rank": ITSELF,
        "is this rank itself": ITSELF,
        "there is no rank": "There is no such rank: they go from 0 to world size - 1.",
        OUT_OF_STEP: "Somebody waits for a message that nobody sends, or everybody "
        "sends and nobody receives. Start all, then wait for all.",
    },
    otherwise="Rank r gets the r-th of n pieces of the mean over all ranks' gradients, "
    "in float32 all the way.",
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


def observe_unit(answer, kind):
    rank, before, module = dist.get_rank(), alive(), sharding.module_of(kind)
    numbers = sum(p.numel() for p in module.parameters())
    unit, report = answer(module), {}
    room = unit.shard.nbytes + 2 * numbers  # half as much as the whole, for trifles

    def others():  # than the parameters
        return new_bytes(before) - sharding.bytes_behind(module)

    for step in range(3):
        if kind != sharding.NORMED:
            unit.shard.grad = None
        batch = whole_numbers((2, 3), 200 + 10 * rank + step) / 8
        batch.requires_grad_(kind != sharding.TWO_LAYERS)  # as in the midst of a model
        with Sent() as forward:
            output = unit(batch)
        if output is None:
            return None
        seen = {
            "all-gathers in the forward": forward.count("all-gather"),
            "whole bytes between forward and backward": sharding.bytes_behind(module),
        }
        if (
            step == 0 and kind == sharding.TWO_LAYERS
        ):  # larger than what its layers note
            seen["no copy of the parameters"] = settled(others, room) <= room
        with Sent() as backward, recorded() as calls:
            output.sum().backward()
        gathered = sum(part for name, part in backward.calls if name == "all-gather")
        sent = sharding.sent_bytes(backward, calls) - round(gathered)
        seen |= {
            "all-gathers in the backward": backward.count("all-gather"),
            "whole bytes after the backward": sharding.bytes_behind(module),
            "whole gradients": sum(p.grad is not None for p in module.parameters()),
            "bytes sent in the backward": AtMost(sent),
        }
        result, of_input, grad = output.detach().clone(), batch.grad, unit.shard.grad
        del output, batch
        if step == 0:
            mine = sum(t.nbytes for t in (result, of_input, grad) if t is not None)
            left = settled(lambda mine=mine: others() - mine, room)
            seen["nothing as large as all gradients is left"] = left <= room
        seen |= {
            "gradient of the shard": None if grad is None else grad.clone(),
            "the output": result,
            "gradient of the input": of_input,
        }
        if grad is not None:
            with torch.no_grad():  # SGD; an optimizer of torch would import much
                unit.shard -= grad / 16
        limit = unit.shard.nbytes * (dist.get_world_size() - 1)
        seen["the shard after the step"] = unit.shard.detach().clone()
        seen["the numbers were seen to be sent"] = 2 * sent >= limit
        report |= {f"step {step}: {name}": value for name, value in seen.items()}
    return report


ADD = "part if grad is None else grad + part"
MODULE = "self.module(*args)"
GONE = (
    "Somebody computed with parameters whose memory had been given back. Gather before "
    "the forward, and again before the backward: `output.register_hook`. (On the "
    "module, hooks work from its next call on: register them in `__init__`, and a full "
    "backward pre-hook, which comes before the backward.)"
)
BUILT_ON = "This unit is built on tasks 3 and 4. Solve them, and run their cells."
PADDED = "Join all gradients to one, padded: it must be as long as `self.whole`."
NO_GRAPH = "No graph: is the hook on an input? Or was the forward run under no_grad?"

ONE_UNIT = Task(
    id="08.one_unit",
    title="FSDP for one unit",
    stars=3,
    ranks=(3, 1, 2),
    cases=((sharding.TWO_LAYERS,), (sharding.TIED,), (sharding.NORMED,)),
    observe=observe_unit,
    seconds=15.0,
    forbids=sharding.REDUCE_SCATTERS,
    instead="The methods of Unit, a hook on the output, and your tasks 3 and 4.",
    misses=(
        Miss(
            "reduce_scatter(flat)",
            "flat.chunk(dist.get_world_size())[dist.get_rank()].clone()",
            "That is the rank's own gradient. Nothing of the others is in it.",
        ),
        Miss(
            ADD,
            "part",
            "Nobody called zero_grad(): a gradient that is there already must be added "
            "to, not replaced. (`self.zero_grad()` drops that of the shard, too; "
            "`self.module.zero_grad()` does not.)",
        ),
        Miss(
            f"self.shard.grad = {ADD}",
            "pass",
            "The shard has no gradient: put the rank's part into `self.shard.grad`.",
        ),
        Miss(
            "self.free()\n        flat",
            "flat",
            "The parameters are still whole after the backward. Free them.",
        ),
        Miss(
            MODULE,
            f"{MODULE}.detach().requires_grad_()",
            "The backward did not come to the module: is the output cut off?",
        ),
    ),
    because={
        "in the forward": "A forward takes one all-gather, before the module computes.",
        "between forward": "After the forward the parameters are still whole. Free "
        "them: until the backward comes to this unit, others need the memory.",
        "no copy": "The parameters are freed after the forward, but something as large "
        "is still there: a copy? An attribute may hold it, or the graph: what the "
        "module computed with, autograd keeps until the backward.",
        "gathers in the backward": "One all-gather, before the unit's backward, is "
        "what it takes: `output.register_hook(...)`. (A hook on the module stays, so "
        "that there are more with each step: register it once, in `__init__`.)",
        "after the backward": "Free the parameters after each backward, too.",
        "whole gradients": "Whole ones are left: set each parameter's `.grad` to None.",
        "bytes sent": "More was sent than a reduce-scatter of one flat gradient needs. "
        "Call yours of task 4 once. (An all-reduce sends twice as much.)",
        "nothing as large": "Something as large as all gradients is left. Is it an "
        "attribute? Or is the shard's gradient a view of it? `clone()` it.",
        "the output": "forward must return what the module returns, as it is.",
        "of the input": "The layers before get no gradient: is the input cut off?",
        "after the step": "Something else than the optimizer has changed the shard.",
        "were seen": NOT_SEEN,
    },
    errors={
        OUT_OF_STEP: "The ranks' collectives do not fit: others, or of another size. "
        "Is the flat gradient padded? It must be as long as `self.whole`.",
        "SIG": GONE,  # SIGSEGV or SIGBUS
        "out of bounds for storage": GONE,
        "name 'FlatShard' is": BUILT_ON,
        "name 'reduce_scatter' is": BUILT_ON,
        "argument but 2 were given": "A hook is called with the gradient, `gather` "
        "with nothing: `output.register_hook(lambda grad: self.gather())`.",
        "'NoneType' object is not": "`register_hook(self.gather())` gathers at once. "
        "Hand over a function: `lambda grad: self.gather()`.",
        "but hook returned": "A hook must return None: all else replaces the gradient.",
        " size": PADDED,
        "Sizes": PADDED,
        "divide equally": PADDED,
        "divisible": PADDED,
        "number of dimensions": "Join flat gradients: `p.grad.reshape(-1)`.",
        "'NoneType' object has no": "A gradient is None. Join, then drop them.",
        "+=: 'NoneType'": "At first the shard has no gradient: put the part there.",
        "cannot register a hook": NO_GRAPH,
        "does not have a grad_fn": NO_GRAPH,
        "not tuple": "`args` is a tuple. Hand them on: `self.module(*args)`.",
    },
    otherwise="The gradient of the shard is this rank's part of the flat mean "
    "gradient, with zeros for the padding. Those of the step before must be gone.",
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


def observe_training(answer):
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)  # everywhere the same; 2 ranks can't halve the last layer
    first, middle = [nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh()], nn.Linear(16, 16)
    model = nn.Sequential(*first, middle, nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    largest = 4 * 17 * n * -(-16 // n)  # weight and bias of the middle one, padded
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
    title="Spot the bugs of a copied script",
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
            "The parameters are those of the start. Was the optimizer made before "
            "`fully_shard`? Then it holds parameters that nobody uses any more, and "
            "its steps do nothing. (Nor do they after zero_grad().)",
        ),
        Miss(
            "p.full_tensor()",
            "p.to_local()",
            "These are shards. `full_tensor()` makes a tensor whole.",
        ),
        Miss(
            "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
            "pass",
            "The gradients were not clipped. Do it between `backward()` and `step()`.",
        ),
        Miss(
            "optimizer.zero_grad()",
            "break",
            "Only the first batch was trained with. Does the loop end too soon?",
        ),
    ),
    because={
        "layers are gathered again": "Layers stay whole from the forward to the "
        "backward. That is what `reshard_after_forward=False` does. It also comes of "
        "leaving out `fully_shard(model)`: then each layer is a root, and a root "
        "stays whole. And a layer that is no unit of its own (every one with "
        "parameters counts, not nn.Linear alone) goes to the root.",
        "in float32": "The largest layer was never gathered whole and in float32. Is "
        "the model still sharded? Or is there a MixedPrecisionPolicy?",
        "largest all-gather": "Several layers were gathered together, and are in "
        "memory together. The unit of the whole model takes all that are in no other "
        "one. Each layer should be a unit of its own: `fully_shard(layer)` for the "
        "layers first, then for the model.",
        "other ranks": "All ranks call full_tensor(), but only rank 0 keeps the "
        "result. The others return None. (An empty dictionary, which "
        "get_model_state_dict returns there, is not None.)",
        "others keep": "This rank returns nothing, and still keeps one whole tensor "
        "after the other: in the end the whole model. Go tensor by tensor, and let "
        "only rank 0 put them into a dictionary.",
    },
    errors={
        "to a module once": "Call fully_shard once for a layer, and for the model.",
        "Invariant encountered": "fully_shard takes all parameters that are in no unit "
        "yet. Layers first, then the model.",
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
    answer(units, torch.ones_like(x))
    return {
        "whole units at once": AtMost(max(2, counts.most_whole)),
        "reduce-scatters": counts.requests,
        "whole gradients at once": AtMost(max(2, counts.most_gradients)),
        "whole units in the end": counts.whole,
        "units without a gradient": sum(unit.grad is None for unit in units),
    } | {f"gradient of unit {i}": unit.grad for i, unit in enumerate(units)}


SPOT_THE_PILE = Task(
    id="08.spot_the_pile",
    title="Spot what piles up",
    stars=2,
    cases=((6,), (1,), (3,)),
    observe=observe_backward,
    misses=(
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
            "wait() returns the sum over the ranks. A gradient is their mean.",
        ),
        Miss(" / n", " / len(units)", "It is divided by the number of units."),
        Miss(
            "before.grad =",
            "unit.grad =",
            "That is another unit's gradient. Keep a request and its unit together.",
        ),
    ),
    because={
        "whole units at once": "Too many units are whole. Gather a unit when its turn "
        "comes, and free it when its backward is over.",
        "reduce-scatters": "Each unit's gradient goes through "
        "`unit.reduce_scatter(gradient)`, once, not through an all-reduce.",
        "whole gradients": "The whole gradients pile up. A request keeps its gradient "
        "until you wait for it: wait for the one before when the next one is ready to "
        "go, or at once. And keep no gradient yourself, in a list for example.",
        "in the end": "A unit is still whole when the backward is over.",
        "without a gradient": "A unit has no gradient in the end. What wait() returns "
        "goes into `unit.grad`, on every rank. Is the last one awaited, too?",
    },
    errors={
        "nothing to free": "Call free() once for each gather().",
        "call gather() first": "Gather a unit before its backward.",
        "whole already": "Call gather() once, before its backward.",
    },
    otherwise="Each unit's grad is this rank's part of the mean gradient: what wait() "
    "returns, divided by the world size.",
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
