"""``traffic.py``: every collective is seen, with the bytes that a rank sends."""

import torch
import torch.distributed as dist
from shared_ranks import on_ranks

from course_utils.measure.traffic import Sent


def functional_collectives():
    from torch import ops  # a function that says `torch.ops` cannot be sent to a rank

    return ops._c10d_functional


@on_ranks(3)
def test_every_collective_is_seen_with_its_bytes():
    functional = functional_collectives()
    n, rank = dist.get_world_size(), dist.get_rank()
    part = torch.ones(6)  # 24 bytes
    whole, parts = torch.empty(6 * n), [torch.empty(6) for _ in range(n)]
    mine = [*parts] if rank == 0 else None
    world = dist.group.WORLD.group_name
    share, others, twice = (n - 1) / n * 24, (n - 1) * 24, 2 * (n - 1) / n * 24

    def to_the_next():
        request = dist.isend(part, (rank + 1) % n)
        dist.recv(torch.empty(6), (rank - 1) % n)
        request.wait()

    def made(name, *arguments):
        made = getattr(functional, name)(*arguments)
        for tensor in made if isinstance(made, list) else [made]:
            functional.wait_tensor(tensor)

    seen = [
        ("send", 24, to_the_next),
        ("reduce", share, lambda: dist.reduce(part.clone(), 0)),
        ("broadcast", share, lambda: dist.broadcast(part.clone(), 0)),
        ("scatter", others * (rank == 0), lambda: dist.scatter(torch.empty(6), mine)),
        ("gather", share, lambda: dist.gather(part, mine)),
        ("all-gather", others, lambda: dist.all_gather(parts, part)),
        ("all-gather", others, lambda: dist.all_gather_into_tensor(whole, part)),
        ("all-gather", others, lambda: made("all_gather_into_tensor", part, n, world)),
        (
            "all-gather",
            others,
            lambda: dist.all_gather_coalesced([[one] for one in parts], [part]),
        ),
        ("reduce-scatter", others, lambda: dist.reduce_scatter(torch.empty(6), parts)),
        (
            "reduce-scatter",
            others,
            lambda: dist.reduce_scatter_tensor(torch.empty(6), whole),
        ),
        (
            "reduce-scatter",
            others,
            lambda: made("reduce_scatter_tensor_coalesced", [whole], "sum", n, world),
        ),
        (
            "all-to-all",
            others,
            lambda: dist.all_to_all_single(torch.empty(6 * n), whole),
        ),
        (
            "all-to-all",
            others,
            lambda: made("all_to_all_single", whole, [6] * n, [6] * n, world),
        ),
        ("all-reduce", twice, lambda: dist.all_reduce(part.clone())),
        ("all-reduce", twice, lambda: dist.all_reduce_coalesced([part.clone()])),
        ("all-reduce", twice, lambda: made("all_reduce", part, "sum", world)),
    ]
    for number, (name, nbytes, call) in enumerate(seen):
        with Sent() as sent:
            call()
        assert sent.calls == [(name, nbytes)], (number, name)
    with Sent() as sent:
        dist.barrier()
        dist.all_reduce(part.clone())
        dist.all_reduce(part.clone())
        assert part.double().sum().dtype is torch.float64
    assert sent.count("all-reduce") == 2 and sent.count("all-gather") == 0
    assert len(sent.calls) == 2 and sent.nbytes == round(2 * twice)
