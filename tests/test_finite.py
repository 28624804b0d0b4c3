"""all_finite is exact on every kind of leaf; norm_is_finite may be wrong only where squares overflow float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amp_jax import _finite
from amp_jax._finite import all_finite, norm_is_finite

BAD = (np.inf, -np.inf, np.nan)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_one_bad_number_among_many_is_seen(bad: float, dtype: type) -> None:
    tree = {"a": jnp.ones((3, 4), dtype), "b": [jnp.ones((3, 4), dtype).at[2, 1].set(bad), jnp.ones(5)]}
    assert not all_finite(tree)
    assert not norm_is_finite(jax.tree.leaves(tree))


@pytest.mark.parametrize("number", [complex(0, np.inf), complex(np.nan, 0)])
def test_complex_on_both_parts(number: complex) -> None:
    assert not all_finite(jnp.array([1, number], jnp.complex64))
    assert not norm_is_finite([jnp.array([1, number], jnp.complex64)])


def test_ignores_what_can_not_be_infinite() -> None:
    tree = {
        "int": jnp.array([2**31 - 1]),
        "bool": jnp.array([True]),
        "key": jax.random.key(0),
        "raw key": jax.random.PRNGKey(0),
        "float0": np.zeros(3, jax.dtypes.float0),
        "none": None,
        "python": 10**300,
        "finite": jnp.ones(2),
    }
    assert all_finite(tree)


@pytest.mark.parametrize("tree", [{}, None, [], {"n": jnp.arange(3)}, jnp.zeros((0, 3))])
def test_nothing_to_check_is_finite(tree: object) -> None:
    result = all_finite(tree)
    assert isinstance(result, jax.Array)
    assert (result.shape, result.dtype, bool(result)) == ((), np.bool_, True)


@pytest.mark.parametrize("leaf", [np.array([np.nan]), np.float64(np.inf), float("inf"), jnp.inf, np.float16(np.nan)])
def test_numpy_and_python_numbers_count(leaf: object) -> None:
    assert not all_finite([leaf])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_counts(dtype: type) -> None:
    assert all_finite(jnp.ones(2, dtype))
    assert not all_finite(jnp.array([1, np.nan], dtype))


def test_large_finite_numbers() -> None:
    # 3e38 squared is inf in float32: the exact check passes, the sum of squares may not (DESIGN 4.9).
    large = jnp.array([3e38, -3e38], jnp.float32)
    assert all_finite(large)
    assert not norm_is_finite([large])
    # 65504 squared is inf in float16, but the sum is float32's.
    half = jnp.full(1000, 65504, jnp.float16)
    assert all_finite(half)
    assert norm_is_finite([half])


@settings(max_examples=25)
@given(
    st.lists(
        hnp.arrays(
            st.sampled_from([np.float16, np.float32, np.int32]),
            hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
        ),
        max_size=5,
    )
)
def test_equals_numpy(leaves: list[np.ndarray]) -> None:
    assert bool(all_finite(leaves)) == all(np.isfinite(leaf).all() for leaf in leaves)


def test_under_jit_vmap_and_grad() -> None:
    x = jnp.array([[1.0, 2.0], [jnp.nan, 2.0], [3.0, jnp.inf]])
    assert jax.vmap(all_finite)({"x": x}).tolist() == [True, False, False]
    assert jax.jit(jax.vmap(lambda row: norm_is_finite([row])))(x).tolist() == [True, False, False]
    assert jax.grad(lambda x: jnp.where(all_finite(x), x, 0.0))(2.0) == 1.0


def test_one_reduction_for_many_small_leaves_of_one_shape() -> None:
    # Two kernels a reduction on a GPU: 20 biases must not cost 40.
    leaves = [jnp.ones(4) for _ in range(20)] + [jnp.ones((4, 4)) for _ in range(20)]
    for check in (all_finite, norm_is_finite):
        assert str(jax.make_jaxpr(check)(leaves)).count(" reduce_") == 2


def test_large_leaves_are_reduced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Combining two that are sharded differently would move one between devices.
    monkeypatch.setattr(_finite, "SMALL", 8)
    leaves = [jnp.ones((3, 3)), jnp.full((3, 3), jnp.inf), jnp.ones(3), jnp.ones(3)]
    assert str(jax.make_jaxpr(all_finite)(leaves)).count(" reduce_") == 3
    assert not all_finite(leaves)


def test_nothing_is_concatenated() -> None:
    # It would gather leaves that are sharded.
    text = str(jax.make_jaxpr(norm_is_finite)([jnp.ones(3), jnp.ones(4), jnp.ones((2, 2))]))
    assert "concatenate" not in text
