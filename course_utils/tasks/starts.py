"""For a task that starts processes: who ran, where, and at the same time as whom.

Task(..., where="here", observe=observe_start, cases=((1,), (2,)))
"""

import contextlib
import multiprocessing.context
import multiprocessing.reduction
import os
import pickle
import tempfile
import time
import warnings
from pathlib import Path

import torch.multiprocessing as mp

CAN_FORK = "fork" in mp.get_all_start_methods()
MEETING = 3.0 if CAN_FORK else 20.0  # seconds that workers wait for each other
LATE = 0.05  # seconds that a worker takes; one of them takes n more of these


class NotingWorker:
    """A worker that leaves a file. It first waits for the other workers.

    In the file are its arguments, the process that it ran in, and whether it saw all
    the others. It is empty until the worker has come to its end.
    """

    def __init__(self, folder: str, n: int):
        self.folder, self.n = folder, n

    def __call__(self, *given):
        if len(given) != 2:
            raise TypeError(
                f"worker(process, n) takes 2 arguments, but it got {len(given)}: "
                f"{', '.join(map(repr, given))}"
            )
        with contextlib.suppress(OSError):  # nobody has waited: the folder is gone
            handle, _ = tempfile.mkstemp(dir=self.folder)
            end = time.monotonic() + MEETING
            while not (met := len(os.listdir(self.folder)) >= self.n):
                if time.monotonic() > end:
                    break
                time.sleep(0.002)
            # The last to end is one in the middle: nobody may wait for the first alone,
            # or for the last.
            time.sleep(LATE * (1 + self.n * (given[0] == self.n // 2)))
            with open(handle, "wb") as file:
                pickle.dump(("{!r} {!r}".format(*given), os.getpid(), met), file)


@contextlib.contextmanager
def forks_for_spawns():
    """Fork where the learner's code asks for spawn, if there is a fork: seconds less.

    All ways to start processes take their context from one table.
    """
    if not CAN_FORK:
        yield
        return

    class Process(multiprocessing.context.ForkProcess):
        @staticmethod
        def _Popen(process):
            refuse_what_has_no_name(process)
            return multiprocessing.context.ForkProcess._Popen(process)

    context = multiprocessing.context.ForkContext()
    context.Process = Process
    contexts = multiprocessing.context._concrete_contexts
    originals = dict(contexts)
    contexts.update(spawn=context, forkserver=context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        try:
            yield
        finally:
            contexts.update(originals)


def refuse_what_has_no_name(process):
    """Raise as spawn does where it cannot send a function by its name."""
    for part in (process._target, *process._args):
        try:
            if callable(part):
                multiprocessing.reduction.ForkingPickler.dumps(part)
        except pickle.PicklingError as error:
            # What the learner has in a file has come to this rank as a copy of it.
            if "not the same object" not in str(error):
                raise


# --------------------------------------------------------------------- what is observed

OWN_PROCESSES = "they ran in processes of their own"
EACH_ANOTHER = "each ran in another process"
ENDED = "workers that have come to their end"
GIVEN = "what the workers were given"
TOGETHER = "they ran at the same time"


def observe_start(answer, n):
    """Read what the workers have noted when it returns."""
    # Workers that nobody waits for may still write into it.
    place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with place as folder, forks_for_spawns():
        try:
            answer(NotingWorker(folder, n), n)
        except mp.ProcessRaisedException as error:
            # Its first lines are a traceback; what it is about is in the last one.
            last = str(error).strip().splitlines()[-1]
            text = f"process {error.error_index} ended with {last}"
            short = mp.ProcessRaisedException(text, error.error_index, error.error_pid)
            raise short.with_traceback(error.__traceback__) from None
        files = [path.read_bytes() for path in Path(folder).iterdir()]
    notes = [pickle.loads(note) for note in files if note]
    pids = [pid for _, pid, _ in notes]
    return {
        OWN_PROCESSES: os.getpid() not in pids,
        EACH_ANOTHER: len(set(pids)) == len(pids),
        ENDED: len(notes),
        GIVEN: sorted(given for given, _, _ in notes),
        TOGETHER: all(met for *_, met in notes),
    }
