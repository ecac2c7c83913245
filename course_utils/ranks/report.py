"""Failures of ranks, as objects for programs and as text for people."""

from __future__ import annotations

import functools
import linecache
import os
import re
import signal
import site
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
WORKERS = os.path.join(PACKAGE, "workers", "")
LIBRARIES = tuple(
    {
        os.path.realpath(folder) + os.sep
        for folder in (
            *site.getsitepackages(),
            site.getusersitepackages(),
            *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")),
        )
    }
)
Frame = tuple[str, int, str]  # file, line, function

RANKS_PART = f"course_utils{os.sep}ranks{os.sep}"
STORE_PART = f"{RANKS_PART}loopback.py"  # a TCPStore is being made
# Every collective that a learner calls goes through these files, and waits there.
COMPARED_PARTS = (f"{RANKS_PART}agreement.py", f"{RANKS_PART}requests.py")
# They stand between a call and what it does, whoever makes it: names in the second one
# are never the learner's words.
RANKS, VIRTUAL_GPUS = (
    os.path.join(PACKAGE, room, "") for room in ("ranks", "virtual_gpus")
)
# So do these files of torch.
WIRING = tuple(
    os.path.join("torch", *parts)
    for parts in (
        ("distributed", "distributed_c10d.py"),
        ("distributed", "c10d_logger.py"),
        ("overrides.py",),
    )
)
# Calls in which a rank waits for other ranks. A rank whose innermost Python frame
# is in one of these and that uses no CPU waits for a peer. (DTensor waits inside of an
# operator.)
WAITING_PARTS = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    f"{os.sep}torch{os.sep}autograd{os.sep}graph.py",
    f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}distributed.py",
    STORE_PART,
)
OPERATOR_PARTS = (
    f"{os.sep}torch{os.sep}_ops.py",
    f"{os.sep}torch{os.sep}_library{os.sep}",
)
INNER_NAMES = (
    "wrapper",
    "checked",
    "compare_and_call",
    "making",
    "ending",
    "wait_begins",
    "method",
    "make",
    "<lambda>",
    "decorate_context",
)
# Names of functions, in the words of a learner who has called them.
CALLED = {
    "_wrapped_call_impl": "forward",
}


class RanksError(RuntimeError):
    """A cell or function failed on some rank.

    Attributes:
        cause: ``"raised"``, ``"died"``, ``"timeout"``, ``"interrupt"``,
            ``"mismatch"``, or ``"usage"`` (nothing ran).
        failures: rank -> :class:`RankFailure`, for the ranks that did not finish.
        root: the failure that caused the others, or None.
        finished: the ranks that finished normally.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: str = "usage",
        failures: dict[int, RankFailure] | None = None,
        root: RankFailure | None = None,
        finished: list[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.failures = failures or {}
        self.root = root
        self.finished = finished or []

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the way it took through Ranks."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class RankFailure:
    """What happened on one rank.

    Attributes:
        rank: which one.
        kind: ``"raised"``, ``"died"``, ``"stuck"``, or ``"peer"`` (it failed only
            because another rank did).
        error: name of the exception class, ``"exit code 3"``, or ``"SIGKILL"``.
        message: the exception's text; why it is unknown how a rank died.
        traceback: the learner's own lines, as text.
        where: for example ``"all_reduce, line 3 of the cell"``; empty if unknown.
        seconds: from the start of the cell to the failure.
    """

    rank: int
    kind: str
    error: str
    message: str = ""
    traceback: str = ""
    where: str = ""
    seconds: float = field(default=0.0, compare=False)


class RequestWarning(UserWarning):
    """A call returned a request, such as ``irecv``'s, and nobody waited for it."""


@dataclass(frozen=True)
class Unwaited:
    """Requests that nobody waited for: those of one line.

    Attributes:
        rank: whose they are.
        frames: the calls that made them, innermost first, up to the learner's line.
        is_p2p: whether they are those of a send or a recv, not of a collective.
        kept: whether somebody still holds them, and may wait for them later.
        earlier: whether an earlier cell made them.
        count: how many they are.
    """

    rank: int
    frames: tuple[Frame, ...]
    is_p2p: bool
    kept: bool = False
    earlier: bool = False
    count: int = 1

    @property
    def where(self) -> str:
        """For example ``"irecv, line 3 of the cell: dist.irecv(x, 0)"``."""
        return find_where(self.frames) or self.frames[0][2]


@functools.lru_cache(1024)  # asked of every frame of every message
def is_learners(file: str, function: str = "") -> bool:
    """Is this the learner's code (and not torch, Python, or this package)?

    "<string>" is what `python -c` was given. But dataclasses make code of that name,
    too: a method such as `__init__`, in a module that is nowhere.
    """
    if file == "<string>":
        return not function.startswith(("__", "<module>"))
    if file.startswith("<"):
        return file.startswith(("<ranks cell", "<ipython"))
    path = real(file)
    of_others = path.startswith((*LIBRARIES, PACKAGE, sys.prefix + os.sep))
    return path.startswith(WORKERS) or not of_others  # a script was launched


@functools.lru_cache(1024)
def real(file: str) -> str:
    """The path without links: asked of every frame, and slow to find out."""
    return os.path.realpath(file)


def is_of_library(frames: list[Frame]) -> bool:
    """Was a collective called by torch, say, and not by the learner or the course?

    Args:
        frames: of the call, innermost first.
    """
    for file, _, function in frames:
        between = real(file).startswith((RANKS, VIRTUAL_GPUS))
        if not between and not file.endswith(WIRING):
            return not (real(file).startswith(PACKAGE) or is_learners(file, function))
    return False


def place(file: str, line: int) -> str:
    """``line 3 of the cell``, or ``line 3 of my_code.py``."""
    if file.startswith("<") or "ipykernel_" in file:
        return f"line {line} of the cell"
    return f"line {line} of {os.path.basename(file)}"


def remember_source(name: str, source: str) -> None:
    """Let messages show the lines of a cell that runs on the ranks."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)


def learner_lines(frames: list[Frame]) -> str:
    """The learner's frames (outermost first) with their source, as text."""
    texts = []
    for file, line, function in frames:
        if not is_learners(file, function):
            continue
        where = place(file, line)
        if function != "<module>":
            where += f", in {function}"
        source = linecache.getline(file, line).strip()
        texts.append(f"{where}: {source}" if source else where)
    if len(texts) > 8:  # a deep recursion
        texts[4:-4] = [f"... {len(texts) - 8} more calls ..."]
    return "\n".join(texts)


# A frame in the text of a traceback; behind "|" where it is one of a group's.
FRAME_TEXT = re.compile(
    r'^( *\| )?  File "(.+)", line \d+, in (.+)\n'
    r"(?:(?(1)\1|)  (?:  |\[Previous line).*\n)*",
    re.MULTILINE,
)

# The head of a traceback, where no frame is left below it.
HEAD_ALONE = re.compile(
    r"^(?: *\| )?Traceback \(most recent call last\):\n(?!.*, in )", re.MULTILINE
)


def without_inner_frames(text: str) -> str:
    """A text without the frames of others than the learner, if it has a traceback.

    Such a text is also the message of an exception that comes from another thread or
    process, as those of ``DataParallel`` and of a ``DataLoader`` do.
    """
    return FRAME_TEXT.sub(
        lambda frame: frame[0] if is_learners(frame[2], frame[3]) else "", text
    )


def own_traceback(error: BaseException) -> str:
    """What Python prints of it, with the learner's frames alone."""
    text = without_inner_frames("".join(traceback.format_exception(error)))
    return HEAD_ALONE.sub("", text).rstrip()


def tell_of_thread(args: threading.ExceptHookArgs) -> None:
    """``threading.excepthook`` with the learner's frames alone."""
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread else "(unknown)"
        text = f"Exception in thread {name}:\n{own_traceback(args.exc_value)}"
        print(text, file=sys.stderr, flush=True)


def find_where(frames: list[Frame]) -> str:
    """In which call on which line a rank is; frames innermost first."""
    call = ""
    for file, line, function in frames:
        if is_learners(file, function):
            where = place(file, line)
            source = linecache.getline(file, line).strip()
            text = f"{call}, {where}" if call else where
            return f"{text}: {source}" if source else text
        if function == "wait_for_threads":  # of launch: the script is at its end
            return (
                "a thread that the script has started. Wait for its end, or start it "
                "with daemon=True"
            )
        if function in CALLED:
            call = CALLED[function]
        elif not (
            function in INNER_NAMES
            or function.startswith(("__", "<"))
            or real(file).startswith(VIRTUAL_GPUS)
        ):
            call = function
    return ""


def is_waiting(frames: list[Frame]) -> bool:
    """Is its innermost frame in a call that waits for other ranks?

    Not where the course has put something below the call that takes its time, such as
    a slow link.
    """
    innermost = real(frames[0][0]) if frames else ""
    if innermost.startswith(PACKAGE) and RANKS_PART not in innermost:
        return False
    for file, _, function in frames:
        if any(part in file for part in COMPARED_PARTS):
            return True
        if is_learners(file, function):
            break
    files = (file for file, *_ in frames if not any(p in file for p in OPERATOR_PARTS))
    innermost = next(files, "")
    return any(part in innermost for part in WAITING_PARTS)


def in_threads(main: list[Frame], others: Iterable[list[Frame]]) -> list[Frame]:
    """Where a process is, from the frames of its threads, innermost first.

    While the main thread waits for another one that is in a collective, that one's
    frames come first.
    """
    if main and main[0][0] == threading.__file__:
        for frames in others:
            if is_waiting(frames):
                return frames + main
    return main


def frames_of_dump(dump: str) -> list[Frame]:
    """The frames in faulthandler's text, innermost first; of all threads, as above."""
    pattern = re.compile(r'^\s+File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
    *others, main = (
        [(f, int(n), name) for f, n, name in pattern.findall(thread)]
        for thread in re.split(r"^(?:Current t|T)hread .*$", dump, flags=re.MULTILINE)
    )  # the main thread was the first to begin, and comes last
    return in_threads(main, others)


def exit_text(status: int | None) -> str:
    """``SIGKILL`` or ``exit code 3`` from a process's status."""
    if status is None:
        return "unknown exit status"
    if status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
    return f"exit code {status}"


DEATHS = {
    "SIGKILL": "It was killed from outside; on Linux often because memory ran out.",
    "SIGSEGV": "The process crashed in C or C++ code.",
    "SIGABRT": "C++ code ended the process; its last words are above.",
    "exit code 0": "Something called os._exit(): a rank must go on living.",
}
HELPER_ENDED = "The helper process that starts ranks was ended, and with it all ranks."
NOT_TOLD = "The connection closed; how the process ended was not known in time."


def known_cause(error: str) -> str:
    """The setting here that is known to make PyTorch die like this; mostly none."""
    debug = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
    if error == "SIGSEGV" and debug == "DETAIL":
        return (
            "TORCH_DISTRIBUTED_DEBUG is DETAIL: with gloo, PyTorch 2.14 then mostly "
            "crashes when it makes a DistributedDataParallel. Use INFO."
        )
    return ""


def rank_list(ranks: list[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``, ``ranks 0, 2 and 3``, ``ranks 0 to 5``."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def were(ranks: list[int]) -> str:
    """``rank 1 was``, ``ranks 0 and 2 were``."""
    return f"{rank_list(ranks)} {'was' if len(ranks) == 1 else 'were'}"


def sentences(lines: Iterable[str]) -> str:
    """These lines, each with a capital letter."""
    return "\n".join(line[:1].upper() + line[1:] for line in lines)


def indent(text: str, by: str = "    ") -> str:
    return "\n".join(by + line for line in text.splitlines())


def group_same(failures: list[RankFailure]) -> list[tuple[list[int], RankFailure]]:
    """Failures that read the same are told once, with all their ranks."""
    groups: dict[tuple, list[RankFailure]] = {}
    for failure in failures:
        same = (failure.kind, failure.error, failure.where, failure.traceback)
        if failure.kind != "peer":  # gloo's text differs in the port number
            same += (failure.message,)
        groups.setdefault(same, []).append(failure)
    return [([f.rank for f in group], group[0]) for group in groups.values()]


def choose_root(failures: dict[int, RankFailure]) -> RankFailure:
    """Died before raised before stuck before a peer's broken connection."""
    order = ("died", "raised", "stuck", "peer")
    return min(failures.values(), key=lambda f: (order.index(f.kind), *first(f)))


def first(failure: RankFailure) -> tuple[float, int]:
    """Sort key: what failed earlier. At the same time, within 0.1 s, the lower rank."""
    return round(failure.seconds, 1), failure.rank


def shortened(message: str) -> str:
    """A message of at most a few lines; gloo's come with its C++ file names."""
    message = re.sub(r"\[/\S*third_party/\S+:\d+\]\s*", "", message)
    lines = message.strip().splitlines() or [""]
    if len(lines) > 6:
        is_traceback = "Traceback (most recent call last):" in message
        lines = [*lines[:4], "...", lines[-1]] if is_traceback else [*lines[:5], "..."]
    return "\n".join(line[:300] for line in lines)


def describe_failures(
    failures: dict[int, RankFailure],
    finished: list[int],
    cause: str,
    waited: str,
    left_out: list[int],
    unwaited: Iterable[Unwaited] = (),
    renewed: bool = False,
    work: str = "cell",
) -> str:
    """The message of a :class:`RanksError`, without its last line.

    Args:
        failures: what happened, by rank.
        finished: the ranks that finished.
        cause: as in :class:`RanksError`.
        waited: how the driver came to see that nothing moves, in words.
        left_out: ranks that the cell was not sent to.
        unwaited: requests that nobody has waited for.
        renewed: whether there has been another process group before this one.
        work: what the ranks ran: a "cell", or a "script" of its own.
    """
    parts: list[str] = []
    by_kind = {
        kind: [f for f in failures.values() if f.kind == kind]
        for kind in ("died", "raised", "stuck", "peer")
    }
    for ranks, failure in group_same(by_kind["died"]):
        where = f" at {failure.where}" if failure.where else ""
        parts.append(f"{rank_list(ranks)} died ({failure.error}){where}.")
        why = failure.message or known_cause(failure.error)
        why = why or DEATHS.get(failure.error)
        if why:
            parts.append(indent(why, "  "))
    only_peers = len(by_kind["peer"]) == len(failures)
    raised = sorted(by_kind["peer" if only_peers else "raised"], key=first)
    mismatches = [f for f in raised if f.error == "CollectiveMismatch"]
    told = [f for f in raised if f not in mismatches[1:]]  # one tells it all
    for ranks, failure in group_same(told):
        message = shortened(failure.message)
        what = f"raised {failure.error}"
        ends_script = failure.error == "SystemExit" and work == "script"
        if ends_script:
            code = message if message.isdigit() else "1"
            what = f"ended with exit code {code}"
            message = message.removeprefix(code)
        parts.append(f"{rank_list(ranks)} {what}" + (f": {message}" if message else ""))
        if failure.traceback and not ends_script:
            parts.append(indent(failure.traceback, "  "))
        if failure.error == "SystemExit" and not ends_script:
            parts.append("  exit() ends a script. A rank goes on living: leave it out.")
    if mismatches[1:]:
        others = [f.rank for f in mismatches[1:]]
        parts.append(f"{rank_list(others)} noticed the same.")
    stuck = by_kind["stuck"]
    if stuck and cause == "interrupt":
        parts.append("interrupted by you.")
    elif stuck and not (by_kind["died"] or raised):
        parts.append(waited)
    # One that is kept may be waited for later. But it also takes the next message.
    parts += request_lines(u for u in unwaited if not u.kept or stuck and u.earlier)
    for ranks, failure in group_same(stuck):
        if not failure.where:
            parts.append(f"{were(ranks)} still running.")
        elif failure.error == "waiting":
            parts.append(f"{were(ranks)} stuck in {failure.where}")
        else:
            parts.append(f"{were(ranks)} still running: {failure.where}")
    peers = by_kind["peer"]
    for ranks, failure in group_same([] if only_peers else peers):
        waiting = f" in {failure.where}" if failure.where else ""
        parts.append(f"{were(ranks)} waiting{waiting}")
    if finished and (stuck or peers):
        parts.append(f"{rank_list(finished)} finished the {work}.")
    if left_out and (stuck or peers):
        parts.append(f"{were(left_out)} left out of this cell.")
    if any(f.where.startswith("init_process_group") for f in stuck):
        parts.append(
            "A process group is ready when all ranks have called init_process_group, "
            "with the same address and the same world_size."
        )
    elif any(f.where.startswith("new_group") for f in stuck):
        parts.append(
            "Every rank must make every group, with the same ranks and in the same "
            "order, even a group that it does not belong to."
        )
    elif any(f.error == "waiting" for f in stuck):
        parts.append(_needed([f.where for f in stuck if f.error == "waiting"]))
    if renewed and (only_peers or any(map(_is_of_no_group, raised))):
        parts.append(
            "A cell that leaves ranks out of step closes the process group. DDP models "
            "and groups that were made before it no longer work: make them again."
        )
    return sentences(parts)


def _needed(places: list[str]) -> str:
    """What ranks that wait in these calls need."""
    if all(place.startswith("send") for place in places):
        return "A send returns only when the other rank calls recv."
    if all(place.startswith("recv") for place in places):
        return "A recv needs its send, by the rank that it names."
    every = "Every rank of a group must call its collectives"
    if any(place.startswith(("send", "recv")) for place in places):
        return f"{every}; a recv needs its send."
    return f"{every}."


TENSOR_OPEN = "nobody knows what is in the tensor."
OTHERS_LATE = "other ranks may not be there yet."


def request_lines(unwaited: Iterable[Unwaited]) -> list[str]:
    """Which calls have made requests that nobody waited for, and what to do."""
    places: dict[tuple, list[Unwaited]] = {}
    for one in unwaited:
        places.setdefault((one.kept, one.earlier, one.where), []).append(one)
    lines, advice = [], ""
    for (kept, earlier, where), same in places.items():
        ranks = sorted({one.rank for one in same})
        never = "has not yet" if kept and len(ranks) == 1 else "have not yet"
        line = f"{rank_list(ranks)} {never if kept else 'never'} waited for {where}"
        if (count := sum(one.count for one in same)) > len(ranks):
            line += f" ({count} requests)"
        if earlier:
            line += ", in an earlier cell"
        if kept:
            line += ". It takes the next message that fits: call its wait() first."
        elif not advice or same[0].is_p2p:
            advice = "Keep the request that such a call returns, and call its wait()"
            if same[0].is_p2p:
                advice += (
                    ". Else the message can be lost, and what comes after it goes "
                    "wrong or hangs."
                )
            else:
                advice += ": until that has returned, "
                at_a_barrier = where.startswith("barrier")
                advice += OTHERS_LATE if at_a_barrier else TENSOR_OPEN
        lines.append(line)
    return [*lines, *filter(None, [advice])]


def warn_of_requests(unwaited: list[Unwaited], what_now: str) -> None:
    """Warn of these, at the learner's line; nothing went wrong that anybody noticed."""
    text = sentences(filter(None, [*request_lines(unwaited), what_now]))
    file, line, _ = unwaited[0].frames[-1]
    warnings.warn_explicit(text, RequestWarning, file, line)


def _is_of_no_group(failure: RankFailure) -> bool:
    """Does PyTorch not know the process group any more?"""
    return "ProcessGroup object at" in failure.message


def what_now(restarted: list[int], n: int, init: bool, group_stays: bool) -> str:
    """The last line: what survived, and what the next cell will find.

    Args:
        restarted: ranks that had to be replaced by fresh processes.
        n: how many ranks there are.
        init: whether the next cell gets a new process group by itself.
        group_stays: whether the process group goes on.
    """
    if group_stays:
        kept = "All ranks keep their variables"
        return f"({kept} and their process group.)" if init else f"({kept}.)"
    if restarted:
        others = "" if len(restarted) == n else "; the other ranks keep theirs"
        fresh = f"{were(restarted)} started afresh, without variables"
        kept = f"{fresh.capitalize()}{others}."
    else:
        kept = "All ranks keep their variables."
    group = (
        " The next cell gets a new process group."
        if init
        else " The process group is closed: call init_process_group again."
    )
    return f"({kept}{group})"
