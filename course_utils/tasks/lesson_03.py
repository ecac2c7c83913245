"""Lesson 03, data-parallel primitives: the tasks of its exercise."""

import contextlib
import functools
import operator
import re
import threading
import time
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from course_utils.questions.lesson_03 import PREDICT_TRAFFIC
from course_utils.ranks.report import learner_lines
from course_utils.tasks.compare import plain
from course_utils.tasks.devices import on_gpus
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.task import Miss, Task

in_eighths = functools.partial(linear, divided_by=8)

# ------------------------------------------------------------- what several tasks need


def tensors_in(value):
    """The tensors in nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def form(value):
    """What is nested in what: "('tensor', {'a': 'tensor'})"."""
    return str(tree_map_only(torch.Tensor, lambda _: "tensor", plain(value)))


def devices_of(value):
    return sorted({str(tensor.device) for tensor in tensors_in(value)})


def listed(result):
    """A generator's items: it may make what a list is asked for."""
    return list(result) if hasattr(result, "__next__") else result


def wanting(tensor):
    """A copy that wants a gradient, if it is one of floats."""
    return tensor.clone().requires_grad_(tensor.is_floating_point())


def gradients(outputs, tensors):
    """What arrives at the tensors if each element of the outputs has its own weight."""
    weights = (1 + torch.arange(o.numel()).reshape(o.shape) for o in outputs)
    total = sum((o.cpu() * w).sum() for o, w in zip(outputs, weights, strict=True))
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    return [tensor.grad for tensor in tensors]


CUT_OFF = (
    "The values are right, but the gradients do not find their way back. "
    "`.to(device)`, `chunk`, `cat` and `stack` can be differentiated. `detach`, "
    "`.data`, `.item()`, `torch.tensor(...)` and `no_grad` cut the graph."
)

# ----------------------------------------------------------------------------- scatter


@on_gpus(4)
def observe_parts(answer, gpus, inputs, target_gpus, dim=0):
    inputs = tree_map_only(torch.Tensor, wanting, inputs)
    tensors, before = tensors_in(inputs), form(inputs)
    parts = listed(answer(inputs, target_gpus, dim))
    if not isinstance(parts, (list, tuple)):
        return parts
    pieces, shapes = tensors_in(parts), [tensor.shape for tensor in tensors]
    kept = map(operator.is_, tensors_in(inputs), tensors)
    sent = sum(copy.bytes for copy in gpus.transfers)
    return {
        "tensors that came whole": sum(piece.shape in shapes for piece in pieces),
        "pieces without rows": sum(piece.numel() == 0 for piece in pieces),
        "parts": parts,
        "form of part 0": form(parts[0]) if parts else None,
        "devices": list(map(devices_of, parts)),
        "the inputs are as they were": form(inputs) == before and all(kept),
        # To one GPU first, and from there to the others, is less than twice as much.
        "only pieces were sent": sent <= 2 * sum(tensor.nbytes for tensor in tensors),
        "gradients": gradients(pieces, tensors),
    }


ROWS = [whole_numbers((rows, 2), rank=rows) for rows in range(31)]
WIDE = ROWS[6].T.contiguous()
CUBE = whole_numbers((2, 3, 6), rank=31)
WORDS = {"name": "a batch", "scale": 3}
FEWER = (
    "There are fewer pieces than GPUs here: 9 rows on 4 GPUs are 3 + 3 + 3. Leave the "
    "other GPUs out."
)
DIM_LOST = (
    "Inside a tuple, list or dict another dimension is used. Pass `dim` on when the "
    "function calls itself."
)

SCATTER = Task(
    id="03.scatter",
    title="Scatter",
    stars=2,
    where="here",
    observe=observe_parts,
    cases=(
        (ROWS[6], [0, 1]),
        (ROWS[30], [0, 1, 2]),
        (ROWS[9], [0, 1, 2, 3]),
        (ROWS[2], [0, 1, 2, 3]),
        (ROWS[5], [0]),
        (CUBE, [0, 1, 2], 1),
        (ROWS[5], [2, 0]),
        ((ROWS[6], ROWS[6] + 1), [0, 1, 2]),
        ([ROWS[8], ROWS[8][:, 0]], [0, 1, 2, 3]),
        ({"x": ROWS[9], "y": ROWS[9] * 2}, [0, 1]),
        ((ROWS[6], {"mask": [ROWS[6], None], **WORDS}), [0, 1]),
        (("text", 7), [0, 1, 2]),
        ((), [0, 1]),
        ([], [0, 1]),
        ({}, [0, 1]),
        ((ROWS[4], [], {}), [1, 3]),
        ((WIDE, {"m": [WIDE]}), [0, 1, 2], -1),
        (CUBE, [1, 0], 2),
    ),
    forbids=(
        "torch.nn.parallel.scatter_gather.scatter",
        "torch.nn.parallel.scatter_gather.scatter_kwargs",
        "torch.nn.parallel.comm.scatter",
    ),
    instead="`torch.chunk` cuts, and `.to(device)` copies.",
    misses=(
        Miss(
            "inputs.chunk",
            "inputs.tensor_split",
            "You cut as evenly as possible: 9 rows on 4 GPUs are 3 + 2 + 2 + 2. "
            "PyTorch gives each GPU ceil(rows / GPUs) rows while there are any: 3 + 3 "
            "+ 3. `torch.chunk` does just that.",
        ),
        Miss(
            "inputs.chunk",
            "inputs.split",
            "`split` takes how many rows a piece has, `chunk` how many pieces there "
            "are.",
        ),
        Miss(
            "inputs.chunk(len(target_gpus), dim)",
            "inputs.chunk(len(target_gpus))",
            "You cut along dimension 0. The third argument says which dimension.",
        ),
        Miss("scatter(item, target_gpus, dim)", "scatter(item, target_gpus)", DIM_LOST),
        Miss(".values()), target_gpus, dim)", ".values()), target_gpus)", DIM_LOST),
        Miss(
            "[type(inputs)(part) for part in zip(*items, strict=False)]",
            "items",
            "scatter returns a part for each GPU, and each part has the form of the "
            "inputs: of (x, y) on two GPUs the parts are (x0, y0) and (x1, y1). "
            "Scatter each item, then put together what belongs to one GPU: "
            "`zip(*...)`.",
        ),
        Miss(
            " and inputs:",
            ":",
            "An empty tuple, list or dict has no items to scatter, so `zip` gives "
            "nothing. Like all that holds no tensor, it goes to every GPU as it is.",
        ),
        Miss(
            "return [inputs] * len(target_gpus)",
            "return [inputs]",
            "What is no tensor goes to every GPU: repeat it, once for each of "
            "`target_gpus`. Where it is there only once, `zip` ends after one part.",
        ),
        Miss(
            "dict(zip(inputs, part, strict=True)) for part in parts",
            "dict(zip(inputs, parts[-1], strict=True)) for part in parts",
            "All GPUs have the part of the last one. Are all parts one and the same "
            "dict or list? `[{}] * n` is one dict, n times.",
        ),
    ),
    because={
        "whole": "Nothing was cut: each part has all the rows. Are tensors, tuples, "
        "lists and dicts all handled? (`values()` of a dict is none of them.)",
        "without rows": "A GPU got an empty piece: 9 rows on 4 GPUs are 3 + 3 + 3, and "
        "then no rows are left. Where that is so, there is no part.",
        "form": "Each part must have the form of the inputs: a tuple for a tuple, a "
        "list for a list, a dict with the same keys for a dict.",
        "devices": "The rows are right, but on other devices: part i belongs on device "
        "`target_gpus[i]`, which need not be cuda:i.",
        "as they were": "The parts are right, but something was put into a list or "
        "dict that was given. Make new ones.",
        "only pieces": "The parts are right, but each GPU was sent all rows, and cut "
        "out its own. Cut first, and copy only the piece.",
        "gradients": CUT_OFF,
    },
    errors={
        "zip() argument": FEWER,
        "index out of range": FEWER,
        "RecursionError": "It calls itself without end. Does it take a text apart? A "
        "text consists of texts. Only tuples and lists are for `for item in inputs`.",
        "'NoneType' object": "Something is None: is it an item of the inputs, or what "
        "`scatter` returned for an item? What is no tensor, tuple, list or dict goes "
        "into a list, too: the thing itself, once for each GPU.",
        "object has no attribute": "Only tensors can be cut and moved. Ask "
        "`isinstance(inputs, torch.Tensor)` first.",
    },
    otherwise="Each GPU gets ceil(rows / GPUs) rows that follow each other, while "
    "there are any. What holds no tensor (a text, None, an empty list) goes to every "
    "GPU as it is.",
    hints=(
        "Begin with a single tensor: cut it, and copy each piece to its device. Then "
        "let the function call itself for what is inside a tuple, list or dict.",
        "For a tuple (x, y), scatter x and y, each into one piece for each GPU. Then "
        "`zip(*[pieces_of_x, pieces_of_y])` pairs what belongs to one GPU. Whatever is "
        "neither a tensor nor a container is repeated.",
        "Three cases and a rest:\n"
        "  if isinstance(inputs, torch.Tensor):\n"
        "      pieces = inputs.chunk(len(target_gpus), dim)\n"
        "      return [piece.to(...) for piece, gpu in zip(pieces, target_gpus)]\n"
        "  if isinstance(inputs, (tuple, list)) and inputs:\n"
        "      parts = zip(*[scatter(item, ...) for item in inputs])\n"
        "      return [type(inputs)(part) for part in parts]\n"
        "  if isinstance(inputs, dict) and inputs:\n"
        "      ...  # the values like a tuple, then dict(zip(inputs, part))\n"
        "  return [inputs] * len(target_gpus)",
    ),
)

# ------------------------------------------------------------------------------ gather


@on_gpus(4)
def observe_joined(answer, gpus, outputs, target, dim=0):
    there = [
        tree_map_only(torch.Tensor, lambda t, i=i: wanting(t.to((i + 1) % 4)), output)
        for i, output in enumerate(outputs)
    ]
    joined = answer(there, target, dim)
    if joined is None and outputs[0] is not None:
        return None
    tensors = tensors_in(joined)
    return {
        "form": form(joined),
        "dimensions of the tensors": [tensor.dim() for tensor in tensors],
        "joined": joined,
        "devices": devices_of(joined),
        "gradients": gradients(tensors, tensors_in(there)),
    }


def pieces_of(*rows):
    """One tensor for each device, with that many rows."""
    return [whole_numbers((count, 2), rank=i) for i, count in enumerate(rows)]


LOSSES = [torch.tensor(value) for value in (1.0, 2.5, 4.0)]
CAT = "torch.cat(here, dim)"
NESTED = (
    "The outputs may be tuples, lists and dicts of tensors, or None. Look at the first "
    "output to see which, and let the function call itself for what is inside."
)
ADDED = (
    "The outputs belong to different rows: they are joined, not added and not averaged."
)

GATHER = Task(
    id="03.gather",
    title="Gather",
    stars=1,
    where="here",
    observe=observe_joined,
    cases=(
        (pieces_of(2, 2), 0),
        (pieces_of(3, 3, 1), 0),
        (pieces_of(2, 2, 2, 2), 2),
        (pieces_of(4), 2),
        ([CUBE, CUBE + 1, CUBE + 2], 1, 2),
        ([(a, a * 2) for a in pieces_of(2, 1)], 0),
        ([[a, None] for a in pieces_of(1, 1, 1)], 0),
        ([{"x": a, "deep": (a + 1, [a.long()])} for a in pieces_of(2, 2, 1)], 1),
        (LOSSES, 0),
        (LOSSES[:1], 2),
        ([{"loss": loss, "n": loss.reshape(1) * 2} for loss in LOSSES], 0),
        ([None, None], 0),
        ([{"x": a, "deep": (a + 1,)} for a in (ROWS[2], ROWS[2] * 2)], 0, -1),
    ),
    forbids=(
        "torch.nn.parallel.scatter_gather.gather",
        "torch.nn.parallel.comm.gather",
    ),
    instead="`.to(device)` copies, and `torch.cat` joins.",
    misses=(
        Miss(
            CAT,
            "torch.cat(here[::-1], dim)",
            "The pieces are joined in the reverse order. The rows must come out in the "
            "order of the GPUs, which is that of the batch.",
        ),
        Miss(
            CAT,
            "torch.cat(here)",
            "You joined along dimension 0. The third argument says which one.",
        ),
        Miss(CAT, "sum(here)", ADDED),
        Miss(CAT, "sum(here) / len(here)", ADDED),
        Miss(
            "(groups[key], target_device, dim)",
            "(groups[key], target_device)",
            DIM_LOST,
        ),
        Miss("(group, target_device, dim)", "(group, target_device)", DIM_LOST),
    ),
    because={
        "form": "The result must have the form of one output: a tuple for tuples, a "
        "list for lists, a dict with the same keys for dicts, None for None.",
        "dimensions": "Rows are joined along a dimension that is there, by torch.cat. "
        "Losses have none: return all of them, as a vector with one number for each "
        "GPU, by torch.stack. The caller decides what to make of them.",
        "devices": "The values are right, but not all on `target_device`. Is it passed "
        "on when the function calls itself?",
        "gradients": CUT_OFF,
    },
    errors={
        "zero-dimensional tensor": "A loss has no dimension along which torch.cat "
        "could join it. Join such tensors to a vector: `torch.stack`.",
        "Expected all tensors to be on the same device": "torch.cat cannot join "
        "tensors of different devices. Copy each of them to the target device first. "
        "(Output i need not be on cuda:i.)",
        "must be Tensor": NESTED,
        "object has no attribute": NESTED,
        "'NoneType' object": NESTED,
        "dictionary update sequence": NESTED,  # dict(...) of what it found in dicts
    },
    otherwise="Copy the outputs to the target device, and join their rows in the order "
    "of the GPUs.",
    hints=(
        "Two steps: all tensors must be on one device before they can be joined.",
        "Look at the first output: is it a tensor, None, a dict, or a list or tuple? "
        "For the last two, gather the first items of all outputs, then the second "
        "ones: `zip(*outputs)` gives these groups.",
        "Four cases:\n"
        "  first = outputs[0]\n"
        "  if isinstance(first, torch.Tensor):\n"
        "      here = [output.to(...) for output in outputs]\n"
        "      # numbers (first.dim() == 0): torch.stack, else torch.cat\n"
        "  if first is None: ...\n"
        "  if isinstance(first, dict):\n"
        "      return {key: gather([o[key] for o in outputs], ...) for key in first}\n"
        "  return type(first)(gather(group, ...) for group in zip(*outputs))",
    ),
)

# --------------------------------------------------------------------------- replicate

PLAIN, BUFFERS = "a network of linear layers", "a network with buffers"
SHARED = "a network with shared weights"


class Network(nn.Module):
    """What the check replicates: weights used twice, a frozen one, buffers."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = (in_eighths(3, 3, seed) for seed in (1, 2))
        self.twice = nn.Sequential(in_eighths(3, 3, seed=3))
        self.frozen = in_eighths(3, 3, seed=4).requires_grad_(kind != SHARED)
        self.again = None
        if kind == SHARED:
            self.last.weight, self.again = self.first.weight, self.twice
        for module, name, value in (
            (self, "scale", torch.tensor(0.5)),
            (self, "rows", torch.tensor(0)),
            (self.twice[0], "factor", torch.tensor(2.0)),
        ):
            module.register_buffer(name, None if kind == PLAIN else value)

    def forward(self, x):
        y = self.last(self.twice(self.first(x)))
        y = y if self.again is None else self.again(y)
        if self.rows is not None:
            self.rows += len(x)
            y = y * self.scale * self.twice[0].factor
        return self.frozen(y)

    def tensors(self):
        """Also where they are attributes only, as in PyTorch's replicas."""
        layers = self.first, self.last, self.twice[0], self.frozen
        weights = [(layer.weight, layer.bias) for layer in layers]
        return tensors_in([weights, self.scale, self.rows, self.twice[0].factor])


@on_gpus(4)
def observe_replicas(answer, gpus, kind, devices):
    network = Network(kind).to(f"cuda:{devices[0]}").train(kind != PLAIN)
    tensors, modules = network.tensors(), set(network.modules())
    replicas = listed(answer(network, devices))
    if not isinstance(replicas, (list, tuple)):
        return replicas
    seen = {
        "the network has its own tensors": all(
            map(operator.is_, network.tensors(), tensors)
        ),
        "device of the network": devices_of(network.tensors()),
        "different replicas": len(set(map(id, replicas))),
        "of its class": sum(isinstance(replica, Network) for replica in replicas),
    }
    if seen["of its class"] < len(replicas):
        return seen
    seen |= {
        "devices": [devices_of(replica.tensors()) for replica in replicas],
        "modules of the network in them": [
            len(modules.intersection(replica.modules())) for replica in replicas
        ],
        "training modes": [one.training for one in (network, *replicas)],
    }
    if seen["devices"] != [[f"cuda:{device}"] for device in devices]:
        return seen  # running them would only raise an error
    outputs = [
        replica(whole_numbers((i + 1, 3), i).to(device))
        for i, (device, replica) in enumerate(zip(devices, replicas, strict=True))
    ]
    arrived = gradients(outputs, list(network.parameters()))
    return seen | {
        "last.weight is first.weight, again is twice": [
            (one.last.weight is one.first.weight, one.again is one.twice)
            for one in replicas
        ],
        "outputs": outputs,
        "parameters that got a gradient": sum(grad is not None for grad in arrived),
        "gradients": arrived,
        "rows counted in the network's buffer": network.rows,
    }


CHAIN = "chain(network.parameters(), network.buffers())"
COPIES = "        copies = {id(tensor): tensor.to(device) for tensor in tensors}"
ON_ITS_DEVICE = (
    "Replica i must be a module like the network, with all its weights and buffers on "
    "`devices[i]`."
)

REPLICATE = Task(
    id="03.replicate",
    title="Replicate",
    stars=3,
    where="here",
    observe=observe_replicas,
    cases=(
        (PLAIN, [0, 1]),
        (BUFFERS, [0, 1, 2]),
        (SHARED, [0, 1]),
        (SHARED, [0, 1, 2, 3]),
        (PLAIN, [0]),
        (BUFFERS, [2, 0]),
        (PLAIN, [1, 3]),
    ),
    forbids=(
        "torch.nn.parallel.replicate.replicate",
        "torch.nn.parallel.comm.broadcast_coalesced",
    ),
    instead="Copy the tensors with `.to(device)`.",
    misses=(
        Miss(
            CHAIN,
            "network.state_dict().values()",
            f"{ON_ITS_DEVICE} (The keys of deepcopy's dict are the ids of the "
            "network's own tensors. `state_dict()` makes other objects.)",
        ),
        Miss(
            CHAIN,
            "network.parameters()",
            f"{ON_ITS_DEVICE} Buffers are tensors, too: `network.buffers()`.",
        ),
        Miss(
            COPIES,
            f"        with torch.no_grad():\n    {COPIES}",
            "Only the replica on the network's own GPU has sent gradients. The copies "
            "on the other GPUs are cut off from the network.",
        ),
        Miss(
            "tensor.to(device)",
            "tensor.clone().to(device)",
            "On its own device the network shares its buffers with the replica, so "
            "that what a forward writes into them (BatchNorm's statistics) is kept. "
            "There, `buffer.to(device)` is no copy: it is the buffer itself.",
        ),
    ),
    because={
        "different replicas": "Return a list, with a module of its own for each "
        "device. (deepcopy writes into its second argument what it has copied: give it "
        "a new dict for each device.)",
        "own tensors": "Afterwards the network has other parameters or buffers. A "
        "shallow copy of a module shares the dictionaries `_parameters`, `_buffers` "
        "and `_modules` with it. Give the replica dictionaries of its own.",
        "device of the network": "The network itself has moved. `module.to(device)` "
        "changes the module that it is called on, and returns it; a tensor's `.to` "
        "makes a copy. (A shallow copy of a module has the module's own parameters.)",
        "of its class": "A replica must be a module of the network's own class. A "
        "shallow or deep copy of the network is one.",
        "devices": f"{ON_ITS_DEVICE} Submodules have buffers, too. And of a weight "
        "with two names `named_parameters()` gives only the first.",
        "network in them": "A module of the network stands in a replica: what a "
        "forward sets in it would stay there. Make new modules, on its device, too.",
        "modes": "The network stays in its mode (training or not), and its replicas "
        "have the same.",
        "again is twice": "Two layers may share a weight, and a module may stand in "
        "two places. In a replica it must be so, too: copy each once, and keep the "
        "copies in a dict.",
        "got a gradient": "The outputs are right, but their gradients do not reach the "
        "network: the replicas have weights of their own. A replica's weight must be "
        "`parameter.to(device)`. copy.deepcopy alone, nn.Parameter(...), `detach`, "
        "`.data` and load_state_dict cut it off.",
        "gradients": "The gradients of all replicas must add up in the network.",
    },
    errors={
        "'NoneType' object": "In `_parameters` and `_buffers` there may be None, such "
        "as the bias of a layer without one. Leave it as it is.",
        "Boolean value of Tensor": "Were two tensors compared, as keys of a dict are? "
        "The keys of deepcopy's dict are numbers: `id(tensor)`, not the tensor.",
        "Network.__init__() missing": "Nobody knows with which arguments the network "
        "was made. Copy it: with copy.deepcopy, or module by module.",
        "cannot assign": "A module takes only an nn.Parameter as a parameter, which "
        "would be a new leaf. Write into its dictionary: "
        "`replica._parameters[name] = copy`.",
        "deepcopy protocol": "copy.deepcopy copies a tensor only if it is a leaf. Its "
        "second argument says what to take instead: `{id(tensor): copy}`.",
    },
    otherwise="A replica is a module like the network, in which each tensor is "
    "`tensor.to(device)`.",
    hints=(
        "A replica is a module of the same class, in which every tensor is replaced by "
        "`tensor.to(device)`. First make these copies, then put them in place.",
        "Make a dict of copies for one device: for each tensor of network.parameters() "
        "and network.buffers(), `tensor.to(device)`. A module of the same form comes "
        "from copy.deepcopy, whose second argument tells it what to use in place of "
        "which object.",
        "For each device:\n"
        "  tensors = [*network.parameters(), *network.buffers()]\n"
        "  copies = {id(tensor): ... for tensor in tensors}\n"
        "  replica = copy.deepcopy(network, copies)\n"
        "deepcopy takes copies[id(x)] for x where there is one, and copies the rest.",
    ),
)

# ---------------------------------------------------------------------- parallel_apply

LATE = 0.05  # seconds that the first module takes longer than the last
MEETING = 1.0  # seconds that modules wait for each other
GRACE = 0.2  # seconds in which a thread without work must end
ONE, SEVERAL, SCALED = "one argument each", "two arguments each", "keyword arguments"
MIXED = "one argument, then two"
NO_GRAD, FAILING = "under torch.no_grad()", "the first and the last module fail"


class Part(nn.Module):
    """What the check runs in parallel: it notes what it sees."""

    def __init__(self, meeting, pause, error):
        super().__init__()
        self.meeting, self.pause, self.error = meeting, pause, error
        self.met, self.calls = False, []

    def forward(self, *args, scale=1):
        here = torch.cuda.current_device(), torch.is_grad_enabled()
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meeting.wait()
            self.met = True
        time.sleep(self.pause)
        self.calls.append(here)
        if self.error:
            raise self.error
        return sum(args) * scale


RUN = threading.Thread.run


def run_later(thread):
    """A loop has moved on by then: what a thread reads of its variable is wrong."""
    time.sleep(0.005)
    RUN(thread)


@on_gpus(4)
def observe_threads(answer, gpus, kind, devices):
    n, meeting = len(devices), threading.Barrier(len(devices), timeout=MEETING)
    pauses, errors = [LATE * (n - 1 - i) / n for i in range(n)], [None] * n
    if kind == FAILING:  # while others still run
        pauses = [LATE / 2, *[LATE] * (n - 2), 0]
        errors[0], errors[-1] = (
            ArithmeticError(f"part {i} failed") for i in (0, n - 1)
        )
    parts = [Part(meeting, *each) for each in zip(pauses, errors, strict=True)]
    inputs = [
        whole_numbers((2,), i).to(device).requires_grad_()
        for i, device in enumerate(devices)
    ]
    several = {SEVERAL: range(n), MIXED: range(1, n)}.get(kind, ())
    given = [(x, x) if i in several else x for i, x in enumerate(inputs)]
    kwargs = [{"scale": 10 + i} for i in range(n)] if kind == SCALED else None
    before, ended, raised, outputs = set(threading.enumerate()), [], "nothing", []
    with (
        mock.patch("threading.excepthook", lambda args: ended.append(args.exc_value)),
        mock.patch("threading.Thread.run", run_later),
        torch.set_grad_enabled(kind != NO_GRAD),
    ):
        try:
            outputs = listed(answer(parts, given, kwargs, devices=devices))
        except ArithmeticError as error:  # PyTorch puts it into another text
            raised = (re.findall(r"part \d+ failed", str(error)) or [str(error)])[-1]
        running = set(threading.enumerate()) - before
        for thread in running if all(part.calls for part in parts) else ():
            thread.join(GRACE)  # a pool's idle threads end a bit later
        late = sum(map(threading.Thread.is_alive, running))
        for thread in running:
            thread.join(2 * MEETING)
    for error in ended:
        if not isinstance(error, ArithmeticError):
            raise error  # else it is lost with its thread
    if not isinstance(outputs, (list, tuple)):
        return outputs
    calls = [part.calls[0] if part.calls else (None, None) for part in parts]
    return {
        "threads still running": late,
        "modules that ran several times": sum(len(p.calls) > 1 for p in parts),
        "modules that did not run": sum(not part.calls for part in parts),
        "all at the same time": all(part.met for part in parts),
        "raised": raised,
        "outputs that are None": sum(output is None for output in outputs),
        "output of each module": outputs,
        "current devices": [device for device, _ in calls],
        "gradients wanted": [wanted for _, wanted in calls],
        "devices of the outputs": list(map(devices_of, outputs)),
        "gradients of the inputs": gradients(tensors_in(outputs), inputs),
    }


PARALLEL_APPLY = Task(
    id="03.parallel_apply",
    title="Parallel apply",
    stars=2,
    where="here",
    observe=observe_threads,
    cases=(
        (ONE, [0]),
        (ONE, [0, 1, 2]),
        (SEVERAL, [0, 1]),
        (SCALED, [0, 1, 2, 3]),
        (NO_GRAD, [0, 1]),
        (FAILING, [0, 1, 2, 3]),
        (SCALED, [2, 0]),
        (MIXED, [1, 3]),
    ),
    forbids=("torch.nn.parallel.parallel_apply.parallel_apply",),
    instead="Python's `threading.Thread` is all you need.",
    misses=(
        Miss(
            "return outputs",
            "return outputs[::-1]",
            "These are the right outputs in another order: that in which the threads "
            "came to their end. Output i belongs to module i.",
        ),
        Miss(
            "inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)",
            "inputs[i]",
            "A tensor was taken apart into its elements. An input that is no tuple is "
            "the only argument: `module(input)`, without a star.",
        ),
        Miss(
            "except Exception as error:\n            errors[i] = error",
            "finally:\n            pass",
            "Two of the modules raised an exception, and nobody heard of it: an "
            "exception ends its own thread only. Catch it in the thread, keep it, and "
            "raise it when all threads have ended.",
        ),
        Miss(
            "errors[min(errors)]",
            "errors[max(errors)]",
            "Two of the modules raised an exception. Raise that of the first module, "
            "in the order of the list, so that the caller always sees the same one.",
        ),
    ),
    because={
        "still running": "You returned or raised while threads were still running. "
        "`join()` all of them, and only then raise or return.",
        "several times": "A module ran more than once. Did each thread use the "
        "variable of your loop? It has moved on by the time the thread reads it. Give "
        "each thread its number: `Thread(target=call, args=(i,))`.",
        "did not run": "A module was not run at all. If your function catches "
        "exceptions, one of them may tell why: keep them, and raise the first at the "
        "end.",
        "same time": "The modules did not all run at the same time. Start all threads "
        "first, and `join()` them in a second loop: `start(); join()` in one loop "
        "waits for each thread before it starts the next. Nor may a lock or a small "
        "pool let them in one by one.",
        "None": "Some output is missing. What the thread's function returns is lost: "
        "write it into a list, at the place of the module.",
        "output of each": "Module i must get input i, with the keyword arguments in "
        "`kwargs_tup[i]`: `module(*input, **kwargs_tup[i])`.",
        "current devices": "The outputs are right, but in a thread the current device "
        "was not its own. Use `with torch.cuda.device(devices[i]):` there.",
        "wanted": "Whether gradients are wanted is for the caller to say, and each "
        "thread has that setting for itself. Ask torch.is_grad_enabled() before you "
        "start the threads, and use `with torch.set_grad_enabled(...)` in each.",
        "of the outputs": "The values are right, but the outputs are not on the "
        "devices on which the modules made them.",
        "gradients of": CUT_OFF,
    },
    errors={
        "for +: 'int' and 'tuple'": "An input may be a tuple of several arguments: "
        "`module(*input)`. One that is no tuple is the only argument.",
        "'NoneType'": "`kwargs_tup` is None where there are no keyword arguments.",
        "part 0 failed": "Raise the exception of the first module itself, and not "
        "another one in its place, so that the caller can catch it by its type.",
    },
    otherwise="Return a list: output i is what module i makes of input i.",
    hints=(
        "One thread for each module. What a thread finds out, it writes into a list "
        "that all of them share.",
        "A function call(i) runs module i and keeps its output, or its exception. "
        "Settings such as no_grad and the current device belong to a thread: read "
        "them before, and set them inside. Start all, join all, then look for "
        "exceptions.",
        "The function that each thread runs:\n"
        "  def call(i):\n"
        "      args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)\n"
        "      try:\n"
        "          with torch.set_grad_enabled(...), torch.cuda.device(...):\n"
        "              outputs[i] = modules[i](*args, **...)\n"
        "      except Exception as error:\n"
        "          errors[i] = error\n"
        "and around it: a loop that starts, a loop that joins, a loop that raises.",
    ),
)

# ----------------------------------------------------------------------- data_parallel

_seen_rows: list[tuple[str, int]] = []


class Noting(nn.Module):
    """A network that notes how many rows it gets on which device."""

    def __init__(self, as_dict=False):
        super().__init__()
        self.hidden, self.outer = in_eighths(3, 4, seed=1), in_eighths(4, 2, seed=2)
        self.register_buffer("scale", torch.tensor(0.5))
        self.as_dict = as_dict

    def forward(self, x, y=0):
        _seen_rows.append((str(x.device), len(x)))
        out = self.outer(torch.tanh(self.hidden(x))) * self.scale + y
        return {"out": out, "hidden": (x,)} if self.as_dict else out


@on_gpus(4)
def observe_data_parallel(answer, gpus, kind, rows, device_ids, output_device):
    network = Noting(as_dict=kind == DICT).to(device_ids[0])
    x, y = (whole_numbers((rows, n), 5 + n).to(device_ids[0]) for n in (3, 2))
    _seen_rows.clear()
    output = answer(network, (x, y) if kind == PAIR else x, device_ids, output_device)
    if output is None:
        return None
    seen = {
        "device of the module": devices_of(list(network.parameters())),
        "the module is in training mode": network.training,
        "rows on each device": dict(sorted(_seen_rows)),
        "output": output,
        "devices": devices_of(output),
    }
    if seen["device of the module"] != [f"cuda:{device_ids[0]}"]:
        return seen  # its backward would only raise an error
    arrived = gradients(tensors_in(output)[:1], list(network.parameters()))
    return seen | {"gradients": arrived}


DICT, PAIR, SIMPLE = "a network that returns a dict", "two inputs", "a network"
TOO_MANY = (
    "A small batch gives fewer parts than there are GPUs: 9 rows on 4 GPUs are 3 "
    "parts. Make only as many replicas, on as many devices, as there are parts."
)

DATA_PARALLEL = Task(
    id="03.data_parallel",
    title="data_parallel",
    stars=2,
    where="here",
    observe=observe_data_parallel,
    cases=(
        (SIMPLE, 8, [0, 1], None),
        (SIMPLE, 30, [0, 1, 2], None),
        (SIMPLE, 30, [0, 1, 2, 3], 2),
        (SIMPLE, 9, [0, 1, 2, 3], None),
        (SIMPLE, 2, [0, 1, 2, 3], None),
        (SIMPLE, 5, [2, 0, 1], None),
        (SIMPLE, 6, [0], None),
        (PAIR, 7, [0, 1, 2], 1),
        (DICT, 8, [0, 1, 2], None),
        (SIMPLE, 6, [1, 0], 0),
        (PAIR, 4, [3], None),
    ),
    forbids=(
        "torch.nn.DataParallel",
        "torch.nn.parallel.data_parallel.data_parallel",
    ),
    instead="Put it together from replicate, scatter, parallel_apply and gather.",
    misses=(
        Miss("device_ids[: len(parts)]", "device_ids", TOO_MANY),
        Miss(
            "return gather(outputs, output_device)",
            "return sum(o.to(output_device) for o in outputs) / len(outputs)",
            "The rows of all replicas are joined, in their order: `gather` does that. "
            "They are not added and not averaged.",
        ),
        Miss(
            "output_device = device_ids[0]",
            "output_device = 0",
            "Without an output_device, the outputs are gathered on the first device of "
            "device_ids, which need not be cuda:0.",
        ),
        Miss(
            "if output_device is None:",
            "if not output_device:",
            "`output_device` is 0, and 0 counts as false in Python. Ask `if "
            "output_device is None`.",
        ),
    ),
    because={
        "of the module": "The module itself has moved: `module.to(device)` changes the "
        "module that it is called on. `replicate` makes copies.",
        "mode": "The module stays in its mode (training or not).",
        "rows on": "Each row is for one GPU, and part i for device_ids[i]. Scatter the "
        "inputs, replicate the module, and run each replica on its part.",
        "devices": "The output is right, but not on `output_device`.",
        "gradients": "The output is right, but the gradients in the module are not. Do "
        "all replicas come from `replicate`, and is nothing detached?",
    },
    errors={
        "number of modules": TOO_MANY,
        "index out of range": TOO_MANY,
        "zip() argument": TOO_MANY,
        "dict": "This module returns a dictionary of tensors. `gather` joins tuples, "
        "lists and dicts, too.",
        "tuple": "The inputs may be a tuple of several arguments. Then a part is a "
        "tuple, too.",
        "forward() takes from": "A replica got the rows of its part one by one. A part "
        "of a tensor is a tensor: a star belongs only before a tuple.",
        "must be on devices[0]": "The module is on the first of `device_ids`. Use "
        "these numbers, not 0, 1, 2, ...",
        "same device": "Tensors on different devices meet. Replica i and part i are "
        "both for device_ids[i], and all outputs are joined on the output device. "
        "(`.to(None)` copies nothing.)",
    },
    otherwise="What comes out is what the module returns for the whole batch.",
    hints=(
        "Four calls, in the order of the picture in the lesson.",
        "First scatter the inputs: now you know how many parts there are. Then "
        "replicate to that many devices, parallel_apply, and gather on the output "
        "device, or on the first device where none is given.",
        "Four lines and a default:\n"
        "  if output_device is None: output_device = device_ids[0]\n"
        "  parts = scatter(inputs, device_ids)\n"
        "  used = device_ids[:len(parts)]\n"
        "  replicas = replicate(module, used)\n"
        "  outputs = parallel_apply(replicas, parts, devices=used)\n"
        "  return gather(outputs, ...)",
    ),
)

# ----------------------------------------------------------------------- spot_the_mean

CLASSES = 64
FEW = 64  # bytes for each row: some numbers, but no outputs of 64 classes


class Classifier(nn.Module):
    """A model that notes how many rows it gets on which device."""

    def __init__(self):
        super().__init__()
        self.layer = in_eighths(3, CLASSES, seed=1)

    def forward(self, x):
        _seen_rows.append((str(x.device), len(x)))
        return self.layer(x)


@contextlib.contextmanager
def replicas_tell():
    """Raise what went wrong in a replica in its own words, with the learner's line.

    nn.DataParallel makes the whole traceback its text, which ends with these words.
    """
    try:
        yield
    except Exception as error:
        of_torch, _, text = str(error).rpartition("Traceback (most recent call last):")
        said = re.search(r"^\S.*", text, re.MULTILINE | re.DOTALL)
        if "Original " in of_torch and said:
            frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', text, re.M)
            at = learner_lines([(file, int(line), name) for file, line, name in frames])
            lines = said[0].removeprefix(f"{type(error).__name__}: ").splitlines()[:2]
            lines += [f"  {line[:74]}" for line in at.splitlines()[-1:]]
            # The same kind of text: that of a KeyError is shown without quotes.
            error.args = (type(error.args[0])("\n".join(lines)),)
        raise


@on_gpus(4)
def observe_steps(answer, gpus, rows, device_ids):
    # Rows that are the harder to classify the later they come.
    x = whole_numbers((rows, 3), 5) * torch.linspace(0.1, 1, rows)[:, None]
    x, y = x.to(0), (torch.arange(rows) * 7 % CLASSES).to(0)
    model = Classifier().to(0)
    _seen_rows.clear()
    with_loss, before = answer(model), len(gpus.transfers)
    with replicas_tell():
        loss = with_loss.training_step(x, y, device_ids)
        seen_rows, transfers = dict(sorted(_seen_rows)), gpus.transfers[before:]
        gradient, model.layer.weight.grad = model.layer.weight.grad, None
        again = with_loss.training_step(x, y, device_ids)
    if loss is None:
        return None
    left = sum(
        copy.bytes
        for copy in transfers
        if copy.phase == "forward" and copy.source not in ("cpu", "cuda:0")
    )
    return {
        "rows that the model has seen": sum(seen_rows.values()),
        "loss": loss,
        "the outputs stay where they are": left <= FEW * rows,
        "rows on each device": seen_rows,
        "the same step again": again,
        "gradient": gradient,
    }


PIECES = "losses.chunk(len(device_ids))"

SPOT_THE_MEAN = Task(
    id="03.spot_the_mean",
    title="Spot the mean",
    stars=2,
    where="here",
    observe=observe_steps,
    cases=(
        (8, [0, 1]),
        (8, [0, 1, 2, 3]),
        (8, [0]),
        (10, [0, 1, 2, 3]),
        (9, [0, 1]),
        (5, [0, 1, 2]),
        (2, [0, 1, 2, 3]),
    ),
    misses=(
        Miss(
            "losses.mean()",
            f"torch.stack([piece.mean() for piece in {PIECES}]).mean()",
            "That is the mean of the GPUs' means. It is the mean of all rows only if "
            "each GPU has the same number of rows. Here the last one has fewer, and "
            "each of its rows counts for more.",
        ),
        Miss(
            "losses.mean()",
            f"losses.mean() * len(device_ids) / len({PIECES})",
            "2 rows on 4 GPUs are 2 pieces, so two losses come back and not four. Does "
            "your formula count the GPUs?",
        ),
    ),
    because={
        "rows that": "The model must see each row of the batch, and each once. Add no "
        "rows, and leave none out.",
        "stay": "The loss is right. But the outputs of all rows travel to GPU 0 again. "
        "Return one number for each row, or for each GPU.",
        "rows on": "The loss is right, but the batch is not spread over `device_ids`, "
        "all of them and no others. Keep nn.DataParallel, and pass `device_ids` on.",
        "again": "The first step is right. The same step again, from the same weights, "
        "has another loss: what does the model keep from one step to the next?",
        "gradient": "The loss is right, but the gradients are not those of this loss. "
        "Call `loss.backward()` on the loss that you return.",
    },
    errors={
        "missing 2 required positional arguments: 'x'": "2 rows on 4 GPUs are 2 "
        "pieces. But a keyword argument goes to all four GPUs, and nn.DataParallel "
        "calls the last two replicas without any rows. Pass it by its position.",
        "0-d tensor": "Here there is one GPU, and nothing is gathered: nn.DataParallel "
        "returns what `forward` returned, a loss without dimensions, which has no "
        "length. `losses.mean()` and `losses.sum()` work with both.",
        "can be implicitly created only for scalar": "backward starts from one number. "
        "Take the mean of the rows' losses first.",
        "object is not iterable": "gather joins tensors only. If a replica is to "
        "return a number, too, make a tensor of it, on the device of its rows.",
        "'LossInside' object": "If it is set in `forward`: there, `self` is a replica, "
        "which is gone after the step. What `training_step` is to know, `forward` must "
        "return.",
        "'NoneType' object has no": "Something is None: is it the losses, and did "
        "`forward` forget its `return`?",
    },
    otherwise="The loss of a batch is the mean of the losses of all its rows: their "
    "sum, divided once by their number.",
    hints=(
        "Compute it for 3 rows on 2 GPUs, by hand: losses 1, 2 and 6. What does each "
        "GPU return, and what comes out at the end?",
        "(mean(1, 2) + mean(6)) / 2 is not mean(1, 2, 6). The mean must be taken once, "
        "over the losses of all rows. cross_entropy has an argument `reduction`.",
        "One way, in two lines:\n"
        '  forward:        return F.cross_entropy(..., reduction="none")\n'
        "  training_step:  loss = losses.mean()   # now one loss for each row\n"
        "The other: return sums, and divide by len(y) at the end.",
    ),
)

TASKS = (
    PREDICT_TRAFFIC,
    SCATTER,
    GATHER,
    REPLICATE,
    PARALLEL_APPLY,
    DATA_PARALLEL,
    SPOT_THE_MEAN,
)
