"""Numbers that others have published, and what the course's formulas make of them.

Each row has its source. Where ours and theirs differ, the test says by how much: a
model of links does not know protocols. Figures of data sheets are in `test_costs.py`
(the bandwidth ladder), sizes of language models in `test_simulator.py`.
"""

import dataclasses
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed import constants
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from course_utils.from_scratch import ring, sgd
from course_utils.ranks import Ranks
from course_utils.theory import costs, simulator

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NCCL_TESTS = "NVIDIA/nccl-tests, doc/PERFORMANCE.md"
ML_ENGINEERING = "stas00/ml-engineering, network/benchmarks/README.md"
MEGATRON = "Narayanan et al., SC21, arXiv 2104.04473"
GPIPE = "Huang et al., arXiv 1811.06965, section 2.3"
GOYAL = "Goyal et al. 2017, arXiv 1706.02677"
ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054"
FSDP = "Zhao et al. 2023, arXiv 2304.11277"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
PATARASUK = "Patarasuk and Yuan, JPDC 69 (2009) 117-124"


# --- formulas -------------------------------------------------------------------

FORMULAS = [
    # (name, what we compute, what is published, largest difference, source)
    *[
        (f"ring: sent by each of {n} ranks / size", lambda n=n: ring_sends(n), value)
        + (5e-4, PATARASUK + ": 2(n-1)/n")
        for n, value in ((2, 1), (4, 1.5), (8, 1.75), (64, 1.969))
    ],
    *[
        (f"busbw / algbw of {name}, 8 ranks", lambda name=name: busbw_factor(name), v)
        + (0, NCCL_TESTS)
        for name, v in (
            ("all_reduce", 1.75),
            ("reduce_scatter", 0.875),
            ("all_gather", 0.875),
            ("all_to_all", 0.875),
            ("broadcast", 1),
            ("reduce", 1),
        )
    ],
    (
        "algbw of an 8 GPU all-reduce with busbw 480 GB/s",
        lambda: 480 / busbw_factor("all_reduce"),
        275,
        1,  # both are rounded: "~480", "~275"
        "github.com/NVIDIA/nccl-tests/issues/212, answer of NCCL's author",
    ),
    (
        "bubble / ideal time, 8 stages, 64 micro-batches",
        lambda: costs.bubble_of_ideal(8, 64),
        7 / 64,
        0,
        MEGATRON + ", section 2.2.1: (p-1)/m",
    ),
    (
        "bubble / whole time, 8 stages, 64 micro-batches",
        lambda: costs.bubble_of_total(8, 64),
        0.0986,
        5e-5,
        GPIPE + ": (K-1)/(M+K-1)",
    ),
    (
        "bubble / whole time, 4 stages, 16 micro-batches",
        lambda: costs.bubble_of_total(4, 16),
        0.158,
        5e-4,
        GPIPE,
    ),
    (
        "days to train 175e9 parameters with 300e9 tokens on 1024 GPUs",
        lambda: training_days(300e9, 175e9, gpus=1024, flops=140e12),
        34,
        0.15,  # 33.9
        MEGATRON + ", section 5.1",
    ),
    (
        "share of the peak: 502e15 operations/s on 3072 A100",
        lambda: 502e15 / 3072 / simulator.CLUSTERS["A100, InfiniBand"].flops,
        0.52,
        5e-3,  # 52.4 %
        MEGATRON + ", abstract",
    ),
    (
        "learning rate for a batch of 8192, if 256 have 0.1",
        lambda: sgd.linear_scaled_lr(0.1, 8192, 256),
        3.2,
        1e-12,
        GOYAL + ", section 2.1: 0.1 kn/256",
    ),
    (
        "parameters of ResNet-50",
        lambda: simulator.MODELS["ResNet-50"].parameters,
        25_557_032,
        0,
        "torchvision, ResNet50_Weights, num_params",
    ),
    (
        "bandwidth of an H100's NVLink, one way",
        lambda: simulator.CLUSTERS["H100, InfiniBand"].inside.bandwidth,
        450e9,
        0,
        "github.com/NVIDIA/nccl-tests/issues/212: 450 GB/s is the line rate",
    ),
    *[
        (
            f"GB of states on each GPU, 7.5e9 parameters, 64 GPUs, ZeRO stage {stage}",
            lambda stage=stage: zero_gb(7.5e9, 64, stage),
            value,
            0.05,  # printed with one digit
            ZERO + ", figure 1",
        )
        for stage, value in enumerate((120, 31.4, 16.6, 1.9))
    ],
    (
        "GB of states on each GPU, 1e12 parameters, 1024 GPUs, ZeRO stage 3",
        lambda: zero_gb(1e12, 1024, 3),
        15.6,
        0.05,
        ZERO + ", table 1, all of which is in test_costs.py",
    ),
    *[
        (
            f"billions of parameters in 32 GB on 64 GPUs, ZeRO stage {stage}",
            lambda stage=stage: 32 / zero_gb(1e9, 64, stage),
            value,
            0.05,
            ZERO + ", table 2, maximum theoretical model size, MP 1",
        )
        for stage, value in enumerate((2, 7.6, 14.4, 128))
    ],
    (
        "bytes that FSDP sends / bytes that DDP sends, 8 ranks",
        lambda: fsdp_sends() / ring_sends(8),
        1.5,
        1e-12,
        FSDP + ", section 3.2: 3M(W-1)/W against 2M(W-1)/W; " + ZERO + ", section 7",
    ),
    (
        "most of the parameters on a rank of 4, ten equal units / all of them",
        lambda: costs.fsdp_memory([1000] * 10, 4).parameter_peak / 40_000,
        1 / 4 + 1 / 10,
        1e-12,
        FSDP + ", section 3.2.1: the sum of all shards, and the largest unit",
    ),
    (
        "share of activations that selective recomputation saves, GPT-3",
        lambda: selective_saves(sequence=2048, width=12288, heads=96),
        0.70,
        5e-3,
        KORTHIKANTI + ", section 5",
    ),
    (
        "the same, MT-NLG 530B",
        lambda: selective_saves(sequence=2048, width=20480, heads=128),
        0.65,
        5e-3,
        KORTHIKANTI + ", section 5",
    ),
    *[
        (
            f"billions of parameters, {layers} layers of width {width}",
            lambda layers=layers, width=width: (
                costs.transformer_parameters(layers, width, 51_200, 2048) / 1e9
            ),
            value,
            0.05,
            MEGATRON + ", table 1",
        )
        for value, layers, width in (
            *((1.7, 24, 2304), (3.6, 30, 3072), (7.5, 36, 4096), (18.4, 40, 6144)),
            *((39.1, 48, 8192), (76.1, 60, 10240), (145.6, 80, 12288)),
            *((310.1, 96, 16384), (529.6, 105, 20480), (1008.0, 128, 25600)),
        )
    ],
]


def zero_gb(parameters: float, gpus: int, stage: int) -> float:
    return costs.zero_memory(parameters, gpus=gpus, stage=stage).total / costs.GB


def selective_saves(**sizes: int) -> float:
    kept, everything = (
        costs.activation_bytes(1, **sizes, recompute=recompute)
        for recompute in ("selective", "none")
    )
    return 1 - kept / everything


def ring_sends(n: int) -> float:
    """By the formula; it must be what the simulator's messages have, too."""
    size = 1e6
    sent = costs.collective_cost("all_reduce", n, size).most_sent / size
    node = simulator.CLUSTERS["A100 on PCIe, Ethernet"]
    cluster = dataclasses.replace(node, nodes=1, gpus_per_node=n)
    run = simulator.all_reduce(cluster, size, "ring")
    assert run.sent == pytest.approx([sent * size] * n)
    assert run.rounds == 2 * (n - 1)
    return sent


def fsdp_sends() -> float:
    """Each of 8 ranks, in a step / size of the parameters."""
    model = simulator.transformer(
        "untied", layers=2, width=64, vocabulary=100, tied=False
    )
    pod = simulator.CLUSTERS["A100, InfiniBand"]
    return simulator.fsdp_step(pod, model, 1).sent / (4 * model.parameters)


def busbw_factor(collective: str) -> float:
    return costs.bus_bandwidth_factor(collective, 8)


def training_days(
    tokens: float, parameters: float, *, gpus: int, flops: float
) -> float:
    seconds = costs.training_seconds(tokens, parameters, gpus=gpus, flops_per_gpu=flops)
    return seconds / 86_400


@pytest.mark.parametrize(
    ("compute", "published", "difference"),
    [pytest.param(*row[1:4], id=row[0]) for row in FORMULAS],
)
def test_formulas_give_the_published_number(compute, published, difference):
    assert compute() == pytest.approx(published, abs=difference, rel=1e-12)


@pytest.mark.parametrize(
    ("busbw", "algbw", "ranks"),
    [
        (376.71, 194.43, 32),  # 16 GiB on four nodes of 8 B200
        (365.99, 188.90, 32),  # 1 GiB, the same
        (142.90, 73.76, 32),  # 32 MiB, the same
        (91.69, 47.32, 32),  # a log of earlier hardware in the same place
    ],
)
def test_the_number_of_ranks_follows_from_a_line_of_a_benchmark(busbw, algbw, ranks):
    """busbw / algbw = 2(n-1)/n. Source: ml-engineering, network/benchmarks."""
    fitting = [
        n
        for n in range(2, 200)
        if algbw * costs.bus_bandwidth_factor("all_reduce", n)
        == pytest.approx(busbw, abs=0.015)
    ]
    assert fitting == [ranks], ML_ENGINEERING


# --- where a model of links and reality differ -----------------------------------


def test_eight_h100_are_simulated_a_fifth_too_fast():
    """NCCL reaches about 370 GB/s in a ring, where the links have 450.

    The difference is protocol overhead, "~20%", says NCCL's author in
    github.com/NVIDIA/nccl-tests/issues/212. He gives about 480 GB/s with NVLink SHARP:
    there the switches add up, and the figure does not tell the bytes on a link any
    more.
    """
    node = simulator.CLUSTERS["H100, InfiniBand"]
    nbytes = 16 * costs.GiB
    seconds = simulator.all_reduce(node, nbytes, "ring").seconds
    simulated = costs.bus_bandwidth("all_reduce", node.gpus, nbytes, seconds)
    assert simulated == pytest.approx(450e9, rel=0.001)
    assert 370e9 / simulated == pytest.approx(0.82, abs=0.005)
    assert 480e9 > simulated  # no ring over these links can be that fast


def test_four_nodes_of_h100_are_bound_by_their_network_cards():
    """One ring through 8 cards of 400 Gb/s: 400 GB/s busbw.

    Four nodes of B200 with as many and as fast cards were measured at 376.71 GB/s
    (16 GiB): ml-engineering, network/benchmarks. That is 6 % less than simulated.
    """
    pods = simulator.CLUSTERS["H100, InfiniBand"].with_nodes(4)
    nbytes = 16 * costs.GiB
    seconds = simulator.all_reduce(pods, nbytes, "ring").seconds
    simulated = costs.bus_bandwidth("all_reduce", pods.gpus, nbytes, seconds)
    assert 376.71e9 / simulated == pytest.approx(0.94, abs=0.01)


# --- what torch does -------------------------------------------------------------


def test_timeouts_are_half_an_hour_and_ten_minutes():
    """torch/distributed/constants.py; a build without nccl has no constant for it."""
    assert constants.default_pg_timeout.total_seconds() == 30 * 60
    if constants.default_pg_nccl_timeout is not None:
        assert constants.default_pg_nccl_timeout.total_seconds() == 10 * 60


def test_a_sampler_repeats_its_first_items_for_the_last_ranks():
    """10 items on 4 ranks. Source: torch/utils/data/distributed.py."""

    def shares(**options):
        return [
            list(DistributedSampler(range(10), 4, rank, shuffle=False, **options))
            for rank in range(4)
        ]

    assert shares() == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert shares(drop_last=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def real_buckets():
    """The bytes of each bucket of three steps of DDP, and the caps that it has."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)])
    model = DistributedDataParallel(model)
    steps = []

    def note(_, bucket):
        steps[-1].append(bucket.buffer().numel() * bucket.buffer().element_size())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, note)
    for _ in range(3):
        steps.append([])
        model(torch.zeros(1, 1024)).sum().backward()
    return steps, model.bucket_bytes_cap


def sent_by_a_real_ring(nbytes):
    """Bytes that this rank's all_reduce_ring hands to isend."""
    sent, isend = [], dist.isend

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return isend(tensor, *args, **kwargs)

    dist.isend = counting
    try:
        ring.all_reduce_ring(torch.zeros(nbytes, dtype=torch.uint8))
    finally:
        dist.isend = isend
    return sum(sent)


def test_buckets_and_bytes_of_real_ranks():
    """Twelve layers of Linear(1024, 1024), of 4.004 MiB each.

    Source: DistributedDataParallel's docstring (25 MiB), torch/csrc/distributed/c10d/
    reducer.cpp (a bucket is closed after it has reached its cap; with
    find_unused_parameters=False the first step has a single one, and the next ones
    follow the order in which gradients were ready).
    """
    with Ranks(2, quiet=True, timeout=60) as ranks:
        for steps, cap in ranks.run(real_buckets):
            first, *others = [[n / costs.MiB for n in step] for step in steps]
            assert first == pytest.approx([48.047], abs=5e-4)
            for step in others:
                assert step == pytest.approx([4.004, 28.027, 16.016], abs=5e-4)
            assert cap == costs.DDP_BUCKET == 26_214_400
        # Published: 2(n-1)/n of the size, which is all of it for two ranks.
        assert ranks.run(sent_by_a_real_ring, 1000) == [1000, 1000]
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == costs.DDP_FIRST_BUCKET == 1_048_576
    # The formula, with the gradients in the order in which they are ready.
    layer = [4 * 1024, 4 * 1024 * 1024]  # bias, weight
    found = costs.ddp_buckets(layer * 12)
    sizes = [sum((layer * 12)[i] for i in members) / costs.MiB for members in found]
    assert sizes == pytest.approx([4.004, 28.027, 16.016], abs=5e-4)
