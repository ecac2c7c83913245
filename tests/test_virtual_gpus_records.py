"""What virtual GPUs write down: transfers, memory by kind, and the modelled time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_utils import virtual_gpus
from course_utils.virtual_gpus.records import Timeline

# Every op takes 1 ms, a copy 2 ms, whatever its size.
STEADY = {
    "compute": 1e30,
    "memory_bandwidth": 1e30,
    "bandwidth": 1e30,
    "overhead": "1 ms",
    "latency": "2 ms",
    "force": True,
}
MS = pytest.approx


@pytest.fixture
def gpus():
    with virtual_gpus(3, **STEADY) as on:
        yield on


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


def spans(timeline: Timeline, device: str) -> list[tuple]:
    intervals = timeline.intervals.get(device, ())
    return [(ms(i.start), ms(i.stop), i.kind) for i in intervals]


# --- transfers ------------------------------------------------------------------------


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256).to("cuda:0")
        self.rest = nn.ModuleDict({"second": Second()})

    def forward(self, x):
        return self.rest["second"](torch.relu(self.first(x.to("cuda:0"))))


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 10).to("cuda:1")

    def forward(self, x):
        return self.linear(x.to("cuda:1"))


def test_transfers_say_what_why_and_when():
    with virtual_gpus(2, bandwidth="1 GB/s", latency="10 us", force=True) as gpus:
        model = Split()
        assert {t.phase for t in gpus.transfers} == {"setup"}
        gpus.clear()
        assert gpus.transfers == []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = F.cross_entropy(model(torch.randn(8, 256)), torch.ones(8).long().cuda(1))
        loss.backward()
        optimizer.step()
        loss.item()
    size = 8 * 256 * 4
    rows = [
        (t.source, t.destination, t.bytes, t.phase, t.module, t.kind)
        for t in gpus.transfers
    ]
    second = "Split.rest.second"
    assert rows == [
        ("cpu", "cuda:0", size, "forward", "Split", "to"),
        ("cuda:0", "cuda:1", size, "forward", second, "to"),
        ("cpu", "cuda:1", 64, "forward", "", "to"),
        ("cuda:1", "cuda:0", size, "backward", second, "to"),
        ("cuda:1", "cpu", 4, "forward", "", "item"),
    ]
    first, between = gpus.transfers[:2]
    assert first.seconds == between.seconds == MS(10e-6 + size / 1e9)
    assert between.start >= first.start + first.seconds
    assert str(between) == (
        "cuda:0 -> cuda:1: 8.00 KiB, 18.19 us, `to` in the forward of Split.rest.second"
    )


def test_records_hold_what_happens_inside(gpus):
    x = torch.ones(4, device="cuda:0")
    with gpus.record() as outer:
        x.to("cuda:1")
        with gpus.record() as inner:
            x.to("cuda:2")
        assert len(outer.transfers) == 2
    x.to("cuda:1")
    assert [t.destination for t in inner.transfers] == ["cuda:2"]
    assert [t.destination for t in outer.transfers] == ["cuda:1", "cuda:2"]
    assert ms(inner.timeline().seconds) == 2
    assert ms(outer.timeline().seconds) == 4
    assert len(gpus.transfers) == 3
    gpus.clear()
    assert gpus.transfers == []
    assert gpus.timeline().seconds == 0
    assert len(outer.transfers) == 2


# --- the clock ------------------------------------------------------------------------


def test_a_gpu_works_in_order_and_gpus_overlap(gpus):
    x, y = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
    with gpus.record() as log:
        for _ in range(3):
            x = x + 1
        y = y * 2
        x[:2].view(2, 1).t().detach()  # views are free
    timeline = log.timeline()
    assert spans(timeline, "cuda:0") == [(0, 3, "compute")]
    assert spans(timeline, "cuda:1") == [(0, 1, "compute")]
    assert timeline.intervals["cuda:0"][0].ops == 3
    assert timeline.intervals["cuda:2"] == ()
    assert ms(timeline.seconds) == 3
    assert timeline.busy_share(1) == MS(1 / 3)
    assert timeline.busy("cuda:2") == 0
    with pytest.raises(KeyError, match="no 'cuda:7'"):
        timeline.busy(7)


def test_a_copy_within_a_gpu_takes_its_time(gpus):
    x, y = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:0")
    with gpus.record() as log:
        x.to(torch.float64)
        y.copy_(x)
    assert log.timeline().busy(0, "compute") == MS(2e-3) and log.transfers == []


def test_lists_of_tensors_take_time_where_the_tensors_are():
    """As an optimizer's parameters on two GPUs: each GPU works on its own."""
    with virtual_gpus(
        2, compute=1e30, memory_bandwidth=4e9, overhead=0, force=True
    ) as gpus:
        small = [torch.ones(1000, device="cuda:0")]
        large = [torch.ones(3000, device="cuda:1")]
        with gpus.record() as log:
            torch._foreach_mul_([*small, *large], 2.0)
        times = [log.timeline().busy(i) for i in range(2)]
    assert times == [MS(1e-6), MS(3e-6)]


def test_a_copy_waits_for_both_gpus_and_keeps_both_busy(gpus):
    x, y = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
    with gpus.record() as log:
        x = x + 1
        y = y + 1 + 1 + 1
        z = x.to("cuda:1")
        x = x + 1
        z = z + y
    timeline = log.timeline()
    assert spans(timeline, "cuda:0") == [
        (0, 1, "compute"),
        (3, 5, "send"),
        (5, 6, "compute"),
    ]
    assert spans(timeline, "cuda:1") == [
        (0, 3, "compute"),
        (3, 5, "receive"),
        (5, 6, "compute"),
    ]


def test_the_host_runs_ahead_until_it_has_to_wait(gpus):
    def run(wait) -> Timeline:
        x, y = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
        with gpus.record() as log:
            x = x + 1
            wait(x)
            y = y + 1
        return log.timeline()

    assert spans(run(lambda x: None), "cuda:1") == [(0, 1, "compute")]
    for wait in (lambda x: x[0].item(), lambda x: x.cpu(), lambda x: x.tolist()):
        assert spans(run(wait), "cuda:1") == [(3, 4, "compute")]
    for wait in (
        lambda x: torch.cuda.synchronize(0),
        lambda x: torch.cuda.current_stream(0).synchronize(),
        *(print, repr, str, "{}".format),
    ):
        assert spans(run(wait), "cuda:1") == [(1, 2, "compute")]
    assert spans(run(lambda x: torch.cuda.synchronize(2)), "cuda:1") == [
        (0, 1, "compute")
    ]


def test_only_pinned_memory_is_copied_without_waiting(gpus):
    x = torch.ones(8, device="cuda:0", requires_grad=True)
    pinned, plain = torch.ones(8).pin_memory(), torch.ones(8)

    def waited(copy) -> float:
        with gpus.record() as log:
            copy()
        return sum(stop - start for start, stop, _ in spans(log.timeline(), "cpu"))

    assert waited(lambda: plain.to("cuda:0", non_blocking=True)) == 2
    assert waited(lambda: pinned.to("cuda:0")) == 2
    assert waited(lambda: pinned.to("cuda:0", non_blocking=True)) == 0
    assert waited(lambda: x.to("cpu")) == 2
    assert waited(lambda: x.to("cpu", non_blocking=True)) == 0
    assert waited(lambda: pinned.copy_(x.detach(), non_blocking=True)) == 0
    assert waited(lambda: plain.copy_(x.detach(), non_blocking=True)) == 2
    assert waited(lambda: x.data.copy_(pinned, non_blocking=True)) == 0
    copy = x.to("cpu", non_blocking=True)
    assert copy.is_pinned() and not x.cpu().is_pinned()
    copy.sum().backward()
    assert x.grad.device == x.device


def test_the_host_waits_for_how_long_a_result_is(gpus):
    x = torch.arange(8.0, device="cuda:0")
    mask, index = x > 3, torch.arange(3, device="cuda:0")
    y = torch.ones(1, device="cuda:1")

    def waits(op) -> bool:
        with gpus.record() as log:  # all begin together
            x + 1
            op()
            y + 1
        return log.timeline().intervals["cuda:1"][0].start > 0

    for op in (
        lambda: x.nonzero(),
        lambda: x[mask],
        lambda: x.unique(),
        lambda: index.repeat_interleave(index),
        lambda: torch.equal(x, x),
        lambda: x.index_put_((mask,), torch.ones_like(x[:4])),
    ):
        assert waits(op)
    for op in (
        lambda: x[index],
        lambda: x.masked_fill(mask, 0),
        lambda: index.repeat_interleave(index, output_size=3),
        lambda: x.__setitem__(mask, 1.0),
    ):
        assert not waits(op)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("chunks", [1, 4])
def test_micro_batches_fill_the_pipeline(stages, chunks):
    """Equal stages and free copies: GPipe's bubble, (p - 1) / (m + p - 1)."""
    with virtual_gpus(stages, **{**STEADY, "latency": 0}) as gpus:
        x = torch.ones(8, 4, device="cuda:0")
        with gpus.record() as log:
            for i, part in enumerate(x.chunk(chunks)):
                with gpus.label(f"{i}"):
                    for stage in range(stages):
                        part = torch.sin(part.to(stage))
        timeline = log.timeline()
    assert ms(timeline.seconds) == chunks + stages - 1
    bubble = (stages - 1) / (chunks + stages - 1)
    for stage in range(stages):
        assert 1 - timeline.busy_share(stage) == MS(bubble)
    computing = [i for i in timeline.intervals["cuda:1"] if i.kind == "compute"]
    assert [(i.label, ms(i.start)) for i in computing] == [
        (f"{i}", i + 1) for i in range(chunks)
    ]


def test_the_backward_has_the_labels_of_its_forward(gpus):
    first = nn.Linear(4, 4).to("cuda:0")
    second = nn.Linear(4, 4).to("cuda:1")
    x = torch.ones(6, 4, device="cuda:0")
    with gpus.record() as log:
        outs = []
        for i, part in enumerate(x.chunk(3)):
            with gpus.label(f"micro-batch {i}"):
                outs.append(second(first(part).to("cuda:1")))
        torch.cat(outs).pow(2).mean().backward()
    backward = [t for t in log.transfers if t.phase == "backward"]
    assert [t.label for t in backward] == [f"micro-batch {i}" for i in (2, 1, 0)]
    rows = log.timeline().intervals
    for row in (rows["cuda:0"], rows["cuda:1"]):
        order = [i.label for i in row if i.phase == "backward" and i.kind == "compute"]
        assert [label for label in dict.fromkeys(order) if label] == [
            f"micro-batch {i}" for i in (2, 1, 0)
        ]
    loss = [i for i in rows["cuda:1"] if not i.label]
    assert {i.phase for i in loss} == {"forward", "backward"}
    # The stages overlap in the backward, too.
    last = [i for i in rows["cuda:1"] if i.label == "micro-batch 0"][-1]
    begun = next(i for i in rows["cuda:0"] if i.phase == "backward")
    assert begun.start < last.start


def test_threads_keep_the_place_in_time_and_the_label(gpus):
    model = nn.DataParallel(nn.Linear(4, 4).cuda())
    x = torch.ones(6, 4).cuda()
    with gpus.record() as log, gpus.label("step"):
        model(x)
    rows = log.timeline().intervals
    computing = [i for row in rows.values() for i in row if i.kind == "compute"]
    assert len({i.device for i in computing}) == 3
    assert {i.label for i in computing} == {"step"}


def test_a_rate_gives_the_same_times_everywhere():
    """2 * m * n * k operations, or the bytes of all operands, whatever takes longer."""
    with virtual_gpus(
        1, compute="1 TFLOP/s", memory_bandwidth="1 GB/s", overhead="3 us", force=True
    ) as gpus:
        x = torch.ones(512, 512, device="cuda:0")

        def seconds(function) -> float:
            with gpus.record() as log:
                function()
            return log.timeline().seconds

        moved = 3 * 512 * 512 * 4 / 1e9
        assert seconds(lambda: x @ x) == MS(3e-6 + moved)
        gpus.machine.memory_bandwidth = 1e15
        assert seconds(lambda: x @ x) == MS(3e-6 + 2 * 512**3 / 1e12)
        gpus.machine.memory_bandwidth = 1e9
        assert seconds(lambda: x + 1) == MS(3e-6 + 2 * 512 * 512 * 4 / 1e9)
        assert seconds(lambda: x.view(-1)) == 0
        conv = nn.Conv2d(16, 16, 3, padding=1).cuda()
        image = torch.ones(1, 16, 8, 8, device="cuda:0")
        gpus.machine.memory_bandwidth = 1e15
        assert seconds(lambda: conv(image)) == MS(
            3e-6 + 2 * 16 * 16 * 9 * 64 / 1e12, rel=1e-3
        )
        q = torch.ones(1, 2, 64, 8, device="cuda:0")
        assert seconds(lambda: F.scaled_dot_product_attention(q, q, q)) == MS(
            3e-6 + 2 * 2 * 2 * 64 * 64 * 8 / 1e12, rel=1e-3
        )
        twice = [seconds(lambda: conv(image).sum().backward()) for _ in range(2)]
        assert twice[0] < twice[1]  # the second one adds to the gradients


def test_inference_mode_takes_the_time_of_no_grad():
    spent = []
    for mode in (torch.no_grad, torch.inference_mode):
        with virtual_gpus(1, compute="1 TFLOP/s", force=True) as gpus:
            model = nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda().eval()
            with gpus.record() as log, mode():
                model(torch.ones(2, 64, 64, device="cuda"))
            spent.append((log.timeline().seconds, gpus.memory()[0].peak))
    assert spent[0] == pytest.approx(spent[1])


def test_measured_time_is_the_cpus():
    with virtual_gpus(1, force=True) as gpus:
        x = torch.ones(700, 700, device="cuda:0")
        with gpus.record() as log:
            x @ x
        with gpus.record() as small:
            x[:8, :8] @ x[:8, :8]
        assert log.timeline().seconds > small.timeline().seconds > 0


def test_records_print_as_tables_and_have_rows_by_name(gpus):
    x = torch.zeros(2**18, device="cuda:0")
    with gpus.record() as log:
        (x + 1).to("cuda:1")
    assert repr(log.timeline()).splitlines() == [
        "of 3 ms  compute  transfer  idle    busy",
        "cuda:0      1 ms      2 ms   0 s  100.0%",
        "cuda:1       0 s      2 ms  1 ms   66.7%",
        "cuda:2       0 s       0 s  3 ms    0.0%",
    ]
    memory = gpus.memory()
    rows = [line.split() for line in str(memory).splitlines()]
    assert ["cuda:0", "now", "1.00", *["0.00"] * 4, "1.00"] in rows
    assert memory.now == {"cuda:0": 2**20, "cuda:1": 0, "cuda:2": 0}
    assert memory["cuda:0"] is memory[0]
    with pytest.raises(KeyError, match="no 'cuda:9'"):
        memory["cuda:9"]


# --- memory ---------------------------------------------------------------------------


def test_memory_by_what_holds_it(gpus):
    model = nn.Linear(256, 256, bias=False).to("cuda:1")
    weight = 256 * 256 * 4
    assert gpus.memory()["cuda:1"].now_by_kind["parameters"] == weight
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(512, 256, device="cuda:1")
    out = model(x)
    row = gpus.memory()[1]
    assert row.now_by_kind["other"] == 512 * 256 * 4
    assert row.now_by_kind["activations"] == 512 * 256 * 4
    out.sum().backward()
    assert gpus.memory()[1].now_by_kind["gradients"] == weight
    optimizer.step()
    del out
    row = gpus.memory()[1]
    assert row.now_by_kind == {
        "parameters": weight,
        "gradients": weight,
        "optimizer state": 2 * weight,
        "activations": 0,
        "other": 512 * 256 * 4,
    }
    assert row.now == sum(row.now_by_kind.values())
    assert row.peak == sum(row.peak_by_kind.values()) > row.now
    gpus.reset_peak()
    assert gpus.memory()[1].peak == row.now
    optimizer.zero_grad()
    assert gpus.memory()[1].now_by_kind["gradients"] == 0
    assert gpus.memory()[1].peak_by_kind["gradients"] == weight
    assert gpus.memory()[0].now == 0


def test_what_came_after_the_peak_is_not_in_it(gpus):
    x = torch.zeros(4096, device="cuda:0")
    del x
    later = nn.Parameter(torch.zeros(1024, device="cuda:0"))
    later.sum()
    row = gpus.memory()[0]
    assert row.now_by_kind["parameters"] == 4096
    assert row.peak_by_kind["other"] == row.peak == 4 * 4096
    assert row.peak_by_kind["parameters"] == 0


def test_gradients_of_micro_batches_are_gradients_before_they_are_complete(gpus):
    """Autograd keeps them until the last micro-batch; `.grad` comes after that."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 32)).to("cuda:0")
    x = torch.randn(4, 64, device="cuda:0")
    x.requires_grad_()  # no parameter, but it gets a gradient, too
    sum(model(part).sum() for part in x.chunk(4)).backward()
    row = gpus.memory()[0]
    weights = row.now_by_kind["parameters"]
    assert row.now_by_kind["gradients"] == weights + 4 * 64 * 4
    assert row.peak_by_kind["gradients"] >= weights
    assert row.peak_by_kind["activations"] < weights / 2


def test_a_storage_that_is_freed_and_filled_again(gpus):
    x = torch.empty(1024, device="cuda:2")
    storage, now = x.untyped_storage(), lambda: gpus.memory()[2].now
    storage.resize_(0)
    assert now() == 0
    storage.resize_(4096)
    assert now() == 4096
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20.00 GiB"):
        storage.resize_(20 * 2**30)
    assert (now(), storage.nbytes()) == (4096, 4096)
    storage.resize_(8)
    assert (now(), gpus.memory()[2].peak) == (512, 4096)
    del x, storage
    assert now() == 0
    torch.ones(2).untyped_storage().resize_(1024)  # the CPU's is not counted
