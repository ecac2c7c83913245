"""Lesson 03: typical wrong answers, and different right ones."""

import concurrent.futures
import copy
import itertools
import multiprocessing.pool
import threading

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn import functional as F
from torch.nn import parallel

from course_utils.from_scratch import data_parallel as ours
from tests.answers import Answers

ANSWERS = Answers()

# ---------------------------------------------------------------------- 03.scatter


@ANSWERS.wrong("03.scatter", "not attempted", "It still raises NotImplementedError")
def scatter_stub(inputs, target_gpus, dim=0):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("03.scatter", "wrong", "all parts are still on the CPU")
def forgot_to_move(inputs, target_gpus, dim=0):
    return inputs.chunk(len(target_gpus), dim)


@ANSWERS.wrong("03.scatter", "wrong", "part i belongs on device `target_gpus[i]`")
def all_on_the_first(inputs, target_gpus, dim=0):
    return [piece.to(target_gpus[0]) for piece in inputs.chunk(len(target_gpus), dim)]


@ANSWERS.wrong(
    "03.scatter", "wrong", "You cut as evenly as possible", did="`tensor_split`"
)
def evenly(inputs, target_gpus, dim=0):
    pieces = inputs.tensor_split(len(target_gpus), dim)
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=True)]


@ANSWERS.wrong("03.scatter", "wrong", "Where that is so, there is no part.")
def an_empty_piece_for_the_last(inputs, target_gpus, dim=0):
    rows = -(-inputs.size(dim) // len(target_gpus))
    return [
        inputs[i * rows : (i + 1) * rows].to(gpu) for i, gpu in enumerate(target_gpus)
    ]


@ANSWERS.wrong("03.scatter", "wrong", "repeat it, once for each of `target_gpus`")
def others_are_there_once(inputs, target_gpus, dim=0):
    if isinstance(inputs, torch.Tensor):
        return tensors_only(inputs, target_gpus, dim)
    if isinstance(inputs, (tuple, list)) and inputs:
        items = [others_are_there_once(item, target_gpus, dim) for item in inputs]
        return [type(inputs)(part) for part in zip(*items, strict=False)]
    if isinstance(inputs, dict) and inputs:
        parts = others_are_there_once(tuple(inputs.values()), target_gpus, dim)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    return [inputs]


def with_pieces_from(cut):
    """A scatter in which `cut(tensor, target_gpus, dim)` makes the pieces."""

    def scatter(inputs, target_gpus, dim=0):
        if isinstance(inputs, torch.Tensor):
            return cut(inputs, target_gpus, dim)
        if isinstance(inputs, (tuple, list)) and inputs:
            items = [scatter(item, target_gpus, dim) for item in inputs]
            return [type(inputs)(part) for part in zip(*items, strict=False)]
        if isinstance(inputs, dict) and inputs:
            parts = scatter(tuple(inputs.values()), target_gpus, dim)
            return [dict(zip(inputs, part, strict=True)) for part in parts]
        return [inputs] * len(target_gpus)

    scatter.__name__ = cut.__name__
    return scatter


@ANSWERS.wrong("03.scatter", "wrong", "each GPU was sent all rows")
@with_pieces_from
def copied_and_then_cut(tensor, target_gpus, dim):
    n = len(target_gpus)
    pieces = range(len(tensor.chunk(n, dim)))
    return [tensor.to(target_gpus[i]).chunk(n, dim)[i] for i in pieces]


@ANSWERS.wrong("03.scatter", "wrong", "The argument of `split` is how many rows")
@with_pieces_from
def split_with_the_number_of_gpus(tensor, target_gpus, dim):
    pieces = tensor.split(len(target_gpus), dim)
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=False)]


@ANSWERS.right("03.scatter")
@with_pieces_from
def all_to_the_first_gpu_and_on_from_there(tensor, target_gpus, dim):
    pieces = tensor.to(target_gpus[0]).chunk(len(target_gpus), dim)
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=False)]


@ANSWERS.wrong("03.scatter", "wrong", "Rows are lost")
def rest_is_lost(inputs, target_gpus, dim=0):
    rows = inputs.size(dim) // len(target_gpus)
    return [
        inputs.narrow(dim, i * rows, rows).to(gpu) for i, gpu in enumerate(target_gpus)
    ]


@ANSWERS.wrong("03.scatter", "wrong", "like cards")
def like_cards(inputs, target_gpus, dim=0):
    n = len(target_gpus)
    return [inputs[i::n].to(gpu) for i, gpu in enumerate(target_gpus)]


@ANSWERS.wrong("03.scatter", "wrong", "The third argument says which dimension")
def always_dimension_0(inputs, target_gpus, dim=0):
    pieces = inputs.chunk(len(target_gpus))
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=False)]


@ANSWERS.wrong("03.scatter", "crashed", "Only tensors can be cut.")
def tensors_only(inputs, target_gpus, dim=0):
    pieces = inputs.chunk(len(target_gpus), dim)
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=False)]


@ANSWERS.wrong(
    "03.scatter",
    "wrong",
    "of (x, y) on two GPUs the parts are (x0, y0)",
    did="scattered a tuple item by item, and stopped",
)
def not_transposed(inputs, target_gpus, dim=0):
    if isinstance(inputs, (tuple, list)):
        return [not_transposed(item, target_gpus, dim) for item in inputs]
    return tensors_only(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "so `zip` gives nothing")
def nothing_for_an_empty_tuple(inputs, target_gpus, dim=0):
    if isinstance(inputs, torch.Tensor):
        return tensors_only(inputs, target_gpus, dim)
    if isinstance(inputs, dict):
        values = tuple(inputs.values())
        parts = nothing_for_an_empty_tuple(values, target_gpus, dim)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    if isinstance(inputs, (tuple, list)):
        items = [nothing_for_an_empty_tuple(i, target_gpus, dim) for i in inputs]
        return [type(inputs)(part) for part in zip(*items, strict=False)]
    return [inputs] * len(target_gpus)


@ANSWERS.wrong("03.scatter", "wrong", "An empty tuple, list or dict has no items")
def tuples_may_be_empty(inputs, target_gpus, dim=0):
    if inputs == []:
        return []
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "An empty tuple, list or dict has no items")
def dicts_may_not_be_empty(inputs, target_gpus, dim=0):
    return [] if inputs == {} else scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "Nothing was cut: each part has all the rows.")
def dicts_forgotten(inputs, target_gpus, dim=0):
    if isinstance(inputs, dict):
        return [inputs] * len(target_gpus)
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "Nothing was cut: each part has all the rows.")
def lists_forgotten(inputs, target_gpus, dim=0):
    if isinstance(inputs, list):
        return [inputs for _ in target_gpus]
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "Nothing was cut: each part has all the rows.")
def all_to_all(inputs, target_gpus, dim=0):
    return [inputs for _ in target_gpus]


@ANSWERS.wrong("03.scatter", "wrong", "(`values()` of a dict is none of them.)")
def values_as_they_are(inputs, target_gpus, dim=0):
    if isinstance(inputs, dict):
        parts = scatter_by_recursion(inputs.values(), target_gpus, dim)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "crashed", "There are fewer pieces than GPUs here")
def as_many_pieces_as_gpus(inputs, target_gpus, dim=0):
    pieces = inputs.chunk(len(target_gpus), dim)
    return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=True)]


@ANSWERS.wrong("03.scatter", "crashed", "Go on with the pieces that are there")
def a_piece_for_each_gpu(inputs, target_gpus, dim=0):
    pieces = inputs.chunk(len(target_gpus), dim)
    return [pieces[i].to(gpu) for i, gpu in enumerate(target_gpus)]


@ANSWERS.wrong("03.scatter", "crashed", "A text consists of texts")
def takes_everything_apart(inputs, target_gpus, dim=0):
    if isinstance(inputs, torch.Tensor):
        return scatter_by_recursion(inputs, target_gpus, dim)
    items = [takes_everything_apart(item, target_gpus, dim) for item in inputs]
    return [type(inputs)(part) for part in zip(*items, strict=False)]


@ANSWERS.wrong("03.scatter", "crashed", "or what `scatter` returned for an item?")
def nothing_for_others(inputs, target_gpus, dim=0):
    if isinstance(inputs, (tuple, list)):
        items = [nothing_for_others(item, target_gpus, dim) for item in inputs]
        return [type(inputs)(part) for part in zip(*items, strict=False)]
    if isinstance(inputs, dict):
        parts = nothing_for_others(tuple(inputs.values()), target_gpus, dim)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    if isinstance(inputs, torch.Tensor):
        return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "crashed", "is it an item of the inputs")
def takes_none_apart(inputs, target_gpus, dim=0):
    if isinstance(inputs, dict) and inputs:
        parts = takes_none_apart(tuple(inputs.values()), target_gpus, dim)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    if isinstance(inputs, (torch.Tensor, str, int)) or inputs in ((), [], {}):
        return scatter_by_recursion(inputs, target_gpus, dim)
    items = [takes_none_apart(item, target_gpus, dim) for item in inputs]
    return [type(inputs)(part) for part in zip(*items, strict=False)]


@ANSWERS.wrong("03.scatter", "wrong", "Pass `dim` on when the function calls itself.")
def forgets_dim(inputs, target_gpus, dim=0):
    if isinstance(inputs, (tuple, list)) and inputs:
        items = [forgets_dim(item, target_gpus) for item in inputs]
        return [type(inputs)(part) for part in zip(*items, strict=False)]
    if isinstance(inputs, dict) and inputs:
        parts = forgets_dim(tuple(inputs.values()), target_gpus)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "Pass `dim` on when the function calls itself.")
def forgets_dim_in_dicts(inputs, target_gpus, dim=0):
    if isinstance(inputs, (tuple, list)) and inputs:
        items = [forgets_dim_in_dicts(item, target_gpus, dim) for item in inputs]
        return [type(inputs)(part) for part in zip(*items, strict=False)]
    return scatter_by_recursion(
        inputs, target_gpus, 0 if isinstance(inputs, dict) else dim
    )


@ANSWERS.wrong("03.scatter", "wrong", "which need not be cuda:i")
def counts_the_gpus(inputs, target_gpus, dim=0):
    return scatter_by_recursion(inputs, range(len(target_gpus)), dim)


@ANSWERS.wrong("03.scatter", "wrong", "a list for a list")
def always_tuples(inputs, target_gpus, dim=0):
    if isinstance(inputs, (tuple, list)):
        items = [always_tuples(item, target_gpus, dim) for item in inputs]
        return list(zip(*items, strict=False))
    return tensors_only(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "do not find their way back to the inputs")
def detached_pieces(inputs, target_gpus, dim=0):
    return [
        piece.detach().to(gpu)
        for piece, gpu in zip(
            inputs.chunk(len(target_gpus), dim), target_gpus, strict=False
        )
    ]


@ANSWERS.wrong("03.scatter", "wrong", "Here only the first GPU got it")
def text_for_one(inputs, target_gpus, dim=0):
    if isinstance(inputs, (tuple, list)) and inputs:
        items = [text_for_one(item, target_gpus, dim) for item in inputs]
        return [type(inputs)(part) for part in itertools.zip_longest(*items)]
    if isinstance(inputs, dict) and inputs:
        parts = text_for_one(tuple(inputs.values()), target_gpus, dim)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    if isinstance(inputs, torch.Tensor):
        return scatter_by_recursion(inputs, target_gpus, dim)
    return [inputs]


@ANSWERS.wrong("03.scatter", "wrong", "`[{}] * n` is one dict, n times")
def one_dict_for_all(inputs, target_gpus, dim=0):
    if not isinstance(inputs, dict):
        return scatter_by_recursion(inputs, target_gpus, dim)
    parts = [{}] * len(target_gpus)
    for key, item in inputs.items():
        pieces = scatter_by_recursion(item, target_gpus, dim)
        for part, piece in zip(parts, pieces, strict=True):
            part[key] = piece
    return parts


@ANSWERS.wrong("03.scatter", "wrong", "did you forget `return`?")
def scatter_without_return(inputs, target_gpus, dim=0):
    inputs.chunk(len(target_gpus), dim)


@ANSWERS.wrong("03.scatter", "wrong", "Your code calls scatter")
def scatter_of_torch(inputs, target_gpus, dim=0):
    return parallel.scatter(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "Your code calls scatter")
def scatter_of_the_course(inputs, target_gpus, dim=0):
    return ours.scatter(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "something was put into a list or dict")
def writes_into_dicts(inputs, target_gpus, dim=0):
    if isinstance(inputs, dict):
        for key in inputs:
            inputs[key] = scatter_by_recursion(inputs[key], target_gpus, dim)
        n = min(map(len, inputs.values()), default=len(target_gpus))
        return [{key: inputs[key][i] for key in inputs} for i in range(n)]
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "parts")
def rows_or_columns(inputs, target_gpus, dim=0):
    if isinstance(inputs, torch.Tensor):
        dim = 0 if dim == 0 else 1
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.wrong("03.scatter", "wrong", "parts")
def turns_tensors(inputs, target_gpus, dim=0):
    if isinstance(inputs, torch.Tensor) and dim:
        turned = inputs.permute(*reversed(range(inputs.dim())))
        parts = tensors_only(turned, target_gpus)
        return [part.permute(*reversed(range(part.dim()))) for part in parts]
    return scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.right("03.scatter")
def scatter_by_recursion(inputs, target_gpus, dim=0):
    if isinstance(inputs, torch.Tensor):
        pieces = inputs.chunk(len(target_gpus), dim)
        return [piece.to(gpu) for piece, gpu in zip(pieces, target_gpus, strict=False)]
    if isinstance(inputs, (tuple, list)) and inputs:
        items = [scatter_by_recursion(item, target_gpus, dim) for item in inputs]
        return [type(inputs)(part) for part in zip(*items, strict=False)]
    if isinstance(inputs, dict) and inputs:
        parts = scatter_by_recursion(tuple(inputs.values()), target_gpus, dim)
        return [dict(zip(inputs, part, strict=True)) for part in parts]
    return [inputs for _ in target_gpus]


@ANSWERS.right("03.scatter")
def scatter_as_a_generator(inputs, target_gpus, dim=0):
    yield from scatter_by_recursion(inputs, target_gpus, dim)


@ANSWERS.right("03.scatter")
def scatter_by_slices(inputs, target_gpus, dim=0):
    """Another way round: what part i of anything is."""

    def sizes(value):
        if isinstance(value, torch.Tensor):
            rows = -(-value.size(dim) // n)
            return [-(-value.size(dim) // rows)]
        values = value.values() if isinstance(value, dict) else value
        if not isinstance(value, (tuple, list, dict)):
            return []
        return [size for item in values for size in sizes(item)]

    def part(value, i):
        if isinstance(value, torch.Tensor):
            rows = -(-value.size(dim) // n)
            index = [slice(None)] * value.dim()
            index[dim] = slice(i * rows, (i + 1) * rows)
            return value[tuple(index)].to(f"cuda:{target_gpus[i]}")
        if isinstance(value, dict):
            return {key: part(item, i) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(part(item, i) for item in value)
        if isinstance(value, list):
            return [part(item, i) for item in value]
        return value

    n = len(target_gpus)
    return tuple(part(inputs, i) for i in range(min(sizes(inputs), default=n)))


# ----------------------------------------------------------------------- 03.gather


@ANSWERS.wrong("03.gather", "not attempted", "It still raises NotImplementedError")
def gather_stub(outputs, target_device, dim=0):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("03.gather", "crashed", "Copy each of them to the target device first")
def cat_across_devices(outputs, target_device, dim=0):
    return torch.cat(outputs, dim)


@ANSWERS.wrong("03.gather", "wrong", "did you forget `return`?")
def gather_without_return(outputs, target_device, dim=0):
    torch.cat([output.to(target_device) for output in outputs], dim)


@ANSWERS.wrong("03.gather", "wrong", "torch.stack makes a new dimension")
def stacked(outputs, target_device, dim=0):
    return torch.stack([output.to(target_device) for output in outputs], dim)


@ANSWERS.wrong("03.gather", "wrong", "on another device than `target_device`")
def always_on_gpu_0(outputs, target_device, dim=0):
    return torch.cat([output.to(0) for output in outputs], dim)


@ANSWERS.wrong("03.gather", "wrong", "joined in the reverse order")
def reversed_order(outputs, target_device, dim=0):
    return torch.cat([output.to(target_device) for output in outputs[::-1]], dim)


@ANSWERS.wrong("03.gather", "wrong", "You joined along dimension 0")
def along_0(outputs, target_device, dim=0):
    return torch.cat([output.to(target_device) for output in outputs])


@ANSWERS.wrong("03.gather", "crashed", "The outputs may be tuples, lists and dicts")
def gather_tensors_only(outputs, target_device, dim=0):
    return torch.cat([output.to(target_device) for output in outputs], dim)


@ANSWERS.wrong("03.gather", "crashed", "Look at the first output to see which")
def never_none(outputs, target_device, dim=0):
    if isinstance(outputs[0], (tuple, list)):
        groups = zip(*outputs, strict=True)
        joined = (never_none(group, target_device, dim) for group in groups)
        return type(outputs[0])(joined)
    if outputs[0] is None:
        return list(zip(*outputs, strict=True))
    return gather_by_recursion(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "crashed", "Look at the first output to see which")
def dicts_like_tuples(outputs, target_device, dim=0):
    if isinstance(outputs[0], dict):
        return dict(tuple(group) for group in zip(*outputs, strict=True))
    return gather_by_recursion(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "wrong", "Pass it on when the function calls itself.")
def items_of_dicts_on_gpu_0(outputs, target_device, dim=0):
    if isinstance(outputs[0], dict):
        return gather_by_recursion(outputs, 0, dim)
    return gather_by_recursion(outputs, target_device, dim)


@ANSWERS.wrong(
    "03.gather", "crashed", "Join such tensors to a vector", did="`torch.cat` of losses"
)
def forgot_numbers(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([output.to(target_device) for output in outputs], dim)
    if isinstance(first, dict):
        return {
            key: forgot_numbers([output[key] for output in outputs], target_device)
            for key in first
        }
    if first is None:
        return None
    groups = zip(*outputs, strict=True)
    return type(first)(forgot_numbers(group, target_device) for group in groups)


@ANSWERS.wrong("03.gather", "wrong", "Return all the losses, as a vector")
def mean_of_numbers(outputs, target_device, dim=0):
    if isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0:
        return sum(output.to(target_device) for output in outputs) / len(outputs)
    return (
        forgot_numbers(outputs, target_device, dim)
        if dim == 0
        else torch.cat([output.to(target_device) for output in outputs], dim)
    )


@ANSWERS.wrong("03.gather", "wrong", "take a number out of the graph")
def items_of_numbers(outputs, target_device, dim=0):
    if isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0:
        losses = [output.item() for output in outputs]
        return torch.tensor(losses, device=f"cuda:{target_device}")
    return mean_of_numbers(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "wrong", "on another device than `target_device`")
def numbers_on_the_cpu(outputs, target_device, dim=0):
    if isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0:
        return torch.stack([output.cpu() for output in outputs])
    return mean_of_numbers(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "wrong", "a tuple for tuples, a list for lists")
def lists_for_tuples(outputs, target_device, dim=0):
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat([output.to(target_device) for output in outputs], dim)
    return [
        lists_for_tuples(group, target_device) for group in zip(*outputs, strict=True)
    ]


@ANSWERS.wrong("03.gather", "wrong", "Pass `dim` on when the function calls itself.")
def gather_forgets_dim(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, dict):
        return {
            key: gather_forgets_dim([output[key] for output in outputs], target_device)
            for key in first
        }
    if isinstance(first, (tuple, list)):
        groups = zip(*outputs, strict=True)
        return type(first)(gather_forgets_dim(group, target_device) for group in groups)
    return gather_by_recursion(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "wrong", "Pass `dim` on when the function calls itself.")
def forgets_dim_in_tuples(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, dict):
        groups = {key: [output[key] for output in outputs] for key in first}
        return {
            key: forgets_dim_in_tuples(group, target_device, dim)
            for key, group in groups.items()
        }
    along = 0 if isinstance(first, tuple) else dim
    return gather_by_recursion(outputs, target_device, along)


@ANSWERS.wrong("03.gather", "wrong", "do not find their way back to the outputs")
def without_gradients(outputs, target_device, dim=0):
    with torch.no_grad():
        return torch.cat([output.to(target_device) for output in outputs], dim)


@ANSWERS.wrong("03.gather", "wrong", "Your code calls gather")
def gather_of_torch(outputs, target_device, dim=0):
    return parallel.gather(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "wrong", "on another device than `target_device`")
def one_output_as_it_is(outputs, target_device, dim=0):
    if len(outputs) == 1:
        return outputs[0]
    return gather_by_recursion(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "wrong", "as a vector with one number for each GPU")
def one_loss_as_it_is(outputs, target_device, dim=0):
    if len(outputs) == 1:
        return outputs[0].to(target_device)
    return gather_by_recursion(outputs, target_device, dim)


@ANSWERS.wrong("03.gather", "crashed", "(Output i need not be on cuda:i.)")
def moves_all_but_one(outputs, target_device, dim=0):
    if not isinstance(outputs[0], torch.Tensor):
        return gather_by_recursion(outputs, target_device, dim)
    here = [
        output if i == target_device else output.to(target_device)
        for i, output in enumerate(outputs)
    ]
    return torch.stack(here) if here[0].dim() == 0 else torch.cat(here, dim)


@ANSWERS.wrong("03.gather", "wrong", "they are joined, not added and not averaged")
def adds_the_outputs(outputs, target_device, dim=0):
    return sum(output.to(target_device) for output in outputs)


@ANSWERS.wrong("03.gather", "wrong", "they are joined, not added and not averaged")
def averages_the_outputs(outputs, target_device, dim=0):
    return adds_the_outputs(outputs, target_device) / len(outputs)


@ANSWERS.wrong("03.gather", "wrong", "its dtype is float32; int64 was expected.")
def into_a_float_tensor(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        outputs = [o.reshape(1) if not o.dim() else o for o in outputs]
        shape = list(outputs[0].shape)
        shape[dim] = sum(output.size(dim) for output in outputs)
        joined, start = torch.zeros(shape, device=f"cuda:{target_device}"), 0
        for output in outputs:
            joined.narrow(dim, start, output.size(dim)).copy_(output)
            start += output.size(dim)
        return joined
    if isinstance(first, dict):
        groups = {key: [output[key] for output in outputs] for key in first}
        return {
            key: into_a_float_tensor(group, target_device, dim)
            for key, group in groups.items()
        }
    if first is None:
        return None
    groups = zip(*outputs, strict=True)
    return type(first)(
        into_a_float_tensor(group, target_device, dim) for group in groups
    )


@ANSWERS.wrong("03.gather", "wrong", "joined")
def below_or_beside(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, torch.Tensor) and dim:
        return torch.hstack([output.to(target_device) for output in outputs])
    return gather_by_recursion(outputs, target_device, dim)


@ANSWERS.right("03.gather")
def gather_by_recursion(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        here = [output.to(target_device) for output in outputs]
        return torch.stack(here) if first.dim() == 0 else torch.cat(here, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        groups = {key: [output[key] for output in outputs] for key in first}
        return {
            key: gather_by_recursion(group, target_device, dim)
            for key, group in groups.items()
        }
    groups = zip(*outputs, strict=True)
    return type(first)(
        gather_by_recursion(group, target_device, dim) for group in groups
    )


@ANSWERS.right("03.gather")
def gather_into_an_empty_tensor(outputs, target_device, dim=0):
    """Copy by copy, with the numbers as vectors of one element."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        joined = first.reshape(1) if not first.dim() else first
        joined = joined.to(f"cuda:{target_device}")
        for output in outputs[1:]:
            output = output.reshape(1) if not output.dim() else output
            joined = torch.cat((joined, output.to(joined.device)), dim)
        return joined
    if isinstance(first, dict):
        keys = list(first)
        values = [[output[key] for key in keys] for output in outputs]
        joined = gather_into_an_empty_tensor(values, target_device, dim)
        return dict(zip(keys, joined, strict=True))
    if isinstance(first, (list, tuple)):
        joined = []
        for i in range(len(first)):
            items = [output[i] for output in outputs]
            joined.append(gather_into_an_empty_tensor(items, target_device, dim))
        return joined if isinstance(first, list) else tuple(joined)
    return first


@ANSWERS.wrong("03.gather", "wrong", "a table with one number in each row")
def losses_in_a_column(outputs, target_device, dim=0):
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        items = zip(*outputs, strict=True)
        return type(first)(losses_in_a_column(i, target_device, dim) for i in items)
    if isinstance(first, dict):
        items = {key: [output[key] for output in outputs] for key in first}
        return {k: losses_in_a_column(i, target_device, dim) for k, i in items.items()}
    if first is None:
        return None
    here = [output.to(target_device) for output in outputs]
    if first.dim() == 0:
        return torch.stack([loss.reshape(1) for loss in here])
    return torch.cat(here, dim)


# -------------------------------------------------------------------- 03.replicate


@ANSWERS.wrong("03.replicate", "not attempted", "It still raises NotImplementedError")
def replicate_stub(network, devices):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong(
    "03.replicate", "wrong", "The network itself has moved.", did="`module.to(device)`"
)
def moved(network, devices):
    return [network.to(device) for device in devices]


@ANSWERS.wrong(
    "03.replicate",
    "wrong",
    "each replica has weights of its own",
    did="`copy.deepcopy(network).to(device)`",
)
def deep_copies(network, devices):
    return [copy.deepcopy(network).to(device) for device in devices]


@ANSWERS.wrong("03.replicate", "wrong", "each replica has weights of its own")
def new_parameters(network, devices):
    replicas = [copy.deepcopy(network) for _ in devices]
    for replica, device in zip(replicas, devices, strict=True):
        for module in replica.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to(device))
    return replicas


@ANSWERS.wrong("03.replicate", "crashed", "cut off from the network's")
def detached_weights(network, devices):
    replicas = []
    for device in devices:
        tensors = itertools.chain(network.parameters(), network.buffers())
        copies = {id(tensor): tensor.detach().to(device) for tensor in tensors}
        replicas.append(copy.deepcopy(network, copies))
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "Only the replica on the network's own GPU")
def under_no_grad(network, devices):
    with torch.no_grad():
        return deepcopies_with_memo(network, devices)


@ANSWERS.wrong("03.replicate", "wrong", "a module of the network's own class")
def modules_that_call_the_network(network, devices):
    class Replica(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.device = device

        def forward(self, x):
            named = [*network.named_parameters(), *network.named_buffers()]
            weights = {name: tensor.to(self.device) for name, tensor in named}
            return torch.func.functional_call(network, weights, x)

    return [Replica(device) for device in devices]


@ANSWERS.wrong("03.replicate", "wrong", "one and the same network several times")
def the_same_network(network, devices):
    return [network.to(devices[-1])] * len(devices)


@ANSWERS.wrong("03.replicate", "wrong", "has the module's own parameters.")
def shallow_copies_moved(network, devices):
    return [copy.copy(network).to(device) for device in devices]


@ANSWERS.wrong("03.replicate", "crashed", "`id(tensor)`, not the tensor")
def tensors_as_keys(network, devices):
    return [
        copy.deepcopy(network, {tensor: tensor.to(i) for tensor in tensors_of(network)})
        for i in devices
    ]


@ANSWERS.wrong("03.replicate", "crashed", "with which arguments the network was made")
def made_anew(network, devices):
    return [type(network)().to(device) for device in devices]


@ANSWERS.wrong("03.replicate", "wrong", "on `devices[i]`")
def without_buffers(network, devices):
    replicas = []
    for device in devices:
        copies = {id(tensor): tensor.to(device) for tensor in network.parameters()}
        replicas.append(copy.deepcopy(network, copies))
    return replicas


def tensors_of(network):
    return [*network.parameters(), *network.buffers()]


@ANSWERS.wrong("03.replicate", "wrong", "give it a new dict for each device")
def one_memo_for_all_devices(network, devices):
    memo, replicas = {}, []
    for device in devices:
        memo |= {id(tensor): tensor.to(device) for tensor in tensors_of(network)}
        replicas.append(copy.deepcopy(network, memo))
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "`state_dict()` makes other objects.")
def memo_of_the_state_dict(network, devices):
    tensors = network.state_dict().values()
    memos = [
        {id(tensor): tensor.to(device) for tensor in tensors} for device in devices
    ]
    return [copy.deepcopy(network, memo) for memo in memos]


@ANSWERS.wrong("03.replicate", "wrong", "give the first name only, unless")
def by_the_first_names(network, devices):
    replicas = []
    for device in devices:
        buffers = {id(buffer): buffer.to(device) for buffer in network.buffers()}
        replica = copy.deepcopy(network, buffers)
        for name, parameter in network.named_parameters():
            owner, _, leaf = name.rpartition(".")
            module = replica.get_submodule(owner)
            delattr(module, leaf)
            setattr(module, leaf, parameter.to(device))
        replicas.append(replica)
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "Submodules have buffers, too")
def without_buffers_of_submodules(network, devices):
    replicas = []
    for device in devices:
        buffers = [b for b in network._buffers.values() if b is not None]
        tensors = [*network.parameters(), *buffers]
        copies = {id(tensor): tensor.to(device) for tensor in tensors}
        replicas.append(copy.deepcopy(network, copies))
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "on `devices[i]`")
def counts_the_devices(network, devices):
    return deepcopies_with_memo(network, range(len(devices)))


@ANSWERS.wrong("03.replicate", "wrong", "one module stands in two places")
def two_modules_for_one(network, devices):
    def twin_of(module, copies):
        twin = copy.copy(module)
        twin._modules = {
            name: child and twin_of(child, copies)
            for name, child in module._modules.items()
        }
        twin._parameters = {k: copies.get(p) for k, p in module._parameters.items()}
        twin._buffers = {k: copies.get(b) for k, b in module._buffers.items()}
        return twin

    replicas = []
    for device in devices:
        tensors = [*network.parameters(), *network.buffers()]
        copies = {tensor: tensor.to(device) for tensor in tensors}
        replicas.append(twin_of(network, copies))
    return replicas


def replicas_by_module(network, device, copied):
    """A replica from shallow copies of the modules; `copied` copies a tensor."""
    twins = {module: copy.copy(module) for module in network.modules()}
    for module, twin in twins.items():
        twin._modules = {name: twins.get(m) for name, m in module._modules.items()}
        twin._parameters = {k: copied(p, device) for k, p in module._parameters.items()}
        twin._buffers = {k: copied(b, device) for k, b in module._buffers.items()}
    return twins[network]


@ANSWERS.wrong("03.replicate", "wrong", "two layers share one weight")
def shared_no_more(network, devices):
    def copied(tensor, device):
        if tensor is None:
            return None
        return (
            tensor.view_as(tensor).to(device)
            if tensor.requires_grad
            else tensor.to(device)
        )

    return [replicas_by_module(network, device, copied) for device in devices]


@ANSWERS.wrong("03.replicate", "crashed", "there may be None in the place of a tensor")
def no_thought_of_none(network, devices):
    known = {}

    def copied(tensor, device):
        return known.setdefault((tensor, device), tensor.to(device))

    return [replicas_by_module(network, device, copied) for device in devices]


@ANSWERS.wrong("03.replicate", "wrong", "it is the buffer itself")
def buffers_cloned(network, devices):
    replicas = []
    for device in devices:
        copies = {id(tensor): tensor.to(device) for tensor in network.parameters()}
        copies |= {id(b): b.clone().to(device) for b in network.buffers()}
        replicas.append(copy.deepcopy(network, copies))
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "Give the replica dictionaries of its own.")
def shallow_copies(network, devices):
    replicas = []
    for device in devices:
        replica = copy.copy(network)
        for module in replica.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = parameter.to(device)
        replicas.append(replica)
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "Return a list, with one replica")
def replicate_without_return(network, devices):
    deepcopies_with_memo(network, devices)


@ANSWERS.wrong("03.replicate", "crashed", "Put the copy into the replica's dictionary")
def assigned(network, devices):
    replicas = [copy.deepcopy(network) for _ in devices]
    for replica, device in zip(replicas, devices, strict=True):
        replica.first.weight = network.first.weight.to(device)
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "Return a list, with one replica for each")
def one_too_few(network, devices):
    return deepcopies_with_memo(network, devices)[1:] or [network, network]


@ANSWERS.wrong("03.replicate", "wrong", "Your code calls replicate")
def replicate_of_torch(network, devices):
    return parallel.replicate(network, devices)


@ANSWERS.wrong("03.replicate", "wrong", "A module of the network stands in a replica.")
def the_network_itself(network, devices):
    return [network, *deepcopies_with_memo(network, devices[1:])]


@ANSWERS.wrong("03.replicate", "wrong", "A module of the network stands in a replica.")
def modules_of_the_network(network, devices):
    replicas = deepcopies_with_memo(network, devices)
    replicas[0].frozen = network.frozen
    return replicas


@ANSWERS.wrong("03.replicate", "wrong", "The network was put into another mode")
def puts_the_network_into_eval_mode(network, devices):
    return deepcopies_with_memo(network.eval(), devices)


@ANSWERS.wrong("03.replicate", "wrong", "A copy of a module has the mode")
def replicas_in_eval_mode(network, devices):
    return [replica.eval() for replica in deepcopies_with_memo(network, devices)]


@ANSWERS.wrong("03.replicate", "wrong", "A copy of a module has the mode")
def replicas_in_training_mode(network, devices):
    return [replica.train() for replica in deepcopies_with_memo(network, devices)]


@ANSWERS.wrong("03.replicate", "wrong", "other parameters or buffers than before")
def buffers_of_the_network_moved(network, devices):
    replicas = deepcopies_with_memo(network, devices)
    for module in network.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(devices[-1])
    return replicas


@ANSWERS.right("03.replicate")
def deepcopies_with_memo(network, devices):
    replicas = []
    for device in devices:
        tensors = [*network.parameters(), *network.buffers()]
        copies = {id(tensor): tensor.to(device) for tensor in tensors}
        replicas.append(copy.deepcopy(network, copies))
    return replicas


@ANSWERS.right("03.replicate")
def shallow_copies_by_module(network, devices):
    replicas = []
    for device in devices:
        known = {}

        def copied(tensor, device, known=known):
            if tensor is None:
                return None
            if tensor not in known:
                known[tensor] = tensor.to(device)
            return known[tensor]

        replicas.append(replicas_by_module(network, device, copied))
    return replicas


@ANSWERS.right("03.replicate")
def with_torchs_hook(network, devices):
    replicas = []
    for device in (torch.device("cuda", index) for index in devices):
        copies = {p: p.view_as(p).to(device) for p in network.parameters()}
        copies |= {b: b.to(device) for b in network.buffers()}
        twins = {m: m._replicate_for_data_parallel() for m in network.modules()}
        for module, twin in twins.items():
            for name, child in module._modules.items():
                twin._modules[name] = twins.get(child)
            for name, tensor in (module._parameters | module._buffers).items():
                setattr(twin, name, copies.get(tensor))
        replicas.append(twins[network])
    return replicas


# --------------------------------------------------------------- 03.parallel_apply


@ANSWERS.wrong("03.parallel_apply", "not attempted", "still raises NotImplementedError")
def apply_stub(modules, inputs, kwargs_tup=None, devices=None):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("03.parallel_apply", "wrong", "The modules ran one after the other.")
def in_a_loop(modules, inputs, kwargs_tup=None, devices=None):
    outputs = []
    for module, x, device in zip(modules, inputs, devices, strict=True):
        with torch.cuda.device(device):
            outputs.append(module(x))
    return outputs


@ANSWERS.wrong(
    "03.parallel_apply",
    "wrong",
    "The modules ran one after the other.",
    did="`start(); join()` in one loop",
)
def joined_at_once(modules, inputs, kwargs_tup=None, devices=None):
    outputs = [None] * len(modules)

    def call(i):
        with torch.cuda.device(devices[i]):
            outputs[i] = modules[i](inputs[i])

    for i in range(len(modules)):
        thread = threading.Thread(target=call, args=(i,))
        thread.start()
        thread.join()
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "while threads were still running")
def never_joined(modules, inputs, kwargs_tup=None, devices=None):
    outputs = [None] * len(modules)

    def call(i):
        outputs[i] = modules[i](inputs[i])

    for i in range(len(modules)):
        threading.Thread(target=call, args=(i,)).start()
    return outputs


def started_and_joined(call, n):
    threads = [threading.Thread(target=call, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@ANSWERS.wrong("03.parallel_apply", "wrong", "in another order")
def in_order_of_the_end(modules, inputs, kwargs_tup=None, devices=None):
    outputs = []

    def call(i):
        with torch.cuda.device(devices[i]):
            outputs.append(modules[i](inputs[i]))

    started_and_joined(call, len(modules))
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "Some output is missing.")
def returned_in_the_thread(modules, inputs, kwargs_tup=None, devices=None):
    started_and_joined(lambda i: modules[i](inputs[i]), len(modules))
    return [None] * len(modules)


@ANSWERS.wrong("03.parallel_apply", "wrong", "the current device was not its own")
def on_the_default_device(modules, inputs, kwargs_tup=None, devices=None):
    outputs = [None] * len(modules)

    def call(i):
        outputs[i] = modules[i](inputs[i])

    started_and_joined(call, len(modules))
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "`with torch.cuda.device(devices[i]):`")
def counts_the_current_devices(modules, inputs, kwargs_tup=None, *, devices):
    return with_threads(modules, inputs, kwargs_tup, range(len(devices)))


@ANSWERS.wrong("03.parallel_apply", "wrong", "however few cores there are")
def with_a_pool_of_two(modules, inputs, kwargs_tup=None, *, devices):
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    wanted = torch.is_grad_enabled()

    def call(i):
        args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)
        with torch.cuda.device(devices[i]), torch.set_grad_enabled(wanted):
            return modules[i](*args, **kwargs_tup[i])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, range(len(modules))))


@ANSWERS.wrong("03.parallel_apply", "wrong", "A module was not run at all.")
def hides_its_exceptions(modules, inputs, kwargs_tup=None, *, devices):
    outputs = [None] * len(modules)

    def call(i):
        try:
            outputs[i] = modules[i](inputs[i], **kwargs_tup[i])
        except Exception as error:
            print(error)

    started_and_joined(call, len(modules))
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "A module was not run at all.")
def runs_nothing(modules, inputs, kwargs_tup=None, *, devices):
    pass


@ANSWERS.wrong(
    "03.parallel_apply", "wrong", "The threads are under torch.no_grad(), and"
)
def always_without_gradients(modules, inputs, kwargs_tup=None, *, devices):
    with torch.no_grad():  # threads begin with gradients, but with_threads hands it on
        return with_threads(modules, inputs, kwargs_tup, devices)


@ANSWERS.wrong("03.parallel_apply", "wrong", "not find their way back to the inputs")
def detached_outputs(modules, inputs, kwargs_tup=None, *, devices):
    outputs = with_threads(modules, inputs, kwargs_tup, devices)
    return [output.detach() for output in outputs]


@ANSWERS.wrong("03.parallel_apply", "wrong", "not find their way back to the inputs")
def detached_inputs(modules, inputs, kwargs_tup=None, *, devices):
    inputs = [
        tuple(x.detach() for x in one) if isinstance(one, tuple) else one.detach()
        for one in inputs
    ]
    return with_threads(modules, inputs, kwargs_tup, devices)


@ANSWERS.wrong("03.parallel_apply", "wrong", "Leave them there: `gather` brings them")
def outputs_on_the_cpu(modules, inputs, kwargs_tup=None, *, devices):
    outputs = with_threads(modules, inputs, kwargs_tup, devices)
    return [output.cpu() for output in outputs]


@ANSWERS.wrong("03.parallel_apply", "crashed", "raise its exception itself")
def wraps_the_exception(modules, inputs, kwargs_tup=None, *, devices):
    try:
        return with_threads(modules, inputs, kwargs_tup, devices)
    except ArithmeticError as error:
        raise RuntimeError(f"a module said: {error}") from error


@ANSWERS.right("03.parallel_apply")
def as_pytorch_passes_exceptions_on(modules, inputs, kwargs_tup=None, *, devices):
    """By its ExceptionWrapper, which puts the traceback into the text."""
    wanted, results = torch.is_grad_enabled(), {}
    kwargs_tup = kwargs_tup or [{}] * len(modules)

    def call(i):
        args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)
        try:
            with torch.set_grad_enabled(wanted), torch.cuda.device(devices[i]):
                results[i] = modules[i](*args, **kwargs_tup[i])
        except Exception:
            results[i] = ExceptionWrapper(where=f"in replica {i}")

    started_and_joined(call, len(modules))
    for i in range(len(modules)):
        if isinstance(results[i], ExceptionWrapper):
            results[i].reraise()
    return [results[i] for i in range(len(modules))]


@ANSWERS.wrong("03.parallel_apply", "wrong", "Give each thread its number")
def by_the_variable_of_the_loop(modules, inputs, kwargs_tup=None, *, devices):
    outputs, threads = [None] * len(modules), []

    def call(i):
        with torch.cuda.device(devices[i]):
            outputs[i] = modules[i](inputs[i])

    for i in range(len(modules)):
        threads.append(threading.Thread(target=lambda: call(i)))  # noqa: B023
        threads[-1].start()  # at once: by chance it might be early enough
    for thread in threads:
        thread.join()
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "The caller is under torch.no_grad(), and")
def forgot_no_grad(modules, inputs, kwargs_tup=None, devices=None):
    outputs = [None] * len(modules)
    kwargs_tup = kwargs_tup or [{}] * len(modules)

    def call(i):
        args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)
        with torch.cuda.device(devices[i]):
            outputs[i] = modules[i](*args, **kwargs_tup[i])

    started_and_joined(call, len(modules))
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "nobody heard of it")
def lost_exceptions(modules, inputs, kwargs_tup=None, devices=None):
    outputs = [None] * len(modules)
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    wanted = torch.is_grad_enabled()

    def call(i):
        args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)
        with torch.cuda.device(devices[i]), torch.set_grad_enabled(wanted):
            outputs[i] = modules[i](*args, **kwargs_tup[i])

    started_and_joined(call, len(modules))
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "Raise that of the first module")
def the_last_exception(modules, inputs, kwargs_tup=None, devices=None):
    outputs = [None] * len(modules)
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    wanted = torch.is_grad_enabled()
    errors = []

    def call(i):
        args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)
        try:
            with torch.cuda.device(devices[i]), torch.set_grad_enabled(wanted):
                outputs[i] = modules[i](*args, **kwargs_tup[i])
        except Exception as error:
            errors.append(error)

    started_and_joined(call, len(modules))
    if errors:
        raise errors[0]  # of the thread that failed first: here the last module
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "returned or raised while threads were")
def joins_and_raises_in_one_loop(modules, inputs, kwargs_tup=None, *, devices):
    outputs, errors = [None] * len(modules), {}
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    wanted = torch.is_grad_enabled()

    def call(i):
        args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)
        try:
            with torch.cuda.device(devices[i]), torch.set_grad_enabled(wanted):
                outputs[i] = modules[i](*args, **kwargs_tup[i])
        except Exception as error:
            errors[i] = error

    n = len(modules)
    threads = [threading.Thread(target=call, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for i, thread in enumerate(threads):
        thread.join()
        if i in errors:
            raise errors[i]
    return outputs


def without_a_try(modules, devices, arguments):
    """All at the same time; whatever a thread raises is lost."""
    outputs = [None] * len(modules)

    def call(i):
        args, kwargs = arguments(i)
        with torch.cuda.device(devices[i]):
            outputs[i] = modules[i](*args, **kwargs)

    started_and_joined(call, len(modules))
    return outputs


@ANSWERS.wrong("03.parallel_apply", "wrong", "`kwargs_tup` is None where there are no")
def kwargs_are_none_in_the_thread(modules, inputs, kwargs_tup=None, *, devices):
    return without_a_try(modules, devices, lambda i: ((inputs[i],), kwargs_tup[i]))


@ANSWERS.wrong("03.parallel_apply", "wrong", "This exception ended its thread")
def a_typo_in_the_thread(modules, inputs, kwargs_tup=None, *, devices):
    return without_a_try(modules, devices, lambda i: ((input_s[i],), {}))  # noqa: F821


@ANSWERS.wrong("03.parallel_apply", "wrong", "['NameError', \"name 'input_s' is not")
def the_typo_is_shown(modules, inputs, kwargs_tup=None, *, devices):
    return a_typo_in_the_thread(modules, inputs, kwargs_tup, devices=devices)


@ANSWERS.wrong("03.parallel_apply", "wrong", "may be a tuple of several arguments")
def tuples_as_one_argument(modules, inputs, kwargs_tup=None, *, devices):
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    return without_a_try(modules, devices, lambda i: ((inputs[i],), kwargs_tup[i]))


@ANSWERS.wrong("03.parallel_apply", "wrong", "Each input has its own form.")
def the_first_input_decides(modules, inputs, kwargs_tup=None, *, devices):
    if isinstance(inputs[0], tuple) or not any(isinstance(x, tuple) for x in inputs):
        return with_threads(modules, inputs, kwargs_tup, devices)
    return without_a_try(modules, devices, lambda i: ((inputs[i],), {}))


@ANSWERS.wrong("03.parallel_apply", "wrong", "A tensor was taken apart into its")
def always_with_a_star(modules, inputs, kwargs_tup=None, *, devices):
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    return without_a_try(modules, devices, lambda i: (inputs[i], kwargs_tup[i]))


@ANSWERS.wrong("03.parallel_apply", "crashed", "`kwargs_tup` is None where")
def no_kwargs(modules, inputs, kwargs_tup=None, devices=None):
    return [
        module(x, **kwargs)
        for module, x, kwargs in zip(modules, inputs, kwargs_tup, strict=True)
    ]


@ANSWERS.wrong("03.parallel_apply", "wrong", "keyword arguments in `kwargs_tup[i]`")
def kwargs_left_out(modules, inputs, kwargs_tup=None, *, devices):
    return with_threads(modules, inputs, None, devices)


@ANSWERS.wrong("03.parallel_apply", "wrong", "keyword arguments in `kwargs_tup[i]`")
def the_first_kwargs_for_all(modules, inputs, kwargs_tup=None, *, devices):
    kwargs_tup = kwargs_tup and kwargs_tup[:1] * len(modules)
    return with_threads(modules, inputs, kwargs_tup, devices)


@ANSWERS.wrong("03.parallel_apply", "wrong", "Your code calls parallel_apply")
def apply_of_torch(modules, inputs, kwargs_tup=None, devices=None):
    return parallel.parallel_apply(modules, inputs, kwargs_tup, devices)


@ANSWERS.right("03.parallel_apply")
def with_threads(modules, inputs, kwargs_tup=None, devices=None):
    outputs, errors = {}, {}
    wanted = torch.is_grad_enabled()

    def call(i):
        args = inputs[i] if isinstance(inputs[i], (tuple, list)) else (inputs[i],)
        kwargs = kwargs_tup[i] if kwargs_tup is not None else {}
        try:
            with torch.set_grad_enabled(wanted), torch.cuda.device(devices[i]):
                outputs[i] = modules[i](*args, **kwargs)
        except Exception as error:
            errors[i] = error

    started_and_joined(call, len(modules))
    if errors:
        raise errors[min(errors)]
    return [outputs[i] for i in range(len(modules))]


@ANSWERS.right("03.parallel_apply")
def with_a_pool(modules, inputs, kwargs_tup=None, devices=None):
    wanted = torch.is_grad_enabled()

    def call(module, x, kwargs, device):
        torch.set_grad_enabled(wanted)
        torch.cuda.set_device(device)
        return module(*(x if isinstance(x, tuple) else (x,)), **kwargs)

    kwargs_tup = kwargs_tup or itertools.repeat({})
    with concurrent.futures.ThreadPoolExecutor(len(modules)) as pool:
        calls = [
            pool.submit(call, *arguments)
            for arguments in zip(modules, inputs, kwargs_tup, devices, strict=False)
        ]
    return [one.result() for one in calls]


@ANSWERS.right("03.parallel_apply")
def with_a_pool_of_idle_threads(modules, inputs, kwargs_tup=None, devices=None):
    """Its threads wait for more work, and end a moment after the `with`."""
    wanted = torch.is_grad_enabled()

    def call(module, x, kwargs, device):
        with torch.set_grad_enabled(wanted), torch.cuda.device(device):
            return module(*(x if isinstance(x, tuple) else (x,)), **kwargs)

    kwargs_tup = kwargs_tup or [{}] * len(modules)
    with multiprocessing.pool.ThreadPool(len(modules)) as pool:
        calls = [
            pool.apply_async(call, arguments)
            for arguments in zip(modules, inputs, kwargs_tup, devices, strict=True)
        ]
        for one in calls:
            one.wait()
        return [one.get() for one in calls]


@ANSWERS.wrong("03.parallel_apply", "wrong", "Nor may a lock let them in one by one.")
def with_a_lock(modules, inputs, kwargs_tup=None, devices=None):
    outputs, lock = {}, threading.Lock()

    def call(i):
        args = inputs[i] if isinstance(inputs[i], tuple) else (inputs[i],)
        with lock, torch.cuda.device(devices[i]):
            outputs[i] = modules[i](*args)

    started_and_joined(call, len(modules))
    return [outputs[i] for i in range(len(modules))]


# ---------------------------------------------------------------- 03.data_parallel


@ANSWERS.wrong("03.data_parallel", "not attempted", "still raises NotImplementedError")
def data_parallel_stub(module, inputs, device_ids, output_device=None):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("03.data_parallel", "wrong", "The module itself has moved")
def moves_the_module(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter((inputs,), device_ids)
    outputs = [
        module.to(device)(*part) for part, device in zip(parts, device_ids, strict=True)
    ]
    return parallel.gather(outputs, device_ids[0])


@ANSWERS.wrong("03.data_parallel", "wrong", "Only one GPU has seen any rows.")
def on_one_device(module, inputs, device_ids, output_device=None):
    return module(inputs)


@ANSWERS.wrong("03.data_parallel", "wrong", "did you forget `return`?")
def data_parallel_without_return(module, inputs, device_ids, output_device=None):
    from_torchs_primitives(module, inputs, device_ids, output_device)


@ANSWERS.wrong("03.data_parallel", "crashed", "a star belongs only before a tuple")
def replicas_called_with_a_star(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    replicas = parallel.replicate(module, device_ids[: len(parts)])
    outputs = [replica(*part) for replica, part in zip(replicas, parts, strict=True)]
    home = device_ids[0] if output_device is None else output_device
    return parallel.gather(outputs, home)


@ANSWERS.wrong(
    "03.data_parallel",
    "crashed",
    "Make only as many replicas",
    did="as many replicas as GPUs",
)
def replicas_on_all(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    replicas = parallel.replicate(module, device_ids)
    outputs = parallel.parallel_apply(replicas, parts, devices=device_ids)
    return parallel.gather(
        outputs, device_ids[0] if output_device is None else output_device
    )


@ANSWERS.wrong("03.data_parallel", "crashed", "Make only as many replicas")
def an_output_for_each_gpu(module, inputs, device_ids, output_device=None):
    parts = scatter_by_recursion(inputs, device_ids)
    outputs = [None] * len(device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    outputs[: len(parts)] = with_threads(replicas, parts, None, used)
    home = device_ids[0] if output_device is None else output_device
    return torch.cat([output.to(home) for output in outputs])


@ANSWERS.wrong("03.data_parallel", "crashed", "`.to(None)` copies nothing")
def output_device_may_be_none(module, inputs, device_ids, output_device=None):
    parts = scatter_by_recursion(inputs, device_ids)
    used = device_ids[: len(parts)]
    outputs = with_threads(parallel.replicate(module, used), parts, None, used)
    return gather_by_recursion(outputs, output_device)


@ANSWERS.wrong("03.data_parallel", "crashed", "are both for device_ids[i]")
def parts_in_another_order(module, inputs, device_ids, output_device=None):
    parts = scatter_by_recursion(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    return with_threads(replicas, parts[::-1], None, used)


@ANSWERS.wrong("03.data_parallel", "wrong", "not on `output_device`")
def gathered_on_the_first(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return parallel.gather(outputs, device_ids[0])


@ANSWERS.wrong("03.data_parallel", "wrong", "which need not be cuda:0")
def gathered_on_gpu_0(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return parallel.gather(outputs, output_device or 0)


@ANSWERS.wrong("03.data_parallel", "wrong", "0 counts as false in Python")
def zero_is_false(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return parallel.gather(outputs, output_device or device_ids[0])


@ANSWERS.wrong("03.data_parallel", "wrong", "They are not added and not averaged.")
def averaged_outputs(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return sum(output.to(device_ids[0]) for output in outputs) / len(outputs)


@ANSWERS.wrong("03.data_parallel", "wrong", "the gradients in the module are not")
def detached_replicas(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = [copy.deepcopy(module).to(device) for device in used]
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return parallel.gather(
        outputs, device_ids[0] if output_device is None else output_device
    )


@ANSWERS.wrong("03.data_parallel", "crashed", "under `torch.no_grad()`?")
def without_any_gradients(module, inputs, device_ids, output_device=None):
    with torch.no_grad():
        return from_torchs_primitives(module, inputs, device_ids, output_device)


@ANSWERS.wrong("03.data_parallel", "crashed", "Use these numbers, not 0, 1, 2")
def counts_the_device_ids(module, inputs, device_ids, output_device=None):
    counted = list(range(len(device_ids)))
    return from_torchs_primitives(module, inputs, counted, output_device)


@ANSWERS.wrong("03.data_parallel", "wrong", "Your code calls DataParallel")
def wrapped(module, inputs, device_ids, output_device=None):
    return nn.DataParallel(module, device_ids, output_device)(inputs)


@ANSWERS.wrong("03.data_parallel", "wrong", "Your code calls data_parallel")
def data_parallel_of_torch(module, inputs, device_ids, output_device=None):
    return parallel.data_parallel(module, inputs, device_ids, output_device)


@ANSWERS.right("03.data_parallel")
def from_torchs_primitives(module, inputs, device_ids, output_device=None):
    output_device = device_ids[0] if output_device is None else output_device
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return parallel.gather(outputs, output_device)


@ANSWERS.right("03.data_parallel")
def one_replica_after_the_other(module, inputs, device_ids, output_device=None):
    parts = parallel.scatter(inputs, device_ids)
    replicas = parallel.replicate(module, device_ids[: len(parts)])
    outputs = [
        replica(*part) if isinstance(part, tuple) else replica(part)
        for replica, part in zip(replicas, parts, strict=True)
    ]
    home = device_ids[0] if output_device is None else output_device
    return parallel.gather(outputs, home)


@ANSWERS.right("03.data_parallel")
def from_own_primitives(module, inputs, device_ids, output_device=None):
    if not isinstance(inputs, tuple):
        inputs = (inputs,)
    parts = scatter_by_recursion(inputs, device_ids)
    used = [gpu for gpu, _ in zip(device_ids, parts, strict=False)]
    replicas = deepcopies_with_memo(module, used)
    outputs = with_threads(replicas, parts, None, used)
    home = used[0] if output_device is None else output_device
    return gather_by_recursion(outputs, home)


@ANSWERS.wrong("03.data_parallel", "crashed", "may be a tuple of several arguments")
def a_tuple_is_forgotten_on_a_single_gpu(
    module, inputs, device_ids, output_device=None
):
    if len(device_ids) == 1:
        return module(inputs)
    return from_torchs_primitives(module, inputs, device_ids, output_device)


@ANSWERS.wrong("03.data_parallel", "wrong", "The module was put into another mode")
def in_eval_mode(module, inputs, device_ids, output_device=None):
    module.eval()
    return from_torchs_primitives(module, inputs, device_ids, output_device)


@ANSWERS.wrong("03.data_parallel", "crashed", "returns a dictionary of tensors.")
def joined_by_hand(module, inputs, device_ids, output_device=None):
    home = device_ids[0] if output_device is None else output_device
    parts = parallel.scatter(inputs, device_ids)
    used = device_ids[: len(parts)]
    replicas = parallel.replicate(module, used)
    parts = [part if isinstance(part, tuple) else (part,) for part in parts]
    outputs = parallel.parallel_apply(replicas, parts, devices=used)
    return torch.cat([output.to(f"cuda:{home}") for output in outputs])


@ANSWERS.wrong("03.data_parallel", "wrong", "nothing in `course_utils`")
def by_the_courses_primitives(module, inputs, device_ids, output_device=None):
    parts = ours.scatter(inputs, device_ids)
    outputs = [module(part) for part in parts]
    return ours.gather(outputs, output_device or device_ids[0])


@ANSWERS.right("03.data_parallel")
def with_a_single_gpu_apart(module, inputs, device_ids, output_device=None):
    if len(device_ids) == 1:
        return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    parts = parallel.scatter(inputs, device_ids)
    replicas = parallel.replicate(module, device_ids)[: len(parts)]
    outputs = parallel.parallel_apply(replicas, parts, devices=device_ids[: len(parts)])
    return parallel.gather(
        outputs, device_ids[0] if output_device is None else output_device
    )


# ---------------------------------------------------------------- 03.spot_the_mean


class LossInside(nn.Module):
    """What the learner is given, with the bug in it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def training_step(self, x, y, device_ids):
        losses = nn.DataParallel(self, device_ids)(x, y)
        loss = losses.mean()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "not attempted", "Repair the code")
class AsGiven(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def training_step(self, x, y, device_ids):
        losses = nn.DataParallel(self, device_ids)(x, y)
        loss = losses.mean()
        loss.backward()
        return loss


@ANSWERS.wrong(
    "03.spot_the_mean",
    "wrong",
    "the mean of the GPUs' means",
    did="another way to write `losses.mean()`, and no more",
)
class StillMeanOfMeans(LossInside):
    def training_step(self, x, y, device_ids):
        losses = nn.DataParallel(self, device_ids)(x, y)
        loss = losses.sum() / losses.numel()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "with four GPUs four times")
class SumOfMeans(LossInside):
    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y).sum()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "Does your formula count the GPUs?")
class CountsTheGpus(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum")

    def training_step(self, x, y, device_ids):
        losses = nn.DataParallel(self, device_ids)(x, y)
        loss = losses.mean() * len(device_ids) / len(x)
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "Divide it by the number of rows.")
class SumOfAll(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum")

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y).sum()
        loss.backward()
        return loss


@ANSWERS.wrong(
    "03.spot_the_mean", "wrong", "Divide the sum of all by the number of rows"
)
class MeanOfSums(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum")


@ANSWERS.wrong("03.spot_the_mean", "wrong", "travel to GPU 0 again")
class LossOutside(LossInside):
    def forward(self, x, y):
        return self.model(x)

    def training_step(self, x, y, device_ids):
        outputs = nn.DataParallel(self, device_ids)(x, y)
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "travel to GPU 0 again")
class GatheredByHand(LossInside):
    def forward(self, x, y):
        return self.model(x)

    def training_step(self, x, y, device_ids):
        parts = parallel.scatter((x, y), device_ids)
        replicas = parallel.replicate(self, device_ids[: len(parts)])
        outputs = parallel.parallel_apply(replicas, parts)
        loss = F.cross_entropy(torch.cat([o.to("cuda:0") for o in outputs]), y)
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "travel to GPU 0 again")
class ThroughASideDoor(LossInside):
    def __init__(self, model):
        super().__init__(model)
        self.outputs = {}

    def forward(self, x, y):
        self.outputs[x.device.index] = self.model(x).to("cuda:0")
        return y

    def training_step(self, x, y, device_ids):
        nn.DataParallel(self, device_ids)(x, y)
        outputs = torch.cat([self.outputs[i] for i in sorted(self.outputs)])
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "without it, nn.DataParallel takes all")
class OnAllGpus(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="none")

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self)(x, y).mean()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "The model has seen more rows than")
class FilledUp(LossInside):
    def training_step(self, x, y, device_ids):
        more = -len(x) % len(device_ids)
        x = torch.cat((x, x[-1:].expand(more, -1)))
        y = torch.cat((y, y[-1:].expand(more)))
        loss = nn.DataParallel(self, device_ids)(x, y).mean()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "Keep nn.DataParallel.")
class OnOneGpu(LossInside):
    def training_step(self, x, y, device_ids):
        loss = self(x, y)
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "Rows are missing")
class WithoutTheRest(LossInside):
    def training_step(self, x, y, device_ids):
        rows = len(x) // len(device_ids) * len(device_ids) or len(x)
        losses = nn.DataParallel(self, device_ids)(x[:rows], y[:rows])
        loss = losses.mean()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "some of the GPUs had nothing to do")
class OnAsManyAsDivide(LossInside):
    def training_step(self, x, y, device_ids):
        n = max(n for n in range(1, len(device_ids) + 1) if len(x) % n == 0)
        losses = nn.DataParallel(self, device_ids[:n])(x, y)
        loss = losses.mean()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "crashed", "backward starts from one number")
class NoMean(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="none")

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y)
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "crashed", "did `forward` forget its `return`?")
class NoLosses(LossInside):
    def forward(self, x, y):
        F.cross_entropy(self.model(x), y, reduction="none")


# What nn.DataParallel says of a replica begins with its own traceback.
@ANSWERS.wrong(
    "03.spot_the_mean", "crashed", "It raised AttributeError: 'ATypo' object"
)
class ATypo(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.mode(x), y, reduction="none")


@ANSWERS.wrong("03.spot_the_mean", "crashed", "in forward: return F")
class WithoutTheLabels(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), reduction="none")


@ANSWERS.wrong("03.spot_the_mean", "crashed", "It raised KeyError: 'loss' line")
class AKeyThatIsNotThere(LossInside):
    def forward(self, x, y):
        return {"losses": F.cross_entropy(self.model(x), y)}["loss"]


@ANSWERS.wrong("03.spot_the_mean", "crashed", "make a tensor of it")
class TheNumberOfRowsToo(LossInside):
    def forward(self, x, y):
        return super().forward(x, y), len(x)

    def training_step(self, x, y, device_ids):
        losses, rows = nn.DataParallel(self, device_ids)(x, y)
        loss = (losses * rows).sum() / len(x)
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "crashed", "there, `self` is a replica")
class SetInForward(LossInside):
    def forward(self, x, y):
        self.rows = len(x)
        return super().forward(x, y) * self.rows

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y).sum() / self.rows
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "crashed", "Pass it by its position")
class ANumberByName(LossInside):
    """PyTorch gives it to all GPUs, also to those that get no rows."""

    def forward(self, x, y, rows):
        return (F.cross_entropy(self.model(x), y) * len(x) / rows)[None]

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y, rows=len(x)).sum()
        loss.backward()
        return loss


@ANSWERS.right("03.spot_the_mean")
class ANumberByItsPosition(ANumberByName):
    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y, len(x)).sum()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "wrong", "Call `loss.backward()` on the loss that")
class BackwardOfAnother(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="none")

    def training_step(self, x, y, device_ids):
        losses = nn.DataParallel(self, device_ids)(x, y)
        losses.sum().backward()
        return losses.mean()


@ANSWERS.wrong("03.spot_the_mean", "wrong", "keep from one step to the next?")
class CountsOfAllSteps(LossInside):
    def __init__(self, model):
        super().__init__(model)
        self.counts = []  # replicas have the list itself

    def forward(self, x, y):
        self.counts.append(len(x))
        return F.cross_entropy(self.model(x), y, reduction="sum")

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y).sum() / sum(self.counts)
        loss.backward()
        return loss


@ANSWERS.right("03.spot_the_mean")
class CountsOfOneStep(CountsOfAllSteps):
    def training_step(self, x, y, device_ids):
        self.counts.clear()
        return super().training_step(x, y, device_ids)


@ANSWERS.right("03.spot_the_mean")
class LossOfEachRow(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="none")


@ANSWERS.right("03.spot_the_mean")
class LossesAndPredictions(LossInside):
    def forward(self, x, y):
        outputs = self.model(x)
        losses = F.cross_entropy(outputs, y, reduction="none")
        return losses, outputs.argmax(1)

    def training_step(self, x, y, device_ids):
        losses, predicted = nn.DataParallel(self, device_ids)(x, y)
        self.right = (predicted == y).sum()
        loss = losses.mean()
        loss.backward()
        return loss


@ANSWERS.wrong("03.spot_the_mean", "crashed", "Here there is one GPU, and nothing")
class ByTheirLength(LossInside):
    """On one GPU there is a loss without dimensions, and no list of losses."""

    def training_step(self, x, y, device_ids):
        losses = nn.DataParallel(self, device_ids)(x, y)
        loss = sum(losses) / len(losses)
        loss.backward()
        return loss


@ANSWERS.right("03.spot_the_mean")
class SumsDividedOnce(LossInside):
    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum")

    def training_step(self, x, y, device_ids):
        loss = nn.DataParallel(self, device_ids)(x, y).sum() / len(y)
        loss.backward()
        return loss


@ANSWERS.right("03.spot_the_mean")
class Weighted(LossInside):
    """Means, each with the number of its rows."""

    def forward(self, x, y):
        rows = torch.tensor([len(y)], device=y.device)
        return F.cross_entropy(self.model(x), y).reshape(1), rows

    def training_step(self, x, y, device_ids):
        means, rows = nn.DataParallel(self, device_ids)(x, y)
        loss = (means * rows).sum() / rows.sum()
        loss.backward()
        return loss


# -------------------------------------------------------------- 03.predict_traffic

for number, says in (
    (700, "That is the way out"),
    (1600, "GPU 0 sends nothing to itself: seven GPUs"),
    (800, "GPU 0 sends nothing to itself, so seven"),
    (200, "That is the traffic with one other GPU."),
    (100, "That is one copy for one GPU."),
    (2100, "The update itself sends nothing"),
    (175, "a ring all-reduce"),
    (1.4, "In MB, please."),
    (1.4e9, "In MB, please."),
    (1000, "How many GPUs get a copy"),
    ("1400 MB", "That is text; a number was expected."),
):
    ANSWERS.wrong("03.predict_traffic", "wrong", says)(number)
ANSWERS.wrong("03.predict_traffic", "not attempted", "Set the answer")(...)
for number in (1400, 1400.0, torch.tensor(1400), 2 * 7 * 100):
    ANSWERS.right("03.predict_traffic")(number)


test_wrong, test_right = ANSWERS.tests()
