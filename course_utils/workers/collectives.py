"""Run each collective once, on a few numbers, and show what it does: one table.

On a laptop, four ranks:

    torchrun --nproc-per-node 4 course_utils/workers/collectives.py

The same with this course's own functions, made of send and recv, and their costs:

    torchrun --nproc-per-node 4 course_utils/workers/collectives.py --by-hand

One machine with 8 GPUs, the same file:

    torchrun --nproc-per-node 8 course_utils/workers/collectives.py --backend nccl

Two machines (nodes) with 8 GPUs each: type this on both; node0 is the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint node0:29500 \
        course_utils/workers/collectives.py --backend nccl

Rank 0 prints the table: for each collective and each rank, what it held before and
after. Every rank checks that it has got what it should.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.elastic.multiprocessing.errors import record

from course_utils.from_scratch import collectives as by_hand
from course_utils.theory import costs
from course_utils.workers.group import RANK, WORLD_SIZE, Options, join_group, stop


def run_all(use: Any, device: torch.device) -> Iterator[tuple[str, Any, Any, Any]]:
    """Call everything once, on every rank, in the same order.

    Args:
        use: `torch.distributed`, or a module with the same functions.

    Yields:
        The call, and of this rank: what it gave, what it has now, what it must have.
        Each of these is a tensor, a list of tensors, or None for nothing.
    """
    ranks = range(WORLD_SIZE)

    def number(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64, device=device)

    def only_on_rank_0(value: Any) -> Any:
        return value if RANK == 0 else None

    def blanks() -> list[Tensor]:
        return [number(-1) for _ in ranks]

    tensor = number(RANK)
    use.broadcast(tensor, 0)
    yield "broadcast from 0", number(RANK), tensor, number(0)

    given = only_on_rank_0([number(10 + r) for r in ranks])
    tensor = number(-1)
    use.scatter(tensor, given, 0)
    yield "scatter from 0", given, tensor, number(10 + RANK)

    tensors = only_on_rank_0(blanks())
    use.gather(number(RANK), tensors, 0)
    everybody = [number(r) for r in ranks]
    yield "gather to 0", number(RANK), tensors, only_on_rank_0(everybody)

    # After a reduce the other ranks have nothing that one could rely on: gloo leaves
    # partial results there.
    tensor, total = number(RANK + 1), number(sum(r + 1 for r in ranks))
    use.reduce(tensor, 0, ReduceOp.SUM)
    result, expected = only_on_rank_0(tensor), only_on_rank_0(total)
    yield "reduce SUM to 0", number(RANK + 1), result, expected

    for op, value in (
        (ReduceOp.SUM, sum(r + 1 for r in ranks)),
        (ReduceOp.PRODUCT, math.prod(r + 1.0 for r in ranks)),
        (ReduceOp.MIN, 1),
        (ReduceOp.MAX, WORLD_SIZE),
        (ReduceOp.AVG, (WORLD_SIZE + 1) / 2),
    ):
        tensor = number(RANK + 1)
        use.all_reduce(tensor, op)
        yield f"all_reduce {op.name}", number(RANK + 1), tensor, number(value)

    tensors = blanks()
    use.all_gather(tensors, number(RANK))
    yield "all_gather", number(RANK), tensors, everybody

    given, tensor = [number(10 * RANK + r) for r in ranks], number(-1)
    use.reduce_scatter(tensor, given, ReduceOp.SUM)
    expected = number(sum(10 * r + RANK for r in ranks))
    yield "reduce_scatter SUM", given, tensor, expected

    tensors = blanks()
    if use is dist:  # older gloo has all_to_all in this form only
        row = torch.cat(tensors)
        dist.all_to_all_single(row, torch.cat(given))
        tensors = [row]
    else:
        use.all_to_all(tensors, given)
    expected = [number(10 * r + RANK) for r in ranks]
    yield "all_to_all", given, tensors, expected

    use.barrier()
    yield "barrier", None, None, None


def as_text(value: Any) -> str:
    """The numbers of a tensor or of a list of them: ``0 1 2``; a dash for nothing."""
    if value is None:
        return "-"
    numbers = value if isinstance(value, Tensor) else torch.cat(value)
    return " ".join(f"{number:g}" for number in numbers.tolist())


def cost_of(title: str) -> str:
    """What the function by hand sends, in words."""
    name = title.split()[0]
    if name == "barrier":  # an all-reduce of 1 byte
        cost = costs.collective_cost("all_reduce_naive", WORLD_SIZE, 1)
    else:
        one_number = name in ("broadcast", "reduce", "all_reduce")
        size = 8 * (1 if one_number else WORLD_SIZE)  # of float64
        cost = costs.collective_cost(name, WORLD_SIZE, size)
    return f"{cost.messages} messages, {cost.nbytes:g} bytes, {cost.steps} steps"


def main_table(args: argparse.Namespace, device: torch.device) -> list[str]:
    """Run everything. Returns the lines of the table on rank 0, [] elsewhere."""
    use = by_hand if args.by_hand else dist
    blocks = []
    for title, before, after, expected in run_all(use, device):
        before, after, expected = map(as_text, (before, after, expected))
        if after != expected:
            sys.exit(
                f"collectives: {title}: rank {RANK} has {after}, expected {expected}"
            )
        rows = [None] * WORLD_SIZE if RANK == 0 else None
        dist.gather_object((before, after), rows, dst=0)
        blocks.append((title, rows))
    if RANK != 0:
        return []
    width = max(len(before) for _, rows in blocks for before, _ in rows)
    made_of = "made of send and recv" if args.by_hand else "of torch.distributed"
    on = f"{WORLD_SIZE} rank{'s' if WORLD_SIZE > 1 else ''}, {dist.get_backend()}"
    lines = [f"The collectives {made_of}: {on}"]
    lines.append(f"{'':18}  rank  {'before':{width}}  after")
    for title, rows in blocks:
        for r, (before, after) in enumerate(rows):
            name = title if r == 0 else ""
            lines.append(f"{name:18}  {r:4}  {before:{width}}  {after}")
        if args.by_hand:
            lines.append(f"{'':18}        {cost_of(title)}")
    lines.append(f"{len(blocks)} calls, each with the right result on every rank.")
    return lines


@record  # torchrun's report of a failure then has the traceback
def main() -> None:
    parser = Options(__doc__)
    parser.add_argument(
        "--by-hand", action="store_true", help="from_scratch/collectives.py, with gloo"
    )
    args = parser.parse_args()
    if args.by_hand and args.backend == "nccl":
        stop("--by-hand is for CPU tensors: use --backend gloo with it")
    device = join_group("gloo" if args.by_hand else args.backend, bind=True)
    for line in main_table(args, device):
        print(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
