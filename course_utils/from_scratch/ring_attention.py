"""Context parallelism: attention over a sequence of which each rank has a slice.

Every query has to meet every key. So keys and values go around in a ring: in each of n
steps a rank attends to the slice that it has at the moment, and passes it on. What was
found so far is kept in a form to which more can be added, the *online softmax*. No rank
ever holds the whole sequence, or the table of all scores.

    x = ring_attention(queries, keys, values, causal=True)

The result is this rank's slice of `F.scaled_dot_product_attention` of the whole
sequence, and so are the gradients.

Source: H. Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite
Context", arXiv 2310.01889; M. Milakov and N. Gimelshein, "Online normalizer calculation
for softmax", arXiv 1805.02867.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Group = ProcessGroup | None


class _PassOn(torch.autograd.Function):
    """To the next rank, from the one before; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchanged(x, group, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group, -1), None


def _exchanged(x: Tensor, group: Group, step: int) -> Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    x = x.contiguous()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + step) % n)
    take = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - step) % n)
    for request in dist.batch_isend_irecv([send, take]):
        request.wait()
    return received


def ring_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    causal: bool = False,
    group: Group = None,
) -> Tensor:
    """Attention over the whole sequence, for this rank's queries. Every rank calls it.

    Args:
        queries, keys, values: [N, heads, T / n, size], the slices of this rank. Rank r
            has the symbols from r·T/n on. All slices are equally long.
        causal: whether a symbol sees only itself and those before it.
        group: the ranks that share the sequence, in its order.

    Returns: [N, heads, T / n, size].

    Cost: n - 1 times a message with keys and values, forward and back. With `causal`,
    the first ranks have less to compute than the last: real systems give each rank an
    early and a late piece.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    length = queries.shape[-2]
    queries = queries * queries.shape[-1] ** -0.5
    # The largest score so far, the sum of exp(score - largest), and the sum of the
    # values that are weighted so.
    largest = queries.new_full(queries.shape[:-1], float("-inf"))
    total, mixed = torch.zeros_like(largest), torch.zeros_like(queries)
    for step in range(n):
        owner = (rank - step) % n  # whose keys and values are here now
        scores = queries @ keys.transpose(-2, -1)
        if causal:
            mine = rank * length + torch.arange(length, device=scores.device)
            theirs = owner * length + torch.arange(length, device=scores.device)
            scores = scores.masked_fill(theirs > mine[:, None], float("-inf"))
        new = torch.maximum(largest, scores.amax(dim=-1))
        # Its own slice comes first, so each query has seen a key: `new` is finite.
        shrunk = torch.exp(largest - new)
        weights = torch.exp(scores - new[..., None])
        total = total * shrunk + weights.sum(dim=-1)
        mixed = mixed * shrunk[..., None] + weights @ values
        largest = new
        if step < n - 1:
            both = torch.stack([keys, values])
            keys, values = _PassOn.apply(both, group)
    return mixed / total[..., None]
