"""Lesson 08: right answers as people write them, and wrong ones no near miss covers."""

import threading

import numpy as np
import torch
import torch.distributed as dist

from course_utils.measure.alive import alive, new_bytes
from course_utils.notebook.check import find_task
from course_utils.theory import costs
from tests.answers import Answers

ANSWERS = Answers()

# -------------------------------------------------- our solutions, pieces replaced

SHARD, PART, UNIT = "08.flat_shard", "08.reduce_scatter", "08.one_unit"
TRAIN, PILE = "08.spot_the_optimizer", "08.spot_the_pile"

GATHER = """\
        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard)
"""
INTO_ONE_TENSOR = """\
        shards = [self.shard.new_empty(dist.get_world_size() * len(self.shard))]
        dist.all_gather_into_tensor(shards[0], self.shard)
"""
BY_BROADCASTS = """\
        shards = [self.shard.clone() for _ in range(dist.get_world_size())]
        for owner, piece in enumerate(shards):
            dist.broadcast(piece, owner)
"""
BY_ALL_REDUCE = """\
        shards = torch.zeros(dist.get_world_size(), len(self.shard))
        shards[dist.get_rank()] = self.shard
        dist.all_reduce(shards)
        shards = list(shards)
"""
TEMPLATES = """\
        self.sizes = torch.tensor([tensor.numel() for tensor in tensors])
        self.templates = [tensor.to("meta") for tensor in tensors]
        self.shapes ="""
LISTS = "type(self).kept = [tensor.tolist() for tensor in tensors]"
WHOLE = "self.whole = torch.cat(shards).numpy().copy()"
A_VIEW = "{}.clone().chunk(dist.get_world_size())[dist.get_rank()].copy_({})"
MODULE = "output = self.module(*args)"
HOOK = "output.register_hook(lambda grad: self.gather())"
FORWARD = f"""\
        self.gather()
        {MODULE}
        {HOOK}
        self.free()
"""
RECOMPUTED = """\
        def whole(*args):
            self.gather()
            return self.module(*args)

        output = torch.utils.checkpoint.checkpoint(whole, *args, use_reentrant=False)
        self.free()
"""
INIT = """\
    def __init__(self, module):
        super().__init__(module)
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(lambda module, args, output: self.free())
        module.register_full_backward_pre_hook(lambda module, grads: self.gather())

    def forward"""
COPIES = """\
copies = {name: p.clone() for name, p in self.module.named_parameters()}
        output = torch.func.functional_call(self.module, copies, args)"""
ADD = "self.shard.grad = part if grad is None else grad + part"
ADD_IN_PLACE = """\
if grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += part"""
REPLICATED = "p.redistribute(placements=[torch.distributed.tensor.Replicate()])"
EARLY = """\
    if dist.get_rank():
        for p in model.parameters():
            p.full_tensor()
        return None
    state ="""
READY_MADE = """\
    from torch.distributed.checkpoint import state_dict as made
    options = made.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return made.get_model_state_dict(model, options=options) or None
    state ="""
LAYER = "fully_shard(layer)"
HALF = "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16)"
NORM = "nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=lr)"
WHOLE_LAYER = "fully_shard(layer, reshard_after_forward=False)"
WAIT, LOOP = "request.wait() / n", "for unit in reversed(units):"
UNDIVIDED = WAIT, "request.wait()"
POPPED = "while units:\n        unit = units.pop()"

ANSWERS.edited(
    SHARD,
    right=[
        (GATHER, INTO_ONE_TENSOR),
        (GATHER, BY_BROADCASTS),
        (GATHER, BY_ALL_REDUCE),
        ("        self.shapes =", TEMPLATES),  # sizes, and tensors without memory
        ("torch.cat(shards)", "(torch.cat(shards) if shards[1:] else self.shard)"),
    ],
    wrong=[
        ("Append zeros where", "-(-len(flat) // n)", "len(flat) // n + 1"),
        ("Keep only the shapes", "self.shapes =", f"{LISTS}; self.shapes ="),
        ("Keep nothing of what unshard()", "sizes = [", f"{WHOLE}; sizes = ["),
    ],
)
MEAN, REDUCED = "rows.mean(0)", "reduce_scatter(flat)"
ALL_REDUCED = "dist.all_reduce(g := gradient / n) or g.chunk(n)[rank] + 0"
ANSWERS.edited(
    PART,
    wrong=[
        ("a view of a larger tensor", MEAN, A_VIEW.format("gradient", MEAN)),
        ("but too much was sent. An all-reduce", MEAN, ALL_REDUCED),
    ],
)
ANSWERS.edited(
    UNIT,
    right=[
        (FORWARD, RECOMPUTED),
        (FORWARD, f"        {MODULE}\n", "    def forward", INIT),
        (HOOK, "output.grad_fn.register_prehook(lambda grads: self.gather())"),
        (ADD, ADD_IN_PLACE),
    ],
    wrong=[
        ("the shard's gradient a view", REDUCED, A_VIEW.format("flat", REDUCED)),
        ("the module computed with the copy", MODULE, COPIES),
        ("free the parameters", "self.free()\n        flat", "flat"),
        ("computed in eval mode", MODULE, MODULE.replace("e(", "e.eval()(")),
    ],
)
ANSWERS.edited(
    TRAIN,
    right=[
        ("if list(layer.parameters()):", "if True:"),
        (LAYER, "fully_shard(layer, reshard_after_forward=layer is not model[-1])"),
        ("    state =", READY_MADE),
        ("in model:", "in model[::-1]:", "p.full_tensor()", f"{REPLICATED}.to_local()"),
        ("    state =", EARLY),
    ],
    wrong=[
        ("A model in eval mode", OPTIMIZER, f"{OPTIMIZER}; model.eval()"),
        ("not an empty dictionary", "state if dist.get_rank() == 0 else None", "state"),
        ("is there a MixedPrecisionPolicy?", LAYER, f"fully_shard(layer, {HALF})"),
        ("the outermost unit stays whole", LAYER, WHOLE_LAYER),
        ("keeps one whole tensor after the", "if dist.get_rank() == 0:", "if True:"),
        ("norm was not clipped", NORM, NORM.replace("norm", "value")),
    ],
)
ANSWERS.edited(
    PILE,
    right=[
        ("unit.free()", "unit.free(); gradient /= n", *UNDIVIDED),
        (LOOP, f"grad = grad / n\n    {LOOP}", *UNDIVIDED),
    ],
    wrong=[
        ("divide what wait()", "r(gradient)", "r(gradient / n)"),
        ("wait for each before you start", "if running:", "if len(running) > 1:"),
        ("an argument is not what it was", LOOP, POPPED),
        ("an argument is not what it was", LOOP, f"grad /= n\n    {LOOP}", *UNDIVIDED),
    ],
)

# ------------------------------------------------------------------- 08.zero_table


@ANSWERS.right("08.zero_table")
def by_stages(psi, n, k):
    parts = torch.tensor([k, 2, 2], dtype=torch.float64) * psi
    divided = [[1, 1, 1], [n, 1, 1], [n, n, 1], [n, n, n]]
    return (parts / torch.tensor(divided)).sum(1)


def test_the_predicted_peak_is_that_of_the_formula():
    memory = costs.fsdp_memory([250_000_000] * 32, 8, prefetch=1)
    in_bfloat16 = memory.parameter_peak / 2
    assert in_bfloat16 == find_task("08.predict_peak").answer * 1_000_000


# ---------------------------------------------------------------- 08.reduce_scatter


@ANSWERS.right(PART)
def by_all_to_all(gradient):
    rows = torch.empty_like(gradient)
    dist.all_to_all_single(rows, gradient.clone())
    return rows.view(dist.get_world_size(), -1).mean(dim=0)


@ANSWERS.wrong(PART, "wrong", "Name the source:")
def from_anybody(gradient):
    """With two calls in a row, a piece of the second may be added in the first."""
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    total, piece = pieces[rank].clone(), torch.empty_like(pieces[rank])
    others = [other for other in range(n) if other != rank]
    requests = [dist.isend(pieces[other], other) for other in others]
    for _ in others:
        dist.recv(piece)
        total += piece
    for request in requests:
        request.wait()
    return total / n


@ANSWERS.right(PART)
def from_anybody_and_a_barrier(gradient):
    part = from_anybody(gradient)
    dist.barrier()
    return part


@ANSWERS.right(PART)
def sent_by_threads(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    total = pieces[rank].clone()
    for step in range(1, n):
        piece, to = torch.empty_like(total), (rank + step) % n
        thread = threading.Thread(target=dist.send, args=(pieces[to], to))
        thread.start()
        dist.recv(piece, (rank - step) % n)
        thread.join()
        total += piece
    return total / n


@ANSWERS.right(PART)
def in_a_ring(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = list((gradient / n).chunk(n))
    for step in range(n - 1):
        incoming = torch.empty_like(pieces[0])
        request = dist.isend(pieces[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(incoming)  # no source: in a ring there is only one
        request.wait()
        pieces[(rank - step - 2) % n] += incoming
    return pieces[rank].clone()


@ANSWERS.right(PART)
def pickled(gradient):
    total, n = 0, dist.get_world_size()
    for source in range(n):
        pieces, mine = [piece.clone() for piece in gradient.chunk(n)], [None]
        dist.scatter_object_list(mine, pieces, source)
        total = total + mine[0] / n
    return total


@ANSWERS.wrong(PART, "wrong", "but too much was sent.")
def by_the_store(gradient):
    store, n = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    store.set(f"gradient {dist.get_rank()}", gradient.numpy().tobytes())
    dist.barrier()
    there = [np.frombuffer(store.get(f"gradient {r}"), "f4") for r in range(n)]
    return torch.tensor(np.mean(there, axis=0)).chunk(n)[dist.get_rank()].clone()


@ANSWERS.right(PART)
def by_numbered_keys(gradient, calls=[]):  # noqa: B006
    store, n = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    rank, rows = dist.get_rank(), gradient.reshape(n, -1).numpy()
    calls.append(others := {*range(n)} - {rank})
    for r in others:
        store.set(f"{len(calls)} {rank} {r}", rows[r].tobytes())
    got = [np.frombuffer(store.get(f"{len(calls)} {r} {rank}"), "f4") for r in others]
    return torch.tensor(sum(got, rows[rank]) / n)


# ----------------------------------------------------------------- 08.spot_the_pile


@ANSWERS.right(PILE)
def quotient_awaited_at_once(units, grad):
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        unit.grad = unit.reduce_scatter(gradient / dist.get_world_size()).wait()


@ANSWERS.right(PILE)
def one_running(units, grad):
    n, before = dist.get_world_size(), None
    units[-1].gather()
    for number in range(len(units) - 1, -1, -1):
        unit = units[number]
        if number > 0:
            units[number - 1].gather()  # ahead
        grad, gradient = unit.backward(grad)
        unit.free()
        if before:
            before[0].grad = before[1].wait() / n
        before = unit, unit.reduce_scatter(gradient)
    before[0].grad = before[1].wait() / n


@ANSWERS.right(PILE)
def one_after_the_other(units, grad):
    *others, unit = units
    unit.gather()
    below, gradient = unit.backward(grad)
    unit.free()
    request = unit.reduce_scatter(gradient)
    del gradient
    unit.grad = torch.mul(request.wait(), 1 / dist.get_world_size())
    if others:
        one_after_the_other(others, below)


test_wrong, test_right = ANSWERS.tests()


def test_what_goes_during_a_case_does_not_hide_what_is_new():
    old = torch.zeros(4)
    before = alive()
    del old
    new, sizes = torch.zeros(4), torch.ones(4, dtype=torch.int64)
    assert new_bytes(before) == new.nbytes == 16 < sizes.nbytes
