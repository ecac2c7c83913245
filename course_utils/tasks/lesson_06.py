"""Lesson 06, DistributedDataParallel: the tasks of its exercise."""

import operator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.questions import NumberTask, Slip
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.task import OUT_OF_STEP, Miss, Task
from course_utils.tasks.under_way import NO_VALUE_YET, Log

READY_MADE = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed._broadcast_coalesced",
    "torch.distributed.utils._sync_module_states",
)

PREDICT_BUCKET = NumberTask(
    "06.predict_bucket",
    "A model has ten linear layers without bias. Each has **6 MiB** of gradients "
    "(float32). It is wrapped by torch's DDP, with nothing but defaults: 1 MiB for the "
    "first bucket, 25 MiB for the others. Two steps have been made, so the buckets "
    "have been rebuilt. How many MiB are in the **second** bucket that is sent?",
    answer=30,
    unit="MiB",
    title="Predict a bucket",
    stars=1,
    why="The first bucket is closed by its first gradient. The second has 24 MiB after "
    "four layers, which is below the cap of 25; with the fifth it is reached.",
    hint="How many layers go into the first bucket? Then add layers of 6 MiB until 25 "
    "MiB are reached.",
    slips=[
        Slip(
            24,
            "Four layers are 24 MiB: the cap of 25 MiB is not reached yet. What "
            "happens with the next gradient?",
        ),
        Slip(25, "Gradients are not cut. A bucket holds whole ones."),
        Slip(
            6, "That is the first bucket: one gradient already reaches its cap of 1 MiB."
        ),
        Slip(
            60,
            "That is the one bucket of the first step. Afterwards they are rebuilt.",
        ),
        Slip(54, "The second bucket has a cap, too."),
        Slip(5, "The question is for MiB, not for a number of layers."),
    ],
    hints=(
        "The first bucket is closed at 1 MiB. How many layers are in it?",
        "A bucket takes whole gradients, and is closed as soon as it has *reached* its "
        "cap, not before it would pass it.",
        "For layers of 10 MiB it goes like this:\n"
        "  first    10 MiB            (1 MiB is reached)\n"
        "  second   10 + 10 + 10 MiB  (20 is below 25, 30 is not)",
    ),
)

# ------------------------------------------------------------------- broadcast_module

PLAIN = "two linear layers"
NORM = "a BatchNorm layer"
FEATURES = "a buffer that is not saved"
FROZEN = "a frozen layer"
DTYPES = "layers of several dtypes"
LARGE = 2**53 + 2**24 + 1  # more digits than float64 has, or float32


class Features(nn.Module):
    """Two tensors in no layer: a parameter, and a buffer that state_dict leaves out."""

    def __init__(self, seed):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0 + seed))
        self.layer = linear(3, 2, seed)
        self.register_buffer("table", whole_numbers((2, 3), 50 + seed), False)


def module_of(kind, rank):
    """A module that is another one on every rank."""
    if kind == NORM:
        norm = nn.BatchNorm1d(2)
        norm.running_mean.fill_(rank + 1)
        norm.num_batches_tracked.fill_(LARGE + 10 * rank)
        if rank > 0:
            norm.running_var.fill_(torch.inf)  # 0 times this is nan
        return nn.Sequential(linear(3, 2, rank), norm)
    if kind == FEATURES:
        return Features(rank)
    if kind == DTYPES:  # a third has more digits in float64 than in float32
        dtypes = (torch.float64, torch.bfloat16, torch.float32)
        return nn.Sequential(*[linear(2, 2, rank + 5, d, divided_by=3) for d in dtypes])
    module = nn.Sequential(linear(3, 4, rank + 1), nn.ReLU(), linear(4, 2, rank + 9))
    if kind == FROZEN:
        module[0].requires_grad_(False)
    return module


def tensors_of(module):
    """All tensors that make the module what it is, by their names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def trained_in(module):
    return [p for p in module.parameters() if p.requires_grad]


WAITED = "broadcasts are waited for"
SAME_TENSORS = "the tensors are the same objects as before"
SAME_FLAGS = "requires_grad is as before"


def observe_broadcast(answer, kind):
    module = module_of(kind, dist.get_rank())
    before, trained = tensors_of(module), trained_in(module)
    with Log("broadcast") as log:
        answer(module)
    after = tensors_of(module)
    return {
        WAITED: log.missing() == 0,
        **{name: exact(tensor) for name, tensor in after.items()},
        SAME_TENSORS: all(after[name] is tensor for name, tensor in before.items()),
        SAME_FLAGS: list(map(id, trained_in(module))) == list(map(id, trained)),
    }


def exact(tensor):
    """A tensor as it is compared; whole numbers as Python's, which lose no digit."""
    return tensor.detach() if tensor.is_floating_point() else tensor.tolist()


ALL = "(*module.parameters(), *module.buffers())"
SEND = "dist.broadcast(tensor, src=0)"
LEAF = (
    "A parameter was to be changed in place, and autograd guards it. If you mean the "
    "parameter, do it under `torch.no_grad()`. In a hook: it gets the *parameter*; the "
    "gradient is in its .grad."
)
NO_SOURCE = {
    "Must specify global_rank or group_rank": "`dist.broadcast` must know which rank "
    "sends: src=0.",
}

BROADCAST_MODULE = Task(
    id="06.broadcast_module",
    title="The same start",
    stars=1,
    observe=observe_broadcast,
    cases=((PLAIN,), (FROZEN,), (NORM,), (FEATURES,), (DTYPES,)),
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
            "(*[p for p in module.parameters() if p.requires_grad], "
            "*module.buffers())",
            "Frozen parameters are not trained, but the model computes with them. They "
            "must be the same everywhere, too.",
        ),
        Miss(
            ALL,
            "[t for c in module.children() for t in (*c.parameters(), *c.buffers())]",
            "What belongs to the module itself, and not to one of its layers, is not "
            "rank 0's: `module.children()` leaves that out. `module.parameters()` and "
            "`module.buffers()` have all.",
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
        Miss(
            SEND,
            "sent = tensor.double(); dist.broadcast(sent, src=0); tensor.copy_(sent)",
            "Digits got lost on the way: a whole number of type int64 may have more of "
            "them than float64. Send each tensor in its own dtype.",
        ),
        Miss(
            SEND,
            "tensor *= dist.get_rank() == 0; dist.all_reduce(tensor)",
            "0 times inf is nan, so multiplying by 0 does not clear a tensor: `zero_()` "
            "does. `dist.broadcast` needs neither.",
        ),
    ),
    because={
        WAITED: "With async_op=True a broadcast returns at once, with a request. Wait "
        "for all of them before you return. (`get_future()` does not wait.)",
        SAME_TENSORS: "The values are right, but these are new tensors. An optimizer "
        "that was made before holds the old ones. Overwrite them in place: "
        "`dist.broadcast` does, and so does `copy_`.",
        SAME_FLAGS: "The values are right, but requires_grad has changed. Leave it as "
        "it was.",
    },
    errors={
        **NO_SOURCE,
        "a leaf Variable that requires grad": LEAF,
        OUT_OF_STEP: "`dist.broadcast` is called by every rank, also by those that "
        "receive, with the same src=0 and for the same tensors in the same order.",
    },
    otherwise="Every rank must end with the parameters and buffers of rank 0, in the "
    "tensors that were there before, and with all their digits.",
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

INDICES = "each number is a whole number"
NONE_EMPTY = "no bucket is empty"


def observe_cut(answer, nbytes, bucket_bytes, first_bucket_bytes):
    made = answer(nbytes, bucket_bytes, first_bucket_bytes)
    try:
        buckets = [list(bucket) for bucket in made]
    except TypeError:  # no list of lists
        return made
    numbers = [as_index(number) for bucket in buckets for number in bucket]
    return {
        INDICES: None not in numbers,
        NONE_EMPTY: [] not in buckets,
        "the buckets": [list(map(as_index, bucket)) for bucket in buckets],
    }


def as_index(number):
    """It as an int, also one of NumPy's or torch's; None if it cannot index a list."""
    try:
        return operator.index(number)
    except TypeError:
        return None


MiB = 1 << 20
OPEN_NEXT = "members, held, cap = [], 0, bucket_bytes"
CLOSE = "held >= cap"
REVERSED = "reversed(range(len(nbytes)))"
LAST_ONE = "[*buckets, members] if members else buckets"

CUT_BUCKETS = Task(
    id="06.cut_buckets",
    title="Cut the buckets",
    stars=2,
    where="here",
    observe=observe_cut,
    cases=(
        # Most of the near misses make something else of the first case.
        ([50, 30, 10, 90, 40, 20], 100, 40),
        ([400, 100, 300, 50], 400, 100),
        ([6 * MiB] * 10, 25 * MiB, 1 * MiB),
        ([4 * MiB, 4096] * 12, 25 * MiB, 1 * MiB),
        ([10, 20, 30, 40], 1000, 1000),
        ([10, 20, 30, 40], 1, 1),
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
            REVERSED,
            "range(len(nbytes))",
            "The buckets begin with the first parameter. Its gradient is ready "
            "*last*: begin with the last parameter.",
        ),
        Miss(
            f"members.append(number)\n        held += nbytes[number]\n        if {CLOSE}"
            f":\n            buckets.append(members)\n            {OPEN_NEXT}",
            "if members and held + nbytes[number] > cap:\n"
            f"            buckets.append(members)\n            {OPEN_NEXT}\n"
            "        members.append(number)\n        held += nbytes[number]",
            "You close a bucket before it would pass its cap. DDP closes it as soon as "
            "it has reached the cap, so it may be larger.",
        ),
        Miss(
            LAST_ONE,
            "buckets",
            "The last bucket never got full, and is missing. Its gradients must travel "
            "as well.",
        ),
        Miss(
            CLOSE,
            "held > cap",
            "A bucket that has exactly its cap is closed, too.",
        ),
        Miss(
            "[], [], 0, first_bucket_bytes",
            "[], [], 0, bucket_bytes",
            "The first bucket has a cap of its own, first_bucket_bytes.",
        ),
        Miss(
            OPEN_NEXT,
            "members, held = [], 0",
            "All buckets have the first one's cap. From the second on it is "
            "bucket_bytes.",
        ),
        Miss(
            OPEN_NEXT,
            "members, cap = [], bucket_bytes",
            "Each new bucket begins with the bytes of those before it. Set the count "
            "back to 0 when a bucket is closed.",
        ),
        Miss(
            OPEN_NEXT,
            "members, held, cap = [], held - cap, bucket_bytes",
            "You subtract the cap when a bucket is closed. But what is above the cap is "
            "in the closed bucket, too: the next one begins at 0.",
        ),
        Miss(
            "held +=",
            "held =",
            "You compare the bytes of one gradient with the cap. It is all that the "
            "bucket holds that counts: add them up, `+=`.",
        ),
        Miss(
            f"return {LAST_ONE}",
            f"buckets = {LAST_ONE}; return [[nbytes[i] for i in b] for b in buckets]",
            "The groups are right. But the task asks for the parameters' numbers, not "
            "for their bytes.",
        ),
        Miss(
            f"return {LAST_ONE}",
            f"return [sorted(bucket) for bucket in ({LAST_ONE})]",
            "The groups are right, but inside a bucket, too, the gradient that is ready "
            "first comes first: the larger number.",
        ),
    ),
    because={
        INDICES: "A parameter's number is an index, a whole number of type int. Nothing "
        "can be indexed with a float.",
        NONE_EMPTY: "There is an empty bucket. Each has one gradient at least. When the "
        "last gradient closes a bucket, nothing is left for another. (And `clear()` "
        "empties a list that was handed over, too: begin a new one, `members = []`.)",
    },
    otherwise="Go from the last parameter to the first, so that each is in exactly one "
    "bucket. Put it into the open bucket; when that has reached its cap, close it and "
    "open the next.",
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
ZERO_OUT = "zero_grad(set_to_none=False)"
NONE = "zero_grad()"
NEVER = "no zero_grad()"
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
        # Not saved, so state_dict() leaves it out.
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


def loss_of(network, rank, step):
    # Of the sum alone the biases would have the same gradient on all ranks.
    rows = whole_numbers((2, 4), 100 + 10 * rank + step)
    return (rank + 1) * network(rows, rank).sum()


START = "parameters are those of rank 0 at the start"
START_BUFFERS = "buffers are those of rank 0 at the start"
ONCE = "no tensor is sent twice"
NO_OLD = "no request of an old step is awaited again"
AWAITED = "finish() awaits each all-reduce"
UNTOUCHED = "tensors under way are left alone"
SENDS = "dist.all_reduce is called"
NO_PARAMETER = "what is sent is no parameter"
COMPLETE = "the first all-reduce begins after the first .grad is complete"
UNSENT = "numbers in gradients that were not sent"
SIZES = "sizes of the all-reduces"
HAVE_ONE = "each trained parameter has a gradient"
NO_WAIT = "no hook waits"
SOME_EARLY = "all-reduces begin during the backward"
ALL_EARLY = "all of them begin during the backward"
FIRST_EARLY = "the first begins before all gradients are there"
READY = "gradients that were ready when each began"
KEPT = "requests of old steps are let go"
IN_THE_END = "the parameters in the end"


def observe_wrapper(answer, kind, zero, bucket_bytes=None):
    """Train a few steps with the learner's wrapper, and look at everything."""
    rank, cap = dist.get_rank(), () if bucket_bytes is None else (bucket_bytes,)
    network, root = Net(kind, seed=rank), Net(kind, seed=0)
    with Log() as log:
        log.watch(network)
        wrapped = answer(network, *cap)
        seen = {
            START: are_same(network.parameters(), root.parameters()),
            START_BUFFERS: are_same(network.buffers(), root.buffers()),
        }
        for step in range(STEPS):
            if zero != NEVER:
                network.zero_grad(set_to_none=zero == NONE)
            log.begin(step)
            loss_of(wrapped, rank, step).backward()
            during = len(log.now)
            wrapped.finish()
            name = f"later, in step {step}: " if step else ""
            seen_now = seen_in_step(network, log, during, bool(cap))
            seen |= {f"{name}{what}": value for what, value in seen_now.items()}
            with torch.no_grad():  # an optimizer takes seconds to import
                for parameter in trained_in(network):
                    if parameter.grad is not None:
                        parameter -= RATE * parameter.grad
    seen[KEPT] = not log.kept()
    return seen | {IN_THE_END: [p.detach() for p in network.parameters()]}


def are_same(tensors, others):
    return all(map(torch.equal, tensors, others))


def seen_in_step(network, log, during, in_buckets):
    sizes = [sent.numbers for sent in log.now]
    sent = [tensor.data_ptr() for one in log.now for tensor in one.tensors]
    trained, began = trained_in(network), list(log.after)
    gradients = {
        f"gradient of {name}": None if p.grad is None else p.grad.clone()
        for name, p in network.named_parameters()
    }
    return {
        ONCE: len(set(sent)) == len(sent),
        NO_OLD: log.old_waits == 0,
        AWAITED: log.missing() == 0,
        UNTOUCHED: not any(one.changed for one in log.now),
        SENDS: bool(sizes),
        NO_PARAMETER: not {p.data_ptr() for p in network.parameters()} & set(sent),
        COMPLETE: began[:1] != [0],
        UNSENT: max(0, sum(p.numel() for p in trained) - sum(sizes)),
        **({SIZES: sizes} if in_buckets else {}),
        HAVE_ONE: all(p.grad is not None for p in trained),
        **gradients,
        NO_WAIT: log.waits_in_backward == 0,
        SOME_EARLY: during > 0,
        ALL_EARLY: during == len(sizes),
        # In buckets all is fixed. Else what the hints show is one for each gradient;
        # fewer and larger ones are fine.
        **({READY: began} if in_buckets else {FIRST_EARLY: began[0] < len(trained)}),
    }


NOT_AS_NEW = (
    "Step 0 is right, a later one is not. What is left over from the step before? "
    "Lists and counters must be as new when the next backward begins. (The check also "
    "trains with zero_grad(set_to_none=False), where .grad stays the same tensor, and "
    "without zero_grad(), where gradients add up.)"
)
BECAUSE = {
    START: "Not all ranks begin with rank 0's model. The first thing a wrapper does is "
    "to give all of them rank 0's parameters and buffers.",
    START_BUFFERS: "The parameters are those of rank 0, but the buffers are not, or "
    "not all. They are part of the model: `module.buffers()`, also where they hold "
    "whole numbers. (`state_dict()` leaves out those that are not saved.)",
    ONCE: "In one step the same tensor is sent several times. Is the hook a function "
    "that is made in a loop? Then it sees the *last* value of the loop's variable: "
    "send the .grad of its argument. (Or are hooks registered anew in each forward? "
    "Once, in `__init__`, is enough.)",
    NO_OLD: "finish() also goes through the requests of earlier steps. The list was "
    "never emptied: it grows with every step, and whatever finish() does to a "
    "gradient, it does to old ones again.",
    AWAITED: "finish() returned while an all-reduce was still under way: until its "
    "`wait()` the gradient may be anything. Keep all requests of a step, and wait for "
    "each. (`get_future()` and `then()` do not wait: each begins something to wait "
    "for.)",
    UNTOUCHED: "A tensor was changed between its all-reduce and the `wait()`. Until "
    "wait() has returned nobody may touch it: the change is lost, or is added up as "
    "well. Divide before the all-reduce, or after the wait().",
    "later": NOT_AS_NEW,
    SENDS: "No all-reduce was made in a whole step. Is a hook registered for each "
    "trained parameter, and does it come as far as `dist.all_reduce`?",
    NO_PARAMETER: "What is sent is the parameter itself, its `.data`, and not its "
    "gradient: the hook gets the parameter, and the gradient is in its .grad.",
    COMPLETE: "A hook of `register_hook` gets the gradient of this backward *before* "
    "it is added to .grad. Use `register_post_accumulate_grad_hook`: it is called when "
    ".grad is complete.",
    UNSENT: "Not all gradients are sent, and those stay each rank's own. Each trained "
    "parameter needs a hook: weights and biases. (The hook of a module, "
    "`register_full_backward_hook`, may come before the gradients of its parameters.)",
    HAVE_ONE: "There is no gradient: .grad is None. finish() must leave the mean there.",
    NO_WAIT: "The backward stands still while a hook waits. Pass async_op=True, keep "
    "the request that comes back, and wait for it in finish().",
    SOME_EARLY: "`dist.all_reduce` was not called during the backward. Send from the "
    "hooks. In finish() it is too late: all computing is over by then.",
    ALL_EARLY: "Some all-reduces began only in finish(). In these networks every "
    "trained parameter gets a gradient, so everything can leave during the backward.",
    FIRST_EARLY: "The first all-reduce began only when all gradients were there. Each "
    "gradient can leave as soon as its own hook is called.",
    KEPT: "All values are right. But requests of earlier steps are still kept: they "
    "get more with every step, and so does the memory that they need. finish() must "
    "empty the list.",
    IN_THE_END: "The gradients are right, but the parameters were changed, too. Leave "
    "them to the optimizer.",
}
SHAPES = (
    "Numbers of one shape were to go into a gradient of another. Hooks are called as "
    "the gradients get ready, which is not the order of `parameters()`: keep each "
    "request with its parameter. And a part of a flat tensor gets the shape of its "
    "gradient by `view_as`."
)
ERRORS = {
    **NO_SOURCE,
    "assign a gradient of size": SHAPES,
    "The size of tensor a": SHAPES,
    "a leaf Variable that requires grad": LEAF,
    "zip() argument": "Two lists that belong together are not equally long: one of "
    "them was emptied, the other was not.",
    "hook on a tensor that doesn't require gradient": "A frozen parameter never gets a "
    "gradient, so it cannot have a hook. Skip those with requires_grad=False.",
    "has no attribute 'finish'": "The check calls finish() after each backward(). Keep "
    "its name.",
    NO_VALUE_YET: "A future's `value()` does not wait: it fails while the result is "
    "not there yet. `wait()` waits, and returns the value.",
    "NoneType": "Something is None here. all_reduce returns a request with "
    "async_op=True only, else None. A frozen parameter has .grad None, and so has "
    "every one before its first backward: hand the hook over, `self.send`, without "
    "calling it.",
    OUT_OF_STEP: "All ranks must make the same calls, in `__init__` as well: "
    "`dist.broadcast` is called by every rank, also by those that receive.",
}
OTHERWISE = (
    "All ranks begin with rank 0's parameters and buffers, and after finish() each "
    "gradient is the mean over the ranks."
)
SUM = (
    "That is the sum over the ranks. all_reduce adds up; the division by the world size "
    "is yours. If you divided: did the result reach `parameter.grad`? (`g = g / n` "
    "makes a new tensor.)"
)
OWN_SHARE = (
    "Each rank has its own gradient, divided by the world size. Did you reduce a copy, "
    "and forget to write the result into `parameter.grad`? Or was it written there "
    "before `wait()` had returned?"
)
DIVIDE = "parameter.grad /= dist.get_world_size()"
PARAMETERS = "for parameter in module.parameters():"

ASYNC_DDP = Task(
    id="06.async_ddp",
    title="Hooks that send",
    stars=2,
    observe=observe_wrapper,
    seconds=15.0,
    ranks=(3, 2),
    cases=((NET, NONE), (NET_FROZEN, NONE), (NET_TIED, ZERO_OUT), (NET_TURNED, NEVER)),
    keeps_inputs=False,
    forbids=READY_MADE,
    instead="`dist.broadcast`, `register_post_accumulate_grad_hook` and "
    "`dist.all_reduce` are enough.",
    misses=(
        Miss(DIVIDE, "pass", SUM),
        Miss(
            f"{DIVIDE}\n        self.requests.append(dist.all_reduce(parameter.grad,",
            "mean = parameter.grad / dist.get_world_size()\n"
            "        self.requests.append(dist.all_reduce(mean,",
            "The gradients are still each rank's own. Did you average a copy, and leave "
            ".grad as it was?",
        ),
        Miss("all_reduce(parameter.grad", "all_reduce(parameter.grad.clone()", OWN_SHARE),
        Miss(
            PARAMETERS,
            "for parameter in [p for m in module.modules() for p in m._parameters."
            "values()]:",
            "A weight that two layers share is sent twice: it has got a hook for each "
            "of them. `module.parameters()` names it once.",
        ),
    ),
    because=BECAUSE,
    errors=ERRORS,
    otherwise=OTHERWISE,
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
)

COUNT = "self.missing[number] -= 1"
WHILE = "while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:"
NEXT = "bucket = self.buckets[len(self.sent)]"

BUCKETED_DDP = Task(
    id="06.bucketed_ddp",
    title="Buckets that leave early",
    stars=3,
    observe=observe_wrapper,
    seconds=15.0,
    ranks=(3, 2),
    cases=(
        (NET, NONE, 80),
        (NET, ZERO_OUT, 1),
        (NET_FROZEN, NEVER, 32),
        (NET_TURNED, NONE, 60),
        (NET_TWO_ORDERS, ZERO_OUT, 60),
        (NET_TWO_ORDERS, NONE, ONE_BUCKET),
        (NET_TIED, NONE, ONE_BUCKET),
    ),
    keeps_inputs=False,
    forbids=READY_MADE,
    instead="Hooks, a flat tensor for each bucket, and `dist.all_reduce`.",
    misses=(
        Miss(
            WHILE,
            f"if {WHILE.removeprefix('while ')}",
            "The last buckets never left. When one leaves, the next may be full "
            "already: ask again, with `while` and not with `if`.",
        ),
        Miss(
            f"{WHILE}\n            {NEXT}",
            "if not self.missing[number]:\n            bucket = self.buckets[number]",
            "The buckets are right, but they leave in the wrong order: the one with "
            "the last parameter first, on every rank, and none before those in front "
            "of it have left.",
        ),
        Miss(
            f"{COUNT}\n        {WHILE}\n            {NEXT}",
            f"{COUNT}\n        self.there = [*getattr(self, 'there', []), id(parameter)]"
            f"\n        {WHILE}\n            {NEXT}\n"
            "            last = {p: place for place, p in enumerate(self.there)}\n"
            "            bucket = sorted(bucket, key=lambda p: last[id(p)])",
            "On odd ranks the gradients get ready in another order. Are they joined in "
            "that order? Then a place in the flat tensor belongs to one parameter on "
            "this rank, and to another one on the next. Join them in the order of the "
            "bucket, which is the same on all ranks.",
        ),
        Miss(" / dist.get_world_size()", "", SUM),
        Miss(
            "p.grad.flatten()",
            "p.data.flatten()",
            "You have sent the parameters: that is what the gradients are now. Put the "
            ".grad of each parameter into the flat tensor.",
        ),
        Miss(
            "p.grad.copy_(part.view_as(p))",
            "pass",
            "The gradients are still each rank's own. A flat tensor is a copy: after "
            "the `wait()`, write its parts back into the .grad of each parameter.",
        ),
        Miss(
            "p.grad.copy_(part.view_as(p))",
            "p.grad /= dist.get_world_size()",
            OWN_SHARE,
        ),
        Miss(
            "part.view_as(p)",
            "flat[: p.numel()].view_as(p)",
            "The numbers lie at other places. Each gradient gets its own part of the "
            "flat tensor back: in which order were they joined, and where does each "
            "part begin?",
        ),
    ),
    because={
        **BECAUSE,
        SENDS: "No bucket was sent: no all-reduce was made in a whole step. `ready` "
        "counts down how many gradients a bucket misses, and sends it at 0.",
        UNSENT: "The last buckets never left. Count the gradient first, then ask "
        "whether the next bucket is full. When one leaves, the next may be full, too.",
        SIZES: "These are not the buckets of the task: from the last parameter to the "
        "first, closed when bucket_bytes is reached. Those of a bucket travel in one "
        "flat tensor, in one all-reduce; and none leaves before those in front of it.",
        READY: "The buckets are right, but they leave too late. A bucket leaves in the "
        "hook of its last missing gradient (or as soon as those before it have left).",
    },
    errors={
        "list index out of range": "A list has fewer entries than this line asks for. "
        "In `ready`: after the last bucket there is none, so ask first whether one is "
        "left. In `finish`: have all buckets been sent? When one leaves, the next may "
        "be full already.",
        "same number of dimensions": "A bias has one dimension, a weight has two. "
        "Flatten each gradient before you join them: `reshape(-1)`.",
        "'flatten'": (
            EMPTY := "A gradient is None: its bucket was sent before it was full. Send "
            "a bucket when it misses no gradient any more: `self.missing`."
        ),
        "'reshape'": EMPTY,
        "but got NoneType": EMPTY,
        **ERRORS,
        OUT_OF_STEP: "All ranks must send the same buckets in the same order. On some "
        "ranks the gradients get ready in another order, so a bucket may be full "
        "early: it must wait until all buckets before it have been sent.",
    },
    otherwise="After finish() each gradient is the mean over the ranks, and each "
    "bucket has travelled in one all-reduce.",
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
)

SPOT_THE_HOOK = Task(
    id="06.spot_the_hook",
    title="Spot the bugs of a copied DDP",
    stars=2,
    observe=observe_wrapper,
    seconds=15.0,
    ranks=(3, 2),
    cases=((NET, NONE), (NET_TIED, NONE), (NET_FROZEN, ZERO_OUT), (NET_TURNED, NEVER)),
    keeps_inputs=False,
    forbids=READY_MADE,
    instead="Repair the three places, and leave the rest.",
    misses=(
        Miss("gradient /= dist.get_world_size()", "pass", SUM),
        Miss(
            "gradient /= dist.get_world_size()",
            "gradient /= len(self.requests)",
            "It is divided by the number of gradients. Divide by the world size.",
        ),
        Miss("all_reduce(parameter.grad", "all_reduce(parameter.grad.clone()", OWN_SHARE),
    ),
    because=BECAUSE,
    errors=ERRORS,
    otherwise=OTHERWISE,
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


def micro_batches(k, rank):
    """k pairs of inputs and labels. Their rows are not k times the world size."""
    n = 4 if k == 5 else 7
    return [
        (
            whole_numbers((n, 3), 40 + 7 * rank + i) / 8,
            (torch.arange(n) * (i + 2) + rank) % 4,
        )
        for i in range(k)
    ]


HAVE_GRADIENTS = "each parameter has a gradient"
DDP_SENDS = "DDP sends gradients"
LAST_SENDS = "the backward that sends is the last one"
SENT_ONCE = "only one backward sends"
SAME_PARAMETERS = "the parameters are as before"
MOST_ROWS = "most rows between forward and backward at a time"
ALL_ROWS = "rows that went through the model"
SENDS_AGAIN = "the next backward sends again"
STILL_TRAINS = "the model still trains, and nothing in it is frozen"
LIST_LEFT = "micro-batches in the list afterwards"


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
    batches = micro_batches(k, dist.get_rank())
    answer(model, batches)
    return {
        HAVE_GRADIENTS: all(p.grad is not None for p in network.parameters()),
        DDP_SENDS: bool(sent),
        LAST_SENDS: sent[-1:] == [network.backwards],
        **{f"gradient of {n}": p.grad for n, p in network.named_parameters()},
        SENT_ONCE: len(sent) == 1,
        SAME_PARAMETERS: are_same(network.parameters(), before),
        MOST_ROWS: network.most,
        ALL_ROWS: network.rows,
        SENDS_AGAIN: model.require_backward_grad_sync,
        STILL_TRAINS: model.training and len(trained_in(network)) == len(before),
        LIST_LEFT: len(batches),
    }


ACCUMULATE = Task(
    id="06.accumulate",
    title="Accumulate, and send once",
    stars=2,
    observe=observe_accumulate,
    ranks=(3, 2),
    seconds=20.0,
    imports=("torch._dynamo",),  # the first DDP and the first optimizer do so
    cases=((4,), (1,), (5,)),
    keeps_inputs=False,
    tolerance=1e-4,
    misses=(
        Miss(
            "(loss / k)",
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
            "loss / k",
            "loss / dist.get_world_size()",
            "You divided by the world size. DDP has done that already. What is missing "
            "is the number of micro-batches.",
        ),
        Miss(
            "loss / k",
            "loss / k / dist.get_world_size()",
            "It is divided by the world size once more. DDP takes the mean over the "
            "ranks; you divide by the number of micro-batches.",
        ),
        Miss(
            "loss / k",
            "loss / len(labels)",
            "You divided by the number of rows, and the loss is a mean over them "
            "already. Divide by the number of micro-batches.",
        ),
        Miss(
            "labels)\n            (loss / k)",
            'labels, reduction="sum")\n            loss',
            "That is the sum over the rows of a micro-batch. The task asks for the "
            'mean: `F.cross_entropy` without reduction="sum".',
        ),
        Miss(
            "(loss / k)",
            "model.zero_grad(); loss",
            "Only the last micro-batch is left. Gradients add up by themselves: no "
            "zero_grad() in between.",
        ),
        Miss(
            "(loss / k)",
            "(loss if is_last else loss / k)",
            "The last micro-batch does not count as much as each of the others: some "
            "losses are divided by k, and some are not.",
        ),
    ),
    because={
        HAVE_GRADIENTS: "There is no gradient: .grad is None. Each micro-batch needs a "
        "backward(), and the task ends with the gradients in .grad: no zero_grad() "
        "after them.",
        DDP_SENDS: "DDP sent nothing: the gradients are not averaged by it. Forward and "
        "backward of the last micro-batch must be outside of no_sync(), and go through "
        "`model`, not through `model.module`. (Do not average by hand.)",
        LAST_SENDS: "A micro-batch before the last one was sent, and those after it "
        "stay each rank's own. It is the *last* one that must be outside of "
        "no_sync(): it sends what has been added up.",
        SENT_ONCE: "Only the backward of the last micro-batch should send.",
        SAME_PARAMETERS: "The parameters have changed. The task ends with the "
        "gradient: `optimizer.step()` is not part of it.",
        MOST_ROWS: "The gradient is right, but all rows are in memory at the same "
        "time. One micro-batch after the other: forward, then backward, which frees "
        "its activations, and only then the next.",
        ALL_ROWS: "The gradient is right, but each micro-batch should go through the "
        "model once. The backward of the last one sends the sum of all.",
        SENDS_AGAIN: "The gradient is right, but DDP stays as inside of no_sync(): the "
        "next step would not be averaged. `with model.no_sync():` puts it back by "
        "itself.",
        STILL_TRAINS: "The gradient is right, but the model is left in another state "
        "than before: in eval(), or with requires_grad False.",
        LIST_LEFT: "The gradient is right, but the caller's list is not what it was. "
        "`pop()` takes away: loop over the list, or over a copy of it.",
    },
    errors={
        "context manager protocol": (
            WITH := "`no_sync` is a method: `with model.no_sync():`, with parentheses."
        ),
        "__enter__": WITH,  # so says Python 3.10
        "log_softmax_lastdim_kernel_impl": "`F.cross_entropy` takes the model's output "
        "first, then the labels.",
        "does not require grad": "The loss must be computed with gradients: "
        "model(inputs), then cross_entropy, then backward().",
    },
    otherwise="After it, each gradient is that of the mean loss over all rows of all "
    "micro-batches of all ranks, and one all-reduce was made.",
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
