"""An update that is added in float32 and rounded lands on the wanted half number, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from amp_jax._landing import landing_update, lands, widen

HALVES = [jnp.bfloat16, jnp.float16]


def every(dtype: Any) -> jax.Array:
    """All 65536 numbers of a half dtype."""
    return jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), dtype)


def same_bits(a: jax.Array, b: jax.Array) -> np.ndarray:
    return np.asarray(a).view(np.uint16) == np.asarray(b).view(np.uint16)


def landed(stored: jax.Array, wanted: jax.Array) -> jax.Array:
    return optax.apply_updates(stored, jax.jit(landing_update)(stored, wanted))


@pytest.mark.parametrize("dtype", HALVES)
def test_widen_is_the_exact_cast_of_every_number(dtype: Any) -> None:
    got, want = np.asarray(widen(every(dtype))), np.asarray(every(dtype)).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True)
    numbers = ~np.isnan(want)
    assert np.array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])


@pytest.mark.parametrize("start", [1.0, -0.75, 2.0**-10, -(2.0**-10), 49152.0, 0.0, -0.0])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_is_reached_from_near_and_far(dtype: Any, start: float) -> None:
    # XLA on a CPU takes the subnormal numbers of bfloat16, which are float32's, for zero.
    smallest = 2.0**-126 if dtype is jnp.bfloat16 else 2.0**-24
    with np.errstate(invalid="ignore"):
        numbers = np.asarray(every(dtype)).astype(np.float64)
    size = np.abs(numbers)
    held = np.isfinite(size) & ((size == 0) | (size >= smallest))
    wanted, numbers, size = every(dtype)[held], numbers[held], size[held]
    stored = jnp.full_like(wanted, start)
    got = landed(stored, wanted)
    # A float32 step of what was stored is 2^-23 of it, half a step of what is wanted 2^-8 or 2^-11 of that.
    near = (size == 0) | (size * (2.0**15 if dtype is jnp.bfloat16 else 2.0**12) >= abs(start))
    minus_zero = (size == 0) & np.signbit(numbers)
    if dtype is jnp.bfloat16 or abs(start) >= 0.25:
        # No float32 sum that XLA doesn't take for zero is negative and rounds to zero.
        near &= ~minus_zero | same_bits(stored, wanted)
    assert same_bits(got, wanted)[near].all()
    assert near.sum() > 20_000
    off = np.abs(np.asarray(got).astype(np.float64) - numbers)
    assert (off <= abs(start) * 2.0**-23).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_stays_keeps_its_bits(dtype: Any) -> None:
    numbers = every(dtype)
    update = landing_update(numbers, numbers)
    # The update of a skipped step: adding 0.0 would turn -0.0 into 0.0.
    assert np.signbit(np.asarray(update)).all()
    assert (np.asarray(update) == 0).all()
    kept = ~np.isnan(np.asarray(numbers).astype(np.float32))
    if dtype is jnp.bfloat16:
        kept &= (np.asarray(numbers).view(np.uint16) & 0x7F80) != 0
        kept[[0, 2**15]] = True
    assert same_bits(optax.apply_updates(numbers, update), numbers)[kept].all()


@pytest.mark.parametrize("dtype", HALVES)
def test_infinities_and_nan_arrive(dtype: Any) -> None:
    wanted = jnp.array([np.inf, -np.inf, np.nan], dtype)
    got = landed(jnp.ones_like(wanted), wanted)
    assert np.array_equal(np.asarray(got), np.asarray(wanted), equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_lands_compares_rounded_bits(dtype: Any) -> None:
    step = float(jnp.finfo(dtype).eps)
    near, far = jnp.float32(1 + step * 0.49), jnp.float32(1 + step * 0.51)
    one = jnp.ones((), dtype)
    assert lands(one, near)
    assert not lands(one, far)
    assert not lands(jnp.zeros((), dtype), jnp.float32(-0.0))
