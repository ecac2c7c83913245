"""``traffic.py``: every collective is seen, with the bytes that a rank sends."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_utils.measure import traffic
from course_utils.measure.traffic import Sent, Watch
from course_utils.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def functional_collectives():
    from torch import ops  # a function that says `torch.ops` cannot be sent to a rank

    return ops._c10d_functional


def check_collectives():
    functional = functional_collectives()
    n, rank = dist.get_world_size(), dist.get_rank()
    part = torch.ones(6)  # 24 bytes
    whole, parts = torch.empty(6 * n), [torch.empty(6) for _ in range(n)]
    world = dist.group.WORLD.group_name

    def to_the_next():
        request = dist.isend(part, (rank + 1) % n)
        dist.recv(torch.empty(6), (rank - 1) % n)
        request.wait()

    def waited(tensors):
        return [functional.wait_tensor(tensor) for tensor in tensors]

    mine = [*parts] if rank == 0 else None
    calls = {
        "send": (24, to_the_next),
        "all-reduce": (2 * (n - 1) / n * 24, lambda: dist.all_reduce(part.clone())),
        "reduce": ((n - 1) / n * 24, lambda: dist.reduce(part.clone(), 0)),
        "broadcast": ((n - 1) / n * 24, lambda: dist.broadcast(part.clone(), 0)),
        "scatter": (
            (n - 1) * 24 if rank == 0 else 0,
            lambda: dist.scatter(torch.empty(6), mine),
        ),
        "gather": ((n - 1) / n * 24, lambda: dist.gather(part, mine)),
    }
    for name, (nbytes, call) in calls.items():
        with Sent() as sent:
            call()
        assert sent.calls == [(name, nbytes)], name
    several = {
        "all-gather": (
            (n - 1) * 24,
            lambda: dist.all_gather(parts, part),
            lambda: dist.all_gather_into_tensor(whole, part),
            lambda: functional.wait_tensor(
                functional.all_gather_into_tensor(part, n, world)
            ),
            lambda: dist.all_gather_coalesced([[one] for one in parts], [part]),
            lambda: waited(
                functional.all_gather_into_tensor_coalesced([part], n, world)
            ),
        ),
        "reduce-scatter": (
            (n - 1) * 24,
            lambda: dist.reduce_scatter(torch.empty(6), parts),
            lambda: dist.reduce_scatter_tensor(torch.empty(6), whole),
            lambda: functional.wait_tensor(
                functional.reduce_scatter_tensor(whole, "sum", n, world)
            ),
            lambda: waited(
                functional.reduce_scatter_tensor_coalesced([whole], "sum", n, world)
            ),
        ),
        "all-to-all": (
            (n - 1) * 24,
            lambda: dist.all_to_all_single(torch.empty(6 * n), whole),
            lambda: functional.wait_tensor(
                functional.all_to_all_single(whole, [6] * n, [6] * n, world)
            ),
        ),
        "all-reduce": (
            2 * (n - 1) / n * 24,
            lambda: functional.wait_tensor(functional.all_reduce(part, "sum", world)),
            lambda: dist.all_reduce_coalesced([part.clone()]),
            lambda: waited(functional.all_reduce_coalesced([part], "sum", world)),
        ),
    }
    for name, (nbytes, *ways) in several.items():
        for number, way in enumerate(ways):
            with Sent() as sent:
                way()
            assert sent.calls == [(name, nbytes)], (name, number)
    with Sent() as sent:
        dist.barrier()
        dist.all_reduce(part.clone())
        dist.all_reduce(part.clone())
        part.sum()
    assert sent.count("all-reduce") == 2 and sent.count("all-gather") == 0
    assert sent.nbytes == round(2 * 2 * (n - 1) / n * 24)


def test_every_collective_is_seen_with_its_bytes():
    with Ranks(3, quiet=True, timeout=60) as ranks:
        ranks.run(check_collectives)


def test_all_is_taken_from_the_argument_with_what_is_sent():
    """Also of those that gloo does not have, or that only a compiler calls."""
    for space, known in traffic._COLLECTIVES.items():
        for name, (_, place, _) in known.items():
            spellings = [name, f"{name}_", f"_{name}_"]
            found = [
                getattr(getattr(torch.ops, space), spelling)
                for spelling in spellings
                if hasattr(getattr(torch.ops, space), spelling)
            ]
            assert found, name
            arguments = found[0].default._schema.arguments
            assert arguments[place].name.startswith(("input", "tensors")), name


def test_what_is_no_collective_computes_as_without_it():
    with Sent() as sent:
        assert torch.zeros(2, dtype=torch.float64).dtype is torch.float64
    assert sent.calls == []


def test_watch_says_nothing_of_what_is_no_collective():
    with Watch():  # note() would raise
        torch.ones(3).sum()
    with pytest.raises(NotImplementedError):
        Watch().note("send", 4)
