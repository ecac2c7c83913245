"""What counts as the same result, and what is said of a difference."""

import enum
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from course_utils.tasks.compare import Strange, difference, plain, show


class Backend(str, enum.Enum):
    """str() of it is not its text."""

    NCCL = "nccl"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (3, 3),
        (3.0, 3),
        (torch.tensor(3), 3),
        (torch.tensor([3.0]), 3),
        (torch.tensor(3), 3.0),
        (0.30000000001, 0.3),
        (float("nan"), float("nan")),
        (float("inf"), float("inf")),
        (True, True),
        (torch.tensor(True), True),
        ("a b", "a b"),
        (None, None),
        ([1, (2, 3)], (1, [2, 3])),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}),
        (torch.tensor([1e6, 1.0]), torch.tensor([1e6, 0.5])),
        (2.5, torch.tensor(2.5)),
        (Fraction(1, 3), 1 / 3),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.array([7]), 7),
        (np.array([1, 2]), (1, 2)),
        (torch.tensor([1, 2]), (1, 2)),
        (Backend.NCCL, "nccl"),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(2, requires_grad=True).detach(), torch.ones(2)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
    ],
)
def test_these_are_the_same(got, want):
    assert difference(plain(got), want, 1e-5) is None


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (4, 3, ""),
        (3.00001, 3, ""),
        (True, 1, "That is True or False; a number was expected."),
        (1, True, "That is a number; True or False was expected."),
        ("3", 3, "That is text; a number was expected."),
        (None, 3, "It returned None: did you forget `return`?"),
        (3, None, "That is a number; None was expected."),
        (0.1, 0.0, ""),
        (1e-7, 1e-6, ""),
        ("a  b", "a b", "Only the spaces are different."),
        ("A b", "a b", "Only capital and small letters are different."),
        ("a", "b", ""),
        ([1, 2], [1, 2, 3], "It has 2 items; 3 were expected."),
        ([1, 5], [1, 2], "The item at index 1 is wrong."),
        ([1, None], [1, 2], "The item at index 1 is wrong. It is None."),
        (
            [1, "2"],
            [1, 2],
            "The item at index 1 is wrong. That is text; a number was expected.",
        ),
        ([1], [1, 2], "It has 1 item; 2 were expected."),
        (torch.ones(2, 2), [1, 1], "That is a tensor; a list was expected."),
        (np.array(["1", "2"]), [1, 2], "That is a NumPy array; a list was expected."),
        (np.ones(1), torch.ones(1), "That is a NumPy array; a tensor was expected."),
        (2.0000000000000018, 2, "It is 2.0000000000000018, which is not a whole"),
        (10**400, 0.5, ""),
        (b"a", "a", "That is bytes; text was expected."),
        ({"a": 1}, {"a": 1, "b": 2}, "The key 'b' is missing."),
        ({"a": 1, "b": 2}, {"a": 1}, "The key 'b' was not expected."),
        ({"a": 2}, {"a": 1}, "The value of 'a' is wrong."),
        ([1.0], torch.ones(1), "That is a list; a tensor was expected."),
        (1.0, torch.ones(1), "That is a number; a tensor was expected."),
        (torch.ones(2), torch.ones(2, 1), "Its shape is (2,); (2, 1) was expected."),
        (torch.ones(2), torch.ones(2).int(), "its dtype is float32; int32 was"),
        (torch.ones(2), torch.zeros(2), ""),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), ""),
        (
            torch.arange(10.0),
            torch.arange(10.0) * torch.tensor([1.0] * 7 + [2.0] * 3),
            "3 of 10 values differ. The first, at index [7], is 7.0 and should be 14.0",
        ),
        (set(), [1], "That is a set; a list was expected."),
    ],
)
def test_these_differ_and_it_says_how(got, want, says):
    found = difference(plain(got), want, 1e-5)
    assert found is not None
    assert found == says or (says and says in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0.1 + 0.2, "0.3"),
        (2.0, "2.0"),
        ("a", "'a'"),
        (torch.tensor([1.0, -2.5]), "tensor([1., -2.5])"),
        (torch.tensor([[1, 2], [3, 4]]), "tensor([[1, 2], [3, 4]])"),
        (torch.ones(2).double(), "tensor([1., 1.], dtype=float64)"),
        (torch.tensor(3.0), "tensor(3.)"),
        (torch.ones(20, 30), "tensor of shape (20, 30), float32: 1., 1., 1., ..."),
        ([1, 2.5, "a"], "[1, 2.5, 'a']"),
        ((1,), "(1,)"),
        (list(range(50)), "[0, 1, 2, 3, 4, 5, ... 50 items]"),
        ({"a": torch.ones(1)}, "{'a': tensor([1.])}"),
        (Strange("Work"), "an object of type Work"),
        (plain(np.array([1.5, 2.0])), "array([1.5, 2.], dtype=float64)"),
        (10**400, "a number of more than 30 digits"),
    ],
)
def test_values_are_shown_short(value, text):
    assert show(value) == text


def test_plain_copies():
    tensor = torch.ones(3, requires_grad=True)
    copy = plain({"a": [tensor]})["a"][0]
    with torch.no_grad():
        tensor.zero_()
    assert copy.tolist() == [1, 1, 1]
    assert not copy.requires_grad
    view = plain(torch.zeros(1000, 1000)[:1, :2])
    assert view.untyped_storage().nbytes() == 8
    loop = []
    loop.append(loop)
    assert show(plain(loop)) == "[" * 8 + "an object of type list" + "]" * 8


def test_whole_numbers_are_compared_to_the_last_digit():
    want = torch.tensor([2**53 + 1, -1])
    assert difference(want.clone(), want, 1e-5) is None
    assert difference(torch.tensor([2**53, -1]), want, 1e-5) is not None
    found = difference(torch.tensor([5.0, -1.0]), torch.tensor([5, -1]), 1e-5)
    assert found.startswith("The values are right, but its dtype is float32; int64")
    assert difference(torch.tensor([True]), torch.tensor([False]), 0.0) is not None
