"""Long random runs of a whole training step, beside a model of them in plain Python.

The model is written down from the documented rules and knows of float16 only what it can hold: no function of the
package is in it. Parameters, reported losses, the loss scale and all counts are compared after every step.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import amp_jax as amp

RATE = 2.0**-12
FIRST = 1.5
# float16 rounds 65520 and what is beyond to inf.
OVERFLOW = 65520.0
BATCHES = (0.5, 1.0, -2.0, 2.0**10, -(2.0**10), math.inf, -math.inf, math.nan)


class Model:
    """One parameter under SGD with momentum, and its loss scale, rounded to float32 where the device rounds.

    Settings are called by other names than the package's, so that none can be passed through unread.
    """

    def __init__(self, start: float, up: float, down: float, every: int, low: float, high: float, patience: int):
        self.scale, self.up, self.down, self.every = start, up, down, every
        self.low, self.high, self.patience = low, high, patience
        self.parameter, self.momentum = np.float32(FIRST), np.float32(0)
        self.good_row, self.bad_row, self.bad, self.last = 0, 0, 0, True

    def overflows(self, batch: float) -> bool:
        """The backward pass begins with the loss scale in float16, and multiplies it by the batch."""
        return not (self.scale < OVERFLOW and abs(self.scale * batch) < OVERFLOW)

    def loss(self, batch: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.float16(self.parameter) * np.float16(batch))

    def judge(self, good: bool) -> None:
        self.last = good
        if good:
            self.good_row, self.bad_row = self.good_row + 1, 0
            if self.good_row == self.every:
                self.good_row = 0
                self.scale = min(float(np.float32(self.scale) * np.float32(self.up)), self.high)
        else:
            self.good_row, self.bad_row, self.bad = 0, self.bad_row + 1, self.bad + 1
            if self.bad_row >= self.patience:
                self.scale = max(float(np.float32(self.scale) * np.float32(self.down)), self.low)

    def step(self, batch: float) -> float:
        loss, good = self.loss(batch), not self.overflows(batch)
        if good:
            self.momentum = np.float32(batch) + np.float32(0.5) * self.momentum
            self.parameter = self.parameter - np.float32(RATE) * self.momentum
        self.judge(good)
        return loss

    def seen(self) -> dict[str, float]:
        return {
            "loss_scale": self.scale,
            "grads_finite": self.last,
            "skipped_steps": self.bad,
            "consecutive_skipped": self.bad_row,
        }


def optimizer_of(model: Model, momentum: float | None = None) -> Any:
    return amp.dynamic_loss_scaling(
        optax.sgd(RATE, momentum),
        init_scale=model.scale,
        growth_factor=model.up,
        backoff_factor=model.down,
        growth_interval=model.every,
        min_scale=model.low,
        max_scale=model.high,
        hysteresis=model.patience,
    )


def loss_of(parameter: jax.Array, batch: jax.Array) -> jax.Array:
    return (parameter.astype(jnp.float16) * batch.astype(jnp.float16)).astype(jnp.float32)


@st.composite
def models(draw: st.DrawFn) -> Model:
    low, start, high = sorted(2.0 ** draw(st.integers(-8, 20)) for _ in range(3))
    up, down = draw(st.sampled_from([2.0, 4.0])), draw(st.sampled_from([0.5, 0.25]))
    return Model(start, up, down, draw(st.integers(1, 4)), low, high, draw(st.integers(1, 3)))


class Run(RuleBasedStateMachine):
    """Steps taken eagerly, under jit and four at a time in a scan, with what may happen to a state in between."""

    @initialize(model=models())
    def start(self, model: Model) -> None:
        self.model, tx = model, optimizer_of(model, momentum=0.5)
        self.parameter = jnp.float32(FIRST)
        self.state = tx.init(self.parameter)

        def step(parameter: jax.Array, state: Any, batch: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
            loss, grad = amp.value_and_grad(loss_of, state)(parameter, batch)
            update, state = tx.update(grad, state, parameter)
            return optax.apply_updates(parameter, update), state, loss

        def body(carry: tuple[Any, Any], batch: jax.Array) -> tuple[Any, Any]:
            *carry, loss = step(*carry, batch)
            return tuple(carry), (loss, amp.metrics(carry[1]))

        self.eager, self.jitted = step, jax.jit(step, donate_argnums=(0, 1))
        self.scanned = jax.jit(lambda carry, batches: jax.lax.scan(body, carry, batches))

    def check_loss(self, got: Any, want: float) -> None:
        assert float(got) == want or (math.isnan(got) and math.isnan(want))

    @rule(batch=st.sampled_from(BATCHES))
    def step_under_jit(self, batch: float) -> None:
        self.parameter, self.state, loss = self.jitted(self.parameter, self.state, jnp.float32(batch))
        self.check_loss(loss, self.model.step(batch))

    @rule(batch=st.sampled_from(BATCHES))
    def step_eagerly(self, batch: float) -> None:
        self.parameter, self.state, loss = self.eager(self.parameter, self.state, jnp.float32(batch))
        self.check_loss(loss, self.model.step(batch))

    @rule(batches=st.lists(st.sampled_from(BATCHES), min_size=4, max_size=4))
    def four_steps_in_a_scan(self, batches: list[float]) -> None:
        carry = self.parameter, self.state
        (self.parameter, self.state), (losses, metrics) = self.scanned(carry, jnp.array(batches, jnp.float32))
        for index, batch in enumerate(batches):
            self.check_loss(losses[index], self.model.step(batch))
            assert {name: value[index].item() for name, value in metrics.items()} == self.model.seen()

    @rule()
    def flatten_and_rebuild(self) -> None:
        leaves, structure = jax.tree.flatten(self.state)
        self.state = jax.tree.unflatten(structure, [jnp.array(leaf) for leaf in leaves])

    @rule()
    def through_numpy(self) -> None:
        self.state = jax.tree.map(jnp.asarray, jax.device_get(self.state))

    @invariant()
    def equals_the_model(self) -> None:
        assert {name: value.item() for name, value in amp.metrics(self.state).items()} == self.model.seen()
        assert float(self.parameter) == self.model.parameter
        assert float(self.state.inner_state[0].trace) == self.model.momentum
        assert self.model.low <= self.model.scale <= self.model.high
        assert self.state.scaling.loss_scale.dtype == np.float32


TestRun = Run.TestCase
# Every example compiles anew, so that looking for the shortest one that fails would take minutes.
TestRun.settings = settings(max_examples=12, stateful_step_count=30, phases=(Phase.reuse, Phase.generate))


# Long runs


def random_model(rng: np.random.Generator) -> Model:
    """Settings that are no powers of two too, which float32 rounds at every step."""
    low, start, high = np.sort(np.float32(2.0) ** rng.uniform(-14, 24, 3).astype(np.float32)).tolist()
    up, down = rng.choice([2.0, 1.5, 1.001]), rng.choice([0.5, 0.7, 0.999])
    return Model(start, float(up), float(down), int(rng.integers(1, 30)), low, high, int(rng.integers(1, 4)))


def long_run(tx: Any, carry: Any, grads: Any) -> Any:
    def body(carry: tuple[Any, Any], grad: jax.Array) -> tuple[Any, Any]:
        parameter, state = carry
        update, state = tx.update(grad, state, parameter)
        carry = optax.apply_updates(parameter, update), state
        return carry, amp.metrics(state)

    return jax.jit(lambda carry, grads: jax.lax.scan(body, carry, grads))(carry, grads)


def through_a_checkpoint(tree: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # orbax asks the newest jax for names that it is about to drop
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
            checkpointer.wait_until_finished()
            return checkpointer.restore(path, jax.eval_shape(lambda: tree))


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_steps_with_a_checkpoint_at_a_random_one(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    model, steps = random_model(rng), 1000
    tx = optimizer_of(model)
    grads = np.where(rng.random(steps) < rng.choice([0.02, 0.3]), rng.choice(BATCHES[-3:], steps), 1.0)
    grads = grads.astype(np.float32)
    start = jnp.float32(FIRST), tx.init(jnp.float32(FIRST))

    whole, history = long_run(tx, start, grads)
    scales = np.asarray(history["loss_scale"])
    for index, grad in enumerate(grads):
        model.judge(math.isfinite(grad))
        seen = {name: value[index].item() for name, value in history.items()}
        assert seen == model.seen(), index
    assert len(set(scales.tolist())) > 1
    assert float(whole[0]) == FIRST - RATE * np.isfinite(grads).sum()

    stop = int(rng.integers(1, steps))
    before, _ = long_run(tx, start, grads[:stop])
    after, rest = long_run(tx, through_a_checkpoint(before, tmp_path / "run"), grads[stop:])
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(after)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(whole)
    ]
    assert np.asarray(rest["loss_scale"]).tolist() == scales[stop:].tolist()
