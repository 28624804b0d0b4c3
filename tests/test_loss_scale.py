"""The state machine of DESIGN 4.1, 4.2 and 4.7 against a model of it in plain Python."""

from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._loss_scale import LossScaleSettings, LossScaleState, advance, initial_state, select


@dataclass
class Model:
    """A loss scale in plain Python, written down from DESIGN 4."""

    scale: float
    good_in_a_row: int = 0
    bad_in_a_row: int = 0
    bad: int = 0

    def step(self, good: bool, rules: LossScaleSettings) -> None:
        if good:
            self.bad_in_a_row = 0
            self.good_in_a_row += 1
            if self.good_in_a_row == rules.growth_interval:
                self.scale = min(self.scale * rules.growth_factor, rules.max_scale)
                self.good_in_a_row = 0
        else:
            self.good_in_a_row = 0
            self.bad_in_a_row += 1
            self.bad += 1
            if self.bad_in_a_row >= rules.hysteresis:
                self.scale = max(self.scale * rules.backoff_factor, rules.min_scale)


powers = st.integers(-14, 24).map(lambda n: 2.0**n)


@st.composite
def rules_of_powers(draw: st.DrawFn) -> LossScaleSettings:
    low, first, high = sorted([draw(powers), draw(powers), draw(powers)])
    return LossScaleSettings(
        init_scale=first,
        growth_factor=draw(st.sampled_from([2.0, 4.0])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25])),
        growth_interval=draw(st.integers(1, 5)),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(st.integers(1, 3)),
    )


def check(state: LossScaleState, model: Model, good: bool) -> None:
    assert float(state.loss_scale) == model.scale
    assert int(state.growth_count) == model.good_in_a_row
    assert bool(state.grads_finite) == good
    assert int(state.skipped_steps) == model.bad
    assert int(state.consecutive_skipped) == model.bad_in_a_row


@settings(max_examples=30)
@given(rules_of_powers(), st.lists(st.booleans(), min_size=1, max_size=30))
def test_equals_the_model_after_every_step(rules: LossScaleSettings, steps: list[bool]) -> None:
    step = jax.jit(lambda state, good: advance(state, good, rules))
    state, model = initial_state(rules.init_scale), Model(rules.init_scale)
    for good in steps:
        # What jit, saving and tree.map do to a state must not lose anything.
        state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(step(state, good)))
        model.step(good, rules)
        check(state, model, good)


@settings(max_examples=15)
@given(rules_of_powers(), st.lists(st.booleans(), min_size=1, max_size=30))
def test_equals_the_model_under_scan(rules: LossScaleSettings, steps: list[bool]) -> None:
    def body(state: LossScaleState, good: jax.Array) -> tuple[LossScaleState, LossScaleState]:
        state = advance(state, good, rules)
        return state, state

    _, states = jax.lax.scan(body, initial_state(rules.init_scale), jnp.array(steps))
    model = Model(rules.init_scale)
    for index, good in enumerate(steps):
        model.step(good, rules)
        check(jax.tree.map(lambda x, i=index: x[i], states), model, good)


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_grows_after_exactly_the_interval(interval: int) -> None:
    # flax DynamicScale grows one step late.
    rules = LossScaleSettings(init_scale=8.0, growth_interval=interval)
    state = initial_state(8.0)
    for step in range(1, 2 * interval + 1):
        state = advance(state, jnp.array(True), rules)
        assert float(state.loss_scale) == 8.0 * 2 ** (step // interval)


def test_one_compile_while_everything_moves() -> None:
    rules = LossScaleSettings(growth_interval=2)
    traced = chex.assert_max_traces(lambda state, good: advance(state, good, rules), n=1)
    step, state = jax.jit(traced), initial_state(2.0**15)
    for good in [True, True, False, True, False, False]:
        state = step(state, jnp.array(good))
    # 2^15, grown once, backed off three times.
    assert float(state.loss_scale) == 2.0**13
    assert [leaf.weak_type for leaf in jax.tree.leaves(state)] == [False] * 5
    assert [leaf.dtype.name for leaf in state] == ["float32", "int32", "bool", "int32", "int32"]


def test_never_above_the_maximum_and_never_inf() -> None:
    # Keras and jaxamp run to inf and skip every step from there.
    top = float(np.finfo(np.float32).max)
    for maximum in (2.0**24, 2.0**127, top):
        rules = LossScaleSettings(init_scale=maximum, growth_interval=1, max_scale=maximum)
        state = advance(initial_state(maximum), jnp.array(True), rules)
        assert float(state.loss_scale) == maximum


def test_never_below_the_minimum_and_counted_there() -> None:
    # jmp loses a minimum below 1 on the way through jit.
    rules = LossScaleSettings(init_scale=2.0**-9, min_scale=2.0**-10)
    state = initial_state(2.0**-9)
    for _ in range(5):
        state = jax.jit(lambda state: advance(state, jnp.array(False), rules))(state)
    assert float(state.loss_scale) == 2.0**-10
    assert (int(state.skipped_steps), int(state.consecutive_skipped)) == (5, 5)


def test_hysteresis_forgives_the_first_of_a_row_and_anew_after_a_good_step() -> None:
    rules = LossScaleSettings(init_scale=64.0, hysteresis=2)
    state, scales = initial_state(64.0), []
    for good in [False, True, False, False, False, True, False]:
        state = advance(state, jnp.array(good), rules)
        scales.append(float(state.loss_scale))
    assert scales == [64, 64, 64, 32, 16, 16, 16]


def test_a_forgiven_bad_step_still_breaks_the_row_of_good_ones() -> None:
    rules = LossScaleSettings(init_scale=4.0, hysteresis=2, growth_interval=2)
    state = initial_state(4.0)
    for good in [True, False, True]:
        state = advance(state, jnp.array(good), rules)
    assert (float(state.loss_scale), int(state.growth_count)) == (4.0, 1)


def test_counters_stop_at_their_maximum() -> None:
    top = np.iinfo(np.int32).max
    state = initial_state(4.0)._replace(skipped_steps=jnp.int32(top), consecutive_skipped=jnp.int32(top))
    state = advance(state, jnp.array(False), LossScaleSettings())
    assert (int(state.skipped_steps), int(state.consecutive_skipped)) == (top, top)


def test_without_settings_the_scale_stays_and_steps_are_counted() -> None:
    state = initial_state(3.0)
    for good in [False, True, False]:
        state = advance(state, jnp.array(good), None)
    assert (float(state.loss_scale), int(state.skipped_steps), int(state.consecutive_skipped)) == (3.0, 2, 1)


def test_numpy_settings_do_not_change_dtypes() -> None:
    rules = LossScaleSettings(growth_factor=np.float64(2), init_scale=np.float32(4), growth_interval=np.int64(1))
    assert rules == LossScaleSettings(growth_factor=2.0, init_scale=4.0, growth_interval=1)
    with jax.enable_x64(True):
        state = advance(initial_state(rules.init_scale), jnp.array(True), rules)
    assert (state.loss_scale.dtype, float(state.loss_scale)) == (np.float32, 8.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("init_scale", "min_scale", "max_scale") for value in (0.0, -1.0, np.inf, np.nan)],
        ("init_scale", 1e39),  # inf in float32
        ("min_scale", 1e-45),  # flushed to zero on the device
        ("init_scale", 2.0**25),  # above the default max_scale
        ("init_scale", 2.0**-15),  # below the default min_scale
        ("growth_factor", 1.0),
        ("growth_factor", 0.5),
        ("growth_factor", np.inf),
        ("growth_factor", np.nan),
        ("backoff_factor", 0.0),
        ("backoff_factor", 1.0),
        ("backoff_factor", -0.5),
        ("backoff_factor", np.nan),
        ("growth_interval", 0),
        ("growth_interval", 2**31),
        ("hysteresis", 0),
    ],
)
def test_settings_out_of_range_are_named_with_their_value(name: str, value: float) -> None:
    with pytest.raises(AmpValueError) as error:
        LossScaleSettings(**{name: value})
    assert str(error.value).startswith(f"`{name}` is {value},")


def test_min_above_max() -> None:
    with pytest.raises(AmpValueError, match=r"`min_scale` is 8\.0, above `max_scale`, which is 4\.0"):
        LossScaleSettings(init_scale=4.0, min_scale=8.0, max_scale=4.0)


@pytest.mark.parametrize(("name", "value"), [("init_scale", "big"), ("growth_interval", 2.5), ("hysteresis", True)])
def test_settings_of_a_wrong_kind(name: str, value: object) -> None:
    with pytest.raises(AmpTypeError, match=f"`{name}` is {value!r}"):
        LossScaleSettings(**{name: value})


def test_copies_are_checked_too() -> None:
    with pytest.raises(AmpValueError, match="hysteresis"):
        replace(LossScaleSettings(), hysteresis=-1)


def test_select_is_bit_for_bit() -> None:
    bits = np.array([0x80000000, 0x7FC00001, 0x00000001, 0xFF800000], np.uint32)  # -0.0, a NaN, a subnormal, -inf
    kept = {"x": jnp.array(bits.view(np.float32)), "n": jnp.arange(3), "k": jax.random.key(3)}
    other = {"x": jnp.zeros(4), "n": jnp.zeros(3, int), "k": jax.random.key(4)}
    chosen = jax.jit(select)(jnp.array(False), other, kept)
    assert np.asarray(chosen["x"]).view(np.uint32).tolist() == bits.tolist()
    assert chosen["n"].tolist() == [0, 1, 2]
    assert jax.random.key_data(chosen["k"]).tolist() == [0, 3]
