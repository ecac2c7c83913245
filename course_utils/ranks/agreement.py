"""Do all ranks call the same collective? Ask before the data is mixed up.

gloo pairs up whatever arrives: an ``all_reduce`` on one rank and an ``all_gather``
on another can hang, end in wrong numbers, or abort the process. So every call of a
collective is first written on a *board*, a small piece of memory that all ranks of
one machine share: "my 3rd collective on this group is broadcast(float32[4],
src=0)". Then the rank reads what the others wrote for their 3rd collective. The one
that comes later and differs raises :class:`CollectiveMismatch`; nobody waits, and
nothing is sent. ``send`` and ``recv`` are compared in the same way, the k-th from
rank a to rank b with the k-th that b receives from a.

The cost is a few microseconds a call. What C++ calls by itself (the gradient
buckets of DDP) is not seen here.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import inspect
import operator
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_utils.ranks import requests
from course_utils.ranks.requests import WAIT

RECORD = struct.Struct("=QQ112s")  # key of the call, its fingerprint, its text

# What must agree, besides the name. "numel" is the number of elements: gloo does
# not mind different shapes, it does mind different sizes.
COLLECTIVES = {
    "all_reduce": ("tensor", "numel", "op"),
    "broadcast": ("tensor", "numel", "src"),
    "reduce": ("tensor", "numel", "dst", "op"),
    "all_gather": ("tensor", "numel"),
    "all_gather_into_tensor": ("input_tensor", "numel"),
    "all_gather_single": ("input_tensor", "numel"),
    "reduce_scatter": ("output", "op"),
    "reduce_scatter_tensor": ("input", "numel", "op"),
    "reduce_scatter_single": ("input", "numel", "op"),
    "gather": ("tensor", "numel", "dst"),
    "scatter": ("tensor", "numel", "src"),
    "all_to_all": (None,),
    "all_to_all_single": ("input",),
    "barrier": (None,),
    "monitored_barrier": (None,),
    "all_gather_object": (None,),
    "gather_object": (None, "dst"),
    "broadcast_object_list": (None, "src"),
    "scatter_object_list": (None, "src"),
}
# gloo takes their memory as one piece, without a look at the strides.
IN_PLACE = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "scatter": "tensor",
    "all_to_all_single": "output",
}
# name -> its argument that holds a piece of each rank, and the one that is a piece.
PIECES = {
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter_single": ("input", "output"),
}
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
# Each function and its parameters: name -> default. The zygote reads them once, for all
# ranks. Not every torch has every name.
ORIGINALS = {
    name: (
        function,
        {p.name: p.default for p in inspect.signature(function).parameters.values()},
    )
    for name in (*COLLECTIVES, *POINT_TO_POINT)
    if (function := getattr(distributed_c10d, name, None)) is not None
}

DESTROY = distributed_c10d.destroy_process_group
WAIT_STEP = datetime.timedelta(seconds=0.25)
REST_SECONDS = 0.002  # after the key of a record the rest of it is there, too


class CollectiveMismatch(RuntimeError):
    """Two ranks of a group called different collectives at the same place."""


class Agreement:
    """The calls of one rank, written on the board and compared with the others'.

    Args:
        board: writable memory that the ranks share. Each rank has an equal part of it,
            room for its last calls; a peer is never further ahead than a few.
        rank: the rank of this process.
        world_size: how many ranks share the board.
    """

    def __init__(self, board: Any, rank: int, world_size: int) -> None:
        self.board, self.rank, self.world_size = board, rank, world_size
        self.slots = len(board) // world_size // RECORD.size
        self.lock = threading.Lock()
        self.inside = threading.local()  # object collectives call other collectives
        self.requests = requests.Requests()
        self.begun = 0  # calls and waits: a rank that begins another one goes on
        self.start_generation(0)
        self.start_cell()

    def start_cell(self) -> None:
        """Forget the calls of the last cell."""
        self.requests.start_cell()
        # What an error inside `with _coalescing_manager()` leaves there puts off every
        # later call on the same group, for ever and without a word.
        distributed_c10d._world.pg_coalesce_state.clear()
        self.calls: dict[tuple[int, ...], list[str]] = {}
        self.messages: Counter[tuple] = Counter()
        self.refused = 0
        self.broken = False
        self.groups_before = distributed_c10d._world.group_count

    def facts(self) -> dict[str, Any]:
        """What this rank has done with its groups since the cell began.

        Returns:
            "calls": for each group, as the tuple of its ranks, the texts of its calls;
            "messages": how many sends or recvs for each (source, target, ...);
            "refused": how many calls raised an error before anything was sent;
            "groups": how many groups were made;
            "certain": whether these numbers tell all.
        """
        return {
            "calls": dict(self.calls),
            "messages": dict(self.messages),
            "refused": self.refused,
            "groups": distributed_c10d._world.group_count - self.groups_before,
            "certain": not self.broken
            and not self.any_source
            and self._numbered_as_started(),
        }

    def start_generation(self, generation: int) -> None:
        """All ranks start anew together: what is on the board no longer counts."""
        self.requests.forget()
        self.epoch = (generation, -1)
        self.forget_group()

    def forget_group(self) -> None:
        """Start counting anew: the process groups of before are gone."""
        generation, groups_before = self.epoch
        self.epoch = (generation, groups_before + 1)
        self.counts: Counter[Any] = Counter()
        self.any_source = False

    def begin(self, wait_gone: Callable[[], bool]) -> None:
        """From now on it is this agreement that compares the calls of this process.

        Args:
            wait_gone: asked now and then during a wait; True ends the wait with an
                error, because nobody is left to wait for.
        """
        global _of_this_rank
        self.wait_gone = wait_gone
        self.requests.watch()
        _of_this_rank = self

    def compare_and_call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compare a call of the learner's with those of the other ranks, and make it.

        Raises:
            CollectiveMismatch: another rank has called something else in this place.
            ValueError: the tensor is one that gloo would read or fill wrongly, or the
                pieces do not fit into the whole.
        """
        self.begun += 1
        original, parameters = ORIGINALS[name]
        if getattr(self.inside, "call", False) or not self._numbered_as_started():
            return original(*args, **kwargs)
        arguments = bound(parameters, args, kwargs)
        if arguments is None:
            return original(*args, **kwargs)  # its own error is the better one
        self.inside.call = True
        try:
            if name in IN_PLACE:
                refuse_gaps(name, arguments[IN_PLACE[name]])
            if name in PIECES:
                refuse_sizes(name, arguments)
            if name in POINT_TO_POINT:
                self._announce_p2p(name, arguments)
            else:
                self._announce_collective(name, arguments)
            return original(*args, **kwargs)
        except BaseException as error:
            # PyTorch looks at the arguments before it sends.
            self.refused += 1
            self.broken |= not isinstance(error, (TypeError, ValueError))
            raise
        finally:
            self.inside.call = False

    def wait(self, work: dist.Work, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Wait for a call to end, as long as there is somebody to wait for."""
        self.begun += 1
        request = self.requests.wait_begins(work)
        # A timeout in the wait of a send or recv breaks gloo's connection for good.
        is_p2p = request is not None and request.is_p2p
        # A frame of our own here tells a blocked wait from a busy line.
        if args or kwargs or is_p2p or not uses_gloo():
            try:
                return WAIT(work, *args, **kwargs)
            except BaseException:
                self.broken = True
                raise
        while True:
            try:
                return WAIT(work, WAIT_STEP)
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    self.broken = True
                    raise
                if self.wait_gone():
                    raise RuntimeError("Connection closed by peer") from None

    def _numbered_as_started(self) -> bool:
        """A learner may number ranks anew; the board would then compare strangers."""
        return (
            dist.is_initialized()
            and dist.get_rank() == self.rank
            and dist.get_world_size() == self.world_size
        )

    def _announce_collective(self, name: str, arguments: dict[str, Any]) -> None:
        found = group_of(arguments)
        if found is None:
            return
        group_name, members = found
        fingerprint, text = describe(name, arguments, members)
        with self.lock:
            place = ("collective", group_name)
            self.counts[place] += 1
            number = self.counts[place]
            self.calls.setdefault(members, []).append(f"{text}{calling_line()}")
        key = (*self.epoch, *place, number)
        for other, theirs in self.exchange(key, fingerprint, text, members):
            raise CollectiveMismatch(
                f"rank {self.rank} calls {text} where rank {other} called {theirs}. "
                "Every rank of a group must call the same collectives, in the same "
                "order, with the same sizes."
            )

    def _announce_p2p(self, name: str, arguments: dict[str, Any]) -> None:
        sending = name.endswith("send")
        found = group_of(arguments)
        if found is None:
            return
        group_name, members = found
        peer = global_rank("dst" if sending else "src", arguments, members)
        if isinstance(peer, int) and not 0 <= peer < self.world_size:
            raise ValueError(  # gloo would wait for it, and could not be freed
                f"{name}: there is no rank {peer} among {self.world_size}, which are 0 "
                f"to {self.world_size - 1}. In a ring the neighbours are (rank + 1) % "
                "world_size and (rank - 1) % world_size."
            )
        is_self = isinstance(peer, int) and peer == self.rank
        if is_self and name != "send" and uses_gloo():
            raise ValueError(  # as dist.send does; gloo's own words tell nobody
                f"{name}: rank {peer} is this rank itself, and gloo has no connection "
                "from a rank to itself. Keep the tensor, or copy it."
            )
        tensor = arguments["tensor"]
        if not sending and peer is None:
            self.any_source = True  # any sender may come: nothing to pair up with
        if self.any_source or not isinstance(peer, int):
            return
        if not isinstance(tensor, torch.Tensor):
            return
        source, target = (self.rank, peer) if sending else (peer, self.rank)
        with self.lock:
            pair = ("p2p", source, target, plain(arguments.get("tag", 0)), group_name)
            self.counts[pair] += 1
            self.messages[pair[1:]] += 1
            number = self.counts[pair]
        size = f"{tensor.dtype} {tensor.numel()}"
        text = f"{name}({short(tensor)}, {'dst' if sending else 'src'}={peer})"
        for other, theirs in self.exchange(
            (*self.epoch, *pair, number), size, text, (peer,)
        ):
            raise CollectiveMismatch(
                f"rank {self.rank} calls {text} where rank {other} called {theirs}. "
                "What one rank sends, the other must receive: the same number of "
                "elements of the same dtype."
            )

    def exchange(
        self, key: tuple, fingerprint: str, text: str, members: tuple[int, ...]
    ) -> list[tuple[int, str]]:
        """Write my call; return the members that wrote a different one."""
        key_hash, print_hash = digest(repr(key)), digest(fingerprint)
        slot = key_hash % self.slots
        record = RECORD.pack(key_hash, print_hash, text.encode()[:112])
        start = (self.rank * self.slots + slot) * RECORD.size
        # The old key goes first, the new one comes last: who still finds a key a moment
        # later has found what belongs to it.
        self.board[start : start + 8] = bytes(8)
        self.board[start + 8 : start + RECORD.size] = record[8:]
        self.board[start : start + 8] = record[:8]
        different = []
        for other in members:
            if other == self.rank:
                continue
            place = (other * self.slots + slot) * RECORD.size
            found = RECORD.unpack_from(self.board, place)
            if found[0] == key_hash and found[1] != print_hash:
                # It may be written just now, or replaced by another call: look again.
                time.sleep(REST_SECONDS)
                found = RECORD.unpack_from(self.board, place)
            if found[0] == key_hash and found[1] != print_hash:
                their_text = found[2].rstrip(b"\0").decode(errors="replace")
                different.append((other, their_text))
        return different


_of_this_rank: Agreement | None = None


def stand_in_front() -> None:
    """Put the comparison in front of the functions of ``torch.distributed``.

    Only the first call in a process does anything. The zygote makes it, for all ranks
    to come: to look through the modules writes into thousands of memory pages, which
    each fork would have to copy. Until `Agreement.begin` a call is torch's own.
    """
    if dist.destroy_process_group is not DESTROY:
        return
    requests.stand_in_front()
    # Also where a module has them by name, as those of DTensor have. What is imported
    # later takes them from here.
    modules = [m for n, m in sys.modules.items() if n.startswith("torch.distributed")]
    for name, (original, _) in ORIGINALS.items():
        compared = _compared(name)
        for module in modules:
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, compared)

    @functools.wraps(WAIT)
    def wait(work, *args, **kwargs):  # its name is in what is said of a stuck rank
        if _of_this_rank is None:
            return WAIT(work, *args, **kwargs)
        return _of_this_rank.wait(work, args, kwargs)

    @functools.wraps(DESTROY)
    def destroy_process_group(group=None):
        DESTROY(group)
        if _of_this_rank is not None and not dist.is_initialized():
            _of_this_rank.forget_group()

    dist.Work.wait = wait
    dist.destroy_process_group = destroy_process_group
    distributed_c10d.destroy_process_group = destroy_process_group


def _compared(name: str) -> Callable[..., Any]:
    """The function of this name, with the comparison in front of it."""
    original = ORIGINALS[name][0]

    @functools.wraps(original)
    def checked(*args, **kwargs):
        if _of_this_rank is None:
            return original(*args, **kwargs)
        return _of_this_rank.compare_and_call(name, args, kwargs)

    return checked


def bound(
    parameters: dict[str, Any], args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call by name, defaults included; None if they do not fit.

    `inspect.Signature.bind` does the same, in four times the time. A ring makes
    hundreds of calls for one tensor.
    """
    by_place = dict(zip(parameters, args, strict=False))
    arguments = {**parameters, **by_place, **kwargs}
    fit = (
        len(by_place) == len(args)
        and len(arguments) == len(parameters)
        and by_place.keys().isdisjoint(kwargs)
        and not any(value is inspect.Parameter.empty for value in arguments.values())
    )
    return arguments if fit else None


def uses_gloo() -> bool:
    """Is the default group a gloo group? (A wait with a timeout differs in nccl.)"""
    return dist.is_initialized() and dist.get_backend() == "gloo"


def refuse_gaps(name: str, tensor: Any) -> None:
    """Raise ValueError for a view such as ``x[:, 0]``: NCCL does, gloo is silent."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return
    if uses_gloo():
        raise ValueError(
            f"{name}: this {short(tensor)} is a view with gaps, such as x[:, 0], or an "
            "expanded one. gloo would take what lies behind its first number in memory "
            "instead of its numbers. Use part = view.contiguous(), which is a copy, "
            "and afterwards view.copy_(part)."
        )


def refuse_sizes(name: str, arguments: dict[str, Any]) -> None:
    """Raise ValueError unless the whole is world size times a piece."""
    whole_name, piece_name = PIECES[name]
    whole, piece = arguments[whole_name], arguments[piece_name]
    try:
        n = dist.get_world_size(arguments["group"])  # -1 where this rank is no member
        fits = n < 0 or whole.numel() == n * piece.numel()
    except (LookupError, ValueError, AttributeError, TypeError):
        return  # no group, or no tensor: torch explains it better
    if not fits:
        kind, other = whole_name.split("_")[0], piece_name.split("_")[0]
        raise ValueError(
            f"{name}: the {kind} is {short(whole)} and the {other} {short(piece)}. The "
            f"{kind} holds one piece for each of the {n} ranks: it must have {n} x "
            f"{piece.numel()} = {n * piece.numel()} numbers, not {whole.numel()}."
        )


def group_of(arguments: dict[str, Any]) -> tuple[str, tuple[int, ...]] | None:
    """The name and the ranks of a call's group; None where the calls can't be compared.

    torch numbers the ranks of the groups that it has made and not destroyed. One that a
    library makes by hand, as rpc does, or one of before, may be as good.
    """
    group = arguments.get("group")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    try:
        group = dist.group.WORLD if group is None else group
        return group.group_name, tuple(dist.get_process_group_ranks(group))
    except Exception:  # torch explains it better
        return None


def global_rank(field: str, arguments: dict[str, Any], members: tuple[int, ...]) -> Any:
    """The rank that ``src`` or ``dst`` means, or its ``group_`` form; None for none."""
    rank, local = arguments.get(field), plain(arguments.get(f"group_{field}"))
    if rank is not None or local is None:
        return plain(rank)
    in_group = isinstance(local, int) and 0 <= local < len(members)
    return members[local] if in_group else local  # torch explains it better


def plain(value: Any) -> Any:
    """A number of whatever kind, such as NumPy's, as Python's own."""
    try:
        return operator.index(value)
    except TypeError:
        return value


def describe(
    name: str, arguments: dict[str, Any], members: tuple[int, ...]
) -> tuple[str, str]:
    """The fingerprint of a call (what must agree) and its text for a person.

    What is in them must be equal on two ranks where it means the same: never the text
    of an object that torch does not write out.
    """
    tensor_name, *fields = COLLECTIVES[name]
    tensor = arguments.get(tensor_name) if tensor_name else None
    must_agree, shown = [name], []
    if isinstance(tensor, torch.Tensor):
        must_agree.append(str(tensor.dtype))
        shown.append(short(tensor))
        if "numel" in fields:
            must_agree.append(str(tensor.numel()))
    if "op" in fields:
        op_name = name_of_op(arguments.get("op"))
        must_agree.append(op_name)
        shown.append(op_name)
    for field in ("src", "dst"):
        if field in fields:
            rank = global_rank(field, arguments, members)
            value = rank if isinstance(rank, int) else 0
            must_agree.append(f"{field}={value}")
            shown.append(f"{field}={value}")
    return " ".join(must_agree), f"{name}({', '.join(shown)})"


def name_of_op(op: Any) -> str:
    """``SUM`` for ``ReduceOp.SUM``, and for ``ReduceOp(ReduceOp.SUM)``."""
    name = getattr(getattr(op, "op", op), "name", None)
    return name if isinstance(name, str) else type(op).__name__


def short(tensor: torch.Tensor) -> str:
    """``float32[2, 3]`` for a tensor of that dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def digest(text: str) -> int:
    """64 bits that are the same for the same text in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def calling_line() -> str:
    """`` on line 3`` when the call stands in a cell, else nothing."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<ranks cell"):
            return f" on line {frame.f_lineno}"
        frame = frame.f_back
    return ""
