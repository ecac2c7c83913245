"""What virtual GPUs do not have, refused in one form: "not on virtual GPUs: ...".

All of `torch.cuda` that is written in Python ends in calls of `torch._C`. What of these
calls has no answer here is refused, whatever it is: a part of `torch.cuda` that a new
PyTorch brings never reaches a driver that is not there. What does not go that way is
named in `NAMED`.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from course_utils.virtual_gpus import errors
from course_utils.virtual_gpus.patches import Patches

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine

_SCRIPT = "files of TorchScript are C++'s, which sees CPU tensors only"
_DRIVER = "there is no driver and no CUDA runtime behind them"
_COMPILES = "it would compile code for a GPU that is not there"
# PyTorch's tracing ends the whole process, in C++, where virtual GPUs are on.
_TRACES = "it would trace code for a GPU that is not there"
_CAPTURES = "there are no CUDA kernels to capture"
_ALLOCATES = "there is no CUDA allocator"
_MEASURES = "there is no hardware to ask"
_SHARES = "another process sees no virtual GPU: send x.cpu()"

# What does not end in a call of torch._C, or would be refused there with less reason.
NAMED = {
    "torch.compile": _COMPILES,
    "torch.nn.Module.compile": _COMPILES,
    "torch.set_default_tensor_type": errors.OLD_TYPES,
    "torch.nested.nested_tensor": errors.DENSE,
    "torch.nested.as_nested_tensor": errors.DENSE,
    "torch.nested.nested_tensor_from_jagged": errors.DENSE,
    "torch.jit.save": _SCRIPT,
    "torch.jit.load": _SCRIPT,
    "torch.jit.RecursiveScriptModule.save": _SCRIPT,
    "torch.utils.swap_tensors": "tensors are known here by their identity",
    "torch.UntypedStorage._share_cuda_": _SHARES,
    "torch.export.export": _TRACES,
    "torch.export.draft_export": _TRACES,
    "torch.cuda.CUDAGraph.__new__": _CAPTURES,
    "torch.cuda.graph.__init__": _CAPTURES,
    "torch.cuda.make_graphed_callables": _CAPTURES,
    "torch.accelerator.Graph.__new__": _CAPTURES,
    "torch.backends.cuda.cuFFTPlanCacheAttrContextProp.__get__": _DRIVER,
    "torch.backends.cuda.cuFFTPlanCacheAttrContextProp.__set__": _DRIVER,
    "torch.cuda.cudart": "there is no CUDA runtime",
    "torch.cuda.memory.CUDAPluggableAllocator.__init__": _ALLOCATES,
    "torch.cuda.memory.MemPool.__new__": _ALLOCATES,
    "torch.cuda.memory._record_memory_history": _ALLOCATES,
    "torch.cuda.memory._snapshot": _ALLOCATES,
    "torch.cuda.memory._dump_snapshot": _ALLOCATES,
    "torch.cuda.utilization": _MEASURES,
    "torch.cuda.memory_usage": _MEASURES,
    "torch.cuda.device_memory_used": _MEASURES,
    "torch.cuda.temperature": _MEASURES,
    "torch.cuda.power_draw": _MEASURES,
    "torch.cuda.clock_rate": _MEASURES,
    "torch.cuda._get_pynvml_handler": _MEASURES,
    "torch.cuda._get_amdsmi_handler": _MEASURES,
    "torch.cuda.ExternalStream.__new__": _DRIVER,
    "torch.cuda.Stream.priority_range": _DRIVER,
    "torch.cuda.Event.from_ipc_handle": "it is an event of another process",
    "torch.cuda.GreenContext.__init__": _DRIVER,
    "torch.cuda.green_contexts._get_driver_version": _DRIVER,
    "torch.cuda.jiterator._create_jit_fn": _COMPILES,
    "torch.cuda.jiterator._create_multi_output_jit_fn": _COMPILES,
    "torch.cuda._compile_kernel": _COMPILES,
    "torch.cuda._utils._get_gpu_runtime_library": _DRIVER,
}
_OF_THE_DRIVER = re.compile("_(cuda|nccl|accelerator|gds|cufft)_")
_NEEDS_NO_DRIVER = re.compile("cudnn|conv_benchmark|nccl_version")


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Refuse what nothing else has an answer to; to be called last."""
    for name in _calls_of_the_driver():
        found = getattr(torch._C, name, None)
        if found is not None and _NEEDS_NO_DRIVER.search(name):
            continue
        if not _is_ours(found):
            refuse = _refusing_the_caller(f"torch._C.{name}")
            patches.set(torch._C, **{name: refuse})
            patches.replace((torch, *_modules_of_cuda()), **{name: refuse})
    for path, why in NAMED.items():
        place, _, name = path.rpartition(".")
        owner: Any = functools.reduce(
            lambda found, part: getattr(found, part, None), place.split(".")[1:], torch
        )
        if owner is not None and hasattr(owner, name):  # not in every version
            refuse = refusing(re.sub(r"\.__\w+__$", "", path), why)
            is_class = isinstance(owner, type)
            patches.set(owner, **{name: staticmethod(refuse) if is_class else refuse})
    for name, kind in list(vars(torch._C).items()):
        # In builds without CUDA, bases of classes of torch.cuda, which raise.
        if type(kind) is type and kind.__module__ == "torch._utils":
            patches.set(kind, __new__=refusing(f"torch._C.{name}", _DRIVER))
    for module in (torch.cuda, torch.cuda.sparse):
        for name, kind in list(vars(module).items()):
            if isinstance(kind, type) and name.endswith("Tensor"):
                kind_of = f"{module.__name__}.{name}"
                refuse = refusing(kind_of, errors.OLD_TYPES)
                asked = {"__call__": refuse, "__instancecheck__": refuse}
                patches.set(module, **{name: type("Old", (type,), asked)(name, (), {})})


def refusing(what: str, why: str) -> Callable:
    """A function that says that `what` is not there; `why` completes "because"."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        raise RuntimeError(errors.not_here(what, why))

    return refuse


def _refusing_the_caller(call: str) -> Callable:
    """Like that, for a call of the driver: it names PyTorch's function around it."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        frame = sys._getframe(1)
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        function = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
        what = f"{module}.{function}" if module.startswith("torch.") else call
        raise RuntimeError(errors.not_here(what, _DRIVER))

    return refuse


class Partial:
    """Some of what PyTorch's class `stands_for` has; the rest is refused."""

    stands_for: type

    def __getattr__(self, name: str) -> Any:
        kind = f"torch.cuda.{self.stands_for.__name__}"
        if hasattr(self.stands_for, name):
            raise AttributeError(errors.not_here(f"{kind}.{name}", _DRIVER))
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


def _is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith(__package__)


@functools.cache
def _modules_of_cuda() -> tuple[types.ModuleType, ...]:
    return tuple(
        module
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith("torch.cuda.")
    )


@functools.cache
def _calls_of_the_driver() -> frozenset[str]:
    """Names in torch._C. Builds without CUDA lack them; torch.cuda calls them there."""
    called = {
        name
        for module in _modules_of_cuda()
        for function in vars(module).values()
        if isinstance(function, types.FunctionType)
        for name in function.__code__.co_names
    }
    names = called | set(dir(torch._C)) | set(dir(torch))
    return frozenset(
        name
        for name in names
        if _OF_THE_DRIVER.match(name)
        and not isinstance(getattr(torch._C, name, None), type)
    )
