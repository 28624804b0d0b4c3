"""What a program does besides computing: references, callbacks, shardings, donation, several devices."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs import autocast as autocast_
from tests.programs import dot_operands, normal, relative_error

X, W = normal(0, 4, 4), normal(1, 4, 4)
TWO = jax.devices("cpu")[:2]


def autocast(fun):
    return autocast_(fun, "mixed_bfloat16")


def mesh(kind):
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=TWO)


def summed_in_a_reference(x, w):
    total = jax.new_ref(jnp.zeros((4, 4)))

    def body(carry, _):
        total[...] += carry @ w
        return jnp.tanh(carry), None

    lax.scan(body, x, None, length=3)
    return jnp.sum(jnp.sin(total[...]))


@pytest.mark.parametrize(
    "order", [lambda f: jax.grad(autocast(f), (0, 1)), lambda f: autocast(jax.grad(f, (0, 1)))], ids=["inner", "outer"]
)
def test_gradients_through_a_reference_written_in_a_loop(order):
    want = jax.grad(summed_in_a_reference, (0, 1))(X, W)
    assert relative_error(order(summed_in_a_reference)(X, W), want) < 0.02
    assert dot_operands(order(summed_in_a_reference), X, W) == {"bfloat16"}


def written(ref, x):
    ref[...] = x @ x
    return 2 * x


def test_a_reference_of_the_caller_is_written_wherever_it_comes_from():
    want = X @ X
    ref = jax.new_ref(jnp.zeros((4, 4)))
    closed = autocast(lambda x: written(ref, x))
    for scale in (1, 2):
        closed(scale * X)
        assert relative_error(ref[...], scale**2 * want) < 0.02
    for call in (autocast(written), jax.jit(autocast(written)), lambda ref, x: jax.jit(closed)(x)):
        ref[...] = jnp.zeros((4, 4))
        np.testing.assert_array_equal(call(ref, X), 2 * X)
        assert relative_error(ref[...], want) < 0.02


def by_a_custom_vjp(body):
    fun = jax.custom_vjp(body)
    fun.defvjp(lambda x: (body(x), x), lambda x, ct: jax.vjp(body, x)[1](ct))
    return fun


def by_a_custom_jvp(body):
    fun = jax.custom_jvp(body)
    fun.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return fun


HOLDERS = {
    "plain": lambda body: body,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda body: lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0],
    "cond": lambda body: lambda x: lax.cond(x[0, 0] < 9, body, lambda x: x, x),
    "custom_jvp": by_a_custom_jvp,
    "custom_vjp": by_a_custom_vjp,
}
ORDERS = {
    "none": lambda f, cast: cast(f),
    "jit": lambda f, cast: jax.jit(cast(f)),
    "grad": lambda f, cast: jax.grad(cast(f)),
    "cast of grad": lambda f, cast: cast(jax.grad(f)),
}


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("holder", list(HOLDERS))
def test_callbacks_fire_as_often_and_in_the_same_order(holder, order):
    log = []

    def say(word, x):
        io_callback(lambda _: log.append(word), None, x[0, 0], ordered=True)

    def body(x):
        say("inside", x)
        return jnp.tanh(x @ W)

    def fun(x):
        say("first", x)
        y = HOLDERS[holder](body)(x)
        say("last", y)
        return jnp.sum(y)

    heard = []
    for cast in (lambda f: f, autocast):
        # JAX refuses ordered effects in some places; then autocast has nothing to keep.
        try:
            jax.block_until_ready(ORDERS[order](fun, cast)(X))
        except (ValueError, NotImplementedError) as error:
            log.append(type(error))
        jax.effects_barrier()
        heard.append(list(log))
        log.clear()
    assert heard[0] == heard[1]
    assert heard[0]


def test_shardings_and_donation_hold_around_and_inside():
    rows, everywhere = NamedSharding(mesh(AxisType.Auto), P("d")), NamedSharding(mesh(AxisType.Auto), P())

    def fun(x, w):
        return jnp.tanh(lax.with_sharding_constraint(x @ w, rows)) @ w

    shardings = {"in_shardings": (rows, everywhere), "out_shardings": rows}
    x, w = jax.device_put(X, rows), jax.device_put(W, everywhere)
    inside = autocast(jax.jit(fun, **shardings))
    assert inside(x, w).sharding == rows
    assert "sharding_constraint" in str(jax.make_jaxpr(inside)(x, w))
    out = jax.jit(autocast(fun), donate_argnums=0, **shardings)(x, w)
    assert out.sharding == rows
    assert x.is_deleted()
    assert relative_error(jax.device_get(out), fun(X, W)) < 0.02


def test_types_that_say_how_they_are_sharded_stay():
    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(X, P("d"))
        want = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, W)
        for cast in (jax.grad(autocast(loss), (0, 1)), autocast(jax.grad(loss, (0, 1)))):
            got = jax.make_jaxpr(cast)(x, W)
            assert [v.aval for v in got.jaxpr.outvars] == [v.aval for v in want.jaxpr.outvars]
            assert dot_operands(cast, x, W) == {"bfloat16"}


def test_pmap_around_and_inside():
    def fun(x):
        return jnp.tanh(x @ x) + lax.pmean(x @ x, "i")

    xs = jnp.stack([X, W])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax says that pmap is on its way out
        mapped = lambda f: jax.pmap(f, axis_name="i", devices=TWO)  # noqa: E731
        want = jax.device_get(mapped(fun)(xs))
        for cast in (mapped(autocast(fun)), autocast(mapped(fun))):
            assert relative_error(jax.device_get(cast(xs)), want) < 0.02
            assert dot_operands(cast, xs) == {"bfloat16"}
