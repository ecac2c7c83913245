"""Lesson 03, data-parallel primitives: the tasks of its exercise."""

import contextlib
import functools
import itertools
import operator
import re
import threading
import time
import traceback

import torch
from torch import nn
from torch.nn import functional as F

from course_utils.checks.mistakes import says, wrong_in
from course_utils.checks.task import Mistake, Task
from course_utils.notebook.compare import difference
from course_utils.notebook.outcome import cut_off
from course_utils.ranks.report import is_learners, learner_lines, place
from course_utils.tasks.devices import on_gpus
from course_utils.tasks.inputs import linear, whole_numbers

in_eighths = functools.partial(linear, divided_by=8)
# ------------------------------------------------------------------ what tensors hold


def tensors_in(value):
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def mapped(function, value):
    """A copy of nested tuples, lists and dicts, with `function` of each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, item) for item in value)
    return value


def form(value):
    """What is nested in what, as text: "(tensor, {'a': tensor})"."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {form(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(form, value)) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(form, value)) + "]"
    return repr(value) if isinstance(value, (int, str, type(None))) else "something"


def settled(value):
    """A copy of a nested result without the graph."""
    return mapped(torch.Tensor.detach, value)


def devices_of(value):
    """On which devices the tensors in it are: "cuda:1"."""
    names = sorted({str(tensor.device) for tensor in tensors_in(value)})
    return " and ".join(names) or "no tensor"


def wanting(tensor):
    """The same tensor; it wants a gradient, if it is one of floats."""
    return tensor.requires_grad_(tensor.is_floating_point())


def with_gradients(value):
    """A copy of the inputs in which every tensor wants a gradient."""
    return mapped(lambda tensor: wanting(tensor.clone()), value)


def differently(tensors):
    """One number, in which each element has another weight."""
    return sum(
        (tensor.cpu() * (1 + torch.arange(tensor.numel()).reshape(tensor.shape))).sum()
        for tensor in tensors
    )


def gradients_after(number, tensors):
    """What the backward of a number leaves in each tensor; None where it is nothing."""
    if isinstance(number, torch.Tensor) and number.requires_grad:
        number.backward()
    return [tensor.grad for tensor in tensors]


def rows_in(text):
    """9 of "9 rows": what a case says is read by the learner, too."""
    return int(text.partition(" ")[0])


# ---------------------------------------------------------------------------- scatter


@on_gpus(4)
def try_scatter(answer, gpus, inputs, target_gpus, dim=0):
    inputs = with_gradients(inputs)
    tensors, before = tensors_in(inputs), form(inputs)
    parts = answer(inputs, target_gpus, dim)
    if hasattr(parts, "__next__"):
        parts = list(parts)
    sent = sum(copy.bytes for copy in gpus.transfers)
    if not isinstance(parts, (list, tuple)):
        return {"parts": parts} | dict.fromkeys(list(scattered(ROWS[1], [0]))[1:])
    return {
        "parts": parts,
        "the form of part 0": form(parts[0]) if parts else "nothing",
        "devices": [devices_of(part) for part in parts],
        "gradients": gradients_after(differently(tensors_in(parts)), tensors),
        "the inputs are as they were": form(inputs) == before
        and all(map(operator.is_, tensors_in(inputs), tensors)),
        # To one GPU first, and from there to the others, is less than twice as much.
        "whole tensors went to several GPUs": sent > 2 * sum(t.nbytes for t in tensors),
    }


def cut(value, n, dim, chunk=torch.chunk):
    """The parts of nested inputs, all on the CPU."""
    if isinstance(value, torch.Tensor):
        return list(chunk(value, n, dim))
    if isinstance(value, dict) and value:
        parts = zip(*(cut(item, n, dim, chunk) for item in value.values()))  # noqa: B905
        return [dict(zip(value, part, strict=True)) for part in parts]
    if isinstance(value, (list, tuple)) and value:
        parts = zip(*(cut(item, n, dim, chunk) for item in value))  # noqa: B905
        return [type(value)(part) for part in parts]
    return [value] * n


def scattered(inputs, target_gpus, dim=0, chunk=torch.chunk):
    """What the check expects; a mistake cuts in another way."""
    inputs = with_gradients(inputs)
    parts = cut(inputs, len(target_gpus), dim, chunk)
    has_tensors = bool(tensors_in(inputs))
    return {
        "parts": settled(parts),
        "the form of part 0": form(parts[0]),
        "devices": [
            f"cuda:{target_gpus[i % len(target_gpus)]}" if has_tensors else "no tensor"
            for i in range(len(parts))
        ],
        "gradients": gradients_after(
            differently(tensors_in(parts)), tensors_in(inputs)
        ),
        "the inputs are as they were": True,
        "whole tensors went to several GPUs": False,
    }


def whole_parts(tensor, n, dim):
    """Parts of rows // n rows, and what is left over as one more."""
    return tensor.split(max(tensor.size(dim) // n, 1), dim)


def without_rest(tensor, n, dim):
    """Parts of rows // n rows; what is left over is lost."""
    return whole_parts(tensor, n, dim)[:n]


def pieces_of_n(tensor, n, dim):
    """`split` takes the rows of a piece, where `chunk` takes the number of pieces."""
    return tensor.split(n, dim)[:n]


def every_nth(tensor, n, dim):
    """Row 0 to the first, row 1 to the second, ..."""
    places = [torch.arange(i, tensor.size(dim), n) for i in range(n)]
    return [tensor.index_select(dim, place) for place in places if len(place)]


def always_rows(tensor, n, dim):
    return tensor.chunk(n, 0)


def has_an_empty_piece(attempt):
    """Has a GPU got a part where no rows were left for it?"""
    parts = attempt.got["parts"]
    return len(parts) > len(attempt.expected["parts"]) and any(
        tensor.numel() == 0 for tensor in tensors_in(parts)
    )


def has_others(value):
    """Is there anything in it that is no tensor?"""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(has_others, value))
    return not isinstance(value, torch.Tensor)


def has_fewer_pieces(attempt):
    """Is it a tensor that `chunk` cuts into fewer pieces than there are GPUs?"""
    tensor, n, dim = attempt.args[0], len(attempt.args[1]), attempt.args[2:]
    return isinstance(tensor, torch.Tensor) and len(tensor.chunk(n, *dim)) < n


def nothing_was_cut(attempt):
    """Has each part all the rows, where it should have some of them?"""
    inputs, wanted = attempt.args[0], attempt.expected["parts"]
    return (
        len(wanted) > 1
        and bool(attempt.got["parts"])
        and all(
            difference(part, inputs, 0.0) is None
            and difference(part, one, 0.0) is not None
            for part, one in zip(attempt.got["parts"], wanted, strict=False)
        )
    )


def all_like_the_last(attempt):
    """Has each GPU the part that belongs to the last one?"""
    parts, wanted = attempt.got["parts"], attempt.expected["parts"]
    return (
        len(parts) == len(wanted) > 1
        and difference(wanted[0], wanted[-1], 0.0) is not None
        and all(difference(part, wanted[-1], 0.0) is None for part in parts)
    )


def lacks_what_is_no_tensor(attempt):
    """Has part 0 what is no tensor, and part 1 None in its place?"""
    first, *others = attempt.got["parts"]
    wanted = attempt.expected["parts"]
    return difference(first, wanted[0], 0.0) is None and any(
        form(part).count("None") > form(one).count("None")
        for part, one in zip(others, wanted[1:], strict=True)
    )


NOTHING_CUT = (
    "Nothing was cut: each part has all the rows. Are tensors, tuples, lists and dicts "
    "all handled?"
)
ROWS = [whole_numbers((rows, 2), rank=rows) for rows in range(31)]
WIDE = ROWS[6].T.contiguous()
CUBE = whole_numbers((2, 3, 6), rank=31)
WORDS = {"name": "a batch", "scale": 3}

SCATTER = Task(
    id="03.scatter",
    title="Scatter",
    stars=2,
    run=try_scatter,
    cases=(
        (ROWS[6], [0, 1]),
        (ROWS[30], [0, 1, 2]),
        (ROWS[9], [0, 1, 2, 3]),
        (ROWS[7], [0, 1, 2]),
        (ROWS[2], [0, 1, 2, 3]),
        (ROWS[5], [0]),
        (CUBE, [0, 1, 2], 1),
        (ROWS[5], [2, 0]),
        ((ROWS[6], ROWS[6] + 1), [0, 1, 2]),
        ([ROWS[8], ROWS[8][:, 0]], [0, 1, 2, 3]),
        ({"x": ROWS[9], "y": ROWS[9] * 2}, [0, 1]),
        ((ROWS[6], {"mask": [ROWS[6], None], **WORDS}), [0, 1]),
        (("text", 7), [0, 1, 2]),
        ((), [0, 1]),
        ([], [0, 1]),
        ({}, [0, 1]),
        ((ROWS[4], [], {}), [1, 3]),
        ((WIDE, {"m": [WIDE]}), [0, 1, 2], -1),
        (CUBE, [1, 0], 2),
    ),
    expect=scattered,
    forbids=(
        "torch.nn.parallel.scatter_gather.scatter",
        "torch.nn.parallel.scatter_gather.scatter_kwargs",
        "torch.nn.parallel.comm.scatter",
    ),
    instead="`torch.chunk` cuts, and `.to(device)` copies.",
    mistakes=(
        Mistake(
            like=lambda *args: scattered(*args, chunk=torch.tensor_split),
            says="You cut as evenly as possible: 9 rows on 4 GPUs are 3 + 2 + 2 + 2. "
            "PyTorch gives each GPU ceil(rows / GPUs) rows while there are any: 3 + 3 "
            "+ 3, and nothing for the fourth. `torch.chunk` does just that.",
        ),
        Mistake(
            when=has_an_empty_piece,
            says="A GPU got an empty piece: 9 rows on 4 GPUs are 3 + 3 + 3, and then "
            "no rows are left. Where that is so, there is no part.",
        ),
        Mistake(
            like=lambda *args: scattered(*args, chunk=whole_parts),
            says="With rows // GPUs rows in a part, there are more parts than GPUs "
            "where the division leaves a rest. Round up, as `torch.chunk` does.",
        ),
        Mistake(
            like=lambda *args: scattered(*args, chunk=without_rest),
            says="Rows are lost: with rows // GPUs rows in a part, the rest of the "
            "division belongs to no part. Round up, as `torch.chunk` does.",
        ),
        Mistake(
            like=lambda *args: scattered(*args, chunk=pieces_of_n),
            says="Each piece has as many rows as there are GPUs. The argument of "
            "`split` is how many rows a piece has; `chunk` takes how many pieces "
            "there are.",
        ),
        Mistake(
            like=lambda *args: scattered(*args, chunk=every_nth),
            says="You dealt the rows out one by one, like cards. Each GPU gets rows "
            "that follow each other, so that gather can put them back in order.",
        ),
        Mistake(
            when=lambda attempt: (
                not isinstance(attempt.args[0], torch.Tensor)
                and attempt.args[2:] != ()
                and wrong_in("parts")(attempt)
            ),
            says="Inside a tuple, list or dict the tensors are cut along another "
            "dimension. Pass `dim` on when the function calls itself.",
        ),
        Mistake(
            like=lambda *args: scattered(*args, chunk=always_rows),
            says="You cut along dimension 0. The third argument says which dimension.",
        ),
        Mistake(
            when=lambda attempt: (
                isinstance(attempt.args[0], (tuple, list, dict)) and not attempt.args[0]
            ),
            says="An empty tuple, list or dict has no items to scatter, so `zip` gives "
            "nothing. Like all that holds no tensor, it goes to every GPU as it is.",
        ),
        Mistake(
            when=lambda attempt: (
                nothing_was_cut(attempt) and isinstance(attempt.args[0], dict)
            ),
            says=f"{NOTHING_CUT} (`values()` of a dict is none of them.)",
        ),
        Mistake(when=nothing_was_cut, says=NOTHING_CUT),
        Mistake(
            when=lambda attempt: (
                has_fewer_pieces(attempt)
                and (attempt.error == "IndexError" or says("zip() argument")(attempt))
            ),
            says="There are fewer pieces than GPUs here: 9 rows on 4 GPUs are 3 + 3 + "
            "3. Go on with the pieces that are there, and leave the other GPUs out.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == "RecursionError" and "'" in form(attempt.args[0])
            ),
            says="It calls itself without end. Does it take a text apart? A text "
            "consists of texts, and a loop over a dict gives its keys. Only tuples and "
            "lists are for `for item in inputs`: ask `isinstance`.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["parts"]) == 1 < len(attempt.expected["parts"])
                and has_others(attempt.args[0])
            ),
            says="What is no tensor goes to every GPU: repeat it, once for each of "
            "`target_gpus`. Where it is there only once, `zip` ends after one part.",
        ),
        Mistake(
            when=lambda attempt: (
                lacks_what_is_no_tensor(attempt) and has_others(attempt.args[0])
            ),
            says="What is no tensor goes to every GPU: repeat it, once for each of "
            "`target_gpus`. Here only the first GPU got it, the others have None.",
        ),
        Mistake(
            when=all_like_the_last,
            says="All GPUs have the part of the last one. Are all parts one and the "
            "same dict or list? `[{}] * n` is one dict, n times: make a new one for "
            "each GPU, `[{} for _ in target_gpus]`.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["parts"]) != len(attempt.expected["parts"])
                and isinstance(attempt.args[0], (tuple, list, dict))
            ),
            says="scatter returns a part for each GPU, and each part has the form of "
            "the inputs: of (x, y) on two GPUs the parts are (x0, y0) and (x1, y1). "
            "Scatter each of the items, then put together what belongs to one GPU: "
            "`zip(*...)` does that.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["the form of part 0"]
                not in (None, attempt.expected["the form of part 0"])
            ),
            says="Each part must have the form of the inputs: a tuple for a tuple, a "
            "list for a list, a dict with the same keys for a dict. Whatever is no "
            "tensor goes to every GPU as it is.",
        ),
        Mistake(
            when=lambda attempt: (
                set(attempt.got["devices"]) == {"cpu"} and wrong_in("devices")(attempt)
            ),
            says="The rows are right, but all parts are still on the CPU. Part i "
            "belongs on device `target_gpus[i]`.",
        ),
        Mistake(
            when=wrong_in("devices"),
            says="The rows are right, but they are on other GPUs: part i belongs on "
            "device `target_gpus[i]`, which need not be cuda:i.",
        ),
        Mistake(
            when=wrong_in("gradients"),
            says="The values are right, but the gradients do not find their way back "
            "to the inputs. `.to(device)` and `chunk` can be differentiated. "
            "`detach`, `.data`, `torch.tensor(...)` and `no_grad` cut the graph.",
        ),
        Mistake(
            when=wrong_in("the inputs are as they were"),
            says="The parts are right, but the inputs are not what they were: "
            "something was put into a list or dict that was given. Whoever called the "
            "function may still need it. Make new lists and dicts.",
        ),
        Mistake(
            when=wrong_in("whole tensors went to several GPUs"),
            says="The parts are right, but each GPU was sent all rows and cut out its "
            "own: that takes the time, and the memory, of the whole batch on every "
            "GPU. Cut first, and copy only the piece.",
        ),
        Mistake(
            when=says("has no attribute 'chunk'"),
            says="Only tensors can be cut. Ask `isinstance(inputs, torch.Tensor)` "
            "first; tuples, lists and dicts have tensors inside.",
        ),
        Mistake(
            when=says("has no attribute 'to'"),
            says="Only tensors can be moved. Ask `isinstance(inputs, torch.Tensor)` "
            "first; tuples, lists and dicts have tensors inside.",
        ),
        Mistake(
            when=lambda attempt: (
                "'NoneType' object" in attempt.message and has_others(attempt.args[0])
            ),
            says="Something is None: is it an item of the inputs, or what `scatter` "
            "returned for an item? For what is neither a tensor nor a tuple, list or "
            "dict it must return a list, too: the thing itself, once for each GPU.",
        ),
    ),
    hints=(
        "Begin with a single tensor: cut it, and copy each piece to its device. Then "
        "let the function call itself for what is inside a tuple, list or dict.",
        "For a tuple (x, y), scatter x and y, each into one piece for each GPU. Then "
        "`zip(*[pieces_of_x, pieces_of_y])` pairs what belongs to one GPU. Whatever is "
        "neither a tensor nor a container is repeated.",
        "Three cases and a rest:\n"
        "  if isinstance(inputs, torch.Tensor):\n"
        "      pieces = inputs.chunk(len(target_gpus), dim)\n"
        "      return [piece.to(...) for piece, gpu in zip(pieces, target_gpus)]\n"
        "  if isinstance(inputs, (tuple, list)) and inputs:\n"
        "      parts = zip(*[scatter(item, ...) for item in inputs])\n"
        "      return [type(inputs)(part) for part in parts]\n"
        "  if isinstance(inputs, dict) and inputs:\n"
        "      ...  # the values like a tuple, then dict(zip(inputs, part))\n"
        "  return [inputs] * len(target_gpus)",
    ),
)

# ----------------------------------------------------------------------------- gather


@on_gpus(4)
def try_gather(answer, gpus, outputs, target, dim=0):
    there = [
        mapped(lambda tensor, i=i: wanting(tensor.to(f"cuda:{(i + 1) % 4}")), output)
        for i, output in enumerate(outputs)
    ]
    joined = answer(there, target, dim)
    return {
        "joined": joined,
        "form": form(joined),
        "device": devices_of(joined),
        "gradients": gradients_after(
            differently(tensors_in(joined)), tensors_in(there)
        ),
    }


def join(outputs, dim, one=torch.cat):
    """Nested outputs joined, all on the CPU."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return one([o.reshape(1) if not o.dim() else o for o in outputs], dim)
    if isinstance(first, dict):
        return {key: join([o[key] for o in outputs], dim, one) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(
            join(group, dim, one) for group in zip(*outputs, strict=True)
        )
    return first


def gathered(outputs, target, dim=0, one=torch.cat):
    """What the check expects; a mistake joins in another way."""
    there = [with_gradients(output) for output in outputs]
    joined = join(there, dim, one)
    has_tensors = bool(tensors_in(joined))
    return {
        "joined": settled(joined),
        "form": form(joined),
        "device": f"cuda:{target}" if has_tensors else "no tensor",
        "gradients": gradients_after(
            differently(tensors_in(joined)), tensors_in(there)
        ),
    }


def added(tensors, dim):
    return sum(tensors)


def averaged(tensors, dim):
    return sum(tensors) / len(tensors)


def pieces_of(*rows):
    """One tensor for each device, with that many rows."""
    return [whole_numbers((count, 2), rank=i) for i, count in enumerate(rows)]


LOSSES = [torch.tensor(value) for value in (1.0, 2.5, 4.0)]


def are_losses(attempt):
    """Is each output a tensor without dimensions?"""
    first = attempt.args[0][0]
    return isinstance(first, torch.Tensor) and first.dim() == 0


GATHER = Task(
    id="03.gather",
    title="Gather",
    stars=1,
    run=try_gather,
    cases=(
        (pieces_of(2, 2), 0),
        (pieces_of(3, 3, 1), 0),
        (pieces_of(2, 2, 2, 2), 2),
        (pieces_of(4), 2),
        ([CUBE, CUBE + 1, CUBE + 2], 1, 2),
        ([(a, a * 2) for a in pieces_of(2, 1)], 0),
        ([[a, None] for a in pieces_of(1, 1, 1)], 0),
        ([{"x": a, "deep": (a + 1, [a.long()])} for a in pieces_of(2, 2, 1)], 1),
        (LOSSES, 0),
        (LOSSES[:1], 2),
        ([{"loss": loss, "n": loss.reshape(1) * 2} for loss in LOSSES], 0),
        ([None, None], 0),
        ([{"x": a, "deep": (a + 1,)} for a in (ROWS[2], ROWS[2] * 2)], 0, -1),
    ),
    expect=gathered,
    forbids=(
        "torch.nn.parallel.scatter_gather.gather",
        "torch.nn.parallel.comm.gather",
    ),
    instead="`.to(device)` copies, and `torch.cat` joins.",
    mistakes=(
        Mistake(
            when=says("zero-dimensional tensor"),
            says="A loss has no dimension along which torch.cat could join it. Join "
            "such tensors to a vector with one number for each GPU: `torch.stack`.",
        ),
        Mistake(
            when=says("Expected all tensors to be on the same device"),
            says="torch.cat cannot join tensors of different devices. Copy each of "
            "them to the target device first. (Output i need not be on cuda:i.)",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == "TypeError"
                and "must be Tensor" in attempt.message
                or says(
                    "has no attribute 'to'",
                    "'NoneType' object",
                    "dictionary update sequence",  # dict(...) of what it found in dicts
                )(attempt)
            ),
            says="The outputs may be tuples, lists and dicts of tensors, or None. Look "
            "at the first output to see which, and let the function call itself for "
            "what is inside.",
        ),
        Mistake(
            like=lambda *args: gathered(
                *args, one=lambda tensors, dim: torch.cat(tensors[::-1], dim)
            ),
            says="The pieces are joined in the reverse order. The rows must come out "
            "in the order of the GPUs, which is that of the batch.",
        ),
        Mistake(
            when=lambda attempt: (
                not isinstance(attempt.args[0][0], torch.Tensor)
                and attempt.args[2:] != ()
                and wrong_in("joined")(attempt)
            ),
            says="Inside a tuple, list or dict the tensors are joined along another "
            "dimension. Pass `dim` on when the function calls itself.",
        ),
        Mistake(
            like=lambda *args: gathered(
                *args, one=lambda tensors, dim: torch.cat(tensors, 0)
            ),
            says="You joined along dimension 0. The third argument says which one.",
        ),
        *(
            Mistake(
                like=lambda *args, one=one: gathered(*args, one=one),
                says="The outputs belong to different rows: they are joined, not added "
                "and not averaged. (What is added up are the gradients, and autograd "
                "does that.)",
            )
            for one in (added, averaged)
        ),
        Mistake(
            when=lambda attempt: (
                are_losses(attempt) and attempt.got["joined"].dim() == 2
            ),
            says="The losses are there, but in a table with one number in each row. "
            "Join them to a vector: torch.stack of the losses as they are, or "
            "torch.cat of vectors with one number each.",
        ),
        Mistake(
            when=lambda attempt: (
                isinstance(attempt.got["joined"], torch.Tensor)
                and attempt.got["joined"].dim() == attempt.expected["joined"].dim() + 1
            ),
            says="torch.stack makes a new dimension. Rows are joined along one that "
            "is there already: `torch.cat`.",
        ),
        Mistake(
            when=lambda attempt: are_losses(attempt) and wrong_in("gradients")(attempt),
            says="The numbers are right, but the gradients do not find their way back "
            "to the losses. `.item()`, `float(...)` and `torch.tensor(...)` take a "
            "number out of the graph. Join the tensors themselves: `torch.stack`.",
        ),
        Mistake(
            when=lambda attempt: (
                are_losses(attempt)
                and (attempt.error or not wrong_in("device")(attempt))
            ),
            says="Return all the losses, as a vector with one number for each GPU. The "
            "caller decides what to make of them, usually `.mean()`.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["form"] != attempt.expected["form"]
                and attempt.got["joined"] is not None
            ),
            says="The result must have the form of one output: a tuple for tuples, a "
            "list for lists, a dict with the same keys for dicts, None for None.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("device")(attempt)
                and not isinstance(attempt.args[0][0], torch.Tensor)
            ),
            says="The values are right, but inside a tuple, list or dict they are not "
            "all on `target_device`. Pass it on when the function calls itself.",
        ),
        Mistake(
            when=wrong_in("device"),
            says="The values are right, but on another device than `target_device`.",
        ),
        Mistake(
            when=wrong_in("gradients"),
            says="The values are right, but the gradients do not find their way back "
            "to the outputs. `.to(device)` and `torch.cat` can be differentiated. "
            "`detach`, `.data`, `torch.tensor(...)` and `no_grad` cut the graph.",
        ),
    ),
    hints=(
        "Two steps: all tensors must be on one device before they can be joined.",
        "Look at the first output: is it a tensor, None, a dict, or a list or tuple? "
        "For the last two, gather the first items of all outputs, then the second "
        "ones: `zip(*outputs)` gives these groups.",
        "Four cases:\n"
        "  first = outputs[0]\n"
        "  if isinstance(first, torch.Tensor):\n"
        "      here = [output.to(...) for output in outputs]\n"
        "      # numbers (first.dim() == 0): torch.stack, else torch.cat\n"
        "  if first is None: ...\n"
        "  if isinstance(first, dict):\n"
        "      return {key: gather([o[key] for o in outputs], ...) for key in first}\n"
        "  return type(first)(gather(group, ...) for group in zip(*outputs))",
    ),
)


# -------------------------------------------------------------------------- replicate


class Times(nn.Module):
    """A layer whose one tensor is a buffer."""

    def __init__(self, number):
        super().__init__()
        self.register_buffer("factor", torch.tensor(number))

    def forward(self, x):
        return x * self.factor


class Network(nn.Module):
    """What the check replicates: weights used twice, a frozen one, buffers."""

    def __init__(self, kind):
        super().__init__()
        self.first = in_eighths(3, 3, seed=1)
        self.last = in_eighths(3, 3, seed=2)
        if kind == SHARED:
            self.last.weight = self.first.weight
        self.twice = nn.Sequential(in_eighths(3, 3, seed=3))
        if kind != PLAIN:
            self.twice.append(Times(2.0))
        self.again = self.twice if kind == SHARED else None
        self.frozen = in_eighths(3, 3, seed=4)
        self.frozen.requires_grad_(kind != SHARED)
        self.register_buffer("scale", torch.tensor(0.5) if kind != PLAIN else None)
        self.register_buffer("rows", torch.tensor(0) if kind != PLAIN else None)

    def forward(self, x):
        y = self.last(self.twice(self.first(x)))
        y = y if self.again is None else self.again(y)
        if self.rows is not None:
            self.rows += len(x)
            y = y * self.scale
        return self.frozen(y)


PLAIN, BUFFERS = "a network of linear layers", "a network with buffers"
SHARED = "a network with shared weights"


def gradients_of(network):
    return {
        f"gradient of {name}": parameter.grad
        for name, parameter in network.named_parameters()
    }


def of_a(value):
    """What stands in the place of a replica: "a Linear"."""
    return f"a {type(value).__name__}, not a {Network.__name__}"


def weights_seen(network):
    """What one replica works with: its weights and its buffers."""
    buffers = [b for b in (network.scale, network.rows) if b is not None]
    buffers += [layer.factor for layer in network.twice[1:]]
    layers = [network.first, network.last, network.twice[0], network.frozen]
    return [layer.weight for layer in layers] + [layers[0].bias] + buffers


@on_gpus(4)
def try_replicate(answer, gpus, kind, devices):
    network = Network(kind).to(f"cuda:{devices[0]}").train(kind != PLAIN)
    parameters, modules = list(network.parameters()), set(network.modules())
    tensors = [*parameters, *network.buffers()]
    want = replicated(kind, devices)
    replicas = answer(network, devices)
    if hasattr(replicas, "__next__"):
        replicas = list(replicas)
    if not isinstance(replicas, (list, tuple)):
        return dict.fromkeys(want) | {"replicas": replicas}
    result = {
        "replicas": f"a list of {len(replicas)}",
        "device of the network": devices_of(parameters),
        "the network has its parameters and buffers": all(
            map(operator.is_, [*network.parameters(), *network.buffers()], tensors)
        ),
        "the replicas are different objects": len(set(map(id, replicas)))
        == len(replicas),
        "devices of the replicas": [
            devices_of(weights_seen(one)) if isinstance(one, Network) else of_a(one)
            for one in replicas
        ],
    }
    if result == {key: want[key] for key in result}:  # they are modules
        result |= {
            "the replicas are new modules": [
                modules.isdisjoint(replica.modules()) for replica in replicas
            ],
            "the network trains": network.training,
            "the replicas train": [replica.training for replica in replicas],
        }
    if result != {key: want[key] for key in result}:
        return want | result  # running them would only raise an error
    outputs = [
        replica(whole_numbers((i + 1, 3), i).to(f"cuda:{device}"))
        for i, (device, replica) in enumerate(zip(devices, replicas, strict=True))
    ]
    differently(outputs).backward()
    return result | {
        "outputs": outputs,
        "last.weight is first.weight": [
            replica.first.weight is replica.last.weight for replica in replicas
        ],
        "again is twice": [replica.again is replica.twice for replica in replicas],
        **gradients_of(network),
        "rows counted in its buffer": None if kind == PLAIN else int(network.rows),
    }


def replicated(kind, devices, rows=1, arriving=None):
    """What the check expects; a mistake leaves gradients of some replicas behind."""
    network = Network(kind)
    outputs = [network(whole_numbers((i + 1, 3), i)) for i in range(len(devices))]
    differently(outputs[:arriving]).backward()
    return {
        "replicas": f"a list of {len(devices)}",
        "device of the network": f"cuda:{devices[0]}",
        "the network has its parameters and buffers": True,
        "the replicas are different objects": True,
        "devices of the replicas": [f"cuda:{i}" for i in devices],
        "the replicas are new modules": [True] * len(devices),
        "the network trains": kind != PLAIN,
        "the replicas train": [kind != PLAIN] * len(devices),
        "outputs": settled(outputs),
        "last.weight is first.weight": [kind == SHARED] * len(devices),
        "again is twice": [kind == SHARED] * len(devices),
        **gradients_of(network),
        "rows counted in its buffer": None if kind == PLAIN else rows,
    }


def no_gradients(attempt):
    return not any(
        isinstance(value, torch.Tensor) and value.any()
        for key, value in attempt.got.items()
        if key.startswith("gradient of ")
    )


def is_misplaced(network):
    """A test of an attempt: are replicas of this network on wrong devices?"""
    return lambda attempt: (
        wrong_in("devices of the replicas")(attempt) and attempt.args[0] == network
    )


ON_ITS_DEVICE = (
    "Replica i must be a module like the network, with all its weights and buffers on "
    "`devices[i]`."
)

REPLICATE = Task(
    id="03.replicate",
    title="Replicate",
    stars=3,
    run=try_replicate,
    cases=(
        (PLAIN, [0, 1]),
        (BUFFERS, [0, 1, 2]),
        (SHARED, [0, 1]),
        (SHARED, [0, 1, 2, 3]),
        (PLAIN, [0]),
        (BUFFERS, [2, 0]),
        (PLAIN, [1, 3]),
    ),
    expect=replicated,
    forbids=(
        "torch.nn.parallel.replicate.replicate",
        "torch.nn.parallel.comm.broadcast_coalesced",
    ),
    instead="Copy the tensors with `.to(device)`.",
    mistakes=(
        Mistake(
            when=wrong_in("the network has its parameters"),
            says="Afterwards the network has other parameters or buffers than before. "
            "A shallow copy (`copy.copy`) of a module shares the dictionaries "
            "`_parameters`, `_buffers` and `_modules` with it: what you put into the "
            "replica, you put into the network. Give the replica dictionaries of its "
            "own.",
        ),
        Mistake(
            when=wrong_in("device of the network"),
            says="The network itself has moved. `module.to(device)` and `.cpu()` "
            "change the module that they are called on, and return it: a list of what "
            "they return holds one and the same network several times. (A tensor's "
            "`.to` leaves the tensor where it is. And a shallow copy of a module, by "
            "`copy.copy`, has the module's own parameters.)",
        ),
        Mistake(
            when=wrong_in("replicas"),
            says="Return a list, with one replica for each device.",
        ),
        Mistake(
            when=wrong_in("the replicas are different objects"),
            says="One module stands in the list several times. (copy.deepcopy writes "
            "into its second argument what it has copied, and the next call takes it "
            "from there: give it a new dict for each device.)",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("devices of the replicas")(attempt)
                and "not a Network" in str(attempt.got["devices of the replicas"])
            ),
            says="A replica must be a module of the network's own class, with "
            "submodules and tensors under the same names: whoever uses it may ask for "
            "`replica.layer.weight`. A shallow or deep copy of the network is one.",
        ),
        Mistake(
            when=lambda attempt: (
                is_misplaced(PLAIN)(attempt)
                and attempt.got["devices of the replicas"]
                == [f"cuda:{attempt.args[1][0]}"] * len(attempt.args[1])
            ),
            says=f"{ON_ITS_DEVICE} (If you give copy.deepcopy a dict of copies, its "
            "keys are the ids of the network's own tensors, those of "
            "`network.parameters()`. `state_dict()` makes other objects.)",
        ),
        Mistake(
            when=is_misplaced(BUFFERS),
            says=f"{ON_ITS_DEVICE} Submodules have buffers, too: `network.buffers()` "
            "has them all.",
        ),
        Mistake(
            when=is_misplaced(SHARED),
            says=f"{ON_ITS_DEVICE} Here a weight has two names, and so has a module. "
            "`named_parameters()` and `named_modules()` give the first name only, "
            "unless they are called with `remove_duplicate=False`.",
        ),
        Mistake(when=wrong_in("devices of the replicas"), says=ON_ITS_DEVICE),
        Mistake(
            when=wrong_in("the replicas are new modules"),
            says="A module of the network stands in a replica. What a replica's "
            "forward sets, such as `self.calls += 1`, would stay in the network. Make "
            "a new module for each of the network's, also for its own device.",
        ),
        Mistake(
            when=wrong_in("the network trains"),
            says="The network was put into another mode, by `train()` or `eval()`. It "
            "stays as it is.",
        ),
        Mistake(
            when=wrong_in("the replicas train"),
            says="A replica is in training mode if the network is, and in eval mode if "
            "the network is. A copy of a module has the mode of the module.",
        ),
        Mistake(
            when=no_gradients,
            says="The replicas compute the right outputs, but their gradients do not "
            "reach the network: each replica has weights of its own. A replica's "
            "weight must be `parameter.to(device)`, which autograd can follow back. "
            "copy.deepcopy, nn.Parameter(...), `.data` and load_state_dict make new "
            "weights.",
        ),
        Mistake(
            when=says("does not require grad"),
            says="The replicas' weights are cut off from the network's: nothing in "
            "their outputs wants a gradient. A replica's weight must be "
            "`parameter.to(device)`, without `detach`, `.data` or `no_grad`.",
        ),
        Mistake(
            when=wrong_in("last.weight is first.weight"),
            says="In this network two layers share one weight, and in a replica they "
            "must share it, too. You copied it once for each layer. Copy each tensor "
            "of `network.parameters()` once, and keep the copies in a dict.",
        ),
        Mistake(
            when=wrong_in("again is twice"),
            says="In this network one module stands in two places, and in a replica it "
            "must, too. You copied it once for each place. Keep a dict from each "
            "module to its copy.",
        ),
        Mistake(
            like=lambda kind, devices: replicated(kind, devices, rows=0),
            says="On its own device the network shares its buffers with the replica, "
            "so that what a forward writes into them (BatchNorm's statistics) is "
            "kept. There, `buffer.to(device)` is no copy: it is the buffer itself.",
        ),
        Mistake(
            like=lambda kind, devices: replicated(kind, devices, arriving=1),
            says="Only the replica on the network's own GPU has sent gradients. The "
            "copies on the other GPUs are cut off from the network: by "
            "`torch.no_grad()`, `detach` or `.data`?",
        ),
        Mistake(
            when=wrong_in("gradient of "),
            says="The gradients of all replicas must add up in the network.",
        ),
        Mistake(
            when=says("'NoneType' object"),
            says="In `_parameters` and `_buffers` there may be None in the place of a "
            "tensor, such as the bias of a layer without one. Leave it as it is.",
        ),
        Mistake(
            when=says("Boolean value of Tensor"),
            says="Were two tensors compared, as keys of a dict are? The keys of "
            "deepcopy's second argument are numbers: `id(tensor)`, not the tensor.",
        ),
        Mistake(
            when=says("Network.__init__() missing"),
            says="Nobody knows with which arguments the network was made, and a new "
            "one would have other weights. Copy the network: with copy.deepcopy, or "
            "module by module.",
        ),
        Mistake(
            when=lambda attempt: "cannot assign" in attempt.message,
            says="A module takes only an nn.Parameter as a new value of a parameter, "
            "and that would be a new leaf. Put the copy into the replica's dictionary: "
            "`replica._parameters[name] = copy`.",
        ),
        Mistake(
            when=lambda attempt: "deepcopy protocol" in attempt.message,
            says="copy.deepcopy copies a tensor only if it is a leaf. Give "
            "it the copies that it is to use in their place: the second argument of "
            "deepcopy is a dict from `id(tensor)` to the copy.",
        ),
    ),
    hints=(
        "A replica is a module of the same class, in which every tensor is replaced by "
        "`tensor.to(device)`. First make these copies, then put them in place.",
        "Make a dict of copies for one device: for each tensor of network.parameters() "
        "and network.buffers(), `tensor.to(device)`. A module of the same form comes "
        "from copy.deepcopy, whose second argument tells it what to use in place of "
        "which object.",
        "For each device:\n"
        "  tensors = [*network.parameters(), *network.buffers()]\n"
        "  copies = {id(tensor): ... for tensor in tensors}\n"
        "  replica = copy.deepcopy(network, copies)\n"
        "deepcopy takes copies[id(x)] for x where there is one, and copies the rest.",
    ),
)

# --------------------------------------------------------------------- parallel_apply

LATE = 0.05  # seconds that the first module takes longer than the last
MEETING = 1.0  # seconds that modules wait for each other
GRACE = 0.2  # seconds in which a thread without work must end


class Part(nn.Module):
    """What the check runs in parallel: it notes what it sees."""

    def __init__(self, place, meeting, pause, fails):
        super().__init__()
        self.place, self.meeting, self.pause, self.fails = place, meeting, pause, fails
        self.here = None  # what was the current device, and were gradients wanted?
        self.met = False
        self.runs = 0
        self.began = self.ended = 0.0

    def forward(self, *args, scale=1):
        self.here = torch.cuda.current_device(), torch.is_grad_enabled()
        self.runs += 1
        self.began = time.monotonic()
        try:
            self.meeting.wait()
            self.met = True
        except threading.BrokenBarrierError:
            pass
        time.sleep(self.pause)
        self.ended = time.monotonic()
        if self.fails:
            raise ArithmeticError(f"replica {self.place} failed")
        return sum(args) * scale


ONE, SEVERAL, SCALED = "one argument each", "two arguments each", "keyword arguments"
MIXED = "one argument, then two"
NO_GRAD, FAILING = "under torch.no_grad()", "the first and the last module fail"
ENDED = "what ended a thread"
RUNS = "how often each module ran"


def in_its_words(error):
    """The text of a module's exception, also where PyTorch has put it into its own."""
    said = set(re.findall(r"replica \d+ failed", str(error)))
    return said.pop() if len(said) == 1 else str(error)


@contextlib.contextmanager
def late_starts():
    """Let each thread begin a little after its start.

    A loop has moved on by then: what a thread reads of its variable is never right by
    chance.
    """
    run = threading.Thread.run

    def run_later(thread):
        time.sleep(0.005)
        run(thread)

    threading.Thread.run = run_later
    try:
        yield
    finally:
        threading.Thread.run = run


def how_they_ran(parts):
    """Did they wait for each other, or has one ended before the next began?"""
    if all(part.met for part in parts):
        return "all at the same time"
    ordered = sorted(parts, key=lambda part: part.began)
    if all(one.ended <= two.began for one, two in itertools.pairwise(ordered)):
        return "one after the other"
    return "not all at the same time"


@contextlib.contextmanager
def ends_noted():
    """Note each exception that ends a thread: its type, its text, the learner's line.

    Those of `Part` are left out: that they are lost is another mistake.
    """
    noted = []

    def note(ended):
        frames = traceback.extract_tb(ended.exc_traceback)
        lines = [place(f.filename, f.lineno) for f in frames if is_learners(f.filename)]
        if ended.exc_type is not ArithmeticError:
            noted.append([ended.exc_type.__name__, str(ended.exc_value), *lines[-1:]])

    before, threading.excepthook = threading.excepthook, note
    try:
        yield noted
    finally:
        threading.excepthook = before


@on_gpus(4)
def try_parallel_apply(answer, gpus, kind, devices):
    n = len(devices)
    meeting = threading.Barrier(n, timeout=MEETING)
    pauses = [LATE * (n - 1 - i) / n for i in range(n)]  # the last one ends first
    fails = [0, n - 1] if kind == FAILING else []
    if kind == FAILING:  # while others still run
        pauses = [LATE / 2, *[LATE] * (n - 2), 0]
    parts = [Part(i, meeting, pauses[i], i in fails) for i in range(n)]
    inputs = [
        whole_numbers((2,), i).to(f"cuda:{device}").requires_grad_()
        for i, device in enumerate(devices)
    ]
    several = {SEVERAL: range(n), MIXED: range(1, n)}.get(kind, ())
    given = [(x, x) if i in several else x for i, x in enumerate(inputs)]
    kwargs = [{"scale": 10 + i} for i in range(n)] if kind == SCALED else None
    before = set(threading.enumerate())
    failed = "nothing"
    outputs = None
    with torch.set_grad_enabled(kind != NO_GRAD), ends_noted() as ended, late_starts():
        try:
            outputs = answer(parts, given, kwargs, devices=devices)
        except ArithmeticError as error:
            failed = in_its_words(error)
    running = set(threading.enumerate()) - before
    if all(part.ended for part in parts):  # a pool's idle threads end a bit later
        for thread in running:
            thread.join(GRACE)
        running = set(filter(threading.Thread.is_alive, running))
    if hasattr(outputs, "__next__"):
        outputs = list(outputs)
    there = outputs if isinstance(outputs, (list, tuple)) else ()
    return {
        ENDED: ended[0] if ended else "nothing",
        "raised": failed,
        RUNS: [part.runs for part in parts],
        "outputs": None if failed != "nothing" else outputs,
        "the modules ran": how_they_ran(parts),
        "current devices": [part.here and part.here[0] for part in parts],
        "gradients wanted": [part.here and part.here[1] for part in parts],
        "devices of the outputs": list(map(devices_of, there)),
        "gradients of the inputs": gradients_after(
            differently(tensors_in(there)), inputs
        ),
        "threads still running": len(running),
    }


def applied(kind, devices):
    n = len(devices)
    inputs = [whole_numbers((2,), i).requires_grad_() for i in range(n)]
    outputs = []
    for i, x in enumerate(inputs) if kind != FAILING else ():
        twice = kind == SEVERAL or kind == MIXED and i > 0
        outputs.append(x * (2 if twice else 10 + i if kind == SCALED else 1))
    if kind == NO_GRAD:
        outputs = settled(outputs)
    return {
        ENDED: "nothing",
        "raised": "replica 0 failed" if kind == FAILING else "nothing",
        RUNS: [1] * n,
        "outputs": None if kind == FAILING else settled(outputs),
        "the modules ran": "all at the same time",
        "current devices": list(devices),
        "gradients wanted": [kind != NO_GRAD] * n,
        "devices of the outputs": [f"cuda:{i}" for i in devices[: len(outputs)]],
        "gradients of the inputs": gradients_after(differently(outputs), inputs),
        "threads still running": 0,
    }


TUPLES = (
    "An input may be a tuple of several arguments: `module(*input, **kwargs)`. One "
    "that is no tuple is the only argument, and without `kwargs_tup` there are no "
    "keyword arguments. Each input has its own form."
)

PARALLEL_APPLY = Task(
    id="03.parallel_apply",
    title="Parallel apply",
    stars=2,
    run=try_parallel_apply,
    cases=(
        (ONE, [0]),
        (ONE, [0, 1, 2]),
        (SEVERAL, [0, 1]),
        (SCALED, [0, 1, 2, 3]),
        (NO_GRAD, [0, 1]),
        (FAILING, [0, 1, 2, 3]),
        (SCALED, [2, 0]),
        (MIXED, [1, 3]),
    ),
    expect=applied,
    forbids=("torch.nn.parallel.parallel_apply.parallel_apply",),
    instead="Python's `threading.Thread` is all you need.",
    mistakes=(
        Mistake(
            when=lambda attempt: attempt.got["threads still running"],
            says="You returned or raised while threads were still running. Start all "
            "of them, then `join()` all of them, and only then raise or return.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] != SCALED and "NoneType" in str(attempt.got[ENDED])
            ),
            says="`kwargs_tup` is None where there are no keyword arguments.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] in (SEVERAL, MIXED)
                and "TypeError" in str(attempt.got[ENDED])
            ),
            says=TUPLES,
        ),
        Mistake(
            when=lambda attempt: isinstance(attempt.got[ENDED], list),
            says="This exception ended its thread, and nothing else: the caller does "
            "not hear of it.",
        ),
        Mistake(
            when=lambda attempt: 0 in attempt.got[RUNS] and max(attempt.got[RUNS]) > 1,
            says="One module ran several times, and another one not at all. Did each "
            "thread use the variable of your loop? It has moved on by the time the "
            "thread reads it. Give each thread its number: `Thread(target=call, "
            "args=(i,))`.",
        ),
        Mistake(
            when=lambda attempt: max(attempt.got[RUNS]) > 1,
            says="A module ran more than once. Call each once, in its own thread.",
        ),
        Mistake(
            when=lambda attempt: None in attempt.got["current devices"],
            says="A module was not run at all. If your function catches exceptions, "
            "one of them may tell why: keep them, and raise the first when all threads "
            "have ended.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["the modules ran"] == "one after the other"
            ),
            says="The modules ran one after the other. Start all threads first, and "
            "`join()` them in a second loop: `start(); join()` in one loop waits for "
            "each thread before it starts the next. Nor may a lock let them in one by "
            "one.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["the modules ran"] == "not all at the same time"
            ),
            says="The modules did not all run at the same time. Each needs a thread of "
            "its own, however few cores there are, and all must be started before one "
            "is waited for.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] == FAILING and attempt.got["raised"] == "nothing"
            ),
            says="Two of the modules raised an exception, and nobody heard of it: an "
            "exception ends its own thread only. Catch it in the thread, keep it, and "
            "raise it when all threads have ended.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] == FAILING
                and attempt.error != ""
                and "replica 0" in attempt.message
            ),
            says="The order is right: the first module comes first. But raise its "
            "exception itself, and not another one in its place, so that the caller "
            "can catch it by its type.",
        ),
        Mistake(
            when=lambda attempt: attempt.args[0] == FAILING,
            says="Two of the modules raised an exception. Raise that of the first "
            "module, in the order of the list, so that the caller always sees the "
            "same one.",
        ),
        Mistake(
            when=lambda attempt: (
                sorted(map(str, attempt.got["outputs"]))
                == sorted(map(str, attempt.expected["outputs"]))
                and wrong_in("outputs")(attempt)
            ),
            says="These are the right outputs in another order: that in which the "
            "threads came to their end. Output i belongs to module i.",
        ),
        Mistake(
            when=lambda attempt: (
                len(set(map(str, attempt.got["outputs"]))) == 1
                and len(attempt.got["outputs"]) > 1
                and attempt.got["outputs"][0] is not None
            ),
            says="All outputs are the same. Did each thread use the variable of your "
            "loop? It has moved on by the time the thread reads it. Give each thread "
            "its number: `Thread(target=call, args=(i,))`.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("outputs")(attempt)
                and any(output.dim() == 0 for output in attempt.got["outputs"])
            ),
            says="A tensor was taken apart into its elements. An input that is no "
            "tuple is the only argument: `module(input)`, without a star.",
        ),
        Mistake(
            when=lambda attempt: None in attempt.got["outputs"],
            says="Some output is missing. What the thread's function returns is lost: "
            "write it into a list, at the place of the module.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] == SCALED and wrong_in("outputs")(attempt)
            ),
            says="Module i must get the keyword arguments in `kwargs_tup[i]`: "
            "`module(*input, **kwargs_tup[i])`.",
        ),
        Mistake(
            when=wrong_in("current devices"),
            says="The outputs are right, but in a thread the current device was not "
            'its own: what the module makes with device="cuda" would land on the '
            "wrong GPU. Use `with torch.cuda.device(devices[i]):` in the thread.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("gradients wanted")(attempt) and attempt.args[0] != NO_GRAD
            ),
            says="The threads are under torch.no_grad(), and the caller is not: so "
            "nothing can be trained. Ask torch.is_grad_enabled() before you start the "
            "threads, and use `with torch.set_grad_enabled(...)` in each of them.",
        ),
        Mistake(
            when=wrong_in("gradients wanted"),
            says="The caller is under torch.no_grad(), and the threads are not: each "
            "thread has that setting for itself. Ask torch.is_grad_enabled() before "
            "you start them, and use `with torch.set_grad_enabled(...)` in the thread.",
        ),
        Mistake(
            when=wrong_in("devices of the outputs"),
            says="The values are right, but the outputs are not on the devices on "
            "which the modules made them. Leave them there: `gather` brings them "
            "together.",
        ),
        Mistake(
            when=wrong_in("gradients of the inputs"),
            says="The outputs are right, but the gradients do not find their way back "
            "to the inputs. Give each module the inputs as they are, and return what "
            "it returns: `detach`, `.data` and `.item()` cut the graph.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] in (SEVERAL, MIXED, SCALED)
                and attempt.error == "TypeError"
            ),
            says=TUPLES,
        ),
        Mistake(
            when=lambda attempt: "NoneType" in attempt.message,
            says="`kwargs_tup` is None where there are no keyword arguments.",
        ),
    ),
    hints=(
        "One thread for each module. What a thread finds out, it writes into a list "
        "that all of them share.",
        "A function call(i) runs module i and keeps its output, or its exception. "
        "Settings such as no_grad and the current device belong to a thread: read "
        "them before, and set them inside. Start all, join all, then look for "
        "exceptions.",
        "The function that each thread runs:\n"
        "  def call(i):\n"
        "      args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)\n"
        "      try:\n"
        "          with torch.set_grad_enabled(...), torch.cuda.device(...):\n"
        "              outputs[i] = modules[i](*args, **...)\n"
        "      except Exception as error:\n"
        "          errors[i] = error\n"
        "and around it: a loop that starts, a loop that joins, a loop that raises.",
    ),
)

# ---------------------------------------------------------------------- data_parallel

_rows_by_device: list[tuple[str, int]] = []


class Noting(nn.Module):
    """A network that notes how many rows it gets on which device."""

    def __init__(self, as_dict=False):
        super().__init__()
        self.hidden = in_eighths(3, 4, seed=1)
        self.outer = in_eighths(4, 2, seed=2)
        self.register_buffer("scale", torch.tensor(0.5))
        self.as_dict = as_dict

    def forward(self, x, y=None):
        _rows_by_device.append((str(x.device), len(x)))
        out = self.outer(torch.tanh(self.hidden(x))) * self.scale
        out = out if y is None else out + y
        return {"out": out, "hidden": (x,)} if self.as_dict else out


DICT = "a network that returns a dict"
PAIR = "a tuple of two inputs"
SIMPLE = "a network"


def inputs_of(kind, rows):
    rows = rows_in(rows)
    x = whole_numbers((rows, 3), 7)
    return (x, whole_numbers((rows, 2), 8)) if kind == PAIR else x


@on_gpus(4)
def try_data_parallel(answer, gpus, kind, rows, device_ids, output_device):
    network = Noting(as_dict=kind == DICT).to(f"cuda:{device_ids[0]}")
    inputs = mapped(lambda x: x.to(f"cuda:{device_ids[0]}"), inputs_of(kind, rows))
    _rows_by_device.clear()
    output = answer(network, inputs, device_ids, output_device)
    home = devices_of(list(network.parameters()))
    result = {
        "device of the module": home,
        "the module trains": network.training,
        "output": output,
        "rows on each device": dict(sorted(_rows_by_device)),
        "device of the output": devices_of(output),
    }
    tensors = tensors_in(output)[:1]
    has_moved = home != f"cuda:{device_ids[0]}"  # then its backward would fail
    if tensors and not has_moved:  # none where the `return` was forgotten
        differently(tensors).backward()
    return result | gradients_of(network)


def data_paralleled(kind, rows, device_ids, output_device):
    network = Noting(as_dict=kind == DICT)
    inputs = inputs_of(kind, rows)
    output = network(*inputs) if kind == PAIR else network(inputs)
    differently(tensors_in(output)[:1]).backward()
    pieces = torch.zeros(rows_in(rows)).chunk(len(device_ids))
    home = device_ids[0] if output_device is None else output_device
    return {
        "device of the module": f"cuda:{device_ids[0]}",
        "the module trains": True,
        "output": settled(output),
        "rows on each device": {
            f"cuda:{i}": len(piece)
            for i, piece in sorted(zip(device_ids, pieces))  # noqa: B905
        },
        "device of the output": f"cuda:{home}",
        **gradients_of(network),
    }


DATA_PARALLEL = Task(
    id="03.data_parallel",
    title="data_parallel",
    stars=2,
    run=try_data_parallel,
    cases=(
        (SIMPLE, "8 rows", [0, 1], None),
        (SIMPLE, "30 rows", [0, 1, 2], None),
        (SIMPLE, "30 rows", [0, 1, 2, 3], 2),
        (SIMPLE, "9 rows", [0, 1, 2, 3], None),
        (SIMPLE, "2 rows", [0, 1, 2, 3], None),
        (SIMPLE, "5 rows", [2, 0, 1], None),
        (SIMPLE, "6 rows", [0], None),
        (PAIR, "7 rows", [0, 1, 2], 1),
        (DICT, "8 rows", [0, 1, 2], None),
        (SIMPLE, "6 rows", [1, 0], 0),
        (PAIR, "4 rows", [3], None),
    ),
    expect=data_paralleled,
    forbids=(
        "torch.nn.DataParallel",
        "torch.nn.parallel.data_parallel.data_parallel",
    ),
    instead="Put it together from replicate, scatter, parallel_apply and gather.",
    mistakes=(
        Mistake(
            when=wrong_in("device of the module"),
            says="The module itself has moved: `module.to(device)` changes the module "
            "that it is called on. It stays where it is, and `replicate` makes copies.",
        ),
        Mistake(
            when=wrong_in("the module trains"),
            says="The module was put into another mode, by `eval()`. It stays as it "
            "is, and its replicas have its mode.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["rows on each device"]) == 1
                and len(attempt.expected["rows on each device"]) > 1
            ),
            says="Only one GPU has seen any rows. Scatter the inputs, replicate the "
            "module, and run each replica on its part.",
        ),
        Mistake(
            when=lambda attempt: (
                rows_in(attempt.args[1]) < 10
                and len(attempt.args[2]) == 4
                and attempt.error.endswith("Error")
                and attempt.error != "RuntimeError"
            ),
            says="A small batch gives fewer parts than there are GPUs: 9 rows on 4 "
            "GPUs are 3 parts, and 2 rows are 2. Make only as many replicas, on as "
            "many devices, as there are parts.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] == DICT
                and attempt.error in ("TypeError", "AttributeError", "KeyError")
            ),
            says="This module returns a dictionary of tensors. An output may be a "
            "tensor, or tuples, lists and dicts of them: `gather` joins them all.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] == PAIR
                and attempt.error in ("TypeError", "AttributeError")
            ),
            says="The inputs may be a tuple of several arguments. Then a part is a "
            "tuple, too, and the replica must be called with all of it.",
        ),
        Mistake(
            when=says("forward() takes from"),
            says="A replica got the rows of its part one by one. scatter of a tensor "
            "gives tensors, and scatter of a tuple gives tuples: a star belongs only "
            "before a tuple.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("device of the output")(attempt) and attempt.args[3] is None
            ),
            says="Without an output_device, the outputs are gathered on the first "
            "device of device_ids, which need not be cuda:0.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("device of the output")(attempt)
                and attempt.args[3] == 0
                and attempt.got["device of the output"] == f"cuda:{attempt.args[2][0]}"
            ),
            says="`output_device` is 0, and 0 counts as false in Python: with "
            "`output_device or device_ids[0]` you get the first device. Ask `if "
            "output_device is None`.",
        ),
        Mistake(
            when=wrong_in("device of the output"),
            says="The output is right, but not on `output_device`.",
        ),
        Mistake(
            when=wrong_in("rows on each device"),
            says="The output is right, but the rows are spread in another way: part i "
            "is for device_ids[i].",
        ),
        Mistake(
            when=lambda attempt: (
                isinstance(attempt.got["output"], torch.Tensor)
                and attempt.got["output"].shape != attempt.expected["output"].shape
            ),
            says="The rows of all replicas are joined, in their order: `gather` does "
            "that. They are not added and not averaged.",
        ),
        Mistake(
            when=wrong_in("gradient of "),
            says="The output is right, but the gradients in the module are not. Do all "
            "replicas come from `replicate`, and is nothing detached?",
        ),
        Mistake(
            when=says("does not require grad"),
            says="Nothing in the output wants a gradient, so the check's `backward()` "
            "fails. Is something detached, or under `torch.no_grad()`?",
        ),
        Mistake(
            when=says("must be on devices[0]"),
            says="The module is on the first of `device_ids`. Use these numbers, not "
            "0, 1, 2, ...",
        ),
        Mistake(
            when=says("wrapper_CUDA_cat"),
            says="The outputs were joined while they were on different devices. Where "
            "`output_device` is None, gather them on the first of `device_ids`: "
            "`.to(None)` copies nothing.",
        ),
        Mistake(
            when=lambda attempt: "same device" in attempt.message,
            says="A replica got rows that are on another device. Replica i and part i "
            "are both for device_ids[i].",
        ),
    ),
    hints=(
        "Four calls, in the order of the picture in the lesson.",
        "First scatter the inputs: now you know how many parts there are. Then "
        "replicate to that many devices, parallel_apply, and gather on the output "
        "device, or on the first device where none is given.",
        "Four lines and a default:\n"
        "  if output_device is None: output_device = device_ids[0]\n"
        "  parts = scatter(inputs, device_ids)\n"
        "  used = device_ids[:len(parts)]\n"
        "  replicas = replicate(module, used)\n"
        "  outputs = parallel_apply(replicas, parts, devices=used)\n"
        "  return gather(outputs, ...)",
    ),
)

# ---------------------------------------------------------------------- spot_the_mean


CLASSES = 64
FEW = 64  # bytes for each row: some numbers, but no outputs of 64 classes


class Classifier(nn.Module):
    """A model that notes how many of its rows left it as outputs."""

    def __init__(self):
        super().__init__()
        self.layer = in_eighths(3, CLASSES, seed=1)

    def forward(self, x):
        _rows_by_device.append((str(x.device), len(x)))
        return self.layer(x)


def batch(rows):
    """Rows that are the harder to classify the later they come."""
    rows = rows_in(rows)
    x = whole_numbers((rows, 3), 5) * torch.linspace(0.1, 1, rows)[:, None]
    return x, torch.arange(rows) * 7 % CLASSES


@contextlib.contextmanager
def replicas_tell():
    """Raise what went wrong in a replica in its own words, with the learner's line.

    nn.DataParallel raises it with the whole traceback as its text, and the text of the
    exception itself comes last.
    """
    try:
        yield
    except Exception as error:
        of_torch, _, text = str(error).rpartition("Traceback (most recent call last):")
        frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', text, re.MULTILINE)
        said = re.search(r"^\S.*", text, re.MULTILINE | re.DOTALL)
        if "Original " in of_torch and said:
            words = said[0].removeprefix(f"{type(error).__name__}: ")
            lines = words.splitlines()[:2]
            frames = [(file, int(line), name) for file, line, name in frames]
            for at in learner_lines(frames).splitlines()[-1:]:
                lines.append(f"  {cut_off(at, 74)}")
            # The same kind of text: that of a KeyError is shown without quotes.
            error.args = (type(error.args[0])("\n".join(lines)),)
        raise


@on_gpus(4)
def try_loss_inside(answer, gpus, rows, device_ids):
    model = Classifier().to("cuda:0")
    x, y = (tensor.to("cuda:0") for tensor in batch(rows))
    _rows_by_device.clear()
    with_loss = answer(model)
    before = len(gpus.transfers)
    with replicas_tell():
        loss = with_loss.training_step(x, y, device_ids)
    rows_on = dict(sorted(_rows_by_device))
    left = sum(
        copy.bytes
        for copy in gpus.transfers[before:]
        if copy.phase == "forward" and copy.source not in ("cpu", "cuda:0")
    )
    gradient, model.layer.weight.grad = model.layer.weight.grad, None
    with replicas_tell():
        again = with_loss.training_step(x, y, device_ids)
    return {
        "loss": loss,
        "gradient of the weight": gradient,
        "rows on each GPU": rows_on,
        "the outputs leave their GPUs": left > FEW * len(x),
        "the same step again": again,
    }


def loss_of_the_batch(rows, device_ids, mean=torch.mean):
    """The loss of all rows; a mistake takes another mean of the rows' losses."""
    model = Classifier()
    x, y = batch(rows)
    losses = F.cross_entropy(model(x), y, reduction="none")
    pieces = losses.chunk(len(device_ids))
    loss = mean(losses) if mean is torch.mean else mean(pieces)
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradient of the weight": model.layer.weight.grad,
        "rows on each GPU": {f"cuda:{i}": len(p) for i, p in enumerate(pieces)},
        "the outputs leave their GPUs": False,
        "the same step again": loss.detach(),
    }


def rows_seen(report):
    return sum(report["rows on each GPU"].values())


def mean_of_means(pieces):
    return torch.stack([piece.mean() for piece in pieces]).mean()


def sum_of_means(pieces):
    return torch.stack([piece.mean() for piece in pieces]).sum()


def sum_of_all(pieces):
    return torch.cat(pieces).sum()


def mean_of_sums(pieces):
    return torch.stack([piece.sum() for piece in pieces]).mean()


SPOT_THE_MEAN = Task(
    id="03.spot_the_mean",
    title="Spot the mean",
    stars=2,
    run=try_loss_inside,
    cases=(
        ("8 rows", [0, 1]),
        ("8 rows", [0, 1, 2, 3]),
        ("8 rows", [0]),
        ("10 rows", [0, 1, 2, 3]),
        ("9 rows", [0, 1]),
        ("5 rows", [0, 1, 2]),
        ("2 rows", [0, 1, 2, 3]),
    ),
    expect=loss_of_the_batch,
    mistakes=(
        Mistake(
            when=lambda attempt: rows_seen(attempt.got) < rows_seen(attempt.expected),
            says="Rows are missing: the model has seen only a part of the batch. Every "
            "row counts.",
        ),
        Mistake(
            when=lambda attempt: rows_seen(attempt.got) > rows_seen(attempt.expected),
            says="The model has seen more rows than the batch has. Each row counts "
            "once.",
        ),
        Mistake(
            like=lambda *args: loss_of_the_batch(*args, mean=mean_of_means),
            says="That is the mean of the GPUs' means. It is the mean of all rows only "
            "if each GPU has the same number of rows. Here the last one has fewer, and "
            "each of its rows counts for more.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("loss")(attempt)
                and rows_in(attempt.args[0]) < len(attempt.args[1])
            ),
            says="2 rows on 4 GPUs are 2 pieces, so two losses come back and not four. "
            "Does your formula count the GPUs?",
        ),
        Mistake(
            like=lambda *args: loss_of_the_batch(*args, mean=sum_of_means),
            says="That is the sum of the GPUs' means: with two GPUs twice too much, "
            "with four GPUs four times.",
        ),
        Mistake(
            like=lambda *args: loss_of_the_batch(*args, mean=sum_of_all),
            says="That is the sum over all rows. Divide it by the number of rows.",
        ),
        Mistake(
            like=lambda *args: loss_of_the_batch(*args, mean=mean_of_sums),
            says="Each GPU returns its sum, and you divide by the number of GPUs. "
            "Divide the sum of all by the number of rows.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["the outputs leave their GPUs"] is True
                and not wrong_in("loss")(attempt)
            ),
            says="The loss is right. But the outputs of all rows travel to GPU 0 "
            "again: that is what the loss inside forward was to avoid. Return one "
            "number for each row, or for each GPU.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("rows on each GPU")(attempt)
                and 1
                < len(attempt.got["rows on each GPU"])
                < len(attempt.expected["rows on each GPU"])
            ),
            says="The loss is right, but some of the GPUs had nothing to do. Spread "
            "the batch over all `device_ids`, whether they divide it or not.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in("rows on each GPU")(attempt)
                and len(attempt.got["rows on each GPU"])
                > len(attempt.expected["rows on each GPU"])
            ),
            says="The loss is right, but more GPUs have rows than are in `device_ids`. "
            "Pass `device_ids` on: without it, nn.DataParallel takes all GPUs.",
        ),
        Mistake(
            when=wrong_in("rows on each GPU"),
            says="The loss is right, but the batch is not spread over the GPUs any "
            "more. Keep nn.DataParallel.",
        ),
        Mistake(
            when=wrong_in("the same step again"),
            says="The first step is right. The same step again, from the same weights, "
            "has another loss: what does the model keep from one step to the next? "
            "Return from `forward` what the step needs.",
        ),
        Mistake(
            when=lambda attempt: wrong_in("gradient of the weight")(attempt),
            says="The loss is right, but the gradients are not those of this loss. "
            "Call `loss.backward()` on the loss that you return.",
        ),
        Mistake(
            when=lambda attempt: (
                "required positional argument" in attempt.message
                and rows_in(attempt.args[0]) < len(attempt.args[1])
            ),
            says="2 rows on 4 GPUs are 2 pieces. But a number among the keyword "
            "arguments goes to all four GPUs, and nn.DataParallel calls the last two "
            "replicas without any rows. Pass it by its position, or compute with it "
            "in `training_step`.",
        ),
        Mistake(
            when=says("of a 0-d tensor", "over a 0-d tensor"),
            says="Here there is one GPU, and nothing is gathered: nn.DataParallel "
            "returns what `forward` returned, a loss without dimensions. It has no "
            "length and no elements to loop over: `losses.mean()`, `losses.sum()` and "
            "`losses.numel()` work with both.",
        ),
        Mistake(
            when=says("can be implicitly created only for scalar"),
            says="backward starts from one number. Take the mean of the rows' losses "
            "first.",
        ),
        Mistake(
            when=says("'int' object is not iterable", "'float' object is not iterable"),
            says="gather joins tensors only. If a replica is to return a number, too, "
            "such as that of its rows, make a tensor of it, on the device of its rows.",
        ),
        Mistake(
            when=lambda attempt: (
                says("object has no attribute")(attempt)
                and not says("'NoneType'", "'Tensor'", "in forward:")(attempt)
            ),
            says="If it is set in `forward`: there, `self` is a replica, which is gone "
            "after the step. What `training_step` is to know, `forward` must return.",
        ),
        Mistake(
            when=says("'NoneType' object has no attribute"),
            says="Something is None: is it the losses, and did `forward` forget its "
            "`return`?",
        ),
    ),
    otherwise="The loss of a batch is the mean of the losses of all its rows, each of "
    "them once.",
    hints=(
        "Compute it for 3 rows on 2 GPUs, by hand: losses 1, 2 and 6. What does each "
        "GPU return, and what comes out at the end?",
        "(mean(1, 2) + mean(6)) / 2 is not mean(1, 2, 6). The mean must be taken once, "
        "over the losses of all rows. cross_entropy has an argument `reduction`.",
        "One way, in two lines:\n"
        '  forward:        return F.cross_entropy(..., reduction="none")\n'
        "  training_step:  loss = losses.mean()   # now one loss for each row\n"
        "The other: return sums, and divide by len(y) at the end.",
    ),
)

# ---------------------------------------------------------------------- predict_traffic

PREDICT_TRAFFIC = Task(
    id="03.predict_traffic",
    title="Predict the traffic",
    stars=1,
    where="value",
    expect=lambda: 2 * 7 * 100,
    unit="MB",
    mistakes=(
        Mistake(
            like=lambda: 7 * 100,
            says="That is the way out: the parameters, to seven GPUs. In the backward "
            "the same number of gradients comes back.",
        ),
        Mistake(
            like=lambda: 2 * 8 * 100,
            says="GPU 0 sends nothing to itself: seven GPUs get a copy.",
        ),
        Mistake(
            like=lambda: 8 * 100,
            says="GPU 0 sends nothing to itself, so seven GPUs get a copy. And in the "
            "backward the same number of gradients comes back.",
        ),
        Mistake(
            like=lambda: 2 * 100,
            says="That is the traffic with one other GPU. There are seven.",
        ),
        Mistake(
            like=lambda: 100,
            says="That is one copy for one GPU. Seven GPUs get one each, and each "
            "sends its gradients back.",
        ),
        Mistake(
            like=lambda: 3 * 7 * 100,
            says="Parameters go out once, and gradients come back once. The update "
            "itself sends nothing: the next forward sends the new parameters.",
        ),
        Mistake(
            when=lambda attempt: attempt.got in (175, 350),
            says="That is what each GPU would send and receive in a ring all-reduce, "
            "as in DDP. Here all copies count, and DataParallel makes other ones.",
        ),
        Mistake(
            when=lambda attempt: attempt.got in (0.7, 1.4, 1.4e6, 1.4e9),
            says="In MB, please.",
        ),
    ),
    otherwise="How many GPUs get a copy of the parameters in each step, and how many "
    "send gradients back? Each copy has 100 MB.",
    hints=(
        "How many of the eight GPUs get a copy from GPU 0?",
        "In the forward the parameters go out, in the backward gradients of the same "
        "size come back. GPU 0 itself needs no copy.",
        "For 4 GPUs it goes like this:\n"
        "  out    3 * 100 MB\n"
        "  back   3 * 100 MB\n"
        "  sum    600 MB",
    ),
)

TASKS = (
    PREDICT_TRAFFIC,
    SCATTER,
    GATHER,
    REPLICATE,
    PARALLEL_APPLY,
    DATA_PARALLEL,
    SPOT_THE_MEAN,
)
