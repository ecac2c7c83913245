"""Train a small CNN on images of digits with DistributedDataParallel (DDP).

Every rank (one process, one GPU if there are GPUs) holds the whole model and works on
its own share of each batch. While the gradients are computed, DDP averages them over
the ranks, so that every rank takes the same step and the models stay equal.

On a laptop, two ranks:

    torchrun --nproc-per-node 2 course_utils/workers/train_ddp.py --epochs 3

One machine with 8 GPUs, the same file:

    torchrun --nproc-per-node 8 course_utils/workers/train_ddp.py \
        --backend nccl --data mnist --batch-size 512

Two machines (nodes) with 8 GPUs each: type this on both; node0 is the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint node0:29500 \
        course_utils/workers/train_ddp.py --backend nccl --data mnist --batch-size 1024

One process without torchrun, to see that the numbers are the same:

    python course_utils/workers/train_ddp.py --epochs 3

Rank 0 prints one JSON line an epoch. --batch-size is the batch of all ranks together,
so the loss does not depend on how many they are. With --checkpoint FILE rank 0 saves
after every epoch; a file that is already there is never overwritten, unless --resume
says to go on from it. (--resume without a file says so, and starts anew: one and the
same line starts a job and restarts it.) Several nodes need FILE on a disk they share.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course_utils.measure.data import NAMES, DataError, load_data
from course_utils.workers.group import (
    LOCAL_RANK,
    RANK,
    WORLD_SIZE,
    Options,
    join_group,
    stop,
)


def make_model(height: int, width: int) -> nn.Module:
    """A CNN for images [N, 1, height, width] in ten classes.

    No BatchNorm: it takes its mean over the rank's own share of the batch, so the loss
    would depend on the number of ranks (SyncBatchNorm is the way out). No dropout:
    each rank would drop other units than one process would.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), 10),
    )


def load_images(args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Images and labels to train and to test; without enough of them the run ends."""
    try:
        data = load_data(args.data)
    except DataError as error:
        stop(str(error))
    if args.batch_size > len(data[0]):
        stop(f"--batch-size {args.batch_size}: there are only {len(data[0])} images")
    return data


def make_loader(images: Tensor, labels: Tensor, args) -> DataLoader:
    """This rank's share of the training images, in batches.

    All ranks shuffle alike (same seed); then rank r of n takes the images r, r+n,
    r+2n, ... So the k-th batches of all ranks together are the images k*B to (k+1)*B
    of that order, whatever n is. Images that do not fill a last batch wait for the
    next epoch: padding them, as the sampler would do, repeats some.
    """
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    share = args.batch_size // WORLD_SIZE
    loader = DataLoader(dataset, share, sampler=sampler, drop_last=True)
    return loader


def train_epoch(model, loader, optimizer, device) -> tuple[float, float, int]:
    """One pass over the data. Returns loss, accuracy and count over all ranks."""
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()  # in here DDP averages the gradients over the ranks
        optimizer.step()  # the same gradients, so the same step on every rank
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    # This rank has seen only its share. Add up sums and counts, then divide: a mean
    # of the ranks' means is wrong as soon as their shares differ in size.
    dist.all_reduce(totals)
    loss_sum, correct, count = totals.tolist()
    return loss_sum / count, correct / count, int(count)


@torch.no_grad()
def evaluate(model, images: Tensor, labels: Tensor, device) -> float:
    """Accuracy over all test images. Every rank calls it; each image counts once.

    No DistributedSampler: it pads the shares to one size, and would count some images
    twice. Shares of different size are fine here, since ``model`` is the plain one,
    not its DDP wrapper: nothing is exchanged before the all_reduce.
    """
    correct = torch.zeros(1, device=device)
    mine = TensorDataset(images[RANK::WORLD_SIZE], labels[RANK::WORLD_SIZE])
    for some_images, some_labels in DataLoader(mine, batch_size=500):
        answers = model(some_images.to(device)).argmax(dim=1)
        correct += (answers == some_labels.to(device)).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


def save_checkpoint(path: Path, checkpoint: dict) -> None:
    """Replace ``path`` in one step: after a crash it is the old file or the new one.

    Only rank 0 calls it. All ranks hold the same model, so one copy is enough.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk, before it takes the old file's name
    os.replace(temporary, path)


def load_checkpoint(path: Path, settings: dict) -> dict | None:
    """The checkpoint, on every rank, or None. Rank 0 alone needs to see the file."""
    found, problem = None, None
    if RANK == 0 and path.exists():
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            if found["settings"] != settings:
                problem = f"{path} has {found['settings']}, but this run {settings}"
        except Exception as error:
            kind = type(error).__name__
            problem = f"{path} is not a checkpoint of this script ({kind})"
    message = [found, problem]
    dist.broadcast_object_list(message, src=0)
    found, problem = message
    if problem:
        stop(problem)
    return found


def train(args: argparse.Namespace, data: tuple[Tensor, ...], device) -> None:
    """The whole training, the same on every rank."""
    train_images, train_labels, test_images, test_labels = data
    torch.manual_seed(args.seed)
    plain_model = make_model(*train_images.shape[2:]).to(device)
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=args.lr, momentum=0.9)

    # The state of random generators is not saved, because none is left to save: the
    # order of the images follows from the seed and the number of the epoch.
    settings = {name: vars(args)[name] for name in ("data", "batch_size", "lr", "seed")}
    checkpoint = load_checkpoint(args.checkpoint, settings) if args.resume else None
    if RANK == 0 and args.resume and not checkpoint:
        begun = f"there is no {args.checkpoint} yet, so it begins anew"
        print(f"--resume: {begun}", file=sys.stderr)
    if checkpoint:
        plain_model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if RANK == 0 and checkpoint["epoch"] >= args.epochs:
            done = f"{args.checkpoint} has {checkpoint['epoch']} epochs"
            print(f"nothing to do: {done} (--epochs {args.epochs})", file=sys.stderr)

    # Wrapping copies rank 0's parameters to the others: now all models are equal.
    gpu = [LOCAL_RANK] if device.type == "cuda" else None
    model = DistributedDataParallel(plain_model, device_ids=gpu)
    loader = make_loader(train_images, train_labels, args)

    # After its first backward pass DDP sorts its buckets anew, by the order in which
    # the gradients came, and adds them up in another order from then on. Let that pass
    # be one that does not count: a resumed run is then equal to the last bit.
    model(train_images[:1].to(device)).sum().backward()
    optimizer.zero_grad()

    for epoch in range(checkpoint["epoch"] + 1 if checkpoint else 1, args.epochs + 1):
        loader.sampler.set_epoch(epoch)  # or every epoch would have the same order
        start = time.perf_counter()
        loss, accuracy, count = train_epoch(model, loader, optimizer, device)
        seconds = time.perf_counter() - start
        metrics = {
            "epoch": epoch,
            "loss": loss,
            "train_accuracy": accuracy,
            "test_accuracy": evaluate(plain_model, test_images, test_labels, device),
            "seconds": round(seconds, 3),
            "images_per_second": round(count / seconds),
            "world_size": WORLD_SIZE,
            "backend": dist.get_backend(),
        }
        if RANK == 0:
            print(json.dumps(metrics), flush=True)
            if args.checkpoint:
                state = {"settings": settings, "epoch": epoch}
                state["model"] = plain_model.state_dict()  # no "module." in its names
                state["optimizer"] = optimizer.state_dict()
                save_checkpoint(args.checkpoint, state)


def parse_arguments() -> argparse.Namespace:
    parser = Options(__doc__, seed=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", choices=NAMES, default="digits")
    parser.add_argument("--checkpoint", type=Path, help="save here after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from there")
    args = parser.parse_args()
    if args.batch_size % WORLD_SIZE:
        stop(
            f"--batch-size {args.batch_size} cannot be shared equally by {WORLD_SIZE} "
            f"ranks. Use a multiple of {WORLD_SIZE}."
        )
    if args.resume and not args.checkpoint:
        stop("--resume needs --checkpoint FILE: the file to go on from")
    if RANK == 0 and args.checkpoint:
        if args.checkpoint.exists() and not args.resume:
            stop(f"{args.checkpoint} exists: add --resume to go on from it, or move it")
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    return args


@record  # torchrun's report of a failure then has the traceback
def main() -> None:
    args = parse_arguments()
    data = load_images(args)
    device = join_group(args.backend)
    train(args, data, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
