"""Small parts of the machine: a storage, a device, its clock, a thread, an op."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from course_utils.virtual_gpus.records import KINDS, OTHER, Interval

Tensor = torch.Tensor
aten = torch.ops.aten
CPU = torch.device("cpu")  # one object, so that `is` may compare

# Inside it PyTorch's own C++ answers, past every mode and every patched method.
truth = torch._C.DisableTorchFunction

BLOCK = 512  # CUDA's allocator rounds every tensor up to a multiple of this


class Owned:
    """One storage on a GPU. While it drifts (see `Ledger.drift`) it has no bytes."""

    __slots__ = ("born", "device", "drifts", "key", "kind", "nbytes", "ref")

    def __init__(self, key: int, device: torch.device, nbytes: int, born: int) -> None:
        self.key, self.device, self.nbytes, self.born = key, device, nbytes, born
        self.kind, self.drifts = OTHER, False


class Ref(weakref.ref):
    __slots__ = ("key",)


class Device:
    """One virtual GPU: its memory and its place on the clock."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.device, self.capacity = device, capacity
        self.now = self.peak = self.peak_at = self.allocations = self.failures = 0
        self.kinds = dict.fromkeys(KINDS, 0)
        self.peak_kinds = dict(self.kinds)
        self.clock = Clock(str(device))

    def add(self, owned: Owned) -> None:
        self.now += owned.nbytes
        self.kinds[owned.kind] += owned.nbytes
        self.allocations += 1
        if self.now > self.peak:
            self.set_peak(owned.born)

    def remove(self, owned: Owned) -> None:
        self.now -= owned.nbytes
        self.kinds[owned.kind] -= owned.nbytes

    def set_peak(self, moment: int) -> None:
        self.peak, self.peak_at = self.now, moment
        self.peak_kinds = dict(self.kinds)

    def classify(self, owned: Owned, kind: str) -> None:
        """Say what a living storage holds, at the peak as well if it was there."""
        books = [self.kinds]
        if owned.born <= self.peak_at:
            books.append(self.peak_kinds)
        for book in books:
            book[owned.kind] -= owned.nbytes
            book[kind] += owned.nbytes
        owned.kind = kind


class Clock:
    """One device's modelled time: until when it is busy, and what it did."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clear()

    def clear(self) -> None:
        """Back to the start."""
        self.free, self.sealed = 0.0, 0
        self.intervals: list[Interval] = []

    def seal(self) -> int:
        """Nothing joins the intervals so far any more. Returns how many they are."""
        self.sealed = len(self.intervals)
        return self.sealed

    def work(
        self, start: float, stop: float, kind: str, phase: str, label: str, module: str
    ) -> None:
        self.free = stop
        last = self.intervals[-1] if self.intervals else None
        if (
            len(self.intervals) > self.sealed
            and start - last.stop <= 1e-12
            and (last.kind, last.phase, last.label) == (kind, phase, label)
        ):
            last.stop = stop
            last.ops += 1
            return
        self.intervals.append(
            Interval(self.name, start, stop, kind, phase, label, module)
        )


class ThreadState(threading.local):
    """What differs from thread to thread."""

    def __init__(self) -> None:
        self.entered = False  # is this thread inside of the modes?
        self.current = 0  # torch.cuda.current_device()
        self.force: torch.device | None = None  # where new storages go
        self.call: tuple | None = None  # arguments of the PyTorch function around us
        self.last: torch.device | None = None  # device of the last op
        self.host = 0.0  # the modelled time at which this thread issues its next op
        self.backward = self.optimizer = self.setup = False
        self.quiet = False  # nothing is logged
        self.plain = False  # inside an op written in Python: all is on the CPU there
        self.cause = "to"
        self.modules: list[torch.nn.Module] = []
        self.module: str | None = None  # stands in for them, in a backward
        self.label = self.backward_label = ""
        self.labels: list[tuple[int, str]] = []  # from which autograd node on

    def having(self, **values: Any) -> Having:
        """Inside of `with`, this thread has these values; then those of before."""
        return Having(self, values)

    def called_with(self, args: tuple) -> Having:
        """Inside, PyTorch runs a function with these; the outermost one counts."""
        return self.having(call=args if self.call is None else self.call)

    def set_label(self, text: str) -> None:
        self.label = text
        number = torch.autograd._get_sequence_nr()
        if self.labels and self.labels[-1][0] == number:
            self.labels.pop()
        self.labels.append((number, text))


class Having:
    """See `ThreadState.having`; a class because it is entered for every function."""

    __slots__ = ("thread", "values")

    def __init__(self, thread: ThreadState, values: dict[str, Any]) -> None:
        self.thread, self.values = thread, values

    def __enter__(self) -> None:
        state = vars(self.thread)
        for name, value in self.values.items():
            self.values[name], state[name] = state[name], value

    def __exit__(self, *error: object) -> None:
        vars(self.thread).update(self.values)


class Op:
    """What has to be known of an ATen op, found out once."""

    # C++ moves their CPU arguments to the GPU by itself, or wants them on the CPU.
    INDEXING = (
        "index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put"
    )
    LENGTHS = {"input_lengths", "target_lengths"}
    HOST_ARGUMENTS = {
        **dict.fromkeys(INDEXING.split(), {"indices"}),
        **dict.fromkeys(
            ("_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss"), LENGTHS
        ),
        "_pack_padded_sequence": {"lengths"},
        "_pack_padded_sequence_backward": {"batch_sizes"},
    }
    CROSS = {aten.copy_.default, aten._to_copy.default}
    FREE = frozenset(
        "empty empty_strided empty_like empty_permuted new_empty new_empty_strided "
        "lift_fresh set_ resize_ _local_scalar_dense equal is_same_size".split()
    )
    # The host waits for them: it has to know a value, or how long the result is.
    WAITED_FOR = frozenset(
        "_linalg_check_errors _unique _unique2 allclose bincount equal masked_select "
        "nonzero repeat_interleave unique_consecutive unique_dim "
        "unique_dim_consecutive".split()
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func, self.name = func, schema.name.partition("::")[2]
        self.foreach = self.name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.cross = func in self.CROSS
        self.names = [argument.name for argument in schema.arguments]
        self.written = {
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.host_arguments = self.HOST_ARGUMENTS.get(self.name, frozenset())
        self.free = (
            func.is_view
            or self.name in self.FREE
            or schema.name.startswith(("aten::sym_", "prim::"))
        )
        self.resizes = self.name.startswith("resize") or any(
            name.startswith("out") for name in self.written
        )
        self.sized = bool(self.names) and self.names[0] == "size"
        # Collectives block until another process answers: no lock around them.
        self.waits = "c10d" in schema.name
        self.custom = func.namespace not in ("aten", "prims")

        def has_kernel(key: str) -> bool:
            if func.namespace == "prim":  # questions about a tensor, in the interpreter
                return False
            return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)

        # Made of other ops. Autograd takes it apart, so that it comes here only where
        # there is no autograd: with tensors of inference mode.
        composite = has_kernel("CompositeImplicitAutograd")
        self.composite = composite and not has_kernel("CPU")
        self.makes_view = has_kernel("ADInplaceOrView")
        self.flops: Callable | None | bool = False  # False: not looked up yet
        self.numbers: bool | None = None  # None: not looked up (`takes_numbers`)
        self.indexes = "indices" in self.host_arguments
        self.waited_for = self.indexes or self.name in self.WAITED_FOR

    def named(self, args: tuple, kwargs: dict) -> Iterator[tuple[str, Tensor]]:
        """All tensors that the op was given, each with the name of its argument."""
        for name, value in (*zip(self.names, args), *kwargs.items()):  # noqa: B905
            for x in tensors_in((value,), []):
                yield name, x

    def host_waits(self, args: tuple, kwargs: dict) -> bool:
        """Does the host wait for this call of an op that it may wait for?"""
        if not self.indexes:
            return kwargs.get("output_size") is None  # repeat_interleave may be told
        masks = (torch.bool, torch.uint8)
        if not any(x is not None and x.dtype in masks for x in args[1]):
            return False
        return len(args) == 2 or args[2].numel() > 1  # one value: PyTorch fills with it


def tensors_in(values: Any, found: list[Tensor]) -> list[Tensor]:
    """All tensors in the arguments of an op; much faster than a pytree."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in(value, found)
    return found


def key_of(x: Tensor) -> int | None:
    """What the storage of a tensor is known by; None for one without a storage."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper, or a sparse tensor
        return None


def blocks(nbytes: int) -> int:
    """The bytes that CUDA's allocator takes for so many."""
    return -(-nbytes // BLOCK) * BLOCK


def unwrapped(x: Tensor) -> Tensor | None:
    """The tensor inside a torch.func wrapper; None for another tensor."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(x):
        return functorch.get_unwrapped(x)
    return None
