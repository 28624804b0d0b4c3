"""What comes back is the true loss and true gradients, whatever the loss scale does in between."""

import functools
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._gradients import grad, scale_loss, unscale, value_and_grad
from amp_jax._opt_state import metrics
from amp_jax._optimizer import dynamic_loss_scaling, no_loss_scaling, static_loss_scaling

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}
X = jnp.array([0.5, 1.0, 2.0])


def state_at(scale: float) -> Any:
    return static_loss_scaling(optax.sgd(0.1), scale).init(PARAMS)


UNSCALED = no_loss_scaling(optax.sgd(0.1)).init(PARAMS)


def loss_of(params: Any, x: Any) -> Any:
    return jnp.mean((params["w"] * x + params["b"]) ** 2)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def net_loss(net: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(net(x) ** 2)


@pytest.mark.parametrize("state", [UNSCALED, *map(state_at, (1.0, 2.0**-14, 2.0**15, 2.0**120))])
def test_equals_jax_bit_for_bit(state: Any) -> None:
    # At 2^120 a loss that was really multiplied, or kept in float16, would be inf.
    want = jax.value_and_grad(loss_of)(PARAMS, X)
    chex.assert_trees_all_equal(value_and_grad(loss_of, state)(PARAMS, X), want)
    want = jax.jit(jax.value_and_grad(loss_of))(PARAMS, X)
    chex.assert_trees_all_equal(jax.jit(value_and_grad(loss_of, state))(PARAMS, X), want)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126, 2.0**127])
def test_unscaling_is_exact_at_the_ends_of_float32(scale: float) -> None:
    # 1 / 2^127 is subnormal, which devices flush to zero: a reciprocal would lose every gradient.
    small = min(1.0, 2.0**120 / scale)
    assert grad(lambda x: small * x, state_at(scale))(1.0) == small


def test_reported_loss_is_the_true_one_on_growth_and_backoff_steps() -> None:
    # MPX reports loss and gradients divided by the next scale on a step that changes the scale.
    tx = dynamic_loss_scaling(optax.sgd(0.0), growth_interval=2, init_scale=8.0)
    state, want = tx.init(PARAMS), jax.value_and_grad(loss_of)(PARAMS, X)
    scales = []
    for _ in range(4):
        got = value_and_grad(loss_of, state)(PARAMS, X)
        chex.assert_trees_all_equal(got, want)
        _, state = tx.update(got[1], state, PARAMS)
        scales.append(float(metrics(state)["loss_scale"]))
    assert scales == [8, 16, 16, 32]


def test_a_small_gradient_survives_half_precision() -> None:
    # What loss scaling is for. jmp's StaticLossScale with a Python float unscales in float16 and loses it again.
    params = jnp.array(1.0, jnp.float16)
    loss = lambda w: (w * jnp.float16(2.0**-20)).astype(jnp.float32) * 2.0**-8  # noqa: E731
    assert grad(loss, UNSCALED)(params) == 0.0
    got = grad(loss, state_at(2.0**15))(params)
    assert (got, got.dtype) == (2.0**-28, np.float32)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("state", [UNSCALED, state_at(8.0)])
def test_loss_and_gradients_are_float32(dtype: Any, state: Any) -> None:
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, grads = value_and_grad(loss_of, state)(params, X.astype(dtype))
    assert {x.dtype.name for x in jax.tree.leaves((loss, grads))} == {"float32"}


def test_a_float16_loss_of_3_is_reported_as_3() -> None:
    # flax's own example loses its first steps to inf here: 3 * 2^15 is beyond float16.
    with pytest.warns(UserWarning, match="computed in float16.*float32 before the loss"):
        loss, grads = value_and_grad(lambda w: w * jnp.float16(3.0), state_at(2.0**15))(jnp.float16(1.0))
    assert loss == 3.0
    # As a float16 gradient 3 * 2^15 is inf, which skips the step; at half the scale it isn't.
    assert np.isnan(grads)
    with pytest.warns(UserWarning, match="float16"):
        assert grad(lambda w: w * jnp.float16(3.0), state_at(2.0**14))(jnp.float16(1.0)) == 3.0


def test_the_float16_warning_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            grad(lambda w: w * w, state_at(4.0))(jnp.float16(1.0))
            scale_loss(jnp.float16(1.0), state_at(4.0))
    assert len(seen) == 1


def test_no_warning_where_nothing_can_overflow() -> None:
    grad(lambda w: w * w, UNSCALED)(jnp.float16(1.0))
    grad(lambda w: w * w, state_at(2.0**20))(jnp.bfloat16(1.0))


def test_float64_stays() -> None:
    with jax.enable_x64(True):
        loss, grads = value_and_grad(lambda w: w**2, state_at(8.0))(jnp.array(1 / 3, jnp.float64))
        assert (loss, grads) == (jnp.array(1 / 3) ** 2, 2 * jnp.array(1 / 3))
        assert (loss.dtype, grads.dtype) == (np.float64, np.float64)


def test_overflow_comes_out_as_nan_whatever_it_was() -> None:
    # inf would pass for 1.0 after optax.clip; NaN stays NaN.
    grads = unscale({"a": jnp.array([jnp.inf, -jnp.inf, jnp.nan, 8.0]), "c": jnp.array([1j * jnp.inf])}, state_at(8.0))
    assert np.isnan(grads["a"]).tolist() == [True, True, True, False]
    assert np.isnan(grads["c"]).all()
    assert grads["a"][3] == 1.0


def test_a_true_gradient_beyond_float32_is_not_finite() -> None:
    assert np.isnan(unscale(jnp.float32(2.0**127), state_at(2.0**-14)))


def test_arguments_are_those_of_jax() -> None:
    def fun(a: Any, b: Any, *, power: int) -> tuple[Any, Any]:
        return jnp.sum(a * b) ** power, {"inf": jnp.inf, "n": jnp.arange(2)}

    args, state = (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])), state_at(64.0)
    for argnums in (0, 1, -1, (0, 1), [1]):
        want = jax.value_and_grad(fun, argnums=argnums, has_aux=True)(*args, power=2)
        got = value_and_grad(fun, state, argnums=argnums, has_aux=True)(*args, power=2)
        chex.assert_trees_all_equal(got, want)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        chex.assert_trees_all_equal(
            grad(fun, state, argnums=argnums, has_aux=True)(*args, power=2),
            jax.grad(fun, argnums=argnums, has_aux=True)(*args, power=2),
        )


def test_leaves_that_are_no_gradients_pass_through() -> None:
    params = {"w": jnp.ones(2), "n": jnp.array(3), "k": jax.random.key(0), "none": None}
    _, grads = value_and_grad(lambda p: jnp.sum(p["w"]) * p["n"], state_at(8.0))(params)
    assert grads["w"].tolist() == [3.0, 3.0]
    assert {grads[name].dtype for name in ("n", "k")} == {jax.dtypes.float0}
    assert grads["none"] is None
    given = {"n": jnp.arange(3), "f8": jnp.array([2.0], jnp.float8_e4m3fn), "key": jax.random.key(1)}
    got = unscale(given, state_at(8.0))
    assert all(got[name] is given[name] for name in given)


def test_float8_overwrite_state_is_not_divided() -> None:
    # flax DynamicScale turns an amax of 1.0 into 1.5e-5: these are new values, not gradients.
    grads = {"params": {"w": jnp.array(8.0)}, "_overwrite_with_gradient": {"input_amax": jnp.array(1.0)}}
    got = unscale(grads, state_at(8.0))
    assert (got["params"]["w"], got["_overwrite_with_gradient"]["input_amax"]) == (1.0, 1.0)


def test_the_two_halves_by_hand() -> None:
    state = state_at(2.0**10)
    loss, pullback = jax.vjp(lambda p: scale_loss(loss_of(p, X), state), PARAMS)
    assert loss == loss_of(PARAMS, X) * 2.0**10
    chex.assert_trees_all_equal(unscale(pullback(jnp.ones(()))[0], state), jax.grad(loss_of)(PARAMS, X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # jamp gives inf: the product is float32's.
        assert scale_loss(jnp.float16(3.0), state_at(2.0**15)) == 3.0 * 2**15
    assert scale_loss(jnp.float32(3.0), UNSCALED) == 3.0
    chex.assert_trees_all_equal(unscale({"g": jnp.float16(3.0)}, UNSCALED), {"g": jnp.float32(3.0)})


def test_several_losses_under_one_scale() -> None:
    state = state_at(2.0**10)
    by_hand = unscale(
        jax.tree.map(
            jnp.add,
            jax.grad(lambda p: scale_loss(loss_of(p, X), state))(PARAMS),
            jax.grad(lambda p: scale_loss(loss_of(p, 2 * X), state))(PARAMS),
        ),
        state,
    )
    chex.assert_trees_all_close(by_hand, jax.grad(lambda p: loss_of(p, X) + loss_of(p, 2 * X))(PARAMS), rtol=1e-6)


def test_composes_with_jax_transformations() -> None:
    state = state_at(2.0**12)
    fun = lambda w: jnp.sum(w**3)  # noqa: E731
    w = jnp.array([1.0, 2.0])
    per_example = jax.vmap(grad(loss_of, state), in_axes=(None, 0))
    xs = jnp.stack([X, 2 * X])
    chex.assert_trees_all_close(per_example(PARAMS, xs), jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(PARAMS, xs))
    # A gradient penalty, forward over reverse, a remat and a scan around it.
    penalty = lambda w, g: jnp.sum(g(fun)(w) ** 2)  # noqa: E731
    ours = functools.partial(grad, opt_state=state)
    assert jax.grad(penalty)(w, ours).tolist() == jax.grad(penalty)(w, jax.grad).tolist()
    assert jax.jacfwd(ours(fun))(w).tolist() == jax.hessian(fun)(w).tolist()
    assert ours(jax.checkpoint(fun))(w).tolist() == [3.0, 12.0]
    _, scanned = jax.lax.scan(lambda c, w: (c, ours(fun)(w)), None, w[:, None])
    assert scanned.tolist() == [[3.0], [12.0]]


def test_the_scale_moves_without_a_new_trace() -> None:
    tx = dynamic_loss_scaling(optax.adam(1e-2), growth_interval=1)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = value_and_grad(loss_of, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state = PARAMS, tx.init(PARAMS)
    for x in (X, X, X * jnp.inf, X):
        params, state, _ = step(params, state, x)
    assert float(metrics(state)["loss_scale"]) == 2.0**17


def test_aux_may_hold_inf() -> None:
    # jaxamp lets the scale fall for that.
    tx = dynamic_loss_scaling(optax.sgd(0.1))
    state = tx.init(PARAMS)
    (_, aux), grads = value_and_grad(lambda p: (loss_of(p, X), jnp.inf), state, has_aux=True)(PARAMS)
    _, state = tx.update(grads, state, PARAMS)
    assert aux == jnp.inf
    assert bool(metrics(state)["grads_finite"])


# nnx


def test_nnx_module_keeps_its_updates() -> None:
    # flax DynamicScale and MPX lose the statistics; a jax.grad over a Module with Rngs raises.
    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (8, 3))
    optimizer = nnx.Optimizer(ours, dynamic_loss_scaling(optax.sgd(0.1)), wrt=nnx.Param)
    got = value_and_grad(net_loss, optimizer)(ours, x)
    want = nnx.value_and_grad(net_loss)(theirs, x)
    chex.assert_trees_all_equal(got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    chex.assert_trees_all_equal(nnx.state(ours), nnx.state(theirs))
    assert float(jnp.abs(ours.norm.mean[...]).sum()) > 0
    assert int(ours.dropout.rngs.count[...]) == 1
    assert set(got[1]) == {"linear", "norm"}


@pytest.mark.parametrize("argnums", [1, (0, 1), nnx.DiffState(0, nnx.PathContains("kernel"))])
def test_nnx_argnums(argnums: Any) -> None:
    x = jnp.ones((8, 3))
    got = value_and_grad(net_loss, state_at(16.0), argnums=argnums)(Net(nnx.Rngs(0)), x)
    want = nnx.value_and_grad(net_loss, argnums=argnums)(Net(nnx.Rngs(0)), x)
    chex.assert_trees_all_equal(got, want)


def test_nnx_aux_keyword_arguments_and_modules_in_containers() -> None:
    def loss(nets: dict[str, Net], x: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
        y = nets["a"](x)
        return factor * jnp.mean(y**2), y

    nets = {"a": Net(nnx.Rngs(0))}
    (value, aux), grads = value_and_grad(loss, state_at(16.0), has_aux=True)(nets, jnp.ones((8, 3)), factor=2.0)
    assert (value.shape, aux.shape) == ((), (8, 4))
    assert grads["a"]["linear"]["kernel"].get_value().shape == (3, 4)
    assert int(nets["a"].dropout.rngs.count[...]) == 1


def test_a_module_beside_the_differentiated_argument_keeps_its_updates() -> None:
    net = Net(nnx.Rngs(0))
    grad(lambda w, net, x: w * net_loss(net, x), state_at(16.0))(1.0, net, jnp.ones((8, 3)))
    assert int(net.dropout.rngs.count[...]) == 1


def test_nnx_state_is_an_ordinary_tree() -> None:
    # Split by hand, as the functional API of nnx does: a State is a value, with nothing to update.
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def loss(state: nnx.State, x: jax.Array) -> jax.Array:
        return net_loss(nnx.merge(graph, state), x)

    got = value_and_grad(loss, state_at(16.0))(state, jnp.ones((8, 3)))
    want = jax.value_and_grad(loss, allow_int=True)(state, jnp.ones((8, 3)))
    chex.assert_trees_all_equal(nnx.filter_state(got[1], nnx.Param), nnx.filter_state(want[1], nnx.Param))
    assert got[0] == want[0]


# Misuse


def test_not_a_function() -> None:
    with pytest.raises(AmpTypeError, match=r"`fun` is of type LossScalingState.*value_and_grad\(loss_fn, opt_state\)"):
        value_and_grad(UNSCALED, loss_of)  # type: ignore[arg-type]


def test_errors_about_opt_state_come_before_the_call() -> None:
    with pytest.raises(AmpTypeError, match="argnums=0"):
        value_and_grad(loss_of, 0)
    with pytest.raises(AmpValueError, match="no loss scale"):
        grad(loss_of, optax.sgd(0.1).init(PARAMS))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w: w * jnp.ones(3), r"shape \(3,\), expected a scalar"),
        (lambda w: w * jnp.ones((1,)), r"shape \(1,\), expected a scalar"),
        (lambda w: jnp.int32(3), "dtype int32"),
        (lambda w: w * 1j, "dtype complex64"),
        (lambda w: (w, 1), "returned a tuple.*has_aux=True"),
        (lambda w: None, "type NoneType"),
    ],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    for state in (UNSCALED, state_at(8.0)):
        with pytest.raises(AmpTypeError, match=message):
            value_and_grad(loss, state)(1.0)


def test_aux_that_is_missing() -> None:
    with pytest.raises(AmpTypeError, match=r"expected a pair \(loss, aux\)"):
        value_and_grad(lambda w: w, UNSCALED, has_aux=True)(1.0)


def test_nothing_to_differentiate() -> None:
    with pytest.raises(AmpTypeError, match="argument 1, which holds no floating-point array"):
        grad(lambda w, n: w * n, UNSCALED, argnums=1)(1.0, 3)


def test_a_bound_method_of_an_nnx_module() -> None:
    with pytest.raises(AmpTypeError, match=r"method of an nnx Module, Net\.__call__"):
        value_and_grad(Net(nnx.Rngs(0)).__call__, UNSCALED)
