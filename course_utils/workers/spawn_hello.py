"""What `torch.multiprocessing.spawn` needs: a function in a file.

    python course_utils/workers/spawn_hello.py --nproc 3

`spawn` starts fresh Python processes. What each of them gets of the function is its
name: the module, and the name in the module. The new process imports the module, so
the function must be in a file that it can import, and a cell of a notebook is not.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch.multiprocessing as mp


def hello(rank: int, world_size: int, answers: Any) -> None:
    """Put a line into a queue. Runs in a process of its own, as process `rank`.

    Args:
        rank: the number of this process, from 0. `spawn` gives it, before `args`.
        world_size: how many processes there are. They are not told otherwise.
        answers: a queue. What the function returns would be lost.
    """
    answers.put(f"I am process {rank} of {world_size}.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the processes, wait for their end, print what they said."""
    parser = argparse.ArgumentParser(description="Say hello from several processes.")
    parser.add_argument("--nproc", type=int, default=2, help="how many processes")
    nproc = parser.parse_args(arguments).nproc
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(hello, args=(nproc, answers), nprocs=nproc)
    for line in sorted(answers.get() for _ in range(nproc)):
        print(line)


# A new process imports this file. Without the next line it would spawn, too.
if __name__ == "__main__":
    main()
