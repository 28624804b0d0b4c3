"""nnx modules in a tree: everything comes back, in new modules, and what was one thing is one thing again."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from amp_jax._modules import holds_modules, split


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, 2, rngs=rngs)
        self.second = self.first
        self.epsilon = 0.5


def test_a_tree_without_modules_is_itself():
    tree = {"w": jnp.ones(2), "state": nnx.state(Pair(nnx.Rngs(0)))}
    arrays, with_modules = split(tree)
    assert arrays is tree
    assert with_modules(tree) is tree
    assert not holds_modules(tree)


@pytest.mark.parametrize("around", [lambda m: m, lambda m: (m, 1), lambda m: {"a": [m, m], "b": m.first, "n": None}])
def test_modules_come_back_as_new_ones_with_the_arrays_given(around):
    old = Pair(nnx.Rngs(0))
    arrays, with_modules = split(around(old))
    new = with_modules(jax.tree.map(lambda x: x + 1, arrays))
    assert jax.tree.structure(new) == jax.tree.structure(around(old))
    found = new if isinstance(new, Pair) else jax.tree.leaves(new, is_leaf=lambda x: isinstance(x, Pair))[0]
    assert found.second is found.first is not old.first
    assert found.epsilon == 0.5
    assert jnp.array_equal(found.first.kernel, old.first.kernel + 1)
    assert len([x for x in jax.tree.leaves(arrays) if jnp.ndim(x)]) == 2  # shared arrays are there once
    if isinstance(new, dict):
        assert new["a"][0] is new["a"][1]
        assert new["b"] is new["a"][0].first
    if isinstance(new, tuple):
        assert new[1] == 2
