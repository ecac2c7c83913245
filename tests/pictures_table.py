"""Pictures to draw: typical and extreme data for every drawing, and what they say."""

import functools
import itertools
import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from course_utils import pictures, virtual_gpus
from course_utils.from_scratch import schedules
from course_utils.from_scratch.pipeline import ticks
from course_utils.measure.machine import Gpu, GpuPair, inspect_machine
from course_utils.measure.messages import Message
from course_utils.measure.snapshots import History, Moment
from course_utils.measure.tensor_bytes import TensorBytes
from course_utils.notebook.lessons import LESSONS
from course_utils.theory import costs, simulator
from course_utils.virtual_gpus.records import Interval, Timeline

LONG = "a name that is much longer than all the room there is for it in any picture "
NAN, INF = math.nan, math.inf
MiB, MB, GB = costs.MiB, costs.MB, costs.GB

# A lesson that is added to the course changes neither their size nor their texts.
NINE = LESSONS[:9]


def computer(cores=2, count=0, link=None, **changes):
    pairs = itertools.combinations(range(count if link else 0), 2)
    facts = {"cpu": "AMD EPYC", "cores": cores, "all_cores": cores}
    facts |= {"memory": 25_300_000_000, "physical_cores": None, "gpu_problem": ""}
    facts["gpus"] = [Gpu(i, "NVIDIA H200", 141 * 2**30) for i in range(count)]
    facts["links"] = [GpuPair(a, b, link(a, b)) for a, b in pairs]
    return SimpleNamespace(**{**facts, **changes})


def any_link(a, b):
    return ["NV1", "NV2", "PIX", "PXB", "PHB", "SYS", "XGMI"][(3 * a + b) % 7]


def scheduled(schedule, ranks, *args):
    orders = [schedule(rank, ranks, *args) for rank in range(ranks)]
    return simulator.pipeline_step(orders, {"F": 1e-3, "B": 2e-3, "W": 1e-3}).done


def run(epochs, worse=0.0):
    return [
        {
            "epoch": epoch,
            "loss": 2.3 / epoch + worse,
            "test_accuracy": 1 - 0.6 / (epoch + 1) - worse / 10,
        }
        for epoch in range(1, epochs + 1)
    ]


def losses(*values):
    rows = run(len(values))
    return [
        {**row, "loss": loss, "test_accuracy": 0.1}
        for row, loss in zip(rows, values, strict=True)
    ]


SKIPPED = [
    [(0.0, 0.2, "forward", "compute"), (0.2, 5.0, "all_reduce", "wait")],
    [(0.0, 0.3, "forward", "compute"), (0.3, 5.0, "all_reduce", "stuck")],
    [(0.0, 0.4, "forward", "compute")],
]

# --- devices --------------------------------------------------------------------------

_HELD = ("activations", "parameters", "gradients", "optimizer state", "other")
TWO = {
    "cuda:0": {"parameters": 5 * MiB, "gradients": 5 * MiB, "activations": 210 * MiB},
    "cuda:1": dict(zip(_HELD, (102e6, 92e6, 92e6, 92e6, 3e6), strict=True)),
}
_SENDS = [(0.05, 0.06, "transfer"), (0.21, 0.22, "transfer")]
NAIVE = {
    "cuda:0": [(0.00, 0.05, "forward"), *_SENDS, (0.22, 0.32, "backward")],
    "cuda:1": [(0.11, 0.21, "backward"), *_SENDS, (0.06, 0.11, "forward")],
}


def timeline(rows):
    """From device -> (start, stop, phase or "transfer", label)."""
    return Timeline(
        {
            device: tuple(
                Interval(device, start, stop, "send", "forward", *label)
                if kind == "transfer"
                else Interval(device, start, stop, "compute", kind, *label)
                for start, stop, kind, *label in row
            )
            for device, row in rows.items()
        }
    )


def step_seconds(micro_batches):
    return (micro_batches + 1) * (20e-3 / micro_batches + 0.5e-3)


TIMES = {m: step_seconds(m) for m in (1, 2, 4, 8, 16, 32)}


@functools.cache
def recorded(n):
    """The records of one training step with nn.DataParallel on virtual GPUs."""
    with virtual_gpus(n, compute="10 TFLOP/s", force=True) as gpus:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 5))
        x = torch.randn(32, 50)
        with gpus.record() as log:
            model.to("cuda:0")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            nn.DataParallel(model)(x).square().mean().backward()
            optimizer.step()
        return log.transfers, log.timeline()


LONE = Timeline({f"cuda:{k}": () for k in range(4)}, 1.0)

# --- messages, measurements -----------------------------------------------------------


def tree(n):
    pairs = [(k, p, p + 2**k) for k in range(4) for p in range(2**k)]
    return [Message(k + 1, p, q, 4 * MB) for k, p, q in pairs if q < n]


def ring(n):
    return [
        Message(step, rank, (rank + 1) % n, MB)
        for step in range(2 * (n - 1))
        for rank in range(n)
    ]


def measured(*collectives):
    """Times that the α–β model explains exactly; each collective is twice as slow."""
    return [
        {
            "collective": name,
            "world_size": 4,
            "size": size,
            "time_us": 1e6 * (1e-4 + size / 1e9) * 2**place,
        }
        for place, name in enumerate(collectives)
        for size in (4, 4096, 4 * MB, 64 * MB)
    ]


FIVE = ("broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FIT = costs.AlphaBeta(latency=60e-6, bandwidth=1.6e9)
SIZES = [4**k for k in range(1, 13)]
NOISY = [FIT.seconds(size) * (1 + 0.5 * (k % 3)) for k, size in enumerate(SIZES)]
GPUS = (8, 16, 64, 512, 1024, 10_000)


def curve(name, gpus=GPUS, factor=1.0):
    """Times that grow with the number of GPUs."""
    return [
        {"name": name, "gpus": number, "seconds": factor * 0.1 * (number / 8) ** 0.3}
        for number in gpus
    ]


def predictions(*ratios):
    sizes = (4096, 65536, 2**20, 2**24)[: len(ratios)]
    return [
        {
            "name": "ring",
            "nbytes": size,
            "predicted": (measured := 2e-3 + size / 4e8) / ratio,
            "measured": measured,
            "low": measured * 0.95,
            "high": measured * 1.05,
        }
        for size, ratio in zip(sizes, ratios, strict=True)
    ]


SHARES = [[*DistributedSampler(range(10), 4, r, shuffle=False)] for r in range(4)]
UNEVEN = [1e-3 * step for step in range(1, 21)]
ALMOST = [0.0, 0.0, *(1e-9 * step**2 for step in range(1, 19))]

# --- DDP and FSDP ---------------------------------------------------------------------


def ddp_step(*buckets, late=0.0):
    """Recorded times of a rank, in seconds: forward, backward, buckets, optimizer."""
    end = max([0.045, *(stop for _, stop in buckets)])
    return [
        (0.0, 0.012 + late, "forward", "forward"),
        (0.012 + late, 0.045 + late, "backward", "backward"),
        *(
            (start, stop, f"bucket {number}", "communicate")
            for number, (start, stop) in enumerate(buckets)
        ),
        (end, end + 0.003, "step", "optimizer"),
    ]


BUCKETS = ((0.018, 0.024), (0.026, 0.038), (0.033, 0.049), (0.045, 0.061))
POD = simulator.CLUSTERS["H100, InfiniBand"].with_nodes(16)
SLOW = simulator.ddp_step(POD, simulator.MODELS["ResNet-50"], 128, slow_gpus={3: 1.2})
MANY = simulator.ddp_step(POD, simulator.MODELS["GPT-2 XL"], 4096)
STAGES = {
    name: costs.zero_memory(7.5e9, gpus=64, stage=stage)
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"))
}
RECORD = TensorBytes(
    seconds=[0.2, 0.3, 0.4, 0.7, 1.1],
    nbytes=[100, 4000, 2000, 9000, 4000],
    spans=[("forward", 0.25, 0.6), ("backward", 0.6, 1.0), ("step", 1.0, 1.002)],
)
A = [[1.5, -2.0], [0.25, 4.0]]
SIMULATED = simulator.fsdp_step(
    simulator.CLUSTERS["A100, Ethernet"].with_nodes(1),
    simulator.transformer(
        "six layers", layers=6, width=4096, vocabulary=51200, tied=False
    ),
    4096,
)

RING = History(  # two ranks with one element in each of two chunks
    [
        [([1.0, 5.0], 0, 1, 1), ([1.0, 11.0], 1, 2, 1), ([3.0, 11.0],)],
        [([2.0, 6.0], 1, 2, 0), ([3.0, 6.0], 0, 1, 0), ([3.0, 11.0],)],
    ]
)


def ring_of(n):
    """n ranks that pass the one chunk on, once."""
    held = [1000.0 + i for i in range(4)]
    return History([[(held, 0, 4, (r + 1) % n), (held,)] for r in range(n)])


# --- every drawing, with typical and with extreme data --------------------------------

p = pictures
DRAWN = {
    "map of a learner": lambda: p.course_map(NINE, here="01"),
    "this machine": lambda: p.machine(inspect_machine()),
    "16 GPUs, every link": lambda: p.machine(computer(7, 16, any_link)),
    "a broken driver": lambda: p.machine(computer(1, gpu_problem=LONG)),
    "4 ranks": lambda: p.ranks_on_cores(4, 2),
    "1024 ranks": lambda: p.ranks_on_cores(1024, 2048),
    "four ways": lambda: p.four_ways(),
    "2 × 4, a guess": lambda: p.ranks_on_nodes(2, 4, asked=(1, 1), guess=4.0),
    "the ladder": lambda: p.bandwidth_ladder(),
    "14 GB, a guess": lambda: p.transfer_ladder(
        14e9, guess=0.035, guess_for="InfiniBand NDR"
    ),
    "a guess": lambda: p.guess_and_measured(2.0, 3.0, "s", "A first cell"),
    "a huge guess": lambda: p.guess_and_measured(1000, 1, "", "Torn off"),
    "bars": lambda: p.bars(
        {"1 thread": 1.2, "2 threads": 1.3, "your guess": 9.0}, "s", "Work", "A note."
    ),
    "unfair bars": lambda: p.bars(
        {"1 thread": 1.2}, "s", "Work", "A note.\nNot fair.", fair=False
    ),
    "all_reduce": lambda: p.collective(
        [[r, 10 + r] for r in range(4)], [[6, 46]] * 4, "all_reduce"
    ),
    "partial": lambda: p.collective(
        [[1], [2], [3]], [[6], [5], [3]], "reduce", op="SUM", root=0
    ),
    "all_to_all": lambda: p.collective(
        [[[10 * r + q] for q in range(3)] for r in range(3)],
        [[[10 * q + r] for q in range(3)] for r in range(3)],
        "all_to_all",
    ),
    "large tensors": lambda: p.collective(
        [[r + i / 7 for i in range(30)] for r in range(12)],
        [[-1234567.891 * i for i in range(30)]] * 12,
        "reduce_scatter_tensor",
    ),
    "tree on 5": lambda: p.message_steps(tree(5), 5, "Broadcast by a tree"),
    "ring on 4": lambda: p.message_steps(
        ring(4), 4, "Ring", parts={0: "reduce-scatter", 3: "all-gather"}
    ),
    "4 GPUs": lambda: p.data_parallel_steps(*recorded(4)),
    "a skipped all-reduce": lambda: p.timeline(SKIPPED, title="Rank 2 is gone"),
    "one moment": lambda: p.timeline([[(3, 3, LONG, "wait")], []], title=LONG),
    "naive": lambda: p.device_timeline(timeline(NAIVE), title="A naive split"),
    "a split": lambda: p.layers_on_devices(
        {"cuda:0": ["conv1", "layer1\n3 blocks"], "cuda:1": ["layer2\n4 blocks", "fc"]}
    ),
    "many layers": lambda: p.layers_on_devices(
        {f"cuda:{k}": [LONG, "b", "c"] for k in range(4)}
    ),
    "ticks": lambda: p.pipeline_ticks(ticks(2, 4)),
    "schedule": lambda: p.pipeline(scheduled(schedules.interleaved, 4, 8, 2)),
    "schedule of weights": lambda: p.pipeline(
        scheduled(schedules.zero_bubble, 8, 16), title=LONG
    ),
    "many ticks": lambda: p.pipeline_ticks(ticks(8, 17), title=LONG),
    "two ranks": lambda: p.overlap(
        {"rank 0": ddp_step(*BUCKETS), "rank 1": ddp_step(*BUCKETS, late=2e-3)}
    ),
    "many buckets": lambda: p.overlap(p.step_events(MANY)),
    "FSDP": lambda: p.fsdp_schedule(SIMULATED),
    "two devices": lambda: p.device_memory(TWO, capacity=320 * MiB, title="The peak"),
    "stages": lambda: p.memory_per_gpu(STAGES, title="7.5 billion parameters"),
    "a record": lambda: p.memory_over_time({"FSDP": RECORD}),
    "10 items": lambda: p.partition(SHARES, 10),
    "shards": lambda: p.flat_shards([("fc.weight", 12), ("fc.bias", 3)], 4),
    "30 buckets": lambda: p.ddp_buckets(
        [
            [(f"blocks.{k}.layer.{i}.weight", (i + 1) * 4096) for i in range(40)]
            for k in range(30)
        ]
    ),
    "3 equal curves": lambda: p.training_curves(
        {"1 rank": run(8), "2 ranks": run(8), "4 ranks": run(8)}
    ),
    "mean and sum": lambda: p.training_curves(
        {"one process": run(2), "mean": run(2), "sum": losses(2.3, 2.25)}
    ),
    "diverges": lambda: p.training_curves(
        {"a": run(4), "b": losses(15, 180, 9e5, 4e6)}
    ),
    "becomes nan": lambda: p.training_curves(
        {"a": run(4), "b": losses(15, 8, NAN, NAN)}
    ),
    "differences": lambda: p.difference_by_step(
        {"equal": ALMOST, "uneven": UNEVEN, "BatchNorm": UNEVEN[::-1]}
    ),
    "0 and nan": lambda: p.difference_by_step(
        {"mean": [0.0] * 5, "sum": [0.1, 40.0, INF, NAN, NAN]}
    ),
    "learning rates": lambda: p.learning_rates(
        {"1 rank": [0.1] * 40, "warm-up": [0.1 + 0.03 * k for k in range(10)] + [0.4]}
    ),
    "message times": lambda: p.transfer_times(SIZES, NOISY, FIT),
    "micro-batches": lambda: p.micro_batch_times(
        TIMES, step_seconds, best=6.3, one_device=0.04
    ),
    "sliced": lambda: p.sliced_linear([1, 2], A, [[1.5, -2.0], [0.5, 8]], cut="rows"),
    "columns": lambda: p.sliced_linear([1, 2], A, [[2.0], [6]], cut="columns"),
    "scaling": lambda: p.scaling([*curve("ring"), *curve("tree", GPUS[:3], 0.7)]),
    "six curves": lambda: p.scaling(
        [
            row
            for k in range(6)
            for row in curve(f"{k} {LONG}", range(8, 200, 8), 1 + k)
        ],
        title=LONG,
    ),
    "close": lambda: p.predicted_and_measured(predictions(1.02, 0.97, 1.1, 1)),
    "five collectives": lambda: p.collective_bandwidth(measured(*FIVE)),
    "one rank": lambda: p.torchrun_ranks(1, 1, 0),
    "64 ranks": lambda: p.torchrun_ranks(8, 8, 99),
    "no root 9": lambda: p.collective_call("gather", 8, root=9),
    "barrier": lambda: p.collective_call("barrier", 1),
    **{f"ring of {n}": functools.partial(p.ring_step, ring_of(n)) for n in range(1, 9)},
    "7.5 billion": p.memory_by_stage,
    "1 trillion": lambda: p.memory_by_stage("1 trillion", 1024),
    "32 groups": lambda: p.mesh(pp=2, dp=4, tp=8, axis="pp"),
    "1,024 GPUs": p.what_if,
    "one slow GPU": lambda: p.what_if(nodes=1, slowdown_of_one_gpu=4.0),
}

# --- what they say: the numbers that were drawn ---------------------------------------

SAID = {
    "map of a learner": "You are here: 01 GPUs, nodes and ranks.",
    "16 GPUs, every link": "NVLink (1 to 2 links), not every pair; PCIe, through one ",
    "4 ranks": "4 ranks take turns on 2 cores: slower, but with the same results.",
    "2 × 4, a guess": "It is rank 5. You said 4, which is another GPU.",
    "a skipped all-reduce": "rank 1: compute 0.3, stuck 4.7; rank 2: compute 0.4.",
    "a record": "FSDP: measured peak 9 kB, at the end 4 kB.",
    "3 equal curves": "93.3 % after 8 epochs. The runs are equal in every epoch.",
    "mean and sum": "loss from one process in an epoch: mean: 0; sum: 1.1.",
    "differences": "equal. First above it at step 1: uneven and BatchNorm.",
    "0 and nan": "Always 0: mean. First above 1e-06 at step 1: sum.",
    "message times": "Fitted: latency 60 µs, bandwidth 1.6 GB/s. The largest error of ",
    "close": "within the A/A band at 3 of 4 sizes. Farthest off at 1.05 MB: predicted ",
    "five collectives": "749 MB/s at 64 MB; fitted latency 200 µs, latency-bound below",
}

# --- what cannot be drawn, and the telling words of what is said then -----------------

_TIMED = measured("all_reduce")[0]
WRONG = {
    "no lesson '09'": lambda: p.course_map(NINE, here="09"),
    "world_size is 0": lambda: p.ranks_on_cores(0, 1),
    "nbytes is 0": lambda: p.transfer_ladder(0),
    "measured is -1": lambda: p.guess_and_measured(1, -1, "s", ""),
    "measured is inf": lambda: p.guess_and_measured(1, INF, "s", ""),
    "There are 0 values": lambda: p.bars({}, "s", ""),
    "before[1] is 'two'": lambda: p.collective([1, "two"], [1, 2], "x"),
    "after[0] is [[[1]]]": lambda: p.collective([1], [[[[1]]]], "x"),
    "there is no message": lambda: p.message_steps([], 2),
    "rank 2 sends or receives": lambda: p.message_steps(tree(3), 2),
    "Nothing was scattered": lambda: p.data_parallel_steps([], LONE),
    "no rank has an interval": lambda: p.timeline([[], []]),
    "no kind 'sleep'": lambda: p.timeline([[(0, 1, "x", "sleep")]]),
    "no device did anything": lambda: p.device_timeline(LONE),
    "no category 'weights'": lambda: p.device_memory({"a": {"weights": 1}}, capacity=1),
    "An index of rank 1 is 3": lambda: p.partition([[0], [3]], 3),
    "for 2 ranks": lambda: p.sliced_linear([1], [[1]], [[1], [1]], cut="rows"),
    "no cut 'column'": lambda: p.sliced_linear([1], [[1]], [[1]], cut="column"),
    "world_size is 1": lambda: p.collective_bandwidth([{**_TIMED, "world_size": 1}]),
    "rank is -1: expected": lambda: p.torchrun_ranks(2, 4, -1),
    "no collective 'allreduce'": lambda: p.collective_call("allreduce"),
    "step is 3: expected": lambda: p.ring_step(RING, 3),
    "1 rank with 33": lambda: p.ring_step(History([[Moment([1.0] * 33)]])),
    "gpus is 0": lambda: p.memory_by_stage(gpus=0),
    "no cluster 'H100'": lambda: p.what_if("H100"),
}
