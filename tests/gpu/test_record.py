"""The README says of real GPUs what the record says; lesson 01 shows its figures."""

import json
import os
import subprocess
import sys

from course_utils import ROOT, pictures
from course_utils.measure.recorded import gpu_record, measured_links
from course_utils.theory import costs

BEGINS = "Run on real GPUs so far:"


def test_the_readme_says_what_the_record_says():
    readme = (ROOT / "README.md").read_text("utf-8")
    paragraph = next(p for p in readme.split("\n\n") if p.startswith(BEGINS))
    said = " ".join(paragraph.split())
    record = gpu_record()
    nothing = said.startswith(f"{BEGINS} nothing.")
    assert nothing == (record is None)
    if record is not None:
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


def test_the_ladder_shows_the_figures_on_record_with_card_and_date(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "record.json"
    assert measured_links(file) == []
    record = {
        "card": "NVIDIA H100",
        "date": "2026-11-26",
        "torch": "2.14.1",
        "rows": [
            {"row": "host, pinned, to the GPU", "ratio": 25.04, "unit": "GB/s"},
            {"row": "one kernel after the other, each", "ratio": 3.0, "unit": "us"},
        ],
    }
    file.write_text(json.dumps(record))
    (pinned,) = measured_links(file)
    assert pinned.one_way == 25.04 * costs.GB
    said = pictures.bandwidth_ladder([pinned]).summary
    assert "host to GPU, pinned 25 GB/s" in said
    assert "Measured: NVIDIA H100, 2026-11-26, PyTorch 2.14.1." in said


def test_the_ladder_shows_what_the_gpu_of_this_machine_reaches(gpu):
    memory, pinned, pageable = measured_links()
    assert memory.one_way > pinned.one_way > 0.9 * pageable.one_way > 0
    assert memory.one_way < 1.1 * max(link.one_way for link in costs.LADDER)
