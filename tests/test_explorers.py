"""The rank explorer: what it shows is right, for every cluster it can show."""

import doctest
import html.parser
import itertools
import shlex

import pytest
from torch.distributed.run import get_args_parser

from course_utils import explorers
from course_utils.explorers import RankExplorer

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


def test_the_saved_form_is_text_with_the_same_content(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, raw: shown.append((data, raw))
    )
    explorer = RankExplorer(2, 4, 5)
    explorer._ipython_display_()
    (text, raw), (view, raw_too) = shown
    assert raw and raw_too
    assert text["text/plain"] == explorer.text()
    assert explorer.body in text["text/html"]
    assert view["text/html"] == ""
    assert view[explorers._WIDGET]["model_id"] == explorer.model_id
    assert explorer.model_id not in text["text/html"] + text["text/plain"]


def test_docstrings():
    failed, tried = doctest.testmod(explorers)
    assert (failed, tried) == (0, 3)
