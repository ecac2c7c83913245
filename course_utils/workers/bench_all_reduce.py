"""Measure an all-reduce, or another collective, as NVIDIA's nccl-tests do.

On a laptop, four ranks, from 1 KiB to 4 MiB, each size four times the one before:

    torchrun --nproc-per-node 4 course_utils/workers/bench_all_reduce.py \
        -b 1K -e 4M -f 4

One machine with 8 GPUs, the same file. (nccl-tests: all_reduce_perf -b 8 -e 8G -f 2
-g 8.)

    torchrun --nproc-per-node 8 course_utils/workers/bench_all_reduce.py \
        --backend nccl -b 8 -e 8G -f 2

Two machines (nodes) with 8 GPUs each: type this on both; node0 is the name of one:

    torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint node0:29500 \
        course_utils/workers/bench_all_reduce.py --backend nccl -b 8 -e 8G -f 2

The columns are those of nccl-tests:

    size    bytes of the whole array: for all_gather, reduce_scatter and all_to_all that
            is all pieces together. It is rounded down to whole pieces, at least one
            element each.
    count   elements of the tensor; for those three, of one piece
    time    of one call in microseconds: the mean over all timed calls and over all
            ranks, which is what nccl-tests report by default (-a 1). A rank that may
            go early, such as the root of a broadcast, makes it a little smaller.
    algbw   size / time in GB/s (10^9 bytes a second)
    busbw   algbw times a factor, such as 2(n-1)/n for all_reduce: comparable with the
            bandwidth of the link, whatever the number of ranks
    #wrong  elements with a wrong value, on all ranks, in one call with known numbers

All but all_to_all work in place. To check the elements, each rank needs memory for
three times the largest size, and for four times with all_to_all. With --json the lines
are JSON instead of a table; with --json FILE they go into the file as well. If an
element is wrong, the exit code is 1.

Sources: https://github.com/NVIDIA/nccl-tests, README.md (arguments) and
doc/PERFORMANCE.md (sizes, factors); src/common.cu (what is timed).
"""

import argparse
import json
import re
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from course_utils.theory import costs
from course_utils.workers.group import RANK, WORLD_SIZE, Options, join_group, stop

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "avg": torch.add,  # and a division at the end
}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
IN_PIECES = ("reduce_scatter", "all_gather", "all_to_all")
COLLECTIVES = ("all_reduce", "broadcast", "reduce", *IN_PIECES)
PIECE = 1 << 24  # elements that are compared at a time


def call(collective: str, array: Tensor, result: Tensor, op: dist.ReduceOp) -> None:
    """One call. `array` is all there is; `result` what this rank has afterwards."""
    if collective == "all_reduce":
        dist.all_reduce(array, op)
    elif collective == "broadcast":
        dist.broadcast(array, src=0)
    elif collective == "reduce":
        dist.reduce(array, dst=0, op=op)
    elif collective == "reduce_scatter":
        # Newer releases of torch have another name for it, and warn of this one.
        name = "reduce_scatter_single"
        getattr(dist, name, dist.reduce_scatter_tensor)(result, array, op)
    elif collective == "all_gather":
        mine = array.chunk(WORLD_SIZE)[RANK]
        name = "all_gather_single"
        getattr(dist, name, dist.all_gather_into_tensor)(array, mine)
    else:
        dist.all_to_all_single(result, array)


def result_of(collective: str, array: Tensor) -> Tensor:
    """Where the result of a call is: in the array itself, if that is possible."""
    if collective == "all_to_all":
        return torch.empty_like(array)
    if collective == "reduce_scatter":
        return array.chunk(WORLD_SIZE)[RANK]
    return array


def numbers_of(rank: int, like: Tensor) -> Tensor:
    """What a rank begins with: 1, 2, 1, 2, ... or 2, 1, 2, 1, ..."""
    numbers = torch.ones_like(like)  # nothing larger on the way: memory may be short
    numbers[(rank + 1) % 2 :: 2] = 2
    return numbers


def expected(collective: str, array: Tensor, op: str) -> Tensor:
    """What this rank must have after a call in which all began with `numbers_of`."""
    if collective == "broadcast" or (collective == "reduce" and RANK != 0):
        # After a reduce, the other ranks hold nothing that one could rely on.
        return numbers_of(0, array)
    if collective in ("all_gather", "all_to_all"):
        pieces = torch.empty_like(array)
        for rank, piece in enumerate(pieces.chunk(WORLD_SIZE)):
            which = rank if collective == "all_gather" else RANK
            piece.copy_(numbers_of(rank, array).chunk(WORLD_SIZE)[which])
        return pieces
    total = numbers_of(0, array)
    for rank in range(1, WORLD_SIZE):
        REDUCTIONS[op](total, numbers_of(rank, array), out=total)
    if op == "avg":
        total /= WORLD_SIZE
    return total.chunk(WORLD_SIZE)[RANK] if collective == "reduce_scatter" else total


def count_wrong(collective: str, array: Tensor, op: str) -> int:
    """Make one call with known numbers. Returns how many are wrong, on all ranks."""
    array.copy_(numbers_of(RANK, array))
    result = result_of(collective, array)
    call(collective, array, result, OPS[op])
    wrong = count_apart(result, expected(collective, array, op))
    if collective == "reduce" and RANK != 0:
        wrong.zero_()
    dist.all_reduce(wrong)
    return int(wrong)


def count_apart(result: Tensor, other: Tensor) -> Tensor:
    """How many elements differ. In pieces: isclose makes several copies of each."""
    pairs = zip(result.split(PIECE), other.split(PIECE), strict=True)
    return sum((~torch.isclose(*pair)).sum() for pair in pairs)


def seconds_of(collective: str, array: Tensor, op: str, args) -> float:
    """Seconds of one call: the mean of many, and then of all ranks.

    The calls follow each other at once; only the end is waited for, as in nccl-tests.
    """
    array.fill_(1)
    result = result_of(collective, array)
    for _ in range(args.warmup):
        call(collective, array, result, OPS[op])
    wait_for(array.device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(args.iters):
        call(collective, array, result, OPS[op])
    wait_for(array.device)  # a call to nccl returns before the GPU has done it
    seconds = torch.tensor(
        (time.perf_counter() - start) / args.iters,
        dtype=torch.float64,
        device=array.device,
    )
    dist.all_reduce(seconds)
    return seconds.item() / WORLD_SIZE


def wait_for(device: torch.device) -> None:
    """Until a GPU has done all that it has been given. On a CPU all is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def counts_of(args: argparse.Namespace) -> list[int]:
    """Elements of the array for each line: whole pieces, each number once."""
    step = WORLD_SIZE if args.collective in IN_PIECES else 1
    size, counts = args.minbytes, {}
    while size <= args.maxbytes:
        counts[max(1, size // (4 * step)) * step] = None
        size *= args.factor
    return list(counts)


def measure(elements: int, args: argparse.Namespace, device: torch.device) -> dict:
    """One line: the same on every rank."""
    array = torch.empty(elements, dtype=torch.float32, device=device)
    op = args.op or "sum"
    wrong = count_wrong(args.collective, array, op)
    seconds = seconds_of(args.collective, array, op, args)
    size = 4 * elements
    busbw = costs.bus_bandwidth(args.collective, WORLD_SIZE, size, seconds)
    return {
        "collective": args.collective,
        "size": size,
        "count": elements // (WORLD_SIZE if args.collective in IN_PIECES else 1),
        "type": "float",
        "redop": op if args.collective in REDUCING else "none",
        "time_us": seconds * 1e6,
        "algbw": costs.algorithm_bandwidth(size, seconds) / costs.GB,
        "busbw": busbw / costs.GB,
        "wrong": wrong,
        "iters": args.iters,
        "world_size": WORLD_SIZE,
        "backend": dist.get_backend(),
    }


def run(args: argparse.Namespace, device: torch.device, file) -> int:
    """All sizes. Rank 0 prints. Returns the number of wrong elements."""
    say = print if RANK == 0 else (lambda *words, **options: None)
    if args.json != "-":
        say(f"# {args.collective}, ranks: {WORLD_SIZE}, backend: {dist.get_backend()}")
        say(f"# calls to warm up: {args.warmup}, timed calls: {args.iters}")
        names = ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong")
        units = ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "")
        layout = "{:>12}  {:>12}  {:>6}  {:>6}  {:>10}  {:>8}  {:>8}  {:>6}"
        for line in (names, units):
            say("#" + layout.format(*line)[1:].rstrip())
    busbws, wrong = [], 0
    for elements in counts_of(args):
        row = measure(elements, args, device)
        busbws.append(row["busbw"])
        wrong += row["wrong"]
        if args.json == "-":
            say(json.dumps(row), flush=True)
            continue
        numbers = [f"{row['time_us']:.2f}", f"{row['algbw']:.3f}", f"{busbws[-1]:.3f}"]
        first = [row[name] for name in ("size", "count", "type", "redop")]
        say(layout.format(*first, *numbers, row["wrong"]), flush=True)
        if file:
            print(json.dumps(row), file=file, flush=True)
    if args.json != "-":
        say(f"# Avg bus bandwidth: {sum(busbws) / len(busbws):.3f} GB/s")
    return wrong


def parse_arguments() -> argparse.Namespace:
    parser = Options(__doc__, minbytes=4, factor=2, warmup=0)
    add = parser.add_argument
    add("-b", "--minbytes", type=parse_size, default="1K", help="first size: 8, 64K")
    add("-e", "--maxbytes", type=parse_size, default="4M", help="largest size: 4M, 1G")
    add("-f", "--factor", type=int, default=4, help="from one size to the next")
    add("-n", "--iters", type=int, default=20, help="timed calls for each size")
    add("-w", "--warmup", type=int, default=5, help="calls before those")
    add("--collective", choices=COLLECTIVES, default="all_reduce")
    add("-o", "--op", choices=tuple(OPS), help="of a reduction (default: sum)")
    add("--json", nargs="?", const="-", metavar="FILE", help="lines of JSON")
    args = parser.parse_args()
    if args.minbytes > args.maxbytes:
        stop(
            f"--minbytes {args.minbytes} is more than --maxbytes {args.maxbytes}: "
            "there is no size to measure"
        )
    if args.op and args.collective not in REDUCING:
        stop(f"--op is for {', '.join(REDUCING)}: {args.collective} reduces nothing")
    return args


def parse_size(text: str) -> int:
    """Bytes, where K, M and G are 2^10, 2^20 and 2^30 of them, as in nccl-tests."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: expected bytes as in 8, 64K, 4M or 1G"
        )
    return int(found[1]) * 1024 ** " KMG".index(found[2] or " ")


@record  # torchrun's report of a failure then has the traceback
def main() -> None:
    args = parse_arguments()
    file = None
    if RANK == 0 and args.json not in (None, "-"):
        try:
            file = open(args.json, "w")
        except OSError as error:
            stop(f"--json {args.json}: {error.strerror}")
    device = join_group(args.backend, bind=True)
    wrong = run(args, device, file)
    dist.destroy_process_group()
    if file:
        file.close()
    if wrong:
        stop(f"{wrong} elements are wrong")


if __name__ == "__main__":
    main()
