"""Settings and states of other systems do here what they did there."""

from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import amp_jax as amp
from amp_jax._loss_scale import LossScaleSettings, advance, initial_state

TORCH = {"scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}
PARAMS = {"w": jnp.ones(2)}
GOOD, BAD = {"w": jnp.ones(2)}, {"w": jnp.array([jnp.inf, 1.0])}
STEPS = [True, True, False, True, True, True, True, False, False, True]


def scales(settings: dict[str, Any], steps: list[bool]) -> list[float]:
    rules = LossScaleSettings(**settings)
    state, seen = initial_state(rules.init_scale), []
    for good in steps:
        state = advance(state, jnp.array(good), rules)
        seen.append(float(state.loss_scale))
    return seen


@pytest.mark.parametrize("name", ["torch", "apex", "deepspeed", "megatron", "flax", "jmp"])
def test_presets_are_settings_of_dynamic_loss_scaling(name: str) -> None:
    settings = amp.loss_scale_settings(name)
    state = amp.dynamic_loss_scaling(optax.sgd(0.1), **settings).init(PARAMS)
    assert float(amp.metrics(state)["loss_scale"]) == settings["init_scale"]
    assert set(settings) == set(LossScaleSettings.__dataclass_fields__)
    # The table in the docstring says the same.
    row = next(line for line in amp.loss_scale_settings.__doc__.splitlines() if line.strip().startswith(f"``{name}``"))
    said = [eval(cell.replace("^", "**").replace("none", "None")) for cell in row.split()[1:]]
    names = ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "hysteresis"]
    unbounded = {"min_scale": 2.0**-126, "max_scale": 2.0**127}
    assert settings == {n: unbounded[n] if value is None else value for n, value in zip(names, said, strict=True)}


def test_presets_are_the_defaults_of_the_installed_systems() -> None:
    ours, theirs = amp.loss_scale_settings("flax"), DynamicScale()
    assert (ours["init_scale"], ours["growth_interval"]) == (theirs.scale, theirs.growth_interval)
    assert (ours["growth_factor"], ours["backoff_factor"]) == (theirs.growth_factor, theirs.backoff_factor)
    assert ours["min_scale"] == theirs.minimum_scale
    ours, theirs = amp.loss_scale_settings("jmp"), jmp.DynamicLossScale(jnp.float32(2.0**15))
    assert (ours["growth_interval"], ours["growth_factor"], ours["min_scale"]) == (
        theirs.period,
        theirs.factor,
        theirs.min_loss_scale,
    )


def test_a_jmp_run_goes_on_as_jmp_would() -> None:
    theirs = jmp.DynamicLossScale(jnp.float32(8.0), jnp.int32(1), period=3, factor=4, min_loss_scale=jnp.float32(1.0))
    tx = amp.dynamic_loss_scaling(optax.sgd(0.1), **amp.loss_scale_settings(theirs))
    state = amp.load_loss_scale(tx.init(PARAMS), theirs)
    for good in STEPS:
        _, state = tx.update(GOOD if good else BAD, state, PARAMS)
        theirs = theirs.adjust(jnp.array(good))
        assert float(amp.metrics(state)["loss_scale"]) == theirs.loss_scale
        assert int(state.scaling.growth_count) == theirs.counter


def torch_update(saved: dict[str, Any], good: bool) -> dict[str, Any]:
    """One `GradScaler.update`, as torch's documentation tells it."""
    scale, tracker = saved["scale"], saved["_growth_tracker"] + 1
    if not good:
        scale, tracker = scale * saved["backoff_factor"], 0
    elif tracker == saved["growth_interval"]:
        scale, tracker = scale * saved["growth_factor"], 0
    return {**saved, "scale": scale, "_growth_tracker": tracker}


def test_a_torch_run_goes_on_as_torch_would() -> None:
    saved = TORCH
    tx = amp.dynamic_loss_scaling(optax.sgd(0.1), **amp.loss_scale_settings(saved))
    state = amp.load_loss_scale(tx.init(PARAMS), saved)
    for good in STEPS:
        _, state = tx.update(GOOD if good else BAD, state, PARAMS)
        saved = torch_update(saved, good)
        assert float(amp.metrics(state)["loss_scale"]) == saved["scale"]
        assert int(state.scaling.growth_count) == saved["_growth_tracker"]


def test_a_flax_scale_is_read() -> None:
    theirs = DynamicScale(growth_interval=5, fin_steps=jnp.int32(4), scale=jnp.float32(64.0), minimum_scale=None)
    settings = amp.loss_scale_settings(theirs)
    assert (settings["init_scale"], settings["growth_interval"], settings["min_scale"]) == (64.0, 5, 2.0**-126)
    state = amp.load_loss_scale(amp.dynamic_loss_scaling(optax.sgd(0.1), **settings).init(PARAMS), theirs)
    assert int(state.scaling.growth_count) == 4


def test_hysteresis_of_megatron_differs_as_the_docstring_says() -> None:
    settings = {**amp.loss_scale_settings("megatron"), "init_scale": 64.0, "growth_interval": 4}
    one_by_one = [False, True, False, True, False, True]
    # Megatron: its two are used up by the second bad step, and refilled when the scale grows.
    left, theirs, scale = 2, [], 64.0
    for good in one_by_one:
        left -= not good
        scale = scale / 2 if not good and left <= 0 else scale
        theirs.append(scale)
    assert theirs == [64, 64, 32, 32, 16, 16]
    assert scales(settings, one_by_one) == [64] * 6
    assert scales({**settings, "hysteresis": 1}, one_by_one) == [32, 32, 16, 16, 8, 8]
    in_a_row = [False, False, False]
    assert scales(settings, in_a_row) == [64, 32, 16]


def test_everything_else_in_the_state_stays() -> None:
    tx = amp.dynamic_loss_scaling(optax.adam(0.1), **amp.loss_scale_settings(TORCH))
    _, state = tx.update(GOOD, tx.init(PARAMS), PARAMS)
    _, state = tx.update(BAD, state, PARAMS)
    loaded = amp.load_loss_scale({"opt": state, "step": 7}, TORCH)
    assert (loaded["step"], float(amp.metrics(loaded)["loss_scale"])) == (7, 4096.0)
    assert int(amp.metrics(loaded)["skipped_steps"]) == 1
    assert loaded["opt"].inner_state[0].mu["w"] is state.inner_state[0].mu["w"]
    assert [x.dtype for x in loaded["opt"].scaling] == [x.dtype for x in state.scaling]
    assert float(amp.metrics(state)["loss_scale"]) == 2048.0


def test_into_an_nnx_optimizer() -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, amp.dynamic_loss_scaling(optax.adam(0.1)), wrt=nnx.Param)
    loaded = amp.load_loss_scale(optimizer, TORCH)
    assert float(amp.metrics(loaded)["loss_scale"]) == 4096.0
    loaded.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones(2))))(model))
    assert bool(amp.metrics(loaded)["grads_finite"])


def test_into_every_member_of_an_ensemble() -> None:
    states = jax.vmap(amp.dynamic_loss_scaling(optax.adam(0.1)).init)({"w": jnp.ones((3, 2))})
    loaded = jax.vmap(lambda s: amp.load_loss_scale(s, TORCH))(states)
    assert amp.metrics(loaded)["loss_scale"].tolist() == [4096.0] * 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tourch", r"`source` is 'tourch', expected one of 'torch', .*did you mean 'torch'\?"),
        ("x", "'jmp'$"),
        ({}, "empty dict.*enabled=False"),
        ({"scale": 1.0}, "has no '_growth_tracker', 'growth_interval'.*its keys are 'scale'"),
        ({**TORCH, "scale": 0.0}, r"`scale` is 0\.0, expected a positive finite number"),
        ({**TORCH, "scale": np.inf}, "`scale` is inf"),
        ({**TORCH, "_growth_tracker": -1}, "growth count of -1"),
        ({**TORCH, "growth_factor": 1.0}, r"`growth_factor` is 1\.0"),
        (jmp.DynamicLossScale(jnp.float32(8.0), period=0), "`growth_interval` is 0"),
    ],
)
def test_sources_that_cannot_work(source: Any, message: str) -> None:
    with pytest.raises(amp.AmpValueError, match=message):
        amp.loss_scale_settings(source)


def test_sources_of_a_wrong_kind() -> None:
    with pytest.raises(amp.AmpTypeError, match="`source` is of type float, expected a name"):
        amp.loss_scale_settings(4096.0)
    with pytest.raises(amp.AmpTypeError, match="`source` has a scale of type str"):
        amp.loss_scale_settings({**TORCH, "scale": "big"})


def test_no_place_for_a_loss_scale() -> None:
    with pytest.raises(amp.AmpValueError, match=r"without a loss scale.*amp\.dynamic_loss_scaling"):
        amp.load_loss_scale(amp.no_loss_scaling(optax.sgd(0.1)).init(PARAMS), TORCH)
    with pytest.raises(amp.AmpValueError, match="holds no loss scale"):
        amp.load_loss_scale(optax.sgd(0.1).init(PARAMS), TORCH)
