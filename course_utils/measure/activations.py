"""A transformer layer as the formula for activations has it, and what it keeps.

    layer = Layer(width=256, heads=4).bfloat16()
    x = torch.randn(2, 128, 256, dtype=torch.bfloat16)
    kept_bytes(lambda: layer(x), layer)

`costs.activation_bytes` is the formula. Source: Korthikanti et al., arXiv 2205.05198,
section 4.1: LayerNorm, attention, LayerNorm, perceptron, and dropout in three places.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Attention and a perceptron, each added to its input. Every tensor is plain.

    No mask hides later tokens: filling it in keeps nothing that the formula counts.

    Args:
        width: h, a multiple of `heads`.
        heads: a.

    Shape: [batch, tokens, width] in and out.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the perceptron have to say."""
        each = self.queries_keys_values(self.norm1(x))
        b, s, _ = each.shape
        each = each.view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = (part.contiguous() for part in each)
        seen = self.attention(q, k, v)
        x = x + _drop(self.out(seen.transpose(1, 2).reshape(b, s, -1)))
        return x + _drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mix the values; all are [batch, heads, tokens, width / heads]."""
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return _drop(scores.softmax(-1)) @ v


def _drop(x: Tensor) -> Tensor:
    # F.dropout on a CPU keeps a mask of x's dtype. This one has a byte for a number, as
    # the formula counts it, and as it is on a GPU.
    return torch.native_dropout(x, 0.1, True)[0]


def kept_bytes(forward: Callable[[], Tensor], modules: nn.Module) -> int:
    """Bytes that a forward pass keeps for its backward, without those of parameters.

    What several layers keep of the same memory counts once.
    """
    own = {p.untyped_storage().data_ptr() for p in modules.parameters()}
    saved = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()  # kept, so that no address is used twice
    if not result.requires_grad:
        raise ValueError("Nothing is kept: the result needs no gradient.")
    return sum(saved.values())
