"""Train a small transformer with tensor parallelism: each rank has slices of layers.

The slices are those of PyTorch, or with --own those of course_utils/from_scratch. The
losses are the same, and those of one process. On a laptop, four ranks:

    torchrun --nproc-per-node 4 course_utils/workers/train_tp.py --own

With --dp 2 the ranks are a mesh (dp 2, tp 2). The ranks of tp share the work on each
sentence; those of dp have different sentences, and FSDP cuts the slices between them
(with --own each keeps whole slices, and the gradients are averaged):

    torchrun --nproc-per-node 4 course_utils/workers/train_tp.py --dp 2 \
        --checkpoint .course/mesh --steps 100

Go on from the checkpoint, on another mesh:

    torchrun --nproc-per-node 4 course_utils/workers/train_tp.py --dp 4 \
        --checkpoint .course/mesh --steps 200 --resume

One machine with 8 GPUs, the same file, with a model of 1.2 billion parameters:

    torchrun --nproc-per-node 8 course_utils/workers/train_tp.py \
        --backend nccl --bf16 --width 2048 --layers 24 --heads 16 --lr 0.0003

Two such machines: tensor parallel inside of each, FSDP between them. Type this on both;
node0 is the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint node0:29500 \
        course_utils/workers/train_tp.py --dp 2 --backend nccl --bf16

Rank 0 prints a JSON line every 20 steps. "loss" is the mean since the line before;
"parameters" is how many numbers of the model are on rank 0. With --checkpoint DIR all
ranks save together at each line.
"""

import argparse
import contextlib
import json
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as theirs
from torch.nn import functional as F

from course_utils.from_scratch import tensor_parallel as own
from course_utils.measure.language import Language, Transformer
from course_utils.workers.checkpoints import (
    add_checkpoint_options,
    go_on_from,
    open_checkpoints,
    state_of,
)
from course_utils.workers.group import (
    RANK,
    WORLD_SIZE,
    Options,
    add_transformer_options,
    join_group,
    leave_at_once,
    stop,
)

# Of no matter here: the scores, which the model returns, are a view of another tensor.
warnings.filterwarnings("ignore", "FSDP2-wrapped module")

LANGUAGE = Language()
LENGTH = 32  # predictions in a sentence
COLUMNS = ("blocks.*.queries_keys_values", "blocks.*.perceptron.0")
ROWS = ("blocks.*.mix", "blocks.*.perceptron.2")


# With others the numbers would be others. The mesh may be another one.
SETTINGS = ("width", "layers", "heads", "batch_size", "lr", "bf16")


def slice_own(model: nn.Module, mesh: DeviceMesh) -> None:
    """By our layers. The head leaves each rank its part of the scores."""
    plan = {"embedding": own.VocabularyParallel, "head": own.ColumnParallel}
    plan |= dict.fromkeys(COLUMNS, own.ColumnParallel)
    plan |= dict.fromkeys(ROWS, own.RowParallel)
    tp = mesh.get_group("tp")
    own.parallelize(model, {k: partial(layer, group=tp) for k, layer in plan.items()})


def slice_theirs(model: nn.Module, mesh: DeviceMesh) -> None:
    """By PyTorch's. The head gathers the scores, for PyTorch's own cross-entropy."""
    plan = {
        "embedding": theirs.RowwiseParallel(input_layouts=Replicate()),
        "head": theirs.ColwiseParallel(output_layouts=Replicate()),
    }
    plan |= {name: theirs.ColwiseParallel() for name in COLUMNS}
    plan |= {name: theirs.RowwiseParallel() for name in ROWS}
    theirs.parallelize_module(model, mesh["tp"], plan)
    if mesh["dp"].size() > 1:  # slices first: FSDP has to find them
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The whole training, the same on every rank."""
    # The ranks of tp follow each other: with 8 on a machine, they are its GPUs.
    sizes = (args.dp, WORLD_SIZE // args.dp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    torch.manual_seed(0)  # so all begin with the same whole model
    model = Transformer(LANGUAGE.symbols, args.width, args.layers, args.heads, LENGTH)
    model.to(device)
    slice_own(model, mesh) if args.own else slice_theirs(model, mesh)
    # After slicing: until then the parameters were others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    checkpoints, last = open_checkpoints(args, SETTINGS)
    if last:
        state = state_of(model, optimizer)
        checkpoints.load(state)
        go_on_from(state, model, optimizer)
    autocast = contextlib.nullcontext()
    if args.bf16:
        autocast = torch.autocast(device.type, torch.bfloat16)

    losses, start = [], time.perf_counter()
    for step in range(last + 1, args.steps + 1):
        generator = torch.Generator().manual_seed(step)
        batch = LANGUAGE.sample(args.batch_size, LENGTH + 1, generator).to(device)
        batch = batch.chunk(args.dp)[mesh.get_local_rank("dp")]  # the same on all of tp
        with autocast:
            scores = model(batch[:, :-1]).flatten(0, 1).float()
        targets = batch[:, 1:].flatten()
        if args.own:
            loss = own.cross_entropy(scores, targets, tp)
        else:
            loss = F.cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        if args.own and args.dp > 1:  # FSDP does it by itself
            for part in parts:
                dist.all_reduce(part.grad, group=dp)
                part.grad /= args.dp
        optimizer.step()
        losses.append(loss.detach())
        if step % args.every and step < args.steps:
            continue
        mean = torch.stack(losses).mean() / args.dp
        dist.all_reduce(mean, group=dp)
        metrics = {
            "step": step,
            "loss": mean.item(),  # waits for the GPU
            "best_loss": LANGUAGE.best_loss(LENGTH),
            "parameters": sum(part.numel() for part in parts),
            "seconds": round(time.perf_counter() - start, 3),
            "world_size": WORLD_SIZE,
            "backend": dist.get_backend(),
        }
        if RANK == 0:
            print(json.dumps(metrics), flush=True)
        if checkpoints:
            checkpoints.save(step, state_of(model, optimizer))
        losses, start = [], time.perf_counter()
    if checkpoints:
        checkpoints.wait()


def parse_arguments() -> argparse.Namespace:
    parser = Options(__doc__)
    add_transformer_options(parser, width=64, layers=2, heads=8)
    add = parser.add_argument
    add("--own", action="store_true", help="the slices of the course")
    add("--dp", type=int, default=1, help="replicas; the other ranks are tp")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add_checkpoint_options(parser)
    args = parser.parse_args()
    tp, left = divmod(WORLD_SIZE, args.dp)
    if left or args.batch_size % args.dp:
        stop(
            f"--dp {args.dp} has to divide the {WORLD_SIZE} ranks and --batch-size "
            f"{args.batch_size}"
        )
    if args.heads % tp or args.width % args.heads or LANGUAGE.symbols % tp:
        stop(
            f"{tp} ranks of tp, --heads {args.heads}, --width {args.width}: use 1, 2, "
            "4 or 8 ranks, and multiples: heads of the ranks, width of the heads"
        )
    if args.own and args.checkpoint:
        stop("--checkpoint: only PyTorch's slices can be saved. Leave out --own")
    return args


@record  # torchrun's report of a failure then has the traceback
def main() -> None:
    args = parse_arguments()
    train(args, join_group(args.backend))
    leave_at_once()


if __name__ == "__main__":
    main()
