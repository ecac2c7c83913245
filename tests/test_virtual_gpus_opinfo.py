"""PyTorch's own database of operators, run on a virtual GPU, forward and backward.

Each operator gets PyTorch's samples, once as they are on the CPU and once moved to
`cuda:1`. Results and gradients must be the CPU's, and on `cuda:1`.
"""

import copy
import sys
import types
import unittest
import warnings
from collections.abc import Iterator

import pytest
import torch
from thorough import thorough_after
from torch.utils._pytree import tree_leaves, tree_map

from course_utils import virtual_gpus

ONE = torch.device("cuda:1")
SAMPLES = 3
SHARDS = 24  # of the database; each is one test

# Why an operator is left out.
NOT_HERE = {
    "to_sparse": "sparse tensors are beyond virtual GPUs",
    "sparse.mm.reduce": "sparse tensors are beyond virtual GPUs",
    "sparse.sampled_addmm": "sparse tensors are beyond virtual GPUs",
    "as_strided.partial_views": "reads what lies behind a view, which a copy has not",
    "broadcast_shapes": "takes no tensor",
    "torch._scaled_mm": "8-bit floats cannot be compared",
    "to": "its samples say where to go",
}
# Arguments that CUDA wants on the CPU.
ON_CPU = {"tensor_split"}


@pytest.fixture(scope="module")
def database() -> list:
    """All operators that PyTorch tests itself with."""
    if "expecttest" not in sys.modules:
        # PyTorch's test utilities import it, but the database does not need it.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def name_of(op) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def computed(op, sample, backward: bool) -> tuple[list, list]:
    """All tensors that come out, and the gradients of all inputs."""
    torch.manual_seed(0)
    out = op(sample.input, *sample.args, **sample.kwargs)
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    inputs = [
        x
        for x in tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    processed = tree_leaves(sample.output_process_fn_grad(out))
    ends = [x for x in processed if isinstance(x, torch.Tensor) and x.requires_grad]
    if not backward or not ends:
        return results, []
    loss = sum((x.abs() if x.is_complex() else x).double().sum() for x in ends)
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    # Zeros without memory (ZeroTensor) crash PyTorch where a mode sees them.
    return results, [
        g + 0 if g is not None and g._is_zerotensor() else g for g in gradients
    ]


def moved(value: object, stays: bool) -> object:
    def move(x: object) -> object:
        if isinstance(x, torch.device):
            return ONE
        if not isinstance(x, torch.Tensor) or stays:
            return x
        return x.detach().to(ONE).requires_grad_(x.requires_grad)

    return tree_map(move, value)


def on_gpu(op, sample) -> object:
    """The same sample with its tensors on `cuda:1`; a factory is asked for that."""
    there = copy.copy(sample)
    there.input = moved(sample.input, False)
    there.args = moved(sample.args, op.name in ON_CPU)
    there.kwargs = moved(sample.kwargs, op.name in ON_CPU)
    tensors = tree_leaves((there.input, there.args, there.kwargs))
    if there.kwargs.get("device") is not None or not any(
        isinstance(x, torch.Tensor) for x in tensors
    ):
        there.kwargs["device"] = "cuda:1"
    return there


def samples_of(op) -> Iterator[tuple]:
    """(sample, wants backward, results, gradients) on the CPU, where op runs there."""
    dtype = torch.float32
    if not op.supports_dtype(dtype, "cpu"):
        others = sorted(op.supported_dtypes("cpu"), key=str)
        if not others:
            return
        dtype = others[0]
    backward = op.supports_autograd and dtype is torch.float32
    try:
        for sample in list(op.sample_inputs("cpu", dtype, requires_grad=backward))[
            :SAMPLES
        ]:
            yield (sample, backward, *computed(op, sample, backward))
    except (RuntimeError, ImportError, NotImplementedError, ValueError, TypeError):
        return  # not on this machine's CPU either


def same(there: torch.Tensor | None, here: torch.Tensor | None) -> None:
    assert (there is None) == (here is None)
    if here is not None:
        assert there.device == ONE
        torch.testing.assert_close(
            there.detach().cpu(), here.detach(), rtol=1e-6, atol=1e-6, equal_nan=True
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", thorough_after(1, range(SHARDS)))
def test_operators(database, shard):
    failed, ran = {}, 0
    for op in database[shard::SHARDS]:
        name = name_of(op)
        left_out = name in NOT_HERE or name.startswith("jiterator")  # CUDA code
        references = [] if left_out else list(samples_of(op))
        ran += bool(references)
        try:
            with virtual_gpus(2, force=True):
                for sample, backward, results, gradients in references:
                    there = computed(op, on_gpu(op, sample), backward)
                    assert len(there[0]) == len(results)
                    for x, y in zip(there[0], results, strict=True):
                        if "empty" in op.name:
                            assert x.device == ONE
                        else:
                            same(x, y)
                    for x, y in zip(there[1], gradients, strict=True):
                        same(x, y)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    print(f"{ran - len(failed)} of {ran} operators")
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert ran >= 20
