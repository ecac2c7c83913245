"""What all worker scripts begin and end with: options, meet the others, give up."""

import argparse
import atexit
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

# DDP and optimizers would import this while the process group exists, and its default
# arguments would then hold the group to the end of Python, where gloo's threads can
# crash it.
import torch.distributed.nn.functional  # noqa: F401

# torchrun tells each process who it is. Without torchrun there is only this one.
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # among the ranks of this machine
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Options(argparse.ArgumentParser):
    """The options of a script: `--backend`, and those that it adds.

    `doc` begins with what the script does. `least`: the smallest value of an option
    that takes a whole number, by its name. Of those that are not named it is 1.
    """

    def __init__(self, doc: str, **least: int) -> None:
        super().__init__(description=doc.splitlines()[0], allow_abbrev=False)
        self.least = least
        self.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")

    def parse_args(self) -> argparse.Namespace:
        options = super().parse_args()
        for name, value in vars(options).items():
            least = self.least.get(name, 1)
            if type(value) is int and value < least:
                stop(f"--{name.replace('_', '-')} {value}: it is {least} or more")
        return options


def add_transformer_options(options: Options, **shape: int) -> None:
    """The options of all that train a transformer; `shape`: more whole numbers."""
    add = options.add_argument
    add("--steps", type=int, default=200)
    add("--every", type=int, default=20, help="steps from one line to the next")
    add("--batch-size", type=int, default=32, help="of all ranks")
    for name, default in shape.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default)
    add("--lr", type=float, default=0.005, help="learning rate")


def join_group(backend: str, *, bind: bool = False) -> torch.device:
    """Meet the other ranks. Returns the device that this rank computes on.

    `bind`: tell nccl at once which GPU is this rank's, so that it connects here and not
    in the first collective.
    """
    gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if gpus >= LOCAL_WORLD_SIZE else "gloo"
    if backend == "nccl":
        if gpus < LOCAL_WORLD_SIZE:
            stop(
                f"nccl needs a GPU for each rank: this machine has {gpus}, "
                f"for {LOCAL_WORLD_SIZE} ranks. Use --backend gloo."
            )
        device = torch.device("cuda", LOCAL_RANK)
        torch.cuda.set_device(device)  # "cuda" is this GPU from now on
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # the ranks share the cores
    if WORLD_SIZE == LOCAL_WORLD_SIZE and sys.platform in ("linux", "darwin"):
        # One machine: gloo meets on its loopback interface, also where it only serves
        # beside nccl. Otherwise it looks up the machine's own name, and may fail.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    gpu = device if bind and backend == "nccl" else None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=gpu)
    else:  # a group of one
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **alone, device_id=gpu)
    return device


def leave_at_once() -> None:
    """Leave the group, and Python without its end, once `main()` has returned.

    DTensor's caches and PyTorch's pipelining keep the group to the end of Python, where
    gloo's threads crash it now and then (exit code -6).
    """
    dist.destroy_process_group()
    atexit.register(os._exit, 0)


def stop(message: str) -> NoReturn:
    """Rank 0 says why it ends. The others wait: torchrun ends them when it has gone."""
    if RANK != 0:
        time.sleep(30)
    sys.exit(f"{Path(sys.argv[0]).stem}: {message}")
