"""from_scratch/data_parallel.py against torch's own, and against one device."""

import threading
import time
from collections import namedtuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn import parallel

from course_utils.from_scratch import data_parallel as ours
from course_utils.virtual_gpus import virtual_gpus

Pair = namedtuple("Pair", "first second")
DEVICES = {n: list(range(n)) for n in (1, 2, 3, 4)}
every_number = pytest.mark.parametrize("n", DEVICES)


@pytest.fixture(autouse=True)
def gpus():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking more of them takes longer than these tensors
    with virtual_gpus(4, memory="64 MiB", force=True) as gpus:
        yield gpus
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Shared weights, a shared module, a frozen weight, buffers, and None for parts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.twice = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.again = self.twice
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.nothing = None
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.register_buffer("none", None)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.calls = 0

    def forward(self, x):
        self.rows += len(x)
        self.calls += 1
        x = self.again(self.twice(self.first(x)))
        return self.frozen(self.tied(x) * self.scale)


def gradients_of(module):
    return [p.grad.cpu() for p in module.parameters() if p.grad is not None]


def step(module, forward, x):
    """Output, gradients of parameters and of the input, after one backward."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    output = forward(x)
    (output.cpu().square().mean(0) * torch.arange(1.0, 7.0)).sum().backward()
    return output.detach().cpu(), [*gradients_of(module), x.grad.cpu()]


def same(one, other):
    """Equal to 1e-5, of the same types, and on the same devices."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.device == other.device
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            same(first, second)
    else:
        assert one == other


# --- the whole ------------------------------------------------------------------------


@every_number
def test_equals_torch_and_one_device(n):
    module = Net().to("cuda:0")
    for rows in (1, 3, 5, 9, 12):
        x = torch.randn(rows, 6, device="cuda:0")
        alone = step(module, module, x)
        torchs = step(module, nn.DataParallel(module, DEVICES[n]), x)
        own = step(module, lambda x: ours.data_parallel(module, x, DEVICES[n]), x)
        same(own, alone)
        same(own, torchs)


@pytest.mark.parametrize("current", [0, 1])
def test_cuda_without_a_number_is_the_gpu_that_is_current(current):
    with torch.cuda.device(current):
        module = nn.Linear(6, 2).to("cuda")
        devices = ["cuda", f"cuda:{1 - current}"]
        output = ours.data_parallel(module, torch.randn(8, 6), devices)
        assert output.device == torch.device("cuda", current)
        assert ours.gather([output.cpu(), output.cpu()], "cuda").device == output.device


def test_devices_by_number_name_or_object_in_any_order_and_all_by_default():
    module = nn.Linear(6, 2).to("cuda:2")
    x = torch.randn(8, 6)
    for ids in ([2, 0, 3], ["cuda:2", "cuda:1"], [torch.device("cuda:2"), 0], [2]):
        output = ours.data_parallel(module, x, ids)
        assert output.device == torch.device("cuda:2")
        same(output, module(x.to("cuda:2")))
    for asked, device in ((1, "cuda:1"), (-1, "cpu")):
        output = ours.data_parallel(module, x, [2, 0], asked)
        assert output.device == torch.device(device)
    with torch.no_grad():
        output = ours.data_parallel(module.to("cuda:0"), x)
    assert output.shape == (8, 2) and not output.requires_grad


@pytest.mark.parametrize("n", [2, 4])
def test_tuples_and_keywords_as_arguments(n):
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x, pair, *, times=1, extra=None):
            out = (x + pair["y"]) * self.weight * times
            return {"out": out if extra is None else out + extra, "rows": (x,)}

    module = Add().to("cuda:0")
    x, y, extra = torch.randn(3, 7, 3).unbind()
    kwargs = {"times": 2, "extra": extra}
    own = ours.data_parallel(module, (x, {"y": y}), DEVICES[n], module_kwargs=kwargs)
    torchs = nn.DataParallel(module, DEVICES[n])(x, {"y": y}, **kwargs)
    same(own, torchs)
    same(own["out"].cpu(), (x + y) * 2 + extra)
    assert isinstance(own["rows"], tuple)


def test_keywords_with_fewer_pieces_are_refused_and_no_rows_lost():
    class Times(nn.Linear):
        def forward(self, x, weight, scale=None):
            return super().forward(x) * weight * (scale or 1)

    def call(rows, **kwargs):
        module, x = Times(2, 3).to("cuda:0"), torch.randn(rows, 2)
        return ours.data_parallel(module, x, [0, 1], module_kwargs=kwargs)

    with pytest.raises(ValueError, match=r"make 2 pieces, the keyword arguments 1\."):
        call(6, weight=torch.ones(1, 1))
    assert call(6, weight=torch.ones(6, 1)).shape == (6, 3)
    assert call(6, weight=2, scale=None).shape == (6, 3)
    assert call(1, weight=2).shape == (1, 3)


@every_number
def test_keywords_alone_and_no_arguments_at_all(n):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x=None):
            return self.weight * (1 if x is None else x)

    module, x = Either().to("cuda:0"), torch.randn(5, 1)
    both = ours.data_parallel(module, (), DEVICES[n], module_kwargs={"x": x})
    same(both.cpu(), x)
    for nothing in ((), None):
        assert ours.data_parallel(module, nothing, DEVICES[n]).shape == (1,)


def test_along_another_dimension():
    lstm = nn.LSTM(4, 3).to("cuda:0")  # its batch is dimension 1
    x = torch.randn(5, 6, 4, device="cuda:0")
    own, _ = ours.data_parallel(lstm, x, [0, 1, 2], dim=1)
    same(own, lstm(x)[0])


def test_a_parameter_that_nothing_uses_has_zeros_as_with_torch():
    module = Net().to("cuda:0")
    module.unused = nn.Parameter(torch.ones(2, device="cuda:0"))
    x = torch.randn(5, 6, device="cuda:0")
    torchs = step(module, nn.DataParallel(module, [0, 1]), x)
    own = step(module, lambda x: ours.data_parallel(module, x, [0, 1]), x)
    same(own, torchs)
    assert module.unused.grad.eq(0).all() and module.frozen.weight.grad is None


def test_what_is_sent_is_what_torch_sends(gpus):
    """As many bytes between the same devices, forward and backward."""
    module = Net().to("cuda:0")
    module.frozen.requires_grad_()  # torch sends zeros back for a frozen weight
    x = torch.randn(9, 6, device="cuda:0")
    logs = []
    for forward in (
        lambda: ours.data_parallel(module, x, [0, 1, 2, 3]),
        lambda: nn.DataParallel(module, [0, 1, 2, 3])(x),
    ):
        before = len(gpus.transfers)
        forward().sum().backward()
        sent = {}
        for t in gpus.transfers[before:]:
            key = t.source, t.destination, t.phase
            sent[key] = sent.get(key, 0) + t.bytes
        logs.append(sent)
    assert logs[0] == logs[1]
    assert len(logs[0]) == 8  # out to two devices and back, forward and backward


def test_module_on_another_device_is_refused_in_words():
    with pytest.raises(RuntimeError, match=r"must be on cuda:0.* is on cpu.*\.to\("):
        ours.data_parallel(nn.Linear(2, 2), torch.randn(4, 2), [0, 1])
    module = nn.BatchNorm1d(2).to("cuda:0")
    module.running_mean = module.running_mean.to("cuda:1")
    with pytest.raises(RuntimeError, match="a part of it is on cuda:1"):
        ours.data_parallel(module, torch.randn(4, 2), [0, 1])
    with pytest.raises(ValueError, match="device_ids is empty"):
        ours.data_parallel(module, torch.randn(4, 2), [])


# --- scatter --------------------------------------------------------------------------


@every_number
def test_scatter_cuts_as_torch_does(n):
    for rows in (1, 2, 4, 5, 9, 30):
        for dim, shape in enumerate([(rows, 2), (2, rows)]):
            x = torch.arange(2.0 * rows).reshape(shape)
            own = ours.scatter(x, DEVICES[n], dim)
            same(list(own), list(parallel.scatter(x, DEVICES[n], dim)))


x, y, z = torch.arange(24.0).reshape(3, 8, 1).unbind()
NESTED = (
    *(x, (x, y), [x, y], {"x": x, "y": y}, Pair(x, y), 3, None, ((), {}, []), "rows"),
    [x, {"pair": Pair(y, (z, 1.5)), "name": "a"}, None],
    (x, y[:3]),  # not all of one length
)


@every_number
def test_scatter_of_nested_inputs_is_torchs(n):
    for nested in NESTED:
        own = ours.scatter(nested, DEVICES[n])
        same(list(own), list(parallel.scatter(nested, DEVICES[n])))


def test_whatever_is_no_tensor_goes_to_every_device_as_it_is():
    array = numpy.array([1, 2])  # whether it is true cannot be asked
    pieces = ours.scatter((x, array), [0, 1])
    assert [len(rows) for rows, _ in pieces] == [4, 4]
    assert all(each is array for _, each in pieces)
    assert all(each is array for each in ours.scatter(array, [0, 1]))


def test_scatter_copies_only_what_must_move(gpus):
    x = torch.zeros(8, 100, device="cuda:0")
    before = len(gpus.transfers)
    pieces = ours.scatter(x, [0, 1])
    (sent,) = gpus.transfers[before:]
    assert (sent.source, sent.destination, sent.bytes) == ("cuda:0", "cuda:1", 1600)
    assert pieces[0].data_ptr() == x.data_ptr()


# --- replicate ------------------------------------------------------------------------


@every_number
def test_replicas_are_on_their_devices_with_equal_values(n):
    module = Net().to("cuda:0")
    for detach in (False, True):
        replicas = ours.replicate(module, DEVICES[n], detach=detach)
        assert len(replicas) == n
        for i, replica in enumerate(replicas):
            assert type(replica) is Net and replica is not module
            for name in ("first", "tied", "frozen"):
                weight = getattr(replica, name).weight
                assert weight.device == torch.device("cuda", i)
                assert weight.requires_grad == (name != "frozen" and not detach)
                same(weight.cpu(), getattr(module, name).weight.cpu())
            for tensor in (replica.scale, replica.rows, replica.first.bias):
                assert tensor.device == torch.device("cuda", i)


def test_what_is_shared_stays_shared_in_each_replica():
    replicas = ours.replicate(Net().to("cuda:0"), [0, 1])
    for replica in replicas:
        assert replica.again is replica.twice
        assert replica.tied.weight is replica.first.weight
        assert replica.tied.bias is None
        assert replica.nothing is None
        assert replica.none is None
    assert replicas[0].twice is not replicas[1].twice


def test_replicas_leave_the_module_alone():
    module = Net().to("cuda:0")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    children = list(module.named_modules())
    replica = ours.replicate(module, [0, 1])[1]
    replica.first.weight = None
    replica.twice[0] = nn.Identity()
    replica.eval()
    assert module.training
    assert list(module.named_modules()) == children
    same(dict(module.state_dict()), state)


def test_buffers_are_kept_on_the_first_device_and_lost_on_the_others():
    """And the same as torch's: only what is written in place on device 0 is kept."""
    seen = []
    for forward in (
        lambda m, x: ours.data_parallel(m, x, [0, 1, 2, 3]),
        lambda m, x: nn.DataParallel(m, [0, 1, 2, 3])(x),
    ):
        module = Net().to("cuda:0")
        forward(module, torch.randn(32, 6))
        forward(module, torch.randn(32, 6))
        seen.append((module.rows.item(), module.calls))
    assert seen == [(16, 0), (16, 0)]


# --- parallel_apply -------------------------------------------------------------------


class Call(nn.Module):
    """A module that does what it is told."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def test_modules_run_at_the_same_time_and_outputs_keep_their_order():
    meet = threading.Barrier(4, timeout=20)

    def wait_for_all(late):
        meet.wait()
        time.sleep(late / 50)
        return late, threading.get_ident()

    outputs = ours.parallel_apply([Call(wait_for_all)] * 4, [3, 0, 2, 1])
    assert [late for late, _ in outputs] == [3, 0, 2, 1]
    assert len({threading.get_ident(), *(ident for _, ident in outputs)}) == 5


def test_one_argument_several_and_keywords():
    def tell(*args, **kwargs):
        return args, kwargs

    inputs = [1, (1, 2), [1, 2, 3]]
    kwargs = [{}, {"a": 1}, {"b": 2}]
    got = ours.parallel_apply([Call(tell)] * 3, inputs, kwargs)
    assert got == [((1,), {}), ((1, 2), {"a": 1}), ((1, 2, 3), {"b": 2})]


def test_each_thread_has_its_own_current_device():
    def here(x):
        return torch.cuda.current_device(), torch.zeros(1, device="cuda").device

    got = ours.parallel_apply([Call(here)] * 3, [0] * 3, devices=[2, "cuda:0", 1])
    assert got == [(i, torch.device("cuda", i)) for i in (2, 0, 1)]


def test_threads_inherit_autocast_and_whether_gradients_are_wanted():
    module = nn.Linear(4, 4).to("cuda:0")
    for dtype in (torch.float32, torch.bfloat16):
        for grad in (True, False):
            enabled = dtype == torch.bfloat16
            with torch.set_grad_enabled(grad), torch.autocast("cuda", dtype, enabled):
                output = ours.data_parallel(module, torch.randn(8, 4), [0, 1])
            assert (output.dtype, output.requires_grad) == (dtype, grad)


@pytest.mark.parametrize("where", [[1], [1, 3], [0, 2]])
def test_an_exception_in_a_replica_comes_out_as_it_is(where):
    class Special(Exception):
        pass

    def fail(i):
        if i in where:
            time.sleep(0.02 * (4 - i))  # the first need not be the first to fail
            raise Special(f"row {i}")
        return i

    before = threading.active_count()
    with pytest.raises(Special, match=f"row {where[0]}") as info:
        ours.parallel_apply([Call(fail)] * 4, [0, 1, 2, 3], devices=[0, 1, 2, 3])
    assert threading.active_count() == before
    notes = getattr(info.value, "__notes__", None)  # from Python 3.11 on
    assert notes in (None, [f"This was replica {where[0]}, on cuda:{where[0]}."])


def test_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"got \[2, 3, 2, 2\]"):
        ours.parallel_apply([Call(len)] * 2, [1, 2, 3])


# --- gather ---------------------------------------------------------------------------


def on_devices(make, n=3):
    """An output for each device, its tensors there."""
    return [make(lambda *v, i=i: torch.tensor(v, device=f"cuda:{i}")) for i in range(n)]


OUTPUTS = {
    "tensor": lambda t: t(1.0, 2.0),
    "tuple": lambda t: (t(1.0), t(2.0, 3.0)),
    "list": lambda t: [t(1.0), None],
    "dict": lambda t: {"a": t(1.0), "b": (t(2.0), t(3.0))},
    "named tuple": lambda t: Pair(t(1.0), {"x": t(2.0)}),
    "nothing": lambda t: None,
    "a loss": lambda t: t(1.5).mean(),
    "losses": lambda t: {"a": t(1.5).mean(), "b": t(2.5, 3.5)},
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.filterwarnings("ignore:Was asked to gather:UserWarning")
def test_gather_joins_as_torch_does(name):
    for target in (0, 2, "cpu"):
        outputs = on_devices(OUTPUTS[name])
        own, torchs = ours.gather(outputs, target), parallel.gather(outputs, target)
        same(own, torchs)
    pieces = [torch.full((2, i + 1), float(i), device=f"cuda:{i}") for i in range(3)]
    same(ours.gather(pieces, 1, dim=1), parallel.gather(pieces, 1, dim=1))


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ([1.5, 2.5], TypeError, "returned an object of type float"),
        (["a", "b"], TypeError, "of type str"),
        ([{"a": None}, {"b": None}], ValueError, r"the keys \['a'\]"),
        ([(None, None), (None,)], ValueError, "shorter"),
    ],
)
def test_outputs_that_cannot_be_joined(outputs, error, message):
    with pytest.raises(error, match=message):
        ours.gather(outputs, 0)
