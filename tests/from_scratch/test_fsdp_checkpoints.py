"""Checkpoints of ``from_scratch/fsdp``."""

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch import fsdp

from .fsdp_jobs import ADAM, Job, Transformer, largest_difference


def saved(kind, folder):
    """Train 2 steps and save everything whole; rank 0 writes the file."""
    job = Job(kind, "transformer", ADAM, torch.float64).train(range(2))
    if kind == "fsdp":
        whole = job.model.state_dict()
        optimizer = job.model.optimizer_state_dict(job.optimizer)
    else:
        whole = job.module.state_dict()
        shards = job.optimizer.flats, job.optimizer.optimizer
        optimizer = fsdp.optimizer_state_dict(*shards)
    if dist.get_rank() == 0:
        assert list(whole) == list(Transformer().state_dict())
        plain = Transformer().double()
        plain.load_state_dict(whole)
        torch.save({"model": whole, "optimizer": optimizer}, f"{folder}/{kind}.pt")


def resumed(kind, saved_kind, folder):
    """Load it, and return what one more step makes of it."""
    state = torch.load(f"{folder}/{saved_kind}.pt", mmap=True)
    job = Job(kind, "transformer", (torch.optim.AdamW, {"lr": 7.0}), torch.float64)
    if kind == "fsdp":
        job.model.load_state_dict(state["model"])
        job.model.load_optimizer_state_dict(job.optimizer, state["optimizer"])
        again = job.model.optimizer_state_dict(job.optimizer)
    else:
        job.module.load_state_dict(state["model"])
        shards = job.optimizer.flats, job.optimizer.optimizer
        fsdp.load_optimizer_state_dict(*shards, state["optimizer"])
        again = fsdp.optimizer_state_dict(*shards)
    assert again["param_groups"] == state["optimizer"]["param_groups"]
    assert again["param_groups"][0]["lr"] == ADAM[1]["lr"]
    for name, entries in state["optimizer"]["state"].items():
        for key, value in entries.items():
            assert torch.equal(again["state"][name][key], value), (name, key)
    # Every rank has the same batch, so that their number does not matter.
    torch.manual_seed(0)
    inputs, labels = torch.randint(17, (4, 5)), torch.randint(3, (4,))
    job.optimizer.zero_grad()
    F.cross_entropy(job.model(inputs), labels).backward()
    job.optimizer.step()
    return job.state()


def test_a_whole_checkpoint_fits_any_number_of_ranks_and_any_rung(started, tmp_path):
    for kind in ("fsdp", "zero2"):
        started[4].run(saved, kind, str(tmp_path))
    results = [
        state
        for n, kind in ((4, "fsdp"), (2, "fsdp"), (3, "zero1"), (1, "zero2"))
        for saved_kind in ("fsdp", "zero2")
        for state in started[n].run(resumed, kind, saved_kind, str(tmp_path))
    ]
    for state in results:
        assert largest_difference(state, results[0]) < 1e-12


class Scalar(nn.Module):
    """Its root unit has one parameter, without a dimension."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        return self.layer(rows) * self.scale


@on_ranks(2)
def test_the_state_of_each_optimizer_can_be_saved_and_loaded():
    """What each optimizer keeps: for elements, and once for all of them."""
    torch.manual_seed(0)
    for name in ("NAdam", "ASGD", "RAdam", "Adamax", "Rprop", "Adagrad", "AdamW"):
        make = getattr(torch.optim, name)
        module = Scalar()
        model = fsdp.FSDP(module, units=(one for one in [module.layer]))
        assert len(model.flats) == 2
        optimizer = make(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        whole = model.optimizer_state_dict(optimizer)
        again = make(model.parameters(), lr=0.2)
        model.load_optimizer_state_dict(again, whole)
        assert again.param_groups[0]["lr"] == 0.1
        for flat in model.flats:
            expected, found = optimizer.state[flat.shard], again.state[flat.shard]
            assert expected.keys() == found.keys(), (name, flat.name)
        # Whole: in the padding of the shards there may be other numbers.
        found = model.optimizer_state_dict(again)["state"]
        for parameter, entries in whole["state"].items():
            for key, value in entries.items():
                assert torch.equal(value, found[parameter][key]), (name, key)
        again.step()  # its gradients are there
    whole["state"]["layer.bias"]["step"] = torch.tensor(7.0)
    with pytest.raises(ValueError, match=r"'step' of unit 'layer' .*layer.bias: 7.0"):
        model.load_optimizer_state_dict(again, whole)
    whole["state"]["layer.bias"] |= {
        "step": torch.tensor(2.0),
        "exp_avg": torch.ones(4),
    }
    with pytest.raises(ValueError, match=r"layer.bias: of shape \(4,\)"):
        model.load_optimizer_state_dict(again, whole)
    whole["state"]["bias"] = whole["state"].pop("layer.bias")
    with pytest.raises(ValueError, match=r"\['bias'\], which this model does not"):
        model.load_optimizer_state_dict(again, whole)
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(5))], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD has a parameter of the shape \(5,\)"):
        model.optimizer_state_dict(other)


@on_ranks(2)
def test_what_was_saved_stays_what_it_is_and_is_loaded_again():
    """Buffers as well."""
    job = Job("fsdp", "conv")
    whole, start = job.model.state_dict(), job.state()
    job.train(range(2))
    assert largest_difference(job.state(), start) > 0
    assert largest_difference(whole, start) == 0
    job.model.load_state_dict(whole)
    assert largest_difference(job.state(), start) == 0


@on_ranks(1)
def test_a_checkpoint_that_does_not_fit_is_refused():
    job = Job("fsdp", "conv")
    whole = job.model.state_dict()
    whole["more"] = whole.pop("out.bias")
    whole["out.weight"] = torch.ones(2)
    with pytest.raises(
        ValueError,
        match=r"Missing: \['out.bias'\]; unknown: \['more'\]; .*"
        r"out.weight is \(2,\) and not \(3, 5\)",
    ):
        job.model.load_state_dict(whole)
    entries = job.model.optimizer_state_dict(job.optimizer)
    entries["state"]["out.bias"] = {"momentum_buffer": torch.ones(3)}
    with pytest.raises(ValueError, match="unit 'root' have different kinds of state"):
        job.model.load_optimizer_state_dict(job.optimizer, entries)


class Noted(nn.Linear):
    def get_extra_state(self):
        return {"version": 1}


@on_ranks(2)
def test_extra_state_is_left_out_of_checkpoints():
    model = fsdp.FSDP(nn.Sequential(Noted(2, 3), nn.Linear(3, 2)))
    state = model.state_dict()
    assert [*state] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model.load_state_dict(state)
    model.load_state_dict(nn.Sequential(Noted(2, 3), nn.Linear(3, 2)).state_dict())
