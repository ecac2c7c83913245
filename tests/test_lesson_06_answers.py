"""Lesson 06: different right answers, and wrong ones that no near miss covers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_utils import Ranks
from course_utils.measure.data import load_data
from course_utils.notebook import ours
from course_utils.theory import costs
from tests.answers import Answers

ANSWERS = Answers()

# ------------------------------------------------------------- 06.broadcast_module

ALL = "(*module.parameters(), *module.buffers())"
SEND = "dist.broadcast(tensor, src=0)"


@ANSWERS.wrong("06.broadcast_module", "wrong", "these are new tensors")
def new_parameters(module):
    for child in (module, *module.modules()):
        for name, parameter in list(child.named_parameters(recurse=False)):
            value = parameter.detach().clone()
            dist.broadcast(value, src=0)
            setattr(child, name, nn.Parameter(value, parameter.requires_grad))
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


OF_CHILDREN = "(p for m in module.children() for p in m.parameters())"
FROM_ALL_GATHER = """n = dist.get_world_size()
            copies = [torch.empty_like(tensor) for _ in range(n)]
            dist.all_gather(copies, tensor)
            tensor.copy_(copies[0])"""
BY_MESSAGES = """if dist.get_rank() > 0:
                dist.recv(tensor, 0)
            else:
                for rank in range(1, dist.get_world_size()):
                    dist.send(tensor, rank)"""
ANSWERS.edited(
    "06.broadcast_module",
    right=[(SEND, FROM_ALL_GATHER), (SEND, BY_MESSAGES)],
    wrong=[
        ("rank 0's parameters", ALL, OF_CHILDREN),
        ("or the mode has changed", ALL, f"({ALL}, module.eval())[0]"),
        ("but requires_grad", ALL, f"[t.requires_grad_(False) for t in {ALL}]"),
    ],
)


@ANSWERS.wrong("06.broadcast_module", "wrong", "an int64 may have more digits")
@torch.no_grad()
def all_in_one(module):
    tensors = [*module.parameters(), *module.buffers()]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=0)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@ANSWERS.right("06.broadcast_module")
@torch.no_grad()
def those_of_a_dtype_together(module):
    by_dtype = {}
    for tensor in (*module.parameters(), *module.buffers()):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@ANSWERS.right("06.broadcast_module")
def all_at_once(module):
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers())]
    requests = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
    for request in requests:
        request.wait()


# ------------------------------------------------------------------ 06.cut_buckets

OPEN = "members, held, cap = [], 0, bucket_bytes"
CARRIED = "members, held, cap = [], held - cap, bucket_bytes"
ANSWERS.edited(
    "06.cut_buckets",
    wrong=[
        ("No float can be an index", "append(number)", "append(float(number))"),
        ("begins with 0 bytes", OPEN, CARRIED),
        ("its cap is bucket_bytes", OPEN, "members, held = [], 0"),
    ],
)


@ANSWERS.wrong("06.cut_buckets", "wrong", "It would work: but it is what you build")
def the_courses_formula(nbytes, bucket_bytes, first_bucket_bytes):
    return costs.ddp_buckets(nbytes, cap=bucket_bytes, first_cap=first_bucket_bytes)


@ANSWERS.right("06.cut_buckets")
def by_popping(nbytes, bucket_bytes, first_bucket_bytes):
    left, cap, buckets = list(range(len(nbytes))), first_bucket_bytes, []
    while left:
        bucket = (left.pop(),)
        while left and sum(nbytes[i] for i in bucket) < cap:
            bucket += (left.pop(),)
        buckets.append(bucket)
        cap = bucket_bytes
    return tuple(buckets)


@ANSWERS.right("06.cut_buckets")
def in_tensors(nbytes, bucket_bytes, first_bucket_bytes):
    order, sizes = torch.arange(len(nbytes)).flip(0), torch.tensor(nbytes).flip(0)
    cap, buckets = first_bucket_bytes, []
    while len(order):
        n = int((sizes.cumsum(0) < cap).sum()) + 1
        buckets.append(order[:n])
        order, sizes, cap = order[n:], sizes[n:], bucket_bytes
    return buckets


# ------------------------------------------------------------------- 06.async_ddp

REGISTER = "parameter.register_post_accumulate_grad_hook(self.send)"
DIVIDE = "parameter.grad /= dist.get_world_size()"
REDUCE = "self.requests.append(dist.all_reduce(parameter.grad, async_op=True))"
BOTH = f"{DIVIDE}\n        {REDUCE}"
WAIT = "while self.requests:\n            self.requests.pop().wait()"
OF_A_TENSOR = """mean = parameter / dist.get_world_size()
        self.requests.append(dist.all_reduce(mean, async_op=True))
        return mean"""
LOGGED = "self.log = [*getattr(self, 'log', []), parameter.grad.clone()]"
ALL_IN_THE_LAST = f"""self.there = [*getattr(self, "there", []), parameter]
        if len(self.there) == sum(p.requires_grad for p in self.module.parameters()):
            for parameter in self.there:
                {DIVIDE}
                {REDUCE}
            self.there = []"""

OF_EACH_MODULE = "in (p for m in module.modules() for p in m.parameters(False)):"
WITH_A_TENSOR_HOOK = (
    *(REGISTER, "parameter.register_hook(self.send)"),
    *(BOTH, OF_A_TENSOR),
)
ANSWERS.edited(
    "06.async_ddp",
    wrong=[
        ("rank 0's model", "(*module.parameters(), ", "(*module.first.parameters(), "),
        ("Send them, too: `module.buffers()`", ALL, "module.parameters()"),
        ("persistent=False", ALL, "module.state_dict().values()"),
        ("A parameter itself is sent", BOTH, REDUCE.replace("grad,", "data,")),
        ("are still kept", WAIT, "[request.wait() for request in self.requests]"),
        ("finish() returned while", WAIT, "self.requests.clear()"),
        ("was changed while", BOTH, f"{REDUCE}\n        {DIVIDE}"),
        ("yields it once", "in module.parameters():", OF_EACH_MODULE),
        ("Not all gradients are sent", "requires_grad:", "dim() > 1:"),
        ("a hook waits", REDUCE, "dist.all_reduce(parameter.grad)"),
        ("Did you reduce a copy", *WITH_A_TENSOR_HOOK),
        ("Is a number of ranks, 2, in your code?", DIVIDE, "parameter.grad /= 2"),
        ("begin too late", BOTH, ALL_IN_THE_LAST),
        ("in which the network computes", REGISTER, f"{REGISTER}; module.first.eval()"),
        ("tensors of earlier steps", BOTH, f"{BOTH}\n        {LOGGED}"),
    ],
    crashed=[
        ("And a hook must take what PyTorch", "send(self, parameter)", "send(self)"),
        ("cannot have a hook", "if parameter.requires_grad:", "if True:"),
        ("did you forget `return`?", "return self.module", "self.module"),
    ],
)

PAIRS = (
    "self.requests.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))"
)
EACH_PAIR = """while self.requests:
            parameter, request = self.requests.pop()
            request.wait()
            """
FUTURES = PAIRS.replace("async_op=True)", "async_op=True).get_future()")
MEANS = """mean = parameter.grad / dist.get_world_size()
        self.requests[parameter] = mean, dist.all_reduce(mean, async_op=True)"""
EACH_MEAN = """while self.requests:
            parameter, (mean, request) = self.requests.popitem()
            request.wait()
            """
PROMISES = """gradient, n = parameter.grad, dist.get_world_size()
        future = dist.all_reduce(gradient, async_op=True).get_future()
        self.requests.append(future.then(lambda _: gradient.div_(n)))"""
WAIT_ALL = "torch.futures.wait_all(self.requests)\n        self.requests.clear()"
# The last step's requests stay until the next backward, and no longer.
EMPTY_FIRST = f"""if getattr(self, "done", False):
            self.requests, self.done = [], False
        {DIVIDE}"""
WAIT_AND_KEEP = "[r.wait() for r in self.requests]\n        self.done = True"
# As torch's DDP does: nothing is left for finish().
CALL_BACK = f"""if not self.requests:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end)
        {DIVIDE}"""
END = "def finish(self):\n        pass\n\n    def end(self):"
# At the nodes that add to .grad, as it was done before torch 2.1.
ON_NODES = """node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, p=parameter: self.send(p))
                self.nodes = [*getattr(self, "nodes", []), node]  # or they are gone"""

MEANS_APART = "requests = []", "requests = {}", BOTH, MEANS
INFERENCE = "def send", "@torch.inference_mode()\n    def send"
OF_FUTURE = f"{EACH_PAIR}parameter.grad = request.value()[0] / dist.get_world_size()"
ANSWERS.edited(
    "06.async_ddp",
    right=[
        (BOTH, PROMISES),
        (BOTH, PAIRS, WAIT, f"{EACH_PAIR}{DIVIDE}"),
        (BOTH, PROMISES, WAIT, WAIT_ALL),
        (REDUCE, REDUCE.replace("=True)", "=True).get_future()"), WAIT, WAIT_ALL),
        (DIVIDE, EMPTY_FIRST, WAIT, WAIT_AND_KEEP),
        (DIVIDE, CALL_BACK, "def finish(self):", END),
        (BOTH, REDUCE.replace("async", "op=dist.ReduceOp.AVG, async")),
        (REGISTER, ON_NODES),
        (*MEANS_APART, WAIT, f"{EACH_MEAN}parameter.grad = mean"),
        # What travels is an inference tensor, which has no number of its changes.
        (*MEANS_APART, WAIT, f"{EACH_MEAN}parameter.grad.copy_(mean)", *INFERENCE),
        (BOTH, FUTURES, WAIT, OF_FUTURE),
    ],
)

# ---------------------------------------------------------------- 06.spot_the_hook

LOOP = """for gradient, request in zip(self.gradients, self.requests, strict=True):
            request.wait()
            gradient /= dist.get_world_size()
        self.gradients, self.requests = [], []"""
KEEP = "self.gradients.append(parameter.grad)"
FOR_BUFFERS = (
    "for buffer in module.buffers():\n            dist.broadcast(buffer, src=0)"
)

KEEPS_GRADIENTS = LOOP.replace(
    "self.gradients, self.requests = [], []", "self.requests = []"
)
ANSWERS.edited(
    "06.spot_the_hook",
    right=[
        (f"{KEEP}\n        {REDUCE}", PAIRS, LOOP, f"{EACH_PAIR}{DIVIDE}"),
        (KEEP, DIVIDE, LOOP, WAIT),
        (FOR_BUFFERS, "", "in module.parameters()", f"in {ALL}"),
    ],
    wrong=[
        ("a later one is not", LOOP, KEEPS_GRADIENTS, ", strict=True", ""),
        ("are still kept", LOOP, LOOP.rpartition("\n")[0]),
        ("Send them, too: `module.buffers()`", FOR_BUFFERS, ""),
        ("A parameter itself is sent", "parameter.grad", "parameter.data"),
    ],
)

# ----------------------------------------------------------------- 06.bucketed_ddp

WHILE = "while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:"
FLAT = "flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()"
WRITE = "p.grad.copy_(part.view_as(p))"
IN_TURN = """for i in range(len(self.buckets)):
            if i != len(self.sent) or self.missing[i]:
                continue"""
# Flat tensors that live as long as the model; hooks copy into them.
OUT = """self.flats = getattr(self, "flats", {})
            size = sum(p.numel() for p in bucket)
            flat = self.flats.setdefault(len(self.sent), torch.empty(size))
            torch.cat([p.grad.flatten() for p in bucket], out=flat)"""
COUNT = "self.missing[number] -= 1"
LATE = """self.missing = [0] * len(self.buckets)
        self.ready(0, None)
        for bucket, flat, request"""
AS_THEY_COME = f"""{COUNT}
        self.there = [*getattr(self, "there", []), parameter]"""
SORTED = """last = {id(p): place for place, p in enumerate(self.there)}
            bucket = sorted(bucket, key=lambda p: last[id(p)])
            """

AS_EACH_IS_FULL = (
    *(WHILE, "if not self.missing[number]:"),
    *("self.buckets[len(self.sent)]", "self.buckets[number]"),
)
THEN_DIVIDE = "request.wait()\n            flat /= dist.get_world_size()"
ANSWERS.edited(
    "06.bucketed_ddp",
    right=[
        ("op=True)", "op=True).get_future().then(lambda future: future.value())"),
        (FLAT, OUT, "request.wait()", THEN_DIVIDE),
        (WHILE, IN_TURN),
        (WRITE, "p.grad = part.view_as(p)"),
    ],
    wrong=[
        ("with `while` and not with `if`", "while len", "if len"),
        ("Each waits for those before it", *AS_EACH_IS_FULL),
        ("a later one is not", "self.begin()", "self.sent = []"),
        ("in the same order on all", COUNT, AS_THEY_COME, FLAT, f"{SORTED}{FLAT}"),
        ("The buckets leave too late", COUNT, "", "for bucket, flat, request", LATE),
    ],
    crashed=[
        ("A bias has one dimension", ".flatten()", ""),
        ("whether a bucket is left", "len(self.sent) < len(self.buckets) and ", ""),
    ],
)

# ------------------------------------------------------------------- 06.accumulate

K = "k = len(micro_batches)"
EACH = "for i, (inputs, labels) in enumerate(micro_batches):"
POP = "for i in range(k):\n        inputs, labels = micro_batches.pop()"
BACKWARD = "(loss / k).backward()"
TOGETHER = (
    f"total = loss + (total if i else 0)\n    {BACKWARD.replace('loss', 'total')}"
)
NEVER_AGAIN = "model.require_backward_grad_sync = False"
STEP = f"{BACKWARD}\n    for p in model.parameters():\n        p.data -= p.grad"

AVERAGE = (
    "for p in model.parameters():\n"
    "        dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"
)
ANSWERS.edited(
    "06.accumulate",
    wrong=[
        ("should go through the model once", K, f"{K}; model(micro_batches[0][0])"),
        ("in memory at the same time", BACKWARD, TOGETHER),
        ("list is not what it was", EACH, POP),
        ("or a tensor in it", BACKWARD, f"{BACKWARD}; inputs.zero_()"),
        ("computed in eval mode", K, f"{K}; model.module.eval()"),
        ("requires_grad", BACKWARD, f"{BACKWARD}\n    model.requires_grad_(False)"),
        ("DDP sends in the next", BACKWARD, f"{BACKWARD}\n    {NEVER_AGAIN}"),
        ("the mean loss over all rows", "labels)\n", 'labels, reduction="sum") / 7\n'),
        ("no `optimizer.step()` here", BACKWARD, STEP),
        ("DDP must send in the last", "model(inputs)", "model.module(inputs)"),
        ("Leave out all other collectives", BACKWARD, f"{BACKWARD}\n    {AVERAGE}"),
    ],
)


@ANSWERS.right("06.accumulate")
def last_one_outside(model, micro_batches):
    *others, last = micro_batches
    with model.no_sync():
        for inputs, labels in others:
            (F.cross_entropy(model(inputs), labels) / len(micro_batches)).backward()
    inputs, labels = last
    (F.cross_entropy(model(inputs), labels) / len(micro_batches)).backward()


@ANSWERS.right("06.accumulate")
def by_switching(model, micro_batches):
    k = len(micro_batches)
    for i, (inputs, labels) in enumerate(reversed(micro_batches), 1):
        model.require_backward_grad_sync = i == k
        losses = F.cross_entropy(model(inputs), labels, reduction="sum")
        losses.div(len(labels) * k).backward()


@ANSWERS.right("06.accumulate")
def scaled_at_the_end(model, micro_batches):
    """The sum is divided where it lies, before the last one is added and sent."""
    k = len(micro_batches)
    with model.no_sync():
        for inputs, labels in micro_batches[:-1]:
            F.cross_entropy(model(inputs), labels).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= k
    inputs, labels = micro_batches[-1]
    F.cross_entropy(model(inputs), labels).backward(torch.tensor(1 / k))


test_wrong, test_right = ANSWERS.tests()


def train_copied():
    """What the exercise's cell trains, with the class that has all three bugs."""
    solved, names = ours.solved("06.spot_the_hook"), {}
    for source in (*ours.defined_above(solved), solved.given):
        exec(source, names)
    names["images"], names["labels"], *_ = load_data("digits")
    return names["losses"](names["CopiedDDP"])


def test_the_copied_ddp_learns_nothing_as_the_exercise_says():
    with Ranks(2, backend="gloo", quiet=True) as two:
        losses = two.run(train_copied)[0]
    assert losses[2:] == pytest.approx([2.3] * 4)
