"""``activations.py``: the layer keeps what the formula says."""

import pytest
import torch

from course_utils.measure.activations import Layer
from course_utils.theory import costs


@pytest.mark.parametrize("sizes", [(2, 128, 256, 4), (1, 96, 192, 6)])
def test_the_layer_keeps_what_the_formula_says(sizes):
    batch, tokens, width, heads = sizes
    layer = Layer(width, heads).bfloat16()
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(batch, tokens, width, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer(x)  # has a name, so that no address is used twice
    assert output.shape == x.shape
    formula = costs.activation_bytes(batch, tokens, width, heads)
    assert sum(kept.values()) == pytest.approx(formula, rel=0.01)


def test_its_attention_is_that_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "native_dropout", lambda x, p, train: (x, None))
    torch.manual_seed(0)
    layer = Layer(8, heads=2)
    other = torch.nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    pairs = {
        other.self_attn.in_proj_weight: layer.queries_keys_values.weight,
        other.self_attn.in_proj_bias: layer.queries_keys_values.bias,
        other.self_attn.out_proj.weight: layer.out.weight,
        other.self_attn.out_proj.bias: layer.out.bias,
        other.linear1.weight: layer.up.weight,
        other.linear1.bias: layer.up.bias,
        other.linear2.weight: layer.down.weight,
        other.linear2.bias: layer.down.bias,
    }
    with torch.no_grad():
        for theirs, ours in pairs.items():
            theirs.copy_(ours)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(layer(x), other(x))
