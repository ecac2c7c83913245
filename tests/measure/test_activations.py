"""``activations.py``: the layer keeps what `costs.activation_bytes` says."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils.measure.activations import Layer, kept_bytes
from course_utils.theory import costs


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_keep_what_the_formula_says(recompute, dtype):
    b, s, h, a, v = 2, 128, 256, 4, 1000
    layer, norm, head = Layer(h, a), nn.LayerNorm(h), nn.Linear(h, v, bias=False)
    modules = nn.ModuleList([layer, norm, head]).to(dtype)
    if recompute == "selective":
        layer.attention = partial(checkpoint, layer.attention, use_reentrant=True)
    once = partial(checkpoint, layer, use_reentrant=True)
    x = torch.randn(b, s, h, dtype=dtype, requires_grad=True)

    def several(layers):
        y = x
        for _ in range(layers):
            y = once(y) if recompute == "full" else layer(y)
        return y

    def loss():
        scores = head(norm(several(3))).float().view(-1, v)
        return F.cross_entropy(scores, torch.zeros(b * s, dtype=torch.long))

    options = {"recompute": recompute, "element_bytes": x.element_size()}
    formula = partial(costs.activation_bytes, b, s, h, a, **options)
    for layers in (1, 3):
        saved = kept_bytes(lambda layers=layers: several(layers), modules)
        assert saved == pytest.approx(formula(layers=layers), rel=0.01), layers
    expected = formula(layers=3, vocabulary=v)
    assert kept_bytes(loss, modules) == pytest.approx(expected, rel=0.01)


def test_its_attention_is_that_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "native_dropout", lambda x, p, train: (x, None))
    torch.manual_seed(0)
    layer = Layer(8, heads=2)
    other = torch.nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    parts = (layer.queries_keys_values, layer.out, layer.up, layer.down)
    values = [value for part in parts for value in part.parameters()]
    with torch.no_grad():  # the others are those of norms, as new
        for theirs, ours in zip(other.parameters(), values, strict=False):
            theirs.copy_(ours)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(layer(x), other(x))


def test_what_needs_no_gradient_keeps_nothing():
    with pytest.raises(ValueError, match="the result needs no gradient"):
        kept_bytes(lambda: torch.ones(1) * 2, nn.Linear(1, 1))
