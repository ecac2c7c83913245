"""Models of published sizes: what they compute, and how many parameters they have.

Notebooks use it as `costs.transformer_shape("GPT-2 XL")`, `simulator.MODELS` and so on.
Needs the standard library alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from course_utils.theory.arguments import Count, Whole, checked, named

# --- sizes of transformers ------------------------------------------------------


@checked
def transformer_parameters(
    layers: Count, width: Count, vocabulary: Count, positions: Whole = 0
) -> int:
    """Parameters of a GPT: `12Lh² + 13Lh + 2h + (V + positions)h`.

    It has L layers of width h, a vocabulary of V tokens, and learned positions. A layer
    has 4h² weights in its attention and 8h² in its two linear layers of width 4h, 9h
    biases, and two norms of 2h. One more norm follows. The output layer has the weights
    of the embedding.

        >>> f"{transformer_parameters(12, 768, 50257, 1024):,}"
        '124,439,808'

    Source: Narayanan et al., SC21, arXiv 2104.04473, equation 2, which leaves out the
    last norm. The tests count those of a real model.
    """
    h = width
    return 12 * layers * h**2 + 13 * layers * h + 2 * h + (vocabulary + positions) * h


@dataclass(frozen=True)
class TransformerShape:
    """A GPT of a published size.

    It knows `vocabulary` tokens and can see `positions` at once, each of which has a
    learned vector.
    """

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    source: str

    @property
    def parameters(self) -> int:
        """How many it has."""
        return transformer_parameters(
            self.layers, self.width, self.vocabulary, self.positions
        )


_GPT2 = 50257, 1024, "Radford et al. 2019, table 2, and the authors' code"
_MEGATRON = 51200, 2048, "Narayanan et al., SC21, arXiv 2104.04473, table 1"

# From the smallest to the largest.
TRANSFORMERS: tuple[TransformerShape, ...] = (
    TransformerShape("GPT-2 small", 12, 768, 12, *_GPT2),
    TransformerShape("GPT-2 XL", 48, 1600, 25, *_GPT2),
    TransformerShape("1.7 billion", 24, 2304, 24, *_MEGATRON),
    TransformerShape("3.6 billion", 30, 3072, 32, *_MEGATRON),
    TransformerShape("7.5 billion", 36, 4096, 32, *_MEGATRON),
    TransformerShape("18.4 billion", 40, 6144, 48, *_MEGATRON),
    TransformerShape("39.1 billion", 48, 8192, 64, *_MEGATRON),
    TransformerShape("76.1 billion", 60, 10240, 80, *_MEGATRON),
    TransformerShape("145.6 billion", 80, 12288, 96, *_MEGATRON),
    TransformerShape("310.1 billion", 96, 16384, 128, *_MEGATRON),
    TransformerShape("529.6 billion", 105, 20480, 128, *_MEGATRON),
    TransformerShape("1 trillion", 128, 25600, 160, *_MEGATRON),
)


def transformer_shape(name: str) -> TransformerShape:
    """The one of `TRANSFORMERS` with that name. A `ValueError` lists the names."""
    return named(name, "transformer", TRANSFORMERS)


# --- what a step computes -------------------------------------------------------


@dataclass(frozen=True)
class ModelLayer:
    """A part of a model: what computes, and which parameters it has.

    Attributes:
        parameters: How many it has.
        flops: Of its forward pass, for one sample. Its backward pass has twice as many:
            gradients of its input and of its parameters.
        tensors: How many numbers each of its parameter tensors has, in their order. By
            default they are one tensor.
    """

    parameters: int
    flops: float
    tensors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tensors and self.parameters:
            object.__setattr__(self, "tensors", (self.parameters,))


@dataclass(frozen=True)
class Model:
    """What a training step of a model computes and exchanges.

    Attributes:
        name: For a reader.
        layers: In the order of the forward pass.
        sample: What a sample is: "image", or "token".
        source: Where the figures are from.
    """

    name: str
    layers: tuple[ModelLayer, ...]
    sample: str
    source: str = ""

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Of one training step with one sample: forward and backward."""
        return 3 * math.fsum(layer.flops for layer in self.layers)


@checked
def transformer(
    name: str, *, layers: Count, width: Count, vocabulary: Count, tied: bool = True
) -> Model:
    """A decoder-only transformer, with 12·width² parameters a layer.

    These are in four matrices, as in GPT-2: for queries, keys and values together, for
    the output of attention, and two for the network behind it, of 4·width hidden units.

    A token takes 2 floating point operations a parameter forward. Attention itself,
    biases and normalisation are left out, as in J. Kaplan et al., "Scaling Laws for
    Neural Language Models", arXiv 2001.08361, section 2.1.

    Args:
        name, layers, width, vocabulary: Of the transformer.
        tied: Whether the output layer shares its weights with the embedding, as in a
            GPT-2: their gradient is ready last. Else it has weights of its own.
    """
    matrices = (3 * width**2, width**2, 4 * width**2, 4 * width**2)
    block = ModelLayer(sum(matrices), 2 * sum(matrices), matrices)
    embedding = vocabulary * width
    output = ModelLayer(0 if tied else embedding, 2 * embedding)
    return Model(
        name,
        (ModelLayer(embedding, 0.0), *[block] * layers, output),
        "token",
        f"{layers} layers of width {width}, {vocabulary:,} tokens",
    )


def _gpt2(name: str) -> Model:
    shape = transformer_shape(name)
    sizes = {"layers": shape.layers, "width": shape.width}
    return transformer(name, **sizes, vocabulary=shape.vocabulary)


def _bottleneck(inputs: int, width: int) -> tuple[int, ...]:
    """The tensors of a block of a ResNet-50: convolutions, each with its BatchNorm."""
    outputs = 4 * width
    convolutions = [(inputs * width, width), (9 * width**2, width)]
    convolutions.append((width * outputs, outputs))
    if inputs != outputs:  # the first block of a stage: also on the way around
        convolutions.append((inputs * outputs, outputs))
    return tuple(n for weights, out in convolutions for n in (weights, out, out))


# The tensors, and millions of multiply-adds for an image of 224 x 224 pixels: the stem,
# 16 blocks, the classifier.
_RESNET_50 = (
    ((9_408, 64, 64), 118.013952),
    (_bottleneck(64, 64), 231.211008),
    *[(_bottleneck(256, 64), 218.365952)] * 2,
    (_bottleneck(256, 128), 372.506624),
    *[(_bottleneck(512, 128), 218.365952)] * 3,
    (_bottleneck(512, 256), 372.506624),
    *[(_bottleneck(1024, 256), 218.365952)] * 5,
    (_bottleneck(1024, 512), 372.506624),
    *[(_bottleneck(2048, 512), 218.365952)] * 2,
    ((2_048_000, 1_000), 2.048),
)
_RESNET = Model(
    "ResNet-50",
    tuple(ModelLayer(sum(t), 2e6 * madds, t) for t, madds in _RESNET_50),
    "image",
    "torchvision.models.resnet50, counted with torch.utils.flop_counter",
)

MODELS: Mapping[str, Model] = MappingProxyType(
    {model.name: model for model in (_RESNET, _gpt2("GPT-2 small"), _gpt2("GPT-2 XL"))}
)
