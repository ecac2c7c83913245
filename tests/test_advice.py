"""What a text tells readers to type or to set was run here, or it says why not.

A new command or setting in a lesson, an exercise, a guide or a script fails the first
test here, until `RUN_BY` names the test that runs it, or `NOT_RUN` says why none does.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from course_utils import ROOT
from course_utils.ranks import Ranks, RanksError
from course_utils.ranks.launch import LaunchError, launch

PROGRAMS = set(
    "torchrun python python3 py pip git bash source sed ps kill docker ssh export curl "
    "nvidia-smi nsys torchfrtrace srun sbatch mpirun conda apt apt-get jupyter "
    "nbgrader pytest".split()
)
COURSE = r"python3? -m course_utils "
HERE = r"(?!.*--backend nccl).*"
RUN_BY = {  # a test -> what it runs, as it is typed
    "test_advice.py::test_info_names_the_parameters": "TORCH_DISTRIBUTED_DEBUG=INFO",
    "test_advice.py::test_a_crash_under_detail_says_that_detail_may_be_why":
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
    "test_torchrun.py::test_a_script_prints_what_it_prints_when_launched":
        rf"torchrun .*(train_\w+|workers/collectives|bench_all_reduce)\.py{HERE}"
        "|GLOO_SOCKET_IFNAME",
    "test_workers.py::test_one_process_without_torchrun_gives_the_same_curve":
        r"python \S+train_(ddp|sgd)\.py .*|python \S+train_(fsdp|pipeline)\.py",
    "test_workers.py::test_as_a_script": r"python \S+spawn_hello\.py .*",
    "test_launch.py::test_a_script_runs_as_under_torchrun_and_on_loopback_only":
        r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)",
    "test_ranks.py::test_the_magic_has_a_limit": r"%%ranks( --timeout \d+)?",
    "setup/test_installing.py::test_the_first_start_takes_the_cpu_build_and_opens_jupyterlab":
        COURSE + "start( --no-browser)?",
    "setup/test_installing.py::test_wheels_are_gathered_and_installed_without_a_network":
        COURSE + r"(start --wheels|wheels) FOLDER( --platform windows --python 3.12)?",
    "test_contributing.py::test_its_tests_pass":
        COURSE + r"test( --all| --version|( -k \w+)?( tests/\S+)+)?",
    "gpu/test_record.py::test_the_command_says_that_there_is_no_gpu_and_runs_the_twins":
        COURSE + "test --gpu",
    "setup/test_commands.py::test_plain_nbval_needs_no_more_than_the_learners_packages":
        r"pytest --nbval notebooks",
    "setup/test_doctor.py::test_no_packages_and_no_loopback": COURSE + "doctor",
    "setup/test_doctor.py::test_a_laptop_that_is_ready_does_what_lessons_do":
        COURSE + "doctor --room",
    "test_nbgrader.py::test_a_task_that_its_check_passes_gives_its_points":
        r"nbgrader (generate_assignment|autograde) ex_00_start_here|nbgrader export",
    "test_cohort.py::test_the_command_writes_both_files_and_replaces_only_its_own":
        COURSE + r"cohort \w+ --html \S+ --csv \S+",
    "test_progress.py::test_the_map_shows_what_is_done_and_what_comes_next":
        COURSE + "progress",
    "test_progress.py::test_export_writes_json_and_replaces_nothing_unasked":
        COURSE + r"progress --export \S+",
    "test_progress.py::test_file_prints_the_place": COURSE + "progress --file",
    "test_exercises.py::test_execute_leaves_outputs_and_nothing_of_this_run":
        COURSE + "build-exercises --execute .*",
    "test_contributing.py::test_every_file_of_the_template_is_copied": "sed s/NN/.*",
    "test_devcontainer.py::test_the_cells_for_colab_work_in_a_kernel_without_the_course":
        "!git clone .*|%pip .*|%cd course",
    "test_benchmarks.py::test_without_a_name_the_command_lists_them":
        r"\.venv/bin/python -m tests\.benchmarks( ring| memory)?",
    "test_style.py::test_ruff_is_content": r"\.venv/bin/ruff (check|format) \.",
}  # fmt: skip
NOT_RUN = {  # why -> what is not run here
    "It needs NVIDIA's GPUs.":
        r"torchrun .*workers/.*--backend nccl.*|NCCL_.*|TORCH_FR_\w+"
        r"|torchfrtrace"
        r"|CUDA_VISIBLE_DEVICES=.*|nvidia-smi.*|\./build/all_reduce_perf .*",
    "It needs a network.":
        "git clone ADDRESS|pip install .*",
    "It is about processes of the reader's own.": "ps -eo .*|kill (NUMBER|-9)",
    "The tests themselves run in such an environment.":
        r"\.venv/bin/python|source \S+/bin/activate",
    "It is a name, and nothing to type or to set.":
        "torchrun( --standalone)?|python3?|py|source|git|OMP_NUM_THREADS|PREMUL_SUM",
}  # fmt: skip
ROWS = [*RUN_BY.values(), *NOT_RUN.values()]


def texts() -> Iterator[str]:
    """The prose of all lessons, exercises and guides, and how to start each script."""
    for folder in ("notebooks", "solutions"):
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                if cell["cell_type"] == "markdown":
                    yield "".join(cell["source"])
    pages = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md"]
    pages += [ROOT / ".devcontainer" / "README.md", *(ROOT / "notebooks").glob("*.md")]
    for path in pages:
        yield path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "course_utils" / "workers").glob("[a-z]*.py")):
        yield path.read_text(encoding="utf-8").split('"""')[1]


def advice() -> list[str]:
    """Each command and each setting of all texts, in order, on one line."""
    found = []
    for text in texts():
        text = text.replace("\\\n", " ")
        code = "".join(re.findall(r"^```(?!text).*\n([^`]*)^```", text, re.M))
        code += "".join(re.findall(r"^ {4}(?=\S)(.*\n?)", text, re.M))
        for line in [*code.splitlines(), *re.findall(r"`([^`\n]+)`", text)]:
            line = " ".join(line.partition("  #")[0].split())
            program = re.sub(r"^([A-Z_]+=\S+ )*", "", line).partition(" ")[0]
            if program in PROGRAMS or re.match(r"%%?\w|!|\./|\.venv/bin/", program):
                found.append(line)
        found += re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b(?:=[\w,]*\w)?", text)
    return [*dict.fromkeys(found)]


def test_each_command_and_setting_is_run_or_says_why_not():
    rows = {item: [r for r in ROWS if re.fullmatch(r, item)] for item in advice()}
    assert [item for item, fitting in rows.items() if len(fitting) != 1] == []
    assert {row for fitting in rows.values() for row in fitting} == set(ROWS)


def test_the_tests_that_run_them_exist():
    for test in RUN_BY:
        file, _, name = test.partition("::")
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in source, test


def test_what_a_text_imports_is_there():
    """Also where no cell runs it."""
    form = r"^ *((?:from|import) course_utils.*)"
    lines = {line for text in texts() for line in re.findall(form, text, re.M)}
    assert lines
    for line in sorted(lines):
        exec(line, {})


class Understood(Exception):
    """The script has read its arguments, and begins."""


@pytest.mark.parametrize("line", [x for x in advice() if " course_utils/workers" in x])
def test_torchrun_and_the_script_understand_each_word(line, monkeypatch):
    def parse(self, *args):
        real(self, *args)
        raise Understood

    program, *words = line.split()
    if program == "torchrun":
        args = get_args_parser().parse_args(words)
        words = [args.training_script, *args.training_script_args]
    module = importlib.import_module(f"course_utils.workers.{Path(words[0]).stem}")
    real = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(Understood):
        module.main()


HEADS = """
class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.used(x)

model = torch.nn.parallel.DistributedDataParallel(Heads())
for _ in range(2):
    model(torch.ones(1, 1)).sum().backward()
"""
CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.fixture
def debug(monkeypatch):
    """Run a cell on a rank with TORCH_DISTRIBUTED_DEBUG; how it fails."""

    def run(level: str, cell: str) -> str:
        with Ranks(1, quiet=True):  # torch is imported, and has read the variable
            monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
            with Ranks(1, quiet=True) as ranks, pytest.raises(RanksError) as caught:
                ranks.run_cell(cell)
        return str(caught.value)

    return run


def test_info_names_the_parameters(debug):
    message = debug("INFO", HEADS)
    assert "did not receive grad for rank" in message
    assert ": other.bias, other.weight" in message


def test_a_crash_under_detail_says_that_detail_may_be_why(debug, tmp_path):
    assert "DETAIL" not in debug("INFO", CRASH)
    assert "TORCH_DISTRIBUTED_DEBUG is DETAIL" in debug("DETAIL", CRASH)
    (tmp_path / "script.py").write_text(CRASH)
    with pytest.raises(LaunchError, match="TORCH_DISTRIBUTED_DEBUG is DETAIL"):
        launch(tmp_path / "script.py", nproc=1, quiet=True)
