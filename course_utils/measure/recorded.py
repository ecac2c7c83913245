"""Figures of real GPUs: those on record, with card and date, and those of this machine.

`python3 -m course_utils test --gpu` writes the record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_utils import ROOT
from course_utils.theory import costs

RECORD = ROOT / "tests" / "gpu" / "record.json"

# The rows of the record that say how fast bytes move, and how pictures call them.
_LINKS = {
    "memory of the GPU, a copy": ("memory, a copy", "in a GPU", "shared"),
    "host, pinned, to the GPU": ("host to GPU, pinned", "in a node", "one way"),
    "host, pageable, to the GPU": ("host to GPU, pageable", "in a node", "one way"),
}


def gpu_record(path: Path = RECORD) -> dict[str, Any] | None:
    """The record: date, card, driver, torch, rows, differences; None if there is none.

    Each row is a dictionary with ``row`` (what was measured), ``ratio``, ``unit`` and
    ``aa``, as a benchmark prints it.
    """
    if not path.exists():
        return None
    return json.loads(path.read_text("utf-8"))


def measured_links(path: Path = RECORD) -> list[costs.Link]:
    """How fast bytes move in a real machine, to set beside what data sheets promise.

    With a GPU, that is this machine, measured now, in about a second. Without one it is
    the machine on record; without a record there are none.
    """
    import torch

    if torch.cuda.is_available():
        rates = {
            row: nbytes / min(repeated("cuda", copy, rounds=10))
            for row, (nbytes, copy) in copies("cuda", 256 * costs.MiB).items()
            if row in _LINKS
        }
        source = f"{torch.cuda.get_device_name()}, here and now"
    elif record := gpu_record(path):
        rates = {
            row["row"]: row["ratio"] * costs.GB
            for row in record["rows"]
            if row["unit"] == "GB/s"
        }
        source = f"{record['card']}, {record['date']}, PyTorch {record['torch']}"
    else:
        return []
    return [
        costs.Link(name, place, "measured", rates[row], direction, source)
        for row, (name, place, direction) in _LINKS.items()
        if row in rates
    ]


def copies(device: str, nbytes: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Copies in a GPU, and between it and the host: the bytes that move, and the copy.

    Args:
        device: "cuda"; with "cpu" the same code runs, and says nothing of a GPU.
        nbytes: The size of the tensors. Two are on the device, and two on the host.
    """
    import torch

    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    pageable, pinned = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    if device == "cuda":
        pinned = pinned.pin_memory()

    def in_the_gpu() -> None:
        for _ in range(10):  # one alone is over too soon
            other.copy_(there)

    return {
        # Each byte is read and written: data sheets count both.
        "memory of the GPU, a copy": (20 * nbytes, in_the_gpu),
        "host, pageable, to the GPU": (nbytes, lambda: there.copy_(pageable)),
        "host, pageable, from the GPU": (nbytes, lambda: pageable.copy_(there)),
        "host, pinned, to the GPU": (nbytes, lambda: there.copy_(pinned)),
        "host, pinned, from the GPU": (nbytes, lambda: pinned.copy_(there)),
    }


def timed(device: str, work: Callable[[], object]) -> float:
    """Seconds until the device has done it: a call may return before that."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def repeated(device: str, work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of so many runs, after two that do not count."""
    return [timed(device, work) for _ in range(rounds + 2)][2:]
