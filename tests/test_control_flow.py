"""Loops, branches, rematerialised blocks and calls: products in half, carries of one dtype, sums that don't stop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.programs import LOW, autocast, both_halves, dot_operands, normal, relative_error, result_dtypes


def mesh(n):
    return jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,))


@jax.custom_jvp
def with_jvp(x, w):
    return jnp.sin(x @ w)


@with_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return jnp.sin(x @ w), jnp.cos(x @ w) * (dx @ w + x @ dw)


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, ct: (ct @ res[1].T, res[0].T @ ct))

CONSTRUCTS = {
    "jit": lambda x, w: jax.jit(lambda x: jax.jit(lambda y: y @ w)(x) + 1)(x),
    "scan": lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w) + c, c.sum()), x, None, length=3),
    "scan_reversed": lambda x, w: lax.scan(
        lambda c, y: (jnp.tanh(c @ w + y), c.sum()), x, jnp.stack([x] * 4), reverse=True, unroll=2
    ),
    "fori": lambda x, w: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x),
    "while": lambda x, w: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1],
    "cond": lambda x, w: lax.cond(x[0, 0] < 9, lambda x: x @ w, lambda x: x * 2, x),
    "switch": lambda x, w: lax.switch(2, [jnp.sin, jnp.exp, lambda y: y @ w], x),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(jax.nn.softmax(x @ w) @ w)),
    "checkpoint_policy": jax.checkpoint(
        lambda x, w: jnp.sin(x @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
    ),
    "map": lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "shard_map": jax.shard_map(
        lambda x, w: lax.psum(jnp.tanh(x @ w), "i"), mesh=mesh(2), in_specs=(P("i"), P()), out_specs=P()
    ),
}  # fmt: skip


@both_halves
@pytest.mark.parametrize("name", list(CONSTRUCTS))
def test_products_inside_are_half_and_values_match(name, policy):
    fun, x, w = CONSTRUCTS[name], normal(0, 4, 4), normal(1, 4, 4)
    half = autocast(fun, policy)
    assert set(result_dtypes(half, x, w)) == {LOW[policy]}
    assert relative_error(half(x, w), fun(x, w)) < 0.02


@pytest.mark.parametrize("name", [n for n in CONSTRUCTS if n != "while"])
def test_products_of_the_backward_pass_are_half_and_gradients_match(name):
    fun, x, w = CONSTRUCTS[name], normal(0, 4, 4), normal(1, 4, 4)

    def loss(fun):
        return lambda x, w: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(x, w)))

    want = jax.grad(loss(fun), argnums=(0, 1))(x, w)
    half = jax.grad(loss(autocast(fun, "mixed_bfloat16")), argnums=(0, 1))
    assert dot_operands(half, x, w) == {"bfloat16"}
    assert relative_error(jax.jit(half)(x, w), want) < 0.04
    whole = autocast(jax.grad(loss(fun), argnums=(0, 1)), "mixed_bfloat16")
    assert relative_error(whole(x, w), want) < 0.04


def test_a_carry_over_layers_is_half_and_so_is_what_it_saves():
    def layers(x, stack):
        def layer(c, w):
            mean = c.mean(-1, keepdims=True)
            normed = (c - mean) * lax.rsqrt(jnp.square(c - mean).mean(-1, keepdims=True) + 1e-6)
            return c + jax.nn.gelu(normed @ w), None

        return lax.scan(layer, x @ stack[0], stack)[0]

    fun = autocast(layers, "mixed_bfloat16")
    scan = next(
        e for e in jax.make_jaxpr(fun)(jnp.ones((2, 4)), jnp.ones((3, 4, 4))).jaxpr.eqns if e.primitive.name == "scan"
    )
    assert scan.outvars[0].aval.dtype == jnp.bfloat16


@both_halves
@pytest.mark.parametrize("product", [False, True])
def test_a_running_sum_does_not_stop(policy, product):
    def count(x):
        term = (lambda: (x @ x)[0, 0]) if product else (lambda: 1.0)
        return lax.scan(lambda c, _: (c + term(), None), jnp.float32(0), None, length=3000)[0]

    assert float(autocast(count, policy)(jnp.eye(2))) == 3000  # bfloat16 stops at 256, float16 at 2048


def test_a_matrix_accumulated_in_a_fori_loop_is_float32():
    fun = autocast(lambda x: lax.fori_loop(0, 1000, lambda _, c: c + x @ x, jnp.zeros((2, 2))), "mixed_bfloat16")
    np.testing.assert_array_equal(fun(jnp.eye(2)), 1000 * np.eye(2))


def test_a_carry_of_log_probabilities_is_float32():
    def forward(scores, w):
        start = (scores @ w)[0]
        return lax.scan(lambda a, s: (jax.nn.logsumexp(a[:, None] + w, axis=0) + s, None), start, scores)[0]

    jaxpr = jax.make_jaxpr(autocast(forward, "mixed_bfloat16"))(jnp.ones((3, 4)), jnp.ones((4, 4)))
    scan = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
    assert scan.outvars[0].aval.dtype == jnp.float32


def test_weights_of_a_recurrence_are_cast_before_the_loop():
    def rnn(xs, w):
        return lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), jnp.zeros((2, 4)), xs)[0]

    jaxpr = jax.make_jaxpr(autocast(rnn, "mixed_bfloat16"))(jnp.ones((5, 2, 4)), jnp.ones((4, 4)))
    scan = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
    assert scan.invars[0].aval.dtype == jnp.bfloat16


def test_all_branches_leave_in_one_dtype():
    def choose(i, x):
        return lax.switch(i, [lambda x: x @ x, jnp.exp, lambda x: x], x)

    for i in range(3):
        x = normal(i, 3, 3)
        assert relative_error(autocast(choose, "mixed_bfloat16")(i, x), choose(i, x)) < 0.01


def test_a_backward_remat_keeps_its_barrier():
    # Without prevent_cse XLA would merge the recomputation with the forward pass, and nothing would be saved.
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(x))

    for fun in (jax.grad(autocast(loss, "mixed_bfloat16")), autocast(jax.grad(loss), "mixed_bfloat16")):
        jaxpr = jax.make_jaxpr(fun)(jnp.ones((4, 4)), jnp.ones((4, 4)))
        backward = [e for e in jaxpr.jaxpr.eqns if e.params.get("differentiated")]
        assert [e.params["prevent_cse"] for e in backward] == [True]


def test_a_call_with_donation_stays_a_call_and_its_products_are_half():
    @functools.partial(jax.jit, donate_argnums=0)
    def inner(x, w):
        return jnp.exp(x @ w)

    jaxpr = jax.make_jaxpr(autocast(lambda x, w: inner(x * 1, w), "mixed_bfloat16"))(jnp.ones((2, 2)), jnp.ones((2, 2)))
    call = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "jit")
    assert call.params["donated_invars"] == (True, False)
    assert "bf16[2,2] = dot_general" in str(call.params["jaxpr"])


def test_printing_happens_once_and_in_order(capfd):
    def fun(x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        y = lax.scan(lambda c, _: (jax.debug.print("loop", ordered=True), (c @ x, None))[1], x, None, length=2)[0]
        jax.debug.print("last", ordered=True)
        return y

    jax.block_until_ready(autocast(fun, "mixed_bfloat16")(jnp.ones((2, 2))))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:4] == ["first 1.0", "loop", "loop", "last"]


@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_a_block_around_a_jitted_function_that_closes_over_an_array(transform):
    # The array is a constant of the rewritten block, and a rematerialised block can't hold any.
    order = jnp.array([2, 0, 1])
    shuffled = jax.jit(lambda x, w: jnp.sin(x[order] @ w))
    block = transform(jax.checkpoint(lambda x: shuffled(x, normal(1, 3, 3)) @ x))
    x = normal(0, *([2] if transform is jax.vmap else []), 3, 3)
    got = jax.grad(lambda x: jnp.sum(autocast(block, "mixed_bfloat16")(x)))
    assert relative_error(got(x), jax.grad(lambda x: jnp.sum(block(x)))(x)) < 0.02


def test_what_a_linearized_block_or_a_mapped_body_holds_is_bound_again_where_nothing_in_it_changes():
    sharded = jax.shard_map(lambda x: 2 * x, mesh=mesh(2), in_specs=P("i"), out_specs=P("i"))

    def fun(x):
        y, push = jax.linearize(jax.checkpoint(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 2)[0]), x)
        return sharded(y) @ push(x)

    x = normal(0, 4, 4)
    assert relative_error(autocast(fun, "mixed_bfloat16")(x), fun(x)) < 0.01
