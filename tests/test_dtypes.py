"""Names of dtypes, and what each can hold."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_jax import AmpTypeError, AmpValueError, _dtypes


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("f32", "float32"),
        ("bf16", "bfloat16"),
        (" BF16 ", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (np.float64, "float64"),
        (np.dtype("float16"), "float16"),
        ("e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e5m2"),
    ],
)
def test_every_spelling_is_read(spec, name):
    assert _dtypes.name(_dtypes.parse(spec)) == name


@pytest.mark.parametrize("spec", ["bfloat61", "int8", np.int32, bool, np.complex64, ""])
def test_other_dtypes_are_refused_by_name(spec):
    with pytest.raises(AmpValueError, match=r"`compute_dtype` is .*Valid are: float32, bfloat16"):
        _dtypes.parse(spec, "compute_dtype")


def test_the_nearest_name_is_shown():
    with pytest.raises(AmpValueError, match="Did you mean 'bfloat16'"):
        _dtypes.parse("bfloat61")


@pytest.mark.parametrize("spec", [None, 3.5, object()])
def test_what_is_no_dtype_is_a_type_error(spec):
    with pytest.raises((AmpTypeError, AmpValueError)):
        _dtypes.parse(spec)


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [
        (-1e9, jnp.float16, False),  # overflows to -inf
        (1e-12, jnp.float16, False),  # flushed to 0
        (1e-6, jnp.float16, False),  # subnormal: 1.3 % off
        (-1e9, jnp.bfloat16, True),
        (1e-12, jnp.bfloat16, True),
        (np.finfo(np.float32).min, jnp.bfloat16, False),  # rounds to -inf
        (65504.0, jnp.float16, True),
        (65520.0, jnp.float16, False),  # rounds to inf
        (-np.inf, jnp.float16, True),
        (np.nan, jnp.float16, True),
        (np.array([0.0, 1.0, 1e5]), jnp.float16, False),
        (3, jnp.bfloat16, True),
    ],
)
def test_what_a_dtype_holds(value, dtype, held):
    assert _dtypes.holds(value, dtype) is held


@given(st.floats(-6e4, 6e4).filter(lambda x: x == 0 or abs(x) > 1e-4))
def test_normal_numbers_are_held_by_both_halves(value):
    assert _dtypes.holds(value, jnp.float16)
    assert _dtypes.holds(value, jnp.bfloat16)


def test_float8_is_not_a_dtype_to_cast():
    assert _dtypes.is_float8(np.dtype(ml_dtypes.float8_e4m3fn))
    assert not _dtypes.is_float(np.dtype(ml_dtypes.float8_e4m3fn))
    assert _dtypes.is_float(jnp.bfloat16)
    assert not _dtypes.is_float(np.int8)
