"""Lesson 06, DistributedDataParallel: the tasks of its exercise."""

import functools
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_utils import costs
from course_utils.checks.mistakes import (
    first_wrong,
    is_wrong,
    out_of_step,
    says,
    wrong_in,
)
from course_utils.checks.task import Count, Mistake, Such, Task
from course_utils.notebook.compare import difference
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.messages import NO_SUCH_RANK
from course_utils.tasks.under_way import NO_VALUE_YET, Log

DDP = "torch.nn.parallel.DistributedDataParallel"
BROADCASTS = (
    "torch.distributed._broadcast_coalesced",
    "torch.distributed.utils._sync_module_states",
)


MiB = 1 << 20


# --------------------------------------------------------------------- predict_bucket

PREDICT_BUCKET = Task(
    id="06.predict_bucket",
    title="Predict a bucket",
    stars=1,
    where="value",
    expect=lambda: 5 * 6,
    unit="MiB",
    mistakes=(
        Mistake(
            like=lambda: 4 * 6,
            says="Four layers are 24 MiB: the cap of 25 MiB is not reached yet. What "
            "happens with the next gradient?",
        ),
        Mistake(
            like=lambda: 25,
            says="Gradients are not cut. A bucket holds whole ones.",
        ),
        Mistake(
            like=lambda: 6,
            says="That is the first bucket: one gradient already reaches its 1 MiB.",
        ),
        Mistake(
            like=lambda: 10 * 6,
            says="That is the one bucket of the first step. Afterwards they are "
            "rebuilt.",
        ),
        Mistake(
            like=lambda: 9 * 6,
            says="The second bucket has a cap, too.",
        ),
        Mistake(
            when=lambda attempt: attempt.got in (30 * MiB, 30 * MiB / 1e6),
            says="That is right in another unit. The question is for MiB: 1 MiB is "
            "1,048,576 bytes.",
        ),
        Mistake(
            when=lambda attempt: attempt.got in (5, 4, 3),
            says="The question is for MiB, not for a number of layers or buckets.",
        ),
    ),
    otherwise="How many layers go into the first bucket? Then add layers of 6 MiB "
    "until 25 MiB are reached.",
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


class Features(nn.Module):
    """Two tensors in no layer: a parameter, and a buffer that state_dict leaves out."""

    def __init__(self, seed):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0 + seed))
        self.layer = linear(3, 2, seed)
        self.register_buffer("table", whole_numbers((2, 3), 50 + seed), False)


LARGE = 2**53 + 2**24 + 1  # more digits than float64 has, or float32


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
    if kind == DTYPES:
        dtypes = (torch.float64, torch.bfloat16, torch.float32)
        layers = nn.Sequential(*[linear(2, 2, rank + 5, d) for d in dtypes])
        with torch.no_grad():
            for parameter in layers[0].parameters():
                parameter /= 3  # float32 has too few digits for this
        return layers
    module = nn.Sequential(linear(3, 4, rank + 1), nn.ReLU(), linear(4, 2, rank + 9))
    if kind == FROZEN:
        module[0].requires_grad_(False)
    return module


def tensors_of(module):
    """All tensors that make the module what it is, by their names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def try_broadcast(answer, kind):
    module = module_of(kind, dist.get_rank())
    before = tensors_of(module)
    trained = [p.requires_grad for p in module.parameters()]
    with Log("broadcast") as log:
        answer(module)
    after = tensors_of(module)
    same = all(after[name] is tensor for name, tensor in before.items())
    kept = trained == [p.requires_grad for p in module.parameters()]
    report = {BROADCASTS_LEFT: log.missing()}
    report |= {name: exact(tensor) for name, tensor in after.items()}
    return report | {"the same tensor objects": same, "requires_grad is kept": kept}


def exact(tensor):
    """A tensor as it is compared; whole numbers as Python's, which lose no digit."""
    return tensor.detach() if tensor.is_floating_point() else tensor.tolist()


def sent_from(source, names=None, through=None):
    """What is there after a broadcast of the tensors that `names` picks, or of all.

    `through` is a dtype that cuts off what it has no digits for.
    """

    def expect(rank, inputs):
        (kind,) = inputs[rank]
        root = len(inputs) - 1 if source == "last" else source
        mine, theirs = module_of(kind, rank), module_of(kind, root)
        picked = names(theirs) if names else tensors_of(theirs)
        sent = tensors_of(theirs)
        report = {BROADCASTS_LEFT: 0}
        for name in sent:
            value = (sent if name in picked else tensors_of(mine))[name]
            report[name] = exact(value.to(through or value.dtype).to(value.dtype))
        return report | {"the same tensor objects": True, "requires_grad is kept": True}

    return expect


def mean_of_models(rank, inputs):
    """As if each tensor were averaged over the ranks."""
    (kind,) = inputs[rank]
    models = [tensors_of(module_of(kind, r)) for r in range(len(inputs))]
    means = {
        name: exact(sum(model[name] for model in models) / len(models))
        for name in models[0]
    }
    return sent_from(0)(rank, inputs) | means


BROADCASTS_LEFT = "broadcasts that nobody has waited for"


def several_sources(attempt):
    """Do two ranks broadcast from different ranks at the same time?"""
    return len(set(re.findall(r"\bsrc=(\d+)", attempt.message))) > 1


def both_broadcast(attempt):
    """Has each of the two ranks that do not agree called broadcast?"""
    return attempt.message.count(" broadcast(") > 1


def parameters(module):
    return dict(module.named_parameters())


def of_the_children(module):
    """The names of all but what belongs to the module itself."""
    return {name for name in tensors_of(module) if "." in name}


def trained_parameters(module):
    return {n for n, p in module.named_parameters() if p.requires_grad}


NO_SOURCE = Mistake(
    when=says("Must specify global_rank or group_rank"),
    says="`dist.broadcast` must know which rank sends: src=0.",
)

BROADCAST_MODULE = Task(
    id="06.broadcast_module",
    title="The same start",
    stars=1,
    where="ranks",
    run=try_broadcast,
    world_sizes=(2, 1, 3),  # one rank alone hides what is sent
    cases=((PLAIN,), (FROZEN,), (NORM,), (FEATURES,), (DTYPES,)),
    expect=sent_from(0),
    tolerance=0.0,
    forbids=(DDP, *BROADCASTS),
    instead="`dist.broadcast` overwrites one tensor with that of rank src.",
    mistakes=(
        Mistake(
            when=wrong_in(BROADCASTS_LEFT),
            says="With async_op=True a broadcast returns at once, with a request. "
            "Until its `wait()` has returned, the tensor may be the old one. Wait for "
            "all of them before you return. (`get_future()` does not wait.)",
        ),
        Mistake(
            like=mean_of_models,
            says="That is the mean of the ranks' models. All ranks must have rank 0's.",
        ),
        Mistake(
            like=sent_from(0, through=torch.float32),
            says="Digits got lost on the way: float64 and int64 have more than "
            "float32. Send each tensor by itself, or those of a dtype together.",
        ),
        Mistake(
            like=sent_from(0, through=torch.float64),
            says="Digits got lost on the way: a whole number of type int64 may have "
            "more of them than float64. Send each tensor by itself, or those of a "
            "dtype together.",
        ),
        Mistake(
            when=lambda attempt: any(
                torch.is_tensor(value) and torch.any(torch.isnan(value))
                for value in attempt.got.values()
            ),
            says="There is a nan. 0 times inf is nan, so multiplying by 0 does not "
            "clear a tensor: `zero_()` does. `dist.broadcast` needs neither.",
        ),
        Mistake(
            like=sent_from(0, lambda module: ()),
            says="Every rank still has its own model. Did you broadcast copies, and "
            "not write them back?",
        ),
        Mistake(
            like=sent_from(0, lambda module: module.state_dict()),
            says="One buffer was registered with persistent=False: the model uses it, "
            "but `state_dict()` leaves it out. `module.buffers()` has all of them.",
        ),
        Mistake(
            like=sent_from(0, of_the_children),
            says="What is in one of its layers is rank 0's, what belongs to the module "
            "itself is not: `module.children()` leaves that out. "
            "`module.parameters()` and `module.buffers()` have all.",
        ),
        Mistake(
            like=sent_from(0, parameters),
            says="The parameters are those of rank 0, the buffers are each rank's own. "
            "Buffers are part of the model, too: `module.buffers()`.",
        ),
        Mistake(
            like=sent_from(0, trained_parameters),
            says="Frozen parameters are not trained, but the model computes with them. "
            "They must be the same everywhere, too; and so must the buffers.",
        ),
        Mistake(
            like=sent_from(
                0,
                lambda module: (
                    trained_parameters(module) | set(dict(module.named_buffers()))
                ),
            ),
            says="Frozen parameters are not trained, but the model computes with them. "
            "They must be the same everywhere, too.",
        ),
        Mistake(
            like=sent_from(0, lambda module: dict(module.named_buffers())),
            says="The buffers are those of rank 0, the parameters are each rank's own. "
            "Did you broadcast a copy of them?",
        ),
        Mistake(
            like=sent_from("last"),
            says="That is the model of the last rank. The task asks for rank 0's.",
        ),
        Mistake(
            when=wrong_in("the same tensor objects"),
            says="The values are right, but these are new tensors. An optimizer that "
            "was made before holds the old ones. Overwrite them in place: "
            "`dist.broadcast` does, and so does `copy_`.",
        ),
        Mistake(
            when=wrong_in("requires_grad is kept"),
            says="The values are right, but requires_grad has changed. Leave it as it "
            "was.",
        ),
        Mistake(
            when=says("a leaf Variable that requires grad"),
            says="Autograd guards parameters against changes in place. Do it under "
            "`torch.no_grad()`.",
        ),
        NO_SOURCE,
        Mistake(
            when=several_sources,
            says="`src` is the rank that *sends*: 0, on all ranks. The others receive "
            "by the same call.",
        ),
        Mistake(
            when=both_broadcast,
            says="All ranks must broadcast the same tensors in the same order: which "
            "one it is follows from the order alone.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.world_size == 1
                and (attempt.error == "waiting" or NO_SUCH_RANK.when(attempt))
            ),
            says="With one rank there is no other to send to, and nothing to do.",
        ),
        Mistake(
            when=out_of_step,
            says="`dist.broadcast` is called by every rank, also by those that "
            "receive.",
        ),
    ),
    otherwise="Every rank must end with the parameters and buffers of rank 0, in the "
    "tensors that were there before.",
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


def cut(nbytes, bucket_bytes, first_bucket_bytes):
    """The buckets, as numbers of parameters."""
    last = len(nbytes) - 1
    places = costs.ddp_buckets(
        nbytes[::-1], cap=bucket_bytes, first_cap=first_bucket_bytes
    )
    return [[last - place for place in bucket] for bucket in places]


def cut_before(nbytes, bucket_bytes, first_bucket_bytes):
    """As `cut`, but a bucket is closed before it would pass its cap."""
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in reversed(range(len(nbytes))):
        if members and held + nbytes[number] > cap:
            buckets.append(members)
            members, held, cap = [], 0, bucket_bytes
        members.append(number)
        held += nbytes[number]
    return [*buckets, members] if members else buckets


def cut_above(nbytes, bucket_bytes, first_bucket_bytes):
    """As `cut`, but a bucket must pass its cap to be closed."""
    return cut(nbytes, bucket_bytes + 1, first_bucket_bytes + 1)


def forwards(nbytes, bucket_bytes, first_bucket_bytes):
    return costs.ddp_buckets(nbytes, cap=bucket_bytes, first_cap=first_bucket_bytes)


def places_from_the_end(*args):
    last = len(args[0]) - 1
    return [[last - number for number in bucket] for bucket in cut(*args)]


def in_bytes(*args):
    return [[args[0][number] for number in bucket] for bucket in cut(*args)]


def cut_with(nbytes, bucket_bytes, first_bucket_bytes, left):
    """As `cut`, but a bucket begins with `left(held, cap)` bytes of the one before."""
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in reversed(range(len(nbytes))):
        members.append(number)
        held += nbytes[number]
        if held >= cap:
            buckets.append(members)
            members, held, cap = [], left(held, cap), bucket_bytes
    return [*buckets, members] if members else buckets


def cut_by_one(nbytes, bucket_bytes, first_bucket_bytes):
    """As `cut`, but the bytes of the newest gradient alone close a bucket."""
    buckets, members, cap = [], [], first_bucket_bytes
    for number in reversed(range(len(nbytes))):
        members.append(number)
        if nbytes[number] >= cap:
            buckets.append(members)
            members, cap = [], bucket_bytes
    return [*buckets, members] if members else buckets


def first_alone(nbytes, bucket_bytes, first_bucket_bytes):
    """As `cut`, but the first bucket has one gradient, whatever its size."""
    return [[len(nbytes) - 1], *cut(nbytes[:-1], bucket_bytes, bucket_bytes)]


def without_rest(nbytes, bucket_bytes, first_bucket_bytes):
    buckets = cut(nbytes, bucket_bytes, first_bucket_bytes)
    caps = [first_bucket_bytes] + [bucket_bytes] * len(buckets)
    return [
        bucket
        for bucket, cap in zip(buckets, caps, strict=False)
        if sum(nbytes[number] for number in bucket) >= cap
    ]


CUT_BUCKETS = Task(
    id="06.cut_buckets",
    title="Cut the buckets",
    stars=2,
    cases=(
        # Each mistake below makes something else of the first case, or of the last.
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
    expect=lambda *args: [list(map(Count, bucket)) for bucket in cut(*args)],
    forbids=("torch.distributed._compute_bucket_assignment_by_size",),
    instead="A loop over the parameters, from the last to the first.",
    mistakes=(
        Mistake(
            when=lambda attempt: (
                len(attempt.got) > 1
                and all(bucket == attempt.expected[-1] for bucket in attempt.got)
            ),
            says="All buckets are one and the same list: `clear()` empties the one "
            "that was already handed over, too. Begin a new list for each bucket: "
            "`members = []`.",
        ),
        Mistake(
            when=lambda attempt: [] in attempt.got,
            says="There is an empty bucket. Each has one gradient at least. When the "
            "last gradient closes a bucket, nothing is left for another.",
        ),
        Mistake(
            like=lambda nbytes, *caps: [[*reversed(range(len(nbytes)))]],
            says="All gradients are in one bucket: it was never closed. Add up its "
            "bytes, and close it when they have reached the cap.",
        ),
        Mistake(
            like=cut_by_one,
            says="You compare the bytes of one gradient with the cap. It is all that "
            "the bucket holds that counts: add them up, `+=`.",
        ),
        Mistake(
            like=forwards,
            says="The buckets begin with the first parameter. Its gradient is ready "
            "*last*: begin with the last parameter.",
        ),
        Mistake(
            like=lambda *args: forwards(*args)[::-1],
            says="You cut from the first parameter on, and then turned the list of "
            "buckets around. The cut itself must begin at the last parameter: its "
            "bucket is the small first one.",
        ),
        Mistake(
            like=places_from_the_end,
            says="The groups are right, but the numbers count from the end. Parameter "
            "0 is the first of `model.parameters()`.",
        ),
        Mistake(
            like=in_bytes,
            says="The groups are right. But the task asks for the parameters' numbers, "
            "not for their bytes.",
        ),
        Mistake(
            like=lambda *args: [sorted(bucket) for bucket in cut(*args)],
            says="The groups are right, but inside a bucket, too, the gradient that is "
            "ready first comes first: the larger number.",
        ),
        Mistake(
            like=lambda nbytes, cap, first: cut(nbytes, cap, min(cap, first)),
            says="The first bucket is closed at bucket_bytes already, where that is "
            "less than first_bucket_bytes. It has one cap only: first_bucket_bytes.",
        ),
        Mistake(
            like=cut_before,
            says="You close a bucket before it would pass its cap. DDP closes it as "
            "soon as it has reached the cap, so it may be larger.",
        ),
        Mistake(
            like=lambda *args: cut_with(*args, left=lambda held, cap: held),
            says="Each new bucket begins with the bytes of those before it. Set the "
            "count back to 0 when a bucket is closed.",
        ),
        Mistake(
            like=lambda *args: cut_with(*args, left=lambda held, cap: held - cap),
            says="You subtract the cap when a bucket is closed. But what is above the "
            "cap is in the closed bucket, too: the next one begins at 0.",
        ),
        Mistake(
            like=first_alone,
            says="The first bucket need not be a single gradient. It, too, is closed "
            "when it has reached its cap, first_bucket_bytes.",
        ),
        Mistake(
            like=cut_above,
            says="A bucket that has exactly its cap is closed, too.",
        ),
        Mistake(
            like=without_rest,
            says="The last bucket never got full, and is missing. Its gradients must "
            "travel as well.",
        ),
        Mistake(
            like=lambda nbytes, cap, first: cut(nbytes, cap, cap),
            says="The first bucket has a cap of its own, first_bucket_bytes.",
        ),
        Mistake(
            like=lambda nbytes, cap, first: cut(nbytes, first, first),
            says="All buckets have the first one's cap. From the second on it is "
            "bucket_bytes.",
        ),
        Mistake(
            when=lambda attempt: (
                sorted(sum(attempt.got, [])) != list(range(len(attempt.args[0])))
            ),
            says="Every parameter must be in exactly one bucket.",
        ),
    ),
    otherwise="Go from the last parameter to the first. Put each into the open bucket; "
    "when the bucket has reached its cap, close it and open the next.",
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
        if self.kind == NET_TURNED:
            return self.last(self.first(self.middle(x))) * self.scale
        if self.kind == NET_TWO_ORDERS and rank % 2:
            return self.last(self.first(self.middle(x))) * self.scale
        return self.last(self.middle(self.first(x))) * self.scale


STEPS = 3
RATE = 2.0**-14  # so small that whole numbers stay small, and a power of two


def loss_of(network, rank, step):
    # Of the sum alone the biases would have the same gradient on all ranks.
    rows = whole_numbers((2, 4), 100 + 10 * rank + step)
    return (rank + 1) * network(rows, rank).sum()


def try_wrapper(answer, kind, zero, bucket_bytes=None):
    """Train a few steps with the learner's wrapper, and report on everything."""
    rank = dist.get_rank()
    args = () if bucket_bytes is None else (bucket_bytes,)
    network = Net(kind, seed=rank)
    report = {}
    most_sent = 0  # how often, at most, one tensor was sent in a step
    parameters_sent = 0
    with Log() as log:
        log.watch(network)
        wrapped = answer(network, *args)
        report |= starts_of(network)
        optimizer = torch.optim.SGD(
            [p for p in network.parameters() if p.requires_grad], lr=RATE
        )
        for step in range(STEPS):
            if zero != NEVER:
                optimizer.zero_grad(set_to_none=zero == NONE)
            log.begin(step)
            loss_of(wrapped, rank, step).backward()
            during = len(log.now)
            wrapped.finish()
            report[in_step(step, DURING)] = f"{during} of {len(log.now)}"
            report[in_step(step, SIZES)] = [sent.numbers for sent in log.now]
            report[in_step(step, READY)] = list(log.after)
            report[in_step(step, WAITS)] = log.waits_in_backward
            sent = [t.data_ptr() for one in log.now for t in one.tensors]
            most_sent = max([most_sent, *map(sent.count, sent)])
            of_parameters = {p.data_ptr() for p in network.parameters()}
            parameters_sent += len(of_parameters.intersection(sent))
            report[NOT_AWAITED.format(step)] = log.missing()
            report[CHANGED.format(step)] = sum(sent.changed for sent in log.now)
            for name, parameter in network.named_parameters():
                grad = parameter.grad
                grad = grad if grad is None else grad.clone()
                report[f"step {step}: gradient of {name}"] = grad
            optimizer.step()
    report[OLD], report[KEPT] = log.old_waits, log.kept()
    report["the parameters in the end"] = [p.detach() for p in network.parameters()]
    hooks = [p for p in network.parameters() if p._backward_hooks]
    report |= {TENSOR_HOOKS: len(hooks), MOST_SENT: most_sent}
    return report | {PARAMETERS_SENT: parameters_sent}


def starts_of(network):
    """Do all ranks begin with what rank 0 had? All ranks call it."""
    first, same = Net(network.kind, seed=0), {}
    for what in ("parameters", "buffers"):
        pairs = zip(getattr(network, what)(), getattr(first, what)(), strict=True)
        same[what] = all(torch.equal(mine, theirs) for mine, theirs in pairs)
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, same)
    return {START.format(what): all(each[what] for each in everywhere) for what in same}


START = "all ranks start with the {} of rank 0"
DURING = "all-reduces that began during the backward"
SIZES = "sizes of the all-reduces"
READY = "gradients that were ready when each began"
WAITS = "waits during the backward"
NOT_AWAITED = "step {}: all-reduces that finish() did not await"
CHANGED = "step {}: tensors that were changed while they were under way"
OLD = "requests of old steps, awaited again"
KEPT = "requests of old steps that the wrapper still holds"
MOST_SENT = "how often one tensor was sent in a step, at most"
PARAMETERS_SENT = "how often a parameter was sent, and not its gradient"
TENSOR_HOOKS = "parameters with a hook that comes before .grad"


def in_step(step, part):
    """A part of the report that each step has: step 0 under its own name."""
    return f"step {step}: {part}" if step else part


def mean(gradients):
    return sum(gradients) / len(gradients)


def trained(kind, zero, n, *, combine=lambda rank: mean):
    """What correct wrappers would make of the network: a report for each rank.

    `combine` is what a mistake makes of the ranks' gradients.
    """
    networks = [Net(kind, seed=0) for _ in range(n)]
    reports = [{} for _ in range(n)]
    for step in range(STEPS):
        for rank, network in enumerate(networks):
            if zero != NEVER:
                network.zero_grad()
            loss_of(network, rank, step).backward()
        for parameters in zip(*(x.named_parameters() for x in networks), strict=True):
            name = parameters[0][0]
            grads = [p.grad for _, p in parameters]
            made = [
                None if grads[0] is None else combine(rank)(grads).clone()
                for rank in range(n)
            ]
            for rank, (_, parameter) in enumerate(parameters):
                parameter.grad = made[rank]
                reports[rank][f"step {step}: gradient of {name}"] = (
                    None if made[rank] is None else made[rank].clone()
                )
        with torch.no_grad():
            for network in networks:
                for parameter in network.parameters():
                    if parameter.grad is not None:
                        parameter -= RATE * parameter.grad
    for report, network in zip(reports, networks, strict=True):
        report["the parameters in the end"] = [p.detach() for p in network.parameters()]
    return reports


@functools.lru_cache(maxsize=64)
def trained_once(kind, zero, n):
    return trained(kind, zero, n)


ANY_NUMBERS = Such("anything", lambda value: True)


def calls(kind, rank, cap):
    """What is sent in a step, and when: for each gradient, or with a cap, in buckets.

    Returns the sizes, and how many gradients were ready when each left.
    """
    network = Net(kind, seed=0)
    numbers = {p: i for i, p in enumerate(network.parameters())}
    order = []
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p: order.append(numbers[p])
            )
    loss_of(network, rank, 0).backward()
    parameters = list(network.parameters())
    if cap is None:
        buckets = [[number] for number in order]
    else:
        trained = [i for i, p in enumerate(parameters) if p.requires_grad]
        nbytes = [4 * parameters[i].numel() for i in trained]
        buckets = [[trained[i] for i in bucket] for bucket in cut(nbytes, cap, cap)]
    sizes = [sum(parameters[i].numel() for i in bucket) for bucket in buckets]
    after, latest = [], 0
    for bucket in buckets:  # a bucket also waits for those before it
        latest = max(latest, *(order.index(i) + 1 for i in bucket))
        after.append(latest)
    return sizes, after


def wrapped_right(rank, inputs):
    """What the check expects of a wrapper, on this rank."""
    kind, zero, *rest = inputs[rank]
    cap = rest[0] if rest else None
    sizes, after = calls(kind, rank, cap)
    report = dict(trained_once(kind, zero, len(inputs))[rank])
    in_all = len(sizes)
    expected = {START.format("parameters"): True, START.format("buffers"): True}
    times = {DURING: Such("all of them, and at least one", all_of_them)}
    if cap is None:
        # One for each gradient is what the hints show; fewer and larger are fine.
        times[SIZES] = ANY_NUMBERS
        times[READY] = Such(
            f"numbers from 1 to {in_all}, the first of them below {in_all}",
            lambda value: value[0] < in_all,
        )
    else:
        times |= {SIZES: sizes, READY: after}
    times[WAITS] = 0
    expected |= times
    for step in range(STEPS):
        expected |= {NOT_AWAITED.format(step): 0, CHANGED.format(step): 0}
        expected |= {k: v for k, v in report.items() if k.startswith(f"step {step}:")}
    expected |= {OLD: 0, KEPT: 0}
    for step in range(1, STEPS):
        expected |= {in_step(step, part): value for part, value in times.items()}
    end = "the parameters in the end"
    anything = dict.fromkeys((TENSOR_HOOKS, MOST_SENT, PARAMETERS_SENT), ANY_NUMBERS)
    return expected | {end: report[end]} | anything


def is_beginning(attempt, part):
    """Are these the first of the expected values, and are some missing?"""
    got, expected = attempt.got[part], attempt.expected[part]
    return 0 < len(got) < len(expected) and got == expected[: len(got)]


def all_of_them(text):
    during, _, in_all = text.partition(" of ")
    return during == in_all != "0"


def gradients_in(report):
    return {key: value for key, value in report.items() if ": gradient of " in key}


def gradients_like(**parts):
    """Are all gradients what these parts of a mistake would make?"""

    def test(attempt):
        kind, zero, *_ = attempt.args
        like = trained(kind, zero, attempt.world_size, **parts)[attempt.rank]
        first = {k: v for k, v in gradients_in(like).items() if k.startswith("step 0")}
        right = {k: attempt.expected[k] for k in first}
        got = {k: attempt.got[k] for k in first}
        return (
            difference(got, first, 1e-5) is None
            and difference(got, right, 1e-5) is not None
        )

    return test


def moved_parameters(attempt):
    """Are the gradients each rank's own in step 0, and do the parameters end equal?"""
    return gradients_like(combine=lambda rank: lambda grads: grads[rank])(attempt)


def is_own(attempt):
    """Is the first wrong gradient of step 0 still the one of this rank alone?"""
    kind, zero, *_ = attempt.args
    own = trained(
        kind, zero, attempt.world_size, combine=lambda rank: lambda grads: grads[rank]
    )
    part = first_wrong(attempt)
    return (
        part.startswith("step 0: gradient of")
        and difference(attempt.got[part], own[attempt.rank][part], 1e-5) is None
    )


def divided_by_gradients(attempt):
    """As if the sum were divided by how many gradients travel."""
    gradients = gradients_in(attempt.expected).items()
    count = sum("step 0" in name and grad is not None for name, grad in gradients)
    return gradients_like(combine=lambda rank: lambda grads: sum(grads) / count)(
        attempt
    )


def sends_parameters(attempt):
    """Are the gradients of step 0 the parameters, or their sum over the ranks?"""
    parameters = dict(Net(attempt.args[0], seed=0).named_parameters())

    def are_parameters(factor):
        return all(
            difference(attempt.got[key], factor * parameters[name].detach(), 1e-5)
            is None
            for name, key in ((n, f"step 0: gradient of {n}") for n in parameters)
            if attempt.expected[key] is not None
        )

    return are_parameters(1) or are_parameters(attempt.world_size)


def at_other_places(attempt):
    """Are the wrong gradients of step 0 made of the right numbers?"""
    keys = [key for key in gradients_in(attempt.expected) if key.startswith("step 0")]
    keys = [key for key in keys if attempt.expected[key] is not None]
    right = {x for key in keys for x in attempt.expected[key].flatten().tolist()}
    made = {
        x
        for key in keys
        if is_wrong(key)(attempt)
        for x in attempt.got[key].flatten().tolist()
    }
    return len(made) > 2 and made <= right


FOUND_NONE = r"NoneType.* attribute '(flatten|reshape|ravel|view)'|but got NoneType"


def sent_nothing(attempt):
    """Was no all-reduce made in step 0, and are its gradients wrong?"""
    return attempt.got[DURING] == "0 of 0" and any(
        key.startswith("step 0") and is_wrong(key)(attempt)
        for key in gradients_in(attempt.expected)
    )


NO_GRADIENT = "cannot register a hook on a tensor that doesn't require gradient"


def without_gradient(attempt):
    """Is there no gradient where one is expected?"""
    part = first_wrong(attempt)
    return "gradient of" in part and attempt.got[part] is None


CRASHES = (
    NO_SOURCE,
    Mistake(
        when=says("assign a gradient of size", "The size of tensor a"),
        says="Numbers of one shape were to go into a gradient of another. Hooks are "
        "called as the gradients get ready, which is not the order of `parameters()`: "
        "keep each request with its parameter. And a part of a flat tensor gets the "
        "shape of its gradient by `view_as`.",
    ),
    Mistake(
        when=says("a leaf Variable that requires grad"),
        says="A parameter was to be changed in place, and autograd guards it. Did it "
        "come from a hook? It gets the *parameter*; the gradient is in its .grad. "
        "Where you do mean the parameter, do it under `torch.no_grad()`.",
    ),
    Mistake(
        when=says("zip() argument"),
        says="Two lists that belong together are not equally long: one of them was "
        "emptied, the other was not.",
    ),
    Mistake(
        when=lambda attempt: NO_GRADIENT in attempt.message,
        says="A frozen parameter never gets a gradient, so it cannot have a hook. Skip "
        "those with requires_grad=False.",
    ),
    Mistake(
        when=says("has no attribute 'finish'"),
        says="The check calls finish() after each backward(). Keep its name.",
    ),
    Mistake(
        when=says(NO_VALUE_YET),
        says="A future's `value()` does not wait: it fails while the result is not "
        "there yet. `wait()` waits, and returns the value.",
    ),
    Mistake(
        when=says("'NoneType' object is not subscriptable"),
        says="A value is None where a tensor was expected. all_reduce with "
        "async_op=True returns a request; without it, None.",
    ),
    Mistake(
        when=says("'NoneType' object has no attribute 'wait'"),
        says="There is no request to wait for, but None. `dist.all_reduce` returns a "
        "request with async_op=True only.",
    ),
    Mistake(
        when=lambda attempt: (
            attempt.error in ("AttributeError", "TypeError")
            and "NoneType" in attempt.message
        ),
        says="Something is None here. A frozen parameter has .grad None, and so has "
        "every parameter before its first backward: hand the hook over, `self.send`, "
        "without calling it. And all_reduce without async_op=True returns None, not a "
        "request.",
    ),
    Mistake(
        when=lambda attempt: (
            attempt.error == "CollectiveMismatch"
            and "all_gather_object" in attempt.message
        ),
        says="One rank has reached the end of `__init__`, another has not: it calls a "
        "collective there that the first never called. (The all_gather_object is the "
        "check's own.) `dist.broadcast` is called by every rank, also by those that "
        "receive.",
    ),
)
STARTS = (
    Mistake(
        when=wrong_in(START.format("parameters")),
        says="Not all ranks begin with rank 0's model. The first thing a wrapper does "
        "is to give all of them rank 0's parameters and buffers.",
    ),
    Mistake(
        when=wrong_in(START.format("buffers")),
        says="The parameters are those of rank 0, but the buffers are not, or not all. "
        "They are part of the model: `module.buffers()`, also where they hold whole "
        "numbers. (`state_dict()` leaves out those that are not saved.)",
    ),
)
NEVER_EMPTIED = (
    "finish() also goes through the requests of earlier steps. The list was never "
    "emptied: it grows with every step, and whatever finish() does to a gradient, it "
    "does to old ones again."
)
TWO_HOOKS = Mistake(
    when=lambda attempt: attempt.args[0] == NET_TIED and SENT_AGAIN.when(attempt),
    says="A weight that two layers share is sent twice: it has got a hook for each of "
    "them. `module.parameters()` names it once; a loop over the layers meets it again.",
)
SENT_AGAIN = Mistake(
    when=lambda attempt: (
        attempt.got[MOST_SENT] > 1
        and (
            first_wrong(attempt).endswith("under way")
            or "gradient of" in first_wrong(attempt)
        )
    ),
    says="In one step the same tensor is sent several times. Is the hook a function "
    "that is made in a loop? Then it sees the *last* value of the loop's variable. "
    "Each hook gets its own parameter as the argument: send that one's .grad. (Or are "
    "hooks registered anew in each forward? Once, in `__init__`, is enough.)",
)
UNDER_WAY = (
    Mistake(
        when=lambda attempt: (
            attempt.got[OLD] > 0
            and first_wrong(attempt).startswith(("step 1", "step 2"))
            and first_wrong(attempt).endswith("under way")
        ),
        says=NEVER_EMPTIED,
    ),
    Mistake(
        when=lambda attempt: first_wrong(attempt).endswith("did not await"),
        says="finish() returned while an all-reduce was still under way: until its "
        "`wait()` the gradient may be anything. Keep all requests of a step, and wait "
        "for each. (`get_future()` and `then()` do not wait: each begins something to "
        "wait for.)",
    ),
    Mistake(
        when=lambda attempt: first_wrong(attempt).endswith("under way"),
        says="A tensor was changed between its all-reduce and the `wait()`. Until "
        "wait() has returned nobody may touch it: the change is lost, or is added up "
        "as well. Divide before the all-reduce, or after the wait().",
    ),
)
GRADIENTS = (
    Mistake(
        when=lambda attempt: (
            "gradient of" in first_wrong(attempt) and attempt.got[TENSOR_HOOKS] > 0
        ),
        says="A hook of `register_hook` gets the gradient of this backward *before* it "
        "is added to .grad, and what it sends is not .grad. Use "
        "`register_post_accumulate_grad_hook`: it is called when .grad is complete.",
    ),
    Mistake(
        when=without_gradient,
        says="There is no gradient: .grad is None. finish() must leave the mean there.",
    ),
    Mistake(
        when=sent_nothing,
        says="No all-reduce was made in a whole step. Is a hook registered for each "
        "trained parameter, and does it come as far as `dist.all_reduce`?",
    ),
    Mistake(
        when=moved_parameters,
        says="The gradients are still each rank's own. What does the hook get, and "
        "what does it send? It gets the *parameter*; the gradient is in its .grad. (Or "
        "did you average a copy, `clone()`, and leave .grad as it was?)",
    ),
    Mistake(
        when=gradients_like(combine=lambda rank: sum),
        says="That is the sum over the ranks. all_reduce adds up; the division by the "
        "world size is yours. If you divided: did the result reach `parameter.grad`? "
        "(`g = g / n` makes a new tensor.)",
    ),
    Mistake(
        when=divided_by_gradients,
        says="It is divided by the number of gradients. Divide by the world size.",
    ),
    Mistake(
        when=gradients_like(combine=lambda rank: lambda g: mean(g) / len(g)),
        says="It is divided twice. Divide before the all_reduce or after it.",
    ),
    Mistake(
        when=lambda attempt: (
            "gradient of" in first_wrong(attempt) and attempt.got[PARAMETERS_SENT] > 0
        ),
        says="What is sent is the parameter itself, its `.data`, and not its gradient: "
        "the hook gets the parameter, and the gradient is in its .grad. So the "
        "gradients stay each rank's own.",
    ),
    Mistake(
        when=gradients_like(combine=lambda rank: lambda g: g[rank] / len(g)),
        says="Each rank has its own gradient, divided by the world size. Did you "
        "reduce a copy, and forget to write the result into `parameter.grad`? Or was "
        "it written there before `wait()` had returned?",
    ),
    Mistake(
        when=is_own,
        says="This gradient is still each rank's own, though others are not. Is it "
        "sent, and does the mean reach its .grad? Each trained parameter needs a hook: "
        "weights and biases. (The hook of a module, `register_full_backward_hook`, may "
        "come before the gradients of its parameters.)",
    ),
)
TIMES = (
    Mistake(
        when=lambda attempt: (
            first_wrong(attempt) == DURING
            and str(attempt.got[DURING]).startswith("0 of")
        ),
        says="`dist.all_reduce` was not called during the backward. Send from the "
        "hooks, and with this function. In finish() it is too late: all computing is "
        "over by then.",
    ),
    Mistake(
        when=wrong_in(DURING),
        says="Some all-reduces began only in finish(). In these networks every trained "
        "parameter gets a gradient, so everything can leave during the backward.",
    ),
    Mistake(
        when=wrong_in(WAITS),
        says="The backward stands still while a hook waits. Pass async_op=True, keep "
        "the request that comes back, and wait for it in finish().",
    ),
)
LATER = (
    Mistake(
        when=wrong_in(OLD),
        says=NEVER_EMPTIED,
    ),
    Mistake(
        when=lambda attempt: (
            first_wrong(attempt).startswith(("step 1", "step 2"))
            and "gradient of" in first_wrong(attempt)
        ),
        says="Step 0 is right, a later one is not. What is left over from the step "
        "before? Lists and counters must be as new when the next backward begins. "
        "(The check also trains with zero_grad(set_to_none=False), where .grad stays "
        "the same tensor, and without zero_grad(), where gradients add up.)",
    ),
    Mistake(
        when=wrong_in(KEPT),
        says="All values are right. But requests of earlier steps are still kept: they "
        "get more with every step, and so does the memory that they need. finish() "
        "must empty the list.",
    ),
    Mistake(
        when=lambda attempt: first_wrong(attempt).startswith(("step 1: ", "step 2: ")),
        says="Step 0 sends as it should, a later step does not. Lists and counters "
        "must be as new when the next backward begins.",
    ),
    Mistake(
        when=wrong_in("the parameters in the end"),
        says="The gradients are right, but the parameters were changed, too. Leave "
        "them to the optimizer.",
    ),
)
WRAPPER_MISTAKES = (
    *CRASHES,
    *STARTS,
    TWO_HOOKS,
    SENT_AGAIN,
    *UNDER_WAY,
    *GRADIENTS,
    *TIMES,
    *LATER,
)

ASYNC_DDP = Task(
    id="06.async_ddp",
    title="Hooks that send",
    stars=2,
    where="ranks",
    run=try_wrapper,
    seconds=15.0,
    world_sizes=(2, 3, 1),  # one rank alone hides what is sent
    cases=(
        (NET, NONE),
        (NET_FROZEN, NONE),
        (NET_TIED, ZERO_OUT),
        (NET_TURNED, NEVER),
    ),
    expect=wrapped_right,
    keeps_inputs=False,
    forbids=(DDP, *BROADCASTS),
    instead="`dist.broadcast`, `register_post_accumulate_grad_hook` and "
    "`dist.all_reduce` are enough.",
    mistakes=(
        *WRAPPER_MISTAKES,
        Mistake(
            when=wrong_in(READY),
            says="The first all-reduce began only when all gradients were there. "
            "Each gradient can leave as soon as its own hook is called.",
        ),
    ),
    otherwise="All ranks begin with rank 0's parameters and buffers, and after "
    "finish() each gradient is the mean over the ranks.",
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

BUCKETED_DDP = Task(
    id="06.bucketed_ddp",
    title="Buckets that leave early",
    stars=3,
    where="ranks",
    run=try_wrapper,
    seconds=15.0,
    world_sizes=(2, 3, 1),  # one rank alone hides what is sent
    cases=(
        (NET, NONE, 80),
        (NET, ZERO_OUT, 1),
        (NET_FROZEN, NEVER, 32),
        (NET_TURNED, NONE, 60),
        (NET_TWO_ORDERS, ZERO_OUT, 60),
        (NET_TWO_ORDERS, NONE, ONE_BUCKET),
        (NET_TIED, NONE, ONE_BUCKET),
    ),
    expect=wrapped_right,
    keeps_inputs=False,
    forbids=(DDP, *BROADCASTS),
    instead="Hooks, a flat tensor for each bucket, and `dist.all_reduce`.",
    mistakes=(
        Mistake(
            when=lambda attempt: (
                out_of_step(attempt) and attempt.args[0] == NET_TWO_ORDERS
            ),
            says="The ranks have sent different buckets at the same time. Gradients "
            "get ready in another order on some ranks, so a bucket may be full early. "
            "It must wait until all buckets before it have been sent.",
        ),
        Mistake(
            when=out_of_step,
            says="The ranks have not made the same calls. All of them must send the "
            "same buckets, in the same order, each in full, by the same collective.",
        ),
        Mistake(
            when=says("list index out of range"),
            says="A list has fewer entries than this line asks for. In `ready`: after "
            "the last bucket there is none, so ask first whether one is left. In "
            "`finish`: have all buckets been sent? When one leaves, the next may be "
            "full already.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] != NET_FROZEN and re.search(FOUND_NONE, attempt.message)
            ),
            says="A gradient is None: its bucket was sent before it was full. Send a "
            "bucket when it misses no gradient any more: `self.missing`.",
        ),
        *CRASHES,
        *STARTS,
        *UNDER_WAY,
        Mistake(
            when=says("same number of dimensions"),
            says="A bias has one dimension, a weight has two. Flatten each gradient "
            "before you join them: `reshape(-1)`.",
        ),
        Mistake(
            when=sends_parameters,
            says="You have sent the parameters: that is what the gradients are now. "
            "Put the .grad of each parameter into the flat tensor.",
        ),
        Mistake(
            when=sent_nothing,
            says="No bucket was sent: no all-reduce was made in a whole step. `ready` "
            "counts down how many gradients a bucket misses, and sends it at 0.",
        ),
        Mistake(
            when=lambda attempt: (
                moved_parameters(attempt) and not attempt.got[TENSOR_HOOKS]
            ),
            says="The gradients are still each rank's own. A flat tensor is a copy: "
            "after the `wait()`, write its parts back into the .grad of each "
            "parameter.",
        ),
        *GRADIENTS,
        Mistake(
            when=lambda attempt: (
                attempt.args[0] == NET_TWO_ORDERS
                and first_wrong(attempt).startswith("step 0: gradient of")
            ),
            says="On odd ranks the gradients get ready in another order. Are they "
            "joined in that order? Then a place in the flat tensor belongs to one "
            "parameter on this rank, and to another one on the next. Join them in the "
            "order of the bucket, which is the same on all ranks.",
        ),
        Mistake(
            when=at_other_places,
            says="The numbers are right, but they lie at other places. Each gradient "
            "gets its own part of the flat tensor back: in which order were they "
            "joined, and where does each part begin?",
        ),
        *TIMES,
        Mistake(
            when=lambda attempt: (
                wrong_in(SIZES)(attempt) and is_beginning(attempt, SIZES)
            ),
            says="The last buckets never left. Count the gradient first, then ask "
            "whether the next bucket is full. When one leaves, the next may be full "
            "already: ask again, with `while` and not with `if`.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(SIZES)(attempt)
                and sorted(attempt.got[SIZES]) == sorted(attempt.expected[SIZES])
            ),
            says="The buckets are right, but they leave in the wrong order: the one "
            "with the last parameter first, on every rank, and none before those in "
            "front of it have left.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_in(SIZES)(attempt)
                and len(attempt.got[SIZES]) == attempt.expected[READY][-1]
            ),
            says="Each gradient travels by itself. Those of a bucket travel in one "
            "flat tensor, in one all-reduce.",
        ),
        Mistake(
            when=wrong_in(SIZES),
            says="These are not the buckets of the task: from the last parameter to "
            "the first, whole gradients, closed when bucket_bytes is reached. Frozen "
            "parameters are in none. A float32 number has 4 bytes.",
        ),
        Mistake(
            when=wrong_in(READY),
            says="The buckets are right, but they leave too late. A bucket leaves in "
            "the hook of its last missing gradient (or as soon as those before it have "
            "left).",
        ),
        *LATER,
    ),
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
    where="ranks",
    run=try_wrapper,
    seconds=15.0,
    world_sizes=(2, 3, 1),  # one rank alone hides what is sent
    cases=((NET, NONE), (NET_TIED, NONE), (NET_FROZEN, ZERO_OUT), (NET_TURNED, NEVER)),
    expect=wrapped_right,
    keeps_inputs=False,
    forbids=(DDP, *BROADCASTS),
    instead="Repair the three places, and leave the rest.",
    mistakes=(*WRAPPER_MISTAKES, *ASYNC_DDP.mistakes[-1:]),
    otherwise="All ranks begin with rank 0's parameters and buffers, and after "
    "finish() each gradient is the mean over the ranks.",
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


def rows_of(k):
    """The rows of each of k micro-batches: not k times the world size."""
    return 4 if k == 5 else 7


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(3, 5, seed=1), nn.Tanh(), linear(5, 4, 2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter /= 8

        self.rows = self.held = self.most = 0

    def forward(self, x):
        output = self.layers(x)
        self.rows += len(x)
        if output.requires_grad:
            self.held += len(x)
            self.most = max(self.most, self.held)
            output.register_hook(lambda grad: self.let_go(len(grad)))
        return output

    def let_go(self, rows):
        """Their backward has come: their activations need no memory any more."""
        self.held -= rows


def micro_batches(k, rank):
    """Whole numbers, divided so that the network is not saturated; and labels."""
    batches = []
    for i in range(k):
        x = whole_numbers((rows_of(k), 3), 40 + 7 * rank + i) / 8
        batches.append((x, (torch.arange(rows_of(k)) * (i + 2) + rank) % 4))
    return batches


def try_accumulate(answer, k):
    from torch.nn.parallel import DistributedDataParallel

    network = Classifier()
    model = DistributedDataParallel(network)
    sent = []

    def hook(state, bucket):
        sent.append(bucket.index())
        mean = bucket.buffer() / dist.get_world_size()
        request = dist.all_reduce(mean, async_op=True)
        return request.get_future().then(lambda future: mean)

    model.register_comm_hook(None, hook)
    before = [p.detach().clone() for p in network.parameters()]
    batches = micro_batches(k, dist.get_rank())
    answer(model, batches)
    pairs = zip(before, network.parameters(), strict=True)
    unchanged = all(torch.equal(one, other) for one, other in pairs)
    report = {f"gradient of {n}": p.grad for n, p in network.named_parameters()}
    return report | {
        "all-reduces": len(sent),
        "the parameters are as before": unchanged,
        MOST_ROWS: network.most,
        ALL_ROWS: network.rows,
        SENDS_AGAIN: model.require_backward_grad_sync,
        AS_BEFORE: model.training and all(p.requires_grad for p in model.parameters()),
        LIST_LEFT: len(batches),
    }


MOST_ROWS = "most rows between forward and backward at a time"
ALL_ROWS = "rows that went through the model"
SENDS_AGAIN = "the next backward sends again"
AS_BEFORE = "the model still trains, and nothing in it is frozen"
LIST_LEFT = "micro-batches in the list afterwards"


def gradients_of(batches):
    """Of the mean loss over all rows of these batches."""
    network = Classifier()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.cross_entropy(network(x), y).backward()
    return {f"gradient of {name}": p.grad for name, p in network.named_parameters()}


def accumulated(rank, inputs, *, scale=None, own=False, only=None):
    """The gradient of all rows of all ranks; a mistake has one part of it different."""
    (k,) = inputs[rank]
    ranks = [rank] if own else range(len(inputs))
    batches = [b for r in ranks for b in micro_batches(k, r)[only or slice(None)]]
    factor = scale(k, len(inputs)) if scale else 1
    report = {name: grad * factor for name, grad in gradients_of(batches).items()}
    report |= {"all-reduces": 1, "the parameters are as before": True}
    report |= {MOST_ROWS: rows_of(k), ALL_ROWS: k * rows_of(k)}
    return report | {SENDS_AGAIN: True, AS_BEFORE: True, LIST_LEFT: k}


def sent_too_early(attempt):
    """Was one micro-batch sent, before all of the others were added?"""
    (k,), n = attempt.args, attempt.world_size
    for sent in range(1, k):  # how many were added up when it was sent
        first = [b for rank in range(n) for b in micro_batches(k, rank)[:sent]]
        of_first = gradients_of(first)
        of_others = gradients_of(micro_batches(k, attempt.rank)[sent:])
        like = {
            name: (sent * of_first[name] + (k - sent) * of_others[name]) / k
            for name in of_first
        }
        got = {name: attempt.got[name] for name in like}
        if attempt.got["all-reduces"] == 1 and difference(got, like, 1e-4) is None:
            return True
    return False


def divided_in_part(attempt):
    """Is the last loss divided by k and are the others not, or the other way round?"""
    (k,) = attempt.args
    if k == 1:
        return False
    all_of = [micro_batches(k, rank) for rank in range(attempt.world_size)]
    first = gradients_of([batch for of_rank in all_of for batch in of_rank[:-1]])
    last = gradients_of([of_rank[-1] for of_rank in all_of])
    for of_first, of_last in ((1, k), (k, 1)):  # how many times as large
        like = {
            name: (of_first * (k - 1) * first[name] + of_last * last[name]) / k
            for name in first
        }
        got = {name: attempt.got[name] for name in like}
        if difference(got, like, 1e-4) is None:
            return True
    return False


def gradient_as(**parts):
    """Are the gradients what this mistake makes, however often it has sent?"""

    def test(attempt):
        like = accumulated(attempt.rank, [attempt.args] * attempt.world_size, **parts)
        names = [name for name in like if name.startswith("gradient")]
        return wrong_in("gradient")(attempt) and all(
            difference(attempt.got[name], like[name], 1e-4) is None for name in names
        )

    return test


ACCUMULATE = Task(
    id="06.accumulate",
    title="Accumulate, and send once",
    stars=2,
    where="ranks",
    run=try_accumulate,
    world_sizes=(2, 3),
    seconds=20.0,
    imports=("torch._dynamo",),  # the first DDP and the first optimizer do so
    cases=((3,), (1,), (5,)),
    expect=accumulated,
    keeps_inputs=False,
    tolerance=1e-4,
    mistakes=(
        Mistake(
            when=says("context manager protocol", "__enter__"),  # 3.10 says the last
            says="`no_sync` is a method: `with model.no_sync():`, with parentheses.",
        ),
        Mistake(
            when=without_gradient,
            says="There is no gradient: .grad is None. Each micro-batch needs a "
            "backward(), and the task ends with the gradients in .grad: no zero_grad() "
            "after them.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["all-reduces"] == 0 and not wrong_in("gradient")(attempt)
            ),
            says="The gradients are right, but DDP has sent nothing: you did its work "
            "by hand. Let DDP send them: forward and backward of the last micro-batch "
            "go through `model`, outside of no_sync().",
        ),
        Mistake(
            when=sent_too_early,
            says="A micro-batch before the last one was sent, and those after it "
            "stay each rank's own. It is the *last* one that must be outside of "
            "no_sync(): it sends what has been added up.",
        ),
        Mistake(
            when=lambda attempt: (
                gradient_as(scale=lambda k, n: rows_of(k) * k)(attempt)
                or gradient_as(scale=lambda k, n: rows_of(k))(attempt)
            ),
            says="That is the sum over the rows of a micro-batch. The task asks for "
            'the mean: `F.cross_entropy` without reduction="sum".',
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["all-reduces"] == 0
                and gradient_as(own=True, scale=lambda k, n: k)(attempt)
            ),
            says="DDP sent nothing: each rank has its own sum, and it is not divided "
            "by k. The last micro-batch must be outside of no_sync(), forward and "
            "backward.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["all-reduces"] == 0,
            says="DDP sent nothing: the gradients are not averaged by it. The last "
            "micro-batch must be outside of no_sync(), forward and backward. (And it "
            "must go through `model`, not through `model.module`.)",
        ),
        Mistake(
            when=gradient_as(scale=lambda k, n: k),
            says="It is k times too large: each loss is the mean over its own "
            "micro-batch only. Divide each loss by k before backward().",
        ),
        Mistake(
            when=gradient_as(scale=lambda k, n: k / rows_of(k)),
            says="You divided by the number of rows, and the loss is a mean over them "
            "already. Divide by the number of micro-batches.",
        ),
        Mistake(
            when=gradient_as(scale=lambda k, n: 1 / n),
            says="It is divided by the world size once more. DDP takes the mean over "
            "the ranks; you divide by the number of micro-batches.",
        ),
        Mistake(
            when=gradient_as(scale=lambda k, n: k / n),
            says="You divided by the world size. DDP has done that already. What is "
            "missing is the number of micro-batches.",
        ),
        Mistake(
            when=gradient_as(scale=lambda k, n: 1 / k),
            says="It is divided by k twice.",
        ),
        Mistake(
            when=divided_in_part,
            says="The last micro-batch does not count as much as each of the others: "
            "some losses are divided by k, and some are not.",
        ),
        Mistake(
            when=lambda attempt: (
                gradient_as(only=slice(-1, None))(attempt)
                or gradient_as(only=slice(-1, None), scale=lambda k, n: 1 / k)(attempt)
            ),
            says="Only the last micro-batch is left. Gradients add up by themselves: "
            "no zero_grad() in between.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["the parameters are as before"] is False,
            says="The parameters have changed. The task ends with the gradient: "
            "`optimizer.step()` is not part of it.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["all-reduces"] == attempt.args[0] > 1,
            says="The gradient is right, but every micro-batch was sent. Put forward "
            "*and* backward of all but the last one inside `model.no_sync()`: the "
            "forward decides.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["all-reduces"] > 1,
            says="Only the backward of the last micro-batch should send.",
        ),
        Mistake(
            when=wrong_in(MOST_ROWS),
            says="The gradient is right, but all rows are in memory at the same time. "
            "One micro-batch after the other: forward, then backward, which frees its "
            "activations, and only then the next.",
        ),
        Mistake(
            when=wrong_in(ALL_ROWS),
            says="The gradient is right, but each micro-batch should go through the "
            "model once. The backward of the last one sends the sum of all.",
        ),
        Mistake(
            when=wrong_in(SENDS_AGAIN),
            says="The gradient is right, but DDP stays as inside of no_sync(): the "
            "next step would not be averaged. `with model.no_sync():` puts it back by "
            "itself.",
        ),
        Mistake(
            when=wrong_in(AS_BEFORE),
            says="The gradient is right, but the model is left in another state than "
            "before: in eval(), or with requires_grad False. The next step would not "
            "train as this one.",
        ),
        Mistake(
            when=wrong_in(LIST_LEFT),
            says="The gradient is right, but the caller's list is not what it was. "
            "`pop()` takes away: loop over the list, or over a copy of it.",
        ),
        Mistake(
            when=says("log_softmax_lastdim_kernel_impl"),
            says="`F.cross_entropy` takes the model's output first, then the labels.",
        ),
        Mistake(
            when=says("does not require grad"),
            says="The loss must be computed with gradients: model(inputs), then "
            "cross_entropy, then backward().",
        ),
    ),
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
