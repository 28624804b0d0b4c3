"""Loss scales that people bring along: the defaults of other systems, and the state of a run that began in one.

A *source* is the name of a system, or what such a system saved: the dict that PyTorch's `GradScaler.state_dict()`
gives, a `jmp.DynamicLossScale`, a Flax `DynamicScale`. Settings belong to the construction of the optimizer, the scale
and its count to the optimizer state, so there is one function for each.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._loss_scale import LossScaleSettings, LossScaleState, NoLossScaleState, checked_scale
from amp_jax._opt_state import find_loss_scale

# Powers of two that float32 holds as normal numbers: what comes closest to no bound at all.
_LOWEST, _HIGHEST = 2.0**-126, 2.0**127

_PRESETS = {
    # torch.amp.GradScaler: no bounds, but growth stops before inf.
    "torch": {"init_scale": 2.0**16, "growth_interval": 2000, "min_scale": _LOWEST, "max_scale": _HIGHEST},
    # apex.amp.scaler.LossScaler
    "apex": {"init_scale": 2.0**16, "growth_interval": 2000, "min_scale": _LOWEST, "max_scale": 2.0**24},
    # deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler, with the defaults of the "fp16" section of the JSON file
    "deepspeed": {
        "init_scale": 2.0**16,
        "growth_interval": 1000,
        "min_scale": 1.0,
        "max_scale": _HIGHEST,
        "hysteresis": 2,
    },
    # megatron.core.optimizer.grad_scaler.DynamicGradScaler, with the defaults of the command line
    "megatron": {
        "init_scale": 2.0**32,
        "growth_interval": 1000,
        "min_scale": 1.0,
        "max_scale": _HIGHEST,
        "hysteresis": 2,
    },
    # flax.training.dynamic_scale.DynamicScale
    "flax": {"init_scale": 2.0**16, "growth_interval": 2000, "min_scale": _LOWEST, "max_scale": _HIGHEST},
    # jmp.DynamicLossScale, with the first scale of its documentation
    "jmp": {"init_scale": 2.0**15, "growth_interval": 2000, "min_scale": 1.0, "max_scale": _HIGHEST},
}


class _Brought(NamedTuple):
    """What was read from another system: settings for `dynamic_loss_scaling`, and good steps since the last change."""

    settings: LossScaleSettings
    growth_count: int


def loss_scale_settings(source: Any) -> dict[str, Any]:
    """The settings of `dynamic_loss_scaling` that do what another system does by default, or did in a saved run.

    >>> import amp_jax as amp, optax
    >>> amp.loss_scale_settings("apex")["max_scale"]
    16777216.0
    >>> tx = amp.dynamic_loss_scaling(optax.adam(1e-3), **amp.loss_scale_settings("megatron"))

    ============= ========== ======= ======== ======== ========= ========= ==========
    name          init_scale growth  backoff  interval min_scale max_scale hysteresis
    ============= ========== ======= ======== ======== ========= ========= ==========
    ``torch``     2^16       2       0.5      2000     none      none      1
    ``apex``      2^16       2       0.5      2000     none      2^24      1
    ``deepspeed`` 2^16       2       0.5      1000     1         none      2
    ``megatron``  2^32       2       0.5      1000     1         none      2
    ``flax``      2^16       2       0.5      2000     none      none      1
    ``jmp``       2^15       2       0.5      2000     1         none      1
    ============= ========== ======= ======== ======== ========= ========= ==========

    Where a system has no bound, it is the last power of two that float32 holds. Two things differ from the originals.
    Megatron and DeepSpeed refill their hysteresis when the scale grows: of bad steps that come one by one, the first is
    forgiven and each later one backs off. Here every good step refills it, and bad steps that come one by one are
    all forgiven (in DeepSpeed that is `consecutive_hysteresis`); `hysteresis=1` backs off on each. And Flax grows one
    step later than its interval says.

    Sources: torch/amp/grad_scaler.py, apex/amp/scaler.py, deepspeed/runtime/fp16/loss_scaler.py with the "fp16" section
    of its configuration, megatron/core/optimizer/grad_scaler.py with its command line, flax/training/dynamic_scale.py,
    and jmp's DynamicLossScale.

    Args:
        source: "torch", "apex", "deepspeed", "megatron", "flax" or "jmp"; or a saved loss scale: the dict of PyTorch's
            `GradScaler.state_dict()`, a `jmp.DynamicLossScale` or a Flax `DynamicScale`. `init_scale` is then the
            saved one.

    Returns:
        Keyword arguments of `dynamic_loss_scaling`, all seven settings.

    Raises:
        AmpValueError: the name is unknown, or what was saved can't work.
        AmpTypeError: `source` is something else.
    """
    settings = _read(source).settings
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def load_loss_scale(opt_state: Any, source: Any) -> Any:
    """An optimizer state that goes on with the loss scale of a run in another system.

    The loss scale and the count of good steps are the saved ones; everything else in the state stays. Settings aren't
    in the state: give the same source to `loss_scale_settings` when you make the optimizer.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> saved = {  # torch.load("checkpoint.pt")["scaler"]
    ...     "scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17
    ... }
    >>> tx = amp.dynamic_loss_scaling(optax.adam(1e-3), **amp.loss_scale_settings(saved))
    >>> opt_state = amp.load_loss_scale(tx.init(jnp.ones(2)), saved)
    >>> amp.metrics(opt_state)["loss_scale"].item(), opt_state.scaling.growth_count.item()
    (4096.0, 17)

    Args:
        opt_state: anything with exactly one loss scale in it: an optimizer state, a `TrainState`, an `nnx.Optimizer`.
        source: as for `loss_scale_settings`; a name gives that system's first scale.

    Returns:
        A tree like `opt_state`, which itself stays as it is.

    Raises:
        AmpValueError: `opt_state` holds no loss scale, or several, or what was saved can't work.
        AmpTypeError: `source` or `opt_state` is something else.
    """
    brought = _read(source)
    if isinstance(find_loss_scale(opt_state), NoLossScaleState):
        raise AmpValueError(
            "`opt_state` belongs to an optimizer without a loss scale, so there is no place for the saved one: wrap it "
            "by amp.dynamic_loss_scaling, or leave amp.load_loss_scale out"
        )

    def load(node: Any) -> Any:
        if not isinstance(node, LossScaleState):
            return node
        # Through the leaves, since in an nnx.Optimizer there is a Variable around each.
        leaves, structure = jax.tree.flatten(node)
        scale, count, *others = leaves
        values = jnp.full_like(scale, brought.settings.init_scale), jnp.full_like(count, brought.growth_count)
        return jax.tree.unflatten(structure, [*values, *others])

    return jax.tree.map(load, opt_state, is_leaf=lambda node: isinstance(node, LossScaleState))


def _read(source: Any) -> _Brought:
    if isinstance(source, str):
        return _Brought(LossScaleSettings(**_preset(source)), 0)
    if isinstance(source, Mapping):
        return _from_torch(source)
    # By name, so that no package is imported for those who don't use it.
    if _is(source, "jmp", "DynamicLossScale"):
        backoff = 1 / _number("factor", source.factor)
        return _brought(
            source.loss_scale, source.counter, source.period, source.factor, backoff, lowest=source.min_loss_scale
        )
    if _is(source, "flax", "DynamicScale"):
        return _brought(
            source.scale,
            source.fin_steps,
            source.growth_interval,
            source.growth_factor,
            source.backoff_factor,
            lowest=_LOWEST if source.minimum_scale is None else source.minimum_scale,
        )
    raise AmpTypeError(
        f"`source` is of type {type(source).__name__}, expected a name ({', '.join(map(repr, _PRESETS))}), the dict of "
        "a torch GradScaler.state_dict(), a jmp.DynamicLossScale or a flax DynamicScale"
    )


def _preset(name: str) -> dict[str, Any]:
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, _PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AmpValueError(f"`source` is {name!r}, expected one of {', '.join(map(repr, _PRESETS))}{hint}")
    return _PRESETS[name]


def _from_torch(saved: Mapping[str, Any]) -> _Brought:
    if not saved:
        raise AmpValueError(
            "`source` is an empty dict: it was saved by a GradScaler with enabled=False, which has no loss scale"
        )
    names = ("scale", "_growth_tracker", "growth_interval", "growth_factor", "backoff_factor")
    if missing := [name for name in names if name not in saved]:
        raise AmpValueError(
            f"`source` has no {', '.join(map(repr, missing))}, expected the dict of a torch GradScaler.state_dict(), "
            f"with {', '.join(map(repr, names))}; its keys are {', '.join(map(repr, saved))}"
        )
    return _brought(*(saved[name] for name in names), lowest=_LOWEST)


def _brought(scale: Any, count: Any, interval: Any, growth: Any, backoff: Any, lowest: Any) -> _Brought:
    scale = checked_scale("scale", _number("scale", scale))
    count, interval = _number("growth count", count), _number("growth interval", interval)
    if count < 0 or count != int(count):
        raise AmpValueError(f"`source` has a growth count of {count}, expected a whole number from 0")
    settings = LossScaleSettings(
        init_scale=scale,
        growth_factor=_number("growth factor", growth),
        backoff_factor=_number("backoff factor", backoff),
        growth_interval=int(interval),
        # A scale that fell below the minimum, or a minimum below what float32 holds, moves the bound.
        min_scale=min(max(_number("minimum scale", lowest), _LOWEST), scale),
        max_scale=max(_HIGHEST, scale),
    )
    return _Brought(settings, int(count))


def _number(name: str, value: Any) -> float:
    """A Python number out of a number or an array of one, as the systems keep them."""
    if hasattr(value, "item") and np.size(value) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AmpTypeError(f"`source` has a {name} of type {type(value).__name__}, expected a number")
    return value


def _is(value: Any, package: str, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.split(".")[0] == package for kind in type(value).__mro__)
