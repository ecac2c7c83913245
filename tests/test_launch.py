"""``launch``: a script on ranks of its own, as ``torchrun`` would run it.

What goes wrong inside of a script is in the fault table, and that launched scripts
print what they print under ``torchrun`` is in ``test_torchrun.py``.
"""

import os
import re
import signal
import sys
import textwrap
import threading
import time

import pytest
from ranks_support import (
    Screen,
    eventually,
    helper,  # noqa: F401 - a fixture
    marked_processes,
)
from thorough import thorough_after

from course_utils import ROOT, launch
from course_utils.ranks.launch import LaunchError


@pytest.fixture(autouse=True)
def nothing_is_left(helper):  # noqa: F811
    before = set(marked_processes())
    yield
    eventually(lambda: set(marked_processes()) <= before)


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(code: str, name: str = "worker.py") -> str:
        file = tmp_path / name
        file.write_text(textwrap.dedent(code).lstrip("\n"))
        return str(file)

    return write


# -------------------------------------------------------------- what goes well
@pytest.mark.parametrize("method", thorough_after(1, ["fork", "spawn"]))
def test_a_script_runs_as_under_torchrun_and_on_loopback_only(
    script, capfd, monkeypatch, method
):
    if method == "fork" and sys.platform != "linux":
        pytest.skip("ranks are forks on Linux only")
    monkeypatch.setenv("RANKS_START_METHOD", method)
    monkeypatch.setenv("MPLBACKEND", "a notebook's own")
    path = script(
        """
        import atexit, json, os, random, signal, socket, subprocess, sys
        import threading, time
        import numpy, psutil, torch, torch.distributed as dist
        from torch import nn

        def listening():
            found = psutil.Process().net_connections()
            return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert __name__ == "__main__" and __file__ == os.path.abspath(sys.argv[0])
        assert sys.path[0] == os.path.dirname(__file__)
        assert sys.argv[1:] == ["one two", "--lr", "0.5", "--resume"], sys.argv
        assert os.environ["LOCAL_RANK"] == os.environ["RANK"]
        assert os.environ["LOCAL_WORLD_SIZE"] == "2"
        assert "MPLBACKEND" not in os.environ
        assert torch.get_num_threads() == 1
        assert sys.stdin.read() == ""
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
        chance = random.random(), numpy.random.random(), torch.rand(1).item()
        others = [None, None]
        dist.all_gather_object(others, chance)
        assert not set(others[0]) & set(others[1])  # without a seed each has its own
        assert listening() == {"127.0.0.1"}
        dist.destroy_process_group()

        # A second meeting, which rank 0 serves itself.
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port[0]}",
                                rank=rank, world_size=world_size)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        assert listening() == {"127.0.0.1"}

        if rank == 0:
            print("before")
            print(json.dumps({"epoch": 1, "loss": 0.25, "seconds": time.time()}))
            print("{not JSON}")
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        else:
            print("\\n".join(str(n) for n in range(3000)))
            print("10 %\\r50 %\\r100 %", file=sys.stderr)
            atexit.register(print, "smörgås", total.item(), os.getcwd(), end="")
            last = "from a thread, after the script"
            threading.Timer(0.2, print, [last]).start()
        atexit.register(os._exit, 0)
        """
    )
    result = launch(path, "one two", lr=0.5, resume=True, momentum=None)

    assert result.seconds > 0
    (metrics,) = result.metrics
    assert (metrics["epoch"], metrics["loss"]) == (1, 0.25)

    command = f"torchrun --nproc-per-node 2 {path} 'one two' --lr 0.5 --resume"
    assert result.command == command
    assert repr(result) == f"<LaunchResult of {command!r}: 1 metrics lines>"
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == command
    assert lines[1] == "[rank 0] before"
    assert lines[2].startswith('[rank 0] {"epoch": 1')
    assert lines[3] == "[rank 0] {not JSON}"
    assert lines[4:1004] == [f"[rank 1] {n}" for n in range(1000)]
    assert lines[1004].endswith(" lines left out ...")
    assert lines[-2] == "[rank 1] from a thread, after the script"
    assert lines[-1] == f"[rank 1] smörgås 2.0 {ROOT}"
    assert "[rank 1] 2000\n" in result.output  # all lines are kept


def test_lines_appear_as_they_come_and_epochs_without_their_times(
    script, tmp_path, monkeypatch
):
    path = script(
        """
        import json, os, sys, time
        metrics = {"epoch": 1, "loss": 1 / 3, "test_accuracy": 0.97251, "seconds": 0.5,
                   "images_per_second": 12345, "world_size": 1, "backend": "gloo"}
        print(json.dumps(metrics))
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        print("later")
        """
    )
    epoch = "[rank 0] epoch 1   loss 0.333   test_accuracy 0.973\n"
    screen = Screen(epoch, tmp_path / "seen")
    monkeypatch.setenv("RANKS_OUTPUT", "stream")
    monkeypatch.setattr(sys, "stdout", screen)
    result = launch(path, tmp_path / "seen", nproc=1, show="epochs")
    assert screen.all == f"{result.command}\n{epoch}[rank 0] later\n"
    assert result.metrics[0]["images_per_second"] == 12345  # nothing is lost


def test_arguments_become_the_words_of_a_command_line(script, capsys):
    options = {
        "batch_size": 64,
        "lr": 1e-4,
        "resume": True,
        "seed": None,
        "fast": False,
        "sizes": [8, 16],
        "checkpoint": ROOT / ".course" / "ddp.pt",
    }
    path = script("import sys; print(*sys.argv[1:], sep='|')")
    result = launch(path, "--flag", 3, nproc=1, show="none", **options)
    assert result.output == (
        "[rank 0] --flag|3|--batch-size|64|--lr|0.0001|--resume|--sizes|8|16"
        f"|--checkpoint|{os.path.join('.course', 'ddp.pt')}\n"
    )
    assert capsys.readouterr().out == f"{result.command}\n"


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "os._exit(0)"])
def test_an_exit_that_is_not_an_error(script, end):
    path = script(f"import os, sys\nprint('end', flush=True)\n{end}")
    assert launch(path, quiet=True).output == "[rank 0] end\n[rank 1] end\n"


# ---------------------------------------------------------------------- what goes wrong
def test_an_error_has_what_was_printed_until_then(script):
    path = script(
        """
        import torch, torch.distributed as dist

        def main():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                print('{"epoch": 1}')
            dist.barrier()
            if dist.get_rank() == 1:
                print("a last word")
                try:
                    torch.nn.Linear(3, 4)(torch.ones(2, 5))
                except RuntimeError as error:
                    raise ValueError("bad shard") from error
            dist.all_reduce(torch.ones(1))

        if __name__ == "__main__":
            main()
        """
    )
    with pytest.raises(LaunchError) as info:
        launch(path, quiet=True)
    error = info.value
    assert (error.cause, error.root.rank) == ("raised", 1)
    assert error.metrics == [{"epoch": 1}]
    assert error.output == '[rank 0] {"epoch": 1}\n[rank 1] a last word\n'
    assert str(error) == (
        "Rank 1 raised ValueError: bad shard\n"
        "(caused by RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and "
        "3x4))\n"
        "  line 17 of worker.py: main()\n"
        '  line 13 of worker.py, in main: raise ValueError("bad shard") from error\n'
        "Rank 0 was waiting in all_reduce, line 14 of worker.py: "
        "dist.all_reduce(torch.ones(1))\n"
        "  Its last lines:\n"
        "  a last word"
    )
    assert error._render_traceback_()[0].startswith("LaunchError: Rank 1 raised")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("train_dpp", "'train_dpp'.*train_ddp"),
        ("no/such.py", "there is no worker or script 'no/such.py'"),
        ("../notebooks/00_start_here.ipynb", "is a notebook, and every rank runs a"),
        (["train_ddp"], r"such as \"train_ddp\", not \['train_ddp'\]"),
    ],
)
def test_what_is_no_script_is_named(capsys, name, says):
    with pytest.raises((LaunchError, TypeError), match=says) as info:
        launch(name)
    assert getattr(info.value, "cause", "usage") == "usage"
    assert capsys.readouterr().out == ""


def test_a_word_that_show_does_not_have_is_named():
    with pytest.raises(ValueError, match="show is 'some'; it must be 'all', 'epochs'"):
        launch("train_ddp", show="some")


SLEEPER = """
    import os, pathlib, subprocess, sys, time
    subprocess.Popen(["sleep", "1000"])
    pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
    time.sleep(1000)
"""


def test_an_interrupt_ends_the_launch_at_once(script, tmp_path):
    """What Jupyter's stop button does: SIGINT to the kernel."""
    path, ready = script(SLEEPER), tmp_path / "ready"
    ready.mkdir()
    pressed = []

    def press() -> None:
        if eventually(lambda: len(list(ready.iterdir())) == 2, 30):
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    button = threading.Thread(target=press)
    button.start()
    with pytest.raises(KeyboardInterrupt):
        launch(path, str(ready), timeout=60, quiet=True)
    button.join()
    assert time.monotonic() - pressed[0] < 3.0


# --------------------------------------------------------------- below virtual GPUs
GPUS = """
import ctypes, torch, torch.distributed as dist
from course_utils import virtual_gpus
dist.init_process_group("gloo")
class Model(torch.nn.Module):
    def forward(self, x):
        {line}
        return x
with virtual_gpus(2) as gpus, gpus.record():
    {call}(torch.ones(4, 2, device="cuda"))
"""


@pytest.mark.parametrize(
    "call", thorough_after(1, ["Model()", "torch.nn.DataParallel(Model())"])
)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "dist.all_reduce(x) if dist.get_rank() else dist.recv(x, 1)",
            "line 6 of gpus.py",
        ),
        ("ctypes.string_at(0)", "line 6 of gpus.py"),
        ("x @ x.new_ones(7)", "line 6( of gpus.py)?, in forward"),
    ],
)
def test_the_line_that_is_named_is_the_scripts(script, call, line, says):
    path = script(GPUS.format(call=call, line=line), "gpus.py")
    with pytest.raises(LaunchError) as info:
        launch(path, quiet=True)
    text = str(info.value)
    assert re.search(says, text)
    assert "virtual_gpus" not in text.replace("with virtual_gpus", "")
    assert "site-packages" not in text
