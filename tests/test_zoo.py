"""The zoo under wrap: the plain model's parameters, state and draws, its numbers as half can have them.

The bound on values is stated beforehand. Each layer with weights rounds at most `ROUNDINGS` full-size values one after
another, each by at most one unit of the compute dtype: its input, its kernel, its product, its bias, and what stands
between it and the next, an activation and a sum or a scale. None of the models makes a small difference of large
numbers, so errors add up and don't grow. What is seen is about a tenth of it, since roundings cancel.
"""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import amp_jax as amp
from tests.programs import both_halves, relative_error
from tests.zoo import LINEN, NNX, ZOO, function, layers

pytestmark = [  # of layers that are deprecated, and of Flax's own code
    pytest.mark.filterwarnings(f"ignore:{what}:DeprecationWarning")
    for what in ("SelfAttention will be", "The Fp8DotGeneralOp is", "'.value' access is")
]

ROUNDINGS = 6
BASES = {nn.Module, nnx.Module, nn.RNNCellBase, nnx.RNNCellBase}


@functools.cache
def plain(name):
    """The tree that the plain model starts from, its result, and the tree afterwards."""
    model = ZOO[name]
    fun = function(model.make(), model)

    @jax.jit
    def run(*args):
        tree = fun.init()
        return tree, *fun.call(tree, *args)

    return run(*model.args)


def others(tree):
    """All state but parameters: floats, and what has to be the same to the bit."""
    leaves = jax.tree.leaves({name: x for name, x in tree.items() if name != "params"})
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    exact = [x for x in leaves if not jnp.issubdtype(x.dtype, jnp.floating)]
    return floats, [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in exact]


@both_halves
@pytest.mark.parametrize("name", list(ZOO))
def test_a_wrapped_model_is_the_same_model_in_half(name, policy):
    model, (tree, want, after) = ZOO[name], plain(name)
    ours = function(amp.wrap(model.make(), policy), model)
    assert str(jax.eval_shape(ours.init)) == str(jax.eval_shape(lambda: tree))  # names, shapes and dtypes
    assert {x.dtype.name for x in jax.tree.leaves(tree["params"])} == {"float32"}

    @jax.jit
    def run(tree, *args):
        def loss(params):
            out, after = ours.call({**tree, "params": params}, *args)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), (out, after)

        return jax.grad(loss, has_aux=True)(tree["params"])

    grads, (got, got_after) = run(tree, *model.args)
    bound = ROUNDINGS * model.depth * float(jnp.finfo(amp.get_policy(policy).compute_dtype).eps) / 2
    assert got.dtype == want.dtype == jnp.float32
    assert relative_error(got, want) < bound
    np.testing.assert_array_equal(got == 0, want == 0)  # what dropout took is nothing else
    assert jax.tree.map(jnp.shape, got_after) == jax.tree.map(jnp.shape, after)
    (floats, exact), (want_floats, want_exact) = others(got_after), others(after)
    jax.tree.map(np.testing.assert_array_equal, exact, want_exact)  # counts, indices and keys
    assert [x.dtype for x in floats] == [x.dtype for x in want_floats]
    assert not floats or relative_error(floats, want_floats) < bound
    assert {(str(x.dtype), bool(jnp.isfinite(x).all())) for x in jax.tree.leaves(grads)} == {("float32", True)}


@both_halves
@pytest.mark.parametrize("name", list(ZOO))
def test_wrap_and_autocast_make_one_program(name, policy):
    model, (tree, _, _) = ZOO[name], plain(name)
    wrapped = function(amp.wrap(model.make(), policy), model)
    cast = function(model.make(), model, functools.partial(amp.autocast, policy=policy))
    programs = [str(jax.make_jaxpr(fun.call)(tree, *model.args)) for fun in (wrapped, cast)]  # scopes aren't printed
    assert programs[0] == programs[1]


@pytest.mark.parametrize(("library", "models"), [(nn, LINEN), (nnx, NNX)], ids=["linen", "nnx"])
def test_every_layer_of_flax_is_in_the_zoo(library, models):
    exported = {kind for _, kind in inspect.getmembers(library, inspect.isclass) if issubclass(kind, library.Module)}
    missing = exported - BASES - set().union(*map(layers, models.values()))
    assert not missing, f"add to tests/zoo.py: {sorted(kind.__name__ for kind in missing)}"
