"""A mesh of ranks: several kinds of parallelism at once, each in groups of its own.

    mesh = Mesh(dp=2, tp=4)
    mesh.group("tp")         the ranks that share a model with this one
    mesh.coordinate("dp")    in which replica this rank is

The ranks are laid out as the numbers of an array are in memory, as in PyTorch's
`init_device_mesh((2, 4), mesh_dim_names=("dp", "tp"))`: neighbours of the *last* axis
have ranks that follow each other. That axis lies inside a node, and belongs to who
sends the most.

      tp  0  1  2  3
    dp 0  0  1  2  3      the groups of tp are rows: 0 1 2 3 and 4 5 6 7
    dp 1  4  5  6  7      the groups of dp are columns: 0 4, 1 5, 2 6 and 3 7

Source: torch/distributed/device_mesh.py.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class Mesh:
    """All ranks of the job as an array with named axes. Every rank makes it.

    Args:
        axes: the size of each, in order, from the outermost to the innermost.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.

    Cost: one `new_group` for each row, column, ... of the array.
    """

    def __init__(self, **axes: int) -> None:
        size = dist.get_world_size()
        if not axes or min(axes.values()) < 1 or prod(axes.values()) != size:
            product = " × ".join(f"{n} ({name})" for name, n in axes.items())
            raise ValueError(
                f"The mesh is {product or 'empty'}: expected sizes from 1 on whose "
                f"product is the number of ranks, {size}."
            )
        self.axes = axes
        self.ranks = torch.arange(size).view(*axes.values())
        self._groups: dict[str, ProcessGroup] = {}
        for axis, name in enumerate(axes):
            # All rows along this axis. Every rank makes every group, in this order,
            # also those that it is not in.
            for row in self.ranks.movedim(axis, -1).reshape(-1, axes[name]).tolist():
                group = dist.new_group(row)
                if dist.get_rank() in row:
                    self._groups[name] = group

    def group(self, axis: str) -> ProcessGroup:
        """The ranks that differ from this one along that axis only."""
        return self._groups[self._known(axis)]

    def coordinate(self, axis: str) -> int:
        """This rank's place among them, from 0."""
        place = (self.ranks == dist.get_rank()).nonzero()[0]
        return int(place[list(self.axes).index(self._known(axis))])

    def _known(self, axis: str) -> str:
        if axis not in self.axes:
            raise ValueError(f"There is no axis {axis!r}: there are {list(self.axes)}.")
        return axis
