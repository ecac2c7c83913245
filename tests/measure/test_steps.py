"""A recorded step tells what was computed and sent, and in which order."""

import torch.distributed as dist

from course_utils.from_scratch import ddp
from course_utils.measure.steps import BACKWARD, FORWARD, record_step


def after_the_backward(module):
    return module, lambda: ddp.average_gradients(module)


def during_the_backward(module):
    return ddp.DDP(module, bucket_bytes=1, first_bucket_bytes=1), lambda: None


def waiting_in_hooks(module):
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return module, lambda: None


def test_the_events_of_a_step_are_those_that_happened(started):
    late, early, waiting = (
        started[2].run(record_step, wrap, 3, 4)
        for wrap in (after_the_backward, during_the_backward, waiting_in_hooks)
    )
    for events, milliseconds in late + early:
        kinds = [kind for *_, kind in events]
        assert kinds.count("communicate") == 3  # a message for each layer
        layers = {"forward": ["0", "1", "2"], "backward": ["2", "1", "0"]}
        for kind, order in layers.items():
            assert [layer for *_, layer, what in events if what == kind] == order
        least = {"forward": FORWARD, "backward": BACKWARD, "communicate": 0}
        assert all(end - begin >= least[kind] for begin, end, _, kind in events)
        assert 0 <= events[0][0] and events[-1][1] <= milliseconds / 1000
    for by_rank, before in ((late, 0), (early, 2)):
        for events, _ in by_rank:
            over = max(end for _, end, _, kind in events if kind == "backward")
            sent = [start for start, *_, kind in events if kind == "communicate"]
            assert sum(start < over for start in sent) >= before
            assert before or min(sent) > over
    # A layer computes until the next one, unless a hook waits: what autograd does
    # between two layers hides a message, and waiting does not. On a busy machine a
    # message may end before a rank goes on, which looks as if it had waited.
    assert max(hidden_in(events) for events, _ in early) > 0
    assert max(hidden_in(events) for events, _ in waiting) == 0


def hidden_in(events):
    """How many messages were sent while a layer computed its backward."""
    work = [(a, b) for a, b, _, kind in events if kind == "backward"]
    sent = [start for start, *_, kind in events if kind == "communicate"]
    return sum(a <= start < b for start in sent for a, b in work)
