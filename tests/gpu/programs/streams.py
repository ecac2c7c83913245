"""Streams and events, as published scripts use them."""

from __future__ import annotations

import torch

from programs.basis import (
    GPU,
    MIB,
    Seen,
    busy,
    error_of,
    program,
)


@program
def a_side_stream() -> Seen:
    side, x = torch.cuda.Stream(), torch.ones(1000, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        current = torch.cuda.current_stream()
        y.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    return {
        "sum": (y + 1).sum(),
        "device": side.device,
        "inside": current == side,
        "kind": isinstance(side, torch.cuda.Stream),
        "default again": torch.cuda.current_stream() == torch.cuda.default_stream(),
        "priority": torch.cuda.Stream(priority=-1).priority,
    }


@program
def streams_differ() -> Seen:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    return {"same": one == other, "default": one == torch.cuda.default_stream()}


@program
def events() -> Seen:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    plain = torch.cuda.Event()
    early = error_of(lambda: start.elapsed_time(end))
    fresh = plain.query()
    start.record()
    busy()
    end.record()
    running = end.query()
    end.synchronize()
    plain.record()
    plain.synchronize()
    return {
        "not recorded": early,
        "fresh": fresh,
        "running": running,
        "done": end.query(),
        "time": start.elapsed_time(end) > 0.1,
        "without timing": error_of(lambda: plain.elapsed_time(end)),
    }


@program
def events_between_streams() -> Seen:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.zeros(100, device=GPU)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        x += 1
        event.record()
    torch.cuda.current_stream().wait_event(event)
    x *= 3
    recorded = torch.cuda.current_stream().record_event()
    recorded.synchronize()
    return {"done": [recorded.query(), side.query()], "value": x.sum()}


@program
def prefetched() -> Seen:
    """As published input pipelines do it: the next batch comes on a side stream."""
    batches = [torch.full((MIB,), float(i)).pin_memory() for i in range(3)]
    side, sums, coming = torch.cuda.Stream(), [], None
    for batch in [*batches, None]:
        torch.cuda.current_stream().wait_stream(side)
        ready, coming = coming, None
        if batch is not None:
            with torch.cuda.stream(side):
                coming = batch.to(GPU, non_blocking=True)
        if ready is not None:
            ready.record_stream(torch.cuda.current_stream())
            sums.append(ready.mean())
    return {"sums": sums}
