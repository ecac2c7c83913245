"""The two modes through which PyTorch calls a machine, and a copy for autograd."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils.virtual_gpus.parts import Op, truth

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine


def as_above(op: Op) -> contextlib.AbstractContextManager:
    """For taking an op apart here, below autograd, as PyTorch does it above.

    What C++ keeps from a mode comes back: conjugates that are not computed yet, and, in
    inference mode, how a view is one of a parameter (`matmul` asks for that).
    """
    c = torch._C
    out = c._dispatch_tls_local_exclude_set()
    for key in (c.DispatchKey.Conjugate, c.DispatchKey.Negative):
        out = out.remove(key)
    if torch.is_inference_mode_enabled() and not op.makes_view:
        out = out.remove(c.DispatchKey.ADInplaceOrView)
    return c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), out)


class Dispatch(TorchDispatchMode):
    """Sees every ATen op, below autograd."""

    supports_higher_order_operators = True

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self.machine = machine

    # Otherwise the first op imports torch._dynamo, which takes 2 seconds.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        __tracebackhide__ = True  # IPython and pytest leave these frames out
        if not isinstance(func, torch._ops.OpOverload) or not self.machine.is_on:
            return func(*args, **(kwargs or {}))
        with truth():
            return self.machine.run(func, args, kwargs or {}, self)


class Function(TorchFunctionMode):
    """Sees every call of a PyTorch function from Python, above autograd."""

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        __tracebackhide__ = True
        if not self.machine.is_on:
            return func(*args, **(kwargs or {}))
        return self.machine.call(func, args, kwargs or {})


class Move(torch.autograd.Function):
    """A copy to another device; its gradient is copied back."""

    @staticmethod
    def forward(x, destination, machine, cause, waits):
        __tracebackhide__ = True
        return machine.copy(x, destination, cause, waits)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, destination, ctx.machine, cause, _ = inputs
        ctx.source, ctx.destination = ctx.machine.device_of(x), destination
        ctx.module, ctx.cause = ctx.machine.module_name(), cause

    @staticmethod
    def backward(ctx, grad):
        # The copy goes under the name of the module in its forward.
        with ctx.machine.thread.having(module=ctx.module):
            back = ctx.machine.moved(grad, ctx.source, ctx.cause)
        return back, None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return ctx.machine.moved(tangent, ctx.destination, ctx.cause)

    @staticmethod
    def vmap(info, in_dims, x, *rest):
        return Move.apply(x, *rest), in_dims[0]
