"""The course's scripts on one GPU: under torchrun with nccl, launched, resumed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torchrun import printed_under_torchrun

from course_utils.ranks.launch import LaunchError, launch

DDP = {"epochs": 1, "batch_size": 64}
SMALL = {"steps": 4, "every": 2, "batch_size": 8, "width": 16, "layers": 1}
FSDP = SMALL | {"heads": 2}
RUNS = {
    "train_sgd": {"epochs": 1},
    "train_ddp": DDP,
    "train_fsdp": FSDP | {"strategy": "fsdp"},
    "train_tp": FSDP,
    "train_pipeline": SMALL | {"micro_batches": 4},
    "collectives": {},
    "bench_all_reduce": {"minbytes": "64", "maxbytes": "1M"},
}
TorchRun = Callable[..., list[dict]]


@pytest.fixture(
    scope="module",
    params=["nccl", pytest.param("gloo", marks=pytest.mark.thorough)],
)
def backend(request) -> str:
    """nccl on a GPU; gloo on the CPU runs everywhere, so that nothing rots."""
    import torch

    if request.param == "nccl" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    return request.param


def words(options: dict[str, object]) -> list[str]:
    """Options as words of a command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


@pytest.fixture
def torchrun(tmp_path: Path, backend: str) -> TorchRun:
    """Run a worker on one rank; the lines of metrics that it has printed."""

    def run(worker: str, *flags: str, **options: object) -> list[dict]:
        given = words(options | {"backend": backend})
        lines = printed_under_torchrun(1, worker, *given, *flags, tmp=tmp_path)
        assert lines
        return [json.loads(line) for line in lines if line.startswith("{")]

    return run


@pytest.mark.parametrize("worker", RUNS)
def test_a_script_runs_under_torchrun_as_it_does_when_launched(
    torchrun, backend, worker
):
    printed = torchrun(worker, **RUNS[worker])
    launched = launch(worker, nproc=1, quiet=True, backend=backend, **RUNS[worker])
    assert launched.output
    assert [line.get("backend") for line in printed] == [backend] * len(printed)
    assert [line["loss"] for line in launched.metrics] == pytest.approx(
        [line["loss"] for line in printed], rel=1e-3
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp2"])
def test_each_strategy_trains_alike(backend, strategy):
    def losses(strategy: str) -> list[float]:
        how = FSDP | {"strategy": strategy, "backend": backend}
        return [
            x["loss"] for x in launch("train_fsdp", nproc=1, quiet=True, **how).metrics
        ]

    assert losses(strategy) == pytest.approx(losses("fsdp"), rel=1e-3)


def test_bfloat16_trains_as_well(backend):
    how = FSDP | {"strategy": "fsdp2", "backend": backend, "bf16": True}
    found = launch("train_fsdp", nproc=1, quiet=True, **how).metrics
    assert 0 < found[-1]["loss"] < 10


@pytest.mark.parametrize(
    ("worker", "more", "options"),
    [
        ("train_ddp", {"epochs": 2}, DDP),
        ("train_fsdp", {"steps": 8}, FSDP | {"strategy": "fsdp"}),
        ("train_fsdp", {"steps": 8}, FSDP | {"strategy": "fsdp2"}),
    ],
)
def test_a_checkpoint_is_resumed_as_if_nothing_had_happened(
    torchrun, backend, tmp_path, worker, more, options
):
    how = {"nproc": 1, "quiet": True, "backend": backend}
    whole = launch(worker, **how, **(options | more)).metrics
    launch(worker, **how, **options, checkpoint=tmp_path / "run")
    resumed = torchrun(
        worker, "--resume", **(options | more), checkpoint=tmp_path / "run"
    )
    expected = [line["loss"] for line in whole][-len(resumed) :]
    assert len(resumed) == len(whole) // 2
    assert [line["loss"] for line in resumed] == pytest.approx(expected, rel=1e-3)


def test_more_ranks_than_gpus_are_refused_in_words(gpu):
    import torch

    too_many = torch.cuda.device_count() + 1
    with pytest.raises(LaunchError, match="nccl needs a GPU for each rank"):
        launch("train_sgd", nproc=too_many, quiet=True, backend="nccl")
