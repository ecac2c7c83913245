"""Fully sharded data parallel, in rungs. Each trains as DDP does, with less memory.

    rung  file               stage
    0     pieces.py                 shard, unshard: cut a tensor into equal parts, one
                                    for each rank, and back; reduce_scatter: each rank's
                                    part of the sum
    1     flat_parameter.py         FlatParameter: parameters one behind another, for
                                    all rungs that follow
          zero1.py           1      ShardedOptimizer: optimizer state for one's own part
    2     zero2.py           2      ShardedGradients: gradients of one's own part, too
    3     units.py                  Unit: parameters, too; whole only while it runs
    4     zero3.py           3      FSDP: units that are gathered and freed in time
    5     checkpoints.py            whole ones, for any number of ranks

In this order each file uses only those before it, and refusals.py: errors for misuse.
All ranks must shard the same module in the same way, or they are told what differs.
(zero3.py takes the methods of FSDP for checkpoints from rung 5.) Much of what would end
in wrong numbers without a word is refused there, but not all: see the optimizers below,
and `zero_grad` in ShardedGradients and in FSDP.

    model = FSDP(module, units=[*module.layers])
    optimizer = torch.optim.AdamW(model.parameters())        # after, over the shards
    for inputs, labels in batches_of_this_rank:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

A *unit* is a module whose parameters travel together: one behind another in one flat
tensor, with zeros behind them so that n ranks get equal parts. Every rank makes the
same calls, uses the same units in the same order, and gives batches of the same size.

The optimizer sees flat tensors. It must treat each element by itself, as SGD, Adam and
AdamW do; Muon, LAMB or Adafactor look at whole matrices, and would do something else,
some of them without a word. An unused parameter counts as a gradient of zeros: with
ZeRO-1 always, later if its unit has others that are used. (With DDP it is an error, or
with find_unused_parameters=True it has no gradient, and the optimizer skips it.)

Bytes a rank keeps, for P parameters in fp32, n ranks and Adam (K = 8 bytes of state):

    DDP 4P + 4P + 8P      ZeRO-1 4P + 4P + 8P/n      ZeRO-2 4P + 4P/n + 8P/n
    FSDP 4P/n + 4P/n + 8P/n, and whole units for as long as they are needed

Bytes a rank sends in a step, for S bytes of parameters: (n-1)/n of 2S with DDP and
ZeRO-2; of 3S with ZeRO-1, which all-reduces gradients here, and with FSDP, which
gathers parameters twice.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, arXiv 1910.02054; Y. Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel", VLDB 16 (2023), arXiv 2304.11277.
"""

from .checkpoints import load_optimizer_state_dict, optimizer_state_dict
from .pieces import all_gather, padded, reduce_scatter, shard, unshard
from .units import ShardedFlatParameter
from .zero1 import ShardedOptimizer, clip_grad_norm_
from .zero2 import ShardedGradients
from .zero3 import FSDP

__all__ = [
    "FSDP",
    "ShardedFlatParameter",
    "ShardedGradients",
    "ShardedOptimizer",
    "all_gather",
    "clip_grad_norm_",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "padded",
    "reduce_scatter",
    "shard",
    "unshard",
]
