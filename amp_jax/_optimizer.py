"""Optax optimizers that skip the steps whose gradients aren't finite and adapt the loss scale.

A *wrapper* takes an Optax optimizer and gives one back. Its `update` asks whether the gradients are finite, runs the
inner optimizer, and then *selects*, number by number, between its result and no change: no branch, no wait, the same
program on every step. It goes outermost: a chain, accumulation or clipping belongs inside, where it sees true
gradients, and only those of applied steps.

The inner optimizer starts with parameters in float32 (see `_inside` and `_placement`) and sees float32 gradients, so
that its moments are float32 from the start.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._finite import norm_is_finite
from amp_jax._gradients import map_gradients
from amp_jax._inside import optimizer_inside, passed_through, shown, zeros
from amp_jax._loss_scale import (
    LossScaleSettings,
    LossScaleState,
    NoLossScaleState,
    advance,
    checked_scale,
    initial_state,
    select,
)
from amp_jax._opt_state import holds_loss_scale
from amp_jax._placement import first_state
from amp_jax._policy import Policy, get_policy

AxisName = Hashable | Sequence[Hashable] | None


class LossScalingState(NamedTuple):
    """The state of a wrapped optimizer.

    Attributes:
        scaling: the loss scale, or that there is none.
        inner_state: the state of the optimizer inside, untouched by skipped steps.
    """

    scaling: LossScaleState | NoLossScaleState
    inner_state: optax.OptState


def dynamic_loss_scaling(
    tx: optax.GradientTransformation,
    *,
    init_scale: float = 2.0**15,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-14,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with a loss scale that looks for the largest value at which gradients don't overflow.

    On finite gradients it does what `tx` does. On others it changes nothing, bit for bit: the updates are -0.0 and the
    state inside stays, schedules and counts included; the loss scale falls. After `growth_interval` good steps in a row
    it grows. Compute the gradients with `amp.value_and_grad`, which reads the loss scale from the state.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.dynamic_loss_scaling(optax.adam(1e-3))
    >>> params = jnp.ones(2)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jnp.array([jnp.inf, 1.0]), state, params)
    >>> updates.tolist(), amp.metrics(state)["loss_scale"].item()
    ([-0.0, -0.0], 16384.0)

    The method is that of Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740), the settings are PyTorch's
    `GradScaler`'s, and hysteresis comes from Megatron.

    Args:
        tx: an Optax optimizer, or a whole chain.
        init_scale: the first loss scale, from `min_scale` to `max_scale`.
        growth_factor: what growth multiplies by, above 1.
        backoff_factor: what a bad step multiplies by, between 0 and 1.
        growth_interval: good steps in a row before growth.
        min_scale: the loss scale never falls below it.
        max_scale: the loss scale never grows above it.
        hysteresis: bad steps in a row before backoff; from there on each one backs off, until a good step.
        axis_name: under `jax.shard_map`, `jax.pmap` or a `jax.vmap` over devices, the axis (or axes) over which all
            must decide alike: a step that is bad on one is bad on all. Not needed under `jax.jit`.

    Returns:
        An optimizer whose state is a `LossScalingState`.

    Raises:
        AmpValueError: a setting is out of its range; in `init`, `tx` has a loss scale already.
        AmpTypeError: a setting is not a number, or `tx` is no optimizer.
    """
    settings = LossScaleSettings(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
    )
    return _wrap(tx, lambda: initial_state(settings.init_scale), settings, axis_name)


def static_loss_scaling(
    tx: optax.GradientTransformation, scale: float, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with a loss scale that stays, and that skips bad steps like a dynamic one.

    With scale 1 it does nothing but skip: NaN batches of a bfloat16 run, for example.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.static_loss_scaling(optax.sgd(0.1), 1.0)
    >>> updates, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
    >>> updates.tolist(), amp.metrics(state)["loss_scale"].item()
    ([-0.0], 1.0)

    Args:
        tx: an Optax optimizer, or a whole chain.
        scale: the loss scale, positive and finite; powers of two are exact.
        axis_name: as for `dynamic_loss_scaling`.

    Returns:
        An optimizer whose state is a `LossScalingState`.

    Raises:
        AmpValueError: `scale` is not positive and finite; in `init`, `tx` has a loss scale already.
        AmpTypeError: `scale` is not a number, or `tx` is no optimizer.
    """
    scale = checked_scale("scale", scale)
    return _wrap(tx, lambda: initial_state(scale), None, axis_name)


def no_loss_scaling(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer that neither checks nor skips, for a training script that is the same under every policy.

    Its state works wherever one with a loss scale does, and costs nothing.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.no_loss_scaling(optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([1.0]), tx.init(jnp.ones(1)))
    >>> updates.tolist(), amp.metrics(state)["loss_scale"].item()
    ([-0.5], 1.0)

    Args:
        tx: an Optax optimizer, or a whole chain.

    Returns:
        An optimizer whose state is a `LossScalingState`.

    Raises:
        AmpValueError: in `init`, `tx` has a loss scale already.
        AmpTypeError: `tx` is no optimizer.
    """
    return _wrap(tx, NoLossScaleState, None, None)


def loss_scaling(
    tx: optax.GradientTransformation, policy: Any, **settings: Any
) -> optax.GradientTransformationExtraArgs:
    """The loss scaling that a policy needs: dynamic for float16 and float8, none for bfloat16 and float32.

    bfloat16 has the range of float32, so that there is nothing to lift. What `auto` stands for is asked in `init`.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> for name in ("mixed_float16", "mixed_bfloat16"):
    ...     tx = amp.loss_scaling(optax.sgd(0.1), name)
    ...     print(name, amp.metrics(tx.init(jnp.ones(1)))["loss_scale"].item())
    mixed_float16 32768.0
    mixed_bfloat16 1.0

    Args:
        tx: an Optax optimizer, or a whole chain.
        policy: a `Policy`, or anything that `get_policy` takes.
        **settings: of `dynamic_loss_scaling`, checked whatever the policy.

    Returns:
        An optimizer whose state is a `LossScalingState`.

    Raises:
        AmpValueError: the policy is unknown, or a setting out of its range; in `init`, `tx` has a loss scale already.
        AmpTypeError: a setting is not a number, or `tx` is no optimizer.
    """
    policy = get_policy(policy)
    dynamic, none = dynamic_loss_scaling(tx, **settings), no_loss_scaling(tx)

    def init(params: optax.Params) -> optax.OptState:
        return (dynamic if _needs_loss_scale(policy.resolve()) else none).init(params)

    # Both update by the kind of state that they are given.
    return optax.GradientTransformationExtraArgs(init, dynamic.update)


def _needs_loss_scale(policy: Policy) -> bool:
    """Whether any part of a resolved policy computes in a dtype with a narrower range than float32's."""
    dtypes = [policy.compute_dtype, *(rule.compute_dtype for rule in policy.rules)]
    return any(jnp.finfo(dtype).maxexp < np.finfo(np.float32).maxexp for dtype in dtypes if dtype is not None)


def _wrap(
    tx: optax.GradientTransformation,
    first: Callable[[], LossScaleState | NoLossScaleState],
    settings: LossScaleSettings | None,
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    inner = optimizer_inside(tx, "amp.dynamic_loss_scaling(optax.adam(1e-3))")

    def init(params: optax.Params) -> LossScalingState:
        inner_state = first_state(inner, params)
        if holds_loss_scale(inner_state):
            raise AmpValueError(
                "`tx` has a loss scale already, expected an optimizer without one: wrap once, outermost, "
                "as in amp.dynamic_loss_scaling(optax.chain(...))"
            )
        return LossScalingState(first(), inner_state)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScalingState]:
        _check_state(state)
        if isinstance(state.scaling, LossScaleState):
            _warn_of_half_gradients(updates)
        grads = shown(updates)
        params = map_gradients(_same, params, other=zeros)
        new_updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
        if isinstance(state.scaling, NoLossScaleState):
            return passed_through(updates, new_updates), state._replace(inner_state=inner_state)
        finite = norm_is_finite(jax.tree.leaves(grads))
        if any(map(callable, extra_args.values())):
            # Functions, such as the gradient function of SAM: the update may come from gradients not seen here.
            finite &= norm_is_finite(jax.tree.leaves(map_gradients(_same, new_updates, other=zeros)))
        finite = _everywhere(finite, axis_name)
        new_updates = jax.tree.map(lambda update: _or_nothing(finite, update), new_updates)
        scaling, inner_state = advance(state.scaling, finite, settings), select(finite, inner_state, state.inner_state)
        return passed_through(updates, new_updates), LossScalingState(scaling, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_state(state: Any) -> None:
    if not isinstance(state, LossScalingState):
        raise AmpTypeError(
            f"`state` is of type {type(state).__name__}, expected the LossScalingState that this optimizer's init "
            "gives: it may be that of the optimizer inside, or from before the wrapping"
        )


def _warn_of_half_gradients(grads: optax.Updates) -> None:
    kinds = jax.tree.leaves(map_gradients(jnp.result_type, grads, other=lambda _: np.dtype(bool)))
    if np.dtype(np.float16) in kinds:
        # Level 1, this line: Python shows a warning once for each place that it comes from.
        warnings.warn(
            "the gradients are float16, so they were not unscaled, or no loss scale lifted them and small ones are "
            "zero: compute them by amp.value_and_grad(loss_fn, opt_state), which gives float32",
            stacklevel=1,
        )


def _everywhere(finite: jax.Array, axis_name: AxisName) -> jax.Array:
    return finite if axis_name is None else jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0


def _or_nothing(finite: jax.Array, update: jax.Array) -> jax.Array:
    """An update, or one that leaves every parameter as it is: adding 0.0 would make a -0.0 positive."""
    return jnp.where(finite, update, -jnp.zeros_like(update))


def _same(leaf: Any) -> Any:
    return leaf
