"""Lesson 06, DistributedDataParallel: the tasks of its exercise."""

import operator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.measure.state import modes_of, settings_of, state_of, tensors_listed
from course_utils.measure.traffic import Sent
from course_utils.measure.under_way import Log
from course_utils.questions.lesson_06 import PREDICT_BUCKET
from course_utils.tasks.compare import difference, plain
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.task import OPTIMIZER_IMPORTS, OUT_OF_STEP, Miss, Task

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
        wide = linear(2, 2, seed + 5, torch.float64, divided_by=3)
        self.deep = nn.Sequential(nn.Sequential(nn.Sequential(wide)))
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean.fill_(seed)
        self.norm.num_batches_tracked.fill_(2**60 + 1 + seed)  # too long for a float
        table = whole_numbers((2, 3), 50 + seed)
        self.register_buffer("table", table, persistent=False)  # not in state_dict()


def tensors_of(module):
    """All tensors that make the module what it is, by their names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def observe_broadcast(answer, kind):
    rank = dist.get_rank()
    two = nn.Sequential(linear(3, 4, rank + 1), nn.ReLU(), linear(4, 2, rank + 9))
    module = two if kind == "two linear layers" else AllSorts(rank)
    before, settings = tensors_of(module), settings_of(module)
    with Log("broadcast") as log:
        answer(module)
    after = tensors_of(module)
    return {
        "broadcasts are waited for": log.missing() == 0,
        **after,
        "the same tensors as before": all(after[n] is t for n, t in before.items()),
        "requires_grad and the mode are kept": settings_of(module) == settings,
    }


ALL = "(*module.parameters(), *module.buffers())"
NEEDS_NO_GRAD = "a leaf Variable that requires grad"

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
        Miss(", *module.buffers()", ",", "Send the buffers, too: `module.buffers()`."),
        Miss(
            ALL,
            "module.state_dict().values()",
            "`state_dict()` leaves out a buffer with persistent=False.",
        ),
        Miss(
            ALL,
            f"filter(torch.is_floating_point, {ALL})",
            "The buffers of whole numbers are each rank's own. Send them, too.",
        ),
        Miss(
            "*module.parameters()",
            "*filter(lambda p: p.requires_grad, module.parameters())",
            "The frozen parameters are each rank's own. The model uses them, too.",
        ),
        Miss(
            "broadcast(tensor,",
            "broadcast(tensor.clone(),",
            "Every rank still has its own model. Did you broadcast copies?",
        ),
    ),
    because={
        "waited for": "With async_op=True, wait for all requests before you return.",
        "num_batches_tracked": "Send each tensor in its own dtype: an int64 may have "
        "more digits than a float.",
        "same tensors": "The values are right, but these are new tensors. An optimizer "
        "may hold the old ones: overwrite them in place.",
        "mode": "The values are right, but requires_grad or the mode has changed.",
        "": "Every rank must end with rank 0's parameters and buffers, in its own "
        "tensors.",  # said of any other tensor
    },
    errors={
        "Must specify global_rank or group_rank": "`dist.broadcast` must know which "
        "rank sends: src=0.",
        NEEDS_NO_GRAD: "Change a parameter in place under `torch.no_grad()`.",
        OUT_OF_STEP: "Every rank calls `dist.broadcast`, also those that receive: with "
        "the same src=0, and for the same tensors in the same order.",
    },
    hints=(
        "What belongs to a module besides its parameters?",
        "`module.parameters()` and `module.buffers()` name all tensors, in the same "
        "order on every rank. `dist.broadcast` overwrites one of them in place.",
        "  with torch.no_grad():   # they are changed in place\n"
        "      for tensor in ...:  # all tensors of the module\n"
        "          ...             # one collective",
    ),
)

# ------------------------------------------------------------------------ cut_buckets

INDICES = "it is a list of lists of whole numbers"


def observe_cut(answer, nbytes, bucket_bytes, first_bucket_bytes):
    made = answer(nbytes, bucket_bytes, first_bucket_bytes)
    try:
        buckets = [[operator.index(number) for number in bucket] for bucket in made]
    except TypeError:  # no float is an index
        return None if made is None else {INDICES: False}
    return {INDICES: True, "the buckets": buckets}


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
        ([50, 30, 10, 90, 20, 20, 30], 40, 100),  # the first cap is the larger one
    ),
    forbids=("torch.distributed._compute_bucket_assignment_by_size",),
    instead="A loop over the parameters, from the last to the first.",
    misses=(
        Miss("reversed", "", "Begin with the last parameter: it is ready first."),
        Miss(
            f"{PUT_IN}\n        if held >= cap:\n            {CLOSE}{OPEN}",
            "if members and held + nbytes[number] > cap:\n"
            f"            {CLOSE}{OPEN}\n        {PUT_IN}",
            "You close a bucket before it would pass its cap. Close it when it has "
            "reached the cap: it may be larger.",
        ),
        Miss(RETURN, "return buckets", "The last bucket, never full, is missing."),
        Miss(RETURN, "return [*buckets, members]", "The last bucket is empty."),
        Miss(">= cap", "> cap", "A bucket that has exactly its cap is closed, too."),
        Miss(
            "0, first_", "0, ", "The first bucket has its own cap: first_bucket_bytes."
        ),
        Miss("[], 0, bucket", "[], held, bucket", "A new bucket begins with 0 bytes."),
        Miss(
            "members.append(number)",
            "members.append(len(nbytes) - 1 - number)",
            "These numbers are counted from the end. Number the parameters as `nbytes` "
            "does: the last one is len(nbytes) - 1.",
        ),
        Miss(
            "members.append(number)",
            "members.append(nbytes[number])",
            "Those are bytes. A bucket is a list of the numbers of its parameters.",
        ),
        Miss(
            RETURN,
            "return [sorted(one) for one in [*buckets, members] if one]",
            "Within a bucket, too, the gradient that is ready first comes first.",
        ),
        Miss(
            OPEN,
            "members.clear()\n            held, cap = 0, bucket_bytes",
            "`clear()` empties the closed bucket, too. Begin a new list.",
        ),
    ),
    because={
        INDICES: "It must be a list of buckets, each a list of indices. No float can "
        "be an index.",
        "the buckets": "Put each parameter into the open bucket, and add its bytes. "
        "When the cap is reached, close the bucket. The next one begins with 0 bytes, "
        "and its cap is bucket_bytes.",
    },
    hints=(
        "When do you ask whether the cap is reached: before you put a parameter in, or "
        "after?",
        "Put a parameter into the open bucket first, then ask whether the cap is "
        "reached. After the loop, an open bucket may be left.",
        "  buckets, members, held, cap = ...   # the cap of the first bucket\n"
        "  for number in ...:                  # the last parameter comes first\n"
        "      ...                             # put it in, and count its bytes\n"
        "      if ...:\n"
        "          ...                         # close this bucket, open the next\n"
        "  ...                                 # is one left open?",
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


class Net(nn.Module):
    """Linear steps of small whole numbers; another network for each seed."""

    def __init__(self, kind, seed):
        super().__init__()
        self.turned = kind == NET_TURNED or (kind == NET_TWO_ORDERS and seed % 2)
        self.first = linear(4, 4, seed=10 * seed + 1)
        self.middle = linear(4, 4, seed=10 * seed + 2)
        self.last = linear(4, 2, seed=10 * seed + 3)
        self.register_buffer("count", torch.tensor(1 + seed))  # a whole number
        self.register_buffer("scale", torch.tensor(1.0 + seed), persistent=False)
        if kind == NET_FROZEN:
            self.middle.requires_grad_(False)
        if kind == NET_TIED:
            self.middle.weight = self.first.weight

    def forward(self, x):
        x = self.first(self.middle(x)) if self.turned else self.middle(self.first(x))
        return self.last(x) * self.scale


def observe_wrapper(answer, kind, zero, *bucket_bytes):
    """Some steps with the learner's wrapper: what is sent when, and the gradients."""
    rank = dist.get_rank()
    network, ranks_0 = Net(kind, seed=rank), Net(kind, seed=0)
    modes, tensors_0, listed = modes_of(network), tensors_of(ranks_0), []
    with Log() as log:
        log.watch(network)
        wrapped = answer(network, *bucket_bytes)
        seen = {
            f"starts with rank 0's `{name}`": torch.equal(tensor, tensors_0[name])
            for name, tensor in tensors_of(network).items()
        }
        if bucket_bytes:
            seen["cut_buckets, which it calls, is right"] = well_cut(
                wrapped, *bucket_bytes
            )
        for step in range(3):
            if zero != NEVER:
                network.zero_grad(set_to_none=zero == NONE)
            log.begin(step)
            # With the same rows the biases would have the same gradient on all ranks.
            rows = whole_numbers((2, 4), 100 + 10 * rank + step)
            ((rank + 1) * wrapped(rows).sum()).backward()
            began = list(log.after)
            wrapped.finish()
            name = f"later, in step {step}: " if step else ""
            as_it_was = state_of(network) == state_of(ranks_0) and False not in modes
            of_step = seen_in_step(network, log, began, bool(bucket_bytes), as_it_was)
            listed.append(tensors_listed(vars(wrapped)))
            of_step["tensors of earlier steps are let go"] = listed[2:] <= listed[1:2]
            seen |= {f"{name}{what}": value for what, value in of_step.items()}
    return seen


def well_cut(wrapped, cap):
    """Are the buckets as those of task 3? A class of one's own need not have any."""
    if not hasattr(wrapped, "buckets"):
        return True
    nbytes = [[p.nbytes for p in bucket] for bucket in wrapped.buckets]
    in_order = [id(p) for bucket in wrapped.buckets for p in bucket]
    trained = [id(p) for p in wrapped.parameters() if p.requires_grad]
    closed = all(sum(one[:-1]) < cap <= sum(one) for one in nbytes[:-1])
    return in_order == trained[::-1] and closed and all(nbytes)


def seen_in_step(network, log, began, in_buckets, as_it_was):
    """What a step shows; `began`: how many gradients each all-reduce came after."""
    trained = [p for p in network.parameters() if p.requires_grad]
    sizes = [one.numbers for one in log.now]
    sent = {tensor.data_ptr() for one in log.now for tensor in one.tensors}
    numbers = sum(p.numel() for p in trained)
    seen = {
        "requests of earlier steps are let go": log.kept() == 0,
        "finish() awaits each all-reduce": log.missing() == 0,
        "numbers in gradients that were not sent": max(0, numbers - sum(sizes)),
        "a parameter is sent": any(p.data_ptr() in sent for p in trained),
        "tensors under way are left alone": not any(one.changed for one in log.now),
        "but for gradients, the network is as it was": as_it_was,
        "each trained parameter has a .grad": all(p.grad is not None for p in trained),
    }
    for name, parameter in network.named_parameters():
        seen[f"gradient of {name}"] = plain(parameter.grad)  # as it is now
    seen["each hook returns at once"] = log.waits_in_backward == 0
    if in_buckets:
        seen["sizes of the all-reduces"] = sizes
        seen["gradients that were ready when each all-reduce began"] = began
    else:  # fewer and larger ones than in the hints are fine
        in_time = began[:1] < [len(trained)] and len(began) == len(sizes)
        seen["the all-reduces began in time"] = in_time
    return seen


BECAUSE = {
    "rank 0's `count`": "The buffers are each rank's own. Send them, too: "
    "`module.buffers()`.",
    "rank 0's `scale`": "`state_dict()` leaves out a buffer with persistent=False. "
    "`module.buffers()` has them all.",
    "starts with": "Not all ranks begin with rank 0's model. The first thing a wrapper "
    "does is to broadcast all parameters and all buffers.",
    "let go": "Requests or tensors of earlier steps are still kept, more with every "
    "step: finish() must empty its lists.",
    "finish() awaits": "finish() returned while an all-reduce was under way. Call "
    "`wait()` of each request: `then()` does not wait.",
    "under way": "A tensor was changed while its all-reduce was under way. Divide "
    "before it, or after the wait(), and send each gradient once. A weight that two "
    "layers share needs one hook: `module.parameters()` yields it once.",
    "as it was": "Something else has changed: a parameter, a buffer, a requires_grad, "
    "or the mode in which the network computes. A wrapper changes gradients only.",
    "later": "The first backward is right, a later one is not. finish() must empty all "
    "lists and reset all counters. Without zero_grad(), the next backward adds to "
    ".grad: send what is in .grad then.",
    "not sent": "Not all gradients are sent. Each trained parameter needs a hook, and "
    "that sends the .grad of its own argument.",
    "a parameter": "A parameter itself is sent. The hook gets the *parameter*: the "
    "gradient is in its .grad.",
    "has a .grad": "There is no gradient after finish(): leave the mean in each .grad.",
    "at once": "The backward stands still while a hook waits. Pass async_op=True, "
    "and wait for the request in finish().",
    "began": "All-reduces begin too late. Each gradient can leave in its own hook: do "
    "not send them all in finish(), or all in the hook of the last gradient.",
}
ERRORS = {
    NEEDS_NO_GRAD: "A parameter was to be changed in place. Did you mean its .grad?",
    "The size of tensor a": "A part of a flat tensor needs the shape of its gradient, "
    "`view_as`. And hooks do not come in the order of `parameters()`.",
    "hook on a tensor that doesn't require gradient": "A frozen parameter cannot have "
    "a hook. Skip those with requires_grad=False.",
    "has no attribute 'sum'": "forward() returned None: did you forget `return`?",
    "NoneType": "Something is None. all_reduce returns a request with async_op=True "
    "only. The .grad of a frozen parameter is None. And .grad may still be None when a "
    "hook of `register_hook` is called: use `register_post_accumulate_grad_hook`.",
    OUT_OF_STEP: "All ranks must make the same calls, also those that receive a "
    "broadcast.",
}
SUM = (
    "That is the sum over the ranks: the division is yours. If you divided, did it "
    "reach `parameter.grad`?"
)
OWN_SHARE = (
    "Each rank has its own gradient, divided by the world size. Did you reduce a copy? "
    "Write it back after its `wait()`."
)
WRAPPER = dict(
    observe=observe_wrapper,
    seconds=15.0,
    ranks=(3, 2),
    keeps_inputs=False,
    forbids=READY_MADE,
    otherwise="After finish() each .grad is the mean over the ranks: sent in the same "
    "order on all of them, waited for, divided once, and written back.",
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
            "The gradients are each rank's own. Did you average copies?",
        ),
        Miss(f"{SENT}parameter.grad", f"{SENT}parameter.grad.clone()", OWN_SHARE),
    ),
    because=BECAUSE,
    errors=ERRORS,
    hints=(
        "Which parameters need a hook? What must it do, and what is left to finish()?",
        "`register_post_accumulate_grad_hook` calls its hook with the parameter, when "
        "its .grad is there. The hook divides the gradient, starts its all-reduce and "
        "keeps the request; finish() waits for all requests and empties the list.",
        "  for parameter in ...:       # in __init__, after the same start\n"
        "      if ...:\n"
        "          parameter.register_post_accumulate_grad_hook(self.send)\n"
        "  def send(self, parameter):\n"
        "      ...                     # divide its gradient\n"
        "      self.requests.append(dist.all_reduce(..., async_op=...))\n"
        "  def finish(self):\n"
        "      while self.requests:\n"
        "          ...",
    ),
    **WRAPPER,
)

WRITE = "p.grad.copy_(part.view_as(p))"
AWAIT = "            request.wait()\n"
COPY_BACK = f"""            parts = flat.split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                {WRITE}
"""

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
        Miss(" / dist.get_world_size()", "", SUM),
        Miss(WRITE, "pass", "The gradients are each rank's own. Write the means back."),
        Miss(
            "p.grad.flatten()",
            "p.detach().flatten()",
            "These are means of the parameters. Their gradients are in .grad.",
        ),
        Miss(
            f"{AWAIT}{COPY_BACK}",
            f"{COPY_BACK}{AWAIT}",
            "You copy a bucket back before its wait() has returned.",
        ),
    ),
    because={
        **BECAUSE,
        "cut_buckets": "Your cut_buckets makes other buckets. Does it pass its own "
        "check?",
        "not sent": "Not all buckets have left. When one leaves, the next may be full "
        "already: ask again, with `while` and not with `if`.",
        "sizes": "These are not the buckets in their order, each in one flat tensor. "
        "Each waits for those before it.",
        "began": "The buckets leave too late. Each leaves in the hook of its last "
        "missing gradient, or as soon as those before it have left.",
    },
    errors={
        **ERRORS,
        "split_with_sizes expects": "The numbers of one bucket were to be cut like "
        "those of another. Was a bucket sent before those in front of it?",
        "list index out of range": "A list has fewer entries than this line asks for. "
        "Ask first whether a bucket is left, and whether all have been sent.",
        "same number of dimensions": "A bias has one dimension, a weight has two. "
        "Flatten each gradient before you join them: `reshape(-1)`.",
        "'NoneType' object is not iterable": "Something that should be a list is None. "
        "Does your cut_buckets pass the check of its own task?",
        "NoneType": "Something is None. A gradient? Then its bucket was not full yet. "
        "A request? all_reduce returns one with async_op=True only.",
        OUT_OF_STEP: "All ranks must send the same buckets in the same order. A bucket "
        "that is full early must wait until all buckets before it have been sent. Do "
        "broadcast_module and cut_buckets pass the checks of their own tasks?",
    },
    hints=(
        "Which bucket is the next one to be sent, and is it full?",
        "The next bucket is number len(self.sent). In ready: count down, then send as "
        "long as the next bucket misses nothing. In finish: wait, copy the means back, "
        "and call begin().",
        "The shape of ready:\n"
        "  ...                    # one gradient less is missing\n"
        "  while ... and ...:     # a bucket is left, and the next one is full\n"
        "      flat = ...         # its gradients, one after another, divided\n"
        "      ...                # send it; keep what finish() needs\n"
        "finish: for each that was sent: wait, `split`, copy into each .grad",
    ),
    **WRAPPER,
)

REDUCED = "self.requests.append(dist.all_reduce(parameter.grad"

SPOT_THE_HOOK = Task(
    id="06.spot_the_hook",
    title="Spot the bugs in a copied DDP",
    stars=2,
    cases=((NET, NONE), (NET_TIED, NONE), (NET_FROZEN, ZERO_OUT), (NET_TURNED, NEVER)),
    instead="Repair the three places, and leave the rest.",
    misses=(
        Miss("gradient /= dist.get_world_size()", "pass", SUM),
        Miss(REDUCED, f"{REDUCED}.clone()", OWN_SHARE),
    ),
    because=BECAUSE,
    errors=ERRORS,
    hints=(
        "What does `reduce` get? How many requests are there after each finish()?",
        "A post-accumulate hook gets the parameter. A list that is only appended to "
        "still has the last step's entries. And a module is more than its parameters.",
        "  for buffer in ...:                      # in __init__\n"
        "      ...\n"
        "  self.gradients.append(parameter....)    # in reduce, and one line more\n"
        "  self.gradients, self.requests = ...     # in finish",
    ),
    **WRAPPER,
)

# ------------------------------------------------------------------------- accumulate


class Classifier(nn.Module):
    """It counts the rows that go through it, and those that wait for their backward."""

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


def observe_accumulate(answer, k):
    rank, rows = dist.get_rank(), 4 if k == 5 else 7  # not k times the world size
    network = Classifier()
    model, modes, sent = DistributedDataParallel(network), modes_of(network), []

    def hook(state, bucket):
        sent.append(network.backwards)
        mean = bucket.buffer() / dist.get_world_size()
        request = dist.all_reduce(mean, async_op=True)
        return request.get_future().then(lambda future: mean)

    model.register_comm_hook(None, hook)
    before = state_of(model)
    labels = torch.arange(rows) + rank
    batches = [
        (whole_numbers((rows, 3), 40 + 7 * rank + i) / 8, labels * (i + 2) % 4)
        for i in range(k)
    ]
    copies = plain(batches)
    with Sent() as called:
        answer(model, batches)
    hooks = sum(len(p._backward_hooks or ()) for p in network.parameters())
    return {
        "the last backward sends": sent[-1:] == [network.backwards],
        "rows that went through the model": network.rows,
        "the gradients": [p.grad for p in network.parameters()],
        "backwards that send": len(sent),
        "collectives in all": len(called.calls),
        "most rows at a time": network.most,
        "all parts computed in training mode": False not in modes,
        "the model is as before": state_of(model) == before and not hooks,
        "micro_batches is what it was": difference(plain(batches), copies, 0.0) is None,
    }


NO_SYNC = "`no_sync` is a method: `with model.no_sync():`, with parentheses."
BACKWARD = "(loss / k)"
ROWS_ADDED = "You added up the rows of a micro-batch. The task asks for the mean."

ACCUMULATE = Task(
    id="06.accumulate",
    title="Accumulate, and send once",
    stars=2,
    observe=observe_accumulate,
    ranks=(3, 2),
    seconds=20.0,
    imports=OPTIMIZER_IMPORTS,
    cases=((4,), (1,), (5,)),
    keeps_inputs=False,
    tolerance=1e-4,
    misses=(
        Miss(BACKWARD, "loss", "It is k times too large. Divide each loss by k."),
        Miss(
            "is_last = i == k - 1",
            "is_last = True",
            "Every micro-batch was sent. Put forward *and* backward of all but the "
            "last one inside `with model.no_sync():`.",
        ),
        Miss("/ k)", "/ dist.get_world_size())", "DDP divides by the ranks, you by k."),
        Miss("/ k)", "/ k / dist.get_world_size())", "DDP has divided by the ranks."),
        Miss(
            f"labels)\n            {BACKWARD}",
            'labels, reduction="sum")\n            loss',
            ROWS_ADDED,
        ),
        Miss(
            f"labels)\n            {BACKWARD}",
            f'labels, reduction="sum")\n            {BACKWARD}',
            ROWS_ADDED,
        ),
        Miss(
            BACKWARD,
            f"model.zero_grad(); {BACKWARD}",
            "Only the gradient of the last micro-batch is left.",
        ),
    ),
    because={
        "the last": "DDP must send in the last backward. Forward and backward of the "
        "last micro-batch must be outside of no_sync(), and go through `model`.",
        "the gradients": "Each gradient must be that of the mean loss over all rows of "
        "all micro-batches of all ranks: each loss is divided by k.",
        "that send": "Only the backward of the last micro-batch should send.",
        "in all": "DDP sends the gradients, and has averaged them. Leave out all other "
        "collectives.",
        "went through": "Each micro-batch should go through the model once.",
        "most rows": "Several micro-batches are in memory at the same time: the "
        "backward of each comes before the next forward.",
        "training mode": "The model computed in eval mode: leave its mode as it is.",
        "as before": "The model has changed: parameters (no `optimizer.step()` here), "
        "requires_grad, the mode, hooks, or whether DDP sends in the next step.",
        "micro_batches": "The caller's list is not what it was, or a tensor in it: "
        "`pop()` takes away, and operations in place overwrite.",
    },
    errors={"context manager protocol": NO_SYNC, "__enter__": NO_SYNC},  # Python 3.10
    hints=(
        "Which of the micro-batches must send? And what is each loss a mean of?",
        "`with model.no_sync():` is around forward and backward of all but the last.",
        "  *others, last = micro_batches\n"
        "  with ...:\n"
        "      for inputs, labels in others:\n"
        "          ...      # three steps; one number is divided\n"
        "  ...              # the same with the last one, outside",
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
