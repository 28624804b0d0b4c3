"""Rounding by chance: up or down with the probabilities that leave the mean where it was.

A *step* is the distance from one number of a dtype to the next. A float32 number between two of them is a whole number
of steps and a rest; adding a random part of a step to it and dropping the rest rounds up exactly as often as the rest
is large. It is done on integers, the bits of the number, so that no intermediate result is rounded or flushed to zero.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from amp_jax import _dtypes
from amp_jax._errors import AmpTypeError, AmpValueError

# Those with a sign bit, whose largest exponent lies within float32's.
_TARGETS = ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3", "float8_e3m4")


def stochastic_round(key: Any, x: Any, dtype: Any) -> jax.Array:
    """`x` in a narrower dtype, rounded up or down by chance so that its mean stays.

    Rounding to nearest loses what is smaller than half a step, every time; here it counts on average. The same key
    gives the same bits, on any device and sharding. A number that the dtype holds comes out as it is, -0.0, inf and NaN
    too. Numbers beyond the largest of the dtype have no neighbour to be rounded up to, and are cast. The derivative is
    that of a cast: tangents and cotangents pass as if nothing had been rounded.

    >>> import amp_jax as amp, jax, jax.numpy as jnp
    >>> x = jnp.full(10_000, 1 + 2**-10)  # an eighth of bfloat16's step at 1.0
    >>> y = amp.stochastic_round(jax.random.key(0), x, "bfloat16")
    >>> sorted(set(y.tolist())), round((y == 1).mean().item(), 2)
    ([1.0, 1.0078125], 0.87)

    Gupta et al. 2015, "Deep Learning with Limited Numerical Precision" (https://arxiv.org/abs/1502.02551), 2.

    Args:
        key: a key of `jax.random`, one for each call; under `jax.vmap`, one for each example or one for all.
        x: real floating-point array of any shape; float64 is rounded to float32 first.
        dtype: bfloat16, float16, float8_e5m2, float8_e4m3fn, float8_e4m3 or float8_e3m4, or its name. A chance of less
            than 2^-31, which only numbers far below the smallest of the dtype have, counts as none.

    Returns:
        An array of the shape of `x`.

    Raises:
        AmpValueError: `dtype` isn't one of those.
        AmpTypeError: `x` isn't real floating-point.
    """
    target = _dtypes.parse(dtype)
    if target.name not in _TARGETS:
        raise AmpValueError(f"`dtype` is {target.name}, expected one to round down to: {', '.join(_TARGETS)}")
    kind = jnp.result_type(x)
    if not jnp.issubdtype(kind, np.floating):
        raise AmpTypeError(f"`x` is of dtype {kind}, expected real floating-point")
    return _round(target, key, jnp.asarray(x, np.float32))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _round(dtype: np.dtype[Any], key: jax.Array, x: jax.Array) -> jax.Array:
    info = jnp.finfo(dtype)
    number = lax.bitcast_convert_type(x, np.uint32)
    sign, exponent, fraction = number >> 31, (number >> 23) & 255, number & (2**23 - 1)
    # |x| = whole * 2^(exponent - 150), in a float32 that is subnormal too.
    whole = jnp.where(exponent == 0, fraction, fraction | 2**23)
    # The exponent, counted from the smallest normal one of the dtype; below it, a step is as large as there.
    binade = jnp.maximum(jnp.maximum(exponent, 1).astype(np.int32) - 127, info.minexp)
    dropped = (binade - info.nmant) - (jnp.maximum(exponent, 1).astype(np.int32) - 150)
    # Of a rest that is longer than a random number, the last bits are left out.
    whole = whole >> jnp.clip(dropped - 31, 0, 31).astype(np.uint32)
    dropped = jnp.minimum(dropped, 31).astype(np.uint32)
    chance = jax.random.bits(key, x.shape, np.uint32) >> (32 - dropped)
    steps = (whole + chance) >> dropped
    # A carry out of the fraction is the next exponent: numbers of one sign are ordered as their bits are.
    rounded = ((binade - info.minexp).astype(np.uint32) << info.nmant) + steps
    unsigned = np.uint16 if info.bits == 16 else np.uint8
    rounded = (rounded | (sign << (info.bits - 1))).astype(unsigned)
    # Not within range: beyond the largest number, inf and NaN.
    return jnp.where(jnp.abs(x) <= float(info.max), lax.bitcast_convert_type(rounded, dtype), x.astype(dtype))


@_round.defjvp
def _round_jvp(dtype: np.dtype[Any], primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _round(dtype, *primals), tangents[1].astype(dtype)
