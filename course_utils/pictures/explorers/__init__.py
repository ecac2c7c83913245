"""Small things to play with in a notebook: move a slider, and see what follows.

    >>> from course_utils import explorers
    >>> explorer = explorers.RankExplorer(nodes=2, gpus_per_node=4, rank=5)
    >>> print(explorer.summary)
    2 nodes with 4 GPUs each: world size 8. Rank 5 is local rank 1 on node 1.

An explorer is a widget (an `ipywidgets` one, made with anywidget). Its sliders and
lists are the browser's own: Tab reaches them, arrow keys move them. Everything shown is
computed in Python. A notebook that was saved keeps the first state as text.
"""

from course_utils.pictures.explorers.collectives import CollectiveExplorer
from course_utils.pictures.explorers.memory import MemoryExplorer
from course_utils.pictures.explorers.ranks import RankExplorer
from course_utils.pictures.explorers.ring import RingStepper
from course_utils.pictures.explorers.what_if import WhatIfExplorer

__all__ = [
    "CollectiveExplorer",
    "MemoryExplorer",
    "RankExplorer",
    "RingStepper",
    "WhatIfExplorer",
]
