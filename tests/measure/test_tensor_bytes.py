"""``tensor_bytes.py``: every byte of a tensor, and none besides."""

import gc
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from shared_ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from course_utils.measure import tensor_bytes
from course_utils.measure.tensor_bytes import TensorBytes, record_tensor_bytes


def test_tensors_count_as_long_as_their_memory_lives():
    older = torch.zeros(1000)
    with record_tensor_bytes() as record:
        assert record.end == 0
        a = torch.zeros(100)
        view, alias = a.view(10, 10), a.detach()
        a.add_(1)
        assert record.end == 400, "memory that is shared counts once"
        b = a + older[:100]
        older.mul_(2)
        half = older[500:]
        assert record.end == 800, "what is older counts as nothing"
        c = torch.tensor([1.0, 2.0], dtype=torch.float64)
        assert record.end == 816
        del a, view
        assert record.end == 816
        del alias
        assert record.end == 416
        b.untyped_storage().resize_(0)
        assert record.end == 16
        b.untyped_storage().resize_(400)
        assert record.end == 416
        del b
    assert record.end == 16 and record.peak == 816
    size = len(record.nbytes)
    del c, half
    torch.zeros(10)
    assert len(record.nbytes) == size, "nothing is recorded afterwards"
    assert record.seconds == sorted(record.seconds)
    assert record.at(-1.0) == 0 and record.at(record.seconds[-1] + 1) == 16
    assert record.at(record.seconds[0]) == 400


def test_another_thread_has_a_moment_to_let_go(monkeypatch):
    monkeypatch.setattr(tensor_bytes, "MOMENT", 1.0)
    with record_tensor_bytes() as record:
        for _ in range(2):
            held = [torch.ones(100)]
            threading.Timer(0.05, held.clear).start()
            assert record.nbytes[-1] == 400
            if len(record.nbytes) == 1:
                assert record.end == 0
    assert record.end == 0


def test_a_part_of_a_record_begins_with_what_was_held_then():
    record = TensorBytes([1, 2, 4], [10, 30, 20], [("a", 0, 2), ("b", 3, 5)])
    late = record.since(3)
    assert (late.seconds, late.nbytes, late.spans) == ([3, 4], [30, 20], [("b", 3, 5)])
    assert late.peak == late.peak_of("b") == 30


def test_a_training_step():
    with record_tensor_bytes() as record:
        model = nn.Linear(50, 40)
        whole = 4 * (50 * 40 + 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with record.label("step"):
            with record.label("forward"):
                loss = model(torch.ones(8, 50)).sum()
            with record.label("backward"):
                loss.backward()
            del loss
            with record.label("idle"):
                assert record.end == 2 * whole
            optimizer.step()
        assert record.end == 3 * whole
        optimizer.zero_grad()
        assert record.end == 2 * whole
    assert [n for n, *_ in record.spans] == ["forward", "backward", "idle", "step"]
    # The batch, the output and the loss; the loss's own gradient comes later.
    assert record.peak_of("forward") == whole + 4 * (8 * 50 + 8 * 40 + 1)
    assert record.peak_of("backward") >= record.peak_of("idle") == 2 * whole
    assert record.peak_of("step") == record.peak >= 3 * whole
    with pytest.raises(KeyError, match=r"'eval'; there are \['backward', 'forward'"):
        record.peak_of("eval")


def test_all_is_put_back():
    resize = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), record_tensor_bytes():
        assert not gc.isenabled()
        1 / 0  # noqa: B018
    assert torch.UntypedStorage.resize_ is resize and gc.isenabled()


@on_ranks(2)
def test_what_is_inside_dtensors_counts():
    """FSDP2 makes them."""
    from torch.distributed.fsdp import fully_shard

    with record_tensor_bytes() as record:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8))
        fully_shard(model[0])
        fully_shard(model)
        gc.collect()  # FSDP2 may leave a circle behind
        between = record.end
        with record.label("step"):
            F.mse_loss(model(torch.ones(2, 64)), torch.ones(2, 8)).backward()
    own = sum(p.to_local().nbytes for p in model.parameters())
    assert own == 4 * (64 * 64 + 64 * 8 + 8) / 2
    assert own <= between <= own + 64, "and a few numbers of its own"
    assert record.end >= 2 * own, "with the gradients"
    assert record.peak_of("step") >= 2 * own + 64 * 64 * 4


def test_reading_a_record_needs_no_torch():
    with record_tensor_bytes() as record:
        held = torch.zeros(100)
    code = (
        f"import sys, pickle; record = pickle.loads({pickle.dumps(record)!r}); "
        "assert record.peak == 400; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, held
