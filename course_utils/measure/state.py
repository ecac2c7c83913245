"""What a module is besides its gradients, to see whether code has changed it.

And at which point the random numbers of this process are. On a model, around any code::

    before, modes = state_of(model), modes_of(model)
    train_for_a_step(model)
    state_of(model) == before       # True: all but its gradients is as it was
    modes                           # {True}: all its parts have computed as in training
"""

import pickle
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn


def settings_of(module: nn.Module) -> list[Any]:
    """Of each part whether it is in training mode, of each parameter `requires_grad`.

    And of DistributedDataParallel, whether the next backward will send.
    """
    modes = [part.training for part in module.modules()]
    trained = [p.requires_grad for p in module.parameters()]
    return [modes, trained, getattr(module, "require_backward_grad_sync", None)]


def state_of(module: nn.Module) -> list[Any]:
    """The settings, and the numbers of all parameters and buffers, as plain lists."""
    numbers = [p.tolist() for p in (*module.parameters(), *module.buffers())]
    return [settings_of(module), numbers]


def modes_of(module: nn.Module) -> set[bool]:
    """Whenever a part of the module is called, its mode: True for training, or False.

    The set fills as time goes on.
    """
    modes: set[bool] = set()
    for part in module.modules():
        part.register_forward_pre_hook(lambda part, _: modes.add(part.training))
    return modes


def tensors_listed(value: Any) -> int:
    """How many tensors a value is or has in it: a list, a dictionary or the like.

    Those in other objects, such as modules, are not counted, and no parameters.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return sum(map(tensors_listed, value))
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def random_state() -> bytes:
    """Another one after each draw or seed of PyTorch's, NumPy's or Python's numbers.

    Those that the whole process draws from, not those of a generator of one's own.
    """
    states = torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()
    return pickle.dumps(states)
