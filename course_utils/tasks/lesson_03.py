"""Lesson 03, data-parallel primitives: the tasks of its exercise."""

import contextlib
import functools
import importlib
import sys
import threading
import time
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from course_utils.questions.lesson_03 import PREDICT_TRAFFIC
from course_utils.tasks.compare import plain
from course_utils.tasks.devices import on_gpus
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.nested import devices_of, form, gradients, tensors_in, wanting
from course_utils.tasks.task import Miss, Task

in_eighths = functools.partial(linear, divided_by=8)
P = "torch.nn.parallel"

CUT_OFF = (
    "The values are right, but the gradients do not find their way back. "
    "`.to(device)`, `chunk`, `cat` and `stack` can be differentiated. `detach`, "
    "`.data`, `.item()`, `torch.tensor(...)` and `no_grad` cut the graph."
)
OTHER_DIM = (
    "Another dimension is used. The third argument says which. Pass it on when the "
    "function calls itself, for what is inside a tuple, list or dict."
)

# ----------------------------------------------------------------------------- scatter


NUMBER = "the number of parts"


@on_gpus(4)
def observe_parts(answer, gpus, inputs, target_gpus, dim=0):
    tensors = list(map(wanting, tensors_in(inputs)))
    parts = answer(inputs, target_gpus, dim)
    if parts is None:
        return None
    if not isinstance(parts, (list, tuple)):
        return {NUMBER: 0}
    given = tree_leaves(inputs)
    kept = [x for x in tree_leaves(list(parts)) if not isinstance(x, torch.Tensor)]
    pieces, shapes = tensors_in(parts), [tensor.shape for tensor in tensors]
    sent = sum(copy.bytes for copy in gpus.transfers)
    return {
        NUMBER: len(parts),
        "tensors that came whole": sum(piece.shape in shapes for piece in pieces),
        "form of part 0": form(parts[0]) if parts else None,
        "parts": parts,
        "devices": list(map(devices_of, parts)),
        "what is no tensor is repeated as it is": all(
            any(one is other for other in given) for one in kept
        ),
        # To one GPU first, and from there to the others, is less than twice as much.
        "only pieces were sent": sent <= 2 * sum(tensor.nbytes for tensor in tensors),
        "gradients": gradients(pieces, tensors),
    }


ROWS = [whole_numbers((rows, 2), rank=rows) for rows in range(10)]
WIDE = ROWS[6].T.contiguous()
CUBE = whole_numbers((2, 3, 6), rank=31)
FEWER = (
    "There are fewer pieces than GPUs here: 9 rows on 4 GPUs are 3 + 3 + 3. Leave the "
    "other GPUs out."
)

SCATTER = Task(
    id="03.scatter",
    title="Scatter",
    stars=2,
    where="here",
    observe=observe_parts,
    cases=(
        (ROWS[6], [0, 1]),
        (ROWS[9], [0, 1, 2, 3]),
        (ROWS[2], [0, 1, 2, 3]),
        (ROWS[5], [0]),
        (CUBE, [0, 1, 2], 1),
        (ROWS[5], [2, 0]),
        ((ROWS[6], ROWS[6] + 1), [0, 1, 2]),
        ([ROWS[8], ROWS[8][:, 0]], [0, 1, 2, 3]),
        ({"x": ROWS[9], "y": ROWS[9][:, 1].long()}, [0, 1]),
        ((ROWS[6], {"mask": [ROWS[6], None], "name": "a batch"}), [0, 1]),
        (("text", 7), [0, 1, 2]),
        ((), [0, 1]),
        ((ROWS[9], 7, (), [], {}), [1, 3, 0, 2]),
        ((WIDE, {"m": [WIDE]}), [0, 1, 2], -1),
        ((ROWS[6], nn.Identity()), [0, 1]),
    ),
    forbids=(f"{P}.scatter_gather.scatter", f"{P}.comm.scatter"),
    instead="`torch.chunk` cuts, and `.to(device)` copies.",
    misses=(
        Miss(
            "inputs.chunk",
            "inputs.tensor_split",
            "You cut as evenly as possible: 9 rows on 4 GPUs are 3 + 2 + 2 + 2. "
            "PyTorch gives ceil(rows / GPUs) rows to each GPU while there are any: "
            "3 + 3 + 3. `torch.chunk` does just that.",
        ),
        Miss("chunk(len(target_gpus), dim)", "chunk(len(target_gpus))", OTHER_DIM),
        Miss("target_gpus, dim)", "target_gpus)", OTHER_DIM),
    ),
    because={
        NUMBER: "Return a list, with one part for each GPU that gets rows. What holds "
        "no tensor is repeated for every GPU.",
        "repeated as": "What is no tensor goes to every GPU as it is, not as a copy.",
        "whole": "Nothing was cut: each part has all the rows. Does your function "
        "handle tensors, tuples, lists and dicts?",
        "form": "Each part has the form of the inputs: a tuple (x, y) on two GPUs "
        "becomes (x0, y0) and (x1, y1), as `zip(*...)` pairs them; so do lists and "
        "dicts. What is not a tensor, or is empty, is repeated for every GPU.",
        "devices": "The rows are right, but on other devices: part i belongs on device "
        "`target_gpus[i]`, which need not be cuda:i.",
        "only pieces": "The parts are right, but each GPU was sent all rows, and cut "
        "out its own. Cut first, and copy only the piece.",
        "gradients": CUT_OFF,
    },
    errors={
        "'NoneType' object is not iterable": "What is no tensor, such as None, must be "
        "repeated: return a list, with one for each GPU.",
        "zip() argument": FEWER,
        "index out of range": FEWER,
        "object has no attribute": "Only tensors can be cut and moved. Ask "
        "`isinstance(inputs, torch.Tensor)` first.",
    },
    otherwise="Each GPU gets ceil(rows / GPUs) consecutive rows, while there are any. "
    "What holds no tensor (a text, None, an empty list) is repeated for every GPU.",
    hints=(
        "Begin with a single tensor: cut it, and copy each piece to its device. Then "
        "let the function call itself for what is inside a tuple, list or dict.",
        "For a tuple (x, y), scatter x and y. Then `zip(*[pieces_of_x, pieces_of_y])` "
        "pairs what belongs to one GPU. Anything else is repeated.",
        "Three cases, and everything else:\n"
        "  if isinstance(inputs, torch.Tensor):\n"
        "      pieces = ...  # torch.chunk\n"
        "      return [... for piece, gpu in zip(pieces, target_gpus)]\n"
        "  if isinstance(inputs, (tuple, list)) and inputs:\n"
        "      parts = zip(*[... for item in inputs])  # the function calls itself\n"
        "      return [... for part in parts]\n"
        "  if isinstance(inputs, dict) and inputs:\n"
        "      ...  # scatter the values, then give each part its keys again\n"
        "  return ...  # the same for every GPU",
    ),
)

# ------------------------------------------------------------------------------ gather


@on_gpus(4)
def observe_joined(answer, gpus, outputs, target, dim=0):
    there = [  # output i is not on cuda:i
        tree_map_only(torch.Tensor, lambda x, i=i: wanting(x.to((i + 1) % 4)), output)
        for i, output in enumerate(outputs)
    ]

    def as_it_is():
        return form(there), [(id(x), x.device) for x in tensors_in(there)]

    tensors, before = tensors_in(there), as_it_is()
    joined = answer(there, target, dim)
    return {
        "form": form(joined),
        "joined": joined,
        "devices": devices_of(joined),
        "the outputs are as they were": as_it_is() == before,
        "gradients": gradients(tensors_in(joined), tensors),
    }


LOSSES = [torch.tensor(value) for value in (1.0, 2.5, 4.0)]
NESTED = (
    "The outputs may be tuples, lists and dicts of tensors, or None. Look at the first "
    "output to see which, and let the function call itself for what is inside."
)

GATHER = Task(
    id="03.gather",
    title="Gather",
    stars=1,
    where="here",
    observe=observe_joined,
    cases=(
        ([ROWS[2], ROWS[2] + 1], 0),
        ([ROWS[3], ROWS[3] + 1, ROWS[1]], 0),
        (ROWS[1:5], 2),
        ([CUBE, CUBE + 1, CUBE + 2], 1, 2),
        ([(a, a * 2) for a in (ROWS[2], ROWS[1])], 0),
        ([[a, None] for a in ROWS[1:3]], 0),
        ([{"x": a, "deep": (a + 1, [a * 2]), "no": None} for a in ROWS[2:0:-1]], 1),
        (LOSSES, 0),
        (LOSSES[:1], 2),
        ([{"loss": x, "n": x.long(), "ids": x[None].long()} for x in LOSSES], 0),
        ([None, None], 0),
        ([{"x": a, "deep": (a + 1,)} for a in (ROWS[2], ROWS[2] * 2)], 0, -1),
    ),
    forbids=(f"{P}.scatter_gather.gather", f"{P}.comm.gather"),
    instead="`.to(device)` copies, and `torch.cat` joins.",
    misses=(
        Miss("torch.cat(here, dim)", "torch.cat(here)", OTHER_DIM),
        Miss("target_device, dim)", "target_device)", OTHER_DIM),
    ),
    because={
        "form": "The result must have the form of one output: a tuple for tuples, a "
        "list for lists, a dict with the same keys for dicts, None for None. Does each "
        "case have its `return`?",
        "devices": "The values are right, but not all on `target_device`. Is it passed "
        "on when the function calls itself?",
        "as they were": "The result is right, but the outputs have changed. `pop`, "
        "`x[i] = ...` and `x.data = ...` change what was given: work on `x.copy()`.",
        "gradients": CUT_OFF,
    },
    errors={
        "zero-dimensional tensor": "A loss has no dimension along which torch.cat "
        "could join it. Join such tensors to a vector: `torch.stack`.",
        "Expected all tensors to be on the same device": "torch.cat cannot join "
        "tensors on different devices. Copy each to the target device first. Output i "
        "need not be on cuda:i.",
        "must be Tensor": NESTED,
        "object has no attribute": NESTED,
        "'NoneType' object": NESTED,
        "dictionary update sequence": NESTED,  # dict(...) of what it found in dicts
    },
    otherwise="Copy the outputs to the target device, and join their rows in the order "
    "of the GPUs. Losses, which have no rows, become a vector, even a single one.",
    hints=(
        "Two steps: all tensors must be on one device before they can be joined.",
        "Look at the first output: is it a tensor, None, a dict, or a list or tuple? "
        "For a list or tuple, gather the first items of all outputs, then the second "
        "items, and so on: `zip(*outputs)` gives these groups.",
        "Four cases:\n"
        "  first = outputs[0]\n"
        "  if isinstance(first, torch.Tensor):\n"
        "      here = ...  # all on the target device\n"
        "      ...  # first.dim() == 0: torch.stack; otherwise: torch.cat\n"
        "  if first is None: ...\n"
        "  if isinstance(first, dict):\n"
        "      ...  # for each key, gather what all outputs have for it\n"
        "  ...  # a tuple or list: gather each group of zip(*outputs)",
    ),
)

# --------------------------------------------------------------------------- replicate

PLAIN = "a network with buffers"
SHARED = "a network with buffers and shared weights"


class Network(nn.Module):
    """What the check replicates."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = (in_eighths(3, 3, seed) for seed in (1, 2))
        self.body, self.again = (nn.Sequential(in_eighths(3, 3, s)) for s in (3, 4))
        if kind == SHARED:
            self.last.weight, self.again = self.first.weight, self.body
        self.register_buffer("rows", torch.tensor(0), persistent=False)
        self.body[0].register_buffer("factor", torch.tensor(2.0))
        self.register_buffer("none", None)  # as of a BatchNorm without statistics
        self.register_parameter("nothing", None)
        self.last.bias.requires_grad_(False)
        self.body.eval()

    def forward(self, x):
        self.rows += len(x)
        y = self.body(self.first(x)) * self.body[0].factor
        return self.last(self.again(y))

    def tensors(self):
        """Also where they are attributes only, as in PyTorch's replicas."""
        layers = self.first, self.last, self.body[0], self.again[0]
        weights = [(layer.weight, layer.bias) for layer in layers]
        buffers = self.rows, self.body[0].factor, self.none, self.nothing
        return tensors_in([weights, buffers])

    def settings(self):
        """What is in training mode, and what is trained."""
        modules = self, self.first, self.last, self.body, self.body[0], self.again[0]
        wanted = [tensor.requires_grad for tensor in self.tensors()]
        return [module.training for module in modules], wanted


@on_gpus(4)
def observe_replicas(answer, gpus, kind, devices):
    network = Network(kind).to(f"cuda:{devices[0]}")
    modules = set(network.modules())
    replicas = answer(network, devices)
    if not isinstance(replicas, (list, tuple)):
        return replicas
    classes = [type(replica).__name__ for replica in replicas]
    if {*classes} != {"Network"}:
        return {"classes": classes}
    seen = {
        "classes": classes,
        "device of the network": devices_of(network.tensors()),
        "settings of the network": network.settings(),
        "devices": [devices_of(replica.tensors()) for replica in replicas],
        "the network's own modules in them": [
            len(modules.intersection(replica.modules())) for replica in replicas
        ],
    }
    if seen["devices"] != [[f"cuda:{device}"] for device in devices]:
        return seen  # running them would only raise an error
    outputs = [
        replica(whole_numbers((i + 1, 3), i).to(device))
        for i, (device, replica) in enumerate(zip(devices, replicas, strict=True))
    ]
    return seen | {
        "last.weight is first.weight, again is body": [
            (one.last.weight is one.first.weight, one.again is one.body)
            for one in replicas
        ],
        "outputs": outputs,
        "gradients": gradients(outputs, list(network.parameters())),
        "rows counted in the network's buffer": network.rows,
        "settings": [replica.settings() for replica in replicas],
    }


EMPTY = (
    "A parameter or buffer may be None, such as the bias of nn.Linear(3, 3, "
    "bias=False). It stays None in the replica."
)

REPLICATE = Task(
    id="03.replicate",
    title="Replicate",
    stars=3,
    where="here",
    observe=observe_replicas,
    cases=(
        (PLAIN, [0, 1]),
        (SHARED, [0, 1, 2, 3]),
        (PLAIN, [0]),
        (SHARED, [2, 0]),
        (PLAIN, [1, 3]),
    ),
    forbids=(f"{P}.replicate.replicate",),
    instead="Copy the tensors with `.to(device)`.",
    because={
        "device of": "The network itself has moved. `module.to(device)` changes "
        "the module that it is called on. A shallow copy of a module shares its dict "
        "`_parameters`: give the replica a dict of its own.",
        "devices": "Replica i must be a module like the network, with all its weights "
        "and buffers (`network.buffers()`) on `devices[i]`, those of submodules, too. "
        "deepcopy writes into its second argument: give it a new dict for each device. "
        "state_dict() makes new tensor objects, and leaves some buffers out.",
        "own modules": "A module of the network itself is in a replica. Make new "
        "modules, on the network's own device too.",
        "again is": "Two layers may share a weight, and a module may be in two places. "
        "It must be the same in a replica: copy each once, and keep the copies in a "
        "dict.",
        "gradients": "The gradients of all replicas must add up in the network. A "
        "replica's weight must be `parameter.to(device)` itself. `deepcopy(network)`, "
        "nn.Parameter, `detach`, `.data`, no_grad and load_state_dict cut it off.",
        "rows counted": "On its own device the network shares its buffers with the "
        "replica, which keeps what a forward writes into them, such as BatchNorm's "
        "statistics. There, `buffer.to(device)` is the buffer itself.",
        "settings": "A copy has the settings of the network: which modules are in "
        "training mode (`train()`, `eval()`), and which weights are frozen "
        "(`requires_grad`). The network keeps its own.",
    },
    errors={
        "'NoneType' object": EMPTY,
        "object has no attribute 'no": EMPTY,
        "Network.__init__() missing": "You cannot know which arguments the network was "
        "made with. Copy it: with copy.deepcopy, or module by module.",
        "cannot assign": "A module takes only an nn.Parameter as a parameter, and that "
        "would be cut off. Write into its dict: `module._parameters[name] = copy`.",
        "deepcopy protocol": "copy.deepcopy copies a tensor only if it is a leaf. Its "
        "second argument says what to take instead: `{id(tensor): copy}`.",
    },
    otherwise="A replica is a module of the network's class, in which each tensor is "
    "`tensor.to(device)`. Return a list of them.",
    hints=(
        "What does copy.deepcopy do with an object that it has already copied?",
        "deepcopy notes its copies in a dict, `{id(object): copy}`, its second "
        "argument. You may fill that beforehand, with `tensor.to(device)` for each "
        "parameter and buffer.",
        "For each device:\n"
        "  tensors = ...  # all parameters and buffers\n"
        "  copies = {id(tensor): ... for tensor in tensors}\n"
        "  replica = copy.deepcopy(network, ...)\n"
        "deepcopy takes copies[id(x)] for x where there is one, and copies the rest.",
    ),
)

# ---------------------------------------------------------------------- parallel_apply

LATE = 0.1  # seconds that the first module takes longer than the last
MEETING = 1.0  # seconds that modules wait for each other
ONE, MIXED, SCALED = "one argument each", "one argument, then two", "keyword arguments"
NO_GRAD = "gradients switched off by torch.no_grad()"
FAILING = "a first and a last module that fail"


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
        return scale and sum(args) * scale


def run_later(thread, run=threading.Thread.run):
    """A loop has moved on by then: what a thread reads of its variable is wrong."""
    time.sleep(0.005)
    run(thread)


@on_gpus(4)
def observe_threads(answer, gpus, kind, devices):
    n, meeting = len(devices), threading.Barrier(len(devices), timeout=MEETING)
    pauses, errors = [LATE * (n - 1 - i) / n for i in range(n)], [None] * n
    if kind == FAILING:
        pauses[0] /= 6  # it fails while those in the middle still run
        errors[0] = ZeroDivisionError("part 0 failed")
        errors[-1] = OverflowError("the last part failed")
    parts = list(map(Part, [meeting] * n, pauses, errors))
    shape = () if kind == SCALED else (2,)  # a loss has no dimensions
    inputs = [wanting(whole_numbers(shape, i).to(gpu)) for i, gpu in enumerate(devices)]
    tensors = inputs[:]
    if kind == MIXED:
        inputs[1:] = [(x, x) for x in inputs[1:]]
    kwargs = [{"scale": 3 * i or None} for i in range(n)] if kind == SCALED else None
    before, raised, outputs = set(threading.enumerate()), "nothing", []
    with (
        mock.patch("threading.Thread.run", run_later),
        torch.set_grad_enabled(kind != NO_GRAD),
    ):
        try:
            outputs = answer(parts, inputs, kwargs, devices=devices)
        except Exception as error:
            if kind != FAILING:
                raise
            raised = type(error).__name__
        calls = [part.calls[:] for part in parts]
        for thread in set(threading.enumerate()) - before:
            thread.join(2 * MEETING)
        settings = torch.cuda.current_device(), torch.is_grad_enabled()
    if not isinstance(outputs, (list, tuple)):
        return outputs
    first_calls = [called[0] if called else (None, None) for called in calls]
    return {
        "modules that ran several times": sum(len(called) > 1 for called in calls),
        "modules that had not run": calls.count([]),
        "all at the same time": all(part.met for part in parts),
        "raised": raised,
        "outputs": outputs,
        "current devices": [device for device, _ in first_calls],
        "gradients wanted": [wanted for _, wanted in first_calls],
        "devices of what came back": list(map(devices_of, outputs)),
        "gradients through what came back": gradients(tensors_in(outputs), tensors),
        "the caller's settings are as before": settings == (0, kind != NO_GRAD),
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
        (MIXED, [0, 1]),
        (SCALED, [0, 1, 2, 3]),
        (NO_GRAD, [0, 1]),
        (FAILING, [0, 1, 2, 3]),
        (MIXED, [3, 1]),
    ),
    forbids=("torch.nn.parallel.parallel_apply.parallel_apply",),
    instead="Python's `threading.Thread` is all you need.",
    misses=(
        Miss(
            "outputs[i] = modules[i]",
            "modules[i]",
            "The outputs are missing. What a thread's function returns is lost: write "
            "it into a list, at the place of the module.",
        ),
        Miss(
            "inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)",
            "inputs[i]",
            "A tensor was taken apart into its elements. An input that is not a tuple "
            "is the only argument: `module(input)`, without a star.",
        ),
    ),
    because={
        "several times": "A module ran more than once. Did each thread use the "
        "variable of your loop, which has moved on by then? Give each thread its "
        "number: `Thread(target=call, args=(i,))`.",
        "had not run": "A module had not run to its end when you returned or raised. "
        "`join()` all threads first. Or did an exception end a thread before it called "
        "its module?",
        "same time": "Not all modules ran at the same time. Start all threads, then "
        "`join()` them in a second loop: in one, each waits for the one before it. "
        "`Thread(target=call(i))` and `thread.run()` call at once: use `args` and "
        "`start()`.",
        "raised": "An exception ends only its own thread. Catch it there, and keep it. "
        "After all threads have ended, raise it itself (callers catch it by its type); "
        "of several, that of the first module.",
        "current devices": "The outputs are right, but in a thread the current device "
        "was not its own. Use `with torch.cuda.device(devices[i]):` there.",
        "wanted": "Whether gradients are wanted is the caller's setting, and each "
        "thread has its own. Ask torch.is_grad_enabled() before you start the threads, "
        "and use `with torch.set_grad_enabled(...)` in each.",
        "caller's": "The caller's current GPU, or whether gradients are recorded, has "
        "changed. Set both inside the threads only.",
        "what came back": "Give each module its input and return its output as it is, "
        "not moved to another device, and not detached.",
    },
    errors={
        "for +: 'int' and 'tuple'": "An input may be a tuple of several arguments: "
        "`module(*input)`. One that is not a tuple is the only argument.",
        "'NoneType'": "`kwargs_tup` is None where there are no keyword arguments.",
        "KeyError: ": "No thread wrote under this key. Did each use the variable of "
        "your loop, which has moved on by then? Or did an exception end one?",
    },
    otherwise="Return a list: output i is what module i makes of input i, and of the "
    "keyword arguments in `kwargs_tup[i]`, whichever thread ends first.",
    hints=(
        "Use one thread for each module. Each writes its result into a list that all "
        "of them share.",
        "A function call(i) runs module i and keeps its output or its exception. "
        "Whether gradients are recorded and which device is current are settings of a "
        "thread: read the first one outside, and set both inside. Start all threads, "
        "join all, then look for exceptions.",
        "The function that each thread runs:\n"
        "  def call(i):\n"
        "      args = ...  # a tuple, also where the input is a single argument\n"
        "      try:\n"
        "          with torch.set_grad_enabled(...), torch.cuda.device(...):\n"
        "              outputs[i] = ...\n"
        "      except Exception as error:\n"
        "          ...  # keep it",
    ),
)

# ----------------------------------------------------------------------- data_parallel


_seen_rows: dict[str, int] = {}
_current: list[tuple[int, int]] = []  # a device, and which one was current there


class Noting(nn.Module):
    """A network that notes how many rows it gets on which device."""

    def __init__(self, outputs, as_dict=False):
        super().__init__()
        self.hidden, self.outer = in_eighths(3, 4, seed=1), in_eighths(4, outputs, 2)
        self.register_buffer("scale", torch.tensor(0.5))
        self.as_dict = as_dict

    def forward(self, x, y=0):
        _seen_rows[str(x.device)] = len(x)
        _current.append((x.get_device(), torch.cuda.current_device()))
        scale = self.scale * (2 if self.training else 1)
        out = self.outer(torch.tanh(self.hidden(x))) * scale + y
        return {"out": out, "hidden": (x,)} if self.as_dict else out


@on_gpus(4)
def observe_data_parallel(answer, gpus, kind, rows, device_ids, output_device):
    network = Noting(2, as_dict=kind == DICT).to(device_ids[0]).train(kind != PAIR)
    x, y = (whole_numbers((rows, n), 5 + n).to(device_ids[0]) for n in (3, 2))
    _seen_rows.clear()
    _current.clear()
    output = answer(network, (x, y) if kind == PAIR else x, device_ids, output_device)
    if output is None:
        return None
    seen = {
        "device of the module": devices_of(list(network.parameters())),
        "rows on each device": dict(_seen_rows),
        "output": output,
        "devices": devices_of(output),
        # The caller's may stay the current one, as in a simple loop.
        "another GPU is the current one": any(now not in (x, 0) for x, now in _current),
    }
    if seen["device of the module"] != [f"cuda:{device_ids[0]}"]:
        return seen  # its backward would only raise an error
    arrived = gradients(tensors_in(output)[-1:], list(network.parameters()))
    return seen | {"gradients": arrived}


DICT, PAIR, SIMPLE = "a network that returns a dict", "two inputs", "a network"
TOO_MANY = (
    "Scatter to all of device_ids, then make as many replicas as there are parts, on "
    "as many devices. A small batch gives fewer parts: 9 rows on 4 GPUs are 3."
)

DATA_PARALLEL = Task(
    id="03.data_parallel",
    title="data_parallel",
    stars=2,
    where="here",
    observe=observe_data_parallel,
    cases=(
        (SIMPLE, 8, [0, 1], None),
        (SIMPLE, 30, [0, 1, 2, 3], 2),
        (SIMPLE, 9, [0, 1, 2, 3], None),
        (SIMPLE, 2, [0, 1, 2, 3], None),
        (SIMPLE, 5, [2, 0, 1], None),
        (PAIR, 7, [0, 1, 2], 1),
        (DICT, 8, [0, 1, 2], None),
        (SIMPLE, 6, [1, 0], 0),
        (PAIR, 4, [3], None),
        (SIMPLE, 4, [0], 1),
    ),
    forbids=("torch.nn.DataParallel", f"{P}.data_parallel.data_parallel"),
    instead="Put it together from replicate, scatter, parallel_apply and gather.",
    misses=(Miss("device_ids[: len(parts)]", "device_ids", TOO_MANY),),
    because={
        "of the module": "The module itself has moved: `module.to(device)` changes the "
        "module that it is called on. `replicate` makes copies.",
        "rows on": "Each row is for one GPU, and part i for device_ids[i]. Scatter the "
        "inputs, replicate the module, and run each replica on its part.",
        "devices": "The output is right, but not on `output_device`. Where that is "
        "None, it belongs on the first of device_ids, which need not be cuda:0. And 0 "
        "counts as false in Python: ask `if output_device is None`.",
        "another GPU": "A replica ran while another GPU was the current one. Give "
        "parallel_apply the devices of the parts, and not 0, 1, 2.",
        "gradients": "The output is right, but the gradients in the module are not. Do "
        "all replicas come from `replicate`, and is nothing detached?",
    },
    errors={
        "number of modules": TOO_MANY,
        "index out of range": TOO_MANY,
        "'tuple' object has no attribute": "A part may be a tuple of arguments: "
        "`module(*part)`. parallel_apply does that.",
        "dict": "This module returns a dictionary of tensors. `gather` joins tuples, "
        "lists and dicts, too.",
        "same device": "Tensors on different devices meet. Replica i and part i are "
        "both for device_ids[i], and all outputs are joined on the output device.",
    },
    otherwise="What comes out is what the module returns for the whole batch: the rows "
    "of all replicas are joined, in their order, not added and not averaged.",
    hints=(
        "Four calls, in the order of the picture in the lesson.",
        "First scatter the inputs: now you know how many parts there are. Then "
        "replicate to that many devices, parallel_apply, and gather on the output "
        "device, or on the first device where none is given.",
        "Four calls and a default:\n"
        "  if output_device is None: ...\n"
        "  parts = scatter(...)\n"
        "  used = ...  # as many devices as there are parts\n"
        "  replicas = replicate(...)\n"
        "  outputs = parallel_apply(..., devices=used)\n"
        "  return gather(...)",
    ),
)

# ----------------------------------------------------------------------- spot_the_mean

CLASSES = 64
FEW = 64  # bytes for each row: some numbers, but no outputs of 64 classes


class AsRaised:
    """In place of PyTorch's wrapper, which makes the whole traceback its text."""

    def __init__(self, **where):
        self.error = sys.exc_info()[1]

    def reraise(self):
        raise self.error


@on_gpus(4)
def observe_steps(answer, gpus, rows, device_ids):
    # Rows that are the harder to classify the later they come.
    x = whole_numbers((rows, 3), 5) * torch.linspace(0.1, 1, rows)[:, None]
    x, y = x.to(0), (torch.arange(rows) * 7 % CLASSES).to(0)
    model = Noting(CLASSES).to(0)
    with_loss = answer(model)
    replicas = importlib.import_module("torch.nn.parallel.parallel_apply")
    with mock.patch.object(replicas, "ExceptionWrapper", AsRaised):
        first = plain(with_loss.training_step(x, y, device_ids))
        model.zero_grad()
        _seen_rows.clear()
        before = len(gpus.transfers)
        loss = with_loss.training_step(x, y, device_ids)
    if loss is None:
        return None
    left = sum(
        copy.bytes
        for copy in gpus.transfers[before:]
        if copy.phase == "forward" and copy.source not in ("cpu", "cuda:0")
    )
    return {
        "rows on each device": dict(_seen_rows),
        "loss": first,
        "loss of the next step": loss,
        "the outputs stay where they are": left <= FEW * rows,
        "gradient": model.outer.weight.grad,
    }


ONE_GPU = (
    "With one GPU nothing is gathered: nn.DataParallel returns what "
    "`forward` returned, a loss without dimensions, which has no length. "
    "`losses.mean()` and `losses.sum()` work with both."
)

SPOT_THE_MEAN = Task(
    id="03.spot_the_mean",
    title="Spot the mean",
    stars=2,
    where="here",
    observe=observe_steps,
    cases=(
        (8, [0, 1]),
        (8, [0]),
        (10, [0, 1, 2, 3]),
        (9, [0, 1]),
        (5, [0, 1, 2]),
        (2, [0, 1, 2, 3]),
    ),
    misses=(
        Miss(
            "losses.mean()",
            "torch.stack([x.mean() for x in losses.chunk(len(device_ids))]).mean()",
            "That is the mean of the GPUs' means. Here the last GPU has fewer rows, "
            "and each of them counts for more.",
        ),
        Miss(
            "    loss.backward()",
            "    loss.backward(retain_graph=True)\n        loss.backward()",
            "`backward()` has run twice: the gradients are twice as large.",
        ),
    ),
    because={
        "rows on": "The model must see each row of the batch once, spread over "
        "`device_ids`. Keep nn.DataParallel, pass `device_ids` on, and add no rows.",
        "next step": "The first step is right, but it leaves something behind.",
        "stay": "The loss is right, but the outputs of all rows travel to GPU 0 again. "
        "Return one number for each row, or for each GPU.",
        "gradient": "The loss is right, but the gradients are not those of this loss. "
        "Call `loss.backward()` on the loss that you return.",
    },
    errors={
        "missing 2 required positional arguments: 'x'": "2 rows on 4 GPUs are 2 "
        "pieces. But a keyword argument goes to all four GPUs, and nn.DataParallel "
        "calls the last two replicas without any rows. Pass it by its position.",
        "got 0D and 0D tensors": ONE_GPU,
        "0-d tensor": ONE_GPU,
        "object is not iterable": "gather joins tensors only. If a replica is to "
        "return a number, make a tensor of it, on the device of its rows.",
        "'LossInside' object": "If it is set in `forward`: there, `self` is a replica, "
        "which is gone after the step. Let `forward` return it.",
    },
    otherwise="The loss of a batch is the sum of the losses of all its rows, divided "
    "once by their number, and not by that of the GPUs.",
    hints=(
        "Compute it for 3 rows on 2 GPUs, by hand: losses 1, 2 and 6. What does each "
        "GPU return, and what comes out at the end?",
        "(mean(1, 2) + mean(6)) / 2 is not mean(1, 2, 6). The mean must be taken once, "
        "over the losses of all rows. cross_entropy has an argument `reduction`.",
        "Two ways:\n"
        "  forward returns one loss for each row,     reduction=...\n"
        "  training_step takes the mean over all rows\n"
        "or:\n"
        "  forward returns the sum of its rows,       reduction=...\n"
        "  training_step adds up, and divides once by ...",
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
