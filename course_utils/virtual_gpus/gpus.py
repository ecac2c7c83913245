"""Virtual GPUs to use: switched on and off, and what they have on record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from course_utils.virtual_gpus import errors, machine, surface
from course_utils.virtual_gpus.machine import Machine, _Dispatch, _Function
from course_utils.virtual_gpus.patches import Patches
from course_utils.virtual_gpus.records import (
    DeviceMemory,
    Interval,
    Memory,
    Timeline,
    Transfer,
)


class VirtualGPUs(Machine):
    """Virtual GPUs `cuda:0 ... cuda:n-1`; made by `virtual_gpus`, documented there."""

    def __init__(self, n: int, *, force: bool, **settings: Any) -> None:
        super().__init__(n, **settings)
        self._force, self._aside, self._in_block = force, False, False
        self._modes: tuple[_Function, _Dispatch] | None = None
        self._patches: Patches | None = None

    # ---- on and off ------------------------------------------------------------------

    def on(self) -> VirtualGPUs:
        """Switch on, until `off()`: for a whole notebook.

        Others that were switched on in this way are switched off: a notebook's cell may
        run twice, and its first machine then has no name any more.

        Raises:
            RuntimeError: these are on already, or others, in a `with` block.
        """
        before = machine.active
        if before is self or self._aside or before is not None and before._in_block:
            raise RuntimeError(errors.already_on(before or self, self))
        if before is not None:
            before.off()
            print(
                f"The {before.n} virtual GPU(s) that were on are off now. What was on "
                "them is on the CPU."
            )
        if not self._force and (real := surface.real_gpus()) >= self.n:
            self._aside = True
            print(
                f"This machine has {real} real GPU(s): the same code runs on them, "
                "and the virtual GPUs step aside."
            )
            return self
        surface.check_version()
        self._process = os.getpid()
        patches = Patches()
        try:
            surface.install(self, patches)
            machine.active = self
            self._modes = (_Function(self), _Dispatch(self))
            for mode in self._modes:
                mode.__enter__()
            self._thread.entered = True
        except BaseException:
            machine.active, self._modes = None, None
            patches.undo()
            raise
        self._patches = patches
        return self

    def off(self) -> None:
        """Switch off and put PyTorch back as it was.

        Tensors on virtual GPUs are ordinary CPU tensors from then on. The records stay.

        Raises:
            RuntimeError: they are not on, or something that was entered since (a
                `with torch.device(...)`, another mode) is still open.
        """
        if self._aside:
            self._aside = False
            return
        if machine.active is not self or self._modes is None or self._patches is None:
            raise RuntimeError("These virtual GPUs are not on: call on() first.")
        surface.check_modes(self._modes)
        function, dispatch = self._modes
        dispatch.__exit__(None, None, None)
        function.__exit__(None, None, None)
        machine.active, self._modes = None, None
        self._thread.entered = False
        self._patches.undo()
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
        state = "aside" if self._aside else "on" if machine.active is self else "off"
        return f"<{self.n} virtual GPU(s), {state}>"

    # ---- what is on record -----------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes now and at the peak, device by device and by what holds them."""
        with self._lock:
            if self._aside:
                return surface.real_memory(self.n)
            self._settle()
            self._find_gradients()
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
                    for gpu in self._gpus
                )
            )

    def reset_peak(self) -> None:
        """From now on, `peak` is the most since now."""
        with self._lock:
            if self._aside:
                for i in range(self.n):
                    torch.cuda.reset_peak_memory_stats(i)
                return
            self._settle()
            for gpu in self._gpus:
                gpu.set_peak(next(self._births))

    @property
    def transfers(self) -> list[Transfer]:
        """Every copy between two devices so far, in the order of the calls."""
        return list(self._transfers)

    def clear_transfers(self) -> None:
        """Forget the transfers so far."""
        self._transfers.clear()

    def timeline(self) -> Timeline:
        """When each device worked, in modelled seconds since the start or `clear()`."""
        with self._lock:
            return self._timeline(0.0, {})

    def clear(self) -> None:
        """Forget the transfers and the timeline; the clock starts again at 0.

        Memory and its peaks stay as they are: see `reset_peak`.
        """
        with self._lock:
            self.clear_transfers()
            for clock in self._clocks():
                clock.free, clock.intervals = 0.0, []
            self._thread.host = 0.0

    @contextlib.contextmanager
    def record(self) -> Iterator[Record]:
        """`with gpus.record() as log:` keeps what happens inside, and only that.

        `log.transfers` is a list as `gpus.transfers`, `log.timeline()` a `Timeline`
        that begins at 0. All devices begin together. May be nested.
        """
        with self._lock:
            began = self._barrier()
            log = Record(self, began, len(self._transfers))
            log._first = {c.name: len(c.intervals) for c in self._clocks()}
            for clock in self._clocks():  # so that nothing joins an older interval
                clock.intervals.append(Interval(clock.name, began, began, "mark"))
        try:
            yield log
        finally:
            with self._lock:
                log._close()

    @contextlib.contextmanager
    def label(self, text: str) -> Iterator[None]:
        """`with gpus.label("micro-batch 0"):` names what happens inside.

        Transfers and intervals carry the label, and so does the backward of what was
        computed inside, whenever it runs.
        """
        thread = self._thread
        before = thread.label
        thread.set_label(str(text))
        try:
            yield
        finally:
            thread.set_label(before)

    def _barrier(self) -> float:
        """All devices wait for the last one. Returns the time then."""
        latest = max(clock.free for clock in self._clocks())
        latest = max(latest, self._thread.host)
        for clock in self._clocks():
            clock.free = latest
        self._thread.host = latest
        return latest

    def _timeline(self, origin: float, first: dict[str, int]) -> Timeline:
        rows, end = {}, origin
        for clock in self._clocks():
            kept = [
                replace(i, start=i.start - origin, stop=i.stop - origin)
                for i in clock.intervals[first.get(clock.name, 0) :]
                if i.kind != "mark"
            ]
            if kept or clock is not self._host:
                rows[clock.name] = tuple(kept)
            end = max([end, *(origin + i.stop for i in kept)])
        return Timeline(rows, end - origin)


class Record:
    """What happened inside `with gpus.record() as log:`."""

    def __init__(self, gpus: VirtualGPUs, began: float, transfers: int) -> None:
        self._gpus, self._began, self._sent = gpus, began, transfers
        self._first: dict[str, int] = {}
        self._kept: tuple[list[Transfer], Timeline] | None = None

    def _read(self) -> tuple[list[Transfer], Timeline]:
        if self._kept is not None:
            return self._kept
        with self._gpus._lock:
            timeline = self._gpus._timeline(self._began, self._first)
            return self._gpus.transfers[self._sent :], timeline

    def _close(self) -> None:
        self._kept = self._read()
        for clock in self._gpus._clocks():
            clock.intervals.append(Interval(clock.name, clock.free, clock.free, "mark"))

    @property
    def transfers(self) -> list[Transfer]:
        """As `gpus.transfers`."""
        return self._read()[0]

    def timeline(self) -> Timeline:
        """As `gpus.timeline()`, with the start of the record as 0."""
        return self._read()[1]
