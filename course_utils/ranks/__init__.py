"""Run a notebook cell, or a function, on N real processes.

    from course_utils import Ranks

    ranks = Ranks(4)                        # four processes, one process group
    losses = ranks.run(train_step, batch)   # one result a rank

    %%ranks                                 # in a cell of its own, first line
    x = torch.ones(3) * rank
    dist.all_reduce(x)
    x

How it works
------------
::

    notebook kernel ──── Unix sockets ────┐
      driver.py, round.py                 │ requests and replies, output
         │ starts                         │
      zygote.py (imports torch once) ──fork──► rank.py × N  ◄── gloo or nccl ──►

* ``zygote.py`` is one helper process that has imported torch and does nothing
  but fork. A rank is a fork of it, so four ranks start in a fraction of a second
  and share most of their memory. The kernel itself is never forked: a fork of a
  process that has run OpenMP work can deadlock.
* ``rank.py`` is the life of one rank: it keeps its variables from cell to cell,
  runs what it is sent and answers. A second thread in it listens all the time,
  so that a rank which is blocked in a collective can still say where it is and
  can be freed.
* ``driver.py`` lives in the kernel: class :class:`Ranks`, what a learner calls. It has
  ``round.py`` send a cell to all ranks and see to it that every cell ends. When one
  rank fails that frees the others by closing the connections between the ranks;
  variables survive. When nothing moves any more it says which rank is stuck, in which
  call, on which line.
* ``agreement.py`` compares the collectives that the ranks call. A rank that calls
  another collective than its peers gets an error before it can mix up the data.
* ``requests.py`` notes the requests that asynchronous calls return. One that nobody
  waits for is told of, by its line, before a later call hangs because of it.
* ``report.py`` turns failures into text, ``output.py`` turns output into lines,
  ``magic.py`` is the ``%%ranks`` magic. ``processes.py`` starts and ends a process,
  ``team.py`` those of one ``Ranks``, and ``copies.py`` is what goes there and back.
* On macOS and Windows fork is not safe once torch is loaded: there each rank is a
  fresh Python that imports torch for itself, and ``guard.py`` is a small process
  that ends the ranks if the kernel is killed.

Nothing here knows about the course, and the kernel needs no torch for it.
"""

from course_utils.ranks.driver import Ranks
from course_utils.ranks.report import RankFailure, RanksError, RequestWarning

__all__ = ["RankFailure", "Ranks", "RanksError", "RequestWarning"]
