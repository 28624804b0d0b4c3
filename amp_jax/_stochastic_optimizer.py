"""An optimizer that rounds by chance what it stores in half.

Small updates then move a stored number rarely but by a whole step, which on average is what they ask for. It costs no
memory beside the parameters, where masters cost four bytes for each; in return the parameters are noisy in their last
bit.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from amp_jax._errors import AmpTypeError
from amp_jax._inside import check_params, optimizer_inside, passed_through, shown, stored_in_half
from amp_jax._landing import landing_update, widen
from amp_jax._stochastic_round import stochastic_round


class StochasticRoundingState(NamedTuple):
    """The state of an optimizer that rounds by chance.

    Attributes:
        key: what the next step draws from.
        inner_state: the state of the optimizer inside.
    """

    key: jax.Array
    inner_state: optax.OptState


def stochastic_rounding(tx: optax.GradientTransformation, key: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer that rounds parameters stored in half by chance, so that small updates count on average.

    `tx` sees parameters and gradients in float32. Of each parameter stored in half, the float32 sum of parameter and
    update is rounded by `amp.stochastic_round`, and the updates that come out are such that `optax.apply_updates`
    stores exactly that. Parameters, and Adam's moments, are 10 bytes for each number instead of 12; there are no
    masters. Other parameters are updated as by `tx`.

    Goes outside of the chain, and inside of the loss scale, which leaves the key as it was on a skipped step.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.stochastic_rounding(optax.sgd(1.0), key=0)
    >>> params, grads = jnp.ones(1000, jnp.bfloat16), jnp.full(1000, 0.001)
    >>> state = tx.init(params)
    >>> for _ in range(100):  # each of them is too small for a bfloat16 at 1.0
    ...     updates, state = tx.update(grads, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> round(params.astype(jnp.float32).mean().item(), 2)
    0.9

    Zamirai et al. 2020, "Revisiting BFloat16 Training" (https://arxiv.org/abs/2010.06192), 3.

    Args:
        tx: an Optax optimizer, or a whole chain.
        key: an int or a key of `jax.random`. The run is the same, bit for bit, for the same key.

    Returns:
        An optimizer whose state is a `StochasticRoundingState`. `update` needs the parameters.

    Raises:
        AmpTypeError: `tx` is no optimizer, or `key` no key.
        AmpValueError: in `update`, `params` is missing.
    """
    inner = optimizer_inside(tx, "amp.stochastic_rounding(optax.adam(1e-3), key=0)")
    if isinstance(key, bool) or not isinstance(key, int | np.integer | jax.Array | np.ndarray):
        raise AmpTypeError(f"`key` is {key!r}, expected an int or a key, as jax.random.key(0) gives it")

    def init(params: optax.Params) -> StochasticRoundingState:
        first = jax.random.key(key) if isinstance(key, int | np.integer) else key
        # A key of its own: the state may be donated, and the given key is the caller's.
        return StochasticRoundingState(jax.random.fold_in(first, 0), inner.init(shown(params)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        check_params(params, "amp.stochastic_rounding")
        new_updates, inner_state = inner.update(shown(updates), state.inner_state, shown(params), **extra_args)
        key, now = jax.random.split(state.key)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.tree.unflatten(structure, list(range(len(leaves))))

        def landing(half: bool, number: int, param: Any, update: jax.Array) -> jax.Array:
            if not half:
                return update
            wanted = stochastic_round(jax.random.fold_in(now, number), widen(param) + update, param.dtype)
            return landing_update(param, wanted)

        new_updates = jax.tree.map(landing, stored_in_half(params), keys, params, new_updates)
        return passed_through(updates, new_updates), StochasticRoundingState(key, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
