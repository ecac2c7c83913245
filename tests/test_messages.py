"""Messages that ranks send are noted as they are, and put in steps."""

import pytest
import torch
import torch.distributed as dist

from course_utils.from_scratch import collectives
from course_utils.measure.messages import Call, Message, in_steps, recorded
from course_utils.ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, backend="gloo", quiet=True) as four:
        yield four


def noted(name):
    tensor = torch.zeros(5)
    with recorded() as calls:
        getattr(collectives, name)(tensor)
    return calls


def steps(messages):
    return max(message.step for message in messages)


def test_a_tree_and_a_linear_broadcast(ranks):
    linear, tree = (
        in_steps(ranks.run(noted, name)) for name in ("broadcast", "broadcast_tree")
    )
    assert linear == [Message(k, 0, k, 20) for k in (1, 2, 3)]
    assert tree == [Message(1, 0, 1, 20), Message(2, 0, 2, 20), Message(2, 1, 3, 20)]


@pytest.mark.parametrize(
    ("name", "messages", "number_of_steps"),
    [("all_reduce_naive", 6, 6), ("all_reduce", 24, 6), ("barrier", 6, 6)],
)
def test_what_is_made_of_messages(ranks, name, messages, number_of_steps):
    calls = ranks.run(noted_barrier if name == "barrier" else noted, name)
    assert len(in_steps(calls)) == messages
    assert steps(in_steps(calls)) == number_of_steps


def noted_barrier(name):
    with recorded() as calls:
        collectives.barrier()
    return calls


def from_anybody():
    tensor, rank = torch.zeros(2, dtype=torch.int64), dist.get_rank()
    with recorded() as calls:
        if rank == 0:
            for _ in range(3):
                dist.recv(tensor)
        else:
            dist.send(tensor, group=dist.group.WORLD, group_dst=0)
    return calls


def test_a_message_from_any_rank(ranks):
    messages = in_steps(ranks.run(from_anybody))
    assert sorted(message.source for message in messages) == [1, 2, 3]
    assert [message.nbytes for message in messages] == [16, 16, 16]
    assert [message.step for message in messages] == [1, 2, 3]  # one after the other


def all_at_once():
    rank, n = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.zeros(1), torch.zeros(1)
    with recorded() as calls:
        operations = [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % n),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return calls


def test_one_step_for_all_that_can_go_at_once(ranks):
    messages = in_steps(ranks.run(all_at_once))
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


def test_a_wait_is_for_its_own_message(ranks):
    kinds = [(call.kind, call.number) for call in ranks.run(waiting_for_one_of_two)[0]]
    assert kinds == [
        *(("send", 0), ("send", 1), ("wait", 1)),
        *(("send", 2), ("wait", 2), ("wait", 0)),
    ]


def in_a_group():
    group = dist.new_group([1, 3])
    tensor = torch.zeros(1)
    with recorded() as calls:
        if dist.get_rank() in (1, 3):
            collectives.broadcast(tensor, src=3, group=group)
    return calls


def test_ranks_of_a_group_are_those_of_the_job(ranks):
    assert in_steps(ranks.run(in_a_group)) == [Message(1, 3, 1, 4)]


def afterwards():
    before = dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.Work.wait
    with pytest.raises(ZeroDivisionError), recorded():
        raise ZeroDivisionError
    tensor = torch.zeros(1)  # and everything still works
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
        dist.isend(tensor, 1).wait()
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)
        dist.irecv(tensor, 0).wait()
    return before == (dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.Work.wait)


def test_nothing_stays_replaced(ranks):
    assert ranks.run(afterwards) == [True] * 4


def test_collectives_of_torch_are_not_seen(ranks):
    assert ranks.run(by_torch) == [[], [], [], []]


def by_torch():
    with recorded() as calls:
        dist.all_reduce(torch.zeros(1))
    return calls


def test_a_rank_that_waits_goes_on_one_step_later():
    chain = [
        [Call("send", 0, 1, 4), Call("wait", 0)],
        [
            *(Call("recv", 0, 0, 4), Call("wait", 0)),
            *(Call("send", 1, 2, 4), Call("wait", 1)),
        ],
        [Call("recv", 0, 1, 4), Call("wait", 0)],
    ]
    assert in_steps(chain) == [Message(1, 0, 1, 4), Message(2, 1, 2, 4)]


def test_a_rank_sends_one_message_in_a_step_even_if_it_does_not_wait():
    calls = [
        [Call("send", 0, 1, 4), Call("send", 1, 2, 4)],
        [Call("recv", 0, 0, 4), Call("wait", 0)],
        [Call("recv", 0, 0, 4), Call("wait", 0)],
    ]
    assert in_steps(calls) == [Message(1, 0, 1, 4), Message(2, 0, 2, 4)]


@pytest.mark.parametrize("first", [1, 2])
def test_messages_that_are_under_way_leave_in_the_order_of_the_calls(first):
    second = 3 - first
    calls = [[Call("send", 0, first, 4), Call("send", 1, second, 4)], [], []]
    for rank in (1, 2):
        calls[rank] = [Call("recv", 0, 0, 4), Call("wait", 0)]
    calls[first] += [Call("send", 1, second, 4)]  # it hands on what it has received
    calls[second] += [Call("recv", 1, first, 4), Call("wait", 1)]
    to_second = [m for m in in_steps(calls) if m.destination == second]
    assert [(m.step, m.source) for m in to_second] == [(2, 0), (3, first)]


@pytest.mark.parametrize(
    "calls",
    [
        [[Call("send", 0, 1, 4)], []],
        [[], [Call("recv", 0, 0, 4), Call("wait", 0)]],
    ],
    ids=["no recv", "no send"],
)
def test_half_a_message(calls):
    with pytest.raises(ValueError, match="no send, or no recv"):
        in_steps(calls)


def test_no_messages():
    assert in_steps([[], []]) == []
