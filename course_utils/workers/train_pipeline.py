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

The last rank prints a JSON line every 20 steps. "loss" is the mean since the line
before; "best_loss" is the lowest that a model can reach in this language.
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from course_utils.measure.language import Language, Transformer
from course_utils.workers.group import RANK, WORLD_SIZE, join_group, stop

LENGTH = 32  # symbols that the model sees
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
    language = Language()
    torch.manual_seed(args.seed)  # all ranks draw the same model, and keep a part
    model = Transformer(language.symbols, args.width, args.layers, context=LENGTH)
    module = Stage(model).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    stage = PipelineStage(module, RANK, WORLD_SIZE, device)
    schedule = SCHEDULES[args.schedule](
        stage, args.micro_batches, loss_fn=next_symbol_loss
    )
    data = torch.Generator().manual_seed(args.seed)
    recent: list[float] = []
    for step in range(1, args.steps + 1):
        sentences = language.sample(args.batch_size, LENGTH + 1, data).to(device)
        given = [sentences[:, :-1]] if RANK == 0 else []
        losses: list[Tensor] = []
        wanted = {}
        if RANK == WORLD_SIZE - 1:
            wanted = {"target": sentences[:, 1:], "losses": losses}
        optimizer.zero_grad()
        schedule.step(*given, **wanted)
        optimizer.step()
        recent += [loss.item() for loss in losses]
        if step % 20 == 0 or step == args.steps:
            if recent:
                metrics = {
                    "step": step,
                    "loss": sum(recent) / len(recent),
                    "best_loss": language.best_loss(LENGTH),
                    "schedule": args.schedule,
                    "world_size": WORLD_SIZE,
                    "backend": dist.get_backend(),
                }
                print(json.dumps(metrics), flush=True)
            recent = []


@record
def main() -> None:
    """Read the command line, meet the other ranks, train."""
    parser = argparse.ArgumentParser(description="Train with a stage on each rank.")
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1f1b")
    add("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=32, help="of all micro-batches together")
    add("--micro-batches", type=int, default=8)
    add("--width", type=int, default=64)
    add("--layers", type=int, default=4)
    add("--lr", type=float, default=0.01)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 1 or args.micro_batches < 1:
        stop("--steps and --micro-batches are 1 or more")
    if args.layers < 1 or args.layers % WORLD_SIZE:
        stop(f"--layers {args.layers}: it is a multiple of the {WORLD_SIZE} ranks")
    if args.batch_size < 1 or args.batch_size % args.micro_batches:
        stop(
            f"--batch-size {args.batch_size}: it is a multiple of the "
            f"{args.micro_batches} micro-batches"
        )
    device = join_group(args.backend)
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
