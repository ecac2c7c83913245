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

from tests.answers import Answers, Edited

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


@ANSWERS.right("03.scatter")
def scatter_by_slices(inputs, target_gpus, dim=0):
    """Another way round: what part i of anything is."""
    n, counts = len(target_gpus), [len(target_gpus)]

    def part(value, i):
        if isinstance(value, torch.Tensor):
            rows = -(-value.size(dim) // n)
            counts.append(-(-value.size(dim) // rows))
            index = [slice(None)] * value.dim()
            index[dim] = slice(i * rows, (i + 1) * rows)
            return value[tuple(index)].to(f"cuda:{target_gpus[i]}")
        if isinstance(value, dict):
            return {key: part(item, i) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(part(item, i) for item in value)
        return value

    first = part(inputs, 0)
    return (first, *(part(inputs, i) for i in range(1, min(counts))))


CHUNK = "inputs.chunk(len(target_gpus), dim)"
ANSWERS.right("03.scatter")(Edited(CHUNK, f"inputs.to(target_gpus[0]){CHUNK[6:]}"))
ANSWERS.right("03.scatter")(
    Edited(CHUNK, "inputs.split(-(-inputs.shape[dim] // len(target_gpus)), dim)")
)
ANSWERS.wrong("03.scatter", "wrong", "each GPU was sent all rows")(
    Edited(
        "[p.to(gpu) for", f"[{CHUNK[:6]}.to(gpu){CHUNK[6:]}[target_gpus.index(gpu)] for"
    )
)

# The order of the keys in a dict does not count.
PAIRS = "zip(inputs, part, strict=True)"
ANSWERS.right("03.scatter")(Edited(PAIRS, f"[*{PAIRS}][::-1]"))
for says, old, new in (
    ("is repeated for every GPU", " and inputs:", ":"),
    ("is repeated for every GPU", "[inputs] * len(target_gpus)", "[inputs]"),
    ("its dtype is float32", "p.to(gpu)", "p.to(gpu).float()"),
):
    ANSWERS.wrong("03.scatter", "wrong", says)(Edited(old, new))

# ----------------------------------------------------------------------- 03.gather


@ANSWERS.right("03.gather")
def one_after_the_other(outputs, target_device, dim=0):
    """With the numbers as vectors of one element."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        joined = torch.empty(0, device=f"cuda:{target_device}")
        for i, output in enumerate(outputs):
            output = output if output.dim() else output.reshape(1)
            output = output.to(target_device)
            joined = torch.cat((joined, output), dim) if i else output
        return joined
    if isinstance(first, dict):
        values = [list(output.values()) for output in outputs]
        joined = one_after_the_other(values, target_device, dim)
        return dict(zip(first, joined, strict=True))
    if not isinstance(first, (list, tuple)):
        return first
    items = ([output[i] for output in outputs] for i in range(len(first)))
    joined = [one_after_the_other(item, target_device, dim) for item in items]
    return joined if isinstance(first, list) else tuple(joined)


@ANSWERS.right("03.gather")
def leaf_by_leaf(outputs, target_device, dim=0):
    def join(*leaves):
        if leaves[0] is None:
            return None
        leaves = [torch.atleast_1d(leaf).cuda(target_device) for leaf in leaves]
        return torch.concat(leaves, axis=dim)

    return tree_map(join, *outputs)


IN_ORDER, ELSEWHERE = (
    "for key in first}\n    groups",
    "for key in [*first][::-1]}\n    groups",
)
ANSWERS.right("03.gather")(Edited(IN_ORDER, ELSEWHERE))
ONE_LOSS = (
    "if first.dim() == 0 and len(outputs) == 1:\n            return first\n        "
)
ANSWERS.wrong("03.gather", "wrong", "become a vector, even a single one")(
    Edited("here = [", f"{ONE_LOSS}here = [")
)
for says, old, new in (
    ("its dtype is float32", "(target_device)", "(target_device).float()"),
    ("the outputs have changed", "here = [", "outputs[:] = here = ["),
):
    ANSWERS.wrong("03.gather", "wrong", says)(Edited(old, new))

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


@ANSWERS.right("03.replicate")
def by_all_the_names(network, devices):
    def replica_on(device):
        replica, copies = copy.deepcopy(network), {}
        for kind in ("parameters", "buffers"):
            named = getattr(network, f"named_{kind}")(remove_duplicate=False)
            for name, tensor in named:
                owner, _, leaf = name.rpartition(".")
                if tensor not in copies:
                    copies[tensor] = tensor.cuda(device)
                own = getattr(replica.get_submodule(owner), f"_{kind}")
                own[leaf] = copies[tensor]
        return replica

    return list(map(replica_on, devices))


MOVED = "nn.parallel._functions.Broadcast.apply([devices[0], device], tensor)[1]"
ANSWERS.right("03.replicate")(  # as PyTorch does it
    Edited("tensor.to(device)", f"{MOVED} if device != devices[0] else tensor")
)
ANSWERS.wrong("03.replicate", "wrong", "A module of the network itself is")(
    Edited("replicas = []", "replicas = [network]", "in devices:", "in devices[1:]:")
)
ANSWERS.wrong("03.replicate", "wrong", "give it a new dict for each device")(
    Edited(
        "replicas = []",
        "replicas, memo = [], {}",
        "network, copies",
        "network, memo",
        "copies = ",
        "memo |= ",
    )
)
for status, says, old, new in (
    ("wrong", "copy has the settings", ", copies))", ", copies).eval())"),
    ("wrong", "That is a dictionary", "return replicas", "return {0: replicas}"),
    ("crashed", "stays None", "copies))", "copies)); replicas[-1]._parameters.clear()"),
):
    ANSWERS.wrong("03.replicate", status, says)(Edited(old, new))

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


@ANSWERS.right("03.parallel_apply")
def with_a_class_of_threads(modules, inputs, kwargs_tup=None, *, devices):
    calls = [Call(*one) for one in calls_of(modules, inputs, kwargs_tup, devices)]
    [call.start() for call in calls]
    [call.join() for call in calls]
    for call in calls:
        if call.error is not None:
            raise call.error
    return [call.output for call in calls]


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


ANSWERS.wrong("03.parallel_apply", "wrong", "NameError: name 'input_s' is not")(
    Edited("args = inputs[i]", "args = input_s[i]")  # outside of the try
)
for says, old, new in (
    ("not detached", "(*args", "(*[x.detach() for x in args]"),
    ("not moved", "**kwargs_tup[i])", "**kwargs_tup[i]).cpu()"),
    ("3 items; 4 were", "return outputs", "return [*filter(torch.is_tensor, outputs)]"),
):
    ANSWERS.wrong("03.parallel_apply", "wrong", says)(Edited(old, new))

# ---------------------------------------------------------------- 03.data_parallel


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


@ANSWERS.right("03.data_parallel")
def without_any_primitive(module, inputs, device_ids, output_device=None):
    target = output_device if output_device is not None else device_ids[0]
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    outputs, pieces = [], [x.chunk(len(device_ids)) for x in inputs]
    for gpu, *part in zip(device_ids, *pieces):  # noqa: B905
        tensors = module.state_dict(keep_vars=True).items()
        weights = {name: tensor.to(gpu) for name, tensor in tensors}
        args = tuple(x.to(gpu) for x in part)
        outputs.append(torch.func.functional_call(module, weights, args))
    return tree_map(lambda *o: torch.cat([one.to(target) for one in o]), *outputs)


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
class Weighted(LossInside):
    """Means, each with the number of its rows."""

    def forward(self, x, y):
        return super().forward(x, y).reshape(1), torch.tensor([len(y)], device=y.device)

    def loss(self, gathered, y):
        means, rows = gathered
        return (means * rows).sum() / rows.sum()


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


@ANSWERS.wrong(
    "03.spot_the_mean", "wrong", "A step leaves nothing behind for the next one"
)
class CountsOfAllSteps(LossInside):
    reduction, counts = "sum", []  # replicas have the list itself

    def forward(self, x, y):
        self.counts.append(len(x))
        return super().forward(x, y)

    def loss(self, gathered, y):
        return gathered.sum() / sum(self.counts)


@ANSWERS.right("03.spot_the_mean")
class CountsOfOneStep(CountsOfAllSteps):
    def training_step(self, x, y, device_ids):
        self.counts.clear()
        return super().training_step(x, y, device_ids)


# What nn.DataParallel says of a replica begins with its own traceback.
@ANSWERS.wrong("03.spot_the_mean", "crashed", "in forward: return {")
class AKeyThatIsNotThere(LossInside):
    def forward(self, x, y):
        return {"losses": super().forward(x, y)}["loss"]


# -------------------------------------------------------------- 03.predict_traffic

ANSWERS.wrong("03.predict_traffic", "wrong", "That is the forward.")(700)
for number in (1400, 1400.0, torch.tensor(1400), "1400 MB"):
    ANSWERS.right("03.predict_traffic")(number)


test_wrong, test_right = ANSWERS.tests()
