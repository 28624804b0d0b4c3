"""Casts are JAX's, bit for bit, and what they cost is counted."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from amp_jax import _narrowing
from amp_jax._narrowing import Loss, flat_chunks, narrowed

NARROW = [jnp.bfloat16, jnp.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def cast(values, dtype, clip=False):
    pieces = list(narrowed(flat_chunks(np.asarray(values)), np.dtype(dtype), clip))
    total = Loss()
    for _, loss in pieces:
        total = total.plus(loss)
    return np.concatenate([v for v, _ in pieces]), total


@pytest.mark.parametrize("dtype", NARROW)
def test_the_cast_is_jaxs_bit_for_bit(dtype):
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32) * np.float32(3)
    ours, loss = cast(values, dtype)
    assert ours.tobytes() == np.asarray(jnp.asarray(values).astype(dtype)).tobytes()
    assert loss.overflowed == 0


def test_what_float16_loses():
    # 65519 lies below the midpoint 65520 of 65504 and 2^16, so it rounds to 65504; 1e-8 lies below half of 2^-24.
    values, loss = cast(np.array([1e5, 1e-8, 65519, 65520], np.float32), np.float16)
    assert values.tolist() == [np.inf, 0, 65504, np.inf]
    assert loss == Loss(2, 1, pytest.approx(15 / 65519))


def test_clipping_keeps_signs_nan_and_infinities_that_the_dtype_has():
    given = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, -1.0], np.float32)
    values, loss = cast(given, np.float16, clip=True)
    np.testing.assert_array_equal(values, np.array([65504, -65504, np.inf, -np.inf, np.nan, -1], np.float16))
    assert loss.overflowed == 2
    # e4m3fn has no infinity: the cast of one would be NaN.
    values, loss = cast(given, ml_dtypes.float8_e4m3fn, clip=True)
    np.testing.assert_array_equal(values.astype(np.float32), [448, -448, 448, -448, np.nan, -1])
    assert loss.overflowed == 4


def test_widening_and_zeros_lose_nothing():
    for given in (np.zeros(3, np.float32), np.array([-0.0, np.inf, np.nan], np.float32)):
        assert cast(given, jnp.bfloat16)[1] == Loss()
    half = np.arange(-8, 8, dtype=np.float32).astype(ml_dtypes.bfloat16)
    values, loss = cast(half, np.float32)
    assert values.dtype == np.float32
    assert loss == Loss()


def test_float64_beyond_float32_overflows():
    assert cast(np.array([1e300, 1e-300, 1.0]), np.float32)[1] == Loss(1, 1, 0.0)


def test_chunks_add_up(monkeypatch):
    monkeypatch.setattr(_narrowing, "CHUNK", 3)
    values, loss = cast(np.array([[1e5, 1, 2, 1e-9], [1e6, 4, 5, 1e-9]], np.float32), np.float16)
    assert values.size == 8
    assert loss == Loss(2, 2, 0.0)
