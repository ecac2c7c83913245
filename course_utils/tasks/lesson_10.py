"""Lesson 10, pipeline schedules: the tasks of its exercise."""

import torch
import torch.distributed as dist
from torch import nn

from course_utils.measure.messages import recorded
from course_utils.questions.lesson_10 import PREDICT_KEPT
from course_utils.tasks.compare import are_same
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.send_recv import ERRORS
from course_utils.tasks.task import GRADIENT_IMPORTS, OUT_OF_STEP, Miss, Task

# ------------------------------------------------------------------------- one_f_one_b

WARM_UP = (
    "Rank r has ranks - r - 1 ranks after it. It begins with that many forwards. Then "
    "a forward and a backward follow in turns."
)

ONE_F_ONE_B = Task(
    id="10.one_f_one_b",
    title="The order of 1F1B",
    stars=2,
    where="here",
    cases=((0, 3, 5), (1, 4, 6), (3, 4, 4), (0, 1, 3), (0, 4, 2), (2, 8, 1)),
    misses=(
        Miss(
            "ranks - rank - 1",
            "ranks - rank",
            "One forward too many at the beginning. The last rank begins its first "
            "backward right after its first forward. " + WARM_UP,
        ),
        Miss("ranks - rank - 1", "rank", "That is the wrong way round. " + WARM_UP),
        Miss(
            "min(ranks - rank - 1, micro_batches)",
            "micro_batches",
            "That is GPipe: all forwards first. In 1F1B a rank does only a few before "
            "the turns begin, one for each rank after it.",
        ),
        Miss(
            "ranks - rank - 1",
            "ranks - 1",
            "Every rank does the same number of forwards first. It depends on the "
            "rank: how many ranks come after it?",
        ),
        Miss(
            "min(ranks - rank - 1, micro_batches)",
            "ranks - rank - 1",
            "With fewer micro-batches than ranks after this one, some of these "
            "forwards do not exist. Take the smaller number.",
        ),
        Miss(
            '[("F", before + i), ("B", i)]',
            '[("B", i), ("F", before + i)]',
            "In a turn the forward comes first. The backward waits for the ranks "
            "after it, and they can use what this forward sends.",
        ),
        Miss(
            '[("B", i) for i in range(micro_batches - before, micro_batches)]',
            "[]",
            "The last backwards are missing: one for each forward of the beginning.",
        ),
        Miss(
            "range(micro_batches - before, micro_batches)",
            "reversed(range(micro_batches - before, micro_batches))",
            "The backwards come in the order of the forwards, to the end.",
        ),
    ),
    otherwise="Each micro-batch has one forward and one backward, as pairs such as "
    '("F", 0), in a list. First the forwards of the beginning, then one forward and '
    "one backward in turns, then the backwards that are left. The backwards begin with "
    "micro-batch 0, the oldest.",
    hints=(
        "Which rank can do the first backward, and after how many of its forwards?",
        "Rank r does ranks - r - 1 forwards (but no more than there are), then a "
        "forward and a backward in turns, then the backwards that are left.",
        "  before = min(..., micro_batches)\n"
        '  order = [("F", i) for i in range(before)]\n'
        "  for i in range(...):\n"
        '      order += [("F", ...), ("B", i)]\n'
        "  return order + [...]",
    ),
)

# ------------------------------------------------------------------ one step of a stage

READY_MADE = ("torch.distributed.pipelining.PipelineStage",)

LOSS, GRADIENTS, GRAPH = "the loss", "the gradients of the stage", "a graph is left"
NONE = "parameters of the stage without a gradient"
WEIGHTS = "the stage has the weights that it had"
SENT, FIRST = "messages to the next rank", "bytes of the largest message"
ORDER, FORWARDS = "the order", "all forwards come first"


def a_stage(case, rank, n):
    """This rank's stage, its part of the batch, and how that is cut."""
    micro_batches, rows = case
    stage = nn.Sequential(linear(4, 4, seed=rank, divided_by=8), nn.Tanh())
    inputs = whole_numbers((micro_batches * rows, 4), 20) / 4
    targets = whole_numbers((micro_batches * rows, 4), 21) / 4
    first, last = rank == 0, rank == n - 1
    return stage, inputs if first else None, targets if last else None, *case


def observe_step(answer, stage, inputs, targets, micro_batches, rows):
    """A training step; what it leaves in the stage, and what was done for it.

    A micro-batch is known by its numbers: whoever runs its forward again, instead of
    keeping activations, has done one forward.
    """
    order, numbers = [], {}

    def note(last_layer, args, y):
        number = numbers.setdefault(args[0].detach().numpy().tobytes(), len(numbers))
        if f"F{number}" not in order:
            order.append(f"F{number}")
        if y.requires_grad:
            y.register_hook(lambda grad: order.append(f"B{number}"))

    parameters = list(stage.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    with stage[-1].register_forward_hook(note), recorded() as calls:
        loss = answer(stage, inputs, targets, micro_batches, rows)
    grads = [p.grad for p in parameters]
    arrived = [grad.flatten() for grad in grads if grad is not None]
    sends = [call for call in calls if call.kind == "send"]
    onward = [call for call in sends if call.peer > dist.get_rank()]
    is_number = isinstance(loss, torch.Tensor) and loss.numel() == 1
    return {
        NONE: grads.count(None),
        GRADIENTS: torch.cat(arrived) if arrived else None,
        WEIGHTS: are_same(parameters, before),
        LOSS: loss.item() if is_number and targets is not None else loss,
        GRAPH: getattr(loss, "requires_grad", False),
        SENT: len(onward),
        FIRST: max((call.nbytes for call in sends), default=0),
        ORDER: " ".join(order),
    }


def observe_gpipe(answer, stage, inputs, targets, micro_batches, rows):
    """The same. The backwards may come in any order, after all forwards."""
    seen = observe_step(answer, stage, inputs, targets, micro_batches, rows)
    kinds = [action[0] for action in seen.pop(ORDER).split()]
    return {**seen, FORWARDS: kinds == sorted(kinds, reverse=True)}


NO_GRAPH = (
    "What `backward` is called on has no graph. Keep the `y` that the stage returns, "
    "and detach only what is sent. Under `no_grad` a forward leaves no graph either."
)
NO_GRADIENT = (
    "`x.grad` is None. What `recv` fills knows nothing of the rank before: call "
    "`x.requires_grad_()` on it before the forward, and send its `grad` after the "
    "backward. And send `x.grad`: `y`, the result of a layer, keeps none."
)
TWO_ENDS = (
    "There is no such rank. A pipeline has two ends: no rank comes before rank 0, and "
    "none after the last one. A single rank is both ends."
)
IN_PIECES = (
    "The gradients are right, but the batch does not travel in micro-batches: at each "
    "boundary there is one message of `rows` rows for each of them, and no other."
)
NOT_THE_MEAN = (
    "The gradients are not those of the whole batch's mean loss. How is the loss "
    "scaled? Does a later `recv` overwrite an `x` that a backward still needs? "
)
BECAUSE = {
    NONE: "No backward has come to the parameters. Each micro-batch has one, on every "
    "rank: from its loss, or from the gradient that the next rank sends.",
    WEIGHTS: "The gradients are right, but the weights have changed. Leave that to an "
    "optimizer, after the step.",
    SENT: IN_PIECES,
    FIRST: IN_PIECES,
    LOSS: "The last rank returns the mean loss of the batch, the others None. Each "
    "micro-batch contributes its mean divided by their number.",
    GRAPH: "The loss is right, but it still has its graph, and all that the graph "
    "keeps stays in memory. Return a number without one: `detach()`.",
}
STEP_ERRORS = {
    **ERRORS,
    "is this rank itself": TWO_ENDS,
    "should not be the same as the rank": TWO_ENDS,
    "there is no rank": TWO_ENDS,
    "'NoneType' object is not subscriptable": "Only rank 0 has `inputs`, and only the "
    "last rank has `targets`. The others get what the rank before sends.",
    "grad can be implicitly created only for scalar outputs": "In the middle of a "
    "pipeline there is no loss. Receive the gradient of the output, and hand it to "
    "`y.backward(grad)`.",
    "does not require grad": NO_GRAPH,
    "but got <class 'NoneType'> instead": NO_GRADIENT,
    "'NoneType' object has no attribute": NO_GRADIENT,
    OUT_OF_STEP: "A message is waited for that nobody sends, or nobody receives. Each "
    "rank sends `y` to the next one, and `x.grad` to the one before, in the order in "
    "which that one receives. Only the first and the last rank leave out one of them.",
}
SAME_ROWS = (
    "Every micro-batch gets the same rows. Micro-batch i begins at row `i * rows`, and "
    "it has its own part of `inputs` and of `targets`."
)

GPIPE_STEP = Task(
    id="10.gpipe_step",
    imports=GRADIENT_IMPORTS,
    seconds=10.0,
    title="One step of a stage",
    stars=3,
    cases=((4, 2), (1, 3), (3, 1)),
    inputs=a_stage,
    observe=observe_gpipe,
    forbids=READY_MADE,
    instead="Use send and recv, or isend and irecv.",
    misses=(
        Miss(
            " / micro_batches",
            "",
            "The loss is the sum over the micro-batches. Divide each by their number, "
            "or the gradients are that many times too large.",
        ),
        Miss(
            "for x, y in kept:",
            "for x, y in kept[-1:]:",
            "Only one micro-batch has added to the gradient. Are backwards missing, or "
            "are gradients cleared between them?",
        ),
        Miss(
            "dist.send(y.detach(), rank + 1)",
            "dist.send(x.detach(), rank + 1)",
            ("The next rank gets this stage's input. Send its output."),
        ),
        Miss(
            "dist.send(x.grad, rank - 1)",
            "dist.send(grad if grad is not None else x.grad, rank - 1)",
            "The rank before needs the gradient of *its* output, which is this "
            "stage's input: send `x.grad`, not what has arrived here.",
        ),
        Miss(
            "return sum(losses) if rank == last else None",
            "return losses[-1] * micro_batches if rank == last else None",
            "That is the loss of the last micro-batch. Return the mean of all.",
        ),
        Miss("inputs[i * rows : (i + 1) * rows]", "inputs[:rows]", SAME_ROWS),
        Miss("targets[i * rows : (i + 1) * rows]", "targets[:rows]", SAME_ROWS),
    ),
    because={
        GRADIENTS: NOT_THE_MEAN
        + "Does each output meet the gradient of its own micro-batch?",
        FORWARDS: "The gradients are right, but a backward comes before the last "
        "forward. If each micro-batch goes all the way and back before the next one "
        "begins, only one rank works at a time. Do all forwards first.",
        **BECAUSE,
    },
    errors=STEP_ERRORS,
    hints=(
        "What must a rank keep from a forward, so that its backward can run later?",
        "Forward: receive x (or take it from `inputs`), run the stage, send y. Keep "
        "the pair. Backward: receive the gradient of y, `y.backward(grad)`, send "
        "`x.grad`. Rank 0 sends nothing back; the last rank begins with its loss.",
        "  for i in range(micro_batches):\n"
        "      x = ...                    # a part of inputs, or recv\n"
        "      y = stage(x)\n"
        "      ...                        # the loss, or send\n"
        "      kept.append((x, y))\n"
        "  for x, y in kept:\n"
        "      ...                        # recv, y.backward(...), send x.grad",
    ),
)

# ------------------------------------------------------------------- spot_the_pipeline

SPOT_PIPELINE = Task(
    id="10.spot_the_pipeline",
    imports=GRADIENT_IMPORTS,
    seconds=10.0,
    title="Spot the bugs in a schedule",
    stars=2,
    cases=((4, 2), (1, 3), (3, 1)),
    inputs=a_stage,
    observe=observe_step,
    forbids=READY_MADE,
    instead="Keep the messages, and repair what is around them.",
    misses=(
        Miss(
            "kept.pop(0)",
            "kept.pop()",
            "The gradient that arrives belongs to the oldest micro-batch that is kept, "
            "and this takes the newest.",
        ),
        Miss(
            " / micro_batches",
            "",
            "The loss of the batch is the mean over the micro-batches, not their sum.",
        ),
    ),
    because={
        GRADIENTS: NOT_THE_MEAN
        + "Which micro-batch does the gradient that arrives belong to?",
        ORDER: "The gradients are right, but it is no longer 1F1B. Perhaps it has "
        "become GPipe, where each rank keeps all micro-batches. Keep the order of "
        "1F1B, and change how it sends.",
        **BECAUSE,
    },
    errors={
        **STEP_ERRORS,
        OUT_OF_STEP: "Two ranks send to each other, and neither receives: one sends an "
        "activation while the other sends a gradient. With `isend` nobody waits; keep "
        "the requests, and wait for them at the end.",
    },
    hints=(
        "Which two ranks wait for each other, and in which calls?",
        "At least one of the two sends must not block. Which pair does a gradient "
        "belong to? And is the loss a sum or a mean?",
        "  requests.append(dist.isend(..., rank + 1))\n"
        "  x, y = kept.pop(...)\n"
        "  [request.wait() for request in requests]",
    ),
)

# ------------------------------------------------------------------------ step_seconds

STEP_SECONDS = Task(
    id="10.step_seconds",
    title="The time of a step",
    stars=1,
    where="here",
    cases=(
        (4, 8, 1, 0.01, 0.02),
        (8, 32, 4, 0.003, 0.006),
        (1, 5, 2, 0.1, 0.1),
        (16, 16, 3, 0.02, 0.05),
    ),
    misses=(
        Miss(
            "(ranks - 1) / chunks",
            "(ranks - 1)",
            "That is the bubble without interleaving. With v chunks, a rank waits for "
            "chunks that are v times shorter.",
        ),
        Miss(
            "(ranks - 1) / chunks",
            "ranks / chunks",
            "The first rank waits for ranks - 1 others, not for itself.",
        ),
        Miss(
            "micro_batches + ",
            "micro_batches * ",
            "Work and bubble follow each other: add them.",
        ),
        Miss("(forward + backward)", "forward", "The backward takes its time, too."),
        Miss(
            "micro_batches + (ranks - 1) / chunks",
            "(micro_batches + ranks - 1) / chunks",
            "The work does not get less with more chunks: a rank still computes all "
            "its layers for all micro-batches. Only the bubble is divided.",
        ),
    ),
    otherwise="The work is micro_batches · (forward + backward), and the bubble is "
    "(ranks - 1) · (forward + backward) / chunks.",
    hints=(
        "How long does a rank work, and how long does it wait?",
        "How many turns of a forward and a backward does a rank work? How many turns "
        "does it wait, and how long is each of these with v chunks?",
        "  return (... + ... / chunks) * (forward + backward)",
    ),
)

TASKS = (PREDICT_KEPT, ONE_F_ONE_B, STEP_SECONDS, GPIPE_STEP, SPOT_PIPELINE)
