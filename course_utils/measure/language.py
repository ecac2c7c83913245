"""A language whose best possible loss is known, and a small transformer to learn it.

    language = Language()
    sentences = language.sample(32, 33, torch.Generator().manual_seed(0))
    model = Transformer(language.symbols)
    next_symbol_loss(model, sentences)   # about log(8) = 2.08 before training
    language.best_loss(32)               # no model can do better than 1.17, on average

No file and no network is needed, and no sentence ever comes twice: a loss above the
best one is what the model has still to learn, and there is nothing to overfit.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from course_utils.measure.tensor_bytes import record_tensor_bytes


class Language:
    """Symbols of which each depends on the two before it, by a table of probabilities.

    A Markov chain of order 2. Its entropy follows from the table, without any sampling.

    Attributes:
        symbols: the number of different symbols.
        table: float64 [symbols, symbols, symbols]: table[a, b, c] is the probability of
            c after a and b.
        pairs: float64 [symbols, symbols]: how often the pair (a, b) comes.
        entropy: nats a symbol, for a predictor that knows the table and the two
            symbols before.
    """

    symbols = 8

    def __init__(self) -> None:
        symbols = self.symbols
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(
            symbols, symbols, symbols, dtype=torch.float64, generator=generator
        )
        self.table = (2 * scores).softmax(dim=-1)
        self.pairs = _stationary_pairs(self.table)
        self.entropy = _entropy(self.table, self.pairs)

    def best_loss(self, length: int) -> float:
        """The lowest mean cross-entropy that a predictor can reach, in nats a symbol.

        It sees 1, 2, ... `length` symbols, and predicts the one after them each time.
        At first it knows one symbol instead of two, which costs a little.
        """
        # How often b is followed by c, whatever was before b.
        following = torch.einsum("ab,abc->bc", self.pairs, self.table)
        count = following.sum(dim=-1, keepdim=True)
        first = _entropy(following / count, count.squeeze(-1))
        return (first + (length - 1) * self.entropy) / length

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Sentences: int64 [count, length], the same for the same generator state."""
        thresholds = self.table.cumsum(dim=-1)
        thresholds[..., -1] = 1.0  # and not a little less, by rounding
        first_pairs = torch.multinomial(
            self.pairs.flatten(), count, replacement=True, generator=generator
        )
        before, last = first_pairs // self.symbols, first_pairs % self.symbols
        chance = torch.rand(count, length, dtype=torch.float64, generator=generator)
        sentence = [before, last]
        for position in range(2, length):
            reached = thresholds[before, last] <= chance[:, position, None]
            before, last = last, reached.sum(dim=-1)
            sentence.append(last)
        return torch.stack(sentence[:length], dim=1)


def _stationary_pairs(table: Tensor) -> Tensor:
    """The frequencies of pairs that one step of the chain leaves as they are."""
    symbols = len(table)
    # A step leads from the pair (a, b) to (b, c).
    steps = torch.zeros(symbols, symbols, symbols, symbols, dtype=table.dtype)
    every = torch.arange(symbols)
    steps[:, every, every, :] = table
    steps = steps.reshape(symbols**2, symbols**2)
    # pairs @ steps = pairs is one equation short; that they sum to 1 is added to each.
    ones = torch.ones(symbols**2, dtype=table.dtype)
    equations = steps.T - torch.eye(symbols**2, dtype=table.dtype) + ones
    return torch.linalg.solve(equations, ones).view(symbols, symbols)


def _entropy(probabilities: Tensor, weights: Tensor) -> float:
    """The mean entropy of the rows [..., symbols], in nats, weighted by [...]."""
    rows = -(probabilities * probabilities.log()).sum(dim=-1)
    return (weights * rows).sum().item()


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each added to what it was given.

    Shape: [N, T, width] in and out.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the perceptron have to say."""
        each = self.queries_keys_values(self.norm1(x))
        n, t, _ = each.shape
        # The outputs of a head lie together, so that a rank can have some heads only.
        each = each.view(n, t, -1, 3, self.head_size)
        queries, keys, values = each.permute(3, 0, 2, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(n, t, -1))
        return x + self.perceptron(self.norm2(x))


class Transformer(nn.Module):
    """A small GPT: says at each position which symbol it expects next.

    No dropout, so that it computes the same on any number of ranks. No buffers, so that
    a model on the meta device needs its parameters filled in, and nothing else.

    Args:
        vocabulary: the number of symbols.
        width, layers, heads: `layers` blocks, each about 12 * width ** 2 parameters.
        context: the longest input, in symbols.
    """

    def __init__(
        self,
        vocabulary: int = 8,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        context: int = 32,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=1 / math.sqrt(width))

    def forward(self, symbols: Tensor) -> Tensor:
        """Scores [N, T, vocabulary] of what follows each of the symbols, int [N, T]."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.embedding(symbols) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_symbol_loss(model: nn.Module, sentences: Tensor) -> Tensor:
    """The mean cross-entropy of the predictions of all symbols but the first.

    Args:
        model: a Transformer, or what wraps one.
        sentences: int64 [N, T + 1]; the model sees the first T symbols.
    """
    scores = model(sentences[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1).float(), sentences[:, 1:].flatten())


def trained(
    wrap: Callable[[nn.Module], tuple[Any, Any, Callable]], steps: int = 5
) -> tuple[dict[str, Tensor], int]:
    """A transformer after some steps with a strategy. Every rank calls it.

    Each rank starts with other weights, and gets its own part of each batch. What the
    ranks must agree on is up to the strategy.

    Args:
        wrap: the strategy. Called with the module, it returns the model to call, the
            optimizer, and a function that returns the whole weights by name.
        steps: how many.

    Returns:
        The whole weights by name, and the bytes that this rank holds between steps.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    language = Language()
    torch.manual_seed(rank)
    with record_tensor_bytes() as record:
        model, optimizer, weights_of = wrap(Transformer(width=64, layers=4))
        for step in range(steps):
            batch = language.sample(16, 33, torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            next_symbol_loss(model, batch[rank::n]).backward()
            optimizer.step()
        del batch
        held = record.end
    return {name: value.clone() for name, value in weights_of().items()}, held


def beside(
    ranks: Any, wrap: Callable, other: Callable, steps: int = 5
) -> tuple[float, int]:
    """Train with two strategies, and compare them. Called in the notebook.

    Args:
        ranks: the `Ranks` to train on.
        wrap, other: the strategies, as for `trained`.
        steps: how many.

    Returns:
        How far the weights of the first are from those of the second, as a share of
        their length, on the rank where it is most; and the bytes that rank 0 holds with
        the first. Single weights say little: where a gradient is zero but for rounding,
        Adam makes a step of it.
    """
    results = ranks.run(trained, wrap, steps)
    expected, _ = ranks.run(trained, other, steps)[0]
    whole = parameters_to_vector(expected.values())
    gaps = [
        parameters_to_vector(weights[name] for name in expected) - whole
        for weights, _ in results
    ]
    return max(gap.norm().item() for gap in gaps) / whole.norm().item(), results[0][1]
