"""A worker under the real torchrun."""

import os
import subprocess
import sys
from pathlib import Path

from course_utils import ROOT


def printed_under_torchrun(n: int, worker: str, *words: str, tmp: Path) -> list[str]:
    """The lines that a worker prints on n ranks, which must all end well."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n),
         ROOT / f"course_utils/workers/{worker}.py", *words],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
