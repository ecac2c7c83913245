"""The processes in which a check runs an answer."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator

from course_utils.notebook import on_rank
from course_utils.ranks import Ranks
from course_utils.ranks.processes import ZygoteProcess, start_method
from course_utils.tasks.task import Task

_zygote: ZygoteProcess | None = None
kept: dict[tuple[int, bool], Ranks] = {}


@contextlib.contextmanager
def fresh_ranks(world_size: int, task: Task) -> Iterator[Ranks]:
    """Ranks on which no learner's code has left anything behind.

    Where a rank is a fork (Linux) new ones take a tenth of a second, given a zygote
    that stays. Elsewhere a rank costs an ``import torch``: there they are kept, as
    long as nothing fails on them.
    """
    if start_method() == "fork":
        _prepare_zygote(task)
    init = task.where == "ranks"
    ranks = kept.pop((world_size, init), None)
    ranks = ranks or Ranks(
        world_size, backend="gloo", output="grouped", init=init, quiet=True
    )
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise
    if start_method() == "fork":
        ranks.close()
    else:
        kept[world_size, init] = ranks


def _prepare_zygote(task: Task) -> None:
    """One user more, for the life of this process, so that it does not end.

    What all ranks need is done there once, and not in each fork.
    """
    global _zygote
    if _zygote is None or not _zygote.usable():
        _zygote = ZygoteProcess.acquire()
    ours = (on_rank.__name__, task.observe.__module__)
    for name in (*(m for m in ours if m.startswith("course_utils.")), *task.imports):
        _zygote.import_first(name)
    _zygote.call_first(on_rank.courses_own)
    for names in (on_rank.forbidden_names(task), on_rank.courses_own()):
        _zygote.call_first(on_rank.places_of, names)


@atexit.register
def close_all() -> None:
    """End them, and the helper that forks them."""
    for ranks in kept.values():
        ranks.close()
    if _zygote is not None and _zygote.usable():
        _zygote.release()
