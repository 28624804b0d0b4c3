"""Averages of weights are float32, start as the weights, and leave out skipped steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amp_jax as amp


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_two_thousand_steps_of_half_parameters(dtype: Any) -> None:
    average = amp.ema(0.999)
    params = {"w": jnp.ones(3, dtype)}
    state = average.init({"w": jnp.zeros(3, dtype)})
    state, _ = jax.jit(lambda s: jax.lax.scan(lambda s, _: (average.update(params, s), None), s, length=2000))(state)
    assert state.average["w"].dtype == jnp.float32
    # 1 - 0.999^2000; an average in bfloat16 stops at 0.5, where a thousandth of the distance is half a step.
    np.testing.assert_allclose(state.average["w"], 0.8648, atol=5e-5)
    assert state.updates == 2000
    assert amp.get_policy("bfloat16").cast_to_param(state.average)["w"].dtype == jnp.bfloat16


def test_it_starts_as_the_parameters() -> None:
    average = amp.ema(0.9)
    state = average.update({"w": jnp.bfloat16(2.0)}, average.init({"w": jnp.bfloat16(2.0)}))
    assert state.average["w"] == 2.0


def test_a_schedule_decides_by_the_number_of_updates() -> None:
    average = amp.ema(lambda count: jnp.where(count == 0, 0.0, 0.5))
    state = average.update(jnp.float32(4.0), average.init(jnp.float32(100.0)))
    assert state.average == 4.0
    assert average.update(jnp.float32(8.0), state).average == 6.0


def test_what_is_no_floating_number_is_the_latest() -> None:
    average, key = amp.ema(0.5), jax.random.key(0)
    tree = {"n": jnp.int32(1), "key": key, "f8": jnp.ones(2, jnp.float8_e4m3fn), "none": None, "c": jnp.complex64(2j)}
    state = average.update({**tree, "n": jnp.int32(7), "c": jnp.complex64(4)}, average.init(tree))
    assert state.average["n"] == 7
    assert state.average["n"].dtype == jnp.int32
    assert state.average["f8"].dtype == jnp.float8_e4m3fn
    assert state.average["c"] == 2 + 1j


def test_a_skipped_step_does_not_count() -> None:
    tx, average = amp.dynamic_loss_scaling(optax.sgd(0.1)), amp.ema(0.9)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    opt_state, state = tx.init(params), average.init({"w": jnp.zeros(2)})
    for grad, count in ((np.inf, 0), (1.0, 1)):
        _, opt_state = tx.update({"w": jnp.full(2, grad)}, opt_state, params)
        state = amp.where_finite(opt_state, average.update(params, state), state)
        assert state.updates == count


def test_donated_parameters_leave_the_average_alone() -> None:
    params = {"w": jnp.ones(4), "n": jnp.int32(1)}
    state = amp.ema(0.9).init(params)
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params))
    assert state.average["w"].tolist() == [1.0] * 4
    assert state.average["n"] == 1


def test_nnx_state_under_sharding() -> None:
    model = nnx.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    model.kernel.set_value(jax.device_put(model.kernel.get_value(), sharding))
    average = amp.ema(0.9)
    state = average.init(nnx.state(model, nnx.Param))
    assert state.average["kernel"].get_value().sharding == sharding
    before = np.asarray(model.kernel.get_value()).astype(np.float32)
    model.kernel.set_value(model.kernel.get_value() * 2)
    state = jax.jit(average.update)(nnx.state(model, nnx.Param), state)
    np.testing.assert_allclose(state.average["kernel"].get_value(), 1.1 * before, rtol=1e-6)
    nnx.update(model, amp.get_policy("bfloat16").cast_to_param(state.average))
    assert model.kernel.get_value().dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("decay", "error"), [(1.0, "0 to 1"), (-0.1, "0 to 1"), (np.nan, "0 to 1"), ("0.9", "a number")]
)
def test_a_decay_that_can_not_be_is_an_error(decay: Any, error: str) -> None:
    with pytest.raises(amp.AmpError, match=error):
        amp.ema(decay)


def test_another_structure_is_an_error() -> None:
    average = amp.ema(0.9)
    with pytest.raises(amp.AmpValueError, match="`params` has another structure"):
        average.update({"v": jnp.ones(1)}, average.init({"w": jnp.ones(1)}))
