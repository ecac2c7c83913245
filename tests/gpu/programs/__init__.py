"""Small programs for one GPU, each of which says what it has seen.

They run on a virtual GPU and, where there is one, on a real one; `test_twins.py`
compares. A program returns a dictionary: what it looked at, and what was there. Tensors
count with device, dtype, shape and values, errors with class and first line.

A program makes its numbers on the CPU, because a GPU draws others, and keeps nothing.
Its sizes are such that memory is exact: CUDA's caching allocator does not split off
what is left of a block if that is 1 MiB or less (`memory_of_odd_sizes` shows it).
"""

from programs import (  # noqa: F401
    devices,
    errors,
    memory,
    mixed_precision,
    numbers,
    random_numbers,
    several,
    streams,
    waiting,
)
from programs.basis import PROGRAMS, error_of

__all__ = ["PROGRAMS", "error_of"]
