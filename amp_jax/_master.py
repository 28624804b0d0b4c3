"""Float32 masters of parameters that are stored in half.

A *master* is the float32 number that an optimizer works on; what is *stored*, and computed with, is its cast to half.
Without it, an update of less than half a step of the stored number is lost: at 1.0, a step is 2^-8 in bfloat16.

Masters live in the optimizer's state and are for the leaves alone that are stored in half. A float32 parameter is its
own master. What is stored has the last word: where it isn't the cast of the master (a checkpoint was loaded, someone
clipped the weights), the master starts anew from it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from amp_jax._errors import AmpValueError
from amp_jax._inside import check_params, optimizer_inside, passed_through, shown, stored_in_half
from amp_jax._landing import landing_update, lands, widen


class MasterWeightsState(NamedTuple):
    """The state of an optimizer that works on masters.

    Attributes:
        masters: like the parameters; a float32 array for each that is stored in half, `optax.MaskedNode` elsewhere.
        inner_state: the state of the optimizer inside.
    """

    masters: Any
    inner_state: optax.OptState


def master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps float32 masters of the parameters that are stored in half.

    `tx` sees float32 masters and float32 gradients, so that no update is too small for it. The updates that come out
    are such that `optax.apply_updates`, `TrainState.apply_gradients` and `nnx.Optimizer` store the cast of the new
    master, bit for bit. Parameters, masters and Adam's moments are 14 bytes for each number instead of 12; what a step
    reads as weights, gathers from other devices or keeps as a copy for serving is 2 instead of 4.

    Goes outside of the chain, and inside of the loss scale: nothing but a mask may change its updates.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.master_weights(optax.sgd(1.0))
    >>> params, grads = jnp.ones((), jnp.bfloat16), jnp.float32(0.001)
    >>> state = tx.init(params)
    >>> for _ in range(100):  # each of them is too small for a bfloat16 at 1.0
    ...     updates, state = tx.update(grads, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params, round(state.masters.item(), 4)
    (Array(0.898438, dtype=bfloat16), 0.9)

    The method is that of Micikevicius et al. 2018, "Mixed Precision Training" (https://arxiv.org/abs/1710.03740), 3.1.

    Args:
        tx: an Optax optimizer, or a whole chain.

    Returns:
        An optimizer whose state is a `MasterWeightsState`. `init` needs the parameters as they are stored, and `update`
        needs them too. Where a parameter is no longer the cast of its master, the master becomes the parameter. A
        master beyond the dtype is stored as inf, as a cast has it, and stays: `amp.check_health` finds it.

    Raises:
        AmpTypeError: `tx` is no optimizer.
        AmpValueError: in `update`, `params` is missing, or of other dtypes than in `init`.
    """
    inner = optimizer_inside(tx, "amp.master_weights(optax.adam(1e-3))")

    def init(params: optax.Params) -> MasterWeightsState:
        masters = jax.tree.map(_first, stored_in_half(params), params)
        # Cast anew: an optimizer that keeps what it is given must not share a buffer that could be donated twice.
        return MasterWeightsState(masters, inner.init(shown(params)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterWeightsState]:
        check_params(params, "amp.master_weights")
        _check_dtypes(params, state.masters)
        masters = jax.tree.map(_current, params, state.masters)
        seen = jax.tree.map(lambda p, m: p if _is_none(m) else m, shown(params), masters)
        new_updates, inner_state = inner.update(shown(updates), state.inner_state, seen, **extra_args)
        masters = jax.tree.map(lambda m, u: m if _is_none(m) else m + u, masters, new_updates, is_leaf=_is_none)
        new_updates = jax.tree.map(_landing, params, masters, new_updates)
        return passed_through(updates, new_updates), MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _first(half: bool, param: Any) -> Any:
    return jnp.asarray(param, np.float32) if half else optax.MaskedNode()


def _current(param: Any, master: Any) -> Any:
    """The master, or what is stored where that is something else."""
    return master if _is_none(master) else jnp.where(lands(param, master), master, widen(param))


def _landing(param: Any, master: Any, update: jax.Array) -> jax.Array:
    return update if _is_none(master) else landing_update(param, master.astype(param.dtype))


def _is_none(master: Any) -> bool:
    return isinstance(master, optax.MaskedNode)


def _check_dtypes(params: Any, masters: Any) -> None:
    halves = jax.tree.map(lambda half, m: half == _is_none(m), stored_in_half(params), masters)
    for path, wrong in jax.tree_util.tree_leaves_with_path(halves):
        if wrong:
            raise AmpValueError(
                f"`params` ({jax.tree_util.keystr(path) or 'itself'}) and the masters in `state` don't belong "
                "together: a parameter stored in half has a master, others have none. Give tx.init the parameters in "
                "the dtypes that they are trained in"
            )
