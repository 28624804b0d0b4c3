"""autocast as a transform: pytrees, keywords, static arguments, caching, closures, nesting, errors."""

import dataclasses
import functools
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import amp_jax as amp
from amp_jax._autocast import KEPT
from tests.programs import autocast, normal, products, relative_error, result_dtypes

ONES = jnp.ones((2, 2))
REPLACED = jnp.ones((2, 2))


def test_any_pytree_goes_in_and_comes_out():
    def model(params, *, x, scale=2.0, names=("a",)):
        return {"y": params["w"] @ x * scale, "n": params["n"] + 1, "none": None, "key": params["key"]}, names

    params = {"w": ONES, "n": jnp.int32(3), "key": jax.random.key(0)}
    out, _ = amp.autocast(lambda p, **kw: (model(p, **kw)[0], 0), "mixed_bfloat16")(params, x=ONES)
    assert out["y"].dtype == jnp.float32
    assert (out["n"], out["none"]) == (4, None)
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)


def test_python_arguments_are_taken_as_they_are():
    def model(x, train, rate, activation):
        return activation(x @ x) * rate if train else x

    fun = autocast(model, "mixed_bfloat16")
    assert float(fun(ONES, True, 0.5, jnp.tanh)[0, 0]) == pytest.approx(0.482, abs=1e-2)
    np.testing.assert_array_equal(fun(ONES, False, 0.5, jnp.tanh), ONES)


def test_dtypes_are_those_of_the_function():
    def model(x):
        return x @ x, (x @ x).astype(jnp.bfloat16), jnp.argmax(x), x > 0

    got = jax.eval_shape(autocast(model, "mixed_float16"), ONES)
    assert got == jax.eval_shape(model, ONES)


def test_a_second_eager_call_does_not_trace_again():
    traces = []

    class Counter:
        def count(self):
            traces.append(1)

    counter = Counter()

    def model(x, flag):
        counter.count.__self__.count()
        return x @ jnp.array([[1.0, 2.0], [3.0, 4.0]]) if flag else x

    fun = autocast(model, "mixed_bfloat16")
    for _ in range(3):
        fun(ONES, True)
    # `traces` is a closed-over list: what it holds counts as closed over, so it may not decide. Count compilations.
    compiled = len(traces)
    fun(ONES, True)
    assert compiled - len(traces) <= 0
    assert len(traces) <= 4


def test_new_shapes_and_new_static_arguments_trace_anew():
    fun = autocast(lambda x, n: x @ x * n, "mixed_bfloat16")
    assert fun(ONES, 2).shape == (2, 2)
    assert fun(jnp.ones((3, 3)), 2).shape == (3, 3)
    assert float(fun(ONES, 3)[0, 0]) == 6.0


def test_an_array_that_was_replaced_does_not_go_stale():
    global REPLACED
    box = {"w": ONES}
    held, by_name = (
        autocast(lambda x: x @ box["w"], "mixed_bfloat16"),
        autocast(lambda x: x @ REPLACED, "mixed_bfloat16"),
    )
    assert float(held(ONES)[0, 0]) == float(by_name(ONES)[0, 0]) == 2.0
    box["w"], REPLACED = 2 * ONES, 3 * ONES
    assert float(held(ONES)[0, 0]) == 4.0
    assert float(by_name(ONES)[0, 0]) == 6.0


def test_an_array_hidden_behind_a_slot_does_not_go_stale():
    class Slotted:
        __slots__ = ("w",)

    slot = Slotted()
    slot.w = ONES
    fun = autocast(lambda x: x @ slot.w, "mixed_bfloat16")
    assert float(fun(ONES)[0, 0]) == 2.0
    slot.w = 2 * ONES
    assert float(fun(ONES)[0, 0]) == 4.0


def test_a_closed_over_tracer_under_grad_twice():
    def loss(w):
        return jnp.sum(autocast(lambda x: x @ w, "mixed_bfloat16")(ONES))

    kept = autocast(lambda x: x @ x, "mixed_bfloat16")
    for _ in range(2):
        np.testing.assert_array_equal(jax.grad(loss)(ONES), 2.0)
        np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(kept(x)))(ONES), 4.0)


def test_the_inner_autocast_decides():
    def inner(x):
        return jnp.tanh(x @ x)

    x = normal(0, 4, 4)
    once = autocast(inner, "mixed_bfloat16")
    np.testing.assert_array_equal(autocast(once, "mixed_bfloat16")(x), once(x))
    mixed = autocast(lambda x: autocast(inner, "float32")(x) @ x, "mixed_bfloat16")
    assert result_dtypes(mixed, x) == ["f32", "bf16"]
    other = autocast(lambda x: autocast(inner, "mixed_float16")(x) @ x, "mixed_bfloat16")
    assert result_dtypes(other, x) == ["f16", "bf16"]


def test_what_comes_out_of_an_inner_autocast_is_still_low():
    def model(x):
        return jax.nn.relu(autocast(lambda x: x @ x, "mixed_bfloat16")(x)) @ x

    jaxpr = str(jax.make_jaxpr(autocast(model, "mixed_bfloat16"))(ONES))
    assert "bf16[2,2] = max" in jaxpr


@pytest.mark.parametrize(
    "order", ["grad of autocast", "autocast of grad", "vmap", "jit", "linearize", "hessian", "jvp"]
)
def test_transformations_on_either_side(order):
    w = normal(1, 3, 3)

    def loss(x):
        return jnp.sum(jnp.sin(x @ w) @ w)

    half, x = autocast(loss, "mixed_bfloat16"), normal(0, 3, 3)
    pairs = {
        "grad of autocast": (jax.grad(half), jax.grad(loss)),
        "autocast of grad": (autocast(jax.grad(loss), "mixed_bfloat16"), jax.grad(loss)),
        "vmap": (jax.vmap(half), jax.vmap(loss)),
        "jit": (jax.jit(half), loss),
        "linearize": (lambda x: jax.linearize(half, x)[1](x), lambda x: jax.jvp(loss, (x,), (x,))[1]),
        "hessian": (jax.hessian(half), jax.hessian(loss)),
        "jvp": (lambda x: jax.jvp(half, (x,), (x,)), lambda x: jax.jvp(loss, (x,), (x,))),
    }
    got, want = pairs[order]
    assert relative_error(got(x), want(x)) < 0.05


def test_float64_and_the_authors_half_are_left_alone():
    def model(x):
        half = x.astype(jnp.bfloat16)
        return half @ half, jnp.dot(half, half, preferred_element_type=jnp.float32), (x @ x).astype(jnp.float16)

    plain = str(jax.make_jaxpr(lambda x: model(x)[:2])(ONES))
    assert str(jax.make_jaxpr(autocast(lambda x: model(x)[:2], "mixed_float16"))(ONES)).count("dot") == plain.count(
        "dot"
    )
    assert result_dtypes(autocast(model, "mixed_float16"), ONES) == ["bf16", "f32", "f16"]


@pytest.mark.parametrize("given", [3, "mixed_bfloat16", None])
def test_what_can_not_be_called_is_named(given):
    if given is None:
        assert callable(amp.autocast(None))  # the decorator form
        return
    with pytest.raises(amp.AmpTypeError, match=r"expects a function, got (int|str).*policy=\.\.\."):
        amp.autocast(given)


def test_a_python_if_on_a_value_says_what_to_do():
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        autocast(lambda x: x if x.sum() > 0 else -x, "mixed_bfloat16")(ONES)
    assert "amp.autocast traces `<lambda>`" in error.value.__notes__[0]


def test_an_nnx_module_in_the_closure_is_refused():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(amp.AmpTypeError, match=r"closes over an nnx.Module .*Linear.*Pass it as an argument"):
        autocast(lambda x: model(x), "mixed_bfloat16")(ONES)


def test_a_function_of_an_nnx_module_keeps_its_updates():
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    autocast(lambda m, x: m(x), "mixed_bfloat16")(model, 3 + ONES)
    np.testing.assert_allclose(model.mean[...], 0.04, rtol=1e-5)  # 0.99 * 0 + 0.01 * 4


REGIONS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "cond": lambda f: lambda x: jax.lax.cond(True, f, f, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@pytest.mark.parametrize("name", list(REGIONS))
def test_a_float32_region_holds_forward_and_backward(name):
    @amp.full_precision()
    def inside(x):
        return jnp.sin(x @ x)

    def model(x):
        return jnp.sum(REGIONS[name](inside)(x) @ x)

    assert set(result_dtypes(autocast(model, "mixed_bfloat16"), ONES)) == {"f32", "bf16"}
    dots = [(x, y) for x, y, _ in products(jax.grad(autocast(model, "mixed_bfloat16")), ONES)]
    assert dots.count(("bfloat16", "bfloat16")) == 3  # one forward, two backward; all others are inside
    assert dots.count(("float32", "float32")) >= 3


def test_a_jitted_function_shared_between_inside_and_outside():
    shared = jax.jit(lambda x: x @ x)

    def model(x):
        with amp.full_precision():
            y = shared(x)
        return y + shared(x)

    assert sorted(result_dtypes(autocast(model, "mixed_bfloat16"), ONES)) == ["bf16", "f32"]


def test_the_innermost_region_wins_and_outside_autocast_it_is_nothing():
    def model(x):
        with amp.precision("float32"), amp.precision("mixed_float16"):
            return x @ x

    assert result_dtypes(autocast(model, "mixed_bfloat16"), ONES) == ["f16"]
    assert result_dtypes(model, ONES) == ["f32"]


def test_rules_on_scopes_hold_in_plain_autocast():
    def model(x):
        with jax.named_scope("head"):
            y = x @ x
        return y @ x

    policy = amp.get_policy("mixed_bfloat16").override({"head": "float32"})
    assert result_dtypes(autocast(model, policy), ONES) == ["f32", "bf16"]


@pytest.mark.parametrize(
    ("key", "error", "says"), [("haed", amp.AmpValueError, "head"), (nnx.Linear, amp.AmpTypeError, "amp.wrap")]
)
def test_a_rule_that_no_scope_matches_is_named(key, error, says):
    policy = amp.get_policy("mixed_bfloat16").override({key: "float32"})
    with pytest.raises(error, match=says):
        autocast(jax.named_scope("head")(lambda x: x @ x), policy)(ONES)


def test_float64_is_no_compute_dtype_for_autocast():
    with pytest.raises(amp.AmpValueError, match=r"compute=float64.*autocast computes in bfloat16, float16 or float32"):
        autocast(lambda x: x @ x, amp.Policy("float32", "float64", "float32"))(ONES)


@dataclasses.dataclass
class Layer:
    w: jax.Array
    scale: float
    traced: Any

    def __call__(self, x):
        self.traced(1)
        return x @ self.w * self.scale

    def method(self, x):
        return self(x)


def with_weight(w, x, traced):
    traced(1)
    return x @ w * 2.0


def forms(layer):
    jitted = jax.jit(lambda x: x @ layer.w)
    return {
        "callable": layer,
        "method": layer.method,
        "partial": functools.partial(with_weight, layer.w, traced=layer.traced),
        "inner function": lambda x: layer(x),
        "jitted inside": lambda x: (layer.traced(1), jitted(x))[1],
    }


@pytest.mark.parametrize("form", list(forms(Layer(ONES, 1.0, len))))
def test_every_form_of_function_is_traced_once(form):
    log = []
    layer = Layer(2 * ONES, 2.0, log.append)  # a method of C: its list isn't counted among what is closed over
    fun = autocast(forms(layer)[form], "mixed_bfloat16")
    for _ in range(3):
        assert fun(ONES).dtype == jnp.float32
    assert log == [1]


@pytest.mark.parametrize("form", ["callable", "method", "inner function"])
def test_an_array_and_a_number_of_a_dataclass_do_not_go_stale(form):
    layer = Layer(ONES, 1.0, [].append)
    fun = autocast(forms(layer)[form], "mixed_bfloat16")
    assert float(fun(ONES)[0, 0]) == 2.0
    layer.w = 2 * ONES
    assert float(fun(ONES)[0, 0]) == 4.0
    layer.scale = 3.0
    assert float(fun(ONES)[0, 0]) == 12.0


def test_a_counter_of_an_object_is_no_reason_to_trace_again():
    log = []

    class Trainer:
        def __init__(self):
            self.step, self.traced = 0, log.append

        def loss(self, x):
            self.traced(1)
            return x @ x

    trainer = Trainer()
    fun = autocast(trainer.loss, "mixed_bfloat16")
    for trainer.step in range(4):
        fun(ONES)
    assert log == [1]


def test_what_is_kept_is_bounded():
    traced = Mock()
    fun = autocast(lambda x, n: (traced(n), x * n)[1], "mixed_bfloat16")
    for n in range(KEPT + 1):
        fun(ONES, n)
    fun(ONES, KEPT)  # kept
    assert traced.call_count == KEPT + 1
    fun(ONES, 0)  # the first one has made room
    assert traced.call_count == KEPT + 2


def test_static_arguments_of_a_jit_around_it_and_inside():
    def model(x, n, activation):
        return activation(x @ x) * n

    around = jax.jit(autocast(model, "mixed_bfloat16"), static_argnames=("n", "activation"))
    inside = autocast(jax.jit(model, static_argnames=("n", "activation")), "mixed_bfloat16")
    for fun in (around, inside):
        assert float(fun(ONES, n=3, activation=jnp.negative)[0, 0]) == -6.0
        assert float(fun(ONES, n=2, activation=jnp.abs)[0, 0]) == 4.0


WEAK = {
    "product": lambda a: a * 2,
    "sine": jnp.sin,
    "cond": lambda a: jax.lax.cond(True, lambda: a, lambda: a * 2),
    "scan": lambda a: jax.lax.scan(lambda c, _: (c * 0.5, c), a, None, length=2),
    "jit": jax.jit(lambda a: a + 1),
    "remat": jax.checkpoint(lambda a: a * 2.0),
    "while": lambda a: jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, a),
    "where": lambda a: jnp.where(ONES @ ONES > 0, a, 1.0),
    "beside a matrix": lambda a: (a, a * (ONES @ ONES), ONES @ ONES + a),
}


@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize("name", list(WEAK))
def test_weak_types_stay_weak(name, weak):
    scalar = jax.ShapeDtypeStruct((), jnp.float32, weak_type=weak)
    plain, cast = (jax.make_jaxpr(f)(scalar) for f in (WEAK[name], autocast(WEAK[name], "mixed_bfloat16")))
    types = [[(v.aval.dtype, v.aval.weak_type) for v in jaxpr.jaxpr.outvars] for jaxpr in (plain, cast)]
    assert types[0] == types[1]
