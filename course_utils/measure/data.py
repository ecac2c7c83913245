"""The images that the course trains on, as tensors.

The digits come with scikit-learn, so they need no network. MNIST and Fashion-MNIST
are downloaded by torchvision, once, into the course's own folder.
"""

import contextlib
import importlib.util
import io
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from filelock import FileLock

from course_utils import STATE, shown

Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

NAMES = ("digits", "mnist", "fashion-mnist")
SECONDS_WITHOUT_ANSWER = 20.0


class DataError(RuntimeError):
    """The data cannot be had: no network, a damaged file, a package that is missing."""


def load_data(name: str = "digits") -> Split:
    """The images and labels of a data set, split into train and test.

    Args:
        name: "digits" (1,440 + 357 images, 8x8, no network needed), "mnist" or
            "fashion-mnist" (60,000 + 10,000 images, 28x28, about 11 and 30 MB to
            download the first time). All have ten classes.

    Returns:
        ``(train_images, train_labels, test_images, test_labels)``. Images are
        float32 [N, 1, H, W], shifted and scaled so that the train images have mean 0
        and standard deviation 1; labels are int64 [N]. The same on every call and
        every rank.

    Any rank may call it, with or without a process group. Where several call it at
    once, one downloads and the others wait for it.

    Raises:
        ValueError: No data set has this name.
        DataError: The download failed, or a file is damaged. All files are removed
            first, so that the next call downloads them anew.
    """
    if name not in NAMES:
        raise ValueError(f"no data set {name!r}; there are: {', '.join(NAMES)}")
    if name == "digits":
        images, labels, test_images, test_labels = _digits()
    else:
        images, labels, test_images, test_labels = _torchvision(name, STATE / "data")
    mean, std = images.mean(), images.std()  # of the train images alone
    return (
        ((images - mean) / std).unsqueeze(1),
        labels,
        ((test_images - mean) / std).unsqueeze(1),
        test_labels,
    )


def _digits() -> Split:
    """scikit-learn's digits: float32 [N, 8, 8] in 0..16, labels int64 [N]."""
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise DataError(
            "the digits come with scikit-learn, which is not installed. "
            "Install it: python -m pip install scikit-learn"
        )
    # This is the file behind sklearn.datasets.load_digits(). Importing scikit-learn
    # for it would cost every rank about a second.
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
    # In the file, images by the same writer are neighbours: shuffle before the
    # split, always in the same way.
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    table = table[order]
    images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1].long()
    return images[:1440], labels[:1440], images[1440:], labels[1440:]


def _torchvision(name: str, folder: Path) -> Split:
    """MNIST or Fashion-MNIST below ``folder``: float32 [N, 28, 28] in 0..255."""
    # Only here: importing torchvision costs a second, and the digits do without.
    from torchvision import datasets

    dataset = datasets.MNIST if name == "mnist" else datasets.FashionMNIST
    raw = folder / dataset.__name__ / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    # The system gives the lock back when its holder ends, in whatever way.
    with FileLock(folder / f"{name}.lock"):
        there = len(list(raw.glob("*-ubyte"))) == len(dataset.resources)
        if not there:
            print(f"downloading {name} into {shown(raw)}", file=sys.stderr)
        try:
            with _quick_and_quiet():
                train, test = (
                    dataset(folder, train=part, download=True) for part in (True, False)
                )
        except Exception as error:
            shutil.rmtree(raw, ignore_errors=True)
            what = "was damaged" if there else "could not be downloaded"
            raise DataError(
                f"{name} {what}: {str(error).strip() or type(error).__name__}\n"
                f"What was in {shown(raw)} has been removed: run this again to "
                "download it anew. Is this machine connected to the internet? The "
                'digits need no network: --data digits, or load_data("digits").'
            ) from None
    return train.data.float(), train.targets, test.data.float(), test.targets


@contextlib.contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """Give up on a server that does not answer; keep progress bars to ourselves."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS_WITHOUT_ANSWER)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)
