"""Lesson 09, tensor parallel: the tasks of its exercise."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_utils.measure.alive import alive, new_bytes
from course_utils.measure.traffic import Sent
from course_utils.questions.lesson_09 import PREDICT_BYTES
from course_utils.tasks.compare import are_same
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.task import GRADIENT_IMPORTS, OUT_OF_STEP, AtMost, Miss, Task

SENT_FORWARD, SENT_BACKWARD = "bytes sent in the forward", "bytes sent in the backward"
OUTPUT, OF_X, OF_WEIGHT = "what comes out", "the gradient of x", "gradient of weight"
SENT = "something is sent in the forward"
SHAPE, MEMORY = "shape of self.weight", "bytes that the layer keeps"

NO_F = (
    "The gradient of x is not the sum over all ranks, and everything before this layer "
    "would learn from it. f, `CopyToRanks.apply(x)`, stands before the slices, on x "
    "itself, and once."
)
ARRIVED = "all gradients have arrived"
BECAUSE = {
    ARRIVED: "Somewhere no gradient arrives. Is each slice an `nn.Parameter`? Does "
    "each `backward` return something? Is nothing detached?",
    SENT: "With slices, all ranks together make what comes out. Does a rank keep, or "
    "get, more than its slices?",
    MEMORY: "The layer keeps more than its slices. A view keeps all of the tensor that "
    "it shows a part of, so `clone()` it, and keep nothing else of the whole layer.",
}
TOO_MUCH = "The numbers are right, but more is sent than"
ERRORS = {
    "no attribute 'weight'": "Keep the slice as `self.weight`, an `nn.Parameter`.",
    "no attribute 'bias'": "Keep the bias as `self.bias`, an `nn.Parameter`.",
    "does not require grad": "The result has no graph. A collective of "
    "torch.distributed is not tracked: use `SumOverRanks.apply`. And `self.weight` "
    "must want a gradient: `from_pretrained` freezes it.",
    OUT_OF_STEP: "All ranks must make the same collectives, in the same order.",
}


def forward_and_back(call, x, grad):
    """What came out, and all that was observed on the way there and back."""
    x.requires_grad_(x.is_floating_point())
    with Sent() as forward:
        y = call(x)
    if not torch.is_tensor(y):
        return y, {}
    seen = {OUTPUT: y.detach().clone(), SENT_FORWARD: AtMost(forward.nbytes)}
    seen[SENT] = forward.nbytes > 0
    with Sent() as backward:
        y.backward(grad)
    if x.is_floating_point():
        seen |= {OF_X: x.grad, SENT_BACKWARD: AtMost(backward.nbytes)}
    return y, seen


def cut_slice(answer, make_whole):
    """The sliced layer, and the bytes that it keeps when the whole one has gone."""
    before = alive()
    layer = answer(make_whole())
    return layer, new_bytes(before)


def of_slice(layer, kept, seen):
    """The slice's shape, what was observed, and what the layer keeps."""
    seen = arrived(seen | {OF_WEIGHT: layer.weight.grad})
    return {SHAPE: (*layer.weight.shape,)} | seen | {MEMORY: AtMost(kept)}


def arrived(seen):
    """What was observed, and before it, whether a gradient is missing."""
    grads = [value for name, value in seen.items() if "gradient" in name]
    return {ARRIVED: all(grad is not None for grad in grads)} | seen


# ---------------------------------------------------------------------------- f and g


def observe_f_and_g(answer, shape):
    rank, given, before_g, parts = dist.get_rank(), [], [], []

    def compute(x):
        given.append(x.detach().clone())
        part = (x * (rank + 1)).tanh()  # its backward needs this result again
        if part.requires_grad:
            part.register_hook(lambda grad: before_g.append(grad.clone()))
        parts.extend([part.detach(), part.detach().clone()])
        return part

    x, grad = whole_numbers(shape, 7) / 8, whole_numbers(shape, 5)
    y, seen = forward_and_back(lambda x: answer(x, compute), x, grad)
    if not seen:
        return y
    seen = {
        "what f gives to the slice": given[0],
        "the part is as it was after g": torch.equal(*parts),
        "gradient of the part, before g": before_g[0] if before_g else None,
        **seen,
    }
    return arrived(seen) | {SHARED: grad_beside_f(answer, shape, grad)}


def grad_beside_f(answer, shape, grad):
    """Of what is added to f's x, and so shares its gradient: + gives one to both."""
    beside = whole_numbers(shape, 9).requires_grad_()
    term = beside * 1  # made before f, so its backward comes after f's
    x = torch.ones(shape, requires_grad=True)
    answer(x, lambda x: x + term).backward(grad)
    return beside.grad


SHARED = "gradient of a tensor that is added to f's x"
F_AND_G = Task(
    id="09.f_and_g",
    imports=GRADIENT_IMPORTS,
    title="f and g",
    stars=2,
    cases=(((2, 3),), ((5,),)),
    observe=observe_f_and_g,
    seconds=10.0,
    instead="`dist.all_reduce` adds up a copy, in place.",
    misses=(
        Miss(
            "dist.all_reduce(total)  # of the slices' gradients",
            "pass",
            "f's backward returns this rank's gradient: a part. Sum over the ranks.",
        ),
        Miss(
            "return grad  # as it is",
            "dist.all_reduce(total := grad.clone())\n        return total",
            "g's gradient was summed, and is n times too large. A sum hands its "
            "gradient on to every part as it is, and all ranks have it already.",
        ),
    ),
    because={
        **BECAUSE,
        SHARED: "f's backward has overwritten a gradient that others still use. Sum up "
        "a copy: `clone()`.",
        "f gives": "All ranks have x already: f's forward gives x as it is.",
        "as it was": "g has overwritten the part, which the slice's backward may need. "
        "Sum up a copy: `clone()`.",
        "before g": "A sum hands its gradient on to each part as it is: nothing to "
        "divide.",
        OUTPUT: "g's forward must give the sum of all ranks' parts.",
        OF_X: "f's backward must give the sum of all slices' gradients.",
        "bytes sent": f"{TOO_MUCH} an all-reduce in g's forward and one in f's "
        "backward.",
    },
    errors=ERRORS,
    hints=(
        "f hands x to n slices. How do the gradients of n uses of x come together?",
        "Each of the four methods returns either its argument, or an all-reduced copy "
        "of it. all_reduce works in place.",
        "These lines stand in one of f's two methods, and in one of g's. In which?\n"
        "  total = ....clone()\n"
        "  dist.all_reduce(total)\n"
        "  return total",
    ),
)

# -------------------------------------------------------------- a linear layer, sliced


def observe_linear(by_columns, answer, inputs, outputs):
    """A column slice gets all of x and gives a part; a row slice, the other way."""
    x, grad = whole_numbers((2, inputs), 4), whole_numbers((2, outputs), 5)

    def mine(tensor):
        return tensor.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()

    x, grad = (x, mine(grad)) if by_columns else (mine(x), grad)
    whole = partial(linear, inputs, outputs, 3, divided_by=8)
    layer, kept = cut_slice(answer, whole)
    y, seen = forward_and_back(layer, x, grad)
    if not seen:
        return y
    return of_slice(layer, kept, seen | {"gradient of bias": layer.bias.grad})


CUT = "linear.weight.chunk(n)[rank]"
COLUMN_SLICE = Task(
    id="09.column_slice",
    imports=GRADIENT_IMPORTS,
    title="A column slice",
    stars=1,
    cases=((12, 24), (24, 12)),
    observe=partial(observe_linear, True),
    instead="Use F.linear, and your f.",
    misses=(
        Miss(
            "F.linear(CopyToRanks.apply(x), self.weight, self.bias)",
            "SumOverRanks.apply(F.linear(CopyToRanks.apply(x), self.weight, "
            "self.bias))",
            "No g here: each rank returns its own outputs, and they are finished.",
        ),
        Miss(CUT, "linear.weight.chunk(n)[0]", "Each rank has rank 0's outputs."),
        Miss(
            CUT,
            "linear.weight[rank::n]",
            "These are every n-th output. Slices have no gaps: `chunk(n)`.",
        ),
    ),
    because={
        **BECAUSE,
        SHAPE: "The slice is [outputs / n, inputs].",
        OUTPUT: "Rank r has the r-th of n equal pieces of the outputs, bias included.",
        OF_X: NO_F,
        "bytes sent": f"{TOO_MUCH} nothing in the forward, and one all-reduce of x's "
        "size in the backward.",
    },
    errors={
        "cannot be multiplied": "That cuts the inputs. In PyTorch's weight the outputs "
        "are dimension 0.",
        "must match": "Cut both weight and bias along the outputs.",
        "Mismatch in shape": "Return outputs / n outputs, no more and no fewer: those "
        "of this rank.",
        **ERRORS,
    },
    hints=(
        "PyTorch's weight is [outputs, inputs]. Which dimension are the outputs?",
        "`chunk(n)[rank]` of weight and bias, each cloned into an nn.Parameter. In "
        "forward: f, then F.linear.",
        "  self.weight = nn.Parameter(linear.weight.detach()....clone())\n"
        "  self.bias = ...\n"
        "and in forward:\n"
        "  return F.linear(....apply(x), ..., ...)",
    ),
)

SUM = "SumOverRanks.apply(F.linear(x, self.weight))"
ROW_SLICE = Task(
    id="09.row_slice",
    imports=GRADIENT_IMPORTS,
    title="A row slice",
    stars=2,
    cases=((12, 24), (24, 12)),
    observe=partial(observe_linear, False),
    instead="Use F.linear, and your g.",
    misses=(
        Miss(
            f"{SUM} + self.bias",
            "SumOverRanks.apply(F.linear(x, self.weight, self.bias))",
            "Each rank has added the bias, so it is in the sum n times. Add it once, "
            "to the sum.",
        ),
        Miss(SUM, "F.linear(x, self.weight)", "These are parts of the outputs. Sum."),
    ),
    because={
        **BECAUSE,
        SHAPE: "The slice is [outputs, inputs / n]: cut dimension 1.",
        OUTPUT: "Every rank gets all outputs: the sum of all parts, and the bias once.",
        OF_X: "Here x is this rank's own part, so its gradient is complete. f would "
        "add up gradients of different numbers. An all-reduce that autograd follows "
        "adds up n equal ones, which is n times too much.",
        "of bias": "Every rank has the whole bias, with the whole gradient: add it on "
        "all ranks, once, to the sum.",
        "bytes sent": f"{TOO_MUCH} one all-reduce of the outputs in the forward.",
    },
    errors={
        "cannot be multiplied": "x arrives already cut, with inputs / n numbers. Of "
        "the weight, cut dimension 1.",
        "must match": "Every rank keeps the whole bias.",
        **ERRORS,
    },
    hints=(
        "Which numbers of the weight meet this rank's part of x? When is an output "
        "complete?",
        "`chunk(n, 1)[rank]` of the weight, the whole bias. In forward: F.linear "
        "without bias, g, and then the bias.",
        "  self.weight = nn.Parameter(...chunk(..., 1)....clone())\n"
        "and in forward:\n"
        "  y = ....apply(F.linear(x, self.weight))\n"
        "  return ...",
    ),
)

# ------------------------------------------------------------- the first and last layer


def observe_vocabulary(answer, vocabulary, shape):
    def whole():
        rows = whole_numbers((vocabulary, 4), 9)
        return nn.Embedding.from_pretrained(rows, freeze=False)

    symbols = torch.arange(2 * vocabulary)[: torch.Size(shape).numel()] % vocabulary
    symbols = symbols.view(shape)
    (layer, kept), before = cut_slice(answer, whole), symbols.clone()
    y, seen = forward_and_back(layer, symbols, whole_numbers((*shape, 4), 8))
    if not seen:
        return y
    return of_slice(layer, kept, seen) | {
        "the symbols are as they were": torch.equal(symbols, before)
    }


VOCABULARY_SLICE = Task(
    id="09.vocabulary_slice",
    imports=GRADIENT_IMPORTS,
    title="A slice of the vocabulary",
    stars=2,
    cases=((24, (4, 9)), (12, (17,)), (240, (5,))),
    observe=observe_vocabulary,
    instead="Use F.embedding, and your g.",
    misses=(
        Miss(
            "rows * mine[..., None]",
            "rows",
            "A symbol of another rank must give zeros here. It gives a row of this "
            "rank's, and the sum has rows that do not belong there.",
        ),
        Miss(
            "symbols - self.first",
            "symbols",
            "Row 0 of the slice is another symbol on each rank. Subtract the first.",
        ),
        Miss(
            "(here < size)",
            "(here <= size)",
            "This rank's places are 0 to size - 1. With `<= size` the next rank's "
            "first symbol counts as well.",
        ),
    ),
    because={
        **BECAUSE,
        SHAPE: "Each rank has vocabulary / n rows: cut dimension 0.",
        "symbols are": "The symbols have changed. Compute new ones.",
        OUTPUT: "Every rank gets the row of every symbol: zeros where the symbol is "
        "another rank's, and then the sum over the ranks.",
        OF_WEIGHT: "A symbol of another rank must leave no gradient here.",
        "bytes sent": f"{TOO_MUCH} one all-reduce of the rows.",
    },
    errors={
        "tuple index out of range": "There are fewer pieces than ranks. Cut dimension "
        "0, the vocabulary.",
        "index out of range in self": "F.embedding wants 0 to size - 1: subtract this "
        "rank's first symbol, and `clamp` the symbols of other ranks.",
        "must match": "The mask lacks the last dimension of the rows: "
        "`mine[..., None]`.",
        **ERRORS,
    },
    hints=(
        "Rank r knows size symbols, from r * size on. What may it say of the others?",
        "Subtract the first symbol, note which are 0 to size - 1, look those up, make "
        "the rows of the others zero, and sum over the ranks.",
        "  here = symbols - ...\n"
        "  mine = (here >= 0) & ...\n"
        "  rows = F.embedding(here.clamp(0, ...), self.weight)\n"
        "  return ....apply(rows * ...)",
    ),
)

LARGE = ", of large scores"


def observe_loss(answer, positions, size, scale):
    n, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(positions)
    scores = scale * torch.randn(positions, n * size, generator=generator)
    scores[0] += 2 * scale - 2  # large scores differ between positions, too
    targets = torch.randint(n * size, (positions,), generator=generator)
    mine, kind = scores.chunk(n, -1)[rank].clone(), LARGE * (scale > 1)
    given = mine.clone(), targets.clone()
    with Sent() as sent:
        loss = answer(mine.requires_grad_(), targets)
    if not torch.is_tensor(loss):
        return loss
    as_they_were = are_same((mine, targets), given)
    loss.backward()
    seen = {
        f"the loss{kind}": loss.detach(),
        f"the gradient of the scores{kind}": mine.grad,
        "scores are gathered": sent.nbytes > 4 * (n - 1) * positions * 4,
        "scores and targets are as they were": as_they_were,
    }
    return arrived(seen)


CROSS_ENTROPY = Task(
    id="09.cross_entropy",
    imports=GRADIENT_IMPORTS,
    title="A loss of sliced scores",
    stars=3,
    cases=((5, 8, 1), (1, 9, 1), (3, 16, 300)),
    observe=observe_loss,
    instead="Three all-reduces of one number a position are enough.",
    misses=(
        Miss(
            "dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
            "pass",
            "Each rank has subtracted its own largest score. All must subtract the "
            "same one: `ReduceOp.MAX`.",
        ),
        Miss(
            "dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
            "dist.all_reduce(largest)",
            "`all_reduce` adds up, unless you say `op=dist.ReduceOp.MAX`.",
        ),
        Miss(
            "scores.detach().amax(-1)",
            "scores.detach().max().repeat(len(scores))",
            "Subtract the largest score of *each position*. Far below the largest of "
            "all, every exp() is 0.",
        ),
        Miss(
            "SumOverRanks.apply(scores.exp().sum(-1))",
            "scores.exp().sum(-1)",
            "The denominator has only this rank's scores. Sum it over the ranks.",
        ),
        Miss(
            "targets - dist.get_rank() * size",
            "targets",
            "The targets count through the whole vocabulary. Subtract this rank's "
            "first symbol.",
        ),
        Miss(
            "SumOverRanks.apply(found * mine)",
            "SumOverRanks.apply(found)",
            "The score of a target counts on the rank that has it, and nowhere else.",
        ),
        Miss(".mean()", ".sum()", "That is the sum over the positions, not the mean."),
    ),
    because={
        **BECAUSE,
        f"loss{LARGE}": "exp() of a large score is infinite: subtract the largest of "
        "all ranks first. It cancels out.",
        "the loss": "log of the sum of exp over the whole vocabulary, minus the score "
        "of the target: the mean over the positions, the same on all ranks.",
        "the gradient": "The loss is right, but not its gradient. Detach the largest "
        "score, and nothing else. Sum with SumOverRanks, which autograd follows, and "
        "use no f: each rank's scores need only their own gradient.",
        "gathered": "The loss is right, but the scores were gathered. Send one number "
        "a position instead, three times.",
        "as they were": "The loss is right, but the scores or the targets have "
        "changed. Work on copies.",
    },
    errors={
        "index out of": "gather wants places 0 to size - 1 of this slice.",
        **ERRORS,
    },
    hints=(
        "log(sum of exp) - score of the target. Which of these numbers need all ranks?",
        "Largest score: all_reduce with MAX, no gradient needed. Sum of exp: g. Score "
        "of the target: zero except on the rank that has it, then g.",
        "  largest = scores.detach().amax(-1)      # all_reduce, MAX\n"
        "  scores = scores - largest[:, None]\n"
        "  total = ....apply(scores.exp()...)\n"
        "  found = ....apply(...)                  # as with the embedding\n"
        "  return (... - ...).mean()",
    ),
)

# --------------------------------------------------------------------------- attention


def observe_attention(answer, heads, head_size):
    width = heads * head_size
    fused = linear(width, 3 * width, 11, divided_by=16).weight.detach()
    mix = linear(width, width, 12, divided_by=16).weight.detach()
    layer, shape = answer(fused, mix, heads), (2, 5, width)
    y, seen = forward_and_back(
        layer, whole_numbers(shape, 13) / 8, whole_numbers(shape, 14)
    )
    if not seen:
        return y
    rows, of_rows = kept_of(fused, layer)
    columns, of_columns = kept_of(mix.mT, layer, lambda weight: weight.mT)
    grads = {"gradient of fused": of_rows, "gradient of mix": of_columns}
    return {ROWS: rows, COLUMNS: columns} | arrived(seen | grads)


def kept_of(whole, layer, rows_of=lambda weight: weight):
    """Which rows of `whole` a layer keeps, in any order, and their gradients."""
    kept = []  # the place of each row, and its gradient
    for parameter in (p for p in layer.parameters() if p.dim() > 1):
        rows, grad = rows_of(parameter.detach()), parameter.grad
        if rows.shape[-1] != whole.shape[-1]:
            continue
        rows = rows.reshape(-1, whole.shape[-1])
        is_row = (rows[:, None] == whole).all(-1)
        if is_row.any(1).all():
            of_rows = [None] * len(rows)
            if grad is not None:
                of_rows = rows_of(grad).reshape(rows.shape)
            kept += zip(is_row.int().argmax(1).tolist(), of_rows, strict=True)
    kept.sort(key=lambda one: one[0])
    grads = [grad for _, grad in kept]
    arrive = grads and all(grad is not None for grad in grads)
    return [place for place, _ in kept], torch.stack(grads) if arrive else None


ROWS, COLUMNS = "rows of fused on this rank", "columns of mix on this rank"
FUSED = "fused.view(3, -1, width).chunk(n, 1)[rank]"
SPOT_ATTENTION = Task(
    id="09.spot_the_attention",
    imports=GRADIENT_IMPORTS,
    title="Spot the bugs in an attention",
    stars=2,
    cases=((12, 4), (24, 2)),
    observe=observe_attention,
    instead="Keep the slices, and repair how they are cut and what is before them.",
    misses=(
        Miss(
            FUSED,
            "fused.chunk(n)[rank]",
            "The fused weight has all queries first, then all keys, then all values. A "
            "contiguous n-th of it is not a set of heads. Cut each of the three.",
        ),
        Miss(
            FUSED,
            "fused.view(3, -1, width)[:, rank::n]",
            "Those are every n-th row. The rows of a head lie together: `chunk`.",
        ),
        Miss(
            "F.linear(CopyToRanks.apply(x), ",
            "F.linear(SumOverRanks.apply(x), ",
            "x is the same on all ranks and must not be summed. Its gradient must: f.",
        ),
        Miss(
            "F.linear(CopyToRanks.apply(x), self.fused)",
            "CopyToRanks.apply(F.linear(x, self.fused))",
            "f must stand before the slices, on x itself.",
        ),
        Miss(
            "    return SumOverRanks.apply(",
            "    import torch.distributed.nn.functional as dnn\n"
            "        return dnn.all_reduce(",
            "g's gradient was summed, and is n times too large. `SumOverRanks` hands "
            "it on as it is.",
        ),
    ),
    because={
        **BECAUSE,
        ROWS: "Write down for two ranks and two heads which rows of the fused weight "
        "each rank gets. Are they queries, keys and values of one head?",
        COLUMNS: "What comes out of a rank's heads meets columns of mix: "
        "`mix.chunk(n, 1)[rank]`.",
        OUTPUT: "The rows and columns are the right ones, but not what is done with "
        "them. Are they split into queries, keys and values as they lie? And g adds up "
        "what comes out of mix, once.",
        OF_X: NO_F,
        "bytes sent": f"{TOO_MUCH} an all-reduce forward and one backward.",
    },
    errors={
        "cannot be multiplied": "Cut fused by its rows, which are its outputs: "
        "dimension 0. Cut mix by its columns, which are its inputs: dimension 1.",
        **ERRORS,
    },
    hints=(
        "Which rows of the fused weight does rank 0 get, on three ranks? Then compare "
        "the backward pass with the lesson's table of f and g.",
        "Rows of the fused weight: all queries, all keys, all values, width each. Give "
        "each rank an n-th of each of the three. And f stands before the slices.",
        "  fused = fused.view(3, ..., width)         # queries, keys, values\n"
        "  mine = fused.chunk(n, ...)[rank].reshape(-1, width)\n"
        "and in forward:\n"
        "  ... = F.linear(....apply(x), self.fused).chunk(3, -1)",
    ),
)

TASKS = (
    PREDICT_BYTES,
    F_AND_G,
    COLUMN_SLICE,
    ROW_SLICE,
    VOCABULARY_SLICE,
    CROSS_ENTROPY,
    SPOT_ATTENTION,
)
