"""Messages that ranks send are noted as they are, and put in steps."""

import time

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks

from course_utils.from_scratch import collectives
from course_utils.measure.messages import Call, Message, in_steps, recorded, timed


def noted(name):
    with recorded() as calls:
        getattr(collectives, name)(*([] if name == "barrier" else [torch.zeros(5)]))
    return calls


def test_a_tree_and_a_linear_broadcast(four):
    linear, tree = (
        in_steps(four.run(noted, name)) for name in ("broadcast", "broadcast_tree")
    )
    assert linear == [Message(k, 0, k, 20) for k in (1, 2, 3)]
    assert tree == [Message(1, 0, 1, 20), Message(2, 0, 2, 20), Message(2, 1, 3, 20)]


@pytest.mark.parametrize(
    ("name", "messages", "steps"),
    [("all_reduce_naive", 6, 6), ("all_reduce", 24, 6), ("barrier", 6, 6)],
)
def test_what_is_made_of_messages(four, name, messages, steps):
    found = in_steps(four.run(noted, name))
    assert len(found) == messages
    assert max(message.step for message in found) == steps


def waits_and_computes():
    x, rank = torch.zeros(1), dist.get_rank()
    dist.barrier()
    with timed() as events:
        if rank == 0:
            dist.send(x, dst=1)
            request = dist.isend(x, dst=1)
            time.sleep(0.1)
            request.wait()
        elif rank == 1:
            time.sleep(0.2)
            dist.recv(x, src=0)
            dist.recv(x, src=0)
        dist.barrier()
    time.sleep(0)  # no longer noted
    return [(label.replace("\u00a0", " "), kind) for _, _, label, kind in events], [
        stop - start for start, stop, *_ in events
    ]


def test_when_a_rank_waits_is_noted(four):
    (sends, lasted), (receives, _), (others, _), _ = four.run(waits_and_computes)
    computes, barrier = ("compute", "compute"), ("barrier", "wait")
    assert sends == [("send to 1", "wait"), computes, ("wait", "wait"), barrier]
    assert receives == [computes, *[("recv from 0", "wait")] * 2, barrier]
    assert others == [barrier]
    assert lasted[0] > 0.15 and 0.1 <= lasted[1]


def from_anybody():
    tensor, rank = torch.zeros(2, dtype=torch.int64), dist.get_rank()
    with recorded() as calls:
        if rank == 0:
            for _ in range(3):
                dist.recv(tensor)
        else:
            dist.send(tensor, group=dist.group.WORLD, group_dst=0)
    return calls


def test_a_message_from_any_rank(four):
    messages = in_steps(four.run(from_anybody))
    assert sorted(message.source for message in messages) == [1, 2, 3]
    assert [message.nbytes for message in messages] == [16, 16, 16]
    assert [message.step for message in messages] == [1, 2, 3]  # one after the other


def all_at_once():
    rank, n = dist.get_rank(), dist.get_world_size()
    incoming = torch.zeros(1)
    with recorded() as calls:
        operations = [
            dist.P2POp(dist.isend, torch.zeros(1), (rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % n),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return calls


def test_one_step_for_all_that_can_go_at_once(four):
    messages = in_steps(four.run(all_at_once))
    assert messages == [Message(1, r, (r + 1) % 4, 4) for r in range(4)]


def waiting_for_one_of_two():
    rank, tensor = dist.get_rank(), torch.zeros(1)
    with recorded() as calls:
        if rank == 0:
            requests = [dist.isend(tensor, peer) for peer in (1, 2)]
            requests[1].wait()
            dist.send(tensor, 3)
            requests[0].wait()
        else:
            dist.recv(tensor, 0)
    return calls


def test_a_wait_is_for_its_own_message(four):
    kinds = [(call.kind, call.number) for call in four.run(waiting_for_one_of_two)[0]]
    assert kinds == [
        *(("send", 0), ("send", 1), ("wait", 1)),
        *(("send", 2), ("wait", 2), ("wait", 0)),
    ]


def in_a_group():
    group, tensor = dist.new_group([1, 3]), torch.zeros(1)
    with recorded() as calls:
        if dist.get_rank() in (1, 3):
            collectives.broadcast(tensor, src=3, group=group)
    return calls


def test_ranks_of_a_group_are_those_of_the_job(four):
    assert in_steps(four.run(in_a_group)) == [Message(1, 3, 1, 4)]


@on_ranks(4)
def test_nothing_stays_replaced_and_collectives_of_torch_are_not_seen():
    before = dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.Work.wait
    with pytest.raises(ZeroDivisionError), recorded() as calls:
        dist.all_reduce(torch.zeros(1))  # torch's own sends its messages in C++
        raise ZeroDivisionError
    assert calls == []
    after = dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.Work.wait
    assert before == after


def sent(number, to):
    return Call("send", number, to, 4)


def received(number, source):
    return [Call("recv", number, source, 4), Call("wait", number)]


def test_a_rank_sends_one_message_in_a_step_even_if_it_does_not_wait():
    calls = [[sent(0, to=1), sent(1, to=2)], received(0, 0), received(0, 0)]
    assert in_steps(calls) == [Message(1, 0, 1, 4), Message(2, 0, 2, 4)]


@pytest.mark.parametrize("first", [1, 2])
def test_messages_that_are_under_way_leave_in_the_order_of_the_calls(first):
    second = 3 - first
    calls = [[sent(0, to=first), sent(1, to=second)], received(0, 0), received(0, 0)]
    calls[first] += [sent(1, to=second)]  # it hands on what it has received
    calls[second] += received(1, first)
    to_second = [m for m in in_steps(calls) if m.destination == second]
    assert [(m.step, m.source) for m in to_second] == [(2, 0), (3, first)]


def test_half_a_message_and_none():
    for calls in ([[sent(0, to=1)], []], [[], received(0, 0)]):
        with pytest.raises(ValueError, match="no send, or no recv"):
            in_steps(calls)
    assert in_steps([[], []]) == []
