"""Lesson 03: different right answers, and odd wrong ones."""

import concurrent.futures
import copy
import itertools
import threading

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn import functional as F
from torch.nn import parallel
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from tests.answers import Answers

ANSWERS = Answers()

# ---------------------------------------------------------------------- 03.scatter


@ANSWERS.right("03.scatter")
def by_leaves(inputs, target_gpus, dim=0):
    leaves, form = tree_flatten(inputs)
    n = len(target_gpus)
    pieces = [
        leaf.chunk(n, dim) if isinstance(leaf, torch.Tensor) else [leaf] * n
        for leaf in leaves
    ]
    parts = [tree_unflatten(part, form) for part in zip(*pieces)]  # noqa: B905
    if not leaves:
        parts = [inputs] * n
    return [
        tree_map_only(torch.Tensor, lambda tensor, gpu=gpu: tensor.cuda(gpu), part)
        for part, gpu in zip(parts, target_gpus)  # noqa: B905
    ]


CHUNK = "inputs.chunk(len(target_gpus), dim)"
ALL_ROWS = "[inputs.to(gpu).chunk(len(target_gpus), dim)[target_gpus.index(gpu)] for"
OF_DICTS = "return [dict(zip(inputs, part, strict=True)) for part in parts]"
A_DICT = "return {k: scatter(x, target_gpus, dim) for k, x in inputs.items()}"
PAIRS = "zip(inputs, part, strict=True)"
ANSWERS.edited(
    "03.scatter",
    right=[
        (CHUNK, CHUNK.replace("inputs", "inputs.to(target_gpus[0])")),
        (CHUNK, "inputs.split(-(-inputs.shape[dim] // len(target_gpus)), dim)"),
        # The order of the keys in a dict does not count.
        (PAIRS, f"[*{PAIRS}][::-1]"),
    ],
    wrong=[
        ("each GPU was sent all rows", "[p.to(gpu) for", ALL_ROWS),
        ("is repeated for every GPU", " and inputs:", ":"),
        ("is repeated for every GPU", "[inputs] * len(target_gpus)", "[inputs]"),
        ("as it is, not as a copy", "[inputs] *", "[copy.deepcopy(inputs)] *"),
        ("with one part for each GPU", OF_DICTS, A_DICT),
        ("its dtype is float32", "p.to(gpu)", "p.to(gpu).float()"),
    ],
)

# ----------------------------------------------------------------------- 03.gather


@ANSWERS.right("03.gather")
def leaf_by_leaf(outputs, target_device, dim=0):
    def join(*leaves):
        if leaves[0] is None:
            return None
        leaves = [torch.atleast_1d(leaf).cuda(target_device) for leaf in leaves]
        return torch.concat(leaves, axis=dim)

    return tree_map(join, *outputs)


KEYS = "for key in first}\n    groups"
NO_DICTS = "    if isinstance(first, dict):\n        return None\n    if False:"
ONE_LOSS = "if first.dim() == 0 and len(outputs) == 1:\n            return first"
ANSWERS.edited(
    "03.gather",
    right=[(KEYS, KEYS.replace("first", "[*first][::-1]"))],
    wrong=[
        ("even a single one", "here = [", f"{ONE_LOSS}\n        here = ["),
        ("its dtype is float32", "(target_device)", "(target_device).float()"),
        ("the outputs have changed", "here = [", "outputs[:] = here = ["),
        ("Does each case have", "    if isinstance(first, dict):", NO_DICTS),
    ],
)

# -------------------------------------------------------------------- 03.replicate


def tensors_of(network):
    return [*network.parameters(), *network.buffers()]


@ANSWERS.right("03.replicate")
def shallow_copies_by_module(network, devices):
    replicas = []
    for device in devices:
        copies = {tensor: tensor.to(device) for tensor in tensors_of(network)}
        twins = {module: copy.copy(module) for module in network.modules()}
        for module, twin in twins.items():
            twin._modules = {name: twins.get(m) for name, m in module._modules.items()}
            twin._parameters = {k: copies.get(p) for k, p in module._parameters.items()}
            twin._buffers = {k: copies.get(b) for k, b in module._buffers.items()}
        replicas.append(twins[network])
    return replicas


@ANSWERS.right("03.replicate")
def with_torchs_hook(network, devices):
    replicas = []
    for device in (torch.device("cuda", index) for index in devices):
        copies = {p: p.view_as(p).to(device) for p in network.parameters()}
        copies |= {b: b.to(device) for b in network.buffers()}
        twins = {m: m._replicate_for_data_parallel() for m in network.modules()}
        for module, twin in twins.items():
            for name, child in module._modules.items():
                twin._modules[name] = twins.get(child)
            for name, tensor in (module._parameters | module._buffers).items():
                setattr(twin, name, copies.get(tensor))
        replicas.append(twins[network])
    return replicas


ALL_TENSORS = "chain(network.parameters(), network.buffers())"
SAVED_TENSORS = "network.state_dict(keep_vars=True).values()"
MOVED = "nn.parallel._functions.Broadcast.apply([devices[0], device], tensor)[1]"
FIRST_IS_IT = "replicas = []", "replicas = [network]", "in devices:", "in devices[1:]:"
ONE_MEMO = (
    *("replicas = []", "replicas, memo = [], {}"),
    *("network, copies", "network, memo", "copies = ", "memo |= "),
)
ANSWERS.edited(
    "03.replicate",
    right=[  # as PyTorch does it
        ("tensor.to(device)", f"{MOVED} if device != devices[0] else tensor")
    ],
    wrong=[
        ("A module of the network itself is", *FIRST_IS_IT),
        ("give it a new dict for each device", *ONE_MEMO),
        ("copy has the settings", ", copies))", ", copies).eval())"),
        ("That is a dictionary", "return replicas", "return {0: replicas}"),
        ("leaves some buffers out", ALL_TENSORS, SAVED_TENSORS),
    ],
    crashed=[("stays None", "copies))", "copies)); replicas[-1]._parameters.clear()")],
)

# --------------------------------------------------------------- 03.parallel_apply


def started_and_joined(call, n):
    threads = [threading.Thread(target=call, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(module, x, kwargs, device, wanted):
    """What a thread does in most of the answers."""
    args = x if isinstance(x, tuple) else (x,)
    with torch.set_grad_enabled(wanted), torch.cuda.device(device):
        return module(*args, **(kwargs or {}))


def calls_of(modules, inputs, kwargs_tup, devices):
    """The arguments of `run` for each module."""
    kwargs_tup = kwargs_tup or [None] * len(modules)
    each = zip(modules, inputs, kwargs_tup, devices, strict=True)
    return [(*arguments, torch.is_grad_enabled()) for arguments in each]


@ANSWERS.right("03.parallel_apply")
def as_pytorch_passes_exceptions_on(modules, inputs, kwargs_tup=None, *, devices):
    """By its ExceptionWrapper, which puts the traceback into the text."""
    results, calls = {}, calls_of(modules, inputs, kwargs_tup, devices)

    def call(i):
        try:
            results[i] = run(*calls[i])
        except Exception:
            results[i] = ExceptionWrapper(where=f"in replica {i}")

    started_and_joined(call, len(modules))
    for i in range(len(modules)):
        if isinstance(results[i], ExceptionWrapper):
            results[i].reraise()
    return [results[i] for i in range(len(modules))]


@ANSWERS.right("03.parallel_apply")
def with_a_pool(modules, inputs, kwargs_tup=None, devices=None):
    wanted = torch.is_grad_enabled()

    def call(module, x, kwargs, device):
        torch.set_grad_enabled(wanted)
        torch.cuda.set_device(device)
        return module(*(x if isinstance(x, tuple) else (x,)), **kwargs)

    each = zip(modules, inputs, kwargs_tup or itertools.repeat({}), devices)  # noqa: B905
    with concurrent.futures.ThreadPoolExecutor(len(modules)) as pool:
        calls = [pool.submit(call, *arguments) for arguments in each]
    return [one.result() for one in calls]


class Call(threading.Thread):
    def __init__(self, *arguments):
        super().__init__(daemon=True)
        self.arguments, self.output, self.error = arguments, None, None

    def run(self):
        try:
            self.output = run(*self.arguments)
        except BaseException as error:
            self.error = error


@ANSWERS.wrong(
    "03.parallel_apply", "wrong", "not run to its end when you returned or raised"
)
def joins_and_raises_in_one_loop(modules, inputs, kwargs_tup=None, *, devices):
    calls = [Call(*one) for one in calls_of(modules, inputs, kwargs_tup, devices)]
    [call.start() for call in calls]
    for call in calls:
        call.join()
        if call.error:
            raise call.error
    return [call.output for call in calls]


@ANSWERS.wrong("03.parallel_apply", "wrong", "Give each thread its number")
def by_the_variable_of_the_loop(modules, inputs, kwargs_tup=None, *, devices):
    threads = []
    for call in calls_of(modules, inputs, kwargs_tup, devices):
        threads.append(threading.Thread(target=lambda: run(*call)))  # noqa: B023
        threads[-1].start()  # at once: by chance it might be early enough
    for thread in threads:
        thread.join()
    return inputs


SET_OUTSIDE = "torch.cuda.set_device(1); thread.start()"
ANOTHER_ERROR = 'raise RuntimeError("a replica failed")'
TENSORS_ONLY = "return [*filter(torch.is_tensor, outputs)]"
ANSWERS.edited(
    "03.parallel_apply",
    wrong=[
        # Outside of the try.
        ("NameError: name 'input_s' is not", "args = inputs[i]", "args = input_s[i]"),
        ("not detached", "(*args", "(*[x.detach() for x in args]"),
        ("not moved", "**kwargs_tup[i])", "**kwargs_tup[i]).cpu()"),
        ("3 items; 4 were", "return outputs", TENSORS_ONLY),
        ("inside the threads only", "thread.start()", SET_OUTSIDE),
        ("callers catch it by its type", "raise errors[min(errors)]", ANOTHER_ERROR),
    ],
)

# ---------------------------------------------------------------- 03.data_parallel

USED = "used = device_ids[: len(parts)]"
AT_ONCE = f"""if len(device_ids) == 1:
        return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    {USED}"""
ANSWERS.edited(
    "03.data_parallel",
    wrong=[
        ("another GPU was the current one", "devices=used", "devices=range(len(used))"),
        ("but not on `output_device`", USED, AT_ONCE),
    ],
)


@ANSWERS.right("03.data_parallel")
def from_torchs_primitives(module, inputs, device_ids, output_device=None):
    output_device = device_ids[0] if output_device is None else output_device
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return parallel.gather(outputs, output_device)


@ANSWERS.right("03.data_parallel")
def one_replica_after_the_other(module, inputs, device_ids, output_device=None):
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    parts = parallel.scatter(inputs, device_ids)
    replicas = parallel.replicate(module, device_ids[: len(parts)])
    outputs = [f(*part) for f, part in zip(replicas, parts, strict=True)]
    home = device_ids[0] if output_device is None else output_device
    return parallel.gather(outputs, home)


@ANSWERS.wrong("03.data_parallel", "crashed", "returns a dictionary of tensors.")
def joined_by_hand(module, inputs, device_ids, output_device=None):
    home = device_ids[0] if output_device is None else output_device
    outputs = one_replica_after_the_other(module, inputs, device_ids, output_device)
    return torch.cat([outputs.to(f"cuda:{home}")])


# ---------------------------------------------------------------- 03.spot_the_mean


class LossInside(nn.Module):
    """What the answers have in common; its loss is that of the learner's bug."""

    reduction = "mean"

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction=self.reduction)

    def loss(self, gathered, y):
        return gathered.mean()

    def training_step(self, x, y, device_ids):
        loss = self.loss(nn.DataParallel(self, device_ids)(x, y), y)
        loss.backward()
        return loss


class LossOfEachRow(LossInside):
    reduction = "none"


@ANSWERS.right("03.spot_the_mean")
class LossesAndPredictions(LossInside):
    def forward(self, x, y):
        outputs = self.model(x)
        return F.cross_entropy(outputs, y, reduction="none"), outputs.argmax(1)

    def loss(self, gathered, y):
        self.right = (gathered[1] == y).sum()
        return gathered[0].mean()


@ANSWERS.right("03.spot_the_mean")
class SumsDividedOnce(LossInside):
    reduction = "sum"

    def loss(self, gathered, y):
        return gathered.sum() / len(y)


@ANSWERS.right("03.spot_the_mean")
class GradientsOfEachRow(LossOfEachRow):
    def training_step(self, x, y, device_ids):
        losses = nn.DataParallel(self, device_ids)(x, y)
        losses.backward(torch.full_like(losses, 1 / losses.numel()))
        return losses.detach().mean().item()


@ANSWERS.wrong("03.spot_the_mean", "crashed", "Pass it by its position")
class ANumberByName(LossInside):
    """PyTorch gives it to all GPUs, also to those that get no rows."""

    def forward(self, x, y, rows):
        return (super().forward(x, y) * len(x) / rows)[None]

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y, rows=len(x)).sum()
        loss.backward()
        return loss


@ANSWERS.right("03.spot_the_mean")
class ANumberByItsPosition(ANumberByName):
    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y, len(x)).sum()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "it leaves something behind")
class CountsOfAllSteps(LossInside):
    reduction, counts = "sum", []  # replicas have the list itself

    def forward(self, x, y):
        self.counts.append(len(x))
        return super().forward(x, y)

    def loss(self, gathered, y):
        return gathered.sum() / sum(self.counts)


# What nn.DataParallel says of a replica begins with its own traceback.
@ANSWERS.wrong("03.spot_the_mean", "crashed", "in forward: return {")
class AKeyThatIsNotThere(LossInside):
    def forward(self, x, y):
        return {"losses": super().forward(x, y)}["loss"]


test_wrong, test_right = ANSWERS.tests()
