"""The mistakes of learners, and where each can be made: the table of the fault matrix.

``test_fault_matrix.py`` causes every one of them for real, and compares what is shown
with the texts here.

One code for several places runs as a cell on four ranks, in the function of a check on
two ranks, and in a script under ``launch``. It finds ``torch``, ``dist``, ``rank`` and
a tensor ``x`` there.
"""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ranks_support import GROUP_STAYS, KEPT

RANKS, CHECK, WORKER, GPUS = "cell on ranks", "check", "worker", "virtual GPUs"
PLACES = (RANKS, CHECK, WORKER, GPUS)

FRESH = "(Rank 1 was started afresh, without variables; the other ranks keep theirs."
DEADLOCK = "Deadlock: nothing moves, and nothing will."
OTHERS_WAITED = "Ranks 0, 2 and 3 were waiting in barrier"
NEEDS_ALL = "Every rank of a group must call its collectives."
PASSED = "✓ 99.total: passed"
CRASHED = "✗ 99.total: crashed"
STUCK = "✗ 99.total: stuck"
TOO_SLOW = "✗ 99.total: too slow"
WRONG = "✗ 99.total: wrong"
# On a machine that has GPUs the message is CUDA's own.
NO_GPU = () if torch.cuda.is_available() else ("The check runs on the CPU.",)

Cause = str | Callable[[Any], Any]


@dataclass(frozen=True)
class Seen:
    """What a mistake leads to in one place.

    Attributes:
        shows: parts of the text that the learner sees; none: nothing is shown.
        do: what causes it here, if it is not the code of the whole row: code, or a
            function of the place (see ``test_fault_matrix.py``).
        limit: seconds that the cell, the script, or one call of a check may take.
        within: seconds after which it must be over, on a busy machine too.
        fresh: the ranks that have lost their variables.
        restart: the ranks are not as they were; they are started anew afterwards.
    """

    shows: tuple[str, ...]
    do: Cause = ""
    limit: float = 30.0
    within: float = 60.0
    fresh: tuple[int, ...] = ()
    restart: bool = False


@dataclass(frozen=True)
class Row:
    """A field of the matrix: one mistake in one place.

    ``always``: it runs also without ``--all``, as each mistake does in one place.
    """

    place: str
    mistake: str
    cause: Cause
    seen: Seen
    always: bool

    def __str__(self) -> str:
        return f"{self.place}: {self.mistake}"


MATRIX: list[tuple[str, str, dict[str, Seen]]] = []


def mistake(what: str, code: str = "", /, **places: Seen) -> None:
    """Add a mistake; ``places`` are named by RANKS, CHECK, ... in small letters."""
    names = {name: globals()[name.upper()] for name in places}
    MATRIX.append((what, code, {names[n]: found for n, found in places.items()}))


def seen(*shows: str, **options: Any) -> Seen:
    """Short for :class:`Seen`."""
    return Seen(shows, **options)


def one(code: str, imports: str = "") -> str:
    """Only rank 1 makes the mistake; the others wait for it in a barrier."""
    begin = f"import {imports}\n" if imports else ""
    inside = textwrap.indent(code, "    ")
    return f"{begin}if rank == 1:\n{inside}\ndist.barrier()"


def still_right(code: str, imports: str = "") -> str:
    """After the mistake the code goes on, and what it computes is right."""
    begin = f"import {imports}\n" if imports else ""
    return f"{begin}{code}\ndist.all_reduce(x)"


def rows() -> list[Row]:
    """The fields of the matrix, place by place."""
    return [
        Row(
            place,
            what,
            places[place].do or code,
            places[place],
            always=place == list(places)[number % len(places)],
        )
        for place in PLACES
        for number, (what, code, places) in enumerate(MATRIX)
        if place in places
    ]


# ------------------------------------------------------------- the code ends too early
mistake(
    "an exception",
    one("1 / 0"),
    ranks=seen(
        "Rank 1 raised ZeroDivisionError: division by zero",
        "line 2 of the cell: 1 / 0",
        f"{OTHERS_WAITED}, line 3 of the cell",
        KEPT,
    ),
    check=seen(
        CRASHED,
        "With 2 ranks, rank 1 called total(tensor(",
        "It raised ZeroDivisionError: division by zero",
        "line 4 of the cell, in total: 1 / 0",
    ),
)
mistake(
    "an exception while the others compute",
    "if rank == 1: 1 / 0\nwhile True: pass",
    ranks=seen(
        "Rank 1 raised ZeroDivisionError",
        "Ranks 0, 2 and 3 were still running: line 2 of the cell",
        KEPT,
    ),
)
mistake(
    "an exception with a cause and a long text",
    "try:\n    {}['key']\n"
    "except KeyError as error:\n    raise ValueError('a\\n' * 9) from error",
    ranks=seen("raised ValueError: a\na\na\na\na\n...\n  line 4 of the cell"),
)
mistake(
    "a function that is only half written",
    one('raise NotImplementedError("Write your code here.")'),
    ranks=seen("Rank 1 raised NotImplementedError: Write your code here.", KEPT),
    check=seen("· 99.total: not attempted", "Write your code in the cell above"),
)
mistake(
    "sys.exit()",
    one("sys.exit(2)", "sys"),
    ranks=seen("Rank 1 raised SystemExit: 2", "A rank goes on living: leave it", KEPT),
    check=seen(CRASHED, "It called exit(). A function ends with `return`."),
    worker=seen("Ranks 0 and 1 ended with exit code 1: no", do="sys.exit('no data')"),
)
mistake(
    "os._exit()",
    one("print('last words', end='', flush=True)\nos._exit(3)", "os"),
    ranks=seen("[rank 1] last words", "Rank 1 died (exit code 3)", FRESH, fresh=(1,)),
    check=seen(CRASHED, "Its process ended (exit code 3)"),
    worker=seen("Ranks 0 and 1 ended with exit code 3", do="os._exit(3)"),
)
mistake(
    "kill -9, with a child that would live on",
    one(
        "if os.fork() == 0:\n    time.sleep(1000)\nos.kill(os.getpid(), 9)", "os, time"
    ),
    ranks=seen("Rank 1 died (SIGKILL)", "often because memory ran out", fresh=(1,)),
)
mistake(
    "all ranks end",
    "import os\nos._exit(rank + 1)",
    ranks=seen("(Ranks 0 to 3 were started afresh, without", fresh=(0, 1, 2, 3)),
)
mistake(
    "the worker of a DataLoader is killed",
    one(
        "class Deadly(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): os.kill(os.getpid(), 9)\n"
        "for x in torch.utils.data.DataLoader(Deadly(), num_workers=1): pass",
        "os",
    ),
    ranks=seen("Rank 1 raised RuntimeError: DataLoader worker", KEPT),
)
mistake(
    "a crash in C",
    one("ctypes.string_at(0)", "ctypes"),
    ranks=seen(
        "Rank 1 died (SIGSEGV)",
        "line 3 of the cell: ctypes.string_at(0)",
        "The process crashed in C or C++ code.",
        fresh=(1,),
    ),
    check=seen(CRASHED, "Its process ended (SIGSEGV), string_at, line 5 of the cell"),
)
mistake(
    "an exception whose text fails",
    "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
    ranks=seen("Ranks 0 to 3 raised Odd: (its message could not be read)", GROUP_STAYS),
)
mistake(
    "a value that cannot be shown",
    "class Odd:\n    def __repr__(self): raise ValueError('no picture')\n"
    "Odd() if rank == 1 else None",
    ranks=seen("Rank 1 raised ValueError: no picture", GROUP_STAYS),
)
mistake(
    "an interrupt of its own",
    "if rank == 1: raise KeyboardInterrupt('mine')",
    ranks=seen("Rank 1 raised KeyboardInterrupt: mine", GROUP_STAYS),
)
mistake(
    "a recursion without end",
    "def down(): down()\ndown()",
    ranks=seen("raised RecursionError: maximum recursion depth", "more calls ..."),
    check=seen(CRASHED, "It calls itself again and again. When should it stop?"),
)
mistake(
    "a SyntaxError",
    "if rank = 1: pass",
    ranks=seen("SyntaxError: invalid syntax. Maybe you meant", "if rank = 1: pass"),
    worker=seen("Ranks 0 and 1 raised SyntaxError: invalid", "if rank = 1: pass"),
)
mistake(
    "a SyntaxError in a file that is imported",
    "exec(compile('x = 1\\ny = = 2', 'my_code.py', 'exec'))",
    ranks=seen("raised SyntaxError", "line 2 of my_code.py", GROUP_STAYS),
)

# ----------------------------------------------------------------- the code never ends
mistake(
    "an endless loop",
    one("while True: pass"),
    ranks=seen(
        "Not finished after 1.5 s, the limit for this cell.",
        "Rank 1 was still running: line 2 of the cell: while True: pass",
        "Ranks 0, 2 and 3 were stuck in barrier, line 3",
        KEPT,
        limit=1.5,
    ),
    check=seen(
        TOO_SLOW,
        "Rank 1 was still at line 4 of the cell: while True: pass",
        "Is there a loop that never ends?",
        limit=1.5,
    ),
    worker=seen(
        "Ranks 0 and 1 were still running: line", do="while True: pass", limit=5
    ),
)
mistake(
    "output without end",
    one("while True: print('more', rank)"),
    ranks=seen(
        "Rank 1 was still running: line 2 of the cell: while True: print",
        KEPT,
        limit=1.0,
        within=10.0,
    ),
)
mistake(
    "a child process that never ends",
    one("subprocess.run(['sleep', '1000'])", "subprocess"),
    ranks=seen(
        "Rank 1 was still running: run, line 3 of the cell: subprocess.run",
        KEPT,
        limit=1.0,
        within=10.0,
    ),
)
mistake(
    "an endless computation in C",
    one("sum(range(10**15))"),
    ranks=seen("Not finished after 1.5 s", "sum(range(10**15))", limit=1.5, fresh=(1,)),
    check=seen(TOO_SLOW, "sum(range(10**15))", limit=1.5),
)
mistake(
    "a process that is stopped",
    one("os.kill(os.getpid(), signal.SIGSTOP)", "os, signal"),
    ranks=seen("Rank 1 was still running.", FRESH, limit=1.0, fresh=(1,)),
)
mistake(
    "an endless loop within a collective",
    "class Endless:\n"
    "    def __reduce__(self):\n"
    "        while rank == 1: pass\n"
    "        return int, ()\n"
    "dist.all_gather_object([None] * world_size, Endless())",
    ranks=seen(
        "Ranks 0, 2 and 3 were stuck in all_gather_object, line 5",
        "Rank 1 was still running: line 3 of the cell: while rank",
        limit=1.0,
    ),
)
FOR_EVER = "while True: time.sleep(0.01)"
mistake(
    "Ctrl-C while it computes",
    ranks=seen(
        "Interrupted by you.",
        "Ranks 0 to 3 were still running: line 3 of the cell",
        KEPT,
        do=lambda place: place.interrupted(FOR_EVER),
    ),
    check=seen("KeyboardInterrupt", do=lambda place: place.interrupted(FOR_EVER)),
)

# --------------------------------------------- the ranks do not do the same, or wait
mistake(
    "a collective that one rank leaves out",
    "if rank != 1:\n    dist.all_reduce(x)",
    ranks=seen(
        DEADLOCK,
        "Ranks 0, 2 and 3 were stuck in all_reduce, line 2 of the cell",
        "Rank 1 finished the cell.",
        NEEDS_ALL,
        KEPT,
    ),
    check=seen(
        STUCK,
        "Rank 0 waits in all_reduce, line 4 of the cell",
        "Rank 1 returned.",
        "All ranks must make the same calls",
    ),
    worker=seen("Rank 0 was stuck in all_reduce, line", "Rank 1 finished the script."),
)
mistake(
    "a backward pass that one rank leaves out",
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "ddp = DDP(torch.nn.Linear(4, 4))\n"
    "loss = ddp(torch.ones(4)).sum()\n"
    "if rank != 3: loss.backward()",
    ranks=seen(DEADLOCK, "Ranks 0, 1 and 2 were stuck in backward, line 4"),
)
mistake(
    "a collective in a thread that one rank leaves out",
    "import threading\n"
    "def step():\n"
    "    if rank != 1: dist.barrier()\n"
    "thread = threading.Thread(target=step)\n"
    "thread.start()\n"
    "thread.join()",
    ranks=seen(DEADLOCK, "Ranks 0, 2 and 3 were stuck in barrier, line 3 of the cell"),
)
mistake(
    "an error is caught that has freed a rank",
    "try:\n    dist.recv(torch.ones(1), rank ^ 1)\nexcept RuntimeError:\n    pass",
    ranks=seen(DEADLOCK, "Ranks 0 to 3 were stuck in recv, line 2 of the cell", KEPT),
)
mistake(
    "a group that only one rank makes",
    "if rank == 1: dist.new_group([0, 1])",
    ranks=seen(
        "Rank 1 was stuck in new_group, line 1 of the cell",
        "Every rank must make every group, with the same ranks and in the same order",
        fresh=(1,),
    ),
)
mistake(
    "a model of a group that is closed",
    ranks=seen(
        "A cell that leaves ranks out of step closes the process group. DDP models",
        do=lambda place: place.cells(
            "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
            "if rank == 1: a_slip_of_the_pen\ndist.barrier()",
            "model(torch.ones(1, 2)).sum().backward()",
        ),
    ),
)
mistake(
    "an asynchronous collective that one rank leaves out",
    "if rank != 1:\n    work = dist.all_reduce(x, async_op=True)",
    ranks=seen("all_reduce(float32[3], SUM) on line 2, but rank 1 did not.", KEPT),
    check=seen(STUCK, "Rank 0 called all_reduce(float32[2], SUM), but rank 1 did not."),
)
mistake(
    "different collectives",
    "if rank == 1:\n    dist.barrier()\nelse:\n    dist.all_reduce(x)",
    ranks=seen("raised CollectiveMismatch", "barrier()", "Every rank of a group", KEPT),
    check=seen(CRASHED, "It raised CollectiveMismatch: rank", "barrier()"),
)
mistake(
    "tensors of different sizes",
    "dist.all_reduce(torch.ones(2 + rank))",
    ranks=seen("raised CollectiveMismatch", "float32[2]", "same sizes", KEPT),
)
mistake(
    "a recv for which nobody sends",
    "if rank == 1:\n    dist.recv(x, 0)",
    ranks=seen(
        DEADLOCK,
        "Rank 1 was stuck in recv, line 2 of the cell: dist.recv(x, 0)",
        "A recv needs its send",
    ),
    check=seen(STUCK, "Rank 1 waits in recv, line 4 of the cell", "Rank 0 returned."),
)
mistake(
    "a request that nobody waits for",
    "if rank == 1:\n    dist.irecv(torch.empty_like(x), 0)\n"
    "dist.barrier()\nif rank == 0:\n    dist.send(x, 1)\ndist.all_reduce(x)",
    ranks=seen(
        "RequestWarning: Rank 1 never waited for irecv, line 2 of the cell: ",
        "Keep the request that such a call returns, and call its wait().",
    ),
    check=seen(
        WRONG,
        "The result is right, but by luck: not every request was waited for.",
        "Rank 1 never waited for irecv, line 4 of the cell",
    ),
    worker=seen("RequestWarning: Rank 1 never waited for irecv, line"),
)
mistake(
    "an asynchronous collective that nobody waits for",
    "dist.all_reduce(x, async_op=True); dist.barrier()",
    ranks=seen(
        "RequestWarning: Ranks 0 to 3 never waited for all_reduce, line 1 of the cell",
        "call its wait(): until that has returned, nobody knows what is in the tensor.",
    ),
    check=seen(WRONG, "Ranks 0 and 1 never waited for all_reduce, line 3"),  # by luck
)
mistake(
    "all receive before they send",
    "dist.recv(x, rank ^ 1)\ndist.send(x, rank ^ 1)",
    ranks=seen(DEADLOCK, "Ranks 0 to 3 were stuck in recv", "A recv needs its send"),
    check=seen(STUCK, "Rank 0 waits in recv, line 3", "Rank 1 waits in recv, line 3"),
)
mistake(
    "a neighbour that there is not",
    "dist.send(x, rank + 1)",
    ranks=seen(
        "Rank 3 raised ValueError: send: there is no rank 4 among 4,",
        "(rank + 1) % world_size",
        "Ranks 0, 1 and 2 were waiting in send",
    ),
)
mistake(
    "a message from itself",
    "dist.irecv(x, rank).wait()",
    ranks=seen("raised ValueError: irecv: rank 0 is this rank itself", GROUP_STAYS),
)
mistake(
    "the process group is joined twice",
    "dist.init_process_group('gloo')",
    ranks=seen("trying to initialize the default process group twice!", GROUP_STAYS),
    check=seen(CRASHED, "The process group is ready when your function is called"),
)
mistake(
    "the process group is left",
    "dist.all_reduce(x)\ndist.destroy_process_group()",
    ranks=seen(),
    check=seen(PASSED),
)
mistake(
    "only one rank joins a process group",
    "dist.destroy_process_group()\nif rank == 0:\n    dist.init_process_group('gloo')",
    ranks=seen(
        "Rank 0 was stuck in init_process_group, line 3 of the cell",
        "A process group is ready when all ranks have called init_process_group,",
    ),
)
mistake(
    "only some ranks run the cell",
    ranks=seen(
        DEADLOCK,
        "Ranks 1, 2 and 3 were left out of this cell.",
        do=lambda place: place.ranks.run_cell("dist.barrier()", only=[0]),
    ),
)

# ---------------------------------------------------------------- memory and devices
mistake(
    "more memory for a tensor than there is",
    one("torch.empty(1 << 48)"),
    check=seen(CRASHED, "can't allocate memory: you tried to allocate 112589990684"),
)
mistake(
    "a GPU that there is not",
    one("x.to('cuda:99')"),
    check=seen(CRASHED, "x.to('cuda:99')", *NO_GPU),
)
TWO_DEVICES = "torch.ones(2, device='cuda:0') + torch.ones(2, device='cuda:1')"
mistake(
    "tensors on two devices",
    TWO_DEVICES,
    gpus=seen("RuntimeError: Expected all tensors", "cuda:0 and cuda:1!"),
    check=seen(
        "✗ 03.scatter: crashed",
        "found at least two devices, cuda:0 and cuda:1!",
        do=lambda place: place.check_on_gpus(TWO_DEVICES),
    ),
)
mistake(
    "a virtual GPU that there is not",
    "torch.ones(2).to('cuda:7')",
    gpus=seen("CUDA error: invalid device ordinal", "(cuda:7 was asked for; there are"),
)
mistake(
    "more memory than a virtual GPU has",
    "big = torch.empty(1 << 28, device='cuda:1')\n"
    "more = [torch.empty(1 << 40, device='cuda:1')]",
    gpus=seen(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 1 "
        "has a total capacity of 2.00 GiB of which 1024.00 MiB is free."
    ),
)
mistake(
    "virtual GPUs are switched on twice",
    "virtual_gpus(3, force=True).on()",
    gpus=seen("2 virtual GPU(s) are on already", "Leave its `with` block"),
)
mistake(
    "a module fails in a thread of DataParallel",
    "class Bad(torch.nn.Linear):\n"
    "    def forward(self, x):\n"
    "        if x.device.index == 1: raise ValueError('bad rows')\n"
    "        return super().forward(x)\n"
    "model = torch.nn.DataParallel(Bad(2, 2).cuda(), [0, 1])\n"
    "model(torch.ones(4, 2, device='cuda'))",
    gpus=seen("ValueError: Caught ValueError in replica 1 on device 1.", "bad rows"),
)
mistake(
    "Ctrl-C while virtual GPUs compute",
    gpus=seen(
        "KeyboardInterrupt",
        do=lambda place: place.interrupted(
            "x = torch.ones(50, 50, device='cuda:1')\nwhile True: x = (x @ x).tanh()"
        ),
    ),
)

# ---------------------------------------------------------------- output and input
mistake(
    "a flood of output",
    "for number in range(20_000): print('line', number)\ndist.all_reduce(x)",
    ranks=seen("[rank 3] line 999", "[rank 3] ... 18,900 lines left out ..."),
    check=seen(PASSED),
)
mistake(
    "a line without an end",
    "print('x' * 5_000_000)\ndist.all_reduce(x)",
    ranks=seen("xxx ... 4,990,000 characters left out ..."),
    check=seen(PASSED),
)
mistake(
    "input()",
    "name = input('Who are you? ')",
    ranks=seen("Ranks 0 to 3 raised EOFError: EOF when reading a line", GROUP_STAYS),
    check=seen(CRASHED, "EOFError", "Nobody can type anything while a check runs."),
)
mistake(
    "breakpoint()",
    "breakpoint()",
    ranks=seen("raised BdbQuit", GROUP_STAYS),
    check=seen(CRASHED, "There is a breakpoint in it. Nobody can type"),
)
mistake(
    "standard output is closed",
    still_right("os.close(1)", "os"),
    ranks=seen(restart=True),
    check=seen(PASSED),
    worker=seen("raised OSError: [Errno 9]", do="os.close(1)\nprint('x' * 9999)"),
)
mistake(
    "every open file is closed",
    one("os.closerange(0, 200)", "os"),
    ranks=seen("Rank 1 died (", FRESH, fresh=(1,)),
)
mistake(
    "no more files can be opened, so there is no new process group",
    ranks=seen(
        "The ranks could not form a new process group. All of them were started afresh",
        do=lambda place: place.cells(
            "import resource\n"
            "if rank == 1:\n"
            "    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
            "    1 / 0\n"
            "dist.barrier()",
            "x = 1",
        ),
        fresh=(0, 1, 2, 3),
    ),
)
mistake(
    "warnings are errors",
    "import warnings\nwarnings.simplefilter('error')\nwarnings.warn('an old name')",
    ranks=seen("raised UserWarning: an old name", GROUP_STAYS, restart=True),
)

# ------------------------------------------------ what is changed, or left behind
LEAVE_CHILDREN = (
    "subprocess.Popen('sleep 1000 & sleep 1001', shell=True, start_new_session=True)"
)
mistake(
    "child processes are left behind",
    still_right(LEAVE_CHILDREN, "subprocess"),
    ranks=seen(restart=True),
    check=seen(PASSED),
    worker=seen(do=f"import subprocess\n{LEAVE_CHILDREN}"),
)
LEAVE_A_THREAD = "threading.Thread(target=time.sleep, args=(1000,)).start()"
mistake(
    "a thread is left behind",
    still_right(LEAVE_A_THREAD, "threading, time"),
    ranks=seen(restart=True),
    check=seen(PASSED),
    worker=seen(
        "Ranks 0 and 1 were still running: a thread that the script has started.",
        do=f"import threading, time\n{LEAVE_A_THREAD}",
        limit=5,
    ),
)
mistake(
    "an exception in a thread",
    still_right(
        "t = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()", "threading"
    ),
    ranks=seen("Exception in thread", "ZeroDivisionError: division by zero"),
)
for what, code, imports in (
    (
        "another working folder, which is then removed",
        "folder = tempfile.mkdtemp()\nos.chdir(folder)\nos.rmdir(folder)",
        "os, tempfile",
    ),
    (
        "the folder for temporary files is deleted",
        "folder = os.environ['TMPDIR']\n"
        "assert os.path.basename(folder).startswith('ranks-')\n"
        "dist.barrier()\n"
        "shutil.rmtree(folder, ignore_errors=True)",
        "os, shutil",
    ),
    ("the environment is emptied", "os.environ.clear()", "os"),
):
    code = still_right(code, imports)
    mistake(what, code, ranks=seen(restart=True), check=seen(PASSED))
mistake(
    "functions of torch.distributed are overwritten",
    "dist.barrier = dist.broadcast = None\ndist.all_reduce(x)\ndist.barrier()",
    ranks=seen("raised TypeError: 'NoneType' object is not callable", restart=True),
)

# -------------------------------------------------- what is given, and what comes back
mistake(
    "a result where the function should be",
    ranks=seen(
        "TypeError: run() needs a function, but got int: write ranks.run(step, x), "
        "not ranks.run(step(x))",
        do=lambda place: place.ranks.run(5),
    ),
    check=seen(
        WRONG,
        "This task wants the function itself",
        do=lambda place: place.check(place.torch.ones(2)),
    ),
)
mistake(
    "an argument that cannot be copied",
    ranks=seen(
        "TypeError: argument 1 (a lock) can't be sent to the ranks",
        "Build it on the ranks instead",
        do=lambda place: place.ranks.run(len, threading.Lock()),
    ),
    check=seen(
        CRASHED,
        "It uses `lock` (lock), which can't be copied",
        do=lambda place: place.check(
            place.function("with lock: pass", lock=threading.Lock())
        ),
    ),
)
mistake(
    "a result that cannot be copied",
    "import threading\nreturn threading.Lock()",
    ranks=seen(
        "is a lock, which can't be sent to the notebook",
        "Return tensors, numbers, text, lists or dictionaries.",
        do=lambda place: place.ranks.run(threading.Lock),
    ),
    check=seen(WRONG, "That is an object of type lock; a tensor was expected."),
)
mistake(
    "the wrong number of arguments",
    check=seen(
        CRASHED,
        "missing 1 required positional argument: 'y'",
        "it must take the arguments of the stub",
        do=lambda place: place.check(lambda x, y: x),
    ),
)
mistake(
    "nothing is returned",
    "print(x)\nreturn None",
    check=seen(WRONG, "It printed something and returned None: use `return`"),
)
mistake(
    "the argument is changed",
    "dist.all_reduce(given)\nreturn given",
    check=seen(WRONG, "the argument is not what it was", "take a `clone()` first"),
)
mistake(
    "async def",
    check=seen(
        WRONG,
        "Write `def`, not `async def`.",
        do=lambda place: place.check(place.asynchronous),
    ),
)
mistake(
    "a task that there is not",
    check=seen(
        "ValueError: There is no task '00.avrage'. Did you mean '00.average'?",
        do=lambda place: place.checks.check("00.avrage", len),
    ),
)
mistake(
    "an option whose value makes no sense",
    worker=seen(
        "argument --epochs", do=lambda place: place.launch("train_ddp", epochs="many")
    ),
)
mistake(
    "two cells at once",
    ranks=seen(
        "RanksError: these ranks are busy with another cell",
        do=lambda place: place.at_once("import time; time.sleep(0.5)"),
    ),
)
mistake(
    "a process is killed from outside, between two cells",
    ranks=seen(
        "Rank 1 died (SIGKILL).", FRESH, do=lambda place: place.killed(), fresh=(1,)
    ),
)
mistake(
    "a port that is taken",
    worker=seen(
        "Rank 0 raised DistNetworkError",
        "EADDRINUSE",
        do="import socket\n"
        "other = socket.create_server(('127.0.0.1', 0))\n"
        "dist.TCPStore('127.0.0.1', other.getsockname()[1], 1, True)",
    ),
)
