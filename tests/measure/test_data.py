"""``load_data``: the tensors, and what happens when a download goes wrong.

Downloads come from servers on 127.0.0.1 that the tests start, or from addresses where
nobody answers: no test needs a network.
"""

import gzip
import hashlib
import http.server
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from course_utils import ROOT
from course_utils.measure import data
from course_utils.measure.data import DataError, load_data


# ------------------------------------------------------------------------- the digits
def test_digits_are_those_of_scikit_learn_scaled_by_the_train_images():
    from sklearn.datasets import load_digits

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again = load_data("digits"), load_data("digits")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    images, labels, test_images, test_labels = first
    assert images.shape == (1440, 1, 8, 8) and test_images.shape == (357, 1, 8, 8)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    assert images.mean().abs() < 1e-6 and (images.std() - 1).abs() < 1e-6
    assert test_images.mean().abs() > 1e-6  # by the train images' mean, not its own
    # Each of them is there once. Undo the scaling: pixels are whole numbers to 16.
    found = torch.cat([images, test_images]).squeeze(1)
    found = ((found - found.min()) / (found.max() - found.min()) * 16).round()
    original = load_digits()

    def rows(images, labels):
        pairs = zip(images.reshape(len(labels), -1).tolist(), labels, strict=True)
        return sorted((int(label), *image) for image, label in pairs)

    found_labels = torch.cat([labels, test_labels])
    assert rows(found, found_labels) == rows(original.images, original.target)


def test_digits_do_without_importing_scikit_learn():
    """It would cost every rank a second."""
    code = (
        "import sys; from course_utils.measure.data import load_data; load_data();"
        "assert not {'sklearn', 'torchvision'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(ValueError, match="'cifar'.*digits, mnist, fashion-mnist"):
        load_data("cifar")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        load_data("digits")


# ---------------------------------------------------- MNIST, from a server of our own
def idx(array: torch.Tensor) -> bytes:
    """The file format of MNIST."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim)
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return header + sizes + array.to(torch.uint8).numpy().tobytes()


class Mirror(http.server.ThreadingHTTPServer):
    """An HTTP server on 127.0.0.1 with a small MNIST; counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.asked = {}, []
        generator = torch.Generator().manual_seed(0)
        for part, count in (("train", 30), ("t10k", 12)):
            images = torch.randint(0, 256, (count, 28, 28), generator=generator)
            self.files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(images))
            labels = gzip.compress(idx(torch.arange(count) % 10))
            self.files[f"{part}-labels-idx1-ubyte.gz"] = labels
        self.resources = [
            (name, hashlib.md5(content).hexdigest())
            for name, content in self.files.items()
        ]


class Answer(http.server.BaseHTTPRequestHandler):
    """Torchvision's first request for a file only asks where it is."""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.server.asked.append(name)
        content = self.server.files.get(name)
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    """MNIST comes from our own server, into a folder of this test."""
    from torchvision import datasets

    monkeypatch.setattr(data, "STATE", tmp_path)
    with Mirror() as mirror:
        url = f"http://127.0.0.1:{mirror.server_port}/"
        for dataset in (datasets.MNIST, datasets.FashionMNIST):
            monkeypatch.setattr(dataset, "mirrors", [url])
            monkeypatch.setattr(dataset, "resources", mirror.resources)
        thread = threading.Thread(target=mirror.serve_forever, args=(0.01,))
        thread.start()
        yield mirror
        mirror.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_is_downloaded_once_and_read(mirror, capsys, name):
    images, labels, test_images, test_labels = load_data(name)
    assert (images.shape, test_images.shape) == ((30, 1, 28, 28), (12, 1, 28, 28))
    assert (images.dtype, test_labels.dtype) == (torch.float32, torch.int64)
    assert labels.tolist() == [n % 10 for n in range(30)]
    assert images.mean().abs() < 1e-5
    asked = len(mirror.asked)
    assert set(mirror.asked) == set(mirror.files)
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert torch.equal(load_data(name)[0], images)
    assert (len(mirror.asked), capsys.readouterr().err) == (asked, "")


def test_a_process_that_waits_for_the_download_of_another_gets_it(mirror, tmp_path):
    """The lock holds between processes, and a killed holder gives it back."""
    code = (
        "import sys, time; from filelock import FileLock;"
        "lock = FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True);"
        "time.sleep(60)"
    )
    (tmp_path / "data").mkdir()
    command = [sys.executable, "-c", code, tmp_path / "data" / "mnist.lock"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder,
        ThreadPoolExecutor(4) as pool,
    ):
        assert holder.stdout.readline() == "held\n"
        waiting = [pool.submit(load_data, "mnist") for _ in range(4)]
        assert not wait(waiting, timeout=0.5).done
        assert mirror.asked == []
        holder.kill()
        for one in waiting:
            assert one.result(timeout=30)[0].shape == (30, 1, 28, 28)
    # One of them has downloaded: it asks where each file is, and then for it.
    assert len(mirror.asked) == 2 * len(mirror.files)


def test_what_is_damaged_is_removed_and_comes_anew(mirror, tmp_path):
    whole = load_data("mnist")[0]
    file = tmp_path / "data" / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="mnist was damaged: .*\n.*: run this again"):
        load_data("mnist")
    assert not file.exists()
    assert torch.equal(load_data("mnist")[0], whole)


def test_a_download_that_arrives_damaged_is_not_kept(mirror, tmp_path):
    name = "train-labels-idx1-ubyte.gz"
    good = mirror.files[name]
    mirror.files[name] = good[:-10]
    with pytest.raises(DataError, match="mnist could not be downloaded"):
        load_data("mnist")
    assert not list(tmp_path.rglob("train-labels*"))
    mirror.files[name] = good
    assert load_data("mnist")[1].shape == (30,)


def test_without_network_the_error_says_what_to_do(mirror, monkeypatch):
    from torchvision import datasets

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but it does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        urls = [f"http://{address}/", "http://no-such-host.invalid/"]
        monkeypatch.setattr(datasets.MNIST, "mirrors", urls)
        with pytest.raises(DataError) as info:
            load_data("mnist")
    assert str(info.value).startswith("mnist could not be downloaded: ")
    for part in (*urls, "run this again", "--data digits"):
        assert part in str(info.value)


def test_a_server_that_never_answers_is_given_up(mirror, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(data, "SECONDS_WITHOUT_ANSWER", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://{address}/"])
        with pytest.raises(DataError, match="timed out"):
            load_data("mnist")
    assert socket.getdefaulttimeout() is None
