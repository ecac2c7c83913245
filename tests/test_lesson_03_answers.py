"""Lesson 03: different right answers, and odd wrong ones."""

import concurrent.futures
import copy
import io
import itertools
import multiprocessing.pool
import pickle
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


def with_pieces_from(cut):
    """A scatter in which `cut(tensor, target_gpus, dim)` makes the pieces."""

    def scatter(inputs, target_gpus, dim=0):
        if isinstance(inputs, torch.Tensor):
            return cut(inputs, target_gpus, dim)
        if isinstance(inputs, (tuple, list)) and inputs:
            items = [scatter(item, target_gpus, dim) for item in inputs]
            return [type(inputs)(part) for part in zip(*items, strict=False)]
        if isinstance(inputs, dict) and inputs:
            parts = scatter(tuple(inputs.values()), target_gpus, dim)
            return [dict(zip(inputs, part, strict=True)) for part in parts]
        return [inputs] * len(target_gpus)

    scatter.__name__ = cut.__name__
    return scatter


@ANSWERS.right("03.scatter")
@with_pieces_from
def scatter_by_recursion(tensor, target_gpus, dim):
    pieces = tensor.chunk(len(target_gpus), dim)
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=False)]


@ANSWERS.right("03.scatter")
@with_pieces_from
def all_to_the_first_gpu_and_on_from_there(tensor, target_gpus, dim):
    pieces = tensor.to(target_gpus[0]).chunk(len(target_gpus), dim)
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=False)]


@ANSWERS.right("03.scatter")
@with_pieces_from
def with_split(tensor, target_gpus, dim):
    rows = (tensor.shape[dim] + len(target_gpus) - 1) // len(target_gpus)
    pieces = enumerate(tensor.split(rows, dim))
    return [piece.to(f"cuda:{target_gpus[i]}") for i, piece in pieces]


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
def scatter_as_a_generator(inputs, target_gpus, dim=0):
    yield from scatter_by_recursion(inputs, target_gpus, dim)


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


@ANSWERS.wrong("03.scatter", "wrong", "each GPU was sent all rows")
@with_pieces_from
def copied_and_then_cut(tensor, target_gpus, dim):
    n = len(target_gpus)
    pieces = range(len(tensor.chunk(n, dim)))
    return [tensor.to(target_gpus[i]).chunk(n, dim)[i] for i in pieces]


@ANSWERS.wrong("03.scatter", "wrong", "something was put into a list or dict")
def writes_into_dicts(inputs, target_gpus, dim=0):
    if isinstance(inputs, dict):
        for key in inputs:
            inputs[key] = scatter_by_recursion(inputs[key], target_gpus, dim)
        n = min(map(len, inputs.values()), default=len(target_gpus))
        return [{key: inputs[key][i] for key in inputs} for i in range(n)]
    return scatter_by_recursion(inputs, target_gpus, dim)


# ----------------------------------------------------------------------- 03.gather


@ANSWERS.right("03.gather")
def gather_by_recursion(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        here = [output.to(target_device) for output in outputs]
        return torch.stack(here) if first.dim() == 0 else torch.cat(here, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        groups = {key: [output[key] for output in outputs] for key in first}
        return {k: gather_by_recursion(groups[k], target_device, dim) for k in groups}
    groups = zip(*outputs, strict=True)
    return type(first)(gather_by_recursion(g, target_device, dim) for g in groups)


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


@ANSWERS.right("03.gather")
def case_by_case(outputs, target_device, dim=0):
    match outputs[0]:
        case None:
            return None
        case torch.Tensor(ndim=0):
            return torch.cat([loss[None].to(target_device) for loss in outputs])
        case torch.Tensor():
            return torch.cat([o.to(f"cuda:{target_device}") for o in outputs], dim)
        case dict():
            keys, values = list(outputs[0]), [[*o.values()] for o in outputs]
            return dict(zip(keys, case_by_case(values, target_device, dim)))  # noqa: B905
        case first:
            groups = map(list, zip(*outputs, strict=True))
            return type(first)(case_by_case(g, target_device, dim) for g in groups)


@ANSWERS.wrong("03.gather", "wrong", "a vector with one number for each GPU")
def one_loss_as_it_is(outputs, target_device, dim=0):
    if len(outputs) == 1:
        return outputs[0].to(target_device)
    return gather_by_recursion(outputs, target_device, dim)


# -------------------------------------------------------------------- 03.replicate


def tensors_of(network):
    return [*network.parameters(), *network.buffers()]


@ANSWERS.right("03.replicate")
def deepcopies_with_memo(network, devices):
    replicas = []
    for device in devices:
        copies = {id(tensor): tensor.to(device) for tensor in tensors_of(network)}
        replicas.append(copy.deepcopy(network, copies))
    return replicas


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


@ANSWERS.right("03.replicate")
def pickled_without_its_tensors(network, devices):
    tensors, file = tensors_of(network), io.BytesIO()
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda value: places.get(id(value))
    pickler.dump(network)

    def read(device):
        copies = [tensor.to(device) for tensor in tensors]
        unpickler = pickle.Unpickler(io.BytesIO(file.getvalue()))
        unpickler.persistent_load = copies.__getitem__
        return unpickler.load()

    return tuple(read(device) for device in devices)


@ANSWERS.wrong("03.replicate", "wrong", "A module of the network stands in a replica")
def the_network_itself(network, devices):
    return [network, *deepcopies_with_memo(network, devices[1:])]


@ANSWERS.wrong("03.replicate", "wrong", "give it a new dict for each device")
def one_memo_for_all_devices(network, devices):
    memo, replicas = {}, []
    for device in devices:
        memo |= {id(tensor): tensor.to(device) for tensor in tensors_of(network)}
        replicas.append(copy.deepcopy(network, memo))
    return replicas


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
def with_threads(modules, inputs, kwargs_tup=None, devices=None):
    outputs, errors = {}, {}
    calls = calls_of(modules, inputs, kwargs_tup, devices)

    def call(i):
        try:
            outputs[i] = run(*calls[i])
        except Exception as error:
            errors[i] = error

    started_and_joined(call, len(modules))
    if errors:
        raise errors[min(errors)]
    return [outputs[i] for i in range(len(modules))]


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


@ANSWERS.right("03.parallel_apply")
def with_a_pool_of_idle_threads(modules, inputs, kwargs_tup=None, devices=None):
    """Its threads wait for more work, and end a moment after the `with`."""
    calls = calls_of(modules, inputs, kwargs_tup, devices)
    with multiprocessing.pool.ThreadPool(len(modules)) as pool:
        results = [pool.apply_async(run, arguments) for arguments in calls]
        for result in results:
            result.wait()
        return [result.get() for result in results]


@ANSWERS.right("03.parallel_apply")
def mapped_over_a_pool(modules, inputs, kwargs_tup=None, *, devices):
    calls = calls_of(modules, inputs, kwargs_tup, devices)
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(modules)) as pool:
        return list(pool.map(run, *zip(*calls, strict=True)))


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


@ANSWERS.wrong("03.parallel_apply", "wrong", "returned or raised while threads were")
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


@ANSWERS.wrong("03.parallel_apply", "crashed", "NameError: name 'input_s' is not")
def a_typo_in_the_thread(modules, inputs, kwargs_tup=None, *, devices):
    started_and_joined(lambda i: modules[i](input_s[i]), len(modules))  # noqa: F821
    return inputs


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
def from_own_primitives(module, inputs, device_ids, output_device=None):
    parts = scatter_by_recursion(inputs, device_ids)
    used = [gpu for gpu, _ in zip(device_ids, parts, strict=False)]
    outputs = with_threads(deepcopies_with_memo(module, used), parts, None, used)
    home = used[0] if output_device is None else output_device
    return gather_by_recursion(outputs, home)


@ANSWERS.right("03.data_parallel")
def with_a_single_gpu_apart(module, inputs, device_ids, output_device=None):
    if len(device_ids) == 1:
        return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    parts = parallel.scatter(inputs, device_ids)
    replicas = parallel.replicate(module, device_ids)[: len(parts)]
    outputs = parallel.parallel_apply(replicas, parts, devices=device_ids[: len(parts)])
    home = device_ids[0] if output_device is None else output_device
    return parallel.gather(outputs, home)


@ANSWERS.right("03.data_parallel")
def with_scatter_kwargs(module, inputs, device_ids, output_device=None):
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    args, kwargs = parallel.scatter_gather.scatter_kwargs(inputs, {}, device_ids)
    copies = parallel.replicate(module, device_ids[: len(args)])
    outputs = parallel.parallel_apply(copies, args, kwargs, device_ids[: len(args)])
    return parallel.gather(outputs, [output_device, *device_ids][output_device is None])


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


@ANSWERS.right("03.spot_the_mean")
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
class ByHand(LossInside):
    def forward(self, x, y):
        return -self.model(x).log_softmax(dim=1)[torch.arange(len(y)), y]


@ANSWERS.right("03.spot_the_mean")
class RunsTheModelTwice(LossOfEachRow):
    def forward(self, x, y):
        return super().forward(x, y), super().forward(x, y).detach()

    def loss(self, gathered, y):
        return gathered[0].mean()


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


@ANSWERS.wrong("03.spot_the_mean", "wrong", "keep from one step to the next?")
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
@ANSWERS.wrong("03.spot_the_mean", "crashed", "It raised KeyError: 'loss' line")
class AKeyThatIsNotThere(LossInside):
    def forward(self, x, y):
        return {"losses": super().forward(x, y)}["loss"]


# -------------------------------------------------------------- 03.predict_traffic

ANSWERS.wrong("03.predict_traffic", "wrong", "That is the way out.")(700)
for number in (1400, 1400.0, torch.tensor(1400), "1400 MB"):
    ANSWERS.right("03.predict_traffic")(number)


test_wrong, test_right = ANSWERS.tests()
