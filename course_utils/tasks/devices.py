"""For tasks whose code runs on ``cuda:0``, ``cuda:1``, ...: virtual GPUs in a check.

    @on_gpus(2)
    def try_it(answer, gpus, rows):
        return {"output": answer(torch.ones(rows)), "copies": copies(gpus)}

    Task(..., where="here", observe=try_it)

The answer runs in a process of its own, with nothing but the virtual GPUs of the task,
also on a machine that has real ones: only the virtual ones tell what was copied where.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

from course_utils.tasks.compare import plain


def on_gpus(number: int) -> Callable[[Callable], Callable]:
    """Decorate a task's ``observe``: it gets so many virtual GPUs after the answer.

    What it returns is plain data on the CPU, so it outlives the GPUs.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def with_gpus(answer: Any, *args: Any) -> Any:
            from course_utils.virtual_gpus import virtual_gpus

            # PyTorch's own gather says so of losses. It is no news in a check.
            warnings.filterwarnings("ignore", message="Was asked to gather")
            # Times that are the same on every machine; virtual even beside real GPUs.
            settings = {"memory": "1 GiB", "compute": "1 TFLOP/s", "force": True}
            with virtual_gpus(number, **settings) as gpus:
                return plain(run(answer, gpus, *args))

        return with_gpus

    return decorate


def copies(gpus: Any) -> list[str]:
    """The copies of the forward in their order, such as "cuda:0 -> cuda:1"."""
    return [
        f"{copy.source} -> {copy.destination}"
        for copy in gpus.transfers
        if copy.phase == "forward"
    ]


def at_the_same_time(gpus: Any, one: str, other: str) -> bool:
    """Did two devices compute at the same time, at any moment?"""
    rows = gpus.timeline().intervals
    computing = (
        [i for i in rows[device] if i.kind == "compute"] for device in (one, other)
    )
    slack = 1e-12  # seconds: times are sums of floats
    return any(
        min(a.stop, b.stop) - max(a.start, b.start) > slack
        for a, b in itertools.product(*computing)
    )
