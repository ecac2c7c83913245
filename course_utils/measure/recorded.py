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
        rates = _rates_of_this_gpu()
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


def _rates_of_this_gpu(nbytes: int = 256 * costs.MiB) -> dict[str, float]:
    """Bytes a second, by the names that these copies have in the record."""
    import torch

    there = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    pinned, other = pageable.pin_memory(), torch.empty_like(there)
    return {
        # Each byte is read and written: data sheets count both.
        "memory of the GPU, a copy": 2 * nbytes / _fastest(lambda: other.copy_(there)),
        "host, pinned, to the GPU": nbytes / _fastest(lambda: there.copy_(pinned)),
        "host, pageable, to the GPU": nbytes / _fastest(lambda: there.copy_(pageable)),
    }


def _fastest(copy: Callable[[], object], rounds: int = 10) -> float:
    """Seconds until the GPU has done it, in the fastest of the rounds."""
    import torch

    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()  # a copy may go on after the call has returned
        times.append(time.perf_counter() - start)
    return min(times)
