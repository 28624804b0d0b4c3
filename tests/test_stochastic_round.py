"""Rounding by chance: the mean stays, and nothing else moves."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import amp_jax as amp

DTYPES = ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3", "float8_e3m4"]
HALVES = DTYPES[:2]
KEY = jax.random.key(7)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def every(name: str) -> np.ndarray:
    """All numbers of a dtype, NaN aside."""
    dtype = numpy_dtype(name)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    numbers = np.arange(2 ** (8 * dtype.itemsize), dtype=np.uint32).astype(unsigned).view(dtype)
    return numbers[~np.isnan(numbers.astype(np.float32))]


@pytest.mark.parametrize("name", DTYPES)
def test_a_number_that_the_dtype_holds_comes_out_bit_for_bit(name: str) -> None:
    numbers = every(name)
    got = np.asarray(amp.stochastic_round(KEY, numbers.astype(np.float32), name))
    assert got.dtype == numpy_dtype(name)
    assert got.tobytes() == numbers.tobytes()  # -0.0, inf and subnormal numbers too


@pytest.mark.parametrize("name", DTYPES)
def test_the_mean_over_keys_stays(name: str) -> None:
    info = jnp.finfo(numpy_dtype(name))
    tiny, eps = float(info.smallest_subnormal), float(info.eps)
    # Subnormal, across the border to the normal numbers, across a power of two, large; all within the float32 normals
    # but for bfloat16's subnormal ones.
    parts = np.array([0.3, -2.7, 0.01]) * tiny
    border = float(info.smallest_normal) - np.array([0.4, -0.4]) * tiny
    normal = np.array([1 + 0.1 * eps, -1 - 0.9 * eps, 2 - 0.2 * eps, 0.9 * float(info.max)])
    x = np.concatenate([parts, border, normal]).astype(np.float32)
    n = 4000
    keys = jax.random.split(jax.random.key(1), n)
    got = np.asarray(jax.vmap(lambda key: amp.stochastic_round(key, x, name))(keys)).astype(np.float64)
    down, up = got.min(0), got.max(0)
    # Each came out as its two neighbours and nothing else, and as either in proportion to its nearness.
    exact = x.astype(np.float64)
    assert ((down < exact) & (exact < up)).all()
    assert ((got == down) | (got == up)).all()
    chance = (exact - down) / (up - down)
    standard_error = (up - down) * np.sqrt(chance * (1 - chance) / n)
    assert (np.abs(got.mean(0) - exact) <= 4 * standard_error).all()
    with np.errstate(over="ignore"):
        neighbours = exact.astype(numpy_dtype(name)).astype(np.float64)
    assert ((neighbours == down) | (neighbours == up)).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(DTYPES), st.integers(0, 2**31 - 1))
def test_any_number_is_rounded_to_a_neighbour(x: float, name: str, seed: int) -> None:
    dtype, info = numpy_dtype(name), jnp.finfo(numpy_dtype(name))
    got = float(amp.stochastic_round(jax.random.key(seed), np.float32(x), name))
    if abs(x) > float(info.max):
        return
    numbers = every(name).astype(np.float64)
    assert got in (numbers[numbers <= x].max(), numbers[numbers >= x].min())
    assert np.asarray(got).astype(dtype).astype(np.float64) == got


@pytest.mark.parametrize("name", DTYPES)
def test_beyond_the_largest_number_it_is_a_cast(name: str) -> None:
    largest = float(jnp.finfo(numpy_dtype(name)).max)
    x = np.array([largest * (1 + 2.0**-12), largest * 1.001, np.inf, -np.inf, np.nan], np.float32)
    x[1] = min(x[1], np.finfo(np.float32).max)
    keys = jax.random.split(KEY, 64)
    got = jax.vmap(lambda key: amp.stochastic_round(key, x, name))(keys).astype(jnp.float32)
    want = jnp.asarray(x).astype(numpy_dtype(name)).astype(jnp.float32)
    assert np.array_equal(got, jnp.broadcast_to(want, got.shape), equal_nan=True)


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
@pytest.mark.parametrize("name", HALVES)
def test_no_nan_becomes_a_number(name: str, payload: int) -> None:
    # With its payload in the bits that are dropped, or one below the sign: a carry would make it inf or -0.0.
    x = np.array([payload] * 64, np.uint32).view(np.float32)
    assert np.isnan(np.asarray(amp.stochastic_round(KEY, x, name)).astype(np.float32)).all()


def test_the_same_key_gives_the_same_bits_however_it_is_run() -> None:
    x = jnp.linspace(-3.0, 3.0, 64)
    want = amp.stochastic_round(KEY, x, "bfloat16")
    assert (want != amp.stochastic_round(jax.random.key(8), x, "bfloat16")).any()
    jitted = jax.jit(amp.stochastic_round, static_argnames="dtype")(KEY, x, dtype="bfloat16")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    for got in (jitted, amp.stochastic_round(KEY, spread, "bf16"), amp.stochastic_round(KEY, x, jnp.bfloat16)):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_vmap_draws_for_each_example_by_its_own_key() -> None:
    x, keys = jnp.full((4, 1000), 1 + 2.0**-9), jax.random.split(KEY, 4)
    got = jax.vmap(lambda key, one: amp.stochastic_round(key, one, "bfloat16"))(keys, x)
    want = jnp.stack([amp.stochastic_round(key, one, "bfloat16") for key, one in zip(keys, x, strict=True)])
    assert jnp.array_equal(got, want)
    assert (got[0] != got[1]).any()


def test_the_derivative_is_that_of_a_cast() -> None:
    x = jnp.array([1.3, -0.7])
    grad = jax.jit(jax.grad(lambda x: jnp.sum(3 * amp.stochastic_round(KEY, x, "float16").astype(jnp.float32))))(x)
    assert grad.dtype == jnp.float32
    assert grad.tolist() == [3.0, 3.0]


def test_half_input_is_rounded_from_its_own_number() -> None:
    x = jnp.full(1000, 1 + 2.0**-10, jnp.float16)
    got = amp.stochastic_round(KEY, x, "bfloat16")
    assert set(np.asarray(got).astype(float)) == {1.0, 1 + 2.0**-7}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fnuz", "float8_e8m0fnu", "int8"])
def test_a_dtype_that_it_can_not_round_to_is_an_error_that_names_those_it_can(dtype: str) -> None:
    with pytest.raises(amp.AmpValueError, match=f"`dtype` is '?{dtype}.*float16"):
        amp.stochastic_round(KEY, 1.0, dtype)


def test_ints_are_an_error() -> None:
    with pytest.raises(amp.AmpTypeError, match="`x` is of dtype int32"):
        amp.stochastic_round(KEY, jnp.arange(3), "bfloat16")
