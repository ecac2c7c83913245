"""`autocast("cuda")` and `autocast("cpu")`, side by side, both on the CPU's kernels."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from course_utils.virtual_gpus.parts import Tensor, tensors_in
from course_utils.virtual_gpus.patches import Patches

if TYPE_CHECKING:
    from course_utils.virtual_gpus.machine import VirtualMachine


_set_enabled, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype


class AutocastState(threading.local):
    """What this thread has set for the GPUs and for the CPU.

    PyTorch's autocast for the CPU does the work for both. While `autocast("cuda")` is
    on, it is set to that, except during calls without a GPU's tensor.
    """

    active = False  # is one of them on, so that calls need a look?

    def __init__(self) -> None:
        self.set = {"cuda": (False, torch.float16), "cpu": (False, torch.bfloat16)}

    def rest(self) -> tuple[bool, torch.dtype]:
        """What PyTorch's autocast for the CPU is set to between calls."""
        return self.set["cuda" if self.set["cuda"][0] else "cpu"]

    def settle(self) -> None:
        self.active = any(on for on, _ in self.set.values())
        _set_for_cpu(*self.rest())


def _set_for_cpu(enabled: bool, dtype: torch.dtype) -> None:
    _set_enabled("cpu", enabled)
    _set_dtype("cpu", dtype)


# What CUDA's autocast does where the CPU's does something else: the lists of PyTorch's
# include/ATen/autocast_mode.h, with the names that Python has for these functions.
FLOAT32 = frozenset(
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits "
    "cosh cosine_embedding_loss cdist cosine_similarity cross_entropy cumprod cumsum "
    "dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss "
    "interpolate kl_div l1_loss layer_norm linalg_matrix_norm linalg_norm "
    "linalg_vector_norm log log10 log_softmax log1p log2 logsumexp margin_ranking_loss "
    "mse_loss multilabel_margin_loss multi_margin_loss native_layer_norm nll_loss norm "
    "normalize nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm rms_norm "
    "rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan "
    "triplet_margin_loss upsample upsample_bilinear upsample_nearest".split()
)
LOWER = frozenset(
    "addmv addr chain_matmul einsum gru gru_cell linalg_multi_dot lstm lstm_cell mv "
    "rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell".split()
)
WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot grid_sample grid_sampler index_put "
    "scatter_add tensordot vdot".split()
)
AS_IT_IS = frozenset(
    "_max_pool3d adaptive_avg_pool3d max_pool3d max_pool3d_with_indices max_unpool1d "
    "max_unpool2d max_unpool3d pad trace".split()
)

_CAST = (torch.float16, torch.bfloat16, torch.float32)


def autocasted(machine: VirtualMachine, func: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function with the autocast of the device that its tensors are on.

    Raises:
        RuntimeError: CUDA's autocast calls the function unsafe.
    """
    __tracebackhide__ = True
    state = machine.autocast
    tensors = tensors_in((*args, *kwargs.values()), [])
    setting = state.rest()
    if any(machine.device_of(x).type == "cuda" for x in tensors):
        dtype, differs = _cuda_casts(state, func, tensors)
        if dtype is not None:
            args = _cast(machine, args, dtype)
            kwargs = {name: _cast(machine, x, dtype) for name, x in kwargs.items()}
        on, dtype = state.set["cuda"]
        setting = (on and not differs, dtype)
    elif tensors:
        setting = state.set["cpu"]
    state.active = False  # for calls inside of this one
    if setting != state.rest():
        _set_for_cpu(*setting)
    try:
        return machine.call(func, args, kwargs)
    finally:
        state.settle()


def _cuda_casts(
    state: AutocastState, func: Any, tensors: list[Tensor]
) -> tuple[torch.dtype | None, bool]:
    """What CUDA's autocast casts to here, and whether it differs from the CPU's."""
    name = getattr(func, "__name__", "")
    on, lower = state.set["cuda"]
    if not on:
        return None, False
    if name == "binary_cross_entropy":
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe "
            "to autocast."
        )
    if name in FLOAT32:
        return torch.float32, True
    if name in LOWER:
        return lower, True
    if name in WIDEST:
        wide = any(x.dtype == torch.float32 for x in tensors)
        return torch.float32 if wide else None, True
    return None, name in AS_IT_IS


def _cast(machine: VirtualMachine, value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        casts = value.dtype in _CAST and machine.device_of(value).type == "cuda"
        return value.to(dtype) if casts else value
    if type(value) in (list, tuple):
        return type(value)(_cast(machine, x, dtype) for x in value)
    return value


def install(machine: VirtualMachine, patches: Patches) -> None:
    """Let `autocast("cuda")` and `autocast("cpu")` be two things."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    state = machine.autocast
    state.set["cpu"] = (enabled("cpu"), dtype("cpu"))
    state.settle()

    def is_enabled(kind: str = "cuda") -> bool:
        return state.set[kind][0] if kind in state.set else enabled(kind)

    def get_dtype(kind: str) -> torch.dtype:
        return state.set[kind][1] if kind in state.set else dtype(kind)

    def switch(kind: Any, value: Any = None) -> None:
        if value is None:  # the older form: set_autocast_enabled(True) means CUDA
            kind, value = "cuda", kind
        if kind in state.set:
            state.set[kind] = (value, state.set[kind][1])
            state.settle()
        else:
            _set_enabled(kind, value)

    def choose(kind: str, value: torch.dtype) -> None:
        if kind in state.set:
            state.set[kind] = (state.set[kind][0], value)
            state.settle()
        else:
            _set_dtype(kind, value)

    patches.replace(
        (torch,),
        is_autocast_enabled=is_enabled,
        set_autocast_enabled=switch,
        get_autocast_dtype=get_dtype,
        set_autocast_dtype=choose,
        get_autocast_gpu_dtype=lambda: get_dtype("cuda"),
        set_autocast_gpu_dtype=lambda value: choose("cuda", value),
        is_autocast_cpu_enabled=lambda: is_enabled("cpu"),
        set_autocast_cpu_enabled=lambda value: switch("cpu", value),
        get_autocast_cpu_dtype=lambda: get_dtype("cpu"),
        set_autocast_cpu_dtype=lambda value: choose("cpu", value),
    )
