"""The README says of real GPUs what the record says."""

import json
import os
import subprocess
import sys

from course_utils import ROOT

RECORD = ROOT / "tests" / "gpu" / "record.json"
BEGINS = "Run on real GPUs so far:"


def test_the_readme_says_what_the_record_says():
    readme = (ROOT / "README.md").read_text("utf-8")
    paragraph = next(p for p in readme.split("\n\n") if p.startswith(BEGINS))
    said = " ".join(paragraph.split())
    assert said.startswith(f"{BEGINS} nothing.") != RECORD.exists()
    if RECORD.exists():
        record = json.loads(RECORD.read_text("utf-8"))
        for what in ("card", "date", "torch"):
            assert record[what] in said
        assert not record["failed"] or f"{len(record['failed'])} failed" in said


def test_the_command_says_that_there_is_no_gpu_and_runs_the_twins():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "course_utils",
            "test",
            "--gpu",
            "-v",
            "-k",
            "factories",
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("There is no GPU that PyTorch can use here.")
    assert "on_virtual_gpus[factories] PASSED" in done.stdout
    assert "there is no GPU here" in done.stdout
