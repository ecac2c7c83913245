"""Checkpoints for any number of ranks, which a crash in the middle of a save spares.

    checkpoints = Checkpoints(Path("run"), settings)
    if checkpoints.open(resume=True):    # the last step, or 0
        checkpoints.load(state)          # fills the tensors of `state`
    checkpoints.save(40, state)          # each rank writes its own part
    checkpoints.wait()                   # for a save in the background

The folder:

    settings.json            whose checkpoints these are
    step_000020/             complete; the last two are kept
    step_000040/
    step_000060.partial/     being written, or cut off by a crash: never read

torch.distributed.checkpoint (DCP) writes a file for each rank and, when all of them
are on the disk, `.metadata`: which part of which tensor is where. So a rank that loads
finds its part, whatever the parts were when they were saved. After that the folder gets
its name. A rename happens or does not: what has the name is complete.

All ranks must see the folder: with several machines it is on a disk that they share.
DCP's files are pickles, which can run code: load only those that you trust.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from course_utils.workers.group import RANK, stop

KEPT = 2
SETTINGS = "settings.json"
PARTIAL = ".partial"


def add_checkpoint_options(options: argparse.ArgumentParser) -> None:
    """What `open_checkpoints` has to know."""
    add = options.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="save here with each line")
    add("--resume", action="store_true", help="go on from there")
    add("--async-save", action="store_true", help="write while training goes on")


def open_checkpoints(
    args: argparse.Namespace, names: Iterable[str]
) -> tuple["Checkpoints | None", int]:
    """The checkpoints that the options ask for, if they do, and their last step, or 0.

    `names` are the options in which a run must be like the one that it goes on from.
    """
    if not args.checkpoint:
        for name in ("resume", "async_save"):
            if vars(args)[name]:
                stop(f"--{name.replace('_', '-')} needs --checkpoint DIR")
        return None, 0
    settings = {name: vars(args)[name] for name in names}
    checkpoints = Checkpoints(args.checkpoint, settings, args.async_save)
    last, message = checkpoints.open(args.resume), None
    if args.resume and not last:
        message = f"--resume: there is no checkpoint in {args.checkpoint} yet, so it "
        message += "begins anew"
    elif last >= args.steps:
        message = f"step {last} is done: nothing is left of --steps {args.steps}"
    if RANK == 0 and message:  # what is printed otherwise are JSON lines
        print(message, file=sys.stderr)
    return checkpoints, last


class Checkpoints:
    """The checkpoints of a training run, in one folder. Every rank makes every call.

    Args:
        folder: where they are, or will be.
        settings: what a run must have in common with the one that it goes on from.
        in_background: whether `save` returns when the state is copied, and a thread
            writes the copy while training goes on.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], in_background: bool = False
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.in_background = in_background
        self.last = 0
        # gloo: what goes round are Python objects, not tensors. A group of its own:
        # a save in the background talks at the same time as training does, and in one
        # group each would take the other's messages for its own.
        self.group = dist.new_group(backend="gloo")
        self._saving = None

    def open(self, resume: bool) -> int:
        """Look at the folder, or make it. Returns the last complete step, or 0.

        Ends the run if the folder is not to be used: it is not ours, the settings are
        others, or it has checkpoints and `resume` does not say to go on from them.
        """
        last, problem = 0, None
        if RANK == 0:
            try:
                last = _open(self.folder, self.settings, resume)
            except (OSError, ValueError) as error:
                problem = str(error)
        message = [last, problem]
        dist.broadcast_object_list(message, src=0, group=self.group)
        self.last, problem = message
        if problem:
            stop(problem)
        return self.last

    def load(self, state: dict[str, Any]) -> None:
        """Replace the values in `state` by those of the last checkpoint.

        `state` is what `save` would be given now: tensors of the right shapes, whole or
        sharded as this run has them.
        """
        path = _path(self.folder, self.last)
        try:
            dcp.load(state, checkpoint_id=path, process_group=self.group)
        except dcp.CheckpointException as error:
            stop(
                f"{path} is damaged ({_cause(error)}). Remove it, to go on from the "
                "checkpoint before it."
            )

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save the state after this step. A whole tensor is written by one rank only.

        In the background: only the copy is made here, and one save at a time is under
        way, so the next call waits for it.
        """
        self.wait()
        options = {
            "storage_writer": _Writer(self.folder, step),
            "process_group": self.group,
        }
        if self.in_background:
            self._saving = dcp.async_save(state, **options)
        else:
            self._finish(lambda: dcp.save(state, **options))

    def wait(self) -> None:
        """Wait until the save in the background is complete, if there is one."""
        if self._saving:
            self._finish(self._saving.result)
            self._saving = None

    def _finish(self, saving: Any) -> None:
        try:
            saving()
        except dcp.CheckpointException as error:
            # DCP raises it on all ranks, whichever it was that failed.
            stop(f"{self.folder} could not be written to ({_cause(error)})")


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What a checkpoint holds of these, under names that do not depend on the ranks.

    DTensors stay as they are: this rank's part, and where in the whole it belongs. So
    no rank ever needs room for all of it.
    """
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def go_on_from(state: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    """Give both what `state_of` has returned, on however many ranks."""
    weights, moments = state["model"], state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


class _Writer(dcp.FileSystemWriter):
    """Writes beside the name of the checkpoint, and gives it the name at the end."""

    def __init__(self, folder: Path, step: int) -> None:
        self.complete = _path(folder, step)
        super().__init__(self.complete.with_suffix(PARTIAL))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """DCP calls it on rank 0, when the files of all ranks are on the disk."""
        partial = self.complete.with_suffix(PARTIAL)
        files = {each.storage_data.relative_path for some in results for each in some}
        unseen = [name for name in sorted(files) if not (partial / name).exists()]
        if unseen:
            raise RuntimeError(
                f"rank 0 does not see {', '.join(unseen)} of other ranks. Save to a "
                "disk that all machines share"
            )
        super().finish(metadata, results)
        _sync_folder(partial)
        os.rename(partial, self.complete)
        _sync_folder(self.complete.parent)
        for step in _steps(self.complete.parent)[:-KEPT]:
            old = _path(self.complete.parent, step)
            # If this is cut off, what is left no longer has the name.
            os.rename(old, old.with_suffix(PARTIAL))
            shutil.rmtree(old.with_suffix(PARTIAL))


def _open(folder: Path, settings: dict[str, Any], resume: bool) -> int:
    """The last complete step; OSError or ValueError if the folder is not to be used."""
    if folder.is_file():
        raise ValueError(
            f"{folder} is a file. --checkpoint takes a folder: name another one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SETTINGS
    if not file.exists():
        others = [entry.name for entry in folder.iterdir()]
        if others:
            raise ValueError(
                f"{folder} is no folder of checkpoints: it has {min(others)} but no "
                f"{SETTINGS}. Name another one, which need not exist"
            )
        file.write_text(json.dumps(settings))
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}). Name another folder") from None
    if found != settings:
        raise ValueError(
            f"{folder} has checkpoints of {found}, but this run is {settings}. "
            "Use the same settings, or name another folder"
        )
    steps = _steps(folder)
    if steps and not resume:
        raise ValueError(
            f"{folder} has a checkpoint of step {steps[-1]}: add --resume to go on "
            "from it, or name another folder"
        )
    for left in folder.glob("step_*" + PARTIAL):  # of a run that was cut off
        shutil.rmtree(left)
    return steps[-1] if steps else 0


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def _steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints, in order."""
    names = (re.fullmatch(r"step_(\d{6,})", entry.name) for entry in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _sync_folder(folder: Path) -> None:
    """Have the names in the folder on the disk, as fsync does for a file's content."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _cause(error: dcp.CheckpointException) -> str:
    """The first of the ranks' errors, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]
