"""``python3 -m tests.gpu``: everything that a GPU is needed for, and the record of it.

Runs the tests in this folder, then the figures of `tests/benchmarks/gpu.py`, and writes
`record.json`: when, on which card, what was measured, what differs, what failed. That
takes less than 8 minutes. Without a GPU it says so, and runs the twins. What is typed
after it goes to pytest.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from course_utils import ROOT
from course_utils.measure.recorded import RECORD

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Run all of it; pytest's exit code, or 1 if the figures failed."""
    os.chdir(ROOT)
    pytest = [sys.executable, "-m", "pytest"]
    if not has_gpu():
        print(
            "There is no GPU that PyTorch can use here. What follows are the programs "
            "on virtual GPUs alone; nothing is recorded.",
            flush=True,
        )
        return subprocess.call([*pytest, str(HERE / "test_twins.py"), *arguments])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        env = os.environ | {"COURSE_GPU_REPORT": str(report)}
        started = time.monotonic()
        code = subprocess.call([*pytest, str(HERE), *arguments], env=env)
        found = json.loads(report.read_text()) if report.exists() else {}
        rows, failed = figures()
        seconds = round(time.monotonic() - started)
    if failed:
        found.setdefault("failed", []).append("tests/benchmarks/gpu.py")
    record = about_this_machine() | {"seconds": seconds} | found | {"rows": rows}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"Recorded in {RECORD.relative_to(ROOT)} after {seconds} s.")
    return code or int(failed)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def about_this_machine() -> dict[str, Any]:
    """What one has to know to read the numbers."""
    import platform

    import torch

    from course_utils.measure.machine import inspect_machine

    version = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(0),
        "cards": torch.cuda.device_count(),
        "driver": inspect_machine().driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, version)),
        "python": platform.python_version(),
    }


def figures() -> tuple[list[dict[str, Any]], bool]:
    """The rows of the benchmark, as far as it came, and whether it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "gpu"],
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    print(*lines, sep="\n")
    return [json.loads(line) for line in lines], done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
