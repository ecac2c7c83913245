"""What an argument may be: said in the signature, and checked by `checked`.

    @checked
    def algorithm_bandwidth(nbytes: NotNegative, seconds: Positive) -> float:
        return nbytes / seconds

    algorithm_bandwidth(8, seconds=0)
    # ValueError: seconds is 0: expected a finite number above 0.

So the body of a function is its formula, and nothing else. Needs the standard library
alone.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

NotNegative = Annotated[float, "a finite number from 0 up"]
Positive = Annotated[float, "a finite number above 0"]
Share = Annotated[float, "a number above 0, up to 1"]
Whole = Annotated[int, "a whole number from 0 up"]
Count = Annotated[int, "a whole number from 1 up"]

_FITS: dict[Any, Callable[[Any], bool]] = {
    NotNegative: lambda value: math.isfinite(value) and value >= 0,
    Positive: lambda value: math.isfinite(value) and value > 0,
    Share: lambda value: 0 < value <= 1,
    Whole: lambda value: isinstance(value, Integral) and value >= 0,
    Count: lambda value: isinstance(value, Integral) and value >= 1,
}

Function = TypeVar("Function", bound=Callable[..., Any])
Thing = TypeVar("Thing")


def checked(function: Function) -> Function:
    """The function, which first checks its arguments by their annotations.

    Looked at are the types above; `Literal`; and sequences, values of mappings, and
    "or None" of these. An argument that does not fit raises a `ValueError` that names
    it. Whole numbers of other libraries (NumPy's, say) become an `int`.
    """
    signature = inspect.signature(function)
    kinds = {name: one.annotation for name, one in signature.parameters.items()}

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises, and says what is missing
        for name, value in given.arguments.items():
            given.arguments[name] = fitting(value, name, kinds[name])
        return function(*given.args, **given.kwargs)

    return with_checks


def fitting(value: Any, what: str, kind: Any) -> Any:
    """`value`, if it is what the annotation says; else a `ValueError` names `what`."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return one_of(value, what, inside)
    if origin in (Union, types.UnionType):  # of a kind and None
        return value if value is None else fitting(value, what, inside[0])
    if origin is Sequence:
        return [fitting(one, f"{what}[{i}]", inside[0]) for i, one in enumerate(value)]
    if origin is Mapping:
        return {k: fitting(one, f"{what}[{k}]", inside[1]) for k, one in value.items()}
    if kind not in _FITS:
        return value
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not _FITS[kind](value):
        raise ValueError(f"{what} is {value!r}: expected {kind.__metadata__[0]}.")
    return int(value) if isinstance(value, Integral) else value


def one_of(value: Any, what: str, known: Collection[Any]) -> Any:
    """`value`, if it is known; else a `ValueError` lists what is."""
    if value not in known:
        names = ", ".join(map(str, known))
        raise ValueError(f"There is no {what} {value!r}. There are: {names}.")
    return value


def named(name: str, what: str, things: Sequence[Thing]) -> Thing:
    """The thing with that name; else a `ValueError` lists the names."""
    by_name = {thing.name: thing for thing in things}
    return by_name[one_of(name, what, by_name)]
