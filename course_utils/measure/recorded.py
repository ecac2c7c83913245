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
