"""Which steps are computed again for the backward pass: found in any program, run in an order that works."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_jax._autocast import plan_of, split
from amp_jax._policy import get_policy
from amp_jax._recompute import schedule
from tests.programs import autocast, both_halves, normal, relative_error


def plan(fun, *args):
    inputs = split((args, {}))
    return plan_of(fun, get_policy("mixed_bfloat16"), inputs, inputs.arrays)[1]


def chains(fun, *args):
    """The primitives of every unit of more than one step."""
    planned = plan(fun, *args)
    return [[planned.steps[n].eqn.primitive.name for n in unit] for unit in schedule(planned) if len(unit) > 1]


def kept(fun, *args):
    """Shapes and dtypes that the backward pass gets from the forward one, the arguments left out."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return [(x.shape, x.dtype.name) for x in jax.tree.leaves(pullback)]


X, W1, B, W2 = normal(0, 6, 4), normal(1, 4, 8), normal(2, 8), normal(3, 8, 2)


def mlp(x, w1, b, w2):
    return jnp.sum(jax.nn.gelu(x @ w1 + b) @ w2)


@both_halves
def test_a_bias_and_a_gelu_between_products_keep_the_product_alone(policy):
    (chain,) = chains(mlp, X, W1, B, W2)
    assert {"add", "tanh"} <= set(chain)
    wide = [dtype for shape, dtype in kept(autocast(mlp, policy), X, W1, B, W2) if shape == (6, 8)]
    assert wide == [policy.removeprefix("mixed_")] * 2  # the first product, and the second one's operand
    grads = jax.grad(autocast(mlp, policy), (1, 2, 3))(X, W1, B, W2)
    assert relative_error(grads, jax.grad(mlp, (1, 2, 3))(X, W1, B, W2)) < 1e-2


def test_what_is_cheap_by_itself_is_left_to_xla():
    assert chains(lambda x, w: jnp.sum(jax.nn.relu(x @ w) @ w.T), X, W1) == []


def test_nothing_moves_past_a_print():
    def fun(x, w1, b, w2):
        jax.debug.print("{}", x)
        return mlp(x, w1, b, w2)

    planned = plan(fun, X, W1, B, W2)
    assert list(schedule(planned)) == [(n,) for n in range(len(planned.steps))]


def test_a_chain_does_not_wait_for_a_product_of_its_own():
    def fun(x, w):
        y = jnp.tanh(x @ w)
        z = y @ w.T @ w
        return jnp.sum(jnp.tanh(y * z) * y)

    grad, want = jax.grad(autocast(fun, "mixed_bfloat16"))(X, W1), jax.grad(fun)(X, W1)
    assert relative_error(grad, want) < 2e-2


@st.composite
def programs(draw):
    """A list of operations over earlier values, by number; value 0 is the input."""
    steps = []
    for n in range(draw(st.integers(2, 14))):
        arg = st.integers(0, n)
        steps.append(
            (draw(st.sampled_from(["dot", "tanh", "exp", "add", "mul", "norm", "flip"])), draw(arg), draw(arg))
        )
    return steps


def run(steps, x, w):
    values = [x]
    for name, a, b in steps:
        a, b = values[a], values[b]
        values.append(
            {
                "dot": lambda a=a: a @ w,
                "tanh": lambda a=a: jnp.tanh(a),
                "exp": lambda a=a: jnp.exp(-a * a),
                "add": lambda a=a, b=b: (a + b) / 2,
                "mul": lambda a=a, b=b: a * jnp.tanh(b),
                "norm": lambda a=a: a / (1 + jnp.mean(a * a, -1, keepdims=True)),
                "flip": lambda a=a: a[:, ::-1],
            }[name]()
        )
    return sum(jnp.sum(v) for v in values[-2:])


@given(programs())
def test_any_program_is_put_in_an_order_that_can_run(steps):
    planned = plan(lambda x, w: run(steps, x, w), X, normal(4, 4, 4))
    units = schedule(planned)
    assert sorted(n for unit in units for n in unit) == list(range(len(planned.steps)))
    there = set(planned.inputs) | set(planned.constants)
    for unit in units:
        for n in unit:
            assert there.issuperset(planned.steps[n].inputs)
            there.update(planned.steps[n].outputs)


@pytest.mark.parametrize("seed", range(3))
def test_recomputing_changes_no_value(seed):
    rng = np.random.default_rng(seed)
    names = ["dot", "tanh", "exp", "add", "mul", "norm", "flip"]
    steps = [(str(rng.choice(names)), int(rng.integers(0, n + 1)), int(rng.integers(0, n + 1))) for n in range(10)]
    fun = lambda x, w: run(steps, x, w)  # noqa: E731
    args = X, normal(4, 4, 4)
    ours = jax.jit(jax.grad(autocast(fun, "mixed_bfloat16"), (0, 1)))(*args)
    assert relative_error(ours, jax.grad(fun, (0, 1))(*args)) < 3e-2
