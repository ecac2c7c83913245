"""Seeds, states and generators."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from programs.basis import (
    GPU,
    Seen,
    program,
)


@program
def seeds() -> Seen:
    def draw() -> torch.Tensor:
        return torch.rand(4, device=GPU)

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.cuda.manual_seed(3)
    again = draw()
    torch.cuda.manual_seed_all(4)
    other = draw()
    return {
        "again": torch.equal(first, again),
        "goes on": not torch.equal(first, second),
        "other": not torch.equal(first, other),
        "seed": torch.cuda.initial_seed(),
        "range": bool(((first >= 0) & (first < 1)).all()),
    }


@program
def random_states() -> Seen:
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device=GPU)
    torch.cuda.set_rng_state(state)
    second = torch.rand(4, device=GPU)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(9, device=GPU)
        after = torch.cuda.get_rng_state()
    return {
        "again": torch.equal(first, second),
        "dtype": state.dtype,
        "device": state.device,
        "length": len(state),
        "all": len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count(),
        "forked": torch.equal(after, torch.cuda.get_rng_state()),
    }


@program
def generators() -> Seen:
    one, other = (torch.Generator(GPU).manual_seed(5) for _ in "12")
    first = torch.randn(3, device=GPU, generator=one)
    second = torch.randn(3, device=GPU, generator=other)
    mixed = torch.randperm(5, device=GPU, generator=one)
    return {
        "same": torch.equal(first, second),
        "seed": one.initial_seed(),
        "permutation": mixed.sort().values,
        "kind": isinstance(one, torch.Generator),
    }


@program
def two_generators() -> Seen:
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(5, device=GPU)
    return {"the cpu's is its own": torch.equal(first, torch.rand(3))}


@program
def dropout() -> Seen:
    x = torch.ones(10_000, device=GPU)
    kept = F.dropout(x, 0.25)
    return {
        "three of four": abs((kept > 0).float().mean().item() - 0.75) < 0.05,
        "scale": kept.max(),
        "eval": torch.equal(F.dropout(x, 0.25, training=False), x),
        "normal": torch.randn(10_000, device=GPU).mean().abs().item() < 0.1,
        "ints": torch.randint(3, (99,), device=GPU).unique(),
        "multinomial": torch.multinomial(torch.tensor([0.0, 1.0], device=GPU), 1),
    }
