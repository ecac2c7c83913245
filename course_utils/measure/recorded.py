"""Figures of real GPUs that the course was run on, with card and date.

`python3 -m course_utils test --gpu` writes them. Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from course_utils import ROOT

RECORD = ROOT / "tests" / "gpu" / "record.json"


def gpu_record(path: Path = RECORD) -> dict[str, Any] | None:
    """The record: date, card, driver, torch, rows, differences; None if there is none.

    Each row is a dictionary with ``row`` (what was measured), ``ratio``, ``unit`` and
    ``aa``, as a benchmark prints it.
    """
    if not path.exists():
        return None
    return json.loads(path.read_text("utf-8"))


def recorded_figures(*rows: str, path: Path = RECORD) -> str:
    """The end of a sentence: what these rows of the record say, a line each.

    Without a record, or without such rows in it, nothing was measured.
    """
    record = gpu_record(path) or {"rows": []}
    found = {row["row"]: f"{row['ratio']:.3g} {row['unit']}" for row in record["rows"]}
    lines = [f"  {name}: {found[name]}" for name in rows if name in found]
    if not lines:
        return "nothing was measured."
    source = f"{record['card']}, {record['date']}, PyTorch {record['torch']}"
    return "\n".join([f"these figures are of another machine ({source}).", *lines])
