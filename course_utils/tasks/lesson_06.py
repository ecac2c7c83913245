"""Lesson 06, DistributedDataParallel: the tasks of its exercise."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.measure.under_way import NO_VALUE_YET, Log
from course_utils.questions.lesson_06 import PREDICT_BUCKET
from course_utils.tasks.compare import are_same
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.task import OUT_OF_STEP, Miss, Task

READY_MADE = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed._broadcast_coalesced",
    "torch.distributed.utils._sync_module_states",
)

# ------------------------------------------------------------------- broadcast_module


class AllSorts(nn.Module):
    """A model with all sorts of tensors; another one for each seed."""

    def __init__(self, seed):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0 + seed))  # in no layer
        self.frozen = linear(3, 4, seed + 1).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_var.fill_(torch.inf if seed else 1)  # 0 times inf is nan
        # More digits than float64 has, or float32; and more than float32 has.
        self.norm.num_batches_tracked.fill_(2**53 + 2**24 + 1 + 10 * seed)
        self.wide = linear(2, 2, seed + 5, torch.float64, divided_by=3)
        self.narrow = linear(2, 2, seed + 5, torch.bfloat16)
        # Not saved, so state_dict() leaves it out.
        self.register_buffer("table", whole_numbers((2, 3), 50 + seed), False)


def tensors_of(module):
    """All tensors that make the module what it is, by their names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def trained_in(module):
    return [p for p in module.parameters() if p.requires_grad]


def observe_broadcast(answer, kind):
    rank = dist.get_rank()
    plain = nn.Sequential(linear(3, 4, rank + 1), nn.ReLU(), linear(4, 2, rank + 9))
    module = plain if kind == "two linear layers" else AllSorts(rank)
    before, trained = tensors_of(module), trained_in(module)
    with Log("broadcast") as log:
        answer(module)
    after = tensors_of(module)
    return {
        "broadcasts are waited for": log.missing() == 0,
        # Whole numbers as Python's, which lose no digit.
        **{n: t if t.is_floating_point() else t.tolist() for n, t in after.items()},
        "the same tensors as before": all(after[n] is t for n, t in before.items()),
        "requires_grad is kept": [*map(id, trained_in(module))] == [*map(id, trained)],
    }


ALL = "(*module.parameters(), *module.buffers())"
SEND = "dist.broadcast(tensor, src=0)"
ERRORS = {
    "Must specify global_rank or group_rank": "`dist.broadcast` must know which rank "
    "sends: src=0.",
    "a leaf Variable that requires grad": "A parameter was to be changed in place: "
    "do it under `torch.no_grad()`. Or did it come from a hook? It gets the "
    "*parameter*; the gradient is in its .grad.",
}

BROADCAST_MODULE = Task(
    id="06.broadcast_module",
    title="The same start",
    stars=1,
    observe=observe_broadcast,
    cases=(("two linear layers",), ("a model with all sorts of tensors",)),
    tolerance=0.0,
    forbids=READY_MADE,
    instead="`dist.broadcast` overwrites one tensor with that of rank src.",
    misses=(
        Miss(
            ALL,
            "module.parameters()",
            "The parameters are those of rank 0, the buffers are each rank's own. "
            "Buffers are part of the model, too: `module.buffers()`.",
        ),
        Miss(
            ALL,
            "module.state_dict().values()",
            "One buffer was registered with persistent=False: the model uses it, but "
            "`state_dict()` leaves it out. `module.buffers()` has all of them.",
        ),
        Miss(
            ALL,
            "(*filter(lambda p: p.requires_grad, module.parameters()), "
            "*module.buffers())",
            "Frozen parameters are not trained, but the model computes with them. They "
            "must be the same everywhere, too.",
        ),
        Miss(
            "src=0",
            "src=dist.get_world_size() - 1",
            "That is the model of the last rank. The task asks for rank 0's.",
        ),
        Miss(
            "broadcast(tensor,",
            "broadcast(tensor.clone(),",
            "Every rank still has its own model. Did you broadcast copies, and not "
            "write them back?",
        ),
        Miss(
            SEND,
            "dist.all_reduce(tensor); tensor.copy_(tensor / dist.get_world_size())",
            "That is the mean of the ranks' models. All ranks must have rank 0's.",
        ),
    ),
    because={
        "waited for": "With async_op=True a broadcast returns a request at once. Wait "
        "for all of them before you return. (`get_future()` does not wait.)",
        "num_batches_tracked": "Send each tensor in its own dtype: a whole number of "
        "type int64 may have more digits than a float.",
        "same tensors": "The values are right, but these are new tensors. An optimizer "
        "that was made before holds the old ones: overwrite them in place.",
        "requires_grad": "The values are right, but requires_grad has changed.",
        "scale": "What belongs to the module itself is not rank 0's: "
        "`module.children()` leaves it out. `module.parameters()` has all.",
        "": "Every rank must end with the parameters and buffers of rank 0, in the "
        "tensors that were there before.",  # for any other tensor
    },
    errors={
        **ERRORS,
        OUT_OF_STEP: "`dist.broadcast` is called by every rank, also by those that "
        "receive, with the same src=0 and for the same tensors in the same order.",
    },
    hints=(
        "What belongs to a module besides its parameters?",
        "`module.parameters()` and `module.buffers()` name all tensors, in the same "
        "order on every rank. `dist.broadcast(tensor, src=0)` overwrites one in place.",
        "One loop:\n"
        "  with torch.no_grad():\n"
        "      for tensor in (*module.parameters(), *module....()):\n"
        "          dist.broadcast(..., src=0)",
    ),
)

# ------------------------------------------------------------------------ cut_buckets


def observe_cut(answer, nbytes, bucket_bytes, first_bucket_bytes):
    made = answer(nbytes, bucket_bytes, first_bucket_bytes)
    try:
        buckets = [[as_number(n) for n in bucket] for bucket in made[:]]
    except (TypeError, KeyError):
        return None if made is None else {"it is a list of lists": False}
    return {
        "it is a list of lists": True,
        "no number is a float": not any(isinstance(n, float) for n in sum(buckets, [])),
        "no two buckets are one list": len(set(map(id, made))) == len(made),
        "no bucket is empty": [] not in buckets,
        "the buckets": buckets,
    }


def as_number(value):
    """One of torch's or NumPy's as Python's."""
    return value.item() if hasattr(value, "item") else value


MiB = 1 << 20
CLOSE = "buckets.append(members)\n            "
OPEN = "members, held, cap = [], 0, bucket_bytes"
PUT_IN = "members.append(number)\n        held += nbytes[number]"
RETURN = "return [*buckets, members] if members else buckets"

CUT_BUCKETS = Task(
    id="06.cut_buckets",
    title="Cut the buckets",
    stars=2,
    where="here",
    observe=observe_cut,
    cases=(
        ([50, 30, 10, 90, 40, 20], 100, 40),
        ([6 * MiB] * 10, 25 * MiB, 1 * MiB),
        ([4 * MiB, 4096] * 12, 25 * MiB, 1 * MiB),
        ([10, 20, 30, 40], 1000, 1000),
        ([100, 100, 100, 100, 100, 100], 200, 100),
        ([5, 70, 5, 5, 5, 5, 90, 5], 60, 15),
        ([7], 100, 10),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], 12, 6),
        ([50, 30, 10, 90, 20, 20, 30], 40, 100),  # the first cap is the larger one
    ),
    forbids=("torch.distributed._compute_bucket_assignment_by_size",),
    instead="A loop over the parameters, from the last to the first.",
    misses=(
        Miss(
            "reversed(range(len(nbytes)))",
            "range(len(nbytes))",
            "The buckets begin with the first parameter. Its gradient is ready *last*: "
            "begin with the last parameter.",
        ),
        Miss(
            f"{PUT_IN}\n        if held >= cap:\n            {CLOSE}{OPEN}",
            "if members and held + nbytes[number] > cap:\n"
            f"            {CLOSE}{OPEN}\n        {PUT_IN}",
            "You close a bucket before it would pass its cap. DDP closes it as soon as "
            "it has reached the cap, so it may be larger.",
        ),
        Miss(
            RETURN,
            "return buckets",
            "The last bucket never got full, and is missing. It travels, too.",
        ),
        Miss(">= cap", "> cap", "A bucket that has exactly its cap is closed, too."),
        Miss(
            "0, first_bucket_bytes",
            "0, bucket_bytes",
            "The first bucket has a cap of its own, first_bucket_bytes.",
        ),
        Miss(
            OPEN,
            "members, held = [], 0",
            "All buckets have the first one's cap. Then it is bucket_bytes.",
        ),
        Miss(
            OPEN,
            "members, cap = [], bucket_bytes",
            "Each new bucket begins with the bytes of those before it. Set the count "
            "back to 0 when a bucket is closed.",
        ),
        Miss(
            "held +=",
            "held =",
            "You compare the bytes of one gradient with the cap. It is all that the "
            "bucket holds that counts: add them up, `+=`.",
        ),
    ),
    because={
        "of lists": "It must be a list of buckets, each a list of parameter numbers.",
        "float": "A parameter's number must be an int: no float can be an index.",
        "one list": "Some buckets are one and the same list: `clear()` empties what "
        "was handed over, too. Begin a new one: `members = []`.",
        "empty": "There is an empty bucket. When the last gradient closes a bucket, "
        "nothing is left for another.",
        "the buckets": "Go from the last parameter to the first, so that each is in "
        "exactly one bucket, by its number. Put it into the open bucket; when that has "
        "reached its cap, close it and open the next.",
    },
    hints=(
        "Whose gradient is ready first in the backward? With that parameter begins the "
        "first bucket.",
        "Keep an open bucket, its bytes and its cap. Add the parameter first, then ask "
        "whether the cap is reached. After the loop, an open bucket may be left.",
        "The shape of it:\n"
        "  buckets, members, held, cap = [], [], 0, first_bucket_bytes\n"
        "  for number in reversed(range(len(nbytes))):\n"
        "      members.append(number)\n"
        "      held += ...\n"
        "      if held >= cap:\n"
        "          ...            # close it, and open the next with bucket_bytes\n"
        "  if members: ...",
    ),
)

# ------------------------------------------------- wrappers: what they do, and when

NET = "a network of three layers"
NET_FROZEN = "a network with a frozen layer"
NET_TIED = "a network with a weight in two layers"
NET_TURNED = "a network whose layers are used in another order than registered"
NET_TWO_ORDERS = "a network whose order of gradients is another one on odd ranks"
ZERO_OUT, NONE, NEVER = "zero_grad(set_to_none=False)", "zero_grad()", "no zero_grad()"
ONE_BUCKET = 10_000  # bytes: all gradients of these networks
STEPS = 3
RATE = 2.0**-14  # so small that whole numbers stay small, and a power of two


class Net(nn.Module):
    """Linear steps of small whole numbers; another network for each seed."""

    def __init__(self, kind, seed):
        super().__init__()
        self.kind = kind
        self.first = linear(4, 4, seed=10 * seed + 1)
        self.middle = linear(4, 4, seed=10 * seed + 2)
        self.last = linear(4, 2, seed=10 * seed + 3)
        self.register_buffer("scale", torch.tensor(1.0 + seed), persistent=False)
        # A whole number, as the num_batches_tracked of a BatchNorm layer.
        self.register_buffer("count", torch.tensor(1 + seed))
        if kind == NET_FROZEN:
            self.middle.requires_grad_(False)
        if kind == NET_TIED:
            self.middle.weight = self.first.weight

    def forward(self, x, rank):
        if self.kind == NET_TURNED or self.kind == NET_TWO_ORDERS and rank % 2:
            return self.last(self.first(self.middle(x))) * self.scale
        return self.last(self.middle(self.first(x))) * self.scale


def observe_wrapper(answer, kind, zero, bucket_bytes=None):
    """Train a few steps with the learner's wrapper, and look at everything."""
    rank, cap = dist.get_rank(), () if bucket_bytes is None else (bucket_bytes,)
    network, root = Net(kind, seed=rank), Net(kind, seed=0)
    with Log() as log:
        log.watch(network)
        wrapped = answer(network, *cap)
        seen = {
            "starts with rank 0's parameters": are_same(
                network.parameters(), root.parameters()
            ),
            "starts with rank 0's buffers": are_same(network.buffers(), root.buffers()),
        }
        for step in range(STEPS):
            if zero != NEVER:
                network.zero_grad(set_to_none=zero == NONE)
            log.begin(step)
            # With the same rows the biases would have the same gradient on all ranks.
            rows = whole_numbers((2, 4), 100 + 10 * rank + step)
            ((rank + 1) * wrapped(rows, rank).sum()).backward()
            during = len(log.now)
            wrapped.finish()
            of_step = seen_in_step(network, log, during, bool(cap))
            name = f"later, in step {step}: " if step else ""
            seen |= {f"{name}{what}": value for what, value in of_step.items()}
            with torch.no_grad():  # an optimizer takes seconds to import
                for p in trained_in(network):
                    p -= RATE * (0 if p.grad is None else p.grad)
    seen["the module is still in training mode"] = network.training
    seen["requests of old steps are let go"] = not log.kept()
    seen["the parameters in the end"] = [p.detach() for p in network.parameters()]
    return seen


def seen_in_step(network, log, during, in_buckets):
    sizes = [one.numbers for one in log.now]
    sent = [tensor.data_ptr() for one in log.now for tensor in one.tensors]
    trained, began = trained_in(network), list(log.after)
    numbers = sum(p.numel() for p in trained)
    early_hooks = any(p._backward_hooks for p in trained)
    grads = {name: p.grad for name, p in network.named_parameters()}
    return {
        "no tensor is sent twice": len(set(sent)) == len(sent),
        "no request of an old step is awaited": log.old_waits == 0,
        "finish() awaits each all-reduce": log.missing() == 0,
        "tensors under way are left alone": not any(one.changed for one in log.now),
        "dist.all_reduce is called": bool(sizes),
        "no parameter is sent": not {p.data_ptr() for p in trained} & set(sent),
        "sends begin when .grad is complete": began[:1] != [0] or not early_hooks,
        "numbers in gradients that were not sent": max(0, numbers - sum(sizes)),
        **({"sizes of the all-reduces": sizes} if in_buckets else {}),
        "each trained parameter has a .grad": all(p.grad is not None for p in trained),
        **{f"gradient of {n}": g if g is None else g.clone() for n, g in grads.items()},
        "no hook waits": log.waits_in_backward == 0,
        "all-reduces that begin too late": len(sizes) - during,
        # Without buckets fewer and larger ones than in the hints are fine.
        **(
            {"gradients that were ready when each began": began}
            if in_buckets
            else {"the first begins before all are ready": began[:1] < [len(trained)]}
        ),
    }


BECAUSE = {
    "rank 0's parameters": "Not all ranks begin with rank 0's model. The first thing "
    "a wrapper does is to give all of them rank 0's parameters and buffers.",
    "rank 0's buffers": "The parameters are those of rank 0, but not all buffers are: "
    "`module.buffers()` has them. (`state_dict()` does not have all.)",
    "sent twice": "In one step the same tensor is sent several times. Is the hook a "
    "function that is made in a loop? Then it sees the *last* value of the loop's "
    "variable: send the .grad of its argument. (Or is it registered in each forward?)",
    "old step is": "finish() also goes through the requests of earlier steps. The list "
    "was never emptied, and old gradients are divided again.",
    "finish() awaits": "finish() returned while an all-reduce was under way: until its "
    "`wait()` the gradient may be anything. Keep all requests of a step, and wait for "
    "each. (`get_future()` and `then()` do not wait.)",
    "under way": "A tensor was changed between its all-reduce and the `wait()`: the "
    "change is lost, or is added up as well. Divide before, or after the wait().",
    "later": "Step 0 is right, a later one is not. Lists and counters must be as new "
    "when the next backward begins. (Also where zero_grad(set_to_none=False) keeps "
    ".grad, and without zero_grad(), where gradients add up.)",
    "is called": "No all-reduce was made in a whole step. Is a hook registered for "
    "each trained parameter, and does it come as far as `dist.all_reduce`?",
    "no parameter": "What is sent is the parameter itself, its `.data`. The hook gets "
    "the *parameter*; the gradient is in its .grad.",
    "complete": "A hook of `register_hook` gets a gradient *before* it is added to "
    ".grad. `register_post_accumulate_grad_hook` comes when .grad is complete.",
    "not sent": "Not all gradients are sent: each trained parameter needs a hook, "
    "weights and biases. (The hook of a module, `register_full_backward_hook`, may "
    "come before the gradients of its parameters.)",
    "has a .grad": "There is no gradient: .grad is None. finish() leaves the mean "
    "there.",
    "still in training": "Training goes on after the step: leave out eval().",
    "hook waits": "The backward stands still while a hook waits. Pass async_op=True, "
    "keep the request that comes back, and wait for it in finish().",
    "too late": "All-reduces began only in finish(). That is too late: all computing "
    "is over by then. Each gradient here can leave during the backward, from a hook.",
    "ready": "The first all-reduce began only when all gradients were there. Each can "
    "leave as soon as its own hook is called.",
    "let go": "All values are right. But requests of earlier steps are still kept, "
    "more with every step. finish() must empty the list.",
    "in the end": "The gradients are right, but the parameters were changed, too. "
    "Leave them to the optimizer.",
}
SHAPES = (
    "Numbers of one shape were to go into a gradient of another. Hooks are not called "
    "in the order of `parameters()`: keep each request with its parameter. And a part "
    "of a flat tensor gets its shape by `view_as`."
)
ERRORS |= {
    "assign a gradient of size": SHAPES,
    "The size of tensor a": SHAPES,
    "zip() argument": "Two lists that belong together are not equally long: one of "
    "them was emptied, the other was not.",
    "hook on a tensor that doesn't require gradient": "A frozen parameter never gets a "
    "gradient, so it cannot have a hook. Skip those with requires_grad=False.",
    "has no attribute 'finish'": "The check calls finish() after each backward().",
    NO_VALUE_YET: "A future's `value()` does not wait, `wait()` does, and returns it.",
    "NoneType": "Something is None here. all_reduce returns a request with "
    "async_op=True only. A frozen parameter has .grad None, and so has each before its "
    "first backward: register `self.send`, without calling it.",
    OUT_OF_STEP: "All ranks must make the same calls, in `__init__` as well: also "
    "those that receive call `dist.broadcast`.",
}
SUM = (
    "That is the sum over the ranks. all_reduce adds up; the division is yours. If you "
    "divided: did it reach `parameter.grad`? (`g = g / n` makes a new tensor.)"
)
OWN_SHARE = (
    "Each rank has its own gradient, divided by the world size. Did you reduce a copy "
    "that never reached `parameter.grad`, or that did so before `wait()` had returned?"
)
WRAPPER = dict(
    observe=observe_wrapper,
    seconds=15.0,
    ranks=(3, 2),
    keeps_inputs=False,
    forbids=READY_MADE,
    otherwise="After finish() each .grad is the mean over the ranks: sent, waited for, "
    "divided once, and written back where it belongs.",
)
DIVIDE = "parameter.grad /= dist.get_world_size()\n        "
SENT = "self.requests.append(dist.all_reduce("

ASYNC_DDP = Task(
    id="06.async_ddp",
    title="Hooks that send",
    stars=2,
    cases=((NET, NONE), (NET_FROZEN, NONE), (NET_TIED, ZERO_OUT), (NET_TURNED, NEVER)),
    instead="`dist.broadcast`, `register_post_accumulate_grad_hook` and "
    "`dist.all_reduce` are enough.",
    misses=(
        Miss(DIVIDE, "", SUM),
        Miss(
            f"{DIVIDE}{SENT}parameter.grad",
            f"{SENT}parameter.grad / dist.get_world_size()",
            "The gradients are still each rank's own. Did you average a copy of each?",
        ),
        Miss(f"{SENT}parameter.grad", f"{SENT}parameter.grad.clone()", OWN_SHARE),
        Miss(
            "parameter in module.parameters()",
            "parameter in (p for m in module.modules() for p in m.parameters(False))",
            "A weight that two layers share is sent twice: it has got a hook for each "
            "of them. `module.parameters()` names it once.",
        ),
    ),
    because=BECAUSE,
    errors=ERRORS,
    hints=(
        "Three parts: the same start, a hook for each parameter that is trained, and "
        "waiting in finish().",
        "The hook gets a parameter. It divides `parameter.grad`, starts an all_reduce "
        "of it with async_op=True, and keeps the request. finish() waits for all "
        "requests, and empties the list.",
        "The shape of it:\n"
        "  __init__:  for each parameter and buffer: dist.broadcast(..., src=0)\n"
        "             for parameter in ...:   # those that require a gradient\n"
        "                 parameter.register_post_accumulate_grad_hook(self.send)\n"
        "  send:      parameter.grad /= ...\n"
        "             self.requests.append(dist.all_reduce(..., async_op=True))\n"
        "  finish:    wait for each request, then clear the list",
    ),
    **WRAPPER,
)

WHILE = "while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:"
NEXT = "bucket = self.buckets[len(self.sent)]"
WRITE = "p.grad.copy_(part.view_as(p))"

BUCKETED_DDP = Task(
    id="06.bucketed_ddp",
    title="Buckets that leave early",
    stars=3,
    cases=(
        (NET, NONE, 80),
        (NET, ZERO_OUT, 1),
        (NET_FROZEN, NEVER, 32),
        (NET_TURNED, NONE, 60),
        (NET_TWO_ORDERS, ZERO_OUT, 60),
        (NET_TWO_ORDERS, NONE, ONE_BUCKET),
        (NET_TIED, NONE, ONE_BUCKET),
    ),
    instead="Hooks, a flat tensor for each bucket, and `dist.all_reduce`.",
    misses=(
        Miss(
            "while len",
            "if len",
            "The last buckets never left. When one leaves, the next may be full "
            "already: ask again, with `while` and not with `if`.",
        ),
        Miss(
            f"{WHILE}\n            {NEXT}",
            "if not self.missing[number]:\n            bucket = self.buckets[number]",
            "The buckets leave in the wrong order: the one with the last parameter "
            "first, on every rank, and none before those in front of it.",
        ),
        Miss(
            f"{WHILE}\n            {NEXT}",
            "self.there = [*getattr(self, 'there', []), parameter]\n"
            f"        {WHILE}\n            {NEXT}\n"
            "            last = {id(p): place for place, p in enumerate(self.there)}\n"
            "            bucket = sorted(bucket, key=lambda p: last[id(p)])",
            "On odd ranks the gradients get ready in another order. Are they joined in "
            "that order? Join them in the order of the bucket: so each place of the "
            "flat tensor belongs to the same parameter on all ranks.",
        ),
        Miss(" / dist.get_world_size()", "", SUM),
        Miss(
            "p.grad.flatten()",
            "p.data.flatten()",
            "You have sent the parameters: join the .grad of each.",
        ),
        Miss(
            WRITE,
            "pass",
            "The gradients are still each rank's own. A flat tensor is a copy: after "
            "the `wait()`, write its parts back into the .grad of each parameter.",
        ),
        Miss(WRITE, "p.grad /= dist.get_world_size()", OWN_SHARE),
    ),
    because={
        **BECAUSE,
        "not sent": "The last buckets never left. Count the gradient first, then ask "
        "whether the next bucket is full, with `while`.",
        "sizes": "These are not the buckets of the task, from the last parameter to "
        "the first. Each travels in one flat tensor, after those in front of it.",
        "is called": "No bucket was sent: no all-reduce was made in a whole step. "
        "`ready` counts down what a bucket misses, and sends it at 0.",
        "ready": "The buckets leave too late. Each leaves in the hook of its last "
        "missing gradient, or as soon as those before it have left.",
    },
    errors={
        **ERRORS,
        "list index out of range": "A list has fewer entries than this line asks for. "
        "Ask first whether a bucket is left; and have all been sent? When one leaves, "
        "the next may be full already.",
        "same number of dimensions": "A bias has one dimension, a weight has two. "
        "Flatten each gradient before you join them: `reshape(-1)`.",
        "NoneType": "Something is None. A gradient? Then its bucket was sent before it "
        "was full: `self.missing`. A request? all_reduce returns one with "
        "async_op=True only.",
        OUT_OF_STEP: "All ranks must send the same buckets in the same order. On some "
        "ranks the gradients get ready in another order, so a bucket may be full "
        "early: it must wait until all buckets before it have been sent.",
    },
    hints=(
        "Each call of ready says: one gradient more is there in this bucket. Which "
        "bucket is the next one to be sent, and is it full?",
        "The number of the next bucket is how many have been sent. In ready: count "
        "down, then send, as long as the next bucket misses nothing. In finish: wait, "
        "copy the means back, and call begin().",
        "The shape of ready:\n"
        "  self.missing[number] -= 1\n"
        "  while len(self.sent) < len(self.buckets) and ...:  # it is full\n"
        "      bucket = self.buckets[len(self.sent)]\n"
        "      flat = torch.cat([p.grad.reshape(-1) for p in bucket])\n"
        "      flat /= ...\n"
        "      self.sent.append((bucket, flat, dist.all_reduce(...)))\n"
        "and of finish: for each of self.sent wait, copy the parts of flat (`split`) "
        "into the gradients; then self.begin().",
    ),
    **WRAPPER,
)

REDUCED = "self.requests.append(dist.all_reduce(parameter.grad"
DIVIDED = "gradient /= dist.get_world_size()"

SPOT_THE_HOOK = Task(
    id="06.spot_the_hook",
    title="Spot the bugs of a copied DDP",
    stars=2,
    cases=((NET, NONE), (NET_TIED, NONE), (NET_FROZEN, ZERO_OUT), (NET_TURNED, NEVER)),
    instead="Repair the three places, and leave the rest.",
    misses=(
        Miss(DIVIDED, "pass", SUM),
        Miss(
            DIVIDED,
            "gradient /= len(self.requests)",
            "It is divided by the number of gradients. Divide by the world size.",
        ),
        Miss(REDUCED, f"{REDUCED}.clone()", OWN_SHARE),
    ),
    because=BECAUSE,
    errors=ERRORS,
    hints=(
        "Print what `reduce` gets: its shape, and whether it is the gradient. Then "
        "count the requests after each finish().",
        "A post-accumulate hook gets the parameter. A list that is only appended to "
        "still has the last step's entries. And a module is more than its parameters.",
        "The three repairs:\n"
        "  reduce(self, parameter): work with parameter.grad\n"
        "  finish: after the loop, empty both lists\n"
        "  __init__: broadcast the ... as well",
    ),
    **WRAPPER,
)

# ------------------------------------------------------------------------- accumulate


class Classifier(nn.Module):
    """It notes how many rows go through it, and how many wait for their backward."""

    def __init__(self):
        super().__init__()
        first, second = linear(3, 5, 1, divided_by=8), linear(5, 4, 2, divided_by=8)
        self.layers = nn.Sequential(first, nn.Tanh(), second)
        self.rows = self.held = self.most = self.backwards = 0

    def forward(self, x):
        output = self.layers(x)
        self.rows += len(x)
        if output.requires_grad:
            self.held += len(x)
            self.most = max(self.most, self.held)
            output.register_hook(self.let_go)
        return output

    def let_go(self, gradient):
        """Their backward has come: their activations need no memory any more."""
        self.backwards += 1
        self.held -= len(gradient)


def micro_batch(k, i, rank):
    rows = 4 if k == 5 else 7  # not k times the world size
    inputs = whole_numbers((rows, 3), 40 + 7 * rank + i) / 8
    return inputs, (torch.arange(rows) * (i + 2) + rank) % 4


def observe_accumulate(answer, k):
    network = Classifier()
    model, sent = DistributedDataParallel(network), []

    def hook(state, bucket):
        sent.append(network.backwards)
        mean = bucket.buffer() / dist.get_world_size()
        request = dist.all_reduce(mean, async_op=True)
        return request.get_future().then(lambda future: mean)

    model.register_comm_hook(None, hook)
    before = [p.detach().clone() for p in network.parameters()]
    batches = [micro_batch(k, i, dist.get_rank()) for i in range(k)]
    answer(model, batches)
    return {
        "each .grad is there": all(p.grad is not None for p in network.parameters()),
        "the last backward sends": sent[-1:] == [network.backwards],
        **{f"gradient of {n}": p.grad for n, p in network.named_parameters()},
        "only one backward sends": len(sent) == 1,
        "parameters are as before": are_same(network.parameters(), before),
        "most rows at a time": network.most,
        "rows that went through the model": network.rows,
        "the model is in the state in which it was": model.training
        and model.require_backward_grad_sync
        and len(trained_in(network)) == len(before),
        "micro-batches in the list afterwards": len(batches),
    }


NO_SYNC = "`no_sync` is a method: `with model.no_sync():`, with parentheses."
BACKWARD = "(loss / k)"

ACCUMULATE = Task(
    id="06.accumulate",
    title="Accumulate, and send once",
    stars=2,
    observe=observe_accumulate,
    ranks=(3, 2),
    seconds=20.0,
    imports=("torch._dynamo",),  # the first DDP does so
    cases=((4,), (1,), (5,)),
    keeps_inputs=False,
    tolerance=1e-4,
    misses=(
        Miss(
            BACKWARD,
            "loss",
            "It is k times too large: each loss is the mean over its own micro-batch "
            "only. Divide each loss by k before backward().",
        ),
        Miss(
            "is_last = i == k - 1",
            "is_last = True",
            "The gradient is right, but every micro-batch was sent. Put forward *and* "
            "backward of all but the last one inside `model.no_sync()`: the forward "
            "decides.",
        ),
        Miss(
            BACKWARD,
            "(loss / dist.get_world_size())",
            "You divided by the world size. DDP has done that already. What is missing "
            "is the number of micro-batches.",
        ),
        Miss(
            BACKWARD,
            "(loss / k / dist.get_world_size())",
            "It is divided by the world size once more. DDP has done that already.",
        ),
        Miss(
            f"labels)\n            {BACKWARD}",
            'labels, reduction="sum")\n            loss',
            "That is the sum over the rows of a micro-batch. The task asks for the "
            "mean.",
        ),
        Miss(
            BACKWARD,
            "model.zero_grad(); loss",
            "Only the last micro-batch is left. Gradients add up by themselves: no "
            "zero_grad() in between.",
        ),
        Miss(
            BACKWARD,
            "(loss if is_last else loss / k)",
            "Some losses are divided by k, and some are not.",
        ),
    ),
    because={
        ".grad": "There is no gradient: .grad is None. Each micro-batch needs a "
        "backward(), and no zero_grad() comes after them.",
        "the last": "DDP must send in the last backward, which sends what has been "
        "added up. Forward and backward of the *last* micro-batch must be outside of "
        "no_sync(), and go through `model`, not through `model.module`.",
        "only one": "Only the backward of the last micro-batch should send.",
        "parameters": "The parameters have changed: no `optimizer.step()` here.",
        "most rows": "The gradient is right, but all rows are in memory at the same "
        "time. The backward of a micro-batch, which frees them, comes before the next.",
        "went through": "The gradient is right, but each micro-batch should go through "
        "the model once. The backward of the last one sends the sum of all.",
        "state": "The gradient is right, but the model is left in another state: as "
        "inside of no_sync() (`with model.no_sync():` puts that back), in eval(), or "
        "with requires_grad False.",
        "in the list": "The gradient is right, but the caller's list is not what it "
        "was. `pop()` takes away: loop over the list, or over a copy of it.",
    },
    errors={
        "context manager protocol": NO_SYNC,
        "__enter__": NO_SYNC,  # so says Python 3.10
        "log_softmax_lastdim_kernel_impl": "`F.cross_entropy` takes the model's output "
        "first, then the labels.",
        "does not require grad": "The loss must come from model(inputs), with "
        "gradients.",
    },
    otherwise="After it, each gradient is that of the mean loss over all rows of all "
    "micro-batches of all ranks: each loss is divided by k.",
    hints=(
        "Which of the micro-batches must send? And what is each loss a mean of?",
        "`with model.no_sync():` around forward and backward of all but the last one. "
        "Each loss is divided by the number of micro-batches.",
        "The shape of it:\n"
        "  *others, last = micro_batches\n"
        "  with model.no_sync():\n"
        "      for inputs, labels in others:\n"
        "          ...            # forward, loss / k, backward\n"
        "  ...                    # the same with the last one, outside",
    ),
)

TASKS = (
    PREDICT_BUCKET,
    BROADCAST_MODULE,
    CUT_BUCKETS,
    ASYNC_DDP,
    BUCKETED_DDP,
    ACCUMULATE,
    SPOT_THE_HOOK,
)
