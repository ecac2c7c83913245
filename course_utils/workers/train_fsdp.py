"""Train a small transformer with its memory split among the ranks, or with DDP.

With DDP every rank holds the whole model, all gradients and the whole optimizer. They
can be split among the ranks instead, so that a rank keeps only its part:

    --strategy ddp      nothing is                          torch's DDP
    --strategy zero1    the optimizer (ZeRO, stage 1)       course_utils/from_scratch
    --strategy zero2    and the gradients (stage 2)         course_utils/from_scratch
    --strategy fsdp     and the parameters (stage 3)        course_utils/from_scratch
    --strategy fsdp2    the same                            torch's fully_shard

The losses are the same with all of them. On a laptop, four ranks:

    torchrun --nproc-per-node 4 course_utils/workers/train_fsdp.py --strategy fsdp2

Save a checkpoint every 20 steps, and go on from the last one, with any number of ranks:

    torchrun --nproc-per-node 4 course_utils/workers/train_fsdp.py \
        --checkpoint .course/fsdp --steps 100
    torchrun --nproc-per-node 2 course_utils/workers/train_fsdp.py \
        --checkpoint .course/fsdp --steps 200 --resume

One machine with 8 GPUs, the same file, with a model of 1.2 billion parameters:

    torchrun --nproc-per-node 8 course_utils/workers/train_fsdp.py \
        --backend nccl --bf16 --width 2048 --layers 24 --lr 0.0003 --batch-size 256

Two machines (nodes) with 8 GPUs each: type this on both; node0 is the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint node0:29500 \
        course_utils/workers/train_fsdp.py --backend nccl --bf16 --batch-size 512

One process without torchrun, to see that the numbers are the same:

    python course_utils/workers/train_fsdp.py

Rank 0 prints a JSON line every 20 steps. "loss" is the mean since the line before, over
all ranks; "best_loss" is the lowest that a model can reach in this language;
"held_bytes" is what rank 0 keeps from step to step: parameters, gradients, optimizer.
--batch-size is the batch of all ranks together, so the loss does not depend on how many
they are. With --checkpoint DIR all ranks save together at each line. A folder that has
checkpoints is left alone, unless --resume says to go on from the last one: with as many
ranks or others, with the same strategy or another. (--resume without a checkpoint
says so, and starts anew; after the last of --steps it says that nothing is left.)
"""

import argparse
import contextlib
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from course_utils.from_scratch import fsdp
from course_utils.measure.language import Language, Transformer, next_symbol_loss
from course_utils.workers.checkpoints import (
    add_checkpoint_options,
    go_on_from,
    open_checkpoints,
    state_of,
)
from course_utils.workers.group import (
    LOCAL_RANK,
    RANK,
    WORLD_SIZE,
    Options,
    add_transformer_options,
    join_group,
    leave_at_once,
    stop,
)

LANGUAGE = Language()
LENGTH = 32  # predictions in a sentence

# With others the numbers would be others. With another strategy or number of ranks they
# are not, so a run may differ in those from the one that it goes on from.
SETTINGS = ("width", "layers", "heads", "batch_size", "lr", "clip", "seed", "bf16")


def make_model(args: argparse.Namespace) -> Transformer:
    """The whole model, the same on every call."""
    torch.manual_seed(args.seed)
    return Transformer(LANGUAGE.symbols, args.width, args.layers, args.heads, LENGTH)


def with_ddp(args: argparse.Namespace, device: torch.device) -> "Job":
    """Everything whole on every rank; the gradients are averaged."""
    model = make_model(args).to(device)
    gpu = [LOCAL_RANK] if device.type == "cuda" else None
    model = DistributedDataParallel(model, gpu, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return Job(model, optimizer)


def with_zero1(args: argparse.Namespace, device: torch.device) -> "Job":
    """ZeRO, stage 1: a rank keeps the optimizer state of its part of the parameters."""
    model = make_model(args).to(device)
    optimizer = fsdp.ShardedOptimizer(model, torch.optim.AdamW, lr=args.lr)
    return ZeroJob(model, optimizer)


def with_zero2(args: argparse.Namespace, device: torch.device) -> "Job":
    """Stage 2: and of the gradients its part, from when a block has them all."""
    model = make_model(args).to(device)
    optimizer = fsdp.ShardedGradients(
        model, torch.optim.AdamW, units=model.blocks, lr=args.lr
    )
    return ZeroJob(model, optimizer)


def with_fsdp(args: argparse.Namespace, device: torch.device) -> "Job":
    """Stage 3: and of the parameters its part. A block is whole while it computes."""
    model = make_model(args).to(device)
    compute = torch.bfloat16 if args.bf16 else None
    model = fsdp.FSDP(
        model, units=model.blocks, param_dtype=compute, reduce_dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return FsdpJob(model, optimizer)


def with_fsdp2(args: argparse.Namespace, device: torch.device) -> "Job":
    """Stage 3, by torch's fully_shard: a block is whole only while it computes."""
    with torch.device("meta"):
        model = make_model(args)  # shapes only: it takes no memory yet
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    policy = MixedPrecisionPolicy(
        torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32
    )
    for unit in (*model.blocks, model):  # what is in no block belongs to the model
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)  # memory for the shards
    # Only rank 0 has the whole model, once, in CPU memory. No GPU ever does.
    numbers = make_model(args).state_dict() if RANK == 0 else {}
    hand_out = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, numbers, options=hand_out)
    # After fully_shard: the optimizer must hold the sharded parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return Job(model, optimizer)


class Job:
    """A model on all ranks, and what updates it. Every rank makes every call.

    This is for torch's own strategies: DDP and fully_shard.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def update(self, max_norm: float) -> Tensor:
        """Clip the gradients and take a step. Returns the norm that they had.

        With shards each rank has a part of them. What counts is the norm of them all.
        """
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, under names that all strategies have in common."""
        return state_of(self.model, self.optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` was, on however many ranks."""
        go_on_from(state, self.model, self.optimizer)

    def held(self) -> list[Tensor]:
        """What this rank keeps from step to step: all but activations."""
        adam = getattr(self.optimizer, "optimizer", self.optimizer)
        parameters = [*self.model.parameters(), *adam.param_groups[0]["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [value for each in adam.state.values() for value in each.values()]
        return [*parameters, *gradients, *states]


class ZeroJob(Job):
    """The same for the ZeRO optimizers of course_utils/from_scratch/fsdp."""

    def update(self, max_norm: float) -> Tensor:
        return self.optimizer.step(max_norm)

    def state(self) -> dict[str, Any]:
        optimizer = fsdp.optimizer_state_dict(
            self.optimizer.flats, self.optimizer.optimizer
        )
        return whole_state(self.model.state_dict(), optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        fsdp.load_optimizer_state_dict(
            self.optimizer.flats, self.optimizer.optimizer, state["optimizer"]
        )


class FsdpJob(Job):
    """The same for the FSDP of course_utils/from_scratch/fsdp."""

    def update(self, max_norm: float) -> Tensor:
        norm = self.model.clip_grad_norm_(max_norm)
        self.optimizer.step()
        return norm

    def state(self) -> dict[str, Any]:
        return whole_state(
            self.model.state_dict(), self.model.optimizer_state_dict(self.optimizer)
        )

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.model.load_optimizer_state_dict(self.optimizer, state["optimizer"])


def whole_state(model: dict[str, Tensor], optimizer: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds, from whole tensors; each is in memory on every rank.

    A shard of flat parameters is not a part of any one parameter, and DCP could not
    fit such shards together for another number of ranks. Whole tensors fit any.
    """
    for name, value in model.items():
        # DCP fills tensors that are there. Before its first step Adam has none.
        nothing = {key: torch.zeros_like(value) for key in ("exp_avg", "exp_avg_sq")}
        optimizer["state"].setdefault(name, {"step": torch.tensor(0.0), **nothing})
    return {"model": model, "optimizer": optimizer}


STRATEGIES = {
    "ddp": with_ddp,
    "zero1": with_zero1,
    "zero2": with_zero2,
    "fsdp": with_fsdp,
    "fsdp2": with_fsdp2,
}


def sentences_of(step: int, args: argparse.Namespace) -> Tensor:
    """This rank's share of the batch of a step: int64 [batch_size / n, LENGTH + 1].

    All ranks draw the whole batch, and rank r of n takes the sentences r, r+n, r+2n ...
    Seed and step say all about it, so there is no state of a generator to save.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    batch = LANGUAGE.sample(args.batch_size, LENGTH + 1, generator)
    return batch[RANK::WORLD_SIZE]


def count_bytes(tensors: list[Tensor]) -> int:
    """The memory behind the tensors on this rank. What is shared counts once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The whole training, the same on every rank."""
    checkpoints, last = open_checkpoints(args, SETTINGS)
    job = STRATEGIES[args.strategy](args, device)
    if last:
        state = job.state()
        checkpoints.load(state)
        job.load_state(state)

    autocast = contextlib.nullcontext()
    if args.bf16 and args.strategy not in ("fsdp", "fsdp2"):  # these cast by themselves
        autocast = torch.autocast(device.type, torch.bfloat16)
    losses, start = [], time.perf_counter()
    for step in range(last + 1, args.steps + 1):
        sentences = sentences_of(step, args).to(device)
        with autocast:
            loss = next_symbol_loss(job.model, sentences)
        job.optimizer.zero_grad()
        loss.backward()
        norm = job.update(args.clip)
        losses.append(loss.detach())
        if step % args.every and step < args.steps:
            continue

        # This rank's loss is that of its share. The shares are equal in size, so the
        # mean of the ranks' means is the mean.
        mean = torch.stack(losses).mean() / WORLD_SIZE
        dist.all_reduce(mean)
        mean_loss = mean.item()  # waits for the GPU, if there is one
        seconds = time.perf_counter() - start
        symbols = len(losses) * args.batch_size * LENGTH
        metrics = {
            "step": step,
            "loss": mean_loss,
            "best_loss": LANGUAGE.best_loss(LENGTH),
            "grad_norm": norm.item(),
            "held_bytes": count_bytes(job.held()),
            "seconds": round(seconds, 3),
            "symbols_per_second": round(symbols / seconds),
            "strategy": args.strategy,
            "world_size": WORLD_SIZE,
            "backend": dist.get_backend(),
        }
        if RANK == 0:
            print(json.dumps(metrics), flush=True)
        if checkpoints:
            checkpoints.save(step, job.state())
        losses, start = [], time.perf_counter()
    if checkpoints:
        checkpoints.wait()


def parse_arguments() -> argparse.Namespace:
    parser = Options(__doc__, seed=0)
    add_transformer_options(parser, width=64, layers=2, heads=4)
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="fsdp2")
    add("--clip", type=float, default=1.0, help="longest gradient")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--seed", type=int, default=0)
    add_checkpoint_options(parser)
    args = parser.parse_args()
    if not args.lr >= 0:  # not a number, either
        stop(f"--lr {args.lr:g}: the learning rate is 0 or more")
    if not args.clip > 0:
        stop(f"--clip {args.clip:g}: the longest gradient is above 0")
    if args.width % args.heads:
        stop(
            f"--width {args.width} cannot be shared equally by {args.heads} heads. "
            f"Use a multiple of {args.heads}."
        )
    if args.batch_size % WORLD_SIZE:
        stop(
            f"--batch-size {args.batch_size} cannot be shared equally by {WORLD_SIZE} "
            f"ranks. Use a multiple of {WORLD_SIZE}."
        )
    return args


@record  # torchrun's report of a failure then has the traceback
def main() -> None:
    args = parse_arguments()
    device = join_group(args.backend)
    train(args, device)
    leave_at_once()


if __name__ == "__main__":
    main()
