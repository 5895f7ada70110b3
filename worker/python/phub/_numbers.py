"""Numbers of the program, as C has them: it would take other ones for what does not fit."""

from __future__ import annotations

import operator
from ctypes import c_double
from typing import Any

from phub.errors import InvalidError


def whole_number(what: str, given: Any, bits: int) -> int:
    """Without a sign, of so many bits. Raises InvalidError, which says `what` it is."""
    number = _whole(what, given)
    if not 0 <= number < 1 << bits:
        raise InvalidError(f"{what} is {number}: it must be 0 to 2**{bits} - 1")
    return number


def signed_number(what: str, given: Any, bits: int) -> int:
    """The same with a sign."""
    number = _whole(what, given)
    if not -1 << (bits - 1) <= number < 1 << (bits - 1):
        raise InvalidError(f"{what} is {number}: it must be -2**{bits - 1} to 2**{bits - 1} - 1")
    return number


def real_number(what: str, given: Any) -> float:
    """A float, or what Python makes one of, but no text. Raises InvalidError."""
    try:
        return c_double(given).value
    except (TypeError, ValueError, OverflowError):
        raise InvalidError(f"{what} is {given!r}: it must be a number") from None


def _whole(what: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise InvalidError(f"{what} is {given!r}: it must be a whole number") from None
