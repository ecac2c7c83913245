"""What an answer, or any code, keeps alive of the numbers that it was given."""

import gc
import time

import numpy as np
import torch


def alive():
    """The memory of all tensors of this process, each once; kept while this is kept.

    Only those of floating point: sizes, the ranks of a mesh and the state of a random
    generator are whole numbers, and may be kept.

    What was there before a case may go meanwhile (gloo lets go of a tensor late), and
    a new tensor may take its place. To count what is new, hold on to the old.
    """
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    numbers = [t for t in tensors if t.is_floating_point() and t.device.type != "meta"]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in numbers}


def new_bytes(before):
    """Bytes of the tensors that were not there `before`."""
    return sum(one.nbytes() for key, one in alive().items() if key not in before)


def settled(count, limit, seconds=2.0):
    """The count when it is no more than the limit, or after some time.

    gloo lets go of the tensors of a collective a little after its end.
    """
    end = time.monotonic() + seconds
    while (found := count()) > limit and time.monotonic() < end:
        time.sleep(0.01)
    return found


def listed_in(unit):
    """Bytes of the numbers that an object and its class keep, but not in tensors.

    Those of NumPy arrays, and of numbers in lists and the like, as float32. Whole
    numbers do not count, which may be sizes.
    """
    return _listed_bytes([getattr(unit, "__dict__", {}), dict(vars(type(unit)))])


def _listed_bytes(value):
    if isinstance(value, np.ndarray):  # not one that only looks at a tensor's memory
        return value.nbytes * value.flags.owndata * (value.dtype.kind == "f")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return sum(map(_listed_bytes, value))
    return 4 * isinstance(value, float)
