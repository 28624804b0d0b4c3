"""What `_jaxpr` assumes about JAX, on this version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from amp_jax import _jaxpr

ONES = jnp.ones((2, 2))


def only(fun, *args):
    traced = _jaxpr.trace(fun, *args)
    (eqn,) = traced.jaxpr.eqns
    return eqn, traced.jaxpr


def test_a_trace_has_equations_constants_and_shapes():
    held = jnp.arange(3.0)
    traced = _jaxpr.trace(lambda x: {"y": x + held}, jnp.ones(3))
    assert [e.primitive.name for e in traced.jaxpr.eqns] == ["add"]
    assert traced.consts[0] is held
    assert traced.shapes["y"].shape == (3,)


def test_abstract_values_can_be_traced_and_take_another_dtype():
    aval = _jaxpr.trace(lambda x: x, ONES).jaxpr.invars[0].aval
    half = _jaxpr.with_dtype(aval, jnp.bfloat16)
    assert (half.shape, half.dtype) == ((2, 2), jnp.bfloat16)
    assert _jaxpr.trace(lambda x: x + 1, half).jaxpr.outvars[0].aval.dtype == jnp.bfloat16


def test_a_scan_says_how_many_constants_and_carries_it_has():
    w = ONES
    eqn = _jaxpr.trace(
        lambda c, xs: lax.scan(lambda c, x: ((c[0] @ w, c[1] + x), x), (c, 0.0), xs), ONES, jnp.ones(3)
    ).jaxpr.eqns[-1]
    assert _jaxpr.scan_lengths(eqn) == (1, 2)


@pytest.mark.parametrize(
    "fun", [jax.nn.relu, jax.jit(jnp.sin), jax.checkpoint(jnp.sin)], ids=["custom_jvp", "jit", "remat"]
)
def test_an_equation_with_a_body_runs_as_a_function(fun):
    eqn, owner = only(fun, ONES)
    assert len(_jaxpr.inner_jaxprs(eqn)) == 1
    np.testing.assert_array_equal(_jaxpr.as_function(eqn, owner)(ONES)[0], fun(ONES))


@pytest.mark.parametrize("fun", [jax.jit(jnp.sin), jax.checkpoint(jnp.sin)], ids=["jit", "remat"])
def test_an_equation_can_get_another_body(fun):
    eqn, _ = only(fun, ONES)
    np.testing.assert_array_equal(_jaxpr.rebind(eqn, lambda x: [jnp.cos(x)], [ONES])[0], jnp.cos(ONES))


def test_first_order_equations_bind_directly():
    eqn, _ = only(lambda x: lax.reduce_sum(x, axes=(0,)), ONES)
    assert _jaxpr.bind(eqn, [ONES], eqn.params)[0].shape == (2,)


def test_names_and_lines_survive():
    def original(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    eqn = _jaxpr.trace(original, ONES).jaxpr.eqns[0]

    def again(x):
        with jax.named_scope("around"), _jaxpr.within(eqn, _jaxpr.current_stack()):
            return _jaxpr.bind(eqn, [x], eqn.params)

    assert str(_jaxpr.trace(again, ONES).jaxpr.eqns[0].source_info.name_stack) == "around/inside"
    assert _jaxpr.source_line(eqn).startswith("test_jaxpr.py:")


def test_eager_calls_are_told_from_traced_ones():
    seen = []
    jax.make_jaxpr(lambda x: (seen.append((_jaxpr.is_eager(), _jaxpr.is_tracer(x))), x)[1])(ONES)
    assert seen == [(False, True)]
    assert _jaxpr.is_eager()
    assert not _jaxpr.is_tracer(ONES)
    assert jax.vmap(lambda x: (seen.append(_jaxpr.is_eager()), x)[1])(ONES).shape == (2, 2)


def test_custom_rules_keep_their_bodies_where_they_are_looked_for():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    eqn, _ = only(f, ONES)
    assert eqn.primitive.name == "custom_vjp_call"
    assert eqn.params["symbolic_zeros"] is False


def test_what_prints_or_calls_back_has_effects():
    printed, _ = only(lambda x: (jax.debug.print("{}", x), x)[1], ONES)
    plain, _ = only(jnp.sin, ONES)
    assert _jaxpr.effectful(printed)
    assert not _jaxpr.effectful(plain)


def times(x, y, *, sign):
    return x * y if sign > 0 else -(x * y)


def new_times(name):
    """A bilinear primitive that says on the CPU, where these tests run, that it is on the CPU: it adds 100."""
    return _jaxpr.new_bilinear(
        name,
        times,
        lambda x, y, *, sign: times(x, y, sign=sign) + 100,
        (lambda ct, x, y, *, sign: times(ct, y, sign=sign), lambda ct, x, y, *, sign: times(x, ct, sign=sign)),
        lambda operands, axes, *, sign: (times(*operands, sign=sign), axes[0]),
        ("sign",),
    )


def test_a_bilinear_primitive_of_our_own_is_differentiated_mapped_and_lowered_by_platform():
    mul = new_times("times")
    x, y = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    fun = lambda x, y: mul.bind(x, y, sign=-1)  # noqa: E731
    for run in (fun, jax.jit(fun)):
        np.testing.assert_array_equal(run(x, y), [90.0, 79.0])
    np.testing.assert_array_equal(jax.grad(lambda y: fun(x, y).sum())(y), [-2.0, -3.0])
    np.testing.assert_array_equal(jax.jvp(fun, (x, y), (y, x))[1], 200 - np.array([29.0, 58.0]))  # two terms, +100 each
    np.testing.assert_array_equal(jax.vmap(fun)(x, y), [-10.0, -21.0])
    assert "100" not in jax.jit(fun).trace(x, y).lower(lowering_platforms=("tpu",)).as_text()


def test_a_transpose_rule_can_bind_something_else():
    x, y = jnp.ones((4, 3)), jnp.ones((3, 5))
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": None, "out_sharding": None}
    params["preferred_element_type"] = np.dtype(np.float32)
    seen = []

    def new(a, b, **given):
        seen.append(sorted(given))
        return 2 * lax.dot_general_p.bind(a, b, **given)

    got = _jaxpr.cotangent(lax.dot_general_p, 1, jnp.ones((4, 5)), jax.typeof(y), x, params, new)
    np.testing.assert_array_equal(got, jnp.full((3, 5), 8.0))
    assert seen == [sorted(params)]
