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
