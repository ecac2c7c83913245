"""What hardware can do, and who says so: the links of GPUs, and their memory.

Notebooks use all of it as `costs.LADDER`, `costs.card("H100")`, `costs.GB` and so on.
Sizes are bytes, bandwidths are bytes a second. Needs the standard library alone.
"""

from dataclasses import dataclass
from typing import Literal

from course_utils.theory.arguments import NotNegative, checked, named

# Decimal units count in thousands, binary units in 1024s (IEC 80000-13). Bandwidths
# and disks are given in decimal units, `nvidia-smi` and PyTorch's memory in binary.
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40


@checked
def gigabits(number: NotNegative) -> float:
    """Bytes in that many gigabits: `gigabits(400)` is 50e9.

    Networks are sold in bits (Gb/s, small b), memory and buses in bytes (GB/s).
    """
    return number * GB / 8


_A100 = "NVIDIA A100 datasheet, A100 80GB SXM"
_H100 = "NVIDIA H100 datasheet, H100 SXM"
_H200 = "NVIDIA H200 datasheet, H200 SXM"


# --- the bandwidth ladder -------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One way for bytes to move, and how fast it is at most.

    Attributes:
        name: For a reader, such as "NVLink 4 (H100)".
        place: Where it is.
        stated: The speed in the words of those who sell it, with their unit.
        bytes_per_second: The same in bytes a second.
        direction: What that figure counts. "one way": each direction has as much.
            "both ways together": a direction has half of it. "shared": reads and
            writes share it, and either may take all of it.
        source: Where the figure is from.
    """

    name: str
    place: Literal["in a GPU", "in a node", "between nodes"]
    stated: str
    bytes_per_second: float
    direction: Literal["one way", "both ways together", "shared"]
    source: str

    @property
    def one_way(self) -> float:
        """Bytes a second from here to there: the bandwidth for `transfer_seconds`."""
        both = self.direction == "both ways together"
        return self.bytes_per_second / (2 if both else 1)


def _memory(name: str, figure: float, unit: str, source: str) -> Link:
    nbytes = figure * {"TB": TB, "GB": GB}[unit]
    stated = f"{figure:,} {unit}/s"
    return Link(name, "in a GPU", stated, nbytes, "shared", source)


def _nvlink(name: str, gigabytes: int, sheet: str, gpu: str) -> Link:
    paper = f"NVIDIA {gpu} Tensor Core GPU Architecture white paper"
    source = f"{sheet}; that both ways count: {paper}"
    figures = f"{gigabytes} GB/s", gigabytes * GB
    return Link(name, "in a node", *figures, "both ways together", source)


def _pcie(generation: int, giga: int) -> Link:
    """A slot of 16 lanes. Of 130 bits on a lane, 128 are data."""
    return Link(
        f"PCIe Gen{generation} x16",
        "in a node",
        f"{giga} GT/s a lane, 16 lanes",
        16 * gigabits(giga) * 128 / 130,
        "one way",
        f"PCI Express Base Specification {generation}.0: {giga} GT/s a lane and "
        "direction, 128b/130b encoding",
    )


def _network(name: str, rate: int, source: str) -> Link:
    stated = f"{rate} Gb/s"
    return Link(name, "between nodes", stated, gigabits(rate), "one way", source)


_NDR = "NVIDIA DGX SuperPOD cabling guide, NDR overview: 4 lanes of "
_ETHERNET = "IEEE 802.3: the rate is the name; full duplex"

# From the fastest to the slowest in each place.
LADDER: tuple[Link, ...] = (
    _memory("HBM3e (H200)", 4.8, "TB", _H200),
    _memory("HBM3 (H100)", 3.35, "TB", _H100),
    _memory("HBM2e (A100 80GB)", 2039, "GB", _A100),
    _nvlink("NVLink 4 (H100, H200)", 900, _H100, "H100"),
    _nvlink("NVLink 3 (A100)", 600, _A100, "A100"),
    _pcie(5, 32),
    _pcie(4, 16),
    _network("InfiniBand NDR", 400, _NDR + "100 Gb/s"),
    _network("InfiniBand HDR", 200, _NDR + "50 Gb/s"),
    *(_network(f"{n} Gigabit Ethernet", n, _ETHERNET) for n in (400, 100, 10)),
)


def link(name: str) -> Link:
    """The rung of the `LADDER` with that name. A `ValueError` lists the names."""
    return named(name, "link", LADDER)


# --- the memory of a GPU --------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A GPU, and the memory it has.

    Attributes:
        name: For a reader.
        stated: The memory in the words of those who sell it.
        nbytes: The total that nvidia-smi reports. It is more than what is stated in
            decimal GB, and the first CUDA call of a process takes some hundred MB.
        source: Where both figures are from.
    """

    name: str
    stated: str
    nbytes: int
    source: str


def _card(name: str, gigabytes: int, mib: int, sheet: str, seen: str = "") -> Card:
    stated = f"{gigabytes} GB"
    source = f"{sheet}: {stated}; nvidia-smi{seen and f' ({seen})'}: {mib} MiB"
    return Card(name, stated, mib * MiB, source)


_MODAL = "github.com/modal-labs/modal-client/pull/2797"
_VLLM = "github.com/vllm-project/vllm/issues/7553"

# From the smallest to the largest.
CARDS: tuple[Card, ...] = (
    _card("T4", 16, 15_360, "NVIDIA T4 datasheet", _MODAL),
    _card("RTX 4090", 24, 24_564, "NVIDIA GeForce RTX 4090 specifications", _VLLM),
    _card("A100 40GB", 40, 40_960, "NVIDIA A100 datasheet, 40GB SXM", _MODAL),
    _card("H100", 80, 81_559, _H100, _MODAL),
    _card("A100 80GB", 80, 81_920, _A100, _MODAL),
    _card("H200", 141, 143_771, _H200),
)


def card(name: str) -> Card:
    """The one of `CARDS` with that name. A `ValueError` lists the names."""
    return named(name, "card", CARDS)
