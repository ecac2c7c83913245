"""Virtual GPUs as a user meets them: on and off, devices, moves, errors, torch.cuda."""

import copy
import functools
import io
import pickle
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import tv_tensors

from course_utils import virtual_gpus
from course_utils.virtual_gpus import autograd
from course_utils.virtual_gpus import gpus as switched

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
        "import sys, course_utils; from course_utils import launch, virtual_gpus\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
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


def test_only_one_machine_is_on_and_off_belongs_where_on_was():
    gpus = virtual_gpus(2, force=True)
    gpus.off()  # as a cell does that runs a second time
    with gpus:
        for other in (gpus, virtual_gpus(3, force=True)):
            with pytest.raises(RuntimeError, match="on already|only one"):
                other.on()
        with torch.device("cuda:1"), pytest.raises(RuntimeError, match="leave the"):
            gpus.off()
        assert switched.active is gpus and torch.cuda.device_count() == 2
    assert repr(gpus) == "<2 virtual GPU(s), off>"


def test_a_cell_that_switches_them_on_may_run_twice(capsys):
    first = virtual_gpus(2, force=True).on()
    x = torch.ones(2, device=ONE)
    second = virtual_gpus(3, force=True).on()
    try:
        assert (
            "The 2 virtual GPU(s) that were on are off now" in capsys.readouterr().out
        )
        assert x.device.type == "cpu" and torch.cuda.device_count() == 3
    finally:
        second.off()
    with first:  # its records are still there
        assert x.device == ONE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n is 0: expected a whole number of GPUs from 1 to 64"),
        ({"memory": "1.2.3 GiB"}, "memory is '1.2.3 GiB'"),
        ({"memory": "lots"}, "memory is 'lots': expected a size such as '16 GiB'"),
        ({"memory": ["1 GiB"]}, "memory has 1 sizes for 2 GPUs"),
        ({"bandwidth": "25 GB"}, "bandwidth is '25 GB': expected a speed"),
        ({"latency": "-1 us"}, "latency is '-1 us': expected a time"),
        ({"overhead": float("nan")}, "overhead is nan"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        virtual_gpus(**arguments)


def test_it_steps_aside_where_real_gpus_are(monkeypatch, capsys):
    monkeypatch.setattr(switched, "real_gpus", lambda: 2)
    with virtual_gpus(2) as gpus:
        assert gpus.real and switched.active is None
        assert torch.ones(1).device.type == "cpu"
        with gpus.record() as log, gpus.label("a"):
            pass
        assert log.transfers == gpus.transfers == []
        assert gpus.timeline().seconds == 0
    assert "This machine has 2 real GPU(s)" in capsys.readouterr().out
    with virtual_gpus(3) as gpus:  # more than there are
        assert not gpus.real and torch.cuda.device_count() == 3


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
        torch.ones(2, device=torch.device(1)),
        torch.tensor([1.0], device="cuda:1"),
        torch.as_tensor(np.ones(3), device="cuda:1"),
        torch.asarray(torch.ones(2), device="cuda:1"),
        torch.zeros_like(torch.ones(2), device="cuda:1"),
        torch.ones(2, device="cuda:1").new_tensor([1]),
        torch.ones(2, device="cuda:1").new(2),
        nn.Linear(2, 2, device="cuda:1").weight,
        nn.init.orthogonal_(torch.empty(3, 3, device="cuda:1")),
    ):
        assert x.device == ONE
        assert (x.is_cuda, x.is_cpu, x.get_device()) == (True, False, 1)
    for x in (torch.zeros(2), torch.tril_indices(3, 3), torch.hann_window(3)):
        assert x.device.type == "cpu" and x.get_device() == -1


def test_default_device(gpus):
    torch.set_default_device("cuda:2")
    assert torch.zeros(1).device.index == torch.tensor([1]).device.index == 2
    assert torch.get_default_device() == torch.device("cuda:2")
    assert nn.Linear(2, 2).weight.device.index == 2
    torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"
    for place in ("cuda:1", 1):
        with torch.device(place):
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
    assert "use torch.nn.Module.to_empty()" in error_of(
        lambda: empty.to(ONE), NotImplementedError
    )
    assert empty.to_empty(device=ONE).weight.device == ONE
    assert nn.LazyLinear(2).to(ONE)(torch.ones(1, 5, device=ONE)).device == ONE


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
        x.expand(2, -1, -1),
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
    source = torch.ones(2, requires_grad=True)
    target = torch.zeros(3, device="cuda:2")
    target[1:] = source
    target.copy_(target * 2)
    target.sum().backward()
    assert source.grad.device.type == "cpu"
    assert source.grad.tolist() == [2, 2]


def test_subclasses_stay(gpus):
    boxes = torch.zeros(1, 4)
    boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(8, 8)).to(ONE)
    assert type(boxes) is tv_tensors.BoundingBoxes
    assert (boxes.device, boxes.canvas_size) == (ONE, (8, 8))


# --- PyTorch's own errors -------------------------------------------------------------


def error_of(function, kind=RuntimeError) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


SAME = "Expected all tensors to be on the same device, but "


def found(*places: str) -> str:
    return f"{SAME}found at least two devices, {places[0]} and {places[1]}!"


def got(argument: str, place: str, others: str, method: str) -> str:
    return (
        f"{SAME}got {argument} is on {place}, different from other tensors on {others} "
        f"(when checking argument in method wrapper_CUDA_{method})"
    )


def test_device_errors_are_pytorchs_own(gpus):
    x, y = torch.randn(4, 5, device=ONE), torch.randn(4, 5, device="cuda")
    h, labels, number = torch.randn(4, 5), torch.tensor([1, 2, 3, 4]), torch.tensor(0.5)
    image, words = torch.randn(1, 3, 8, 8), torch.randn(2, 2, 4)
    conv, lstm = nn.Conv2d(3, 4, 3), nn.LSTM(4, 4).to(ONE)
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    here, one = "cpu", "cuda:1"
    for wrong, message in (
        (lambda: x + y, found(one, "cuda:0")),
        (lambda: h + x, found(one, here)),
        (lambda: torch.allclose(x, y), found(one, "cuda:0")),
        (lambda: number.add_(x.sum()), found(one, here)),
        (lambda: torch._foreach_add([x, y], [x, x]), found("cuda:0", one)),
        (lambda: x @ h.t(), got("mat2", here, one, "mm")),
        (lambda: nn.Linear(5, 3).cuda()(x), got("mat1", one, "cuda:0", "addmm")),
        (lambda: torch.cat([x, h]), got("tensors", here, one, "cat")),
        (lambda: torch.stack([x.sum(), number]), got("tensors", here, one, "cat")),
        (
            lambda: nn.Embedding(4, 4).cuda()(labels),
            got("index", here, "cuda:0", "_index_select"),
        ),
        (
            lambda: F.cross_entropy(x, labels),
            got("target", here, one, "nll_loss_forward"),
        ),
        (lambda: x[0].gather(0, labels), got("index", here, one, "gather")),
        (lambda: x.clamp(min=number), got("min", here, one, "clamp_Tensor")),
        (lambda: labels[labels.to(ONE)], "indices should be either on cpu or on the"),
        (lambda: torch.add(x, 1, out=torch.empty(4, 5)), SAME),
        (
            lambda: conv.cuda()(image),
            "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor)",
        ),
        (
            lambda: conv.cpu()(image.cuda()),
            "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor)",
        ),
        (
            lambda: conv.to(ONE)(image.cuda()),
            got("weight", one, "cuda:0", "_cudnn_convolution"),
        ),
        (
            lambda: lstm(words.cuda()),
            "Input and parameter tensors are not at the same device, found input",
        ),
        (
            lambda: lstm(words.to(ONE), state),
            "Input and hidden tensors are not at the same device, found input tensor",
        ),
        (
            lambda: nn.utils.rnn.pack_padded_sequence(words, labels[:2].to(ONE)),
            "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:1 Lo",
        ),
    ):
        assert error_of(wrong).startswith(message)


def test_a_number_from_the_cpu_goes_where_cuda_takes_it(gpus):
    x, number = torch.rand(3, device=ONE), torch.tensor(0.5)
    for goes in (
        lambda: x + number,
        lambda: torch.where(x > 0.5, x, number),
        lambda: x.masked_fill(x > 0.5, number),
        lambda: F.mse_loss(x.sum(), number),
        lambda: x[torch.tensor(1)],
        lambda: sum([number, x.sum()]),
    ):
        assert goes().device == ONE
    assert torch.allclose(x / x, torch.tensor(1.0))


def test_errors_of_devices_numpy_and_generators(gpus):
    x = torch.ones(2, device=ONE)
    for wrong in (
        lambda: x.cuda(7),
        lambda: torch.zeros(1, device="cuda:4"),
        lambda: torch.cuda.set_device(4),
        lambda: nn.Linear(2, 2).to("cuda:9"),
    ):
        message = error_of(wrong, torch.AcceleratorError)
        assert message.startswith("CUDA error: invalid device ordinal\n")
    for wrong in (x.numpy, lambda: np.asarray(x), lambda: np.array([x, x])):
        message = error_of(wrong, TypeError)
        assert message.startswith("can't convert cuda:1 device type tensor to numpy.")
    assert x.numpy(force=True).tolist() == x.tolist() == [1, 1]
    assert "only dense CPU tensors can be pinned" in error_of(x.pin_memory)
    for place, seed in (("cuda", torch.Generator()), ("cpu", torch.Generator("cuda"))):
        y = torch.ones(3, device=place)
        for draw in (
            functools.partial(torch.randn, 3, device=place),
            y.normal_,
            functools.partial(torch.multinomial, y, 2),
            functools.partial(nn.init.normal_, y),
        ):
            message = error_of(lambda d=draw, g=seed: d(generator=g))
            assert message.startswith(f"Expected a '{place}' device type for generator")
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
    with torch.inference_mode():
        model.eval().to(ONE)
        out = model(x.to(ONE))
        assert out.is_inference()
        assert out.device == model[0].weight.device == out.chunk(2)[1].device == ONE
        with pytest.raises(RuntimeError, match="mat2 is on cuda:2, different from"):
            F.linear(out, torch.ones(4, 4, device="cuda:2"))
    assert torch.equal(out.cpu(), model.cpu()(x))


def test_a_failed_op_leaves_the_machine_usable(gpus):
    model = nn.Sequential(nn.Linear(2, 2).cuda(0), nn.Linear(2, 2).cuda(1))
    for _ in range(3):
        error_of(lambda: model(torch.ones(1, 2, device="cuda")))
    assert (torch.ones(2).to(ONE) + 1).device == ONE
    assert gpus.transfers[-1].module == ""


# --- files and data -------------------------------------------------------------------


def test_files_remember_devices(gpus):
    file = io.BytesIO()
    torch.save(nn.Linear(3, 3).to(ONE).state_dict(), file)

    def loaded(**how) -> str:
        file.seek(0)
        return str(torch.load(file, **how)["weight"].device)

    assert loaded() == loaded(weights_only=False) == "cuda:1"
    for there, place in (
        ("cpu", "cpu"),
        ("cuda:3", "cuda:3"),
        (torch.device("cuda"), "cuda:0"),
        ({"cuda:1": "cuda:2"}, "cuda:2"),
        (lambda storage, place: storage, "cpu"),
        (lambda storage, place: storage.cuda(2), "cuda:2"),
    ):
        assert loaded(map_location=there) == place
    with pytest.raises(RuntimeError, match=r"device_count\(\) is 4.*map_location"):
        loaded(map_location="cuda:4")
    file.seek(0)
    model = nn.Linear(3, 3).cuda()
    model.load_state_dict(torch.load(file, map_location="cpu"))
    assert model.weight.device.index == 0
    gpus.off()
    try:
        if not torch.cuda.is_available():
            assert "on a CUDA device but torch.cuda.is" in error_of(loaded)
        assert loaded(map_location="cpu") == "cpu"
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
    generator = torch.Generator(device="cuda")
    state = torch.cuda.get_rng_state(1)
    for again, how in (
        (lambda: generator.manual_seed(3), {"generator": generator}),
        (lambda: torch.manual_seed(1), {}),
        (lambda: torch.cuda.manual_seed(1), {}),
        (lambda: torch.cuda.manual_seed_all(1), {}),
        (lambda: torch.cuda.set_rng_state(state, 1), {}),
    ):
        again()
        first = torch.randn(3, device=ONE, **how)
        again()
        assert torch.equal(first, torch.randn(3, device=ONE, **how))


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
        for event, words, kind in (
            (end, "Both events must be completed", RuntimeError),
            (torch.cuda.Event(True), "must be recorded", ValueError),
            (torch.cuda.current_stream().record_event(), "enable_timing", ValueError),
        ):
            assert words in error_of(lambda e=event: begin.elapsed_time(e), kind)
        other = torch.cuda.Stream(1)
        assert other.query()
        other.wait_event(end)  # the other GPU's next work has to wait, the host not
        assert not other.query() and not end.query()
        with torch.cuda.stream(other):
            z = torch.ones(10, 10, device="cuda")
            z.record_stream(other)
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


def test_printing_shows_the_device_and_costs_nothing(gpus):
    x = torch.ones(2, device=ONE)
    gpus.clear()
    assert repr(x) == "tensor([1., 1.], device='cuda:1')"
    assert "device='cuda:0'" in repr(torch.ones(1, device="cuda"))
    assert "device='cuda:1'" in repr(nn.Parameter(x))
    assert f"{x.sum():.2f}" == "2.00"
    assert [t.kind for t in gpus.transfers] == ["item"]


@pytest.mark.filterwarnings("ignore")
def test_the_profiler_takes_the_time_of_the_cpu(gpus, capfd):
    x = torch.randn(32, 32, device="cuda")
    cpu, cuda = (
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    )
    for kinds in ([cpu, cuda], [cuda], None):
        with torch.profiler.profile(activities=kinds) as profile:
            (x @ x).sum().item()
        table = profile.key_averages().table(sort_by="cuda_time_total")
        assert "aten::mm" in table
    with torch.autograd.profiler.profile(use_device="cuda"):
        (x @ x).sum().item()
    assert capfd.readouterr().err.count("\n") < 20  # no events of the driver's


# --- threads --------------------------------------------------------------------------


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
