"""Train a small CNN on images of digits with distributed SGD, written out by hand.

Every rank (one process, one GPU if there are GPUs) holds the whole model and works on
its own share of each batch. Then the ranks average their gradients, so that every rank
takes the same step and the models stay equal. All of it is in plain sight: the
functions come from course_utils/from_scratch/sgd.py, and no DDP is involved.

On a laptop, two ranks:

    torchrun --nproc-per-node 2 course_utils/workers/train_sgd.py --epochs 3

What if the gradients were added up instead of averaged?

    torchrun --nproc-per-node 4 course_utils/workers/train_sgd.py --epochs 3 --sum

One machine with 8 GPUs, the same file. A rate that is good for batches of 64 is scaled
to those of 512, and reached in the course of the first epoch:

    torchrun --nproc-per-node 8 course_utils/workers/train_sgd.py --backend nccl \
        --data mnist --batch-size 512 --lr 0.01 --scale-lr 64 --warmup 1

Two machines (nodes) with 8 GPUs each: type this on both; node0 is the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint node0:29500 \
        course_utils/workers/train_sgd.py --backend nccl --data mnist --batch-size 1024

One process without torchrun, to see that the numbers are the same:

    python course_utils/workers/train_sgd.py --epochs 3

Rank 0 prints one JSON line an epoch. --batch-size is the batch of all ranks together,
so the loss does not depend on how many they are. It need not be a multiple of their
number: shares of different size are weighted by their number of images.
"""

import argparse
import json
import time
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from course_utils.from_scratch.sgd import (
    average_gradients,
    average_gradients_naive,
    average_gradients_weighted,
    broadcast_parameters,
    evaluate,
    linear_scaled_lr,
    rank_batches,
    sum_over_ranks,
    warmup_lr,
)
from course_utils.measure.data import NAMES
from course_utils.workers.group import RANK, WORLD_SIZE, Options, join_group, stop
from course_utils.workers.train_ddp import load_images, make_model


def combine_gradients(model: nn.Module, count: int, args: argparse.Namespace) -> None:
    """What makes it distributed: between backward() and step(), on every rank.

    `count` is the number of images that this rank's gradients come from.
    """
    average = average_gradients_naive if args.naive else average_gradients
    average_gradients_weighted(model, count, average)
    if args.sum:  # as if the division had been forgotten
        for parameter in model.parameters():
            parameter.grad *= WORLD_SIZE


def train_epoch(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[float, float]:
    """One pass over the images. Returns loss and accuracy over all ranks."""
    steps = ceil(len(images) / args.batch_size)  # in an epoch
    top_lr = args.lr
    if args.scale_lr:
        top_lr = linear_scaled_lr(args.lr, args.batch_size, args.scale_lr)

    loss_sum, correct = 0.0, 0
    batches = rank_batches(
        len(images), args.batch_size, WORLD_SIZE, RANK, seed=args.seed, epoch=epoch
    )
    for step, rows in enumerate(batches, start=(epoch - 1) * steps):
        lr = warmup_lr(step, round(args.warmup * steps), args.lr, top_lr)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        if len(rows) > 0:  # of a small last batch this rank may have no image
            answers = labels[rows].to(device)
            logits = model(images[rows].to(device))
            loss = nn.functional.cross_entropy(logits, answers)
            loss.backward()
            loss_sum += loss.item() * len(rows)
            correct += (logits.argmax(dim=1) == answers).sum().item()
        combine_gradients(model, len(rows), args)
        optimizer.step()  # the same gradients, so the same step on every rank
    # This rank has seen only its share. Add up sums and counts, then divide: a mean
    # of the ranks' means is wrong as soon as their shares differ in size.
    loss_sum, correct = sum_over_ranks(loss_sum, correct, device=device)
    return loss_sum / len(images), correct / len(images)


def train(args: argparse.Namespace, data: tuple[Tensor, ...], device) -> None:
    """The whole training, the same on every rank."""
    train_images, train_labels, test_images, test_labels = data
    torch.manual_seed(args.seed + RANK)  # the ranks draw different models ...
    model = make_model(*train_images.shape[2:]).to(device)
    broadcast_parameters(model)  # ... and all get that of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    # Every rank tests on its share. They differ in size, but each image counts once.
    mine = slice(RANK, None, WORLD_SIZE)
    test_batches = list(
        zip(test_images[mine].split(500), test_labels[mine].split(500), strict=True)
    )
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        loss, accuracy = train_epoch(
            model, train_images, train_labels, optimizer, epoch, args, device
        )
        seconds = time.perf_counter() - start
        metrics = {
            "epoch": epoch,
            "loss": loss,
            "train_accuracy": accuracy,
            "test_accuracy": evaluate(model, test_batches)[1],
            "lr": optimizer.param_groups[0]["lr"],
            "seconds": round(seconds, 3),
            "images_per_second": round(len(train_images) / seconds),
            "world_size": WORLD_SIZE,
            "backend": dist.get_backend(),
        }
        if RANK == 0:
            print(json.dumps(metrics), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = Options(__doc__, seed=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument(
        "--scale-lr",
        type=int,
        nargs="?",
        const=64,
        metavar="BATCH",
        help="--lr is for batches of this size (64): scale it to --batch-size",
    )
    parser.add_argument(
        "--warmup", type=float, default=0.0, help="epochs from --lr to the scaled rate"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--naive", action="store_true", help="one message a parameter, not a step"
    )
    parser.add_argument("--sum", action="store_true", help="add up, not average")
    parser.add_argument("--data", choices=NAMES, default="digits")
    args = parser.parse_args()
    if args.batch_size < WORLD_SIZE:
        stop(
            f"--batch-size {args.batch_size} is too small for {WORLD_SIZE} ranks. "
            f"Each works on one image or more: use {WORLD_SIZE} or more."
        )
    if args.warmup < 0:
        stop(f"--warmup {args.warmup:g}: the number of epochs is 0 or more")
    if args.warmup and args.scale_lr is None:
        stop("--warmup goes from --lr up to the scaled rate: add --scale-lr")
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
