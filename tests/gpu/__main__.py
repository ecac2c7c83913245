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

HERE = Path(__file__).parent
RECORD = HERE / "record.json"
TESTS_SECONDS, FIGURES_SECONDS = 330, 140  # at most; what was found by then is recorded


def main(arguments: list[str]) -> int:
    """Run all of it; the exit code is 0 if nothing failed."""
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
        code, _ = limited([*pytest, str(HERE), *arguments], TESTS_SECONDS, env=env)
        found = {"failed": {}}
        if report.exists():
            found |= json.loads(report.read_text("utf-8"))
    failed, lines = limited(
        [sys.executable, "-m", "tests.benchmarks", "gpu"],
        FIGURES_SECONDS,
        stdout=subprocess.PIPE,
    )
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    seconds = round(time.monotonic() - started)
    for what, problem in (("tests/gpu", code), ("tests/benchmarks/gpu.py", failed)):
        if problem and not (what == "tests/gpu" and found["failed"]):
            found["failed"][what] = f"it ended with {problem}"
    record = about_this_machine() | {"seconds": seconds} | found | {"rows": rows}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(
        *lines, f"Recorded in {RECORD.relative_to(ROOT)} after {seconds} s.", sep="\n"
    )
    return int(bool(code or failed))


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


def limited(
    command: list[str], seconds: float, **how: Any
) -> tuple[int | str, list[str]]:
    """Run it for so long at most; how it ended (0 is well), and its lines if piped."""
    with subprocess.Popen(command, text=True, **how) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end with it
            printed, _ = process.communicate()
            return f"no end after {seconds:g} s", (printed or "").splitlines()
    return process.returncode, (printed or "").splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
