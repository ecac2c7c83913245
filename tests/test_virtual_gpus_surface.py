"""What PyTorch has around its tensors: names, refusals, threads."""

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Generator, as_tensor, nn, tensor
from torch.cuda import (
    Event,
    Stream,
    current_device,
    device_count,
    is_available,
    memory_allocated,
    set_device,
    synchronize,
)

from course_utils import virtual_gpus
from course_utils.virtual_gpus import refusals

ONE = torch.device("cuda:1")


@pytest.fixture
def gpus():
    with virtual_gpus(2, memory="1 GiB", force=True) as on:
        yield on


# --- names that were imported before --------------------------------------------------


class Early:
    """Names kept where only the object itself can change."""

    count = staticmethod(device_count)
    stream = Stream


def early(allocated=memory_allocated) -> int:
    return allocated("cuda:1")


def test_names_that_were_imported_before_answer_as_well(gpus):
    assert (is_available(), device_count(), Early.count()) == (True, 2, 2)
    set_device(1)
    assert current_device() == 1
    synchronize()
    assert Early.stream().device == ONE
    assert isinstance(Early.stream(), Stream)
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    assert Event(enable_timing=True).record() is None
    assert Generator(device=ONE).device == ONE
    assert isinstance(Generator(), Generator)
    made = [tensor([1.0], device=ONE), as_tensor([1.0], device=ONE)]
    assert {x.device for x in made} == {ONE}
    assert early() == 1024


# --- one refusal for all that is not there --------------------------------------------

FROM_OUTSIDE = ("river", "CUDA error", "INTERNAL ASSERT", "NVIDIA", "not compiled")


def everything_public() -> Iterator[tuple[str, object]]:
    for package in (torch.cuda, torch.accelerator):
        modules = [package] + [
            importlib.import_module(found.name)
            for found in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
            if not found.name.rpartition(".")[2].startswith("_")
        ]
        for module in modules:
            for name, value in list(vars(module).items()):
                place = getattr(value, "__module__", None) or ""
                if name.startswith("_") or not callable(value):
                    continue
                if place.startswith(("torch.cuda", "torch.accelerator")):
                    yield name, value
                    yield from calls_of(name, value)


def calls_of(name: str, kind: object) -> Iterator[tuple[str, object]]:
    for member in vars(kind) if isinstance(kind, type) else ():
        static = inspect.getattr_static(kind, member)
        if not member.startswith("_") and isinstance(
            static, (staticmethod, classmethod)
        ):
            yield f"{name}.{member}", getattr(kind, member)


def is_refused(call: object) -> bool:
    """Call it in many ways: is it refused? Never may an error come from elsewhere."""
    x, stream = torch.ones(2, device="cuda"), torch.cuda.current_stream()
    state = torch.get_rng_state()
    for args in ((), (0,), ("a",), (x,), ([x],), ([x], [0]), (x, 0), (stream,),
                 (state,), (lambda: None,), (0.5,), (1, 1), (stream, x)):  # fmt: skip
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                call(*args)
            return False
        except Exception as error:
            text = str(error)
            if "not on virtual GPUs: " in text:
                assert "\n" not in text
                return True
            outside = (KeyError, AssertionError, torch.AcceleratorError)
            assert not isinstance(error, outside), text
            assert not any(words in text for words in FROM_OUTSIDE), text
    return False


@pytest.mark.filterwarnings("ignore")
def test_all_of_torch_cuda_answers_or_is_refused(gpus):
    calls = {
        (name, id(value)): value
        for name, value in everything_public()
        if name != "GdsFile"  # its __del__ complains where __init__ was called wrongly
    }
    assert len(calls) > 150
    assert 10 < sum(map(is_refused, calls.values())) < len(calls) / 2


def test_what_this_version_does_not_have_need_not_be_refused(monkeypatch):
    absent = {"torch.accelerator.Absent.__new__": "no", "torch.absent.thing": "no"}
    monkeypatch.setattr(refusals, "NAMED", refusals.NAMED | absent)
    with virtual_gpus(1, force=True):
        assert torch.ones(2, device="cuda").sum() == 2


def two_gpus() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).cuda(), nn.Linear(2, 2).to(ONE))


def group_of(backend: str | None) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("torch.compile", lambda: torch.compile(lambda x: x)),
        ("torch.nn.Module.compile", lambda: nn.Linear(2, 2).compile()),
        ("torch.export", lambda: torch.export.export(nn.Linear(2, 2), ())),
        ("torch.cuda.utilization", lambda: torch.cuda.utilization()),
        ("torch.cuda.nccl.unique_id", lambda: torch.cuda.nccl.unique_id()),
        ("torch.cuda.memory.MemPool", lambda: torch.cuda.MemPool()),
        ("torch.cuda.FloatTensor", lambda: isinstance(1, torch.cuda.FloatTensor)),
        ("the type torch.cuda.Half", lambda: on_gpu().type("torch.cuda.HalfTensor")),
        ("torch.nested.nested_tensor", lambda: torch.nested.nested_tensor([on_gpu()])),
        ("torch.jit", lambda: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), "x")),
        ("torch.cuda.comm with out=", lambda: torch.cuda.comm.broadcast(
            on_gpu(), out=[on_gpu()])),
        ("a tensor of layout torch.sparse_coo", lambda: on_gpu().to_sparse()),
        ("a tensor of layout torch.sparse_coo",
         lambda: torch.eye(2).to_sparse().cuda()),
        ("a tensor of layout torch.sparse_coo",
         lambda: torch.eye(2).to_sparse() @ on_gpu()),
        ("torch.cuda.Event.ipc_handle", lambda: Event().ipc_handle()),
        ("__cuda_array_interface__", lambda: on_gpu().__cuda_array_interface__),
        ("__dlpack__", lambda: on_gpu().__dlpack__()),
        ("torch.UntypedStorage._share_cuda_",
         lambda: torch.multiprocessing.SimpleQueue().put(on_gpu())),
        ("the backend nccl", lambda: group_of("nccl")),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_in_one_line(gpus, what, call):
    with pytest.raises((RuntimeError, AttributeError, BufferError)) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"not on virtual GPUs: {what}")
    assert "\n" not in message


def on_gpu() -> torch.Tensor:
    return torch.ones(2, 2, device=ONE)


def test_ddp_of_a_module_on_two_gpus_is_refused(gpus):
    group_of(None)
    try:
        torch.distributed.all_reduce(on_gpu())  # the default of GPUs here is gloo
        with pytest.raises(RuntimeError, match="^not on virtual GPUs: Distributed"):
            nn.parallel.DistributedDataParallel(two_gpus())
    finally:
        torch.distributed.destroy_process_group()


def test_parts_of_torch_cuda_that_published_scripts_use(gpus):
    @torch.cuda.nvtx.range("step")
    def step(x):
        return x * 2

    with torch.cuda.nvtx.range("epoch {}", 3), torch.cuda.profiler.profile():
        assert step(torch.ones(2, device=ONE)).device == ONE
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    with torch.accelerator.device_index(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    assert torch.get_device_module() is torch.cuda
    storage = torch.UntypedStorage(600, device=ONE)
    assert (storage.device, torch.cuda.memory_allocated(1)) == (ONE, 1024)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert nn.Conv2d(1, 1, 1).cuda()(torch.ones(1, 1, 2, 2).cuda()).is_cuda


def test_the_compiler_can_be_imported_and_compiles_afterwards(tmp_path):
    code = (
        "import sys, torch\n"
        "from course_utils import virtual_gpus\n"
        "with virtual_gpus(2, force=True):\n"
        "    assert str((torch.ones(2, device='cuda:1') * 2).device) == 'cuda:1'\n"
        "    assert 'torch._dynamo' not in sys.modules\n"  # its import takes seconds
        "    import torch._dynamo\n"
        "    assert torch.cuda.device_count() == 2\n"
        "model = torch.nn.Linear(3, 3)\n"
        "def step(x):\n"
        "    y = model(torch.as_tensor(x) + torch.tensor([1.0, 2.0, 3.0]))\n"
        "    return y.to(torch.float64).cpu() if not torch.cuda.is_available() else y\n"
        "compiled = torch.compile(step, backend='eager')\n"
        "assert torch.equal(compiled(torch.ones(3)), step(torch.ones(3)))\n"
    )
    here = {**os.environ, "TMPDIR": str(tmp_path)}  # the compiler leaves a cache there
    subprocess.run([sys.executable, "-c", code], env=here, check=True, timeout=120)


# --- threads --------------------------------------------------------------------------


def test_threads_of_a_pool_from_before():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread is there
        with virtual_gpus(2, force=True):
            made = pool.submit(lambda: torch.ones(2, device=ONE) * 2).result()
            assert made.device == ONE
        assert pool.submit(lambda: torch.ones(2) * 2).result().device.type == "cpu"


def in_a_thread(work):
    found = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(work())).start()
    return found.get(timeout=30)


def in_an_executor(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("run", [in_a_thread, in_an_executor])
def test_threads_and_executors(gpus, run):
    def work() -> str:
        assert torch.cuda.current_device() == 0  # each has its own
        torch.cuda.set_device(1)
        x = torch.randn(3, 3, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        return str(x.grad.device)

    assert [run(work), run(work)] == ["cuda:1"] * 2
    assert torch.cuda.current_device() == 0
