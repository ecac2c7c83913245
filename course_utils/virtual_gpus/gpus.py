"""Virtual GPUs to use: switched on and off, and what they have on record."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from course_utils.virtual_gpus import (
    autocast,
    autograd,
    cuda,
    errors,
    files,
    parallel,
    refusals,
    tensors,
)
from course_utils.virtual_gpus.machine import VirtualMachine
from course_utils.virtual_gpus.modes import Dispatch, Function
from course_utils.virtual_gpus.patches import Patches
from course_utils.virtual_gpus.records import (
    KINDS,
    OTHER,
    DeviceMemory,
    Memory,
    Timeline,
    Transfer,
)

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # versions of PyTorch

active: VirtualGPUs | None = None  # those that are on in this process


def _after_fork() -> None:
    # Another thread may have held the lock at that moment; it is not in the child.
    if active is not None:
        active.machine.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class VirtualGPUs:
    """Virtual GPUs `cuda:0 ... cuda:n-1`; made by `virtual_gpus`, documented there.

    Attributes:
        n: How many.
        machine: What does the work behind them.
    """

    def __init__(self, n: int, *, force: bool, **settings: Any) -> None:
        self.n, self.machine = n, VirtualMachine(n, **settings)
        self._force, self._aside, self._in_block = force, False, False
        self._modes: tuple = ()
        self._patches: Patches | None = None

    # ---- on and off ------------------------------------------------------------------

    def on(self) -> VirtualGPUs:
        """Switch on, until `off()`: for a whole notebook.

        Others that were switched on in this way are switched off: a notebook's cell may
        run twice, and its first machine then has no name any more.

        Raises:
            RuntimeError: these are on already, or others, in a `with` block.
        """
        before = active
        if before is self or self._aside or before is not None and before._in_block:
            raise RuntimeError(errors.already_on(before or self, self))
        if before is not None:
            before.off()
            print(
                f"The {before.n} virtual GPU(s) that were on are off now. What was on "
                "them is on the CPU."
            )
        if not self._force and (real := real_gpus()) >= self.n:
            self._aside = True
            print(
                f"This machine has {real} real GPU(s): the same code runs on them, "
                "and the virtual GPUs step aside."
            )
            return self
        check_version()
        self.machine.process = os.getpid()
        parts = (tensors, autograd, cuda, autocast, files, parallel, refusals)
        try:
            with Patches() as patches:
                for part in parts:
                    part.install(self.machine, patches)
                patches.follow()
                patches.callback(self._are_on, False)
                self._are_on(True)
                self._modes = (Function(self.machine), Dispatch(self.machine))
                for mode in self._modes:
                    patches.enter_context(mode)
                self._patches = patches.pop_all()
        except AttributeError as error:  # a private name of PyTorch
            raise RuntimeError(errors.other_version(TESTED, error)) from error
        return self

    def _are_on(self, on: bool) -> None:
        global active
        active = self if on else None
        self.machine.is_on = self.machine.thread.entered = on

    def off(self) -> None:
        """Switch off and put PyTorch back as it was.

        Tensors on virtual GPUs are ordinary CPU tensors from then on. The records stay.

        Where they are off already, nothing happens.

        Raises:
            RuntimeError: something that was entered since (a `with torch.device(...)`,
                another mode) is still open.
        """
        if self._aside:
            self._aside = False
            return
        if active is not self or self._patches is None:
            return
        _check_modes(*self._modes)
        self._patches.close()
        self._patches = None

    def __enter__(self) -> VirtualGPUs:
        self.on()
        self._in_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self._in_block = False
        self.off()

    @property
    def real(self) -> bool:
        """Did they step aside, because this machine has that many real GPUs?"""
        return self._aside

    def __repr__(self) -> str:
        state = "aside" if self._aside else "on" if active is self else "off"
        return f"<{self.n} virtual GPU(s), {state}>"

    # ---- what is on record -----------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes now and at the peak, device by device and by what holds them."""
        with self.machine.lock:
            if self._aside:
                return _real_memory(self.n)
            self.machine.settle()
            self.machine.find_gradients()
            return Memory(
                tuple(
                    DeviceMemory(
                        str(gpu.device),
                        gpu.capacity,
                        gpu.now,
                        gpu.peak,
                        dict(gpu.kinds),
                        dict(gpu.peak_kinds),
                    )
                    for gpu in self.machine.gpus
                )
            )

    def reset_peak(self) -> None:
        """From now on, `peak` is the most since now."""
        reset = self.machine.reset_peak
        if self._aside:
            reset = torch.cuda.reset_peak_memory_stats
        for i in range(self.n):
            reset(i)

    @property
    def transfers(self) -> list[Transfer]:
        """Every copy between two devices so far, in the order of the calls."""
        return list(self.machine.transfers)

    def timeline(self) -> Timeline:
        """When each device worked, in modelled seconds since the start or `clear()`."""
        with self.machine.lock:
            return self._timeline(0.0, {})

    def clear(self) -> None:
        """Forget the transfers and the timeline; the clock starts again at 0.

        Memory and its peaks stay as they are: see `reset_peak`.
        """
        with self.machine.lock:
            self.machine.transfers.clear()
            for clock in self.machine.clocks():
                clock.clear()
            self.machine.thread.host = 0.0

    @contextlib.contextmanager
    def record(self) -> Iterator[Record]:
        """`with gpus.record() as log:` keeps what happens inside, and only that.

        `log.transfers` is a list as `gpus.transfers`, `log.timeline()` a `Timeline`
        that begins at 0. All devices begin together. May be nested.
        """
        with self.machine.lock:
            log = Record(self, self._barrier())
        try:
            yield log
        finally:
            with self.machine.lock:
                log._close()

    @contextlib.contextmanager
    def label(self, text: str) -> Iterator[None]:
        """`with gpus.label("micro-batch 0"):` names what happens inside.

        Transfers and intervals carry the label, and so does the backward of what was
        computed inside, whenever it runs.
        """
        thread = self.machine.thread
        before = thread.label
        thread.set_label(str(text))
        try:
            yield
        finally:
            thread.set_label(before)

    def _barrier(self) -> float:
        """All devices wait for the last one. Returns the time then."""
        latest = max(clock.free for clock in self.machine.clocks())
        latest = max(latest, self.machine.thread.host)
        for clock in self.machine.clocks():
            clock.free = latest
        self.machine.thread.host = latest
        return latest

    def _timeline(self, origin: float, first: dict[str, int]) -> Timeline:
        rows, end = {}, origin
        for clock in self.machine.clocks():
            kept = [
                replace(i, start=i.start - origin, stop=i.stop - origin)
                for i in clock.intervals[first.get(clock.name, 0) :]
            ]
            if kept or clock is not self.machine.host:
                rows[clock.name] = tuple(kept)
            end = max([end, *(origin + i.stop for i in kept)])
        return Timeline(rows, end - origin)


class Record:
    """What happened inside `with gpus.record() as log:`."""

    def __init__(self, gpus: VirtualGPUs, began: float) -> None:
        self._gpus, self._began = gpus, began
        self._sent = len(gpus.machine.transfers)
        self._first = {clock.name: clock.seal() for clock in gpus.machine.clocks()}
        self._kept: tuple[list[Transfer], Timeline] | None = None

    def _read(self) -> tuple[list[Transfer], Timeline]:
        if self._kept is not None:
            return self._kept
        with self._gpus.machine.lock:
            timeline = self._gpus._timeline(self._began, self._first)
            return self._gpus.transfers[self._sent :], timeline

    def _close(self) -> None:
        self._kept = self._read()
        for clock in self._gpus.machine.clocks():
            clock.seal()

    @property
    def transfers(self) -> list[Transfer]:
        """As `gpus.transfers`."""
        return self._read()[0]

    def timeline(self) -> Timeline:
        """As `gpus.timeline()`, with the start of the record as 0."""
        return self._read()[1]


# --- versions, real GPUs -------------------------------------------------------------


@functools.cache
def check_version() -> None:
    """Warn of a version of PyTorch that was not tested."""
    if ".".join(torch.__version__.split(".")[:2]) not in TESTED:
        warnings.warn(
            f"Virtual GPUs were tested with PyTorch {TESTED[0]} to {TESTED[-1]}, not "
            f"with {torch.__version__}. If something goes wrong, try one of these.",
            stacklevel=4,
        )


def real_gpus() -> int:
    """How many real GPUs PyTorch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _real_memory(n: int) -> Memory:
    """The memory of real GPUs, for a machine that has them."""
    rows = []
    for i in range(n):
        now, peak = torch.cuda.memory_allocated(i), torch.cuda.max_memory_allocated(i)
        capacity = torch.cuda.get_device_properties(i).total_memory
        none = dict.fromkeys(KINDS, 0)
        by_now, by_peak = {**none, OTHER: now}, {**none, OTHER: peak}
        rows.append(DeviceMemory(f"cuda:{i}", capacity, now, peak, by_now, by_peak))
    return Memory(tuple(rows))


def _check_modes(function: Function, dispatch: Dispatch) -> None:
    """Raise unless our modes are the innermost ones of this thread."""
    innermost = (
        torch.overrides._get_current_function_mode(),
        torch.utils._python_dispatch._get_current_dispatch_mode(),
    )
    if innermost != (function, dispatch):
        raise RuntimeError(
            "Virtual GPUs can be switched off only where they were switched on: leave "
            "the `with` blocks that were entered since, and call off() in the same "
            "thread as on()."
        )
