"""The tables of a store, and the arrays that its calls take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from phub.errors import InvalidError

_TYPES = {
    np.dtype(np.float32): b"f32",
    np.dtype(np.float64): b"f64",
    np.dtype(np.int32): b"i32",
    np.dtype(np.int64): b"i64",
}


def row_numbers(given: ArrayLike) -> NDArray[np.uint64]:
    """Raises InvalidError unless they are one after another, whole, and not negative."""
    rows = np.asarray(given)
    if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size > 0):
        raise InvalidError(
            f"rows are a vector of whole numbers, not of shape {rows.shape} and of {rows.dtype}"
        )
    if rows.dtype.kind == "i" and rows.size > 0 and rows.min() < 0:
        raise InvalidError(f"there is no row {rows.min()}: rows are numbered from 0")
    return np.ascontiguousarray(rows, np.uint64)


@dataclass(frozen=True)
class TableArrays:
    """What arrays of a table's rows are like."""

    name: str
    number: int
    columns: int
    dtype: np.dtype[Any]

    @staticmethod
    def of(name: str, number: int, columns: int, dtype: DTypeLike) -> TableArrays:
        """Raises InvalidError for a type that no table has."""
        try:
            found = np.dtype(dtype)
        except TypeError:
            found = np.dtype(object)
        if found not in _TYPES:
            raise InvalidError(
                f"table '{name}': values are float32, float64, int32 or int64, not {dtype}"
            )
        return TableArrays(name, number, columns, found)

    @property
    def type(self) -> bytes:
        """The library's name of the type."""
        return _TYPES[self.dtype]

    def shape(self, rows: int) -> tuple[int, ...]:
        """Of an array with so many rows: a table of one column is a vector."""
        return (rows,) if self.columns == 1 else (rows, self.columns)

    def values(self, given: ArrayLike, rows: int) -> NDArray[Any]:
        """Values of so many rows, to be read by the library."""
        array = np.asarray(given)
        self._check(array, rows)
        return np.require(array, requirements=["C", "A"])

    def room(self, given: NDArray[Any], rows: int) -> NDArray[Any]:
        """The same, to be written."""
        if not isinstance(given, np.ndarray):
            raise InvalidError(f"table '{self.name}': `into` is a NumPy array, not {type(given)}")
        self._check(given, rows)
        if not given.flags.carray:
            raise InvalidError(
                f"table '{self.name}': `into` must be contiguous (C), aligned and writable"
            )
        return given

    def _check(self, array: NDArray[Any], rows: int) -> None:
        if array.dtype != self.dtype or array.shape not in (self.shape(rows), (rows, self.columns)):
            raise InvalidError(
                f"table '{self.name}': {rows} rows are of shape {self.shape(rows)} and of "
                f"{self.dtype}, not of {array.shape} and of {array.dtype}"
            )
