"""What may have gone wrong, where no task says so: the same for all tasks."""

from __future__ import annotations

import re
from typing import Any

import torch

from course_utils.ranks import RankFailure
from course_utils.tasks.compare import ADVICE, difference, kind

IN_PLACE = (
    "recv, collectives and operations such as `x /= 2` work in place: take a `clone()` "
    "first."
)
IN_PLACE_LIST = (
    "`pop`, `append`, `sort` and `x[i] = ...` change the list or dict itself: work on "
    "a copy, `x.copy()`. `pow_` or `*=` change a tensor in it: take its `clone()`."
)
KEYBOARD = "Nobody can type anything while a check runs. Use the arguments."
NO_GPU = (
    "The check runs on the CPU. Where your code needs a device, take that of the "
    "tensor that it was given: `tensor.device`."
)
NO_RANKS = "There are no ranks in this task: the check calls it in one process."
GROUP_STAYS = (
    "The process group belongs to the check, which still needs it when your function "
    "has returned: leave out destroy_process_group."
)
ROOM_FOR_ALL = (
    "An all-gather brings one piece from each rank, so the output needs room for "
    "dist.get_world_size() pieces, each as large as the one that is sent."
)
ONE_WAIT = (
    "The wait() of an isend returns when the other rank calls recv. With gloo, a "
    "second wait() for the same request never returns."
)
POLLED = (
    "With gloo, is_completed() stays False until wait() has been called, even when the "
    "message has long arrived. Call wait()."
)
ENDLESS = "Is there a loop that never ends?"
TOO_MANY = (
    "All ranks are in the same collective, so none is missing. Does it call very many? "
    "A few large ones take less time than many small ones."
)
ENDED = (
    "Something ended it before the function could return: a call such as os._exit, a "
    "signal, a crash in C code, or too little memory."
)
SAME_CALLS = (
    "All ranks must make the same calls, in the same order, with tensors that fit, and "
    "a recv needs its send."
)
READY_MADE = (
    "`rank` and `world_size` are ready-made in %%ranks cells only. In a function"
)
# A part of an exception's class and text, and what to say about it.
ERRORS = {
    "Found no NVIDIA driver": NO_GPU,
    "No CUDA GPUs are available": NO_GPU,
    "Torch not compiled with CUDA": NO_GPU,
    "EOFError: ": KEYBOARD,
    "BdbQuit: ": f"There is a breakpoint in it. {KEYBOARD}",
    "SystemExit: ": "It called exit(). A function ends with `return`.",
    "RecursionError: ": "It calls itself again and again. When should it stop?",
    "unsupported operand type(s) for ^": "In Python, `^` does not raise to a power (it "
    "works on the bits of whole numbers). Write `10**9`, or 1e9.",
    "has to be contiguous": "A column, or a tensor that was transposed, is no single "
    "piece of memory. Send a copy that is: `.contiguous()`.",
    "only for scalar outputs": "`backward()` starts from one number, and these are "
    "several: take their mean or their sum first.",
    "invalid output tensor list at index": ROOM_FOR_ALL,
    "The output holds one piece for each of the": ROOM_FOR_ALL,
    "NameError: name 'rank' is": f"{READY_MADE}: dist.get_rank().",
    "NameError: name 'world_size' is": f"{READY_MADE}: dist.get_world_size().",
    "initialize the default process group twice": "The process group is ready when "
    "your function is called: leave out init_process_group.",
    **{f"'{kind}' object": advice for kind, advice in ADVICE.items()},
    "'NoneType' object": "Something is None there. Does a call work in place and "
    "return nothing, as `all_reduce` does? Or has a tensor no gradient?",
}
TAKES = "When called, it must take the arguments of the stub, in the same order."
A_HOOK_TAKES = " And a hook must take what PyTorch gives it, such as the gradient."
# What Python says of a call that does not fit, and not of another TypeError.
WRONG_ARGUMENTS = re.compile(r"(takes|missing|unexpected|multiple values) .*argument")
FEW = 20  # of so small a count, twice as many says nothing
FACTORS = (2, 4, 8, 10, 100, 1000, 1024, 1e6, 2**20, 1e9, 2**30, 1.024, 1.024**2)


def about_error(root: RankFailure, on_ranks: bool) -> str:
    """What an exception means that has little to do with the task; or ""."""
    if "process group has not" in root.message:
        return GROUP_STAYS if on_ranks else NO_RANKS
    if root.kind == "died":
        return ENDED
    text = f"{root.error}: {root.message}"
    if not on_ranks and re.match(r"NameError: name '(rank|world_size)' is", text):
        return NO_RANKS
    if said := next((said for part, said in ERRORS.items() if part in text), ""):
        return said
    # A call that does not fit, of the learner's function itself or of a hook of theirs.
    is_call = root.error == "TypeError" and not root.traceback
    if is_call and WRONG_ARGUMENTS.search(root.message):
        return TAKES + A_HOOK_TAKES * ("." in root.message.partition("()")[0])
    return ""


def diagnose(got: list, want: list, rank: int, args: tuple, tolerance: float) -> str:
    """What the difference looks like, or "".

    Args:
        got: what each rank has.
        want: what each should have.
        rank: the first rank on which they differ.
        args: its arguments.
    """
    n, mine, right = len(got), got[rank], want[rank]

    def alike(one: Any, other: Any) -> bool:
        return difference(one, other, tolerance) is None

    other_dtype = getattr(mine, "dtype", 0) != getattr(right, "dtype", 0)
    if isinstance(right, bool) or kind(mine) != kind(right) or other_dtype:
        return ""  # what the comparison says is all there is to say
    for arg in args:
        if isinstance(arg, torch.Tensor) and alike(mine, arg):
            return "That is the argument, as it was given."
    same_for_all = all(alike(one, want[0]) for one in want)
    only_first = alike(got[0], want[0]) and not any(map(alike, got[1:], want[1:]))
    if n > 1 and same_for_all and only_first:
        return (
            "Only rank 0 has it, and every rank needs it. Does a call give its result "
            "to one rank, as `reduce` and `gather` do, or is there an `if` on the rank?"
        )
    for other in range(n):
        if other != rank and alike(mine, want[other]):
            return f"That is what rank {other} should have."
    if looks := factor(mine, right, n, tolerance, guess=True):
        return looks
    mine, right = numbers_of(mine), numbers_of(right)
    if mine is None or right is None or mine.shape != right.shape:
        return ""
    # Large whole numbers are alike as floats, where they are only nearly right.
    if mine.numel() > 1 and not alike(mine, right):
        if alike(mine.flatten().sort()[0], right.flatten().sort()[0]):
            return "These are the right numbers in another order."
    return ""


def factor(
    got: Any, want: Any, n: int, tolerance: float, *, guess: bool = False
) -> str:
    """Is it the right value times a number that tells something?

    Args:
        guess: say also what may have led to it.
    """
    is_count = isinstance(want, int)
    mine, right = numbers_of(got), numbers_of(want)
    if mine is None or right is None or mine.shape != right.shape:
        return ""

    def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
        return difference(one, other, tolerance) is None

    if not right.any() or not mine.any():
        return ""
    if mine.numel() == 1 and abs(mine - right) == 1:
        return f"That is one too {'many' if mine > right else 'few'}."
    if is_count and right.max() < FEW:
        return ""
    if alike(mine, -right):
        return "The sign is the other one."
    of_ranks = (n, n * n) if n > 1 else ()
    for times in (*of_ranks, *FACTORS):
        may_guess = guess and times == n > 1 and not is_count
        if alike(mine, times * right):
            why = ": a sum where a mean is wanted?" if may_guess else "."
            return f"It is {times:g} times too large{why}"
        if alike(times * mine, right):
            why = ": divided once too often?" if may_guess else "."
            return f"It is {times:g} times too small{why}"
    for written in (2, 3, 4) if n > 1 and not is_count else ():
        if alike(written * mine, n * right):
            return f"Here are {n} ranks. Is a number of ranks, {written}, in your code?"
    return ""


def numbers_of(value: Any) -> torch.Tensor | None:
    """A number, a list of numbers or a tensor in float64; None for all else."""
    items = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, torch.Tensor):
        plain = value.dtype != torch.bool and not value.is_complex()
    else:
        plain = all(type(item) in (int, float) for item in items)
    try:
        return torch.as_tensor(value, dtype=torch.float64) if plain else None
    except OverflowError:  # a whole number of more than 308 digits
        return None
