"""The loss scale as a state machine.

A *loss scale* is a factor on the loss that lifts small gradients into the range of a half dtype; gradients are divided
by it before anyone sees them. A *step* is one decision: *good* if all gradients were finite, *bad* (and *skipped*) if
not. The loss scale grows after enough good steps in a row (*growth*) and shrinks on bad ones (*backoff*).

`LossScaleSettings` are the rules and never change, so they stand beside the state, not in it: no flattening, saving or
restoring can lose them. `LossScaleState` is what changes and lives in the optimizer state; `initial_state` and
`advance` are the machine.

The method is that of Micikevicius et al. 2018, "Mixed Precision Training" (https://arxiv.org/abs/1710.03740), 3.2.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from amp_jax._errors import AmpTypeError, AmpValueError


class LossScaleState(NamedTuple):
    """What a loss scale remembers from step to step. All arrays have shape ().

    Attributes:
        loss_scale: float32, the factor that the next backward pass is seeded with.
        growth_count: int32, good steps since the loss scale last changed or a step was bad.
        grads_finite: bool, whether the last step was good.
        skipped_steps: int32, all bad steps so far.
        consecutive_skipped: int32, bad steps since the last good one.
    """

    loss_scale: jax.Array
    growth_count: jax.Array
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped: jax.Array


class NoLossScaleState(NamedTuple):
    """The state where there is no loss scale: holds nothing, so that nothing is computed from it."""


@dataclasses.dataclass(frozen=True)
class LossScaleSettings:
    """The rules of a dynamic loss scale, checked when they are made.

    After `growth_interval` good steps in a row the loss scale is multiplied by `growth_factor`. A bad step multiplies
    it by `backoff_factor` if it is at least the `hysteresis`-th in a row: the first `hysteresis - 1` bad steps of a
    row are forgiven, the others are not, and one good step forgives anew. Either way it stays between `min_scale` and
    `max_scale`. It remains a power of two if all of these are.

    >>> LossScaleSettings(growth_interval=0)
    Traceback (most recent call last):
    ...
    amp_jax._errors.AmpValueError: `growth_interval` is 0, expected an int from 1 to 2147483647

    Args:
        init_scale: the first loss scale, from `min_scale` to `max_scale`.
        growth_factor: greater than 1.
        backoff_factor: between 0 and 1, both excluded.
        growth_interval: good steps before growth, at least 1.
        min_scale: positive.
        max_scale: finite in float32.
        hysteresis: bad steps in a row before backoff, at least 1.

    Raises:
        AmpValueError: a setting is out of its range.
        AmpTypeError: a setting is not a number.
    """

    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale"):
            self._set(name, checked_scale(name, getattr(self, name)))
        for name in ("growth_factor", "backoff_factor"):
            self._set(name, _number(name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis"):
            self._set(name, checked_count(name, getattr(self, name)))
        if not 1 < self.growth_factor < np.inf:
            raise AmpValueError(f"`growth_factor` is {self.growth_factor}, expected a finite number above 1")
        if not 0 < self.backoff_factor < 1:
            raise AmpValueError(f"`backoff_factor` is {self.backoff_factor}, expected a number between 0 and 1")
        if self.min_scale > self.max_scale:
            raise AmpValueError(f"`min_scale` is {self.min_scale}, above `max_scale`, which is {self.max_scale}")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise AmpValueError(
                f"`init_scale` is {self.init_scale}, outside of `min_scale` to `max_scale`, which are "
                f"{self.min_scale} to {self.max_scale}: move `init_scale`, or the bound that is in its way"
            )

    def _set(self, name: str, value: float) -> None:
        # Python numbers only: a NumPy scalar has a dtype of its own, and would give it to the state.
        object.__setattr__(self, name, value)


def checked_scale(name: str, value: Any) -> float:
    """A value that can serve as a loss scale: positive, and a normal number of float32. Raises on others."""
    number, limits = _number(name, value), np.finfo(np.float32)
    if not float(limits.tiny) <= number <= float(limits.max):
        raise AmpValueError(f"`{name}` is {value}, expected a positive finite number that float32 holds")
    return number


def checked_count(name: str, value: Any) -> int:
    """A value that can serve as a count: an int from 1. Raises on others."""
    limit = np.iinfo(np.int32).max
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise AmpTypeError(f"`{name}` is {value!r}, expected an int from 1 to {limit}")
    if not 1 <= value <= limit:
        raise AmpValueError(f"`{name}` is {value}, expected an int from 1 to {limit}")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise AmpTypeError(f"`{name}` is {value!r}, expected a Python number: settings are fixed at construction")
    return float(value)


def initial_state(scale: float) -> LossScaleState:
    """The state before the first step, at the given loss scale."""
    return LossScaleState(
        loss_scale=jnp.array(scale, jnp.float32),
        growth_count=jnp.zeros((), jnp.int32),
        grads_finite=jnp.array(True),
        skipped_steps=jnp.zeros((), jnp.int32),
        consecutive_skipped=jnp.zeros((), jnp.int32),
    )


def advance(state: LossScaleState, grads_finite: jax.Array, settings: LossScaleSettings | None) -> LossScaleState:
    """The state after a step.

    >>> state = initial_state(4.0)
    >>> state = advance(state, jnp.array(False), LossScaleSettings(init_scale=4.0))
    >>> float(state.loss_scale), int(state.skipped_steps)
    (2.0, 1)

    Args:
        state: the state that the step's gradients were computed with.
        grads_finite: bool of shape (), whether the step was good.
        settings: the rules; None for a loss scale that stays.

    Returns:
        The next state, of the same dtypes.
    """
    bad = ~grads_finite
    consecutive = jnp.where(bad, optax.safe_increment(state.consecutive_skipped), 0)
    counted = state._replace(
        grads_finite=grads_finite,
        skipped_steps=jnp.where(bad, optax.safe_increment(state.skipped_steps), state.skipped_steps),
        consecutive_skipped=consecutive,
    )
    if settings is None:
        return counted
    good_steps = state.growth_count + 1
    grow = grads_finite & (good_steps >= settings.growth_interval)
    shrink = bad & (consecutive >= settings.hysteresis)
    scale = state.loss_scale
    grown = jnp.minimum(scale * settings.growth_factor, settings.max_scale)
    shrunk = jnp.maximum(scale * settings.backoff_factor, settings.min_scale)
    return counted._replace(
        loss_scale=jnp.where(grow, grown, jnp.where(shrink, shrunk, scale)),
        growth_count=jnp.where(grow | bad, 0, good_steps),
    )


def select(condition: jax.Array, on_true: Any, on_false: Any) -> Any:
    """One of two trees of the same structure, leaf by leaf and bit by bit, without a branch on the device."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), on_true, on_false)
