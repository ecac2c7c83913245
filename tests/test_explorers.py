"""The explorers: what they show is right, for every setting that they have."""

import contextlib
import doctest
import html.parser
import itertools
import shlex

import pytest
import traitlets
from torch.distributed.run import get_args_parser

from course_utils import costs, explorers
from course_utils.explorers import CollectiveExplorer, RankExplorer
from course_utils.ranks import Ranks

CLUSTERS = [*itertools.product(range(1, 9), range(1, 9))]


class Reader(html.parser.HTMLParser):
    """The rows of the table, and the texts of all <code>, in order."""

    def __init__(self, source):
        super().__init__()
        self.rows, self.codes, self.open = [], [], []
        self.feed(source)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "code":
            self.codes.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "code" in self.open:
            self.codes[-1] += data
        elif self.rows and {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


@pytest.mark.parametrize(("nodes", "gpus"), CLUSTERS)
def test_every_cluster(nodes, gpus):
    last = nodes * gpus - 1
    explorer = RankExplorer(nodes, gpus, rank=last)
    page = Reader(explorer.body)
    ranks = itertools.count()
    rows = [["", *(f"local rank {local}" for local in range(gpus))]]
    rows += [
        [f"node {node}", *(f"rank {next(ranks)}" for _ in range(gpus))]
        for node in range(nodes)
    ]
    rows[-1][-1] = f"▶ rank {last}"
    assert page.rows == rows
    told = explorer.environment()
    assert page.codes == [
        *(f"{name}={value}" for name, value in told.items()),
        *explorer.commands(),
    ]
    assert told == {
        "RANK": last,
        "LOCAL_RANK": gpus - 1,
        "WORLD_SIZE": nodes * gpus,
        "LOCAL_WORLD_SIZE": gpus,
        "GROUP_RANK": nodes - 1,
    }
    assert f"world size {nodes * gpus}." in explorer.summary
    for line in explorer.commands():
        assert line in explorer.text()


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (2, 4), (3, 8)])
def test_torchrun_understands_the_commands(nodes, gpus):
    for node, line in enumerate(RankExplorer(nodes, gpus).commands()):
        program, *words = shlex.split(line)
        args = get_args_parser().parse_args(words)
        assert program == "torchrun"
        assert (int(args.nnodes.split(":")[0]), args.nproc_per_node) == (
            nodes,
            str(gpus),
        )
        assert (args.node_rank, args.rdzv_backend) == (node, "static")
        assert args.training_script == "train.py"


def test_it_follows_its_sliders():
    explorer = RankExplorer(2, 4, 5)
    explorer.rank = 6
    assert "Rank 6 is local rank 2 on node 1." in explorer.summary
    explorer.gpus_per_node = 3
    assert explorer.rank == 5  # the last there is
    assert explorer.summary.startswith("2 nodes with 3 GPUs each: world size 6. Rank 5")
    explorer.nodes = 1
    assert explorer.rank == 2
    assert explorer.summary == (
        "1 node with 3 GPUs: world size 3. Rank 2 is local rank 2 on node 0."
    )
    assert "▶ rank 2" in explorer.body
    explorer.nodes = 8
    assert explorer.rank == 2


def test_what_a_page_sends_cannot_break_it():
    explorer = RankExplorer()
    explorer.set_state({"nodes": 99, "gpus_per_node": 0, "rank": -4})
    assert (explorer.nodes, explorer.gpus_per_node, explorer.rank) == (8, 1, 0)
    explorer.set_state({"rank": 1000})
    assert explorer.rank == 7


def test_its_sliders_end_where_the_ranks_end():
    explorer = RankExplorer(2, 4)
    explorer.gpus_per_node = 3
    ends = {one["name"]: (one["min"], one["max"]) for one in explorer.controls}
    assert ends == {"nodes": (1, 8), "gpus_per_node": (1, 8), "rank": (0, 5)}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 4, 0), "nodes is 0: expected a whole number from 1 to 8"),
        ((2, 9, 0), "gpus_per_node is 9"),
        ((2.0, 4, 0), "nodes is 2.0"),
        ((True, 4, 0), "nodes is True"),
        ((2, 4, 8), "rank is 8: expected a whole number from 0 to 7, because"),
        ((2, 4, -1), "rank is -1"),
    ],
)
def test_wrong_numbers_are_named(numbers, message):
    with pytest.raises(ValueError, match=message):
        RankExplorer(*numbers)


@pytest.mark.parametrize("explorer", [RankExplorer(2, 4, 5), CollectiveExplorer()])
def test_the_saved_form_is_text_with_the_same_content(explorer, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, raw: shown.append((data, raw))
    )
    explorer._ipython_display_()
    (text, raw), (view, raw_too) = shown
    assert raw and raw_too
    assert text["text/plain"] == explorer.text()
    assert explorer.body in text["text/html"]
    assert view["text/html"] == ""
    assert view[explorers._WIDGET]["model_id"] == explorer.model_id
    assert explorer.model_id not in text["text/html"] + text["text/plain"]


# ---------------------------------------------------------------- collectives

COLLECTIVES = (
    *("broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather"),
    *("reduce_scatter", "all_to_all", "barrier"),
)
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
WITH_ROOT = {"broadcast", "scatter", "gather", "reduce"}
WITH_OPERATION = {"reduce", "all_reduce", "reduce_scatter"}


def every_setting(world_size):
    """Each collective with each root and each op that mean something for it."""
    for collective in COLLECTIVES:
        roots = range(world_size) if collective in WITH_ROOT else [0]
        ops = OPERATIONS if collective in WITH_OPERATION else ["SUM"]
        for root, op in itertools.product(roots, ops):
            yield CollectiveExplorer(collective, world_size, op, root)


@pytest.fixture(scope="module")
def start():
    """A function that starts ranks. All end together: later ones start faster so."""
    with contextlib.ExitStack() as stack:
        yield lambda n: stack.enter_context(
            Ranks(n, output="grouped", quiet=True, timeout=30)
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_real_ranks_hold_what_it_shows(world_size, start):
    """The lines it shows are run as they are, from what it shows before."""

    def obey(every_before, every_lines, every_name):
        import torch
        import torch.distributed as dist

        def tensors(held):
            if held and isinstance(held[0], list):
                return [torch.tensor(part) for part in held]
            return None if held is None else torch.tensor(held)

        def lists(held):
            if isinstance(held, list):
                return [part.tolist() for part in held]
            return None if held is None else held.tolist()

        rank = dist.get_rank()
        results = []
        for before, lines, (takes, gives) in zip(
            every_before, every_lines, every_name, strict=True
        ):
            names = {"torch": torch, "dist": dist, "rank": rank}
            names[takes] = tensors(before[rank])
            exec("\n".join(lines), names)
            results.append(lists(names[gives]) if gives else None)
        return results

    shown = [*every_setting(world_size)]
    variables = [
        [head.partition(": ")[2] for head in explorer._heads()] for explorer in shown
    ]
    by_rank = start(world_size).run(
        obey, [e.before() for e in shown], [e.lines() for e in shown], variables
    )
    # 3 collectives with a root, 1 with both, 2 with an op, 3 with neither.
    assert len(shown) == 3 * world_size + 5 * world_size + 2 * 5 + 3
    for number, explorer in enumerate(shown):
        for rank, expected in enumerate(explorer.after()):
            if explorer.collective == "reduce" and rank != explorer.root:
                assert expected is None  # whatever is there: it is not defined
                continue
            assert by_rank[rank][number] == expected, (explorer, rank)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_collective(world_size):
    for explorer in every_setting(world_size):
        page = Reader(explorer.body)
        heads, *ranks = page.rows[: world_size + 1]
        rooted = explorer.collective in WITH_ROOT
        assert heads[1].startswith("before")
        assert heads[2].startswith("after")
        for rank, (name, before, after) in enumerate(ranks):
            here = rooted and rank == explorer.root
            assert name == f"rank {rank} (root)" if here else f"rank {rank}"
            assert before == explorers._shown(explorer.before()[rank])
            if after != "undefined":
                assert after == explorers._shown(explorer.after()[rank])
            else:
                assert (explorer.collective, here) == ("reduce", False)
        assert page.codes == explorer.lines()
        text = explorer.text()
        for cell in itertools.chain(*ranks, explorer.lines(), [explorer.summary]):
            assert cell in text
        enabled = {one["name"] for one in explorer.controls if not one.get("disabled")}
        assert ("root" in enabled) == rooted
        assert ("op" in enabled) == (explorer.collective in WITH_OPERATION)
        assert (f" {explorer.op} on " in explorer.summary) == ("op" in enabled)


def test_its_costs_are_those_of_the_functions_of_this_course():
    explorer = CollectiveExplorer("all_reduce", world_size=4)
    assert explorer.nbytes == 16  # 4 numbers of 4 bytes
    page = Reader(explorer.body)
    # Messages, steps, most sent, most received: as from_scratch/collectives.py says.
    assert page.rows[-2:] == [
        ["all_reduce_naive", "6", "6", "48", "48"],
        ["all_reduce", "24", "6", "24", "24"],
    ]
    explorer.collective = "broadcast"
    assert Reader(explorer.body).rows[-2:] == [
        ["broadcast", "3", "3", "24", "8"],
        ["broadcast_tree", "3", "2", "16", "8"],
    ]
    explorer.collective = "barrier"
    assert Reader(explorer.body).rows[-1] == ["barrier", "6", "6", "3", "3"]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_its_factors_are_those_of_nccl_tests(n):
    formulas = {"2(n−1)/n": 2 * (n - 1) / n, "(n−1)/n": (n - 1) / n, "1": 1.0}
    for collective in COLLECTIVES:
        formula = explorers._KINDS[collective].factor
        said = CollectiveExplorer(collective, n).body
        if not formula:
            assert "the documentation of nccl-tests has no factor for it." in said
            with pytest.raises(ValueError, match="no collective"):
                costs.bus_bandwidth_factor(collective, n)
            continue
        factor = costs.bus_bandwidth_factor(collective, n)
        assert factor == pytest.approx(formulas[formula])
        if formula == "1":
            assert "Bus bandwidth = size / time." in said
        else:
            words = f"Bus bandwidth = {formula} · size / time = {factor:.4g} · size"
            assert words in said


def test_the_collective_explorer_follows_its_settings():
    explorer = CollectiveExplorer(world_size=4, root=3)
    assert explorer.summary == (
        "all_reduce SUM on 4 ranks: every rank gets the sum of each element: "
        "[10, 14, 18, 22]."
    )
    explorer.collective = "reduce"
    explorer.op = "AVG"
    assert explorer.lines() == ["dist.reduce(tensor, dst=3, op=dist.ReduceOp.AVG)"]
    explorer.world_size = 2
    assert explorer.root == 1  # the last there is
    assert explorer.summary == (
        "reduce AVG on 2 ranks: rank 1 gets the average of each element: [1.5, 2.5]."
    )
    assert "PyTorch promises a result to the root alone." in explorer.body
    sliders = {one["name"]: one for one in explorer.controls}
    assert (sliders["root"]["min"], sliders["root"]["max"]) == (0, 1)
    explorer.set_state({"world_size": 99, "root": -4})
    assert (explorer.world_size, explorer.root) == (8, 0)
    with pytest.raises(traitlets.TraitError, match="op"):
        explorer.op = "sum"
    assert explorer.op == "AVG"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collective": "allreduce"}, "collective is 'allreduce': expected one of bro"),
        ({"op": "sum"}, "op is 'sum': expected one of SUM, PRODUCT, MIN, MAX, AVG."),
        ({"world_size": 9}, "world_size is 9: expected a whole number from 1 to 8."),
        ({"world_size": 2.0}, "world_size is 2.0"),
        (
            {"world_size": 2, "root": 2},
            "root is 2: expected a whole number from 0 to 1",
        ),
        ({"root": True}, "root is True"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CollectiveExplorer(**settings)


def test_docstrings():
    failed, tried = doctest.testmod(explorers)
    assert (failed, tried) == (0, 6)
