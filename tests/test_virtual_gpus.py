"""Virtual GPUs as a user meets them: on and off, devices, moves, errors, torch.cuda."""

import copy
import io
import pickle
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchvision import tv_tensors

from course_utils import Ranks, virtual_gpus
from course_utils.virtual_gpus import autograd, tensors
from course_utils.virtual_gpus import gpus as switched
from tests.benchmarks._kernel import Kernel

ONE = torch.device("cuda:1")


@pytest.fixture
def gpus():
    """Four virtual GPUs; what a test makes on them is gone after it."""
    with virtual_gpus(4, memory="1 GiB", force=True) as on:
        yield on


def everything_patched() -> dict:
    """What PyTorch's modules and classes have, to compare by identity."""
    owners = [m for n, m in list(sys.modules.items()) if f"{n}.".startswith("torch.")]
    owners += [value for m in owners for value in vars(m).values() if is_a_class(value)]
    values = {
        (id(owner), name): value
        for owner in owners
        if isinstance(owner, (type, types.ModuleType))
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, property)
    }
    hooks = autograd.optimizer_module
    return {
        **{key: id(value) for key, value in values.items()},
        **{
            (*key, "code"): (value.__code__, value.__kwdefaults__)
            for key, value in values.items()
            if isinstance(value, types.FunctionType)
        },
        "before steps": list(hooks._global_optimizer_pre_hooks),
        "after steps": list(hooks._global_optimizer_post_hooks),
    }


def is_a_class(value: object) -> bool:
    return isinstance(value, type) and value.__module__.startswith("torch")


# --- on and off -----------------------------------------------------------------------


def test_the_course_can_be_imported_without_torch():
    code = (
        "import sys, course_utils; from course_utils import virtual_gpus\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "virtual_gpus(2); assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def everyday() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()


def test_nothing_of_torch_is_different_afterwards():
    everyday()
    before = everything_patched()
    with pytest.raises(ZeroDivisionError), virtual_gpus(2, force=True):
        torch.set_default_device("cuda:1")
        with torch.cuda.device(1), torch.autocast("cuda"):
            everyday()
            raise ZeroDivisionError
    assert everything_patched() == before
    assert torch.ones(1).device.type == "cpu"
    assert not torch.is_autocast_enabled("cpu")


def test_tensors_of_before_and_after():
    gpus = virtual_gpus(2, force=True)
    with gpus:
        x = torch.ones(3, device="cuda:1")
    assert x.device.type == "cpu"
    assert (x + torch.ones(3)).tolist() == [2, 2, 2]
    with gpus:
        assert x.device == ONE
    with virtual_gpus(2, force=True):
        assert x.device.type == "cpu"


def test_double_use_is_an_error():
    gpus = virtual_gpus(2, force=True).on()
    try:
        with pytest.raises(RuntimeError, match="2 virtual GPU.* on already.*off"):
            gpus.on()
        assert repr(gpus) == "<2 virtual GPU(s), on>"
    finally:
        gpus.off()
    with pytest.raises(RuntimeError, match="not on"):
        gpus.off()
    assert switched.active is not gpus
    with virtual_gpus(2, force=True) as gpus:
        with pytest.raises(RuntimeError, match="only one such machine"):
            virtual_gpus(3, force=True).on()
        assert switched.active is gpus


def test_a_cell_that_switches_them_on_may_run_twice(capsys):
    first = virtual_gpus(2, force=True).on()
    x = torch.ones(2, device=ONE)
    second = virtual_gpus(3, force=True).on()
    try:
        said = capsys.readouterr().out
        assert said == (
            "The 2 virtual GPU(s) that were on are off now. What was on them is on the "
            "CPU.\n"
        )
        assert x.device.type == "cpu" and repr(first) == "<2 virtual GPU(s), off>"
        assert torch.cuda.device_count() == 3
    finally:
        second.off()
    with first:  # its records are still there
        assert x.device == ONE


def test_off_belongs_where_on_was():
    with virtual_gpus(2, force=True) as gpus:
        with torch.device("cuda:1"):
            with pytest.raises(RuntimeError, match="leave the `with` blocks"):
                gpus.off()
        assert switched.active is gpus


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n is 0: expected a whole number of GPUs from 1 to 64"),
        ({"n": True}, "n is True"),
        ({"memory": "lots"}, "memory is 'lots': expected a size such as '16 GiB'"),
        ({"memory": "1.2.3 GiB"}, "memory is '1.2.3 GiB'"),
        ({"memory": ["1 GiB"]}, "memory has 1 sizes for 2 GPUs"),
        ({"bandwidth": "25 GB"}, "bandwidth is '25 GB': expected a speed"),
        ({"latency": "-1 us"}, "latency is '-1 us': expected a time"),
        ({"overhead": float("nan")}, "overhead is nan"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        virtual_gpus(**arguments)


def test_it_steps_aside_where_real_gpus_are(monkeypatch, capsys):
    monkeypatch.setattr(switched, "real_gpus", lambda: 2)
    gpus = virtual_gpus(2)
    with gpus:
        assert gpus.real
        assert switched.active is not gpus
        assert torch.ones(1).device.type == "cpu"
        with gpus.record() as log, gpus.label("a"):
            pass
        assert log.transfers == gpus.transfers == []
        assert gpus.timeline().seconds == 0
    assert "This machine has 2 real GPU(s)" in capsys.readouterr().out
    assert not gpus.real
    with virtual_gpus(3) as gpus:  # more than there are
        assert not gpus.real
        assert torch.cuda.device_count() == 3


def test_an_untested_version_is_said_and_a_missing_name_refused(monkeypatch):
    switched.check_version.cache_clear()
    monkeypatch.setattr(torch, "__version__", "3.7.0")
    with pytest.warns(UserWarning, match="tested with PyTorch 2.11 to 2.15, not with"):
        switched.check_version()
    monkeypatch.delattr(torch._tensor_str, "_str")
    with pytest.raises(RuntimeError, match="PyTorch 3.7.0: .*no attribute '_str'"):
        virtual_gpus(1, force=True).on()
    switched.check_version.cache_clear()
    assert switched.active is None and not torch.ones(1).is_cuda


# --- devices and factories ------------------------------------------------------------


def test_factories(gpus):
    for x in (
        torch.zeros(2, 3, device="cuda:1"),
        torch.randn(2, device=ONE),
        torch.empty(2, device=1),
        torch.tensor([1.0, 2.0], device="cuda:1"),
        torch.as_tensor(np.ones(3), device="cuda:1"),
        torch.asarray(torch.ones(2), device="cuda:1"),
        torch.hann_window(3, device="cuda:1"),
        torch.zeros_like(torch.ones(2), device="cuda:1"),
        torch.ones(2, device="cuda:1").new_tensor([1]),
        torch.ones(2, device="cuda:1").new(2),
        nn.Linear(2, 2, device="cuda:1").weight,
        nn.init.orthogonal_(torch.empty(3, 3, device="cuda:1")),
    ):
        assert x.device == ONE
        assert (x.is_cuda, x.is_cpu, x.get_device()) == (True, False, 1)
    for x in (torch.zeros(2), torch.tril_indices(3, 3), torch.hann_window(3)):
        assert x.device.type == "cpu"
        assert x.get_device() == -1
    assert torch.zeros(2, device="meta").is_meta


def test_default_device(gpus):
    torch.set_default_device("cuda:2")
    assert torch.zeros(1).device.index == torch.tensor([1]).device.index == 2
    assert torch.get_default_device() == torch.device("cuda:2")
    assert nn.Linear(2, 2).weight.device.index == 2
    torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"
    with torch.device("cuda:1"):
        assert torch.zeros(1).device == torch.tensor([1]).device == ONE
        assert torch.zeros(1, device="cpu").device.type == "cpu"
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize("make", [torch.as_tensor, torch.asarray])
def test_a_gpu_does_not_share_the_memory_of_an_array(gpus, make):
    buffer, batches = np.zeros(2, np.float32), []
    for i in range(3):
        buffer[:] = i
        batches.append(make(buffer, device=ONE))
    assert torch.stack(batches).tolist() == [[0, 0], [1, 1], [2, 2]]
    batches[0] += 5
    assert buffer.tolist() == [2, 2]
    assert [t.bytes for t in gpus.transfers if t.destination == "cuda:1"] == [8, 8, 8]
    assert gpus.memory()[1].now == 3 * 512
    with torch.device("cuda:2"):
        make(buffer).zero_()
    assert buffer.tolist() == [2, 2]
    make(buffer).zero_()  # the CPU does
    assert buffer.tolist() == [0, 0]


def test_a_number_alone_is_a_gpu(gpus):
    # A build of torch without CUDA knows no device of that name: it gets one here.
    assert tensors.named_device(1) == torch.device("cuda", 1)
    assert torch.device(1) == torch.device("cuda:1")
    assert torch.zeros(2, device=torch.device(1)).device.index == 1
    assert torch.device("cpu").type == "cpu"
    with torch.device(1):
        assert str(torch.zeros(2).device) == "cuda:1"


def test_current_device(gpus):
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device == ONE
        assert torch.zeros(1).cuda().device == ONE
    with torch.cuda.device_of(torch.zeros(1, device="cuda:3")):
        assert torch.cuda.current_device() == 3
    for choose in (torch.cuda.set_device, torch.accelerator.set_device_index):
        choose("cuda:2")
        assert torch.zeros(1).to("cuda").device.index == 2
        choose(-1)  # which PyTorch passes over
        assert torch.cuda.current_device() == 2
        choose(0)
        with pytest.raises(ValueError, match="with a specified index or an integer"):
            choose("cuda")


# --- moves ----------------------------------------------------------------------------


def test_every_spelling_of_a_move(gpus):
    x = torch.randn(2, 3)
    for y in (
        x.to("cuda:1"),
        x.to(ONE),
        x.to(1),
        x.to(device="cuda:1"),
        x.cuda(1),
        x.cuda("cuda:1", non_blocking=True),
        x.to(torch.ones(1, device=ONE)),
        x.type_as(torch.ones(1, device=ONE)),
        x.to("cuda:1", non_blocking=True, copy=True),
    ):
        assert y.device == ONE
        assert torch.equal(y.cpu(), x)
    assert x.to(ONE, torch.float64).dtype == torch.float64
    assert x.to(torch.ones(1, device=ONE).half()).dtype == torch.float16
    assert x.t().to(ONE).stride() == x.t().stride()
    y = x.to(ONE)
    assert y.to(ONE) is y.cuda(1) is y
    assert y.to(ONE, copy=True) is not y
    assert y.to(torch.float64).device == y.type(torch.float64).device == ONE
    assert (y.type(), y.cpu().type()) == ("torch.cuda.FloatTensor", "torch.FloatTensor")
    assert y.to("meta").is_meta


def test_modules_move_in_place(gpus):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    model.to(ONE)
    assert model[0].weight is weight
    assert weight.device == model[1].running_mean.device == ONE
    model.to(device="cpu", dtype=torch.half).cuda(2).float()
    assert weight.device.index == 2
    conv = nn.Conv2d(3, 4, 3).to(ONE, memory_format=torch.channels_last)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    assert error_of(lambda: empty.to(ONE), NotImplementedError) == (
        "Cannot copy out of meta tensor; no data! Please use "
        "torch.nn.Module.to_empty() instead of torch.nn.Module.to() when moving module "
        "from meta to a different device."
    )
    assert empty.to_empty(device=ONE).weight.device == ONE
    lazy = nn.LazyLinear(2).to(ONE)
    assert lazy(torch.ones(1, 5, device=ONE)).device == ONE


def test_views_and_tied_weights_are_one_storage(gpus):
    x = torch.zeros(4, 256, device=ONE)
    before = gpus.memory()[1].now
    views = [
        x[1:],
        x.t(),
        x.view(-1),
        x.detach(),
        x.data,
        *x.unbind(),
        x.expand(2, 4, -1),
    ]
    assert all(view.device == ONE for view in views)
    assert gpus.memory()[1].now == before
    tied = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100, bias=False))
    tied[1].weight = tied[0].weight
    tied.to(ONE)
    assert tied[0].weight is tied[1].weight
    assert gpus.memory()[1].now == before + 6656  # 6400 bytes in blocks of 512
    tied(torch.tensor([1], device=ONE)).sum().backward()
    assert tied[0].weight.grad.device == ONE


def test_copies(gpus):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(ONE)
    twin = copy.deepcopy(model)
    assert twin[0].weight.device == twin[1].running_mean.device == ONE
    x = torch.randn(3, device=ONE)
    assert copy.deepcopy(x).device == copy.copy(x).device == x.clone().device == ONE
    assert pickle.loads(pickle.dumps(x)).device == ONE
    assert x.untyped_storage().device == ONE


def test_assignments_across_devices(gpus):
    x = torch.zeros(3, device=ONE)
    x[0] = torch.tensor(5.0)
    x[1:] = torch.ones(2)
    x[torch.tensor([2])] = 7.0
    x[torch.tensor([False, True, False])] = 3.0
    assert x.tolist() == [5, 3, 7]
    assert x[torch.tensor([2, 0])].tolist() == [7, 5]
    assert (x * torch.tensor(2.0)).device == ONE
    source = torch.ones(2, requires_grad=True)
    target = torch.zeros(3, device="cuda:2")
    target[1:] = source
    target.copy_(target * 2)
    target.sum().backward()
    assert source.grad.device.type == "cpu"
    assert source.grad.tolist() == [2, 2]


def test_subclasses_stay(gpus):
    boxes = tv_tensors.BoundingBoxes(
        torch.zeros(1, 4), format="XYXY", canvas_size=(8, 8)
    ).to(ONE)
    assert type(boxes) is tv_tensors.BoundingBoxes
    assert (boxes.device, boxes.canvas_size) == (ONE, (8, 8))

    class Named(torch.Tensor):
        pass

    named = torch.randn(3).as_subclass(Named).cuda(1)
    assert type(named) is Named
    assert (named + 1).device == ONE


# --- PyTorch's own errors -------------------------------------------------------------

SAME = "Expected all tensors to be on the same device, but "


def error_of(function, kind=RuntimeError) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def test_device_errors_are_pytorchs_own(gpus):
    x, y = torch.randn(4, 5, device=ONE), torch.randn(4, 5, device="cuda")
    h = torch.randn(4, 5)
    found = SAME + "found at least two devices, "
    assert error_of(lambda: x + y) == found + "cuda:1 and cuda:0!"
    assert error_of(lambda: h + x) == found + "cuda:1 and cpu!"
    assert error_of(lambda: torch.allclose(x, y)) == found + "cuda:1 and cuda:0!"
    assert torch.allclose(x / x, torch.tensor(1.0))
    assert error_of(lambda: torch.tensor(0.0).add_(x.sum())) == found + (
        "cuda:1 and cpu!"
    )
    checking = "(when checking argument in method wrapper_CUDA_"
    assert error_of(lambda: x @ h.t()) == SAME + (
        f"got mat2 is on cpu, different from other tensors on cuda:1 {checking}mm)"
    )
    linear = nn.Linear(5, 3).cuda(0)
    assert error_of(lambda: linear(x)) == SAME + (
        "got mat1 is on cuda:1, different from other tensors on cuda:0 "
        f"{checking}addmm)"
    )
    assert error_of(lambda: torch.cat([x, h])) == SAME + (
        f"got tensors is on cpu, different from other tensors on cuda:1 {checking}cat)"
    )
    embedding = nn.Embedding(4, 4).cuda()
    assert error_of(lambda: embedding(torch.tensor([1]))) == SAME + (
        "got index is on cpu, different from other tensors on cuda:0 "
        f"{checking}_index_select)"
    )
    loss = error_of(lambda: F.cross_entropy(x, torch.tensor([1, 2, 3, 4])))
    assert loss == SAME + (
        "got target is on cpu, different from other tensors on cuda:1 "
        f"{checking}nll_loss_forward)"
    )
    assert error_of(lambda: torch.arange(3)[torch.tensor([1], device=ONE)]) == (
        "indices should be either on cpu or on the same device as the indexed tensor "
        "(cpu)"
    )
    assert SAME in error_of(lambda: torch.add(x, 1, out=torch.empty(4, 5)))
    assert found in error_of(lambda: torch._foreach_add([x, y], [x, x]))


def test_a_number_from_the_cpu_goes_only_where_cuda_takes_it(gpus):
    x, number, index = torch.rand(3, device=ONE), torch.tensor(0.5), torch.tensor(1)
    for goes in (
        lambda: x + number,
        lambda: torch.where(x > 0.5, x, number),
        lambda: x.masked_fill(x > 0.5, number),
        lambda: F.mse_loss(x.sum(), number),
        lambda: x[index],
        lambda: sum([number, x.sum()]),
    ):
        assert goes().device == ONE
    for wrong, argument, method in (
        (lambda: torch.stack([x.sum(), number]), "tensors", "cat"),
        (lambda: F.cross_entropy(x, index), "target", "nll_loss_forward"),
        (lambda: nn.Embedding(3, 2).to(ONE)(index), "index", "_index_select"),
        (lambda: x.gather(0, index), "index", "gather"),
        (lambda: x.clamp(min=number), "min", "clamp_Tensor"),
    ):
        assert error_of(wrong) == SAME + (
            f"got {argument} is on cpu, different from other tensors on cuda:1 (when "
            f"checking argument in method wrapper_CUDA_{method})"
        )


def test_a_gradient_is_where_its_tensor_is(gpus):
    weight, bias = nn.Parameter(torch.ones(2, device=ONE)), nn.Parameter(torch.ones(2))

    def given(x: torch.Tensor, gradient: torch.Tensor) -> str:
        return error_of(lambda: setattr(x, "grad", gradient))

    wrong = "attempting to assign a gradient "
    end = ". Please ensure that the gradient and the tensor are on the same device"
    kinds = "with device type '{}' to a tensor with device type '{}'"
    assert given(weight, torch.ones(2)) == wrong + kinds.format("cpu", "cuda") + end
    assert given(bias, torch.ones(2).cuda()) == wrong + kinds.format("cuda", "cpu") + (
        end
    )
    assert given(weight, torch.ones(2).cuda(2)) == (
        f"{wrong}located on device with index '2' to a tensor located on device with "
        f"index '1'{end}"
    )
    weight.grad, bias.grad = torch.ones(2, device=ONE), torch.ones(2)
    nn.ParameterList([weight, bias]).to("cuda:2")
    assert weight.grad.device.index == bias.grad.device.index == 2
    weight.grad = None


def no_home(
    there: str, here: str = "cuda:0", function: str = "", index: int = 0
) -> str:
    """What autograd's engine says of a gradient."""
    whose = f"Function {function} returned an " if function else ""
    return (
        f"{whose}invalid gradient at index {index} - expected device {here} but got "
        f"{there}"
    )


class Copy(torch.autograd.Function):
    """A copy to a device that forgets to send the gradient back."""

    @staticmethod
    def forward(ctx, device, x, y=None):
        return x.to(device) if y is None else (x.to(device), y.to(device))

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


def test_a_function_returns_gradients_to_where_its_inputs_are(gpus):
    def a(*size: int, device: str = "cuda:0", needed: bool = True) -> torch.Tensor:
        return torch.ones(size, device=device, requires_grad=needed)

    def run(device: str, *inputs: torch.Tensor) -> None:
        out = Copy.apply(device, *inputs)
        (out if len(inputs) == 1 else out[0] + out[1]).sum().backward()

    wrong = {"function": "CopyBackward"}
    for inputs, device, message in (
        ([a(2)], "cuda:1", no_home("cuda:1", **wrong)),
        ([a(2) * 2], "cpu", no_home("cpu", **wrong)),
        ([a(2, device="cuda:1"), a(2)], "cuda:1", no_home("cuda:1", index=1, **wrong)),
    ):
        assert error_of(lambda d=device, i=inputs: run(d, *i)) == message
    number, x = a(), a(2, device="cuda:1")
    run("cuda:1", number)  # PyTorch moves a gradient without dimensions
    assert str(number.grad.device) == "cuda:0"
    run("cuda:1", x, a(2, needed=False))  # and drops one that nobody wants
    assert x.grad.device == ONE

    graph = Copy.apply("cuda:1", a(2)).sum()
    gpus.off()  # the check leaves with the machine
    try:
        graph.backward()
    finally:
        gpus.on()


def test_a_gradient_from_outside_is_where_its_tensor_is(gpus):
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    for there in ("cpu", "cuda:1"):
        other = torch.ones(2, device=there)
        assert error_of(lambda o=other: (x * 2).backward(o)) == no_home(there)
        assert error_of(
            lambda o=other: torch.autograd.grad([x.sum(), x * 2], x, [None, o])
        ) == no_home(there, index=1)
    assert x.grad is None
    (x * 2).sum().backward(torch.tensor(3.0))  # one without dimensions is moved
    assert (x.grad.tolist(), str(x.grad.device)) == ([6, 6], "cuda:0")
    many = torch.eye(2, device="cuda:0")
    (rows,) = torch.autograd.grad(x * 2, x, many, is_grads_batched=True)
    assert (rows.tolist(), str(rows.device)) == ([[2, 0], [0, 2]], "cuda:0")
    plain = torch.ones(2)
    assert "does not require grad" in error_of(lambda: plain.backward(many[0]))


def test_a_number_on_the_cpu_gets_its_gradient_there(gpus):
    weights, x = torch.ones(3, requires_grad=True), torch.ones(2, device=ONE)
    number = torch.tensor(2.0, requires_grad=True)
    for _ in range(2):
        (x * number * weights.sum()).sum().backward()
    assert number.grad.device == weights.grad.device == torch.device("cpu")
    assert (number.grad.item(), weights.grad.tolist()) == (12, [8, 8, 8])
    assert len(number._backward_hooks) == 1
    assert [t.phase for t in gpus.transfers if t.destination == "cpu"][:4] == (
        ["backward"] * 4
    )


def test_errors_of_convolutions_and_recurrent_layers(gpus):
    conv, image = nn.Conv2d(3, 4, 3).cuda(), torch.randn(1, 3, 8, 8)
    assert error_of(lambda: conv(image)) == (
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) "
        "should be the same or input should be a MKLDNN tensor and weight is a dense "
        "tensor"
    )
    assert error_of(lambda: conv.cpu()(image.cuda())) == (
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) "
        "should be the same"
    )
    assert error_of(lambda: conv.cuda(1)(image.cuda())) == SAME + (
        "got weight is on cuda:1, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA__cudnn_convolution)"
    )
    lstm, words = nn.LSTM(4, 4).cuda(1), torch.randn(2, 2, 4)
    assert error_of(lambda: lstm(words.cuda())) == (
        "Input and parameter tensors are not at the same device, found input tensor at "
        "cuda:0 and parameter tensor at cuda:1"
    )
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    assert error_of(lambda: lstm(words.cuda(1), state)) == (
        "Input and hidden tensors are not at the same device, found input tensor at "
        "cuda:1 and hidden tensor at cpu"
    )
    pack = nn.utils.rnn.pack_padded_sequence
    lengths = torch.tensor([2, 1], device=ONE)
    assert error_of(lambda: pack(words.cuda(1), lengths)) == (
        "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:1 Long "
        "tensor"
    )


def test_errors_of_devices_and_of_numpy(gpus):
    x = torch.ones(2, device=ONE)
    for wrong in (
        lambda: x.cuda(7),
        lambda: torch.zeros(1, device="cuda:4"),
        lambda: torch.cuda.set_device(4),
        lambda: nn.Linear(2, 2).to("cuda:9"),
    ):
        message = error_of(wrong, torch.AcceleratorError)
        assert message.startswith("CUDA error: invalid device ordinal\n")
        assert "there are 4 virtual GPU(s), cuda:0 to cuda:3" in message
    for wrong in (x.numpy, lambda: np.asarray(x), lambda: np.array([x, x])):
        assert error_of(wrong, TypeError) == (
            "can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu() to "
            "copy the tensor to host memory first."
        )
    assert x.numpy(force=True).tolist() == x.tolist() == [1, 1]
    assert "only dense CPU tensors can be pinned" in error_of(x.pin_memory)
    for place, seed in (("cuda", torch.Generator()), ("cpu", torch.Generator("cuda"))):
        y = torch.ones(3, device=place)
        for draw in (
            lambda **how: torch.randn(3, device=place, **how),  # noqa: B023
            y.normal_,
            lambda **how: torch.multinomial(y, 2, **how),  # noqa: B023
            lambda **how: nn.init.normal_(y, **how),  # noqa: B023
        ):
            assert error_of(lambda d=draw, g=seed: d(generator=g)) == (
                f"Expected a '{place}' device type for generator but found "
                f"'{seed.device.type}'"
            )
        y.normal_(generator=torch.Generator(place))


def test_errors_in_which_the_cpu_has_other_words(gpus):
    x, here = torch.ones(1, 2, 4, 8, device=ONE), torch.ones(1, 2, 4, 8)
    attention = F.scaled_dot_product_attention
    assert error_of(lambda: attention(x, here, x)) == (
        "Expected query, key, and value to have the same device type, but got "
        "query.device: cuda:1 key.device: cpu and value.device: cuda:1 instead."
    )
    checking = "(when checking argument in method wrapper_CUDA__"
    assert error_of(lambda: attention(x, x, x, torch.ones(4, 4))) == SAME + (
        f"got attn_bias is on cpu, different from other tensors on cuda:1 {checking}"
        "_scaled_dot_product_efficient_attention)"
    )
    norm = nn.BatchNorm2d(2)
    assert error_of(lambda: norm.to(ONE)(here)) == SAME + (
        f"got weight is on cuda:1, different from other tensors on cpu {checking}"
        "native_batch_norm)"
    )
    y = x[0, 0]
    assert error_of(lambda: y @ y.double().t()) == (
        "expected mat1 and mat2 to have the same dtype, but got: float != double"
    )
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(4)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1024.00 GiB"):
        y[0].expand(2**35, 8) + 1


def test_inference_mode(gpus):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    there = torch.ones(4, 4, device="cuda:2")
    wave = torch.randn(2, 3, 4, dtype=torch.complex64)
    with torch.inference_mode():
        model.eval().to(ONE)
        out = model(x.to(ONE))
        assert out.is_inference()
        assert out.device == model[0].weight.device == ONE
        for views in (lambda x: x.chunk(2)[1], lambda x: x.narrow(0, 1, 2)):
            assert torch.equal(views(there).cpu(), views(there.cpu()))
        conjugated = torch.fft.hfftn(wave.to(ONE)).cpu()
        assert torch.equal(conjugated, torch.fft.hfftn(wave))
        message = error_of(lambda: F.linear(out, there))
    assert torch.equal(out.cpu(), model.cpu()(x))
    with torch.no_grad():  # an inference tensor stays one
        assert message == error_of(lambda: F.linear(out, there))
    assert message == SAME + (
        "got mat2 is on cuda:2, different from other tensors on cuda:1 (when checking "
        "argument in method wrapper_CUDA_mm)"
    )


def test_a_failed_op_leaves_the_machine_usable(gpus):
    for _ in range(3):
        with pytest.raises(RuntimeError):
            nn.Sequential(nn.Linear(2, 2).cuda(0), nn.Linear(2, 2).cuda(1))(
                torch.ones(1, 2, device="cuda")
            )
    assert (torch.ones(2, device=ONE) + 1).device == ONE
    assert gpus.machine.thread.modules == []


# --- autograd -------------------------------------------------------------------------


def test_gradients_find_their_way_back(gpus):
    host = torch.randn(3, requires_grad=True)
    leaf = torch.randn(3, device=ONE, requires_grad=True)
    middle = host.to(ONE)
    middle.retain_grad()
    ((middle * leaf).to("cuda:2") ** 2).sum().cpu().backward()
    assert host.grad.device.type == "cpu"
    assert middle.grad.device == leaf.grad.device == ONE
    assert torch.allclose(host.grad, 2 * host.detach() * leaf.detach().cpu() ** 2)


def test_higher_derivatives(gpus):
    x = torch.randn(3, device=ONE, requires_grad=True)
    (first,) = torch.autograd.grad((x.to("cuda:0") ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.device == second.device == ONE
    assert torch.allclose(second, 6 * x)
    double = torch.randn(2, 2, dtype=torch.double, device=ONE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torch.tanh(x.cuda() @ x.cuda()), double)


def test_function_transforms(gpus):
    x = torch.randn(4, 3, device=ONE)
    assert torch.allclose(torch.func.grad(lambda x: (x.cuda() ** 2).sum())(x), 2 * x)
    assert torch.vmap(lambda row: row.to("cuda:2") * 2)(x).device.index == 2
    assert torch.func.hessian(lambda x: (x**3).sum())(x[0]).device == ONE
    _, tangent = torch.func.jvp(lambda x: x.cuda() * 3, (x,), (torch.ones_like(x),))
    assert tangent.device.index == 0
    model = nn.Linear(3, 2).to(ONE)

    def loss(parameters, row):
        assert row.device == ONE
        return torch.func.functional_call(model, parameters, (row,)).sum()

    per_row = torch.vmap(torch.func.grad(loss), (None, 0))
    grads = per_row(dict(model.named_parameters()), x)
    assert (grads["weight"].shape, grads["weight"].device) == ((4, 2, 3), ONE)


def test_hooks_and_functions_written_in_python(gpus):
    seen = []

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * y + torch.zeros(3, device=grad.device)

    model = nn.Linear(3, 3).to(ONE)
    model.register_forward_hook(lambda m, i, out: seen.append(out.device))
    model.register_full_backward_hook(lambda m, i, out: seen.append(out[0].device))
    model.weight.register_hook(lambda g: seen.append(g.device))
    model.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.device)
    )
    x = torch.randn(2, 3, device=ONE, requires_grad=True)
    Exp.apply(model(x)).sum().backward()
    assert seen == [ONE] * 4
    assert x.grad.device == ONE


def test_zeros_that_cpp_makes_in_a_backward_find_their_device(gpus):
    for use in (
        lambda x: x.chunk(2)[0],
        lambda x: x.unbind()[1],
        lambda x: x.split(1)[2],
        lambda x: torch.linalg.svdvals(x),
        lambda x: F.max_pool2d(x[None], 2),
        lambda x: x.sgn() + x,
        lambda x: x.diagonal(),
        lambda x: x.to("cuda:2")[:2].to(ONE),
    ):
        x = torch.randn(4, 4, device=ONE, requires_grad=True)
        use(x).sum().backward()
        assert x.grad.device == ONE
        (x.grad + x).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_and_saved_tensors(gpus, reentrant):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)).to(ONE)
    x = torch.randn(2, 3, device=ONE, requires_grad=True)
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        x.grad = None
        run(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x * x).exp()
    used = gpus.memory()[1].now
    y.sum().backward()
    assert x.grad.device == ONE
    assert used < 2**20


def test_torchscript(gpus):
    @torch.jit.script
    def scaled(x, y):
        return x * y + torch.ones(3, device=x.device)

    x = torch.ones(3, device=ONE)
    assert scaled(x, x).device == ONE
    traced = torch.jit.trace(nn.Linear(3, 3).to(ONE), torch.ones(1, 3, device=ONE))
    assert traced(torch.ones(2, 3, device=ONE)).device == ONE


def test_custom_operators(gpus):
    @torch.library.custom_op("course_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.full(x.shape, 2.0, device=x.device) * x

    twice.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.ones(3, device=ONE, requires_grad=True)
    y = twice(x)
    assert y.device == ONE
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert x.device == ONE


# --- files and data -------------------------------------------------------------------


def test_files_remember_devices(gpus):
    file = io.BytesIO()
    torch.save(nn.Linear(3, 3).to(ONE).state_dict(), file)

    def loaded(**how) -> torch.device:
        file.seek(0)
        return torch.load(file, **how)["weight"].device

    assert loaded() == ONE
    assert loaded(map_location="cpu").type == "cpu"
    assert loaded(map_location="cuda:3").index == 3
    assert loaded(map_location=torch.device("cuda")).index == 0
    assert loaded(map_location={"cuda:1": "cuda:2"}).index == 2
    assert loaded(map_location=lambda storage, place: storage).type == "cpu"
    assert loaded(map_location=lambda storage, place: storage.cuda(2)).index == 2
    assert loaded(weights_only=False) == ONE
    with pytest.raises(RuntimeError, match=r"device_count\(\) is 4.*map_location"):
        loaded(map_location="cuda:4")
    file.seek(0)
    model = nn.Linear(3, 3).cuda()
    model.load_state_dict(torch.load(file, map_location="cpu"))
    assert model.weight.device.index == 0
    gpus.off()
    try:
        if not torch.cuda.is_available():
            with pytest.raises(
                RuntimeError, match="on a CUDA device but torch.cuda.is"
            ):
                loaded()
        assert loaded(map_location="cpu").type == "cpu"
    finally:
        gpus.on()


class _OnTheGpu(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(2).cuda()


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(gpus, workers):
    data = TensorDataset(torch.randn(6, 3), torch.arange(6))
    fork = {"multiprocessing_context": "fork"} if workers else {}
    batches = list(DataLoader(data, 4, pin_memory=True, num_workers=workers, **fork))
    assert [len(x) for x, _ in batches] == [4, 2]
    for x, y in batches:
        assert x.is_pinned()
        assert x.to(ONE, non_blocking=True).device == ONE
        assert y.device.type == "cpu"
    if workers:
        with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked"):
            list(DataLoader(_OnTheGpu(), 2, num_workers=1, **fork))


# --- torch.cuda -----------------------------------------------------------------------


def test_queries(gpus):
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert torch.cuda.get_device_name(1) == "Virtual GPU"
    assert torch.cuda.get_device_capability(0) == (9, 0)
    assert torch.cuda.get_device_properties(1).total_memory == 2**30
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.mem_get_info(2) == (2**30, 2**30)
    x = torch.zeros(1000, device=ONE)
    assert torch.cuda.memory_allocated(1) == torch.cuda.memory_reserved(1) == 4096
    y = torch.zeros(1000, device=ONE)
    del y
    assert torch.cuda.max_memory_allocated("cuda:1") == 8192
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(ONE) == 4096
    assert torch.accelerator.memory_allocated(1) == 4096
    assert torch.cuda.memory_allocated() == 0
    assert "PyTorch CUDA memory summary, device ID 1" in torch.cuda.memory_summary(1)
    torch.cuda.empty_cache()
    del x


def test_random_numbers(gpus):
    generator = torch.Generator(device="cuda").manual_seed(3)
    first = torch.randn(3, device=ONE, generator=generator)
    again = torch.randn(3, device=ONE, generator=generator.manual_seed(3))
    assert torch.equal(first, again)
    for seed in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):
        seed(1)
        first = torch.rand(2, device=ONE)
        seed(1)
        assert torch.equal(first, torch.rand(2, device=ONE))
    state = torch.cuda.get_rng_state(1)
    first = torch.rand(2, device=ONE)
    torch.cuda.set_rng_state(state, 1)
    assert torch.equal(first, torch.rand(2, device=ONE))


def test_streams_and_events(gpus):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        begin.record()
        x = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        end.record()
        x.record_stream(stream)
    torch.cuda.synchronize()
    assert stream.query()
    assert begin.elapsed_time(end) > 0
    with pytest.raises(ValueError, match="must be recorded"):
        begin.elapsed_time(torch.cuda.Event(True))
    untimed = stream.record_event()
    for one, other in ((begin, untimed), (untimed, end)):
        assert error_of(lambda a=one, b=other: a.elapsed_time(b), ValueError) == (
            "Both events must be created with argument 'enable_timing=True'."
        )


def test_an_event_is_complete_when_the_host_has_waited_for_it():
    with virtual_gpus(2, compute="1 TFLOP/s") as gpus:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        x = torch.ones(1000, 1000, device="cuda")
        torch.cuda.synchronize()
        begin.record()
        y = x @ x  # 2 GFLOP: 2 ms and the 5 us that an op takes to start
        end.record()
        assert begin.query() and not end.query()
        assert not torch.cuda.current_stream().query()
        assert error_of(lambda: begin.elapsed_time(end), RuntimeError) == (
            "Both events must be completed before calculating elapsed time. "
            "(Call torch.cuda.synchronize() first.)"
        )
        other = torch.cuda.Stream(1)
        assert other.query()
        other.wait_event(end)  # the other GPU's next work has to wait, the host not
        assert not other.query() and not end.query()
        with torch.cuda.stream(other):
            z = torch.ones(10, 10, device="cuda")
        began = gpus.timeline().intervals["cuda:1"][-1].start
        end.synchronize()
        assert end.query() and torch.cuda.current_stream().query()
        assert begin.elapsed_time(end) == pytest.approx(2.005)
        assert began == gpus.timeline().intervals["cuda:0"][-1].stop

        torch.cuda.synchronize(1)
        y @ y
        torch.cuda.Stream(1).wait_stream(torch.cuda.current_stream(0))
        looks = 0
        while not other.query():
            looks += 1
        assert looks > 100  # each of them takes a moment, so that the loop ends
        del x, y, z


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(gpus, dtype):
    model = nn.Linear(8, 8).to(ONE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(2, 8, device=ONE)
    with torch.autocast("cuda", dtype):
        assert torch.is_autocast_enabled()
        assert torch.get_autocast_dtype("cuda") == dtype
        y = model(x)
        assert y.dtype == (y @ y.t()).dtype == dtype
        assert y.softmax(1).dtype == F.layer_norm(y, (8,)).dtype == torch.float32
        loss = F.mse_loss(y, x)
        assert loss.dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert model(x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(y.sigmoid(), y.sigmoid())
    assert not torch.is_autocast_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    weight = model.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, weight)


def test_cudas_autocast_has_cudas_lists_of_ops(gpus):
    x = torch.rand(4, 4, device=ONE)
    with torch.autocast("cuda"):
        h = x @ x
        image = h[None, None]
        for y in (
            torch.linalg.norm(h),
            nn.RMSNorm(4).to(ONE)(h),
            F.interpolate(image, scale_factor=2),
            torch.tensordot(h, x, 1),  # the widest of both
        ):
            assert y.dtype == torch.float32
        for y in (
            F.pad(image, (1, 1, 1, 1), mode="replicate"),
            h.trace(),
            torch.einsum("ij,jk->ik", x, x),
            nn.LSTMCell(4, 4).to(ONE)(x)[0],
            nn.LSTM(4, 4).to(ONE)(x)[0],
        ):
            assert (y.dtype, y.device) == (torch.float16, ONE)
        large = torch.full((8, 8), 80.0, device=ONE)
        norm = torch.linalg.vector_norm(large @ large)  # 64 times 51,200
        assert norm.item() == pytest.approx(8 * 51_200)
    lstm = nn.LSTM(4, 4).to(ONE)
    with torch.autocast("cuda"):
        loss = lstm(x)[0].float().sum()
    loss.backward()
    assert lstm.weight_ih_l0.grad.dtype == torch.float32


def test_each_device_has_its_own_autocast(gpus):
    here, there = torch.rand(2, 2), torch.rand(2, 2, device=ONE)
    layer = nn.Linear(2, 2)

    def dtypes() -> tuple:
        return layer(here).dtype, (here @ here).dtype, (there @ there).dtype

    full, half, brain = torch.float32, torch.float16, torch.bfloat16
    with torch.autocast("cuda"):
        assert dtypes() == (full, full, half)
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu"):
            assert dtypes() == (brain, brain, half)
            assert torch.get_autocast_dtype("cpu") == brain
            with torch.autocast("cuda", enabled=False):
                assert dtypes() == (brain, brain, full)
        with torch.autocast("cpu", enabled=False):
            assert dtypes() == (full, full, half)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            here @ torch.rand(3, 3)
        assert dtypes() == (full, full, half)
    with torch.autocast("cpu"):
        assert dtypes() == (brain, brain, full)
        with torch.autocast("cuda", brain):
            assert dtypes() == (brain, brain, brain)
        F.binary_cross_entropy(there, there)
    assert dtypes() == (full, full, full)
    assert not torch.is_autocast_enabled("cpu")


def test_printing_waits_as_on_a_gpu():
    with virtual_gpus(2, compute="1 TFLOP/s", force=True) as gpus:
        for show in (None, print, repr, str, "{}".format):
            x, y = (torch.ones(300, 300, device=f"cuda:{i}") for i in (0, 1))
            gpus.clear()
            z = x @ x
            if show is not None:
                show(z)
            y @ y
            worked = gpus.timeline().intervals
            waited = worked["cuda:1"][0].start >= worked["cuda:0"][-1].stop
            assert waited == (show is not None), show


def test_printing_shows_the_device_and_costs_nothing(gpus):
    x = torch.ones(2, device=ONE)
    gpus.clear()
    assert repr(x) == "tensor([1., 1.], device='cuda:1')"
    assert "device='cuda:0'" in repr(torch.ones(1, device="cuda"))
    assert "device='cuda:1'" in repr(nn.Parameter(x))
    assert f"{x.sum():.2f}" == "2.00"
    assert [t.kind for t in gpus.transfers] == ["item"]


# --- threads and processes ------------------------------------------------------------


def test_threads(gpus):
    found = {}

    def work(i: int) -> None:
        assert torch.cuda.current_device() == 0
        torch.cuda.set_device(i)
        x = torch.randn(3, 3, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        found[i] = x.grad.device.index

    class Worker(threading.Thread):
        def run(self) -> None:  # not the run of Thread
            work(3)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)] + [Worker()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 1, 2: 2, 3: 3}
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda i: torch.zeros(2, device=ONE) + i, range(8))
        assert [x.tolist() for x in results] == [[i, i] for i in range(8)]


def test_a_thread_that_goes_on_when_they_are_off_computes_on_the_cpu():
    off, made = threading.Event(), []

    def work() -> None:
        assert off.wait(30)
        made.append(torch.zeros(2, dtype=torch.float64))

    with virtual_gpus(1, force=True):
        thread = threading.Thread(target=work)
        thread.start()
    off.set()
    thread.join()
    assert (made[0].dtype, made[0].device.type) == (torch.float64, "cpu")


def test_the_lengths_of_a_packed_sequence_take_no_gpu_memory(gpus):
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    out, lengths = nn.utils.rnn.pad_packed_sequence(packed.to("cuda:0"))
    assert lengths.device.type == "cpu"
    del out, packed
    assert gpus.memory()[0].now == 0


def test_in_a_rank():
    def on_rank(steps: int) -> list:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from course_utils import virtual_gpus

        rank = dist.get_rank()

        def trained(place) -> list:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(place)
            ids = None if place == "cpu" else [rank]
            parallel = DistributedDataParallel(model, device_ids=ids)
            optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
            for step in range(steps):
                optimizer.zero_grad()
                x = torch.full((2, 4), rank + step + 1.0)
                parallel(x.to(place)).pow(2).mean().backward()
                optimizer.step()
            assert model[0].weight.grad.device == torch.device(place)
            return [p.tolist() for p in model.parameters()]

        plain = trained("cpu")
        with virtual_gpus(2, force=True):
            torch.cuda.set_device(rank)
            x = torch.ones(3, device="cuda") * (rank + 1)
            dist.all_reduce(x)
            return [str(x.device), x.tolist(), trained(f"cuda:{rank}") == plain]

    with Ranks(2) as ranks:
        assert ranks.run(on_rank, 3) == [
            ["cuda:0", [3, 3, 3], True],
            ["cuda:1", [3, 3, 3], True],
        ]


def test_other_threads_go_on_while_one_waits_for_a_rank():
    def on_rank() -> float | None:
        import threading
        import time

        import torch
        import torch.distributed as dist

        from course_utils import virtual_gpus

        sign = torch.zeros(1)
        if dist.get_rank() == 1:  # it comes when rank 0 has computed
            dist.recv(sign, 0)
            dist.monitored_barrier()
            return None
        with virtual_gpus(1, force=True):
            waits = threading.Thread(target=dist.monitored_barrier)
            waits.start()
            time.sleep(0.2)
            total = (torch.ones(3, device="cuda") + 1).sum().item()
            dist.send(sign, 1)
            waits.join()
        return total

    with Ranks(2, timeout=30) as ranks:
        assert ranks.run(on_rank) == [6.0, None]


@pytest.mark.thorough
def test_in_a_notebook():
    """One machine for many cells, also those that wait."""
    with Kernel() as kernel:
        kernel.run_well(
            "import torch, asyncio\nfrom course_utils import virtual_gpus\n"
            "gpus = virtual_gpus(2, force=True).on()\n"
            "x = torch.ones(3, device='cuda:1')"
        )
        kernel.run_well("await asyncio.sleep(0.01)\ny = (x * 2).to('cuda:0')")
        assert (
            "tensor([2., 2., 2.], device='cuda:0')" in kernel.run_well("print(y)").text
        )
        failed = kernel.run("x + torch.ones(3)")
        assert "found at least two devices, cuda:1 and cpu!" in failed.text
        assert failed.text.count("machine.py") == 1  # the frames between are hidden


def test_other_modes_inside(gpus):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as flops:
        nn.Linear(4, 4).to(ONE)(torch.ones(2, 4, device=ONE)).sum().backward()
    assert flops.get_total_flops() == 2 * 2 * 2 * 4 * 4
