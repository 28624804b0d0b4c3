"""An average of weights over the steps of a run.

The *average* moves towards the parameters by a small part of the distance in each step. It is float32 whatever the
parameters are stored in: in bfloat16 a part of 1/1000 would be lost as soon as the distance is that small.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._gradients import float32, map_gradients


class EmaState(NamedTuple):
    """An average of parameters.

    Attributes:
        average: like the parameters, its floating-point leaves at least float32.
        updates: int32 of shape (), how many it has seen.
    """

    average: Any
    updates: jax.Array


class Ema(NamedTuple):
    """What `ema` gives: two pure functions.

    Attributes:
        init: `init(params)` gives the first state.
        update: `update(params, state)` gives the next one.
    """

    init: Callable[[Any], EmaState]
    update: Callable[[Any, EmaState], EmaState]


def ema(decay: float | Callable[[jax.Array], Any]) -> Ema:
    """An exponential moving average of parameters, in float32.

    It starts as the parameters themselves, so that nothing has to be corrected for a start at zero, and each update
    moves it by `1 - decay` of the way to the parameters. Update it after the optimizer; on a skipped step,
    `amp.where_finite` keeps the old state. `policy.cast_to_param(state.average)` gives it in the dtypes that the
    parameters are stored in.

    >>> import amp_jax as amp, jax.numpy as jnp
    >>> average = amp.ema(0.999)
    >>> state = average.init({"w": jnp.zeros(2, jnp.bfloat16)})
    >>> for _ in range(3):
    ...     state = average.update({"w": jnp.ones(2, jnp.bfloat16)}, state)
    >>> state.average["w"]
    Array([0.002997, 0.002997], dtype=float32)

    Polyak and Juditsky 1992 (https://doi.org/10.1137/0330046).

    Args:
        decay: from 0 to 1, 1 excluded; or an Optax schedule, a function of the number of updates so far: for instance
            `lambda count: jnp.minimum(0.9999, (1 + count) / (10 + count))`, which forgets the start faster.

    Returns:
        An `Ema` of `init(params)` and `update(params, state)`; both give a state with `.average`, a pytree like
        `params`: float32 where those are half or float32, float64 and complex as they are. Leaves that hold no such
        numbers (ints, keys, float8) are those of the latest parameters.

    Raises:
        AmpValueError: `decay` is out of range; in `update`, `params` has another structure than the average.
        AmpTypeError: `decay` is neither a number nor a function.
    """
    if not callable(decay):
        if isinstance(decay, bool) or not isinstance(decay, int | float | np.integer | np.floating):
            raise AmpTypeError(f"`decay` is {decay!r}, expected a number or a schedule")
        if not 0 <= decay < 1:
            raise AmpValueError(f"`decay` is {decay}, expected a number from 0 to 1, 1 excluded")

    def init(params: Any) -> EmaState:
        # Copies: a step that donates the parameters must not take the average with them.
        average = map_gradients(lambda leaf: jnp.array(float32(leaf), copy=True), params, other=_copy)
        return EmaState(average, jnp.zeros((), np.int32))

    def update(params: Any, state: EmaState) -> EmaState:
        if jax.tree.structure(params) != jax.tree.structure(state.average):
            raise AmpValueError(
                f"`params` has another structure than the average: {jax.tree.structure(params)} and "
                f"{jax.tree.structure(state.average)}"
            )
        part = jnp.asarray(1 - (decay(state.updates) if callable(decay) else decay), np.float32)
        is_averaged = map_gradients(lambda _: True, params, other=lambda _: False)

        def moved(averaged: bool, param: Any, average: Any) -> Any:
            return average + part * (float32(param) - average) if averaged else param

        average = jax.tree.map(moved, is_averaged, params, state.average)
        return EmaState(average, jnp.asarray(optax.safe_increment(state.updates)))

    return Ema(init, update)


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
