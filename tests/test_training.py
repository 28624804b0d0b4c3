"""Whole training steps, and Flax's transforms, under autocast: what is half, what is float32, and what is near."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import amp_jax as amp
from tests.programs import autocast, both_halves, dot_operands, normal, products, relative_error
from tests.test_effects import HOLDERS

X = normal(0, 4, 4)
HALF = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


def difference(new, old):
    return jax.tree.map(jnp.subtract, new, old)


@both_halves
def test_a_whole_step_moves_parameters_moments_and_statistics_in_float32(policy):
    tx = optax.adam(1e-4)
    params = {"w": normal(1, 4, 4), "b": 4 * jnp.ones(4), "v": normal(2, 4, 4)}

    def step(params, state, average, x):
        def loss(params):
            y = x @ params["w"] + params["b"]
            mean = y.mean(0)
            return jnp.mean((jnp.tanh(y - mean) @ params["v"] - x) ** 2), 0.99 * average + 0.01 * mean

        (value, average), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, average, value

    def run(step):
        def body(carry, _):
            *carry, value = step(*carry, X)
            return tuple(carry), value

        return lax.scan(body, (params, tx.init(params), jnp.zeros(4)), None, length=20)

    (got, state, average), losses = jax.jit(lambda: run(autocast(step, policy)))()
    (want, want_state, want_average), want_losses = jax.jit(lambda: run(step))()
    assert dot_operands(autocast(step, policy), params, tx.init(params), jnp.zeros(4), X) == {HALF[policy]}
    assert len(products(autocast(step, policy), params, tx.init(params), jnp.zeros(4), X)) == 5
    # A step of 1e-4 is lost in a half-held 4 (whose spacing is 1/64 or 1/512): what has moved is compared.
    assert relative_error(difference(got, params), difference(want, params)) < 0.05
    # The square of a gradient of 1e-3 is below float16's smallest number, and what 1 - b2 = 1e-3 adds below all halves.
    assert relative_error(state[0].nu, want_state[0].nu) < 0.02
    assert relative_error(state[0].mu, want_state[0].mu) < 0.02
    assert relative_error(average, want_average) < 1e-2
    assert relative_error(losses, want_losses) < 1e-2


@both_halves
@pytest.mark.parametrize("holder", list(HOLDERS))
def test_a_shared_function_has_the_dtype_of_where_it_is_called(holder, policy):
    shared = jax.jit(lambda x: x @ x)

    def body(x):
        with amp.full_precision():
            y = shared(x)
        return jnp.tanh(y + shared(x))

    def loss(x):
        return jnp.sum(HOLDERS[holder](body)(x) + shared(x))

    forward = [x for x, _, _ in products(autocast(loss, policy), X)]
    assert sorted(set(forward)) == sorted({HALF[policy], "float32"})
    assert forward.count("float32") == 1
    for whole in (jax.grad(autocast(loss, policy)), autocast(jax.grad(loss), policy)):
        dots = products(whole, X)
        assert all(x == y for x, y, _ in dots)
        full, half = ([x for x, _, _ in dots].count(d) for d in ("float32", HALF[policy]))
        # One product in float32 and two in half, each once forward and twice backward; a block is run again.
        again = holder in ("remat", "custom_vjp")
        assert (full, half) == ((4, 7) if again else (3, 6))


@pytest.mark.parametrize("inner", ["mixed_float16", "float32"])
@pytest.mark.parametrize("holder", list(HOLDERS))
def test_an_autocast_inside_decides_forward_and_backward(holder, inner):
    body = lambda x: jnp.tanh(x @ x)  # noqa: E731

    def loss(x, cast=lambda f: f):
        return jnp.sum(HOLDERS[holder](cast(body))(x) @ x)

    own = amp.get_policy(inner).compute_dtype.name
    nested = lambda x: loss(x, lambda f: autocast(f, inner))  # noqa: E731
    grad = jax.grad(autocast(nested, "mixed_bfloat16"))
    names = [x for x, _, _ in products(grad, X)]
    assert names.count("bfloat16") == 3
    assert names.count(own) == len(names) - 3 >= 3
    assert relative_error(jax.jit(grad)(X), jax.grad(loss)(X)) < 0.02


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = lambda dense, carry, _: (carry + nn.gelu(dense(carry)), None)  # noqa: E731
        layer = nn.remat(nn.Dense, prevent_cse=False)(4)
        return nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(layer, x, None)[0]


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.vmap(nn.Dense, in_axes=0, variable_axes={"params": 0}, split_rngs={"params": True})
        return nn.tanh(dense(4)(x))


SIDES = {
    "grad of autocast": lambda loss, policy: jax.grad(autocast(loss, policy)),
    "autocast of grad": lambda loss, policy: autocast(jax.grad(loss), policy),
}


@pytest.mark.parametrize("side", list(SIDES))
@pytest.mark.parametrize("kind", [Scanned, Mapped])
def test_linen_transforms_under_plain_autocast(kind, side):
    model = kind()
    variables = model.init(jax.random.key(0), X)
    loss = lambda variables: jnp.sum(jnp.sin(model.apply(variables, X)))  # noqa: E731
    grads = SIDES[side](loss, "mixed_bfloat16")
    assert dot_operands(grads, variables) == {"bfloat16"}
    assert relative_error(grads(variables), jax.grad(loss)(variables)) < 0.03


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.drop = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.drop(self.dense(x))))


def loop(blocks, x, body):
    return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(blocks, x)


LIFTED = {
    "scan": lambda blocks, x: loop(blocks, x, lambda block, x: block(x)),
    "scan of remat": lambda blocks, x: loop(blocks, x, nnx.remat(lambda block, x: block(x))),
    "vmap": lambda blocks, x: nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(blocks, x).mean(0),
}


class Stack(nnx.Module):
    def __init__(self, how):
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.how, self.blocks = how, nnx.split_rngs(splits=3)(make)(nnx.Rngs(0, dropout=1))

    def __call__(self, x):
        return LIFTED[self.how](self.blocks, x)


def loss_of(model):
    return jnp.sum(jnp.sin(model(X)))


UNDER = {
    "grad of autocast": lambda model: nnx.grad(autocast(loss_of, "mixed_bfloat16"))(model),
    "autocast of grad": lambda model: autocast(nnx.grad(loss_of), "mixed_bfloat16")(model),
    "wrap": lambda model: nnx.grad(loss_of)(amp.wrap(model, "mixed_bfloat16")),
}


@pytest.mark.parametrize("under", list(UNDER))
@pytest.mark.parametrize("how", list(LIFTED))
def test_nnx_transforms_inside_keep_their_updates_and_multiply_in_half(how, under):
    plain, ours = Stack(how), Stack(how)
    want = nnx.as_pure(nnx.grad(loss_of)(plain))
    got = nnx.as_pure(UNDER[under](ours))
    assert relative_error(got, want) < 0.03
    assert {g.dtype.name for g in jax.tree.leaves(got)} == {"float32"}
    assert (ours.blocks.drop.rngs.count[...] == 1).all()
    stats = [nnx.as_pure(nnx.state(m, nnx.BatchStat)) for m in (ours, plain)]
    assert relative_error(*stats) < 1e-2
    assert not np.allclose(ours.blocks.norm.mean[...], 0)

    graph, state = nnx.split(Stack(how))
    pure = lambda state: nnx.as_pure(UNDER[under](nnx.merge(graph, state)))  # noqa: E731
    assert dot_operands(pure, nnx.as_pure(state)) == {"bfloat16"}
