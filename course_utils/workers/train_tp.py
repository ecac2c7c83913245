"""Train a small transformer with tensor parallelism: each rank has slices of layers.

The slices are those of PyTorch, or with --own those of course_utils/from_scratch. The
losses are the same, and those of one process. On a laptop, four ranks:

    torchrun --nproc-per-node 4 course_utils/workers/train_tp.py --own

One machine with 8 GPUs, the same file, with a model of 1.2 billion parameters:

    torchrun --nproc-per-node 8 course_utils/workers/train_tp.py \
        --backend nccl --bf16 --width 2048 --layers 24 --heads 16 --lr 0.0003

All ranks get the same batch: they share the work on each sentence, not the sentences.
Rank 0 prints a JSON line every 20 steps. "loss" is the mean since the line before;
"parameters" is how many numbers of the model are on rank 0.
"""

import argparse
import contextlib
import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as theirs
from torch.nn import functional as F

from course_utils.from_scratch import tensor_parallel as own
from course_utils.measure.language import Language, Transformer
from course_utils.workers.group import RANK, WORLD_SIZE, join_group, leave_at_once, stop

LANGUAGE = Language()
LENGTH = 32  # predictions in a sentence
COLUMNS = ("blocks.*.queries_keys_values", "blocks.*.perceptron.0")
ROWS = ("blocks.*.mix", "blocks.*.perceptron.2")


def slice_own(model: nn.Module) -> None:
    """By our layers. The head leaves each rank its part of the scores."""
    plan = {"embedding": own.VocabularyParallel, "head": own.ColumnParallel}
    plan |= dict.fromkeys(COLUMNS, own.ColumnParallel)
    own.parallelize(model, plan | dict.fromkeys(ROWS, own.RowParallel))


def slice_theirs(model: nn.Module, device: torch.device) -> None:
    """By PyTorch's. The head gathers the scores, for PyTorch's own cross-entropy."""
    plan = {
        "embedding": theirs.RowwiseParallel(input_layouts=Replicate()),
        "head": theirs.ColwiseParallel(output_layouts=Replicate()),
    }
    plan |= {name: theirs.ColwiseParallel() for name in COLUMNS}
    plan |= {name: theirs.RowwiseParallel() for name in ROWS}
    theirs.parallelize_module(model, init_device_mesh(device.type, (WORLD_SIZE,)), plan)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The whole training, the same on every rank."""
    torch.manual_seed(0)  # so all begin with the same whole model
    model = Transformer(LANGUAGE.symbols, args.width, args.layers, args.heads, LENGTH)
    model.to(device)
    slice_own(model) if args.own else slice_theirs(model, device)
    # After slicing: until then the parameters were others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_of = own.cross_entropy if args.own else F.cross_entropy
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    autocast = contextlib.nullcontext()
    if args.bf16:
        autocast = torch.autocast(device.type, torch.bfloat16)

    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(step)
        batch = LANGUAGE.sample(args.batch_size, LENGTH + 1, generator).to(device)
        with autocast:
            scores = model(batch[:, :-1])
        loss = loss_of(scores.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % args.every and step < args.steps:
            continue
        metrics = {
            "step": step,
            "loss": torch.stack(losses).mean().item(),  # waits for the GPU
            "best_loss": LANGUAGE.best_loss(LENGTH),
            "parameters": sum(part.numel() for part in parts),
            "seconds": round(time.perf_counter() - start, 3),
            "world_size": WORLD_SIZE,
            "backend": dist.get_backend(),
        }
        if RANK == 0:
            print(json.dumps(metrics), flush=True)
        losses, start = [], time.perf_counter()


def parse_arguments() -> argparse.Namespace:
    what = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(description=what, allow_abbrev=False)
    parser.add_argument("--own", action="store_true", help="the slices of the course")
    whole = {"steps": 200, "every": 20, "batch_size": 32}
    for name, default in (whole | {"width": 64, "layers": 2, "heads": 8}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            stop(f"--{name.replace('_', '-')} {value}: it is 1 or more")
    if args.heads % WORLD_SIZE or args.width % args.heads or 8 % WORLD_SIZE:
        stop(
            f"{WORLD_SIZE} ranks, --heads {args.heads}, --width {args.width}: use 1, "
            "2, 4 or 8 ranks, and multiples: heads of the ranks, width of the heads"
        )
    return args


@record  # torchrun's report of a failure then has the traceback
def main() -> None:
    args = parse_arguments()
    train(args, join_group(args.backend))
    leave_at_once()


if __name__ == "__main__":
    main()
