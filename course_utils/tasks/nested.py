"""Tensors in nested tuples, lists and dicts: which, in what form, where, gradients."""

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from course_utils.tasks.compare import plain


def sorted_keys(value):
    """The same, with the keys of each dict in one order: theirs does not count."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(sorted_keys, value))
    return value


def tensors_in(value):
    """The tensors in nested tuples, lists and dicts, in order."""
    leaves = tree_leaves(sorted_keys(value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def form(value):
    """What is nested in what: "('tensor', {'a': 'tensor'})"."""
    value = plain(sorted_keys(value))
    return str(tree_map_only(torch.Tensor, lambda _: "tensor", value))


def wanting(tensor):
    """The tensor itself. It wants a gradient, if its dtype has any."""
    return tensor.requires_grad_(tensor.is_floating_point())


def devices_of(value):
    return sorted({str(tensor.device) for tensor in tensors_in(value)})


def gradients(outputs, tensors):
    """What arrives at the tensors if each element of the outputs has its own weight."""
    weights = (1 + torch.arange(o.numel()).reshape(o.shape) for o in outputs)
    total = sum((o.cpu() * w).sum() for o, w in zip(outputs, weights, strict=True))
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    return [tensor.grad for tensor in tensors]
