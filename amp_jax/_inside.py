"""What the optimizer inside of a wrapper sees, and what becomes of its updates.

It sees gradients and parameters in float32 where they are half, and a zero where a leaf of the tree is no gradient (see
`_gradients`): moments are float32 from the start, and an int, a key or a float8 leaf in the tree is left alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._gradients import float32, map_gradients


def optimizer_inside(tx: Any, example: str) -> optax.GradientTransformationExtraArgs:
    """A checked optimizer whose `update` takes further arguments; `example` is the call that the error shows.

    Raises:
        AmpTypeError: `tx` is no optimizer.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise AmpTypeError(f"`tx` is of type {type(tx).__name__}, expected an Optax optimizer, as in {example}")
    return optax.with_extra_args_support(tx)


def shown(tree: Any) -> Any:
    """Gradients or parameters as the optimizer inside sees them."""
    return map_gradients(float32, tree, other=zeros)


def stored_in_half(params: Any) -> Any:
    """A tree of bools: which leaves are bfloat16 or float16 and take gradients."""
    return map_gradients(lambda leaf: jnp.result_type(leaf).itemsize == 2, params, other=lambda _: False)


def passed_through(updates: optax.Updates, new_updates: optax.Updates) -> optax.Updates:
    """The new updates, with the leaves of the given ones that are no gradients as they came."""
    is_gradient = map_gradients(lambda _: True, updates, other=lambda _: False)
    if all(jax.tree.leaves(is_gradient)):
        # Not only a shortcut: some optimizers, as optax.lookahead, give updates of another structure.
        return new_updates
    return jax.tree.map(lambda keep, old, new: new if keep else old, is_gradient, updates, new_updates)


def zeros(leaf: Any) -> jax.Array:
    """A float32 zero of the leaf's shape."""
    return jnp.zeros(np.shape(leaf), jnp.float32)


def check_params(params: Any, name: str) -> None:
    """Raise where an update that depends on the parameters came without them."""
    if params is None:
        raise AmpValueError(
            f"`params` is missing: {name} makes updates that fit the stored parameters. Call "
            "tx.update(grads, opt_state, params)"
        )
