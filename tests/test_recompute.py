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
from tests.programs import autocast, both_halves, normal, products, relative_error


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


def layers(x, w1, b, w2, key, body=lambda f: f):
    """Residual MLPs with RMS norm and dropout, in a scan over stacked weights."""

    def layer(x, args):
        w1, b, w2, key = args
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        y = jax.nn.gelu(y @ w1 + b)
        y = jnp.where(jax.random.bernoulli(key, 0.5, y.shape), 2 * y, 0)
        return x + y @ w2, None

    return jnp.sum(jnp.sin(jax.lax.scan(body(layer), x, (w1, b, w2, jax.random.split(key, 5)))[0]))


STACK = normal(5, 6, 4), normal(6, 5, 4, 8), normal(7, 5, 8), normal(8, 5, 8, 4)


@both_halves
def test_a_scan_stacks_its_carry_its_products_and_a_byte_for_each_drawn_number(policy):
    fun = autocast(lambda x, w1, b, w2: layers(x, w1, b, w2, jax.random.key(0)), policy)
    low = policy.removeprefix("mixed_")
    stacked = [one for one in kept(fun, *STACK) if len(one[0]) == 3 and one[0][1] == 6]
    assert sorted(stacked) == sorted([((5, 6, 4), low), ((5, 6, 8), low), ((5, 6, 8), "bool")])
    plain = lambda x, w1, b, w2: layers(x, w1, b, w2, jax.random.key(0))  # noqa: E731
    got, want = (jax.grad(f, (0, 1, 2, 3))(*STACK) for f in (fun, plain))
    assert relative_error(got, want) < 5e-2  # five layers, each with several roundings to 2 ** -9


def test_a_nested_scan_multiplies_nothing_twice():
    def outer(c, ws):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, ws)[0], None

    fun = autocast(lambda c, ws: jnp.sum(jax.lax.scan(outer, c, ws)[0]), "mixed_bfloat16")
    c, ws = normal(0, 2, 4), normal(1, 3, 5, 4, 4)
    assert len(products(jax.grad(fun, (0, 1)), c, ws)) == 3  # forward, and one for each operand


def test_the_authors_own_blocks_keep_what_they_say():
    everything = lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)  # noqa: E731
    fun = autocast(lambda x, w1, b, w2: layers(x, w1, b, w2, jax.random.key(0), everything), "mixed_bfloat16")
    stacked = [one for one in kept(fun, *STACK) if len(one[0]) == 3 and one[0][1] == 6]
    assert len(stacked) > 6


def test_a_print_in_a_scan_fires_once_a_turn(capsys):
    def body(c, w):
        jax.debug.print("turn {}", c[0, 0])
        return jnp.tanh(c @ w), None

    fun = autocast(lambda c, ws: jnp.sum(jax.lax.scan(body, c, ws)[0]), "mixed_bfloat16")
    jax.grad(fun)(normal(0, 2, 4), normal(1, 3, 4, 4)).block_until_ready()
    jax.effects_barrier()
    assert capsys.readouterr().out.count("turn") == 3
