"""Operations of the user's own under autocast: kernels, derivative rules, primitives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

import amp_jax as amp
from tests.programs import autocast, both_halves, result_dtypes

X, W = jnp.arange(16.0).reshape(4, 4) / 16, jnp.eye(4) + 0.5


def matmul_kernel(x, y, out):
    out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32).astype(out.dtype)


def call(x, y):
    """A matrix product as a Pallas kernel; it tells the dtypes that it is traced in."""
    SEEN.append((x.dtype.name, y.dtype.name))
    return pl.pallas_call(matmul_kernel, jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype), interpret=True)(x, y)


SEEN: list[tuple[str, str]] = []


@jax.custom_vjp
def pallas_matmul(x, y):
    return call(x, y)


pallas_matmul.defvjp(
    lambda x, y: (call(x, y), (x, y)),
    lambda saved, ct: (call(ct, saved[1].T), call(saved[0].T, ct)),
)
matmul = amp.register_op(pallas_matmul, "compute")


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


@both_halves
def test_a_pallas_kernel_gets_the_compute_dtype_forward_and_backward(policy):
    def loss(mul, x, w):
        return jnp.sum(jnp.sin(mul(x, w) + 1))

    value, grads = jax.jit(jax.value_and_grad(autocast(functools.partial(loss, matmul), policy), argnums=(0, 1)))(X, W)
    assert set(SEEN) == {(policy.removeprefix("mixed_"),) * 2}
    assert len(SEEN) >= 3  # the forward rule, and both products of the backward rule
    want, want_grads = jax.value_and_grad(functools.partial(loss, jnp.dot), argnums=(0, 1))(X, W)
    assert value.dtype == jnp.float32
    # Values up to 3 with 8 bits each: 2 roundings of 2^-8 a term.
    np.testing.assert_allclose(value, want, rtol=2e-2)
    for got, right in zip(grads, want_grads, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, right, atol=5e-2)


def test_outside_autocast_and_in_full_precision_it_is_the_function_itself():
    np.testing.assert_array_equal(matmul(X, W), pallas_matmul(X, W))
    exact = autocast(amp.full_precision()(matmul), "mixed_bfloat16")
    np.testing.assert_array_equal(exact(X, W), pallas_matmul(X, W))
    assert set(SEEN) == {("float32", "float32")}


def test_a_jitted_function_keeps_apart_what_it_traced_inside_and_outside():
    inner = jax.jit(lambda x, w: matmul(x, w))
    autocast(inner, "mixed_bfloat16")(X, W)
    assert SEEN.pop() == ("bfloat16", "bfloat16")
    inner(X, W)
    assert SEEN.pop() == ("float32", "float32")


@pytest.mark.parametrize("around", ["scan", "remat", "cond", "vmap"])
def test_it_holds_inside(around):
    bodies = {
        "scan": lambda x, w: lax.scan(lambda c, _: (matmul(c, w), None), x, None, length=2)[0],
        "remat": lambda x, w: jax.checkpoint(matmul)(x, w),
        "cond": lambda x, w: lax.cond(x[0, 0] < 1, matmul, lambda x, w: x, x, w),
        "vmap": lambda x, w: jax.vmap(matmul)(x[None], w[None]),
    }
    out = autocast(bodies[around], "mixed_bfloat16")(X, W)
    assert set(SEEN) == {("bfloat16", "bfloat16")}
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, bodies[around](X, W), atol=0.2)


def test_what_it_returns_is_held_low_and_costs_no_cast():
    # The product's result goes to a product: from bfloat16 to bfloat16, without float32 between.
    jaxpr = str(jax.make_jaxpr(autocast(lambda x, w: matmul(x, w) @ w, "mixed_bfloat16"))(X, W))
    assert jaxpr.count("new_dtype=float32") == 1  # the way out


def test_an_autocast_inside_another_decides():
    inner = amp.autocast(lambda x: matmul(x, x), "mixed_float16")
    autocast(lambda x: inner(x) @ x, "mixed_bfloat16")(X)
    assert set(SEEN) == {("float16", "float16")}


def test_the_author_s_own_half_arrays_stay():
    out = autocast(lambda x: matmul(x, x), "mixed_float16")(X.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert set(SEEN) == {("bfloat16", "bfloat16")}


def test_full_runs_products_in_float32_too():
    exact = amp.register_op(lambda x, w: jnp.tanh(x @ w), "full")
    assert result_dtypes(autocast(lambda x, w: exact(x, w) @ w, "mixed_bfloat16"), X, W, of="dot_general") == [
        "f32",
        "bf16",
    ]


def test_opaque_runs_as_it_is_written():
    def mixed(x, w):
        return x.astype(jnp.float16) @ w.astype(jnp.float16), x @ w

    fun = autocast(amp.register_op(mixed, "opaque"), "mixed_bfloat16")
    assert result_dtypes(fun, X, W, of="dot_general") == ["f16", "f32"]


def test_a_custom_rule_that_calls_a_registered_function_gets_the_compute_dtype():
    @jax.custom_vjp
    def layer(x, w):
        return matmul(x, w)

    layer.defvjp(lambda x, w: (matmul(x, w), (x, w)), lambda s, ct: (matmul(ct, s[1].T), matmul(s[0].T, ct)))
    jax.grad(autocast(lambda x, w: layer(x, w).sum(), "mixed_bfloat16"))(X, W)
    assert set(SEEN) == {("bfloat16", "bfloat16")}


def test_keyword_arguments_numbers_and_trees():
    @functools.partial(amp.register_op, category="compute")
    def scaled(tree, *, by, name):
        assert (by, name) == (2.0, "n")
        return {"y": tree["x"] * by, "n": tree["n"]}

    out = autocast(lambda x: scaled({"x": x, "n": jnp.arange(2)}, by=2.0, name="n"), "mixed_bfloat16")(X)
    assert (out["y"].dtype, out["n"].dtype) == (jnp.float32, jnp.int32)


def new_primitive(name):
    primitive = Primitive(name)
    primitive.def_impl(jax.jit(lambda x: primitive.bind(x)))
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x + x, multiple_results=False))
    return primitive


@pytest.mark.parametrize(
    ("category", "want"), [("compute", "bf16"), ("full", "f32"), ("follow", "bf16"), ("opaque", "f32")]
)
def test_a_primitive_of_one_s_own(category, want):
    primitive = amp.register_op(new_primitive(f"doubled_{category}"), category)
    fun = autocast(lambda x, w: primitive.bind(x @ w) @ w, "mixed_bfloat16")
    assert result_dtypes(fun, X, W, of=primitive.name) == [want]
    np.testing.assert_allclose(fun(X, W), 2 * X @ W @ W, rtol=3e-2)


def test_a_policy_s_word_wins_over_the_registered_one():
    primitive = amp.register_op(new_primitive("doubled_too"), "full")
    policy = amp.get_policy("mixed_bfloat16").with_ops({"doubled_too": "compute"})
    assert result_dtypes(amp.autocast(primitive.bind, policy), X, of="doubled_too") == ["bf16"]


def test_an_unregistered_primitive_is_opaque_and_explain_says_so():
    report = str(amp.explain(new_primitive("unheard_of").bind, "mixed_bfloat16")(X))
    assert "opaque, in float32: unheard_of" in report


def test_errors_say_what_to_do():
    with pytest.raises(amp.AmpValueError, match="'full'"):
        amp.register_op(matmul, "ful")
    with pytest.raises(amp.AmpTypeError, match="function or a primitive"):
        amp.register_op(3, "full")  # pyright: ignore[reportArgumentType]
    with pytest.raises(amp.AmpValueError, match="with_ops"):
        amp.register_op(lax.exp_p, "compute")
    with pytest.raises(amp.AmpValueError, match="unknown"):
        amp.register_op(new_primitive("other"), "half")
    policy = amp.get_policy("mixed_bfloat16").with_ops({"pallas_call": "compute"})
    with pytest.raises(amp.AmpValueError, match=r"pallas_call.*register_op"):
        amp.autocast(call, policy)(X, W)
