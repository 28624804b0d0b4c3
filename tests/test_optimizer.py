"""Steps with overflow change nothing, bit for bit; other steps are those of the optimizer inside."""

import subprocess
import sys
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from amp_jax import _device
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._gradients import value_and_grad
from amp_jax._loss_scale import NoLossScaleState
from amp_jax._opt_state import metrics, where_finite
from amp_jax._optimizer import dynamic_loss_scaling, loss_scaling, no_loss_scaling, static_loss_scaling
from amp_jax._policy import get_policy

PARAMS = {"w": jnp.array([1.0, -0.0, 0.5]), "b": jnp.float32(0.25)}
GOOD = {"w": jnp.array([0.1, -0.2, 0.3]), "b": jnp.float32(1.0)}
ADAMW = optax.adamw(optax.linear_schedule(0.1, 0.01, 10))
WRAPPERS = {
    "dynamic": lambda tx: dynamic_loss_scaling(tx, init_scale=8.0),
    "static": lambda tx: static_loss_scaling(tx, 8.0),
}


def bad(value: float, leaf: str = "w") -> dict[str, jax.Array]:
    return {**GOOD, leaf: jnp.full_like(GOOD[leaf], value)}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def step(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_a_bad_step_changes_nothing_bit_for_bit(jit: bool, wrapper: str, value: float, leaf: str) -> None:
    tx = WRAPPERS[wrapper](ADAMW)
    params, state = step(tx, PARAMS, tx.init(PARAMS), GOOD)
    params["w"] = params["w"].at[1].set(-0.0)
    one = jax.jit(step, static_argnums=0) if jit else step
    after, after_state = one(tx, params, state, bad(value, leaf))
    # Adding a skipped update of 0.0 would turn -0.0 into 0.0.
    assert bits(after) == bits(params)
    assert bits(after_state.inner_state) == bits(state.inner_state)
    assert float(metrics(after_state)["loss_scale"]) == (4.0 if wrapper == "dynamic" else 8.0)
    assert int(metrics(after_state)["skipped_steps"]) == 1


@pytest.mark.filterwarnings("ignore:the gradients are float16")
def test_the_skipped_update_is_negative_zero_on_both_parts_of_complex() -> None:
    tx = static_loss_scaling(optax.sgd(0.1), 1.0)
    grads = {"c": jnp.array([complex(np.inf, 0)], jnp.complex64), "h": jnp.ones(1, jnp.float16)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert np.signbit([updates["c"].real[0], updates["c"].imag[0], updates["h"][0]]).all()
    assert [updates["c"].real[0], updates["c"].imag[0], updates["h"][0]] == [0, 0, 0]


@pytest.mark.parametrize("wrapper", [*WRAPPERS.values(), no_loss_scaling])
def test_good_steps_are_those_of_the_optimizer_inside(wrapper: Any) -> None:
    tx = wrapper(ADAMW)
    params, state, want, want_state = PARAMS, tx.init(PARAMS), PARAMS, ADAMW.init(PARAMS)
    for _ in range(3):
        params, state = step(tx, params, state, GOOD)
        want, want_state = step(ADAMW, want, want_state, GOOD)
    assert bits(params) == bits(want)
    assert bits(state.inner_state) == bits(want_state)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(want_state)


@settings(max_examples=10)
@given(st.lists(st.sampled_from([0.0, np.inf, np.nan]), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 2))
def test_a_run_equals_one_of_its_good_steps_alone(faults: list[float], interval: int, hysteresis: int) -> None:
    tx = dynamic_loss_scaling(ADAMW, init_scale=4.0, growth_interval=interval, hysteresis=hysteresis, max_scale=8.0)

    def body(carry: tuple[Any, Any], fault: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, state = step(tx, *carry, {**GOOD, "b": GOOD["b"] + fault})
        return (params, state), metrics(state)["loss_scale"]

    (params, state), scales = jax.jit(lambda carry, xs: jax.lax.scan(body, carry, xs))(
        (PARAMS, tx.init(PARAMS)), jnp.array(faults)
    )
    scale, good_row, bad_row = 4.0, 0, 0
    for index, fault in enumerate(faults):
        good_row, bad_row = (good_row + 1, 0) if fault == 0 else (0, bad_row + 1)
        if good_row == interval:
            scale, good_row = min(2 * scale, 8.0), 0
        elif bad_row >= hysteresis:
            scale = scale / 2
        assert scales[index] == scale
    plain = no_loss_scaling(ADAMW)
    (want, want_state), _ = jax.jit(
        lambda carry, n: jax.lax.scan(lambda c, _: (step(plain, *c, GOOD), None), carry, length=n), static_argnums=1
    )((PARAMS, plain.init(PARAMS)), faults.count(0.0))
    chex.assert_trees_all_close(params, want, rtol=1e-6)
    chex.assert_trees_all_close(state.inner_state, want_state.inner_state, rtol=1e-6)
    assert int(metrics(state)["skipped_steps"]) == len(faults) - faults.count(0.0)


def test_nan_never_gets_in_however_long_it_lasts() -> None:
    # optax.apply_if_finite applies the NaN after its N errors.
    tx = dynamic_loss_scaling(ADAMW, init_scale=2.0**-12)
    params, state = PARAMS, tx.init(PARAMS)
    one = jax.jit(step, static_argnums=0)
    for _ in range(20):
        params, state = one(tx, params, state, bad(np.nan))
    assert bits(params) == bits(PARAMS)
    got = metrics(state)
    assert (float(got["loss_scale"]), int(got["skipped_steps"]), int(got["consecutive_skipped"])) == (2.0**-14, 20, 20)


def test_finite_gradients_whose_norm_overflows_float32_are_skipped() -> None:
    # A clip by global norm would make zeros of them, and Adam's second moment inf.
    tx = dynamic_loss_scaling(ADAMW, init_scale=8.0)
    params, state = step(tx, PARAMS, tx.init(PARAMS), {**GOOD, "w": jnp.full(3, 2e19)})
    assert bits(params) == bits(PARAMS)
    assert float(metrics(state)["loss_scale"]) == 4.0
    _, state = step(tx, PARAMS, tx.init(PARAMS), {**GOOD, "w": jnp.full(3, 1e19)})
    assert bool(metrics(state)["grads_finite"])


def test_no_branch_on_the_device() -> None:
    tx = dynamic_loss_scaling(ADAMW)
    text = jax.jit(lambda g, s, p: tx.update(g, s, p)).lower(GOOD, tx.init(PARAMS), PARAMS).compile().as_text()
    assert " conditional(" not in text


def test_no_loss_scaling_costs_nothing() -> None:
    plain = jax.make_jaxpr(lambda g, s, p: ADAMW.update(g, s, p))(GOOD, ADAMW.init(PARAMS), PARAMS)
    tx = no_loss_scaling(ADAMW)
    state = tx.init(PARAMS)
    assert str(jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(GOOD, state, PARAMS)) == str(plain)
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(ADAMW.init(PARAMS)))
    # It neither checks nor skips.
    assert np.isnan(step(tx, PARAMS, state, bad(np.nan))[0]["w"]).all()


def test_params_may_be_left_out() -> None:
    tx = dynamic_loss_scaling(optax.sgd(0.5))
    updates, _ = tx.update(GOOD, tx.init(PARAMS))
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.5 * g, GOOD))


def test_extra_arguments_reach_the_optimizer_inside() -> None:
    seen = []

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        seen.append(extra)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    for wrapper in (*WRAPPERS.values(), no_loss_scaling):
        tx = wrapper(inner)
        tx.update(GOOD, tx.init(PARAMS), PARAMS, value=3.0)
    assert seen == [{"value": 3.0}] * 3


def test_state_survives_donation() -> None:
    tx = dynamic_loss_scaling(ADAMW)
    params = jax.tree.map(jnp.copy, PARAMS)
    state = jax.jit(tx.init)(params)
    one = jax.jit(lambda p, s: step(tx, p, s, GOOD), donate_argnums=(0, 1))
    for _ in range(2):
        params, state = one(params, state)
    assert int(state.inner_state[0].count) == 2
    # Two leaves that shared a buffer could not both be donated.
    assert one(jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS))


def test_an_ensemble_has_a_scale_each() -> None:
    tx = dynamic_loss_scaling(ADAMW, init_scale=8.0)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    grads = jax.tree.map(lambda a, b: jnp.stack([a, b]), GOOD, bad(np.inf))
    params, state = jax.vmap(lambda p, g: step(tx, p, tx.init(p), g))(many, grads)
    assert metrics(state)["loss_scale"].tolist() == [8.0, 4.0]
    assert params["b"][0] != PARAMS["b"]
    assert params["b"][1] == PARAMS["b"]


def test_leaves_that_are_no_gradients_pass_through() -> None:
    params = {"w": jnp.ones(2), "n": jnp.array(3), "k": jax.random.key(0), "f8": jnp.ones(2, jnp.float8_e4m3fn)}
    grads = jax.grad(lambda p: jnp.sum(p["w"]) * p["n"], allow_int=True)(params)
    grads["f8"] = jnp.array([2.0, np.nan], jnp.float8_e4m3fn)
    for wrapper in (*WRAPPERS.values(), no_loss_scaling):
        tx = wrapper(optax.adamw(0.1, weight_decay=0.1))
        updates, state = tx.update(grads, tx.init(params), params)
        assert all(updates[name] is grads[name] for name in ("n", "k", "f8"))
        assert (updates["w"] < 0).all()
        assert bool(metrics(state)["grads_finite"])


def test_float8_overwrite_state_passes_through() -> None:
    tree = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.array([3.0])}}
    tx = dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert updates["_overwrite_with_gradient"]["amax"].tolist() == [3.0]


# Half precision


@pytest.mark.filterwarnings("ignore:the gradients are float16")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("grad_dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_half_parameters_have_one_compile_and_float32_moments(dtype: Any, grad_dtype: Any) -> None:
    # optax.apply_if_finite(adamw) raises on half parameters with float32 gradients.
    for wrapper in (*WRAPPERS.values(), no_loss_scaling):
        tx = wrapper(ADAMW)
        params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
        state = tx.init(params)
        new_params, new_state = step(tx, params, state, jax.tree.map(lambda x: x.astype(grad_dtype), GOOD))
        chex.assert_trees_all_equal_shapes_and_dtypes(new_params, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        assert state.inner_state[0].nu["w"].dtype == np.float32


@pytest.mark.filterwarnings("ignore:the gradients are float16")
def test_adam_on_float16() -> None:
    # optax's adam gives NaN here: eps is 0 in float16, and so is the square of the gradient.
    tx = dynamic_loss_scaling(optax.adam(1e-3))
    params = jnp.ones(2, jnp.float16)
    updates, _ = tx.update(jnp.array([0.0, 1e-4], jnp.float16), tx.init(params), params)
    assert updates[0] == 0.0
    assert updates[1] == pytest.approx(-1e-3, rel=1e-3)


@pytest.mark.filterwarnings("ignore:the gradients are float16")
def test_clipping_sees_float32() -> None:
    # optax.global_norm of these is inf in float16, and clipping by it gives zeros.
    grads = jnp.full(100, 300.0, jnp.float16)
    tx = dynamic_loss_scaling(optax.clip_by_global_norm(1.0))
    updates, state = tx.update(grads, tx.init(grads))
    assert bool(metrics(state)["grads_finite"])
    assert float(jnp.linalg.norm(updates)) == pytest.approx(1.0, rel=1e-5)


# Order


def clipped(params: Any, scale: float) -> Any:
    return jnp.sum(params["w"]) * scale


@pytest.mark.parametrize("clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(1.0)])
def test_a_clip_before_the_loss_scale_does_not_hide_an_overflow(clip: Any) -> None:
    tx = optax.chain(clip, dynamic_loss_scaling(optax.adam(0.1), init_scale=8.0))
    state = tx.init(PARAMS)
    _, grads = value_and_grad(clipped, state)(PARAMS, jnp.inf)
    params, state = step(tx, PARAMS, state, grads)
    assert bits(params) == bits(PARAMS)
    assert float(metrics(state)["loss_scale"]) == 4.0


def test_clipping_inside_sees_true_gradients() -> None:
    tx = dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = tx.init(PARAMS)
    _, grads = value_and_grad(clipped, state)(PARAMS, 0.25)
    updates, _ = tx.update(grads, state, PARAMS)
    # Norm 0.43: not clipped, whatever the scale of 2^15 did to it on the way.
    assert updates["w"].tolist() == [-0.25] * 3


def test_accumulation_inside_skips_the_bad_micro_batch_alone() -> None:
    tx = dynamic_loss_scaling(optax.MultiSteps(optax.sgd(1.0), 2), init_scale=8.0)
    params, state = PARAMS, tx.init(PARAMS)
    seen = []
    for grads in (GOOD, bad(np.inf), GOOD, GOOD, GOOD):
        params, state = step(tx, params, state, grads)
        seen.append(float(params["b"]))
    # The window of two is filled by the first and the third micro-batch, the next by the two last.
    assert seen == [0.25, 0.25, -0.75, -0.75, -1.75]
    assert float(metrics(state)["loss_scale"]) == 4.0


def test_lookahead_inside_has_updates_of_its_own_structure() -> None:
    tx = dynamic_loss_scaling(optax.lookahead(optax.sgd(0.1), 5, 0.5))
    params = optax.LookaheadParams.init_synced(PARAMS)
    good, state = step(tx, params, tx.init(params), GOOD)
    chex.assert_trees_all_close(good.fast, jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, GOOD), rtol=1e-6)
    skipped, _ = step(tx, good, state, bad(np.inf))
    assert bits(skipped) == bits(good)


def test_a_second_loss_scale_is_refused() -> None:
    for inner in (optax.chain(dynamic_loss_scaling(ADAMW)), no_loss_scaling(ADAMW)):
        with pytest.raises(AmpValueError, match="`tx` has a loss scale already"):
            static_loss_scaling(inner, 2.0).init(PARAMS)


def test_two_optimizers_have_two_scales() -> None:
    generator, critic = dynamic_loss_scaling(ADAMW, init_scale=8.0), dynamic_loss_scaling(ADAMW, init_scale=8.0)
    _, g_state = step(generator, PARAMS, generator.init(PARAMS), GOOD)
    _, c_state = step(critic, PARAMS, critic.init(PARAMS), bad(np.nan))
    assert [float(metrics(s)["loss_scale"]) for s in (g_state, c_state)] == [8.0, 4.0]


# Devices


@pytest.mark.parametrize("axis_name", ["d", ("d",), ["d"]])
def test_one_bad_member_of_an_axis_skips_all(axis_name: Any) -> None:
    tx = dynamic_loss_scaling(ADAMW, init_scale=8.0, axis_name=axis_name)
    grads = jax.tree.map(lambda a, b: jnp.stack([a, b]), GOOD, bad(np.inf))
    params, state = jax.vmap(lambda g: step(tx, PARAMS, tx.init(PARAMS), g), axis_name="d")(grads)
    assert metrics(state)["loss_scale"].tolist() == [4.0, 4.0]
    assert params["b"].tolist() == [0.25, 0.25]


@pytest.mark.skipif(
    jax.device_count() < 2, reason="needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2"
)
def test_one_bad_device_skips_all_under_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    tx = dynamic_loss_scaling(ADAMW, init_scale=8.0, axis_name="d")

    def local(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        _, grads = value_and_grad(lambda p, x: jnp.sum(p["w"]) * x[0], state)(
            jax.lax.pcast(params, "d", to="varying"), x
        )
        _, state = tx.update(grads, state, params)
        return metrics(state)["loss_scale"], metrics(state)["grads_finite"]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P()))
    scale, finite = mapped(PARAMS, tx.init(PARAMS), jnp.array([1.0, np.inf]))
    assert (float(scale), bool(finite)) == (4.0, False)
    scale, finite = mapped(PARAMS, tx.init(PARAMS), jnp.array([1.0, 2.0]))
    assert (float(scale), bool(finite)) == (8.0, True)


# Flax


def test_train_state() -> None:
    model = nn.Dense(1)
    x = jnp.ones((2, 3))
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=dynamic_loss_scaling(ADAMW)
    )

    @jax.jit
    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2), state)(state.params)
        return state.apply_gradients(grads=grads), loss

    good, loss = train_step(state, x)
    assert (int(good.step), bool(jnp.isfinite(loss))) == (1, True)
    skipped, _ = train_step(good, x * jnp.inf)
    assert bits(skipped.params) == bits(good.params)
    assert bits(skipped.opt_state.inner_state) == bits(good.opt_state.inner_state)
    assert (float(metrics(good)["loss_scale"]), float(metrics(skipped)["loss_scale"])) == (2.0**15, 2.0**14)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


@nnx.jit
def nnx_step(net: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> jax.Array:
    before = nnx.as_pure(nnx.state(net, nnx.BatchStat))
    loss, grads = value_and_grad(lambda net, x: jnp.mean(net(x) ** 2), optimizer)(net, x)
    optimizer.update(net, grads)
    nnx.update(net, where_finite(optimizer, nnx.state(net, nnx.BatchStat), before))
    return loss


@pytest.mark.parametrize("wrapper", [*WRAPPERS.values(), no_loss_scaling])
def test_nnx_optimizer_with_batch_norm_and_dropout(wrapper: Any) -> None:
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, wrapper(ADAMW), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (8, 3))
    start = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(net, nnx.Param)))
    loss = nnx_step(net, optimizer, x)
    assert loss.dtype == np.float32
    assert float(jnp.abs(net.norm.mean[...]).sum()) > 0
    assert int(net.dropout.rngs.count[...]) == 1
    assert bits(nnx.state(net, nnx.Param)) != bits(start)
    assert {v.dtype.name for v in jax.tree.leaves(nnx.state(net, (nnx.Param, nnx.BatchStat)))} == {"float32"}
    assert bool(metrics(optimizer)["grads_finite"])


def test_nnx_bad_step_rolls_statistics_back() -> None:
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, dynamic_loss_scaling(ADAMW, init_scale=8.0), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (8, 3))
    nnx_step(net, optimizer, x)
    kept = bits(nnx.state(net, (nnx.Param, nnx.BatchStat)))
    inner = bits(optimizer.opt_state.inner_state)
    nnx_step(net, optimizer, x.at[0, 0].set(jnp.nan))
    assert bits(nnx.state(net, (nnx.Param, nnx.BatchStat))) == kept
    assert bits(optimizer.opt_state.inner_state) == inner
    assert float(metrics(optimizer)["loss_scale"]) == 4.0
    # And goes on as if nothing had been.
    assert np.isfinite(nnx_step(net, optimizer, x))
    assert int(metrics(optimizer)["consecutive_skipped"]) == 0


# Construction


@pytest.mark.parametrize(
    ("policy", "scale"),
    [("mixed_float16", 2.0**15), ("float16", 2.0**15), ("mixed_bfloat16", None), ("float32", None)],
)
def test_loss_scaling_by_policy(policy: str, scale: float | None) -> None:
    tx = loss_scaling(ADAMW, policy)
    state = tx.init(PARAMS)
    assert isinstance(state.scaling, NoLossScaleState) == (scale is None)
    params, state = step(tx, PARAMS, state, bad(np.nan))
    assert bool(np.isnan(params["w"]).any()) == (scale is None)
    assert float(metrics(state)["loss_scale"]) == (1.0 if scale is None else scale / 2)


def test_loss_scaling_by_the_rules_of_a_policy() -> None:
    policy = get_policy("mixed_bfloat16").override({"head": "mixed_float16"})
    assert float(metrics(loss_scaling(ADAMW, policy).init(PARAMS))["loss_scale"]) == 2.0**15


def test_auto_is_resolved_in_init(monkeypatch: pytest.MonkeyPatch) -> None:
    tx = loss_scaling(ADAMW, "auto")
    monkeypatch.setattr(_device, "device_dtype", lambda: np.dtype(np.float16))
    assert float(metrics(tx.init(PARAMS))["loss_scale"]) == 2.0**15
    monkeypatch.setattr(_device, "device_dtype", lambda: np.dtype(np.float32))
    assert float(metrics(tx.init(PARAMS))["loss_scale"]) == 1.0


def test_construction_starts_no_backend() -> None:
    # jax.distributed.initialize fails once there is one.
    code = (
        "import jax, optax, amp_jax as amp\n"
        "tx = optax.adam(1e-3)\n"
        "amp.dynamic_loss_scaling(tx), amp.static_loss_scaling(tx, 8.0), amp.loss_scaling(tx, 'auto')\n"
        "jax.config.update('jax_platforms', 'nonsense')\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('none yet')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "none yet\n"


def test_loss_scaling_passes_settings_on() -> None:
    state = loss_scaling(ADAMW, "mixed_float16", init_scale=4.0).init(PARAMS)
    assert float(metrics(state)["loss_scale"]) == 4.0
    with pytest.raises(AmpValueError, match="growth_factor"):
        loss_scaling(ADAMW, "float32", growth_factor=0.5)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_static_scale_out_of_range(scale: float) -> None:
    with pytest.raises(AmpValueError, match=f"`scale` is {scale}"):
        static_loss_scaling(ADAMW, scale)


def test_settings_are_checked_at_construction() -> None:
    with pytest.raises(AmpValueError, match=r"`backoff_factor` is 2\.0"):
        dynamic_loss_scaling(ADAMW, backoff_factor=2.0)


def test_not_an_optimizer() -> None:
    for wrapper in (*WRAPPERS.values(), no_loss_scaling):
        with pytest.raises(AmpTypeError, match="`tx` is of type float, expected an Optax optimizer"):
            wrapper(0.1)


def test_the_state_of_another_optimizer() -> None:
    with pytest.raises(AmpTypeError, match="`state` is of type tuple, expected the LossScalingState"):
        dynamic_loss_scaling(ADAMW).update(GOOD, ADAMW.init(PARAMS), PARAMS)
