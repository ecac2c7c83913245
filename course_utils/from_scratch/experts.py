"""Expert parallelism: each rank has some of the experts, and tokens travel to them.

A layer of a mixture of experts has many perceptrons, and a router that sends each token
to one of them. The experts are shared out over the ranks, so a token goes to the rank
of its expert and its result comes back: two all-to-alls.

    experts = {e: Perceptron() for e in this_ranks_experts}
    y = mixture(x, router(x).argmax(-1), experts, total=8)

All ranks make the same calls, each with its own tokens. Results and gradients are those
of one process that has all experts.

Source: D. Lepikhin et al., "GShard", arXiv 2006.16668, section 2.2; W. Fedus et al.,
"Switch Transformers", arXiv 2101.03961 (one expert for each token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Group = ProcessGroup | None


class _AllToAll(torch.autograd.Function):
    """Some rows to each rank, some from each; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group
    ) -> Tensor:
        ctx.back = receive, send, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.back), None, None, None


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    y = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), receive, send, group=group)
    return y


def mixture(
    x: Tensor,
    chosen: Tensor,
    experts: Mapping[int, Callable[[Tensor], Tensor]],
    *,
    total: int,
    group: Group = None,
) -> Tensor:
    """What its expert makes of each token. Every rank calls it.

    Args:
        x: [tokens, width], this rank's; the ranks may have different numbers of them.
        chosen: int [tokens], the number of the expert of each.
        experts: those of this rank, by number: rank r of n has the numbers from
            r·total/n on. Each takes [some, width] and gives the same shape.
        total: how many experts there are on all ranks.

    Raises:
        ValueError: the experts cannot be shared out evenly; or this rank has others
            than those; or a number in `chosen` is not one of an expert.

    Cost: an all-to-all of the counts, one of the tokens and one of the results; the
    gradients take the same way back. The busiest expert sets the pace: nothing here
    balances the load.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if total % n:
        raise ValueError(f"{total} experts: expected a multiple of the {n} ranks.")
    here = range(rank * total // n, (rank + 1) * total // n)
    if sorted(experts) != list(here):
        raise ValueError(
            f"Rank {rank} has the experts {sorted(experts)}: expected {list(here)}."
        )
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < total:
        raise ValueError(f"chosen has numbers beyond the experts 0 to {total - 1}.")

    order = chosen.argsort(stable=True)  # tokens of one expert follow each other
    counts = torch.bincount(chosen, minlength=total)
    arriving = torch.empty_like(counts).view(n, -1)  # from each rank, for each expert
    dist.all_to_all_single(arriving.view(-1), counts, group=group)
    send = counts.view(n, -1).sum(dim=1).tolist()
    receive = arriving.sum(dim=1).tolist()

    tokens = _AllToAll.apply(x[order], send, receive, group)
    # They came rank by rank; the experts want theirs in one piece.
    whose = torch.cat([torch.arange(len(here)).repeat_interleave(c) for c in arriving])
    results = torch.empty_like(tokens)
    for place, number in enumerate(here):
        mine = (whose.to(tokens.device) == place).nonzero().squeeze(-1)
        results = results.index_copy(0, mine, experts[number](tokens[mine]))
    back = _AllToAll.apply(results, receive, send, group)
    return torch.empty_like(back).index_copy(0, order, back)
