"""Which leaves a policy casts (CASES: promotion and casting trees)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from hypothesis import given
from hypothesis import strategies as st

import amp_jax as amp
from amp_jax import _casting

POLICY = amp.get_policy("mixed_bfloat16")
LEFT = {
    "typed key": lambda: jax.random.key(0),
    "raw key": lambda: jax.random.key_data(jax.random.key(0)),
    "int": lambda: jnp.arange(3),
    "numpy int": lambda: np.arange(3),
    "bool": lambda: jnp.ones(2, bool),
    "complex": lambda: jnp.ones(2, jnp.complex64),
    "float0": lambda: np.zeros(2, jax.dtypes.float0),
    "float8": lambda: jnp.ones(2, ml_dtypes.float8_e4m3fn),
    "python float": lambda: 1.5,
    "python int": lambda: 3,
    "string": lambda: "name",
    "already": lambda: jnp.ones(2, jnp.bfloat16),
}


@pytest.mark.parametrize("name", list(LEFT))
def test_a_leaf_that_is_not_ours_comes_back_as_it_came(name):
    leaf = LEFT[name]()
    assert POLICY.cast_to_compute({"x": leaf, "none": None})["x"] is leaf


@pytest.mark.parametrize("leaf", [np.ones(2, np.float32), np.float32(1.5), np.ones(2, np.float64), jnp.ones(2)])
def test_numpy_leaves_are_cast_like_any_other(leaf):
    assert POLICY.cast_to_compute([leaf])[0].dtype == jnp.bfloat16
    assert POLICY.cast_to_param([leaf])[0].dtype == jnp.float32  # float64 counts as JAX would read it


def test_shapes_tracers_and_flax_containers():
    spec = POLICY.cast_to_compute({"x": jax.ShapeDtypeStruct((2,), jnp.float32)})["x"]
    assert isinstance(spec, jax.ShapeDtypeStruct)
    assert spec.dtype == jnp.bfloat16
    assert jax.eval_shape(POLICY.cast_to_compute, jnp.ones(2)).dtype == jnp.bfloat16
    frozen = POLICY.cast_to_compute(freeze({"w": jnp.ones(2)}))
    assert type(frozen).__name__ == "FrozenDict"
    boxed = POLICY.cast_to_compute({"w": nn.Partitioned(jnp.ones(2), names=("x",))})["w"]
    assert boxed.names == ("x",)
    assert boxed.value.dtype == jnp.bfloat16
    state = POLICY.cast_to_compute(nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"bfloat16"}


DTYPES = st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.complex64])
TREES = st.recursive(
    DTYPES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)


@given(TREES, st.sampled_from(["float32", "float16", "mixed_float16", "p=f16,c=bf16,o=f32"]))
def test_casts_equal_jmps(dtypes, spec):
    tree = jax.tree.map(lambda d: jnp.ones(2, d), dtypes)
    ours = amp.get_policy(spec)
    theirs = ours.to_jmp()
    for method in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        got, want = getattr(ours, method)(tree), getattr(theirs, method)(tree)
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)


def test_paths_leave_the_collection_out():
    paths = jax.tree_util.tree_leaves_with_path({"params": {"layers": [{"w": 1}]}, "batch_stats": {"mean": 2}})
    assert [_casting.path_of(p) for p, _ in paths] == ["batch_stats/mean", "layers/0/w"]
