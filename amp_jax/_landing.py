"""Updates that land: `optax.apply_updates` adds them to a parameter stored in half, and gets exactly what was wanted.

`apply_updates`, and with it Flax's `TrainState` and `nnx.Optimizer`, computes `(p + u).astype(p.dtype)`. For a half `p`
and a float32 `u` the sum is float32, so that `u = wanted - p` lands on `wanted` after the final rounding: the float32
error of difference and sum is far below half a step of the half dtype. The exception is a number that shrinks at once
by more than 2^15 in bfloat16 or 2^12 in float16, where that error is as large as a step of the small number.

All of it goes through the bits of half numbers. XLA may drop a rounding to half that is followed by a cast back
(`xla_allow_excess_precision`, on by default on a GPU): the unrounded number would be compared and subtracted instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def landing_update(stored: jax.Array, wanted: jax.Array) -> jax.Array:
    """The float32 update that takes a stored half number to the one that is wanted, bit for bit.

    >>> stored, wanted = jnp.bfloat16(1.0), jnp.bfloat16(-0.0078125)
    >>> update = landing_update(stored, wanted)
    >>> update.dtype, (stored + update).astype(stored.dtype)
    (dtype('float32'), Array(-0.0078125, dtype=bfloat16))

    Args:
        stored: bfloat16 or float16.
        wanted: of the same dtype and shape.

    Returns:
        A float32 array. Where no float32 number reaches `wanted`, the sum is off by at most one float32 step of
        `stored`, and may be 0.0 for -0.0; from inf nothing leads back, and the sum is NaN.
    """
    old = widen(stored)
    update = widen(wanted) - old
    # A sum is -0.0 only if both numbers are; a negative one that is too small for the dtype rounds to it.
    tiny = np.float32(float(jnp.finfo(wanted.dtype).smallest_subnormal) / 4)
    update = jnp.where(bits(wanted) == bits(jnp.full_like(wanted, -0.0)), -old - tiny, update)
    # What stays keeps its bits, those of -0.0 and of inf too.
    return jnp.where(bits(stored) == bits(wanted), np.float32(-0.0), update)


def widen(half: jax.Array) -> jax.Array:
    """A half number in float32, decoded from its bits: XLA can't replace it by what it was rounded from."""
    if half.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(bits(half).astype(np.uint32) << 16, np.float32)
    number = bits(half).astype(np.uint32)
    exponent, mantissa = (number >> 10) & 31, number & 1023
    # An exponent field of 0 means 1 without the leading bit; float16 counts in 2^-24 there.
    whole = jnp.where(exponent == 0, mantissa, mantissa | 1024).astype(np.float32)
    step = lax.bitcast_convert_type((jnp.maximum(exponent, 1) + (127 - 25)) << 23, np.float32)
    magnitude = jnp.where(exponent == 31, jnp.where(mantissa == 0, np.float32(np.inf), np.nan), whole * step)
    return jnp.where(number >> 15 == 1, -magnitude, magnitude)


def bits(half: jax.Array) -> jax.Array:
    """The bits of half numbers, uint16."""
    return lax.bitcast_convert_type(half, np.uint16)


def lands(stored: Any, number: jax.Array) -> jax.Array:
    """Where a float32 number, cast to half, is what is stored: bool, bit for bit."""
    return bits(number.astype(stored.dtype)) == bits(stored)
