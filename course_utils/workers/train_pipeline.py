"""Train a small transformer with a stage of it on each rank, by PyTorch's pipelining.

The blocks are shared out evenly. The first rank has the embeddings as well, and the
last one the head. A batch goes through in micro-batches:

    --schedule gpipe    all forwards, then all backwards
    --schedule 1f1b     a backward as soon as there can be one

The losses are the same with both. On a laptop, four ranks:

    torchrun --nproc-per-node 4 course_utils/workers/train_pipeline.py

One machine with 8 GPUs, the same file, with a model of 1.2 billion parameters:

    torchrun --nproc-per-node 8 course_utils/workers/train_pipeline.py \
        --backend nccl --width 2048 --layers 24 --lr 0.0003 --batch-size 128 \
        --micro-batches 32

One process without torchrun, to see that the numbers are the same:

    python course_utils/workers/train_pipeline.py

Rank 0 prints a JSON line every 20 steps. "loss" is the mean since the line before,
which the last rank knows and sends to all; "best_loss" is the lowest that a model can
reach in this language.
"""

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from course_utils.measure.language import Language, Transformer
from course_utils.workers.group import (
    RANK,
    WORLD_SIZE,
    Options,
    add_transformer_options,
    join_group,
    leave_at_once,
    stop,
)

LANGUAGE, LENGTH = Language(), 32  # symbols that the model sees
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(nn.Module):
    """This rank's part of a transformer: some blocks, and perhaps an end."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        size = len(model.blocks) // WORLD_SIZE
        self.blocks = model.blocks[RANK * size : (RANK + 1) * size]
        self.first, self.last = RANK == 0, RANK == WORLD_SIZE - 1
        if self.first:
            self.embedding, self.position = model.embedding, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """From symbols [N, T], or from what the stage before has sent."""
        if self.first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.embedding(x) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def next_symbol_loss(scores: Tensor, symbols: Tensor) -> Tensor:
    """The mean cross-entropy of a micro-batch."""
    return F.cross_entropy(scores.flatten(0, 1), symbols.flatten())


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The whole training, the same on every rank."""
    torch.manual_seed(0)  # all ranks draw the same model, and keep a part of it
    model = Transformer(LANGUAGE.symbols, args.width, args.layers, context=LENGTH)
    module = Stage(model).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    schedule = SCHEDULES[args.schedule](
        PipelineStage(module, RANK, WORLD_SIZE, device),
        args.micro_batches,
        loss_fn=next_symbol_loss,
    )
    losses: list[Tensor] = []  # of micro-batches, on the last rank
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(step)
        batch = LANGUAGE.sample(args.batch_size, LENGTH + 1, generator).to(device)
        inputs = [batch[:, :-1].contiguous()] if RANK == 0 else []
        at_the_end: dict[str, Any] = {}
        if RANK == WORLD_SIZE - 1:
            at_the_end = {"target": batch[:, 1:], "losses": (found := [])}
        optimizer.zero_grad()
        schedule.step(*inputs, **at_the_end)
        optimizer.step()
        if at_the_end:
            losses += found
        if step % args.every and step < args.steps:
            continue
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        dist.broadcast(mean, src=WORLD_SIZE - 1)
        metrics = {
            "step": step,
            "loss": mean.item(),
            "best_loss": LANGUAGE.best_loss(LENGTH),
            "parameters": sum(p.numel() for p in module.parameters()),
            "seconds": round(time.perf_counter() - start, 3),
            "world_size": WORLD_SIZE,
            "backend": dist.get_backend(),
        }
        if RANK == 0:
            print(json.dumps(metrics), flush=True)
        losses, start = [], time.perf_counter()


def parse_arguments() -> argparse.Namespace:
    parser = Options(__doc__)
    add_transformer_options(parser, micro_batches=8, width=64, layers=4)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    args = parser.parse_args()
    if args.width % 4:
        stop(f"--width {args.width}: it is a multiple of the 4 heads")
    if args.layers % WORLD_SIZE:
        stop(f"--layers {args.layers}: it is a multiple of the {WORLD_SIZE} ranks")
    if args.micro_batches < WORLD_SIZE and args.schedule == "1f1b":
        stop(
            f"--micro-batches {args.micro_batches}: 1F1B needs {WORLD_SIZE} or more, "
            "one for each rank"
        )
    if args.batch_size % args.micro_batches:
        stop(
            f"--batch-size {args.batch_size}: it is a multiple of the "
            f"{args.micro_batches} micro-batches"
        )
    return args


@record  # torchrun's report of a failure then has the traceback
def main() -> None:
    args = parse_arguments()
    train(args, join_group(args.backend))
    leave_at_once()


if __name__ == "__main__":
    main()
