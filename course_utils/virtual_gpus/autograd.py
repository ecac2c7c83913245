"""Modules, optimizers, backward passes and threads, while virtual GPUs are on."""

from __future__ import annotations

import _thread
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as optimizer_module

from course_utils.virtual_gpus.modes import Function, Move
from course_utils.virtual_gpus.parts import Tensor, tensors_in, truth
from course_utils.virtual_gpus.patches import Patches, copy_of
from course_utils.virtual_gpus.records import GRADIENTS, OPTIMIZER

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Replace what runs modules, optimizers, backward passes and threads."""
    _modules_and_optimizers(machine, patches)
    _autograd_and_threads(machine, patches)
    _gradients(machine, patches)


# --- nn.Module, optimizers ------------------------------------------------------------


def _modules_and_optimizers(machine: VirtualMachine, patches: Patches) -> None:
    Module = torch.nn.Module  # noqa: N806
    module_call, apply = copy_of(Module.__call__), copy_of(Module._apply)

    @functools.wraps(module_call)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        thread = machine.thread
        modules = thread.modules
        if not modules:
            thread.optimizer = False  # a step that failed has not said that it is over
        modules.append(self)
        try:
            return module_call(self, *args, **kwargs)
        finally:
            modules.pop()

    @functools.wraps(apply)
    def setup(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with machine.thread.having(setup=True):
            return apply(self, *args, **kwargs)

    patches.set(torch.nn.Module, __call__=call, _apply=setup)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        machine.thread.optimizer = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                machine.remember(parameter)
                if parameter.grad is not None:
                    machine.classify(parameter.grad, GRADIENTS)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        machine.thread.optimizer = False
        for state in optimizer.state.values():
            if isinstance(state, dict):
                for x in tensors_in(state.values(), []):
                    machine.classify(x, OPTIMIZER)

    def grouped(lists: list[list], with_indices: bool = False) -> dict:
        """Optimizers work device by device: group lists of tensors by that."""
        groups: dict = {}
        for i, x in enumerate(lists[0]):
            parts, places = groups.setdefault(
                (machine.device_of(x), x.dtype), ([[] for _ in lists], [])
            )
            for part, values in zip(parts, lists, strict=True):
                if values:
                    part.append(values[i])
            if with_indices:
                places.append(i)
        return groups

    patches.set(torch._C, _group_tensors_by_device_and_dtype=grouped)
    patches.callback(optimizer_module.register_optimizer_step_pre_hook(before).remove)
    patches.callback(optimizer_module.register_optimizer_step_post_hook(after).remove)


# --- autograd, threads ----------------------------------------------------------------


def _autograd_and_threads(machine: VirtualMachine, patches: Patches) -> None:
    engine = copy_of(torch.autograd.graph._engine_run_backward)

    @functools.wraps(engine)
    def backward(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # What `backward(gradient)` or `grad(…, grad_outputs=…)` begins with.
        args = (
            args[0],
            _at_home(machine, args[1], _homes(machine, args[0])),
            *args[2:],
        )
        # `loss.backward()` came through our function mode, which PyTorch has switched
        # off for the time of the call: a backward that is written in Python needs it.
        try:
            with (
                machine.thread.having(backward=True, call=None),
                Function(machine),
            ):
                return engine(*args, **kwargs)
        finally:
            with machine.lock:
                machine.find_gradients()

    hooks = torch.autograd.graph.saved_tensors_hooks
    make = copy_of(hooks.__init__)

    def awake(hook: Callable) -> Callable:
        @functools.wraps(hook)
        def call(x: Any) -> Any:
            with machine.thread.having(call=None), Function(machine):
                return hook(x)

        return call

    @functools.wraps(make)
    def make_awake(self: Any, pack_hook: Callable, unpack_hook: Callable) -> None:
        make(self, awake(pack_hook), awake(unpack_hook))

    patches.set(hooks, __init__=make_awake)
    patches.set(torch.autograd.graph, _engine_run_backward=backward)

    for kind in (torch.jit.ScriptFunction, torch.jit.ScriptModule):
        patches.set(kind, __call__=_scripted(machine, kind.__call__))

    _threads(machine, patches)


def _threads(machine: VirtualMachine, patches: Patches) -> None:
    """What other threads are given to call; some of them are started by C++."""
    for name in ("start_new_thread", "start_joinable_thread"):  # of all of threading
        if start := getattr(_thread, name, None):

            def inside(function: Callable, *args: Any, _start=start, **kw: Any) -> Any:
                return _start(machine.anywhere(function), *args, **kw)

            patches.set(_thread, **{name: inside})

    submit = copy_of(ThreadPoolExecutor.submit)

    @functools.wraps(submit)
    def submit_anywhere(self: Any, function: Callable, /, *args: Any, **kw: Any) -> Any:
        return submit(self, machine.anywhere(function), *args, **kw)

    patches.set(ThreadPoolExecutor, submit=submit_anywhere)

    def with_callback(register: Callable) -> Callable:
        def call(self: Any, callback: Callable) -> Any:
            return register(self, machine.anywhere(callback))

        return call

    future = torch._C.Future
    patches.set(
        future,
        then=with_callback(future.then),
        add_done_callback=with_callback(future.add_done_callback),
    )


def _scripted(machine: VirtualMachine, original: Callable) -> Callable:
    """TorchScript calls no Python, so a factory in it has only these arguments."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with machine.thread.called_with((*args, *kwargs.values())):
            return original(self, *args, **kwargs)

    return call


# --- gradients: what autograd's engine checks, but it sees CPU tensors only -----------


def _at_home(
    machine: VirtualMachine, grads: Any, places: Any, whose: str = ""
) -> tuple:
    """Gradients, if they are where they belong; those without dimensions are moved.

    Raises:
        RuntimeError: one is on another device.
    """
    __tracebackhide__ = True
    found = list(grads)
    if not machine.is_on:
        return tuple(found)
    for i, (grad, place) in enumerate(zip(grads, places, strict=False)):
        if grad is None or place is None:
            continue
        there = machine.device_of(grad)
        if there == place or machine.drifts(grad):
            continue
        if grad.dim():
            raise RuntimeError(
                f"{whose}invalid gradient at index {i} - expected device {place} but "
                f"got {there}"
            )
        found[i] = machine.moved(grad, place)
    return tuple(found)


def _homes(machine: VirtualMachine, values: Any) -> list[torch.device | None]:
    """Where the gradients of tensors belong; None where nothing says it."""
    with truth():
        return [
            machine.device_of(x)
            if isinstance(x, Tensor) and x.requires_grad and not machine.drifts(x)
            else None
            for x in values
        ]


def _gradients(machine: VirtualMachine, patches: Patches) -> None:
    """Check the gradients that a Function of yours returns."""
    apply = vars(torch.autograd.Function)["apply"]  # of classes, so not yet bound

    def watch(node: Any, places: list) -> None:
        """Check what an autograd node returns, the gradients of its inputs."""
        whose = f"Function {node.name()} returned an "
        node.register_hook(lambda grads, _: _at_home(machine, grads, places, whose))

    @functools.wraps(apply)
    def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        call = apply.__get__(None, cls)
        if cls is Move:
            return call(*args, **kwargs)
        places = _homes(machine, (x for x in args if isinstance(x, Tensor)))
        out = call(*args, **kwargs)
        with truth():
            for x in tensors_in((out,), []):
                if isinstance(x.grad_fn, cls._backward_cls):
                    watch(x.grad_fn, places)
                    break
        return out

    patches.set(torch.autograd.Function, apply=classmethod(watched))
