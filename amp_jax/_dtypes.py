"""Dtype names: what they are called, how they are read, and which numbers each can hold.

A *half* dtype has 16 bits: bfloat16 (the range of float32, 8 bits of precision) or float16 (11 bits, but nothing above
65504 and little below 6e-5).
"""

import difflib
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from amp_jax._errors import AmpTypeError, AmpValueError

_FLOAT8 = tuple(
    n
    for n in (
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3fn",
        "float8_e4m3b11fnuz",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(ml_dtypes, n)
)
_NAMES = ("float32", "bfloat16", "float16", "float64", *_FLOAT8)
_ALIASES = {
    "f32": "float32",
    "full": "float32",
    "single": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "f64": "float64",
    "double": "float64",
    "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def parse(spec: Any, argument: str = "dtype") -> np.dtype[Any]:
    """Read a real floating dtype.

    >>> parse("bf16"), parse(jnp.float16)
    (dtype(bfloat16), dtype('float16'))

    Args:
        spec: A name, a NumPy or JAX dtype, or a scalar type.
        argument: What the dtype is for; errors name it.

    Raises:
        AmpValueError: It is no real floating dtype.
        AmpTypeError: It is no dtype at all.
    """
    if isinstance(spec, str):
        name = _ALIASES.get(spec.strip().lower(), spec.strip().lower())
        if name in _NAMES:
            return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
        raise AmpValueError(
            f"`{argument}` is {spec!r}, which is no dtype for a policy. {suggest(spec, (*_NAMES, *_ALIASES))}"
        )
    try:
        dtype = np.dtype(spec)
    except TypeError:
        raise AmpTypeError(f"`{argument}` is {spec!r}, expected a dtype or its name, such as 'bfloat16'.") from None
    if spec is None or not (is_float(dtype) or is_float8(dtype)):
        raise AmpValueError(f"`{argument}` is {spec!r}, expected a real floating dtype. {suggest(str(spec), _NAMES)}")
    return dtype


def suggest(given: str, valid: tuple[str, ...]) -> str:
    """The end of an error message about a name: the nearest valid one, and all of them."""
    near = difflib.get_close_matches(given.strip().lower(), valid, n=1, cutoff=0.5)
    return (f"Did you mean {near[0]!r}? " if near else "") + "Valid are: " + ", ".join(valid) + "."


def name(dtype: Any) -> str:
    """The full name: `bfloat16`."""
    return np.dtype(dtype).name


def is_float(dtype: Any) -> bool:
    """Whether it is a real floating dtype of 16 bits or more."""
    return jnp.issubdtype(dtype, np.floating) and not is_float8(dtype)


def is_float8(dtype: Any) -> bool:
    """Whether it is one of the dtypes of 8 bits or less, which stand for other numbers by a scale beside them."""
    return getattr(dtype, "itemsize", 8) == 1 and jnp.issubdtype(dtype, np.floating)


def holds(value: Any, dtype: Any) -> bool:
    """Whether a dtype can hold constants: finite stays finite, and nothing loses more than its normal rounding.

    >>> holds(-1e9, jnp.float16), holds(-1e9, jnp.bfloat16), holds(1e-12, jnp.float16), holds(-np.inf, jnp.float16)
    (False, True, False, True)
    """
    numbers = np.asarray(value).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore", under="ignore"):
        rounded = numbers.astype(dtype).astype(np.float64)
    if not np.all(np.isfinite(rounded)):
        return False
    return bool(np.all(np.abs(rounded - numbers) <= float(jnp.finfo(dtype).eps) * np.abs(numbers)))
