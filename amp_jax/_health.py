"""What is wrong with a run, for the place where it is logged.

Everything here runs on the host and waits for the device, which a training step must not do: call it when you log, or
when `amp.metrics` says that something is wrong.
"""

import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax._errors import AmpTypeError
from amp_jax._finite import is_floating
from amp_jax._jaxpr import is_tracer
from amp_jax._opt_state import metrics

PATIENCE = 50
"""Skipped steps in a row that no search for a loss scale takes: from 2^24 to the default minimum there are 38."""


def nonfinite_leaves(tree: Any) -> dict[str, dict[str, int]]:
    """The leaves of a tree that hold inf or NaN, by path, with how many of each.

    For gradients of a skipped step, parameters, batches, activations. In gradients that `amp.value_and_grad` gave, an
    overflow is NaN.

    >>> import amp_jax as amp, jax.numpy as jnp
    >>> grads = {"encoder": {"kernel": jnp.array([jnp.nan, 1.0, jnp.inf]), "bias": jnp.zeros(2)}}
    >>> amp.nonfinite_leaves(grads)
    {'encoder/kernel': {'inf': 1, 'nan': 1}}

    Args:
        tree: any pytree of arrays; what can't be infinite (ints, bools, keys, float0, None) is ignored. A complex
            number with a NaN part counts as NaN.

    Returns:
        A dict from path, as `"encoder/kernel"`, to the numbers of elements that are inf and NaN; empty if all are
        finite. An nnx Variable has the path of its attribute.

    Raises:
        AmpTypeError: under `jax.jit` or another trace, where there are no numbers yet; return the tree instead.
    """
    # Flax can only be in play if someone has imported it.
    if (nnx := sys.modules.get("flax.nnx")) is not None:
        tree = nnx.as_pure(tree)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_floating(leaf)
    }
    if any(is_tracer(leaf) for leaf in leaves.values()):
        raise AmpTypeError(
            "`tree` is being traced and has no numbers yet: return it from the compiled function, and call this outside"
        )
    counts = jax.device_get(_counts(leaves))
    return {path: {name: int(n) for name, n in count.items()} for path, count in counts.items() if any(count.values())}


@jax.jit
def _counts(leaves: dict[str, Any]) -> dict[str, dict[str, jax.Array]]:
    return {path: {"inf": jnp.sum(jnp.isinf(x)), "nan": jnp.sum(jnp.isnan(x))} for path, x in leaves.items()}


def check_health(opt_state: Any, params: Any = None) -> bool:
    """Whether a run can go on as it is; warns of what no loss scale can mend, and says what to do.

    Three things are looked for: parameters that aren't finite, so that every step from here on is skipped; 50 or more
    skipped steps in a row, with the loss scale at its minimum or on its way there for nothing; and a loss scale below
    1, which makes small gradients smaller still.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.dynamic_loss_scaling(optax.adam(1e-3))
    >>> params = {"w": jnp.ones(2)}
    >>> amp.check_health(tx.init(params), params)
    True

    Args:
        opt_state: anything with exactly one loss scale in it, or a vmapped ensemble's state.
        params: the parameters, any pytree; left out, they aren't looked at.

    Returns:
        Whether there was nothing to warn of. It waits for the device: call it where you log, not in every step.

    Raises:
        AmpValueError: `opt_state` holds no loss scale, or several.
        AmpTypeError: under a trace.
    """
    broken = nonfinite_leaves(params)
    read = jax.device_get(metrics(opt_state))
    found: list[str] = []
    if broken:
        found.append(
            f"parameters are not finite: {_few(list(broken))}. Every further step is skipped; go back to a checkpoint, "
            "and look at amp.nonfinite_leaves(params) of earlier ones"
        )
    if np.max(read["consecutive_skipped"]) >= PATIENCE:
        found.append(
            f"{PATIENCE} or more steps in a row were skipped: the gradients are not finite at any loss scale. Look at "
            "the batch, the loss, and amp.nonfinite_leaves(grads)"
        )
    if np.min(read["loss_scale"]) < 1:
        found.append(
            "the loss scale has fallen below 1: true gradients overflow float16. Scale down what they come from (a "
            "mean in place of a sum over the batch), or compute in bfloat16"
        )
    for text in found:
        warnings.warn(text, stacklevel=2)
    return not found


def _few(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more
