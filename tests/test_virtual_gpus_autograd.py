"""Derivatives on virtual GPUs, where gradients belong, and mixed precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_utils import virtual_gpus

ONE = torch.device("cuda:1")


@pytest.fixture
def gpus():
    with virtual_gpus(3, force=True) as on:
        yield on


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := x.exp())
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y + torch.zeros(3, device=grad.device)


def scripted(x):
    return x * x + torch.ones(3, device=x.device)


@torch.library.custom_op("course_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.full(x.shape, 2.0, device=x.device) * x


twice.register_autograd(lambda ctx, grad: grad * 2)


def gradient(function, **options):
    """Of the sum of what the function makes of x."""

    def derive(x, away, home):
        loss = function(x, away, home).sum()
        return torch.autograd.grad(loss, x, **options)[0]

    return derive


def dropout(reentrant):
    """With the same random numbers when it is computed again."""

    def function(x, away, home):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Dropout(0.5), nn.Tanh())
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        return x.grad

    return function


def saved_on_the_cpu(x, away, home):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x * x).exp()
    return torch.autograd.grad(y.sum(), x)[0]


CUBE = gradient(lambda x, away, home: away(x) ** 3, create_graph=True)
DERIVATIVES = {
    "to another GPU and back": gradient(lambda x, away, home: home(away(x) ** 2) * x),
    "the second one": gradient(CUBE),
    "func.grad": lambda x, away, home: torch.func.grad(lambda x: away(x).exp().sum())(
        x
    ),
    "func.jvp": lambda x, away, home: home(
        torch.func.jvp(lambda x: away(x) * 3, (x,), (torch.ones_like(x),))[1]
    ),
    "vmap": lambda x, away, home: home(torch.vmap(lambda row: away(row) * 2)(x)),
    # Zeros that C++ makes in a backward
    "chunk": gradient(lambda x, away, home: x.chunk(2)[0]),
    "unbind": gradient(lambda x, away, home: x.unbind()[1]),
    "svdvals": gradient(lambda x, away, home: torch.linalg.svdvals(x)),
    "max_pool2d": gradient(lambda x, away, home: F.max_pool2d(x[None], 2)),
    "sgn": gradient(lambda x, away, home: x.sgn() + x),
    "a part of a copy": gradient(lambda x, away, home: home(away(x)[:2])),
    "a function in Python": gradient(lambda x, away, home: Exp.apply(x)),
    "a custom operator": gradient(lambda x, away, home: twice(x)),
    "TorchScript": gradient(lambda x, away, home: torch.jit.script(scripted)(x)),
    "a checkpoint": dropout(False),
    "a reentrant checkpoint": dropout(True),
    "saved on the CPU": saved_on_the_cpu,
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_the_cpus_and_on_the_right_gpu(gpus, name):
    torch.manual_seed(1)
    here = torch.randn(4, 3, requires_grad=True)
    there = here.detach().to(ONE).requires_grad_()
    expected = DERIVATIVES[name](here, lambda x: x, lambda x: x)
    found = DERIVATIVES[name](there, lambda x: x.to("cuda:2"), lambda x: x.to(ONE))
    assert found.device == ONE
    torch.testing.assert_close(found.cpu(), expected)


def test_hooks(gpus):
    seen = []
    model = nn.Linear(3, 3).to(ONE)
    model.register_forward_hook(lambda m, i, out: seen.append(out.device))
    model.register_full_backward_hook(lambda m, i, out: seen.append(out[0].device))
    model.weight.register_hook(lambda g: seen.append(g.device))
    model.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.device)
    )
    x = torch.randn(2, 3, requires_grad=True)
    middle = x.to(ONE)
    middle.retain_grad()
    with FlopCounterMode(display=False) as flops:
        model(middle).sum().to("cuda:2").backward()
    assert seen == [ONE] * 4
    assert (x.grad.device.type, middle.grad.device) == ("cpu", ONE)
    assert flops.get_total_flops() == 3 * 2 * 2 * 3 * 3


# --- where gradients belong -----------------------------------------------------------


def test_a_gradient_is_assigned_where_its_tensor_is(gpus):
    weight, bias = nn.Parameter(torch.ones(2, device=ONE)), nn.Parameter(torch.ones(2))
    for x, grad, words in (
        (weight, torch.ones(2), "type 'cpu' to a tensor with device type 'cuda'"),
        (bias, torch.ones(2).cuda(), "type 'cuda' to a tensor with device type 'cpu'"),
        (weight, torch.ones(2).cuda(2), "with index '2' to a tensor located on device"),
    ):
        with pytest.raises(RuntimeError, match=f"assign a gradient .*{words}"):
            x.grad = grad
    weight.grad, bias.grad = torch.ones(2, device=ONE), torch.ones(2)
    nn.ParameterList([weight, bias]).to("cuda:2")
    assert weight.grad.device.index == bias.grad.device.index == 2


def no_home(there: str, index: int = 0):
    """What autograd's engine says of a gradient."""
    says = f"invalid gradient at index {index} - expected device cuda:0 but got {there}"
    return pytest.raises(RuntimeError, match=says)


class Copy(torch.autograd.Function):
    """A copy to a device that forgets to send the gradient back."""

    @staticmethod
    def forward(ctx, device, x, y):
        return x.to(device), y.to(device)

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


def test_a_function_returns_gradients_to_where_its_inputs_are(gpus):
    def run(device: str, *inputs: torch.Tensor) -> None:
        x, y = Copy.apply(device, *inputs)
        (x + y).sum().backward()

    x = torch.ones(2, device="cuda:0", requires_grad=True)
    there = torch.ones(2, device=ONE, requires_grad=True)
    for inputs, place, index in (
        ((x, x * 2), "cuda:1", 0),
        ((x * 2, x), "cpu", 0),
        ((there, x), "cuda:1", 1),
    ):
        with no_home(place, index):
            run(place, *inputs)
    number = torch.ones((), device="cuda:0", requires_grad=True)
    run("cuda:1", there, number)  # PyTorch moves a gradient without dimensions
    assert str(number.grad.device) == "cuda:0"
    run("cuda:1", there, x.detach())  # and drops one that nobody wants
    assert there.grad.device == ONE

    graph = Copy.apply("cuda:1", x, there)[0].sum()
    gpus.off()  # the check leaves with the machine
    try:
        graph.backward()
    finally:
        gpus.on()


def test_a_gradient_from_outside_is_where_its_tensor_is(gpus):
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    for place in ("cpu", "cuda:1"):
        other = torch.ones(2, device=place)
        with no_home(place):
            (x * 2).backward(other)
        with no_home(place, index=1):
            torch.autograd.grad([x.sum(), x * 2], x, [None, other])
    assert x.grad is None
    (x * 2).sum().backward(torch.tensor(3.0))  # one without dimensions is moved
    assert (x.grad.tolist(), str(x.grad.device)) == ([6, 6], "cuda:0")
    many = torch.eye(2, device="cuda:0")
    (rows,) = torch.autograd.grad(x * 2, x, many, is_grads_batched=True)
    assert (rows.tolist(), str(rows.device)) == ([[2, 0], [0, 2]], "cuda:0")


def test_a_number_on_the_cpu_gets_its_gradient_there(gpus):
    weights, x = torch.ones(3, requires_grad=True), torch.ones(2, device=ONE)
    number = torch.tensor(2.0, requires_grad=True)
    for _ in range(2):
        (x * number * weights.sum()).sum().backward()
    assert number.grad.device == weights.grad.device == torch.device("cpu")
    assert (number.grad.item(), weights.grad.tolist()) == (12, [8, 8, 8])
    phases = [t.phase for t in gpus.transfers if t.destination == "cpu"]
    assert phases[:4] == ["backward"] * 4


# --- mixed precision ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(gpus, dtype):
    model = nn.Linear(8, 8).to(ONE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024)
    x = torch.randn(2, 8, device=ONE)
    with torch.autocast("cuda", dtype):
        assert torch.is_autocast_enabled()
        assert torch.get_autocast_dtype("cuda") == dtype
        y = model(x)
        assert y.dtype == (y @ y.t()).dtype == dtype
        assert y.softmax(1).dtype == F.layer_norm(y, (8,)).dtype == torch.float32
        loss = F.mse_loss(y, x)
        assert loss.dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(y.sigmoid(), y.sigmoid())
    assert not torch.is_autocast_enabled()
    weight = model.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, weight)


def test_cudas_autocast_has_cudas_lists_of_ops(gpus):
    x = torch.rand(4, 4, device=ONE)
    lstm = nn.LSTM(4, 4).to(ONE)
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
            out := lstm(x)[0],
        ):
            assert (y.dtype, y.device) == (torch.float16, ONE)
        large = torch.full((8, 8), 80.0, device=ONE)
        norm = torch.linalg.vector_norm(large @ large)  # 64 times 51,200
        assert norm.item() == pytest.approx(8 * 51_200)
    out.float().sum().backward()
    assert lstm.weight_ih_l0.grad.dtype == torch.float32


def test_each_device_has_its_own_autocast(gpus):
    here, there = torch.rand(2, 2), torch.rand(2, 2, device=ONE)
    layer = nn.Linear(2, 2)

    def dtypes() -> tuple:
        return layer(here).dtype, (here @ here).dtype, (there @ there).dtype

    full, half, brain = torch.float32, torch.float16, torch.bfloat16
    with torch.autocast("cuda"):
        assert dtypes() == (full, full, half)
        with torch.autocast("cpu"):
            assert dtypes() == (brain, brain, half)
            with torch.autocast("cuda", enabled=False):
                assert dtypes() == (brain, brain, full)
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
