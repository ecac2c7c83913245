"""Lesson NN: what learners may hand in, and what they must be told."""

import torch
import torch.distributed as dist

from tests.answers import Answers

ANSWERS = Answers()

# ------------------------------------------------------------------ NN.global_norm


@ANSWERS.wrong("NN.global_norm", "not attempted", "still raises NotImplementedError")
def stub(part):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("NN.global_norm", "wrong", "That is the norm of the rank's own part.")
def own_part(part):
    return part.norm().item()


@ANSWERS.wrong("NN.global_norm", "wrong", "You added up the norms of the parts.")
def sum_of_norms(part):
    total = part.norm()
    dist.all_reduce(total)
    return total.item()


@ANSWERS.wrong("NN.global_norm", "wrong", "the root is missing")
def no_root(part):
    return right_norm(part) ** 2


@ANSWERS.right("NN.global_norm")
def right_norm(part):
    squares = part.pow(2).sum()
    dist.all_reduce(squares)
    return squares.sqrt().item()


@ANSWERS.right("NN.global_norm")
def gathered(part):
    norms = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, part.norm())
    return torch.stack(norms).norm()


# ------------------------------------------------------------------------- NN.clip


@ANSWERS.wrong("NN.clip", "wrong", "Each rank divides by the norm of its own part")
def as_it_was(part, max_norm):
    return part * min(1.0, max_norm / part.norm().item())


@ANSWERS.wrong("NN.clip", "wrong", "not the sum of the parts' norms")
def by_the_sum(part, max_norm):
    return part * min(1.0, max_norm / sum_of_norms(part))


@ANSWERS.wrong("NN.clip", "wrong", "never multiply by more than 1")
def made_longer(part, max_norm):
    return part * (max_norm / right_norm(part))


@ANSWERS.right("NN.clip")
def by_the_whole(part, max_norm):
    return part * min(1.0, max_norm / right_norm(part))


@ANSWERS.right("NN.clip")
def with_an_if(part, max_norm):
    norm = right_norm(part)
    return part / norm * max_norm if norm > max_norm else part.clone()


# ----------------------------------------------------------------- NN.predict_norm


ANSWERS.wrong("NN.predict_norm", "not attempted", "Set the answer")(...)
ANSWERS.wrong("NN.predict_norm", "wrong", "the norm of one part")(5)
ANSWERS.wrong("NN.predict_norm", "wrong", "Norms do not add up")(20)
ANSWERS.wrong("NN.predict_norm", "wrong", "the root is missing")(100)
ANSWERS.right("NN.predict_norm")(10)
ANSWERS.right("NN.predict_norm")(10.0)


test_wrong, test_right = ANSWERS.tests()
