"""The pipelines from scratch: equal to the plain model, in the schedule of GPipe."""

import contextlib

import pytest
import torch
from torch import nn

from course_utils.from_scratch.pipeline import GPipe, ModelParallel, split_layers, ticks
from course_utils.virtual_gpus import virtual_gpus


def a_row(number=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(number)))


def step(model, batch):
    """The output, and the gradients in the order of the layers."""
    output = model(batch)
    output.square().mean().backward()
    return output.detach().cpu(), [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize("micro_batches", [None, 1, 2, 3, 8, 100])
def test_outputs_and_gradients_are_those_of_the_plain_model(sizes, micro_batches):
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    want, want_gradients = step(a_row(), batch)
    stages, devices = split_layers(a_row(), sizes), ["cpu"] * len(sizes)
    if micro_batches is None:
        model = ModelParallel(stages, devices)
    else:
        model = GPipe(stages, devices, micro_batches)
    got, got_gradients = step(model, batch)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    for one, other in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("rows", "parts"), [(8, [2] * 4), (7, [2, 2, 2, 1]), (2, [1, 1]), (0, [0])]
)
def test_micro_batches_cover_the_batch(rows, parts):
    seen, labels = [], []

    def label(name):
        labels.append(name)
        return contextlib.nullcontext()

    model = GPipe([nn.Identity(), nn.Identity()], ["cpu"] * 2, 4, label=label)
    model.stages[1].register_forward_hook(lambda m, args, out: seen.append(len(out)))
    batch = torch.arange(rows * 2.0).view(rows, 2)
    assert torch.equal(model(batch), batch)
    assert seen == parts
    assert sorted(labels) == sorted(2 * [f"micro-batch {i}" for i in range(len(parts))])


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_the_schedule_is_complete_and_possible(stages, micro_batches):
    done, length = set(), 0
    for tick in ticks(stages, micro_batches):
        length += 1
        assert len({k for k, _ in tick}) == len(tick), (
            "a stage does one thing at a time"
        )
        for k, part in tick:
            assert k == 0 or (k - 1, part) in done, "its input is there"
            assert part == 0 or (k, part - 1) in done, "micro-batches stay in order"
        done |= set(tick)
    assert len(done) == stages * micro_batches
    assert length == micro_batches + stages - 1


def test_in_micro_batches_the_gpus_work_at_the_same_time():
    """On three GPUs the time and the idle share are those of the formula."""
    from course_utils.theory import costs

    settings = {"compute": "1 TFLOP/s", "latency": "0 s", "bandwidth": "1e6 TB/s"}
    gpu_seconds = {}
    with virtual_gpus(3, overhead=0, force=True, **settings) as gpus:
        batch = torch.randn(64, 512, device="cuda:0")
        for micro_batches in (1, 2, 8):
            layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
            model = GPipe(split_layers(layers, (1, 1, 1)), [0, 1, 2], micro_batches)
            with gpus.record() as log:
                model(batch)
            timeline = log.timeline()
            gpu_seconds[micro_batches] = timeline.seconds
            stage = timeline.busy("cuda:1", "compute")
            formula = costs.pipeline_seconds(stage, 3, micro_batches)
            assert timeline.seconds == pytest.approx(formula, rel=0.1)
            assert {c.destination for c in log.transfers} == {"cuda:1", "cuda:2"}
            assert len(log.transfers) == 2 * micro_batches
    assert gpu_seconds[1] > gpu_seconds[2] > gpu_seconds[8]


def test_parts_of_a_model_keep_its_parameters():
    layers = a_row()
    first, second = split_layers(layers, (4, 2))
    assert first[3].weight is layers[3].weight
    assert second[0].weight is layers[4].weight
    model = ModelParallel([first, second], ["cpu", "cpu"])
    assert len(list(model.parameters())) == 12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_layers(a_row(), (2, 2)), r"sizes are \[2, 2\] and there are 6"),
        (lambda: split_layers(a_row(), (6, 0)), r"sizes are \[6, 0\]"),
        (lambda: split_layers(nn.Sequential(), ()), r"sizes are \[\] and there are 0"),
        (lambda: ModelParallel([a_row()], ["cpu"] * 2), "1 stages and 2 devices"),
        (lambda: ModelParallel([], []), "0 stages and 0 devices"),
        (lambda: GPipe([a_row()], ["cpu"], 0), "micro_batches is 0: expected 1"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
