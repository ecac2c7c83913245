"""How many bytes the tensors of a process hold, through time.

    with record_tensor_bytes() as record:
        model = nn.Linear(1000, 1000)
        with record.label("forward"):
            loss = model(inputs).sum()
    record.end, record.peak, record.peak_of("forward")

The memory of tensors is counted, and nothing else: not Python, not the libraries, not
what a kernel or gloo takes for itself. So the bytes are the same in every run.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# gloo's threads let go of a tensor a little after the collective is done, on a busy
# machine some milliseconds. What is asked for the bytes of now waits for them.
MOMENT = 0.02  # seconds


@dataclass
class TensorBytes:
    """A curve of steps, and what was done meanwhile. Plain data, which can be pickled.

    Attributes:
        seconds: when the bytes changed, since the beginning; ascending.
        nbytes: the bytes from then on.
        spans: labels with their begin and end in seconds, in the order of the ends.
    """

    seconds: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter, repr=False)
    _recording: bool = field(default=False, repr=False)

    @property
    def end(self) -> int:
        """The bytes at the end; while it records, the bytes now (after 20 ms)."""
        if self._recording:
            time.sleep(MOMENT)
        return self._last()

    def _last(self) -> int:
        return self.nbytes[-1] if self.nbytes else 0

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return max(self.nbytes, default=0)

    def peak_of(self, label: str) -> int:
        """The most bytes during the spans with this label.

        Raises:
            KeyError: no span has it.
        """
        spans = [span for span in self.spans if span[0] == label]
        if not spans:
            known = sorted({name for name, *_ in self.spans})
            raise KeyError(f"no span has the label {label!r}; there are {known}")
        peaks = []
        for _, begin, end in spans:
            first, last = (bisect_right(self.seconds, t) for t in (begin, end))
            peaks.append(max([self.at(begin), *self.nbytes[first:last]]))
        return max(peaks)

    def at(self, seconds: float) -> int:
        """The bytes at this time."""
        place = bisect_right(self.seconds, seconds)
        return self.nbytes[place - 1] if place else 0

    def since(self, seconds: float) -> TensorBytes:
        """The part of the record from this time on."""
        first = bisect_right(self.seconds, seconds)
        return TensorBytes(
            [seconds, *self.seconds[first:]],
            [self.at(seconds), *self.nbytes[first:]],
            [span for span in self.spans if span[1] >= seconds],
        )

    @contextlib.contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Name what is done inside. Spans may lie within each other."""
        begin = time.perf_counter() - self._began
        try:
            yield
        finally:
            self.spans.append((name, begin, time.perf_counter() - self._began))

    def _change(self, by: int) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.nbytes.append(self._last() + by)


@contextlib.contextmanager
def record_tensor_bytes() -> Iterator[TensorBytes]:
    """Count the tensors that this thread makes inside, until their memory is freed.

    Tensors that share memory count once; one whose storage is resized, with its new
    size. Those from before count as nothing, so begin before the model is made.

    Python's garbage collector rests meanwhile. It would free objects that refer to
    each other in a circle, at a time that nobody can foretell.

    Cost: some 20 microseconds for each operation, and 20 ms at the end.
    """
    import torch

    record = TensorBytes()
    ledger = _Ledger(record)
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        ledger.resized(storage)
        return result

    had_gc = gc.isenabled()
    gc.collect()
    gc.disable()
    torch.UntypedStorage.resize_ = resize_and_count
    record._recording = True
    try:
        with _watching(ledger):
            yield record
        time.sleep(MOMENT)
    finally:
        record._recording = False
        torch.UntypedStorage.resize_ = resize
        ledger.close()
        if had_gc:
            gc.enable()


class _Ledger:
    """The storages that have been seen, and their bytes."""

    def __init__(self, record: TensorBytes) -> None:
        self.record = record
        self.held: dict[int, tuple[weakref.ref, int | None]] = {}

    def add(self, storage: Any, old: bool) -> None:
        """Count a storage, unless it is known. An old one is known from then on."""
        key = storage._cdata
        if key not in self.held:
            nbytes = None if old else storage.nbytes()
            gone = weakref.ref(storage, lambda _: self._remove(key))
            self.held[key] = gone, nbytes
            if nbytes:
                self.record._change(nbytes)

    def resized(self, storage: Any) -> None:
        """Count the new size."""
        ref, before = self.held.get(storage._cdata, (None, None))
        now = storage.nbytes()
        if before is not None and now != before:
            self.held[storage._cdata] = ref, now
            self.record._change(now - before)

    def _remove(self, key: int) -> None:
        _, nbytes = self.held.pop(key, (None, None))
        if nbytes:
            self.record._change(-nbytes)

    def close(self) -> None:
        self.held.clear()  # with the weak references: what dies later is not recorded


def _watching(ledger: _Ledger) -> Any:
    import torch
    from torch import Tensor
    from torch.nn import Parameter
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    plain = (Tensor, Parameter)

    class Watch(TorchDispatchMode):
        # Otherwise the first operation imports torch._dynamo, which takes 2 seconds.
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(kind.__module__.startswith("torch.distributed") for kind in types):
                return NotImplemented  # a DTensor comes again, as what is inside it
            fresh = "lift_fresh" in func.name()  # the data of torch.tensor(...)
            self._see((args, kwargs), old=not fresh)
            result = func(*args, **(kwargs or {}))
            self._see(result, old=False)
            return result

        def _see(self, values: Any, old: bool) -> None:
            for value in tree_leaves(values):
                if type(value) in plain and value.layout == torch.strided:
                    ledger.add(value.untyped_storage(), old)

    return Watch()
