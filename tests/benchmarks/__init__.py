"""How fast is it, over what a learner knows already? One JSON line a row.

    python -m tests.benchmarks              # which benchmarks there are
    python -m tests.benchmarks ranks        # measure, and print the rows

A benchmark is a module of this folder with a generator ``rows(quick)`` that yields
:class:`~tests.benchmarks._harness.Row` objects; the first line of its docstring is
what the list shows. With ``--quick`` it measures as little as it can, to show that it
works. A new file is a new benchmark. Names that begin with ``_`` are helpers.

A row compares what was measured with its *goal*. Most rows are a ratio: the thing
over a *peer* that does the same job or the least that can be done. Runs of both take
turns, so that a machine that gets slower slows both. ``aa`` is the peer over itself
in the same run: it tells how much of a ratio is noise.
"""
