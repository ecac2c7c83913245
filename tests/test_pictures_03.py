"""The picture of lesson 03: what it says, and that what it draws is right."""

import functools

import pytest
import torch
from torch import nn

from course_utils import pictures, virtual_gpus
from course_utils.virtual_gpus.records import Interval, Timeline, Transfer
from tests.test_pictures import LONG, assert_suits_a_notebook, drawing

NAMES = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


@functools.cache
def recorded(n, rows=32, from_cpu=True):
    """The records of one training step with nn.DataParallel on virtual GPUs."""
    with virtual_gpus(n, compute="10 TFLOP/s", force=True) as gpus:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 5))
        x = torch.randn(rows, 50)
        with gpus.record() as log:
            model.to("cuda:0")
            x = x if from_cpu else x.to("cuda:0")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            nn.DataParallel(model)(x).square().mean().backward()
            optimizer.step()
        return log.transfers, log.timeline()


def transfer(source, destination, nbytes, kind, phase="forward", module="DataParallel"):
    return Transfer(source, destination, nbytes, 1e-5, phase, module, kind)


HUGE = [
    transfer("cpu", name, nbytes, "scatter")
    for name, nbytes in zip(NAMES, (123_456_789_012, 1, 22_222, 3), strict=True)
]
LONE = Timeline({name: () for name in NAMES}, 1.0)

DRAWN = {
    "4 GPUs": lambda: pictures.data_parallel_steps(*recorded(4)),
    "4 GPUs, batch on cuda:0": lambda: pictures.data_parallel_steps(
        *recorded(4, from_cpu=False)
    ),
    "2 GPUs": lambda: pictures.data_parallel_steps(*recorded(2)),
    "3 GPUs, 5 rows": lambda: pictures.data_parallel_steps(*recorded(3, rows=5)),
    "4 GPUs, 9 rows": lambda: pictures.data_parallel_steps(*recorded(4, rows=9)),
    "almost nothing": lambda: pictures.data_parallel_steps(HUGE, LONE, title=LONG),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


@every_picture
def test_texts_labels_and_size(name):
    assert_suits_a_notebook(drawn(name), 5.8)


PARAMETERS = 4 * (50 * 100 + 100 + 100 * 5 + 5)  # bytes

SUMMARIES = {
    "4 GPUs": [
        "1. model to the default GPU: cpu sends 22.4 kB to cuda:0.",
        "2. scatter the batch: cpu sends 4 × 1.6 kB to cuda:0, cuda:1, cuda:2 and "
        "cuda:3.",
        "3. replicate the model: cuda:0 sends 3 × 22.4 kB to cuda:1, cuda:2 and "
        "cuda:3.",
        "4. parallel_apply: forward: cuda:0, cuda:1, cuda:2 and cuda:3 compute.",
        "5. gather the outputs: cuda:1, cuda:2 and cuda:3 send 3 × 160 B to cuda:0.",
        "6. loss: cuda:0 computes.",
        "7. backward, gradients reduced: cuda:0 sends 3 × 160 B to cuda:1, cuda:2 and "
        "cuda:3, cuda:0, cuda:1, cuda:2 and cuda:3 compute, cuda:1, cuda:2 and cuda:3 "
        "send 3 × 22.4 kB to cuda:0.",
        "8. update: cuda:0 computes.",
    ],
    "4 GPUs, batch on cuda:0": ["2. scatter the batch: cuda:0 sends 3 × 1.6 kB"],
    "2 GPUs": ["3. replicate the model: cuda:0 sends 22.4 kB to cuda:1."],
    "3 GPUs, 5 rows": [
        "2. scatter the batch: cpu sends 1 kB in all to cuda:0, cuda:1 and cuda:2."
    ],
    "4 GPUs, 9 rows": [
        "3. replicate the model: cuda:0 sends 2 × 22.4 kB to cuda:1 and cuda:2.",
        "4. parallel_apply: forward: cuda:0, cuda:1 and cuda:2 compute.",
    ],
    "almost nothing": ["3. replicate the model: nothing.", "8. update: nothing."],
}


@every_picture
def test_summary(name):
    assert PARAMETERS == 22_420
    for text in SUMMARIES[name]:
        assert text in drawn(name).summary


def arrows(picture):
    """From which lane to which, of every arrow in the order from top to bottom."""
    board = picture.axes[0]
    lanes = {
        round(text.get_position()[0], 3): text.get_text()
        for text in board.texts
        if text.get_text() in ("CPU", *NAMES)
    }
    found = []
    for patch in board.patches:
        ends = getattr(patch, "_posA_posB", None)
        if ends is None or ends[0][1] < 0.4:  # the sample in the key
            continue
        (x, y), (to, _) = ends
        names = [min(lanes, key=lambda lane, at=at: abs(lane - at)) for at in (x, to)]
        found.append((y, *(lanes[lane] for lane in names)))
    return [pair for _, *pair in sorted(found, reverse=True)]


def test_there_is_an_arrow_for_each_pair_that_sends_in_each_step():
    others = NAMES[1:]
    out, back = [["cuda:0", x] for x in others], [[x, "cuda:0"] for x in others]
    scatter = [["CPU", x] for x in NAMES]
    want = [["CPU", "cuda:0"], *scatter, *out, *back, *out, *back]
    assert arrows(drawn("4 GPUs")) == want
    assert arrows(drawn("2 GPUs")) == [
        *(["CPU", "cuda:0"], ["CPU", "cuda:0"], ["CPU", "cuda:1"]),
        *(["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]) * 2,
    ]


def test_the_others_do_not_compute_the_loss():
    """Boxes stand for computing: 4 forward, 1 loss, 4 backward, 1 update, 1 sample."""
    outlines = [
        patch
        for patch in drawn("4 GPUs").axes[0].patches
        if not hasattr(patch, "_posA_posB") or patch._posA_posB is None
    ]
    assert len(outlines) == 2 * (4 + 1 + 4 + 1 + 1)  # each has an inside and an edge


def test_transfers_of_one_pair_are_added_up():
    log = [transfer("cpu", "cuda:0", n, "scatter") for n in (100, 200, 300)]
    picture = pictures.data_parallel_steps(log, Timeline({"cuda:0": ()}, 1.0))
    assert "2. scatter the batch: cpu sends 600 B to cuda:0." in picture.summary


def test_packing_is_not_computing():
    packing = Interval("cuda:0", 0.0, 1.0, "compute", "forward", "", "DataParallel")
    work = Interval("cuda:1", 1.0, 2.0, "compute", "forward", "", "Linear")
    timeline = Timeline({"cuda:0": (packing,), "cuda:1": (work,)}, 2.0)
    log = [transfer("cpu", "cuda:0", 8, "scatter")]
    summary = pictures.data_parallel_steps(log, timeline).summary
    assert "4. parallel_apply: forward: cuda:1 computes." in summary
    assert "6. loss: nothing." in summary


def test_wrong_inputs():
    with pytest.raises(ValueError, match="Nothing was scattered"):
        pictures.data_parallel_steps([], LONE)
    five = Timeline({f"cuda:{i}": () for i in range(5)}, 1.0)
    with pytest.raises(ValueError, match="There are 5 GPUs: expected 1 to 4."):
        pictures.data_parallel_steps(HUGE, five)
