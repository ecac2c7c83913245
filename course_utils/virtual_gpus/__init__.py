"""`cuda:0 ... cuda:N` on a machine without GPUs: the same code, the same numbers.

    from course_utils import virtual_gpus

    gpus = virtual_gpus(4, memory="16 GiB")     # in a notebook: on until off()
    gpus.on()
    model = ModelParallelResNet50()             # unmodified CUDA code
    gpus.memory(); gpus.transfers; gpus.timeline()
    gpus.off()

    with virtual_gpus(2) as gpus: ...           # or for one block

Every number is computed by PyTorch's CPU kernels. What is virtual is the *place*: which
GPU a tensor is on, what fits there, what has to be copied, and how long real GPUs would
be busy.

How it works
------------
::

    your code ── Tensor.to, .device, torch.cuda.* ──► replaced: tensors.py, cuda.py
        │
        ├─ torch.zeros(…, device="cuda:1") ──► Function  (a TorchFunctionMode)
        ▼
     autograd
        ▼
     ATen ops ──► Dispatch (a TorchDispatchMode) ──► the CPU's kernel
                     │
                     └─ are all inputs on one GPU? who owns the result? how long?

* **A tensor is an ordinary CPU tensor.** A dictionary says on which GPU its *storage*
  is (`Owned` in `parts.py`). So views and tied weights share one entry,
  `parameter.data =` keeps the parameter, and autograd, optimizers and every CPU kernel
  work as ever. A weak reference takes a storage off the books when Python frees it.
* **Below autograd**, `Dispatch` sees every op: it compares the devices of the inputs,
  raises PyTorch's own error where they differ, runs the CPU's kernel and books the new
  storages on the inputs' GPU. `torch.OutOfMemoryError` comes when a GPU is full.
* **Above autograd**, the methods that name a device (`to`, `cuda`, `cpu`, `device`) and
  what `torch.cuda` answers are replaced while the machine is on. A copy is an
  `autograd.Function`, so that its gradient is copied back, and logged, too.
* **Autograd's engine** would accept a gradient from any device. So what a Function of
  yours and the hooks of tensors return is checked, and what `backward()` is given.
* **Helpers without inputs.** In a backward, C++ may make zeros from nothing. Such a
  tensor *drifts*: it belongs to the first GPU whose tensors it meets.
* **Modes belong to threads.** A new thread enters its own, and so does what gloo's
  threads or a `ThreadPoolExecutor` are given to call; that is how the threads of
  `nn.DataParallel` work. The C++ functions below `torch.nn.parallel.comm` are replaced;
  all of its Python runs as it is.
* **What is not there** is refused in one form, "not on virtual GPUs: ...". All Python
  of `torch.cuda` ends in calls of `torch._C`: those without an answer are refused.

Where to read on, each file with what stands before it:

    records.py    the memory, the transfers and the timeline that you read
    parts.py      a storage's owner, a device, its clock, a thread, an op
    patches.py    puts other behaviour in the place of PyTorch's, and takes it out
    errors.py     PyTorch's own words; `refusals.py`: what is not there
    modes.py      through which PyTorch calls the machine
    tensors.py    what is replaced: factories and methods of tensors; `autograd.py`,
                  `cuda.py`, `autocast.py`, `files.py`, `parallel.py`: the rest
    ledger.py     which storage is on which GPU
    machine.py    runs the ops, moves tensors, keeps the time
    gpus.py       what you switch on and ask

The model of time
-----------------
Nothing waits for real; a clock is kept for each GPU, as PyTorch would use it:

* A GPU runs its ops one after the other, in the order of the calls. GPUs overlap.
* An op takes what the CPU's kernel took (`compute="measured"`), or, with a rate such as
  `compute="10 TFLOP/s"`, `overhead + max(FLOPs / compute, bytes / memory_bandwidth)`,
  which is the same on every machine. FLOPs are PyTorch's own formulas
  (`torch.utils.flop_counter`); an op without one counts with its bytes. Views are free.
* A copy takes `latency + bytes / bandwidth`. A copy between two GPUs starts when both
  are free and keeps both busy: PyTorch makes the streams of both wait for it
  (aten/src/ATen/native/cuda/Copy.cu).
* The host issues work for nothing and runs ahead. It waits where PyTorch waits: for
  `.item()`, `.cpu()`, `.tolist()`, `print` of a tensor, `torch.cuda.synchronize()`, for
  a copy that is not `non_blocking=True` or whose CPU memory is not pinned, and where
  values on a GPU say how long a result is (`nonzero`, `x[mask]`, `unique`). Its own ops
  take time as well: measured, or at 100 GFLOP/s and 50 GB/s with a rate.

Limits
------
* Memory is that of tensors, each rounded up to 512 bytes: no fragments of a caching
  allocator, no workspaces of cuDNN, no CUDA context. CPU kernels may keep other things
  for their backward than CUDA's do. `Tensor.resize_` or an `out=` that grows a tensor
  past the end of the memory is counted, but is no error.
* One random generator for the CPU and all GPUs; its numbers are the CPU's.
* All streams of a GPU are one queue. Events have the times of the model.
* `autocast("cuda")` is the CPU's autocast with CUDA's data type and lists of ops. Where
  the lists differ, it goes by the function that your code calls. What that calls in
  turn, as `gumbel_softmax` calls `softmax`, is cast as on the CPU, and so are ops of
  TorchScript. What the CPU cannot do in half precision stays in float32: `avg_pool3d`,
  linear algebra, `fft`.
* What the CPU can and CUDA cannot works here: matrix products and convolutions of whole
  numbers. An index out of range is an `IndexError` at once; a GPU stops later, with
  "device-side assert triggered", and the process cannot use it any more.
* Gradients that hooks return may be on a wrong device.
* Not there, with an error that says so: `torch.compile`, `torch.export`, CUDA graphs,
  sparse and nested tensors and other layouts than strided, sharing a GPU tensor with
  another process, memory pools and fractions, records of CUDA's allocator
  (`_record_memory_history`), sensors (`utilization`), NCCL's own functions
  (`torch.cuda.nccl`), `out=` of `torch.cuda.comm`, files of TorchScript, old types
  (`torch.cuda.FloatTensor`, `set_default_tensor_type`), `torch.utils.swap_tensors`,
  properties of a device beyond its name, version, memory and processors, operators
  for which the CPU has no kernel.
* A subclass of `Tensor` keeps its type and attributes when it moves; its own
  `__torch_function__` does not see the move.
* `torch.profiler` shows what the CPU computed; it has no rows of CUDA kernels.
* One process. `DistributedDataParallel` over gloo works in ranks that each have such a
  machine, for a module on one GPU; `fully_shard`, DTensor and nccl do not.
* Names of PyTorch that were imported before `on()` work, but for classes and functions
  of C (`torch.Generator`, `torch.tensor`) that are kept elsewhere than in a module.
* A thread that was started before `on()` sees CPU tensors, but for what a
  `ThreadPoolExecutor` is given since.
* After `off()` all tensors are CPU tensors; after the next `on()` of the same object
  those that live are back on their GPUs.

On a machine with that many real GPUs, `on()` says so and does nothing: the same cells
run on them. `force=True` makes virtual ones there, too.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_utils.virtual_gpus.records import quantity

if TYPE_CHECKING:
    from course_utils.virtual_gpus.gpus import VirtualGPUs

MOST = 64  # devices

__all__ = ["virtual_gpus"]


def virtual_gpus(
    n: int = 2,
    *,
    memory: str | float | Sequence[str | float] = "16 GiB",
    bandwidth: str | float = "25 GB/s",
    latency: str | float = "10 us",
    compute: str | float = "measured",
    memory_bandwidth: str | float = "1 TB/s",
    overhead: str | float = "5 us",
    force: bool = False,
) -> VirtualGPUs:
    """A machine with `n` virtual GPUs; call `on()` on it, or use it in `with`.

    Only one can be on at a time in a process. PyTorch is imported here, not before.

    Sizes, speeds and times are texts with a unit, or numbers in bytes, bytes a second
    and seconds. The module's docstring has the model of time, and the limits.

    Args:
        n: How many, from 1 to 64.
        memory: Of each GPU, or a list with one size for each.
        bandwidth: Between two devices, one way.
        latency: What even the smallest copy takes.
        compute: `"measured"`, or the FLOP/s of a GPU.
        memory_bandwidth: Of a GPU's own memory; used if `compute` is a rate.
        overhead: What even the smallest op takes; used if `compute` is a rate.
        force: Virtual GPUs even where as many real ones are.

    Raises:
        ValueError: an argument makes no sense; the message names it.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST:
        raise ValueError(
            f"n is {n!r}: expected a whole number of GPUs from 1 to {MOST}."
        )
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        if len(memory) != n:
            raise ValueError(
                f"memory has {len(memory)} sizes for {n} GPUs: give one for each, or "
                "one for all."
            )
        sizes = list(memory)
    else:
        sizes = [memory] * n
    settings = {
        "memory": [int(quantity(size, "memory", "size")) for size in sizes],
        "bandwidth": quantity(bandwidth, "bandwidth", "speed"),
        "latency": quantity(latency, "latency", "time"),
        "compute": None
        if compute == "measured"
        else quantity(compute, "compute", "compute"),
        "memory_bandwidth": quantity(memory_bandwidth, "memory_bandwidth", "speed"),
        "overhead": quantity(overhead, "overhead", "time"),
        "force": force,
    }
    from course_utils.virtual_gpus.gpus import VirtualGPUs

    return VirtualGPUs(n, **settings)


class _CallableModule(types.ModuleType):
    """This module, callable as the function in it: Python binds both to one name."""

    def __call__(self, *args: Any, **kwargs: Any) -> VirtualGPUs:
        return virtual_gpus(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
