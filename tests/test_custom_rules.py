"""custom_jvp and custom_vjp: the author's rules run, in the compute dtype, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import autocast, both_halves, dot_operands, normal, relative_error

NAMES = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


@jax.custom_vjp
def doubled(x, w, n):
    return x @ w * n


# The rule gives twice the true gradient: only a rule that still runs does that.
doubled.defvjp(
    lambda x, w, n: (x @ w * n, (x, w, n)), lambda r, ct: (2 * r[2] * (ct @ r[1].T), 2 * r[2] * (r[0].T @ ct), None)
)


@both_halves
@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, lambda f: jax.checkpoint(f)], ids=["eager", "jit", "remat"]
)
def test_a_custom_vjp_rule_runs_in_half(policy, transform):
    x, w = normal(0, 4, 4), normal(1, 4, 4)

    def loss(x, w):
        return jnp.sum(jnp.sin(doubled(x, w, 3)))

    grads = jax.grad(transform(autocast(loss, policy)), argnums=(0, 1))
    assert relative_error(grads(x, w), jax.grad(loss, argnums=(0, 1))(x, w)) < 0.03
    assert dot_operands(grads, x, w) == {NAMES[policy]}


@both_halves
def test_a_custom_jvp_rule_runs_in_half(policy):
    @jax.custom_jvp
    def f(x, w):
        return jnp.sin(x @ w)

    @f.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return jnp.sin(x @ w), 2 * jnp.cos(x @ w) * (dx @ w + x @ dw)

    x, w = normal(0, 4, 4), normal(1, 4, 4)

    def loss(x, w):
        return jnp.sum(f(x, w))

    grads = jax.grad(autocast(loss, policy), argnums=(0, 1))
    assert relative_error(grads(x, w), jax.grad(loss, argnums=(0, 1))(x, w)) < 0.03
    assert dot_operands(grads, x, w) == {NAMES[policy]}


def test_nondiff_arguments_and_vmap():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(fun, x):
        return fun(x @ x)

    apply.defvjp(lambda fun, x: (fun(x @ x), x), lambda fun, x, ct: (ct @ x.T + x.T @ ct,))
    x = normal(0, 2, 3, 3)

    def loss(x):
        return jnp.sum(apply(jnp.sin, x))

    got = jax.vmap(jax.grad(autocast(loss, "mixed_bfloat16")))(x)
    assert relative_error(got, jax.vmap(jax.grad(loss))(x)) < 0.03


def test_a_straight_through_estimator_passes_the_gradient():
    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))
    grad = jax.grad(autocast(lambda w: jnp.sum(rounded(jnp.ones((1, 2)) @ w)), "mixed_bfloat16"))(jnp.ones((2, 2)))
    np.testing.assert_array_equal(grad, 1.0)  # round's own gradient is 0


def test_relu_takes_the_dtype_of_its_neighbours_and_keeps_its_rule():
    def model(x, w):
        return jax.nn.relu(x @ w) @ w

    x, w = jnp.zeros((2, 2)), jnp.ones((2, 2))
    fun = jax.grad(lambda x: jnp.sum(autocast(model, "mixed_bfloat16")(x, w)))
    np.testing.assert_array_equal(fun(x), 0.0)  # jax.nn.relu's rule: the gradient at 0 is 0, not that of max
    assert "max" in str(jax.make_jaxpr(autocast(model, "mixed_bfloat16"))(x, w))
    assert "bf16[2,2] = max" in str(jax.make_jaxpr(autocast(model, "mixed_bfloat16"))(x, w))


def test_second_derivatives():
    def loss(s):
        x = normal(0, 3, 3)
        return jnp.sum(doubled(x * s, x, 1))

    x = normal(2, 3)
    got = jax.hessian(autocast(lambda s: jnp.sum(jnp.tanh(normal(0, 3, 3) * s @ normal(1, 3, 3))), "mixed_bfloat16"))(x)
    want = jax.hessian(lambda s: jnp.sum(jnp.tanh(normal(0, 3, 3) * s @ normal(1, 3, 3))))(x)
    assert relative_error(got, want) < 0.05
    assert jax.grad(autocast(loss, "mixed_bfloat16"))(x).shape == (3,)
