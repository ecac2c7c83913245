"""Lesson NN: answers that must pass, and odd ones that no near miss covers."""

import torch
import torch.distributed as dist

from tests.answers import Answers

ANSWERS = Answers()


@ANSWERS.right("NN.global_norm")
def gathered(part):
    norms = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, part.norm())
    return torch.stack(norms).norm()


@ANSWERS.wrong("NN.global_norm", "wrong", "Only rank 0 has it")
def on_rank_0(part):
    squares = part.pow(2).sum()
    dist.reduce(squares, 0)
    return squares.sqrt().item()


@ANSWERS.right("NN.clip")
def with_an_if(part, max_norm):
    norm = gathered(part)
    return part / norm * max_norm if norm > max_norm else part.clone()


test_wrong, test_right = ANSWERS.tests()
