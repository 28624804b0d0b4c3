"""Names of leaves: one string for each path, and back."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from flax.core import freeze
from hypothesis import given
from hypothesis import strategies as st

import amp_jax as amp
from amp_jax._tree_names import named, nested


def names(tree: Any) -> list[str]:
    return list(named(tree).leaves)


def test_simple_trees_have_the_librarys_paths():
    assert names({"encoder": {"layer_0": {"kernel": 1, "bias": 2}}}) == [
        "encoder/layer_0/bias",
        "encoder/layer_0/kernel",
    ]
    assert names(freeze({"params": {"Dense_0": {"kernel": 1}}})) == ["params/Dense_0/kernel"]
    assert names([1, (2, {"a": 3})]) == ["0", "1/0", "1/1/a"]


def test_what_only_holds_an_array_adds_nothing():
    assert names({"w": nn.Partitioned(jnp.ones(2), names=("x",))}) == ["w"]
    assert names(nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))) == ["bias", "kernel"]


def test_dataclasses_by_field():
    @struct.dataclass
    class State:
        step: int
        params: Any

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Plain:
        w: Any

    assert names(State(1, Plain(2))) == ["step", "params/w"]


def test_two_leaves_with_one_name_are_an_error():
    @struct.dataclass
    class Odd:
        a: Any

    class Both(tuple):  # registered below: two children under keys that are written alike
        pass

    keys = lambda node: ([(jax.tree_util.DictKey(1), node[0]), (jax.tree_util.DictKey("1"), node[1])], None)  # noqa: E731
    jax.tree_util.register_pytree_with_keys(Both, keys, lambda _, children: Both(children))
    with pytest.raises(amp.AmpValueError, match="two leaves of the tree have the name 'x/1'"):
        named({"x": Both((1, 2))})


KEYS = st.text(alphabet=st.sampled_from("a/.~_01 é"), max_size=4) | st.just("__metadata__")
TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(KEYS, inner, min_size=1, max_size=3)
        | st.dictionaries(st.integers(0, 12), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_tree_of_dicts_and_lists_comes_back_from_its_names(tree):
    # With dots, slashes, tildes, empty keys, numbers as keys, and the one name that the format has for itself.
    taken = named(tree)
    assert "__metadata__" not in taken.leaves
    assert nested(taken.leaves, taken.containers, "file") == tree


def test_names_that_fit_into_no_tree():
    none = '{"lists": [], "ints": []}'
    for leaves in ({"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}):
        with pytest.raises(amp.AmpValueError, match="x.safetensors has a tensor 'a"):
            nested(leaves, none, "x.safetensors")
    with pytest.raises(amp.AmpValueError, match="a name of 300 parts"):
        nested({"/" * 300: np.ones(1)}, none, "x.safetensors")
    for bad in ("", "[]", "{}", "[" * 100_000, '{"lists": 1, "ints": []}'):
        with pytest.raises(amp.AmpValueError, match="x.safetensors has metadata of amp_jax that can't be read"):
            nested({"a": 1}, bad, "x.safetensors")
