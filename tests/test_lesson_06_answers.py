"""Lesson 06: what learners may hand in, and what they must be told."""

import contextlib
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_utils import Ranks, costs
from course_utils.data import load_data
from course_utils.from_scratch import ddp
from tests.answers import Answers

ANSWERS = Answers()

# --------------------------------------------------------------- 06.predict_bucket


ANSWERS.wrong("06.predict_bucket", "not attempted", "Set the answer")(...)
ANSWERS.wrong("06.predict_bucket", "wrong", "Four layers are 24 MiB")(24)
ANSWERS.wrong("06.predict_bucket", "wrong", "Gradients are not cut.")(25.0)
ANSWERS.wrong("06.predict_bucket", "wrong", "That is the first bucket")(6)
ANSWERS.wrong("06.predict_bucket", "wrong", "has a cap, too")(54)
ANSWERS.wrong("06.predict_bucket", "wrong", "the one bucket of the first step")(60)
ANSWERS.wrong("06.predict_bucket", "wrong", "not for a number of layers")(5)
ANSWERS.wrong("06.predict_bucket", "wrong", "right in another unit")(30 * 2**20)
ANSWERS.wrong("06.predict_bucket", "wrong", "right in another unit")(31.45728)
ANSWERS.right("06.predict_bucket")(30)
ANSWERS.right("06.predict_bucket")(torch.tensor(30.0))

# ------------------------------------------------------------- 06.broadcast_module


@ANSWERS.wrong("06.broadcast_module", "not attempted", "still raises NotImplemented")
def broadcast_stub(module):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong(
    "06.broadcast_module",
    "wrong",
    "Buffers are part of the model, too",
    did="parameters only",
)
def parameters_only(module):
    for parameter in module.parameters():
        dist.broadcast(parameter.data, src=0)


@ANSWERS.wrong(
    "06.broadcast_module",
    "wrong",
    "`state_dict()` leaves it out",
    did="`state_dict()` for the broadcast",
)
def by_state_dict(module):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)


@ANSWERS.wrong("06.broadcast_module", "wrong", "Frozen parameters are not trained")
def trained_ones_only(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


@ANSWERS.wrong("06.broadcast_module", "wrong", "That is the model of the last rank.")
def from_the_last(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=dist.get_world_size() - 1)


@ANSWERS.wrong("06.broadcast_module", "crashed", "which rank sends: src=0.")
def from_nowhere(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data)


@ANSWERS.wrong("06.broadcast_module", "wrong", "That is the mean of the ranks' models")
def averaged(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.all_reduce(tensor.data)
        tensor.data.copy_(tensor.data / dist.get_world_size())


@ANSWERS.wrong("06.broadcast_module", "wrong", "That is the mean of the ranks' models")
def averaged_in_place(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.all_reduce(tensor.data)
        tensor.data /= dist.get_world_size()


@ANSWERS.wrong("06.broadcast_module", "wrong", "That is the mean of the ranks' models")
def parameters_averaged(module):
    for parameter in module.parameters():
        dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


@ANSWERS.wrong("06.broadcast_module", "wrong", "`module.children()` leaves that out")
def of_the_children(module):
    for child in module.children():
        for tensor in (*child.parameters(), *child.buffers()):
            dist.broadcast(tensor.data, src=0)


@ANSWERS.wrong("06.broadcast_module", "wrong", "Did you broadcast copies")
def copies(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach().clone(), src=0)


@ANSWERS.wrong("06.broadcast_module", "wrong", "these are new tensors")
def new_parameters(module):
    for child in (module, *module.modules()):
        for name, parameter in list(child.named_parameters(recurse=False)):
            value = parameter.detach().clone()
            dist.broadcast(value, src=0)
            setattr(child, name, nn.Parameter(value, parameter.requires_grad))
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


@ANSWERS.wrong("06.broadcast_module", "crashed", "also by those that receive")
def sent_by_rank_0_only(module):
    if dist.get_rank() == 0:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
    dist.barrier()


@ANSWERS.wrong("06.broadcast_module", "wrong", "It would work: but it is what you")
def the_courses_own(module):
    send = ddp.broadcast_module
    send(module)


@ANSWERS.wrong("06.broadcast_module", "wrong", "It would work: but it is what you")
def torchs_wrapper(module):
    nn.parallel.DistributedDataParallel(module)


@ANSWERS.wrong("06.broadcast_module", "wrong", "It would work: but it is what you")
def torchs_coalesced(module):
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers())]
    group = dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(group, tensors, 1 << 20, 0)


@torch.no_grad()
def in_one_message(module, dtype):
    tensors = [*module.parameters(), *module.buffers()]
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
    dist.broadcast(flat, src=0)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@ANSWERS.wrong("06.broadcast_module", "wrong", "Digits got lost on the way")
def through_float32(module):
    in_one_message(module, torch.float32)


@ANSWERS.wrong("06.broadcast_module", "wrong", "With async_op=True a broadcast")
def nobody_waits(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0, async_op=True)


@ANSWERS.wrong("06.broadcast_module", "wrong", "`get_future()` does not wait")
def throws_futures_away(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0, async_op=True).get_future()


@ANSWERS.wrong("06.broadcast_module", "crashed", "`src` is the rank that *sends*")
def each_from_itself(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=dist.get_rank())


@ANSWERS.wrong("06.broadcast_module", "crashed", "the same tensors in the same order")
def turned_on_odd_ranks(module):
    tensors = [*module.parameters(), *module.buffers()]
    for tensor in tensors[::-1] if dist.get_rank() % 2 else tensors:
        dist.broadcast(tensor.data, src=0)


@ANSWERS.wrong("06.broadcast_module", "crashed", "there is no other to send to")
def sent_to_rank_1(module):
    for tensor in (*module.parameters(), *module.buffers()):
        if dist.get_rank() == 0:
            dist.send(tensor.data, 1)
        else:
            dist.recv(tensor.data, 0)


@ANSWERS.wrong("06.broadcast_module", "wrong", "more of them than float64")
def through_float64(module):
    in_one_message(module, torch.float64)


@ANSWERS.wrong("06.broadcast_module", "wrong", "0 times inf is nan")
@torch.no_grad()
def times_zero(module):
    for tensor in (*module.parameters(), *module.buffers()):
        tensor *= int(dist.get_rank() == 0)
        dist.all_reduce(tensor)


@ANSWERS.right("06.broadcast_module")
@torch.no_grad()
def those_of_a_dtype_together(module):
    by_dtype = {}
    for tensor in (*module.parameters(), *module.buffers()):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@ANSWERS.right("06.broadcast_module")
def all_at_once(module):
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers())]
    requests = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
    for request in requests:
        request.wait()


@ANSWERS.right("06.broadcast_module")
def one_by_one(module):
    for tensor in [*module.buffers(), *module.parameters()]:
        dist.broadcast(tensor.data, 0)


@ANSWERS.right("06.broadcast_module")
@torch.no_grad()
def by_all_reduce(module):
    for tensor in (*module.parameters(), *module.buffers()):
        if dist.get_rank() > 0:
            tensor.zero_()
        dist.all_reduce(tensor)


@ANSWERS.right("06.broadcast_module")
@torch.no_grad()
def as_objects(module):
    tensors = [*module.parameters(), *module.buffers()]
    message = [[tensor.detach().clone() for tensor in tensors]]
    dist.broadcast_object_list(message, src=0)
    for tensor, value in zip(tensors, message[0], strict=True):
        tensor.copy_(value)


# ------------------------------------------------------------------ 06.cut_buckets


@ANSWERS.wrong("06.cut_buckets", "not attempted", "still raises NotImplementedError")
def cut_stub(nbytes, bucket_bytes, first_bucket_bytes):
    raise NotImplementedError("Write your code here.")


def cut(nbytes, caps, order, before=False):
    """Cut in an order; caps says how large bucket i may get."""
    buckets, members = [], []
    for number in order:
        held = sum(nbytes[i] for i in members)
        if before and members and held + nbytes[number] > caps(len(buckets)):
            buckets.append(members)
            members = []
        members.append(number)
        held = sum(nbytes[i] for i in members)
        if not before and held >= caps(len(buckets)):
            buckets.append(members)
            members = []
    return buckets + [members] if members else buckets


def from_the_end(nbytes):
    return range(len(nbytes) - 1, -1, -1)


@ANSWERS.wrong(
    "06.cut_buckets",
    "wrong",
    "begin with the last parameter",
    did="the cut from the first parameter on",
)
def from_the_front(nbytes, bucket_bytes, first_bucket_bytes):
    caps = [first_bucket_bytes] + [bucket_bytes] * len(nbytes)
    return cut(nbytes, caps.__getitem__, range(len(nbytes)))


@ANSWERS.wrong("06.cut_buckets", "wrong", "turned the list of buckets around")
def turned_around(nbytes, bucket_bytes, first_bucket_bytes):
    return from_the_front(nbytes, bucket_bytes, first_bucket_bytes)[::-1]


@ANSWERS.wrong("06.cut_buckets", "wrong", "before it would pass its cap")
def closed_before(nbytes, bucket_bytes, first_bucket_bytes):
    caps = [first_bucket_bytes] + [bucket_bytes] * len(nbytes)
    return cut(nbytes, caps.__getitem__, from_the_end(nbytes), before=True)


@ANSWERS.wrong("06.cut_buckets", "wrong", "exactly its cap is closed, too")
def must_be_more(nbytes, bucket_bytes, first_bucket_bytes):
    caps = [first_bucket_bytes + 1] + [bucket_bytes + 1] * len(nbytes)
    return cut(nbytes, caps.__getitem__, from_the_end(nbytes))


@ANSWERS.wrong("06.cut_buckets", "wrong", "The first bucket has a cap of its own")
def one_cap(nbytes, bucket_bytes, first_bucket_bytes):
    return cut(nbytes, lambda i: bucket_bytes, from_the_end(nbytes))


@ANSWERS.wrong("06.cut_buckets", "wrong", "All buckets have the first one's cap.")
def always_the_first(nbytes, bucket_bytes, first_bucket_bytes):
    return cut(nbytes, lambda i: first_bucket_bytes, from_the_end(nbytes))


@ANSWERS.wrong(
    "06.cut_buckets",
    "wrong",
    "The last bucket never got full",
    did="the last open bucket forgotten",
)
def rest_forgotten(nbytes, bucket_bytes, first_bucket_bytes):
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in from_the_end(nbytes):
        members.append(number)
        held += nbytes[number]
        if held >= cap:
            buckets.append(members)
            members, held, cap = [], 0, bucket_bytes
    return buckets


@ANSWERS.wrong("06.cut_buckets", "wrong", "There is an empty bucket.")
def always_one_more(nbytes, bucket_bytes, first_bucket_bytes):
    buckets, held, cap = [[]], 0, first_bucket_bytes
    for number in from_the_end(nbytes):
        buckets[-1].append(number)
        held += nbytes[number]
        if held >= cap:
            buckets.append([])
            held, cap = 0, bucket_bytes
    return buckets


@ANSWERS.wrong("06.cut_buckets", "wrong", "Each has one gradient at least.")
def nothing_put_in(nbytes, bucket_bytes, first_bucket_bytes):
    return [[] for _ in with_caps(nbytes, bucket_bytes, first_bucket_bytes)]


@ANSWERS.wrong("06.cut_buckets", "wrong", "it was never closed")
def never_closed(nbytes, bucket_bytes, first_bucket_bytes):
    return [list(from_the_end(nbytes))]


@ANSWERS.wrong("06.cut_buckets", "wrong", "You compare the bytes of one gradient")
def assigned_for_added(nbytes, bucket_bytes, first_bucket_bytes):
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in from_the_end(nbytes):
        members.append(number)
        held = nbytes[number]
        if held >= cap:
            buckets.append(members)
            members, held, cap = [], 0, bucket_bytes
    return buckets + [members] if members else buckets


@ANSWERS.wrong("06.cut_buckets", "wrong", "one and the same list")
def one_list_cleared(nbytes, bucket_bytes, first_bucket_bytes):
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in from_the_end(nbytes):
        members.append(number)
        held += nbytes[number]
        if held >= cap:
            buckets.append(members)
            members.clear()
            held, cap = 0, bucket_bytes
    return buckets


@ANSWERS.wrong("06.cut_buckets", "wrong", "Every parameter must be in exactly one")
def always_the_last_two(nbytes, bucket_bytes, first_bucket_bytes):
    return [[len(nbytes) - 1, len(nbytes) - 2] for _ in range(3)]


@ANSWERS.wrong("06.cut_buckets", "wrong", "Set the count back to 0")
def never_set_back(nbytes, bucket_bytes, first_bucket_bytes):
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in from_the_end(nbytes):
        members.append(number)
        held += nbytes[number]
        if held >= cap:
            buckets.append(members)
            members, cap = [], bucket_bytes
    return buckets + [members] if members else buckets


@ANSWERS.wrong("06.cut_buckets", "wrong", "You subtract the cap")
def cap_subtracted(nbytes, bucket_bytes, first_bucket_bytes):
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in from_the_end(nbytes):
        members.append(number)
        held += nbytes[number]
        if held >= cap:
            buckets.append(members)
            members, held, cap = [], held - cap, bucket_bytes
    return buckets + [members] if members else buckets


@ANSWERS.wrong("06.cut_buckets", "wrong", "need not be a single gradient")
def first_parameter_alone(nbytes, bucket_bytes, first_bucket_bytes):
    caps = [0] + [bucket_bytes] * len(nbytes)
    return cut(nbytes, caps.__getitem__, from_the_end(nbytes))


@ANSWERS.wrong("06.cut_buckets", "wrong", "not for their bytes")
def bytes_for_numbers(nbytes, bucket_bytes, first_bucket_bytes):
    caps = [first_bucket_bytes] + [bucket_bytes] * len(nbytes)
    buckets = cut(nbytes, caps.__getitem__, from_the_end(nbytes))
    return [[nbytes[i] for i in bucket] for bucket in buckets]


@ANSWERS.wrong("06.cut_buckets", "wrong", "the numbers count from the end")
def counted_from_the_end(nbytes, bucket_bytes, first_bucket_bytes):
    caps = [first_bucket_bytes] + [bucket_bytes] * len(nbytes)
    return cut(nbytes[::-1], caps.__getitem__, range(len(nbytes)))


@ANSWERS.wrong("06.cut_buckets", "wrong", "It would work: but it is what you build")
def the_courses_formula(nbytes, bucket_bytes, first_bucket_bytes):
    return costs.ddp_buckets(nbytes, cap=bucket_bytes, first_cap=first_bucket_bytes)


@ANSWERS.wrong("06.cut_buckets", "wrong", "nothing can be counted or indexed with one")
def in_lists_of_floats(nbytes, bucket_bytes, first_bucket_bytes):
    buckets = as_the_solution_cuts(nbytes, bucket_bytes, first_bucket_bytes)
    return [[float(number) for number in bucket] for bucket in buckets]


def as_the_solution_cuts(nbytes, bucket_bytes, first_bucket_bytes):
    buckets, members, held, cap = [], [], 0, first_bucket_bytes
    for number in reversed(range(len(nbytes))):
        members.append(number)
        held += nbytes[number]
        if held >= cap:
            buckets.append(members)
            members, held, cap = [], 0, bucket_bytes
    return [*buckets, members] if members else buckets


@ANSWERS.wrong("06.cut_buckets", "wrong", "It has one cap only: first_bucket_bytes.")
def at_either_cap(nbytes, bucket_bytes, first_bucket_bytes):
    return with_caps(nbytes, bucket_bytes, min(bucket_bytes, first_bucket_bytes))


@ANSWERS.wrong("06.cut_buckets", "wrong", "The item at index")
def the_smaller_cap_first(nbytes, bucket_bytes, first_bucket_bytes):
    caps = sorted([bucket_bytes, first_bucket_bytes])
    return with_caps(nbytes, caps[1], caps[0])


@ANSWERS.right("06.cut_buckets")
def with_caps(nbytes, bucket_bytes, first_bucket_bytes):
    caps = [first_bucket_bytes] + [bucket_bytes] * len(nbytes)
    return cut(nbytes, caps.__getitem__, from_the_end(nbytes))


@ANSWERS.right("06.cut_buckets")
def by_popping(nbytes, bucket_bytes, first_bucket_bytes):
    left, cap, buckets = list(range(len(nbytes))), first_bucket_bytes, []
    while left:
        bucket = (left.pop(),)
        while left and sum(nbytes[i] for i in bucket) < cap:
            bucket += (left.pop(),)
        buckets.append(bucket)
        cap = bucket_bytes
    return tuple(buckets)


# ------------------------------------------------ 06.async_ddp, 06.spot_the_hook


@ANSWERS.wrong("06.async_ddp", "not attempted", "still raises NotImplementedError")
class Stub(nn.Module):
    def __init__(self, module):
        super().__init__()
        raise NotImplementedError("Write your code here.")


class Right(nn.Module):
    """What the wrong answers below are made from, by changing one thing."""

    def __init__(self, module):
        super().__init__()
        self.module, self.requests = module, []
        self.begin()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.send)

    def begin(self):
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def forward(self, *args):
        return self.module(*args)

    def finish(self):
        for request in self.requests:
            request.wait()
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "What is sent is the parameter itself")
class SendsParametersAndDividesGradients(Right):
    def send(self, parameter):
        request = dist.all_reduce(parameter.data, async_op=True)
        self.requests.append((parameter, request))

    def finish(self):
        for parameter, request in self.requests:
            request.wait()
            parameter.grad /= dist.get_world_size()
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "it has got a hook for each of them")
class HooksLayerByLayer(Right):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()
        for layer in module.modules():
            for parameter in layer.parameters(recurse=False):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.send)


@ANSWERS.wrong("06.async_ddp", "wrong", "Not all ranks begin with rank 0's model.")
class NoStart(Right):
    def begin(self):
        pass


@ANSWERS.wrong("06.async_ddp", "wrong", "Not all ranks begin with rank 0's model.")
class BeginsWithRank1(Right):
    """All begin alike, if there are two ranks."""

    def begin(self):
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.data, src=1)


@ANSWERS.wrong("06.async_ddp", "crashed", "which rank sends: src=0.")
class BeginsWithNobody(Right):
    def begin(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data)


@ANSWERS.wrong("06.async_ddp", "wrong", "No all-reduce was made in a whole step.")
class NoHooks(Right):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()


@ANSWERS.wrong("06.async_ddp", "wrong", "No all-reduce was made in a whole step.")
class OnlyDivides(Right):
    def send(self, parameter):
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("06.async_ddp", "crashed", "a request with async_op=True only.")
class KeepsNoRequest(Right):
    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.requests.append(dist.all_reduce(parameter.grad))


@ANSWERS.wrong("06.async_ddp", "wrong", "also where they hold whole numbers")
class FloatBuffersOnly(Right):
    def begin(self):
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.is_floating_point():
                dist.broadcast(tensor.data, src=0)


ANSWERS.wrong("06.spot_the_hook", "wrong", "also where they hold whole numbers")(
    FloatBuffersOnly
)


@ANSWERS.wrong("06.async_ddp", "wrong", "but the buffers are not,")
class NoBuffers(Right):
    def begin(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=0)


@ANSWERS.wrong("06.async_ddp", "wrong", "That is the sum over the ranks.")
class Sum(Right):
    def send(self, parameter):
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))


@ANSWERS.wrong("06.async_ddp", "wrong", "did the result reach `parameter.grad`?")
class MeansInNewTensors(Right):
    def send(self, parameter):
        gradient = parameter.grad
        request = dist.all_reduce(gradient, async_op=True)
        self.requests.append((gradient, request))

    def finish(self):
        for gradient, request in self.requests:
            request.wait()
            gradient = gradient / dist.get_world_size()
        self.requests.clear()


class MadeInALoop(Right):
    """All hooks see the last parameter."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = lambda _: self.send(parameter)  # noqa: B023, E731
                parameter.register_post_accumulate_grad_hook(hook)


ANSWERS.wrong("06.async_ddp", "wrong", "a function that is made in a loop")(MadeInALoop)


@ANSWERS.wrong("06.async_ddp", "wrong", "are hooks registered anew in each forward?")
class HooksInEachForward(Right):
    def forward(self, *args):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.send)
        return super().forward(*args)


@ANSWERS.wrong("06.async_ddp", "wrong", "a function that is made in a loop")
class MadeInALoopAndDividesAfterwards(MadeInALoop):
    def send(self, parameter):
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests.append((parameter, request))

    def finish(self):
        for parameter, request in self.requests:
            request.wait()
            parameter.grad /= dist.get_world_size()
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "crashed", "A frozen parameter has .grad None")
class DividesAllInFinish(Right):
    def send(self, parameter):
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        super().finish()
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("06.async_ddp", "crashed", "`self.send`, without calling it")
class CallsTheHook(Right):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.send(parameter))


@ANSWERS.wrong("06.async_ddp", "wrong", "It is divided twice.")
class Twice(Right):
    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        super().send(parameter)


@ANSWERS.wrong("06.async_ddp", "wrong", "the gradient is in its .grad")
class SendsParameters(Right):
    def send(self, parameter):
        parameter.data /= dist.get_world_size()
        self.requests.append(dist.all_reduce(parameter.data, async_op=True))


@ANSWERS.wrong(
    "06.async_ddp",
    "crashed",
    "the gradient is in its .grad",
    did="sent the hook's argument",
)
class SendsItsArgument(Right):
    def send(self, gradient):
        self.requests.append((gradient, dist.all_reduce(gradient, async_op=True)))

    def finish(self):
        for gradient, request in self.requests:
            request.wait()
            gradient /= dist.get_world_size()
        self.requests = []


@ANSWERS.wrong("06.async_ddp", "wrong", "the gradient is in its .grad")
class SendsParametersAndForgetsTheList(Right):
    def send(self, parameter):
        self.requests.append(dist.all_reduce(parameter, async_op=True))

    def finish(self):
        for request in self.requests:
            request.wait()


@ANSWERS.wrong("06.async_ddp", "wrong", "did you average a copy")
class AveragesACopy(Right):
    def send(self, parameter):
        copy = parameter.grad.clone() / dist.get_world_size()
        self.requests.append(dist.all_reduce(copy, async_op=True))


@ANSWERS.wrong("06.async_ddp", "wrong", "Did you reduce a copy")
class ReducesACopy(Right):
    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        copy = parameter.grad.clone()
        self.requests.append(dist.all_reduce(copy, async_op=True))


@ANSWERS.wrong(
    "06.async_ddp",
    "wrong",
    "was not called during the backward.",
    did="all sent in `finish`",
)
class AfterTheBackward(Right):
    def send(self, parameter):
        pass

    def finish(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                Right.send(self, parameter)
        super().finish()


@ANSWERS.wrong(
    "06.async_ddp", "wrong", "Pass async_op=True", did="no `async_op=True` in the hook"
)
class Synchronous(Right):
    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


@ANSWERS.wrong("06.async_ddp", "wrong", "while an all-reduce was still under way")
class NobodyWaits(Right):
    def finish(self):
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "while an all-reduce was still under way")
class WaitsForTheLast(Right):
    def finish(self):
        self.requests[-1].wait()
        self.requests.clear()


class Promises(Right):
    """The idiom of communication hooks; finish() waits for all of them."""

    def send(self, parameter):
        gradient, n = parameter.grad, dist.get_world_size()
        future = dist.all_reduce(gradient, async_op=True).get_future()
        self.requests.append(future.then(lambda _: gradient.div_(n)))


ANSWERS.right("06.async_ddp")(Promises)


@ANSWERS.wrong("06.async_ddp", "wrong", "`then()` do not wait")
class NobodyWaitsForPromises(Promises):
    def finish(self):
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "`then()` do not wait")
class OnlyABarrier(Promises):
    def finish(self):
        dist.barrier()
        time.sleep(0.02)
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "`then()` do not wait")
class WaitsForTheLastPromise(Promises):
    def finish(self):
        self.requests[-1].wait()
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "`then()` do not wait")
class WaitsBeforeThen(Promises):
    def send(self, parameter):
        gradient, n = parameter.grad, dist.get_world_size()
        future = dist.all_reduce(gradient, async_op=True).get_future()
        future.then(lambda _: gradient.div_(n))
        self.requests.append(future)


@ANSWERS.wrong("06.async_ddp", "wrong", "Pass async_op=True, keep")
class WaitsForFuturesInTheHook(Promises):
    def send(self, parameter):
        super().send(parameter)
        self.requests[-1].wait()


@ANSWERS.wrong("06.async_ddp", "crashed", "`value()` does not wait")
class TakesTheValue(Right):
    def send(self, parameter):
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests.append((parameter, request.get_future()))

    def finish(self):
        for parameter, future in self.requests:
            parameter.grad = future.value()[0] / dist.get_world_size()
        self.requests.clear()


@ANSWERS.wrong(
    "06.async_ddp",
    "wrong",
    "The list was never emptied",
    did="kept the list of requests",
)
class NeverCleared(Right):
    def finish(self):
        for request in self.requests:
            request.wait()


@ANSWERS.wrong("06.async_ddp", "wrong", "The list was never emptied")
class DividesWhatIsInTheList(Right):
    """An old entry divides the new gradient, which is still under way."""

    def send(self, parameter):
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests.append((parameter, request))

    def finish(self):
        for parameter, request in self.requests:
            request.wait()
            parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("06.async_ddp", "crashed", "keep each request with its parameter")
class InTheOrderOfParameters(Right):
    def send(self, parameter):
        copy = parameter.grad.clone()
        self.requests.append((copy, dist.all_reduce(copy, async_op=True)))

    def finish(self):
        parameters = self.module.parameters()
        for parameter, (copy, request) in zip(parameters, self.requests, strict=False):
            request.wait()
            parameter.grad = copy / dist.get_world_size()
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "crashed", "keep each request with its parameter")
class CopiesInTheOrderOfParameters(InTheOrderOfParameters):
    def finish(self):
        parameters = self.module.parameters()
        for parameter, (copy, request) in zip(parameters, self.requests, strict=False):
            request.wait()
            parameter.grad.copy_(copy / dist.get_world_size())
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "weights and biases")
class WeightsOnly(Right):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and name.endswith("weight"):
                parameter.register_post_accumulate_grad_hook(self.send)


ANSWERS.wrong("06.spot_the_hook", "wrong", "weights and biases")(WeightsOnly)


@ANSWERS.wrong("06.async_ddp", "wrong", "The hook of a module")
class HooksOfModules(Right):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()
        for part in module.modules():
            part.register_full_backward_hook(self.send_all)

    def send_all(self, part, *gradients):
        for parameter in part.parameters(recurse=False):
            if parameter.grad is not None:
                self.send(parameter)


ANSWERS.wrong("06.async_ddp", "wrong", "the class itself, not an object of it")(
    nn.Linear(2, 2)
)


@ANSWERS.wrong("06.async_ddp", "wrong", "requests of earlier steps are still kept")
class WaitsForTheNewOnly(Right):
    done = 0

    def finish(self):
        for request in self.requests[self.done :]:
            request.wait()
        self.done = len(self.requests)


@ANSWERS.wrong("06.async_ddp", "wrong", "Step 0 sends as it should")
class WaitsInLaterHooks(Right):
    step = 0

    def send(self, parameter):
        super().send(parameter)
        if self.step:
            self.requests[-1].wait()

    def finish(self):
        super().finish()
        self.step += 1


@ANSWERS.wrong("06.async_ddp", "wrong", "Step 0 sends as it should")
class LaterStepsInFinish(Right):
    """Remembers who has been sent, and never forgets it."""

    def __init__(self, module):
        super().__init__(module)
        self.done, self.late = set(), []

    def send(self, parameter):
        if parameter in self.done:
            self.late.append(parameter)
        else:
            self.done.add(parameter)
            super().send(parameter)

    def finish(self):
        for parameter in self.late:
            Right.send(self, parameter)
        self.late.clear()
        super().finish()


@ANSWERS.wrong("06.async_ddp", "wrong", "began only when all gradients were there")
class AllInTheLastHook(Right):
    def __init__(self, module):
        super().__init__(module)
        self.there = []

    def send(self, parameter):
        self.there.append(parameter)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if len(self.there) == len(trained):
            for one in self.there:
                Right.send(self, one)
            self.there.clear()


@ANSWERS.wrong("06.async_ddp", "crashed", "it cannot have a hook")
class HooksOnAll(Right):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.send)


@ANSWERS.wrong("06.async_ddp", "wrong", "`state_dict()` leaves out those")
class BuffersByStateDict(Right):
    def begin(self):
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, src=0)


@ANSWERS.wrong("06.async_ddp", "crashed", "One rank has reached the end of `__init__`")
class Rank0Begins(Right):
    def begin(self):
        if dist.get_rank() == 0:
            super().begin()


@ANSWERS.wrong("06.async_ddp", "wrong", "between its all-reduce and the `wait()`")
class DividesAfterSending(Right):
    def send(self, parameter):
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("06.async_ddp", "wrong", "between its all-reduce and the `wait()`")
class DividesBeforeWaiting(Right):
    def send(self, parameter):
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
        super().finish()


@ANSWERS.wrong("06.async_ddp", "wrong", "while an all-reduce was still under way")
class Sleeps(Right):
    def finish(self):
        time.sleep(0.05)
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "A hook of `register_hook`")
class TensorHooks(Right):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.requests = module, []
        self.begin()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.send)

    def send(self, gradient):
        mean = gradient / dist.get_world_size()
        self.requests.append(dist.all_reduce(mean, async_op=True))
        return mean


@ANSWERS.wrong("06.async_ddp", "wrong", ".grad is None. finish() must leave the mean")
class ThrowsAway(Right):
    def finish(self):
        super().finish()
        self.module.zero_grad()


@ANSWERS.wrong("06.async_ddp", "wrong", "with this function")
class GathersInstead(Right):
    def send(self, parameter):
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        request = dist.all_gather(parts, parameter.grad, async_op=True)
        self.requests.append((parameter, parts, request))

    def finish(self):
        for parameter, parts, request in self.requests:
            request.wait()
            parameter.grad.copy_(sum(parts) / len(parts))
        self.requests.clear()


@ANSWERS.wrong("06.async_ddp", "wrong", "It would work: but it is what you build here")
class TorchsOwn(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.wrapped = nn.parallel.DistributedDataParallel(module)

    def forward(self, *args):
        return self.wrapped(*args)

    def finish(self):
        pass


@ANSWERS.wrong("06.async_ddp", "wrong", "It would work: but it is what you build here")
class TheCoursesUnderAnotherName(ddp.HookedDDP):
    def finish(self):
        self.wait()


@ANSWERS.right("06.async_ddp")
class EmptiedByTheNextBackward(Right):
    """The last step's requests stay until then, and no longer."""

    new = True

    def send(self, parameter):
        if self.new:
            self.requests, self.new = [], False
        super().send(parameter)

    def finish(self):
        for request in self.requests:
            request.wait()
        self.new = True


@ANSWERS.right("06.async_ddp")
class HookByHook(Right):
    pass


@ANSWERS.right("06.async_ddp")
class DividesAfterwards(Right):
    def __init__(self, module):
        super().__init__(module)
        self.there = []

    def send(self, parameter):
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.there.append((parameter, request.get_future()))

    def finish(self):
        there, self.there = self.there, []
        for parameter, future in there:
            future.wait()
            parameter.grad /= dist.get_world_size()


@ANSWERS.right("06.async_ddp")
class InInferenceMode(Right):
    """What travels is an inference tensor, which has no number of its changes."""

    @torch.inference_mode()
    def send(self, parameter):
        mean = parameter.grad / dist.get_world_size()
        request = dist.all_reduce(mean, async_op=True)
        self.requests.append((parameter, mean, request))

    def finish(self):
        for parameter, mean, request in self.requests:
            request.wait()
            parameter.grad.copy_(mean)
        self.requests.clear()


@ANSWERS.right("06.async_ddp")
class AllPromises(Promises):
    def finish(self):
        torch.futures.wait_all(self.requests)
        self.requests.clear()


@ANSWERS.right("06.async_ddp")
class ValueAfterWaiting(Right):
    def send(self, parameter):
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests.append((parameter, request.get_future()))

    def finish(self):
        for parameter, future in self.requests:
            future.wait()
            parameter.grad = future.value()[0] / dist.get_world_size()
        self.requests.clear()


@ANSWERS.right("06.async_ddp")
class AllFutures(Right):
    def send(self, parameter):
        parameter.grad /= dist.get_world_size()
        request = dist.all_reduce(parameter.grad, async_op=True)
        self.requests.append(request.get_future())

    def finish(self):
        torch.futures.wait_all(self.requests)
        self.requests.clear()


@ANSWERS.right("06.async_ddp")
class WaitsAtTheEndOfTheBackward(Right):
    """As torch's DDP does: nothing is left for finish()."""

    def send(self, parameter):
        if not self.requests:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.wait)
        super().send(parameter)

    def wait(self):
        Right.finish(self)

    def finish(self):
        pass


@ANSWERS.right("06.async_ddp")
class WithMeans(Right):
    """ReduceOp.AVG, and closures instead of methods."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, requests = module, []
        self.begin()

        def send(parameter):
            request = dist.all_reduce(
                parameter.grad, op=dist.ReduceOp.AVG, async_op=True
            )
            requests.append(request)

        def finish():
            while requests:
                requests.pop().wait()

        self.finish_all = finish
        for parameter in filter(lambda p: p.requires_grad, module.parameters()):
            parameter.register_post_accumulate_grad_hook(send)

    def finish(self):
        self.finish_all()


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


@ANSWERS.wrong("06.spot_the_hook", "not attempted", "Repair the code")
class CopiedDDP(Wrapped):
    def __init__(self, module):
        super().__init__(module)
        self.gradients, self.requests = [], []
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, gradient):
        self.gradients.append(gradient.data)
        self.requests.append(dist.all_reduce(gradient.data, async_op=True))

    def finish(self):
        for gradient, request in zip(self.gradients, self.requests, strict=True):
            request.wait()
            gradient /= dist.get_world_size()


class Repaired(CopiedDDP):
    """Without its bugs; each answer below has one of them again."""

    def __init__(self, module):
        super().__init__(module)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)

    def reduce(self, parameter):
        self.gradients.append(parameter.grad)
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        super().finish()
        self.gradients.clear()
        self.requests.clear()


@ANSWERS.wrong("06.spot_the_hook", "wrong", "but the buffers are not,")
class BuffersOfRank1(Repaired):
    def __init__(self, module):
        CopiedDDP.__init__(self, module)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=1)


@ANSWERS.wrong("06.spot_the_hook", "wrong", "but the buffers are not,")
class BuffersStill(Repaired):
    def __init__(self, module):
        CopiedDDP.__init__(self, module)


@ANSWERS.wrong("06.spot_the_hook", "wrong", "It gets the *parameter*")
class ParametersStill(Repaired):
    def reduce(self, parameter):
        CopiedDDP.reduce(self, parameter)


@ANSWERS.wrong("06.spot_the_hook", "wrong", "The list was never emptied")
class ListsStill(Repaired):
    def finish(self):
        CopiedDDP.finish(self)


@ANSWERS.wrong("06.spot_the_hook", "crashed", "one of them was emptied")
class OneListStill(Repaired):
    def finish(self):
        CopiedDDP.finish(self)
        self.requests.clear()


@ANSWERS.wrong("06.spot_the_hook", "wrong", "A hook of `register_hook`")
class GradientAfterAll(Repaired):
    """The argument is called `gradient`, so let it be one."""

    def __init__(self, module):
        Wrapped.__init__(self, module)
        self.gradients, self.requests = [], []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
            if tensor.requires_grad:
                tensor.register_hook(self.reduce)

    def reduce(self, gradient):
        CopiedDDP.reduce(self, gradient)


@ANSWERS.wrong("06.spot_the_hook", "wrong", "Lists and counters must be as new")
class OnlyTheRequestsCleared(Repaired):
    def finish(self):
        for request in self.requests:
            request.wait()
        self.requests.clear()
        for gradient in self.gradients:
            gradient /= dist.get_world_size()


@ANSWERS.wrong("06.spot_the_hook", "wrong", "divided by the number of gradients")
class DividedByTheGradients(Repaired):
    def finish(self):
        for gradient, request in zip(self.gradients, self.requests, strict=True):
            request.wait()
            gradient /= len(self.requests)
        self.gradients.clear()
        self.requests.clear()


@ANSWERS.wrong("06.spot_the_hook", "crashed", "A frozen parameter has .grad None")
class DividedByParameters(Repaired):
    def finish(self):
        for request in self.requests:
            request.wait()
        for parameter in self.module.parameters():
            parameter.grad = parameter.grad / dist.get_world_size()
        self.gradients.clear()
        self.requests.clear()


@ANSWERS.wrong("06.spot_the_hook", "wrong", "`then()` do not wait")
class PromisedOnly(Repaired):
    def reduce(self, parameter):
        gradient, n = parameter.grad, dist.get_world_size()
        future = dist.all_reduce(gradient, async_op=True).get_future()
        future.then(lambda _: gradient.div_(n))

    def finish(self):
        dist.barrier()


@ANSWERS.wrong("06.spot_the_hook", "wrong", "was not called during the backward.")
class ReducedAtTheEnd(Repaired):
    def reduce(self, parameter):
        self.gradients.append(parameter.grad)

    def finish(self):
        for gradient in self.gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        self.gradients.clear()


@ANSWERS.wrong("06.spot_the_hook", "wrong", "Not all ranks begin with rank 0's model")
class FrozenNotSent(Repaired):
    def __init__(self, module):
        Wrapped.__init__(self, module)
        self.gradients, self.requests = [], []
        for parameter in module.parameters():
            if parameter.requires_grad:
                dist.broadcast(parameter.data, src=0)
                parameter.register_post_accumulate_grad_hook(self.reduce)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


@ANSWERS.wrong("06.spot_the_hook", "crashed", "it cannot have a hook")
class HooksOnTheFrozen(Repaired):
    def __init__(self, module):
        Wrapped.__init__(self, module)
        self.gradients, self.requests = [], []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)


@ANSWERS.wrong("06.spot_the_hook", "wrong", "requests of earlier steps are still kept")
class ListsStillGrow(Repaired):
    done = 0

    def finish(self):
        new = slice(self.done, None)
        pairs = zip(self.gradients[new], self.requests[new], strict=True)
        for gradient, request in pairs:
            request.wait()
            gradient /= dist.get_world_size()
        self.done = len(self.requests)


@ANSWERS.right("06.spot_the_hook")
class AllThree(Repaired):
    pass


@ANSWERS.right("06.spot_the_hook")
class DividedFirst(Repaired):
    def reduce(self, parameter):
        parameter.grad.div_(dist.get_world_size())
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        requests, self.requests = self.requests, []
        for request in requests:
            request.wait()


# ----------------------------------------------------------------- 06.bucketed_ddp


@ANSWERS.wrong("06.bucketed_ddp", "not attempted", "still raises NotImplementedError")
class BucketStub(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        raise NotImplementedError("Write your code here.")


class Buckets(nn.Module):
    """What the wrong answers below are made from, by changing one thing."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
        self.buckets = self.cut(
            [p for p in module.parameters() if p.requires_grad], bucket_bytes
        )
        self.begin()
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                self.hook_up(parameter, number)

    def cut(self, trained, cap):
        buckets, held = [[]], 0
        for parameter in reversed(trained):
            if held >= cap:
                buckets, held = [*buckets, []], 0
            buckets[-1].append(parameter)
            held += 4 * parameter.numel()
        return buckets

    def hook_up(self, parameter, number):
        parameter.register_post_accumulate_grad_hook(lambda p: self.ready(number))

    def begin(self):
        self.next, self.sent = 0, []
        self.missing = [len(bucket) for bucket in self.buckets]

    def ready(self, number):
        self.missing[number] -= 1
        while self.next < len(self.buckets) and self.missing[self.next] == 0:
            self.send(self.buckets[self.next])
            self.next += 1

    def send(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def forward(self, *args):
        return self.module(*args)

    def finish(self):
        for bucket, flat, request in self.sent:
            request.wait()
            for p, part in zip(
                bucket, flat.split([p.numel() for p in bucket]), strict=True
            ):
                p.grad.copy_(part.view_as(p))
        self.begin()


@ANSWERS.wrong("06.bucketed_ddp", "crashed", "the shape of its gradient by `view_as`")
class FlatParts(Buckets):
    def finish(self):
        for bucket, flat, request in self.sent:
            request.wait()
            parts = flat.split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad = part
        self.begin()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "Each gradient travels by itself.")
class OneByOne(Buckets):
    def ready(self, number):
        pass

    def hook_up(self, parameter, number):
        parameter.register_post_accumulate_grad_hook(lambda p: self.send([p]))


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "These are not the buckets of the task")
class FromTheFront(Buckets):
    def cut(self, trained, cap):
        return super().cut(trained[::-1], cap)


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "they leave too late")
class AllInTheLastHook2(Buckets):
    def ready(self, number):
        self.missing[number] -= 1
        if not any(self.missing):
            for bucket in self.buckets:
                self.send(bucket)


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "was not called during the backward.")
class InFinish(Buckets):
    def ready(self, number):
        pass

    def finish(self):
        for bucket in self.buckets:
            self.send(bucket)
        super().finish()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "That is the sum over the ranks.")
class SumOfBuckets(Buckets):
    def send(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "You have sent the parameters")
class FlatParameters(Buckets):
    def send(self, bucket):
        flat = torch.cat([p.data.flatten() for p in bucket]) / dist.get_world_size()
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "You have sent the parameters")
class SumOfFlatParameters(Buckets):
    def send(self, bucket):
        flat = torch.cat([p.data.flatten() for p in bucket])
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "Join them in the order of the bucket")
class JoinedAsTheyGotReady(Buckets):
    """On odd ranks that is another order."""

    def begin(self):
        super().begin()
        self.joined = [[] for _ in self.buckets]

    def hook_up(self, parameter, number):
        def hook(parameter):
            self.joined[number].append(parameter)
            self.ready(number)

        parameter.register_post_accumulate_grad_hook(hook)

    def send(self, bucket):
        super().send(self.joined[self.next])


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "where does each part begin?")
class AllFromTheBeginning(Buckets):
    def finish(self):
        for bucket, flat, request in self.sent:
            request.wait()
            for p in bucket:
                p.grad.copy_(flat[: p.numel()].view_as(p))
        self.begin()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "in which order were they joined")
class PartsInAnotherOrder(Buckets):
    def finish(self):
        self.sent = [(bucket[::-1], *rest) for bucket, *rest in self.sent]
        super().finish()


@ANSWERS.wrong("06.bucketed_ddp", "crashed", "A bias has one dimension")
class JoinedAsTheyAre(Buckets):
    def send(self, bucket):
        flat = torch.cat([p.grad for p in bucket]) / dist.get_world_size()
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "Some all-reduces began only in finish()")
class LastInFinish(Buckets):
    def ready(self, number):
        self.missing[number] -= 1
        last = len(self.buckets) - 1
        while self.next < last and self.missing[self.next] == 0:
            self.send(self.buckets[self.next])
            self.next += 1

    def finish(self):
        self.send(self.buckets[-1])
        super().finish()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "Did you reduce a copy")
class NotWrittenBack(Buckets):
    def finish(self):
        for bucket, _, request in self.sent:
            request.wait()
            for parameter in bucket:
                parameter.grad /= dist.get_world_size()
        self.begin()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "Or was it written there before `wait()`")
class CopiesBeforeWaiting(Buckets):
    def finish(self):
        for bucket, flat, request in self.sent:
            parts = flat.split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad.copy_(part.view_as(p))
            request.wait()
        self.begin()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "A flat tensor is a copy")
class NothingWrittenBack(Buckets):
    def finish(self):
        for _, _, request in self.sent:
            request.wait()
        self.begin()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "No bucket was sent")
class CountsNothingDown(Buckets):
    def ready(self, number):
        self.missing[number] += 1
        super().ready(number)


@ANSWERS.wrong("06.bucketed_ddp", "crashed", "sent before it was full")
class FirstGradientSends(Buckets):
    def ready(self, number):
        while self.next < len(self.buckets):
            self.send(self.buckets[self.next])
            self.next += 1


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "Count the gradient first")
class CountsAfterwards(Buckets):
    def ready(self, number):
        while self.next < len(self.buckets) and self.missing[self.next] == 0:
            self.send(self.buckets[self.next])
            self.next += 1
        self.missing[number] -= 1


@ANSWERS.wrong(
    "06.bucketed_ddp", "wrong", "with `while` and not with `if`", did="`if` for `while`"
)
class IfForWhile(Buckets):
    def ready(self, number):
        self.missing[number] -= 1
        if self.next < len(self.buckets) and self.missing[self.next] == 0:
            self.send(self.buckets[self.next])
            self.next += 1


@ANSWERS.wrong("06.bucketed_ddp", "crashed", "after the last bucket there is none")
class WhileWithoutEnd(Buckets):
    def ready(self, number):
        self.missing[number] -= 1
        while self.missing[self.next] == 0:
            self.send(self.buckets[self.next])
            self.next += 1


@ANSWERS.wrong("06.bucketed_ddp", "crashed", "have all buckets been sent?")
class IfForWhileByIndex(IfForWhile):
    def finish(self):
        for i in range(len(self.buckets)):
            self.sent[i][2].wait()
        super().finish()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "Step 0 sends as it should")
class CountersNotReset(Buckets):
    """finish() sends what is left: from step 1 on that is all."""

    def finish(self):
        while self.next < len(self.buckets):
            self.send(self.buckets[self.next])
            self.next += 1
        missing = self.missing
        super().finish()
        self.missing = missing


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "requests of earlier steps are still kept")
class KeepsAllThatWasSent(Buckets):
    def finish(self):
        self.log = [*getattr(self, "log", []), *self.sent]
        super().finish()


@ANSWERS.wrong("06.bucketed_ddp", "crashed", "The ranks have not made the same calls.")
class AnotherCallOnOddRanks(Buckets):
    def send(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
        if dist.get_rank() % 2:
            self.sent.append((bucket, flat, dist.barrier(async_op=True)))
        else:
            self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


@ANSWERS.wrong(
    "06.bucketed_ddp", "wrong", ".grad is None. finish() must leave the mean"
)
class GradientsGone(Buckets):
    def finish(self):
        super().finish()
        self.module.zero_grad()


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "they leave in the wrong order")
class AsSoonAsFull(Buckets):
    """On two orders of gradients it would mix up buckets; one alone shows it."""

    def ready(self, number):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.send(self.buckets[number])


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "It would work: but it is what you build")
class CoursesBuckets(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.model = ddp.DDP(module, bucket_bytes=bucket_bytes)

    def forward(self, *args):
        return self.model(*args)

    def finish(self):
        pass


@ANSWERS.right("06.bucketed_ddp")
class InBuckets(Buckets):
    pass


@ANSWERS.right("06.bucketed_ddp")
class PromisedBuckets(Buckets):
    def send(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
        future = dist.all_reduce(flat, async_op=True).get_future()
        self.sent.append((bucket, flat, future.then(lambda future: future.value())))


@ANSWERS.wrong("06.bucketed_ddp", "wrong", "`then()` do not wait")
class BucketsByThemselves(Buckets):
    """Each bucket's `then` writes its means back, and nobody waits for it."""

    def send(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()

        def write(future):
            parts = flat.split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad.copy_(part.view_as(p))

        dist.all_reduce(flat, async_op=True).get_future().then(write)

    def finish(self):
        self.begin()


@ANSWERS.right("06.bucketed_ddp")
class InPlace(Buckets):
    """Flat tensors that live as long as the model; hooks copy into them."""

    def __init__(self, module, bucket_bytes):
        super().__init__(module, bucket_bytes)
        sizes = [sum(p.numel() for p in bucket) for bucket in self.buckets]
        self.flats = [torch.empty(size) for size in sizes]

    def send(self, bucket):
        flat = self.flats[self.next]
        torch.cat([p.grad.reshape(-1) for p in bucket], out=flat)
        request = dist.all_reduce(flat, async_op=True)
        self.sent.append((bucket, flat, request))

    def finish(self):
        for bucket, flat, request in self.sent:
            request.wait()
            flat /= dist.get_world_size()
            at = 0
            for p in bucket:
                p.grad = flat[at : at + p.numel()].view_as(p).clone()
                at += p.numel()
        self.begin()


# ------------------------------------------------------------------- 06.accumulate


@ANSWERS.wrong("06.accumulate", "not attempted", "still raises NotImplementedError")
def accumulate_stub(model, micro_batches):
    raise NotImplementedError("Write your code here.")


def accumulated(model, micro_batches, k, quiet=lambda i, last: i < last):
    last = len(micro_batches) - 1
    for i, (inputs, labels) in enumerate(micro_batches):
        with model.no_sync() if quiet(i, last) else contextlib.nullcontext():
            (F.cross_entropy(model(inputs), labels) / k).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "It is k times too large", did="no `/ k`")
def not_divided(model, micro_batches):
    accumulated(model, micro_batches, 1)


@ANSWERS.wrong("06.accumulate", "wrong", "should go through the model once")
def looks_at_all_of_them_first(model, micro_batches):
    with torch.no_grad():
        for inputs, _ in micro_batches:
            model(inputs)
    accumulated(model, micro_batches, len(micro_batches))


@ANSWERS.wrong("06.accumulate", "wrong", "should go through the model once")
def looks_at_the_first_without_ddp(model, micro_batches):
    with torch.inference_mode():
        model.module(micro_batches[0][0])
    accumulated(model, micro_batches, len(micro_batches))


@ANSWERS.wrong("06.accumulate", "wrong", "every micro-batch was sent")
def always_sent(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches), lambda i, last: False)


@ANSWERS.wrong("06.accumulate", "wrong", "DDP sent nothing")
def never_sent(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches), lambda i, last: True)


@ANSWERS.wrong(
    "06.accumulate",
    "wrong",
    "every micro-batch was sent",
    did="only the backward in `no_sync`",
)
def forward_outside(model, micro_batches):
    k = len(micro_batches)
    for i, (inputs, labels) in enumerate(micro_batches):
        loss = F.cross_entropy(model(inputs), labels) / k
        with model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss.backward()


@ANSWERS.wrong("06.accumulate", "wrong", "once more")
def divided_by_ranks_too(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches) * dist.get_world_size())


@ANSWERS.wrong("06.accumulate", "wrong", "You divided by the number of rows")
def divided_by_rows(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches[0][0]))


@ANSWERS.wrong("06.accumulate", "wrong", "DDP has done that already")
def divided_by_ranks(model, micro_batches):
    accumulated(model, micro_batches, dist.get_world_size())


@ANSWERS.wrong("06.accumulate", "wrong", "no zero_grad() in between")
def zeroed_in_between(model, micro_batches):
    for i in range(len(micro_batches)):
        model.zero_grad()
        accumulated(model, micro_batches[i : i + 1], 1)


@ANSWERS.wrong("06.accumulate", "wrong", "not through `model.module`")
def past_the_wrapper(model, micro_batches):
    k = len(micro_batches)
    for inputs, labels in micro_batches:
        (F.cross_entropy(model.module(inputs), labels) / k).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "`optimizer.step()` is not part of it")
def steps(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches))
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@ANSWERS.wrong("06.accumulate", "wrong", "all rows are in memory at the same time")
def one_large_batch(model, micro_batches):
    inputs, labels = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    F.cross_entropy(model(inputs), labels).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "all rows are in memory at the same time")
def one_backward(model, micro_batches):
    losses = [
        F.cross_entropy(model(inputs), labels) for inputs, labels in micro_batches
    ]
    (sum(losses) / len(losses)).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "should go through the model once")
def one_more_to_send(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches), lambda i, last: True)
    inputs, labels = micro_batches[0]
    (0 * F.cross_entropy(model(inputs), labels)).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "you did its work by hand")
def by_hand(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches), lambda i, last: True)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("06.accumulate", "wrong", "A micro-batch before the last one was sent")
def first_one_outside(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches), lambda i, last: i > 0)


@ANSWERS.wrong("06.accumulate", "wrong", "A micro-batch before the last one was sent")
def last_but_one_outside(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches), lambda i, last: i != last - 1)


@ANSWERS.wrong("06.accumulate", "wrong", "Only the backward of the last micro-batch")
def all_but_the_last_outside(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches), lambda i, last: i == last)


@ANSWERS.wrong("06.accumulate", "crashed", "takes the model's output first")
def labels_first(model, micro_batches):
    for inputs, labels in micro_batches:
        F.cross_entropy(labels, model(inputs)).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "the sum over the rows of a micro-batch")
def sums_of_rows(model, micro_batches):
    *others, last = micro_batches
    with model.no_sync():
        for inputs, labels in others:
            F.cross_entropy(model(inputs), labels, reduction="sum").backward()
    F.cross_entropy(model(last[0]), last[1], reduction="sum").backward()


@ANSWERS.wrong("06.accumulate", "wrong", "no zero_grad() after them")
def zeroed_in_the_end(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches))
    model.zero_grad()


@ANSWERS.wrong("06.accumulate", "crashed", "with parentheses")
def without_parentheses(model, micro_batches):
    with model.no_sync:
        accumulated(model, micro_batches, len(micro_batches))


@ANSWERS.wrong("06.accumulate", "wrong", "DDP stays as inside of no_sync()")
def left_switched_off(model, micro_batches):
    by_switching(model, micro_batches)
    model.require_backward_grad_sync = False


@ANSWERS.wrong("06.accumulate", "wrong", "left in another state than before")
def left_in_eval(model, micro_batches):
    last_one_outside(model, micro_batches)
    model.eval()


@ANSWERS.wrong("06.accumulate", "wrong", "left in another state than before")
def left_frozen(model, micro_batches):
    last_one_outside(model, micro_batches)
    model.requires_grad_(False)


@ANSWERS.wrong("06.accumulate", "wrong", "the caller's list is not what it was")
def pops(model, micro_batches):
    k = len(micro_batches)
    while micro_batches:
        inputs, labels = micro_batches.pop()
        with model.no_sync() if micro_batches else contextlib.nullcontext():
            (F.cross_entropy(model(inputs), labels) / k).backward()


@ANSWERS.wrong(
    "06.accumulate", "wrong", "some losses are divided by k, and some are not"
)
def all_but_the_last_divided(model, micro_batches):
    *others, (inputs, labels) = micro_batches
    with model.no_sync():
        for some, theirs in others:
            (F.cross_entropy(model(some), theirs) / len(micro_batches)).backward()
    F.cross_entropy(model(inputs), labels).backward()


@ANSWERS.wrong(
    "06.accumulate", "wrong", "some losses are divided by k, and some are not"
)
def only_the_last_divided(model, micro_batches):
    *others, (inputs, labels) = micro_batches
    with model.no_sync():
        for some, theirs in others:
            F.cross_entropy(model(some), theirs).backward()
    (F.cross_entropy(model(inputs), labels) / len(micro_batches)).backward()


@ANSWERS.wrong("06.accumulate", "wrong", "each gradient is that of the mean loss")
def always_seven_rows(model, micro_batches):
    k = len(micro_batches)
    for i, (inputs, labels) in enumerate(micro_batches, 1):
        model.require_backward_grad_sync = i == k
        losses = F.cross_entropy(model(inputs), labels, reduction="sum")
        losses.div(7 * k).backward()


@ANSWERS.right("06.accumulate")
def last_one_outside(model, micro_batches):
    *others, last = micro_batches
    with model.no_sync():
        for inputs, labels in others:
            (F.cross_entropy(model(inputs), labels) / len(micro_batches)).backward()
    inputs, labels = last
    (F.cross_entropy(model(inputs), labels) / len(micro_batches)).backward()


@ANSWERS.right("06.accumulate")
def by_switching(model, micro_batches):
    k = len(micro_batches)
    for i, (inputs, labels) in enumerate(micro_batches, 1):
        model.require_backward_grad_sync = i == k
        losses = F.cross_entropy(model(inputs), labels, reduction="sum")
        losses.div(len(labels) * k).backward()


test_wrong, test_right = ANSWERS.tests()


def train_copied():
    """The loss of each step, of the class with all three bugs."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    images, labels, _, _ = load_data("digits")
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    model, losses = CopiedDDP(nn.Sequential(nn.Flatten(), *layers)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(12):
        rows = slice(64 * step + rank, 64 * (step + 1), 2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        model.finish()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_copied_ddp_learns_nothing_as_the_exercise_says():
    with Ranks(2, backend="gloo", quiet=True) as two:
        losses = two.run(train_copied)[0]
    assert losses[6:] == pytest.approx([math.log(10)] * 6, abs=0.02)
