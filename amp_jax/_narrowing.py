"""Casting numbers to a dtype that can hold fewer, and counting what that costs.

A number *overflows* where it was finite and its cast isn't (or where it was infinite and the dtype has no infinity); it
is *flushed* where it wasn't zero and its cast is.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import finfo

CHUNK = 1 << 18
"""How many numbers are read, cast and written at a time: the temporaries of one chunk are all that it takes beside."""


class Loss(NamedTuple):
    """What a cast cost.

    Attributes:
        overflowed: How many numbers were too large, clipped ones included.
        flushed: How many became zero.
        largest_relative_error: Of the others.
    """

    overflowed: int = 0
    flushed: int = 0
    largest_relative_error: float = 0.0

    def plus(self, other: "Loss") -> "Loss":
        """The two together."""
        error = max(self.largest_relative_error, other.largest_relative_error)
        return Loss(self.overflowed + other.overflowed, self.flushed + other.flushed, error)


def flat_chunks(values: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """An array's numbers in order, cut into chunks."""
    flat = values.reshape(-1)
    return (flat[first : first + CHUNK] for first in range(0, flat.size, CHUNK))


def narrowed(
    chunks: Iterable[np.ndarray[Any, Any]], dtype: np.dtype[Any], clip: bool = False
) -> Iterator[tuple[np.ndarray[Any, Any], Loss]]:
    """Each chunk in the dtype, and what that cost it.

    >>> [(values, loss)] = narrowed([np.array([1e5, 1e-8, 65519, 65520], np.float32)], np.dtype(np.float16))
    >>> values.tolist(), loss.overflowed, loss.flushed
    ([inf, 0.0, 65504.0, inf], 2, 1)

    Args:
        chunks: Arrays of real floating numbers, of any shape.
        dtype: The dtype to have them in.
        clip: Whether numbers too large become the largest that the dtype has, with their sign.
    """
    for chunk in chunks:
        yield (chunk, Loss()) if chunk.dtype == dtype else _cast(chunk, dtype, clip)


def _cast(given: np.ndarray[Any, Any], dtype: np.dtype[Any], clip: bool) -> tuple[np.ndarray[Any, Any], Loss]:
    # NumPy compares and subtracts in float32 what it can't in the narrow dtypes.
    wide = given.astype(np.promote_types(np.float32, given.dtype) if given.dtype.kind == "f" else np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        values = given.astype(dtype)
        back = values.astype(np.promote_types(wide.dtype, np.float64 if dtype == np.float64 else np.float32))
        infinite = np.isinf(back)
        over = (np.isfinite(wide) & ~np.isfinite(back)) | (np.isinf(wide) & ~infinite)
        flushed = (back == 0) & (wide != 0)
        error = np.abs(back - wide) / np.abs(wide)
    if clip and over.any():
        limit = finfo(dtype).max
        values[over] = np.copysign(np.float64(limit), wide[over]).astype(dtype)
    # The others: neither lost, nor NaN, nor infinite, nor 0 / 0.
    error[over | flushed | ~np.isfinite(error)] = 0
    return values, Loss(int(over.sum()), int(flushed.sum()), float(error.max(initial=0)))
