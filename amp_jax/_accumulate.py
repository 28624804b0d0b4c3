"""Gradients of a big batch from small ones, one after the other.

A *micro-batch* is a part of a batch that fits the memory; a *window* is all the micro-batches of one. The loss scale is
frozen over the window, gradients are added in float32, and there is one decision: an overflow in any micro-batch makes
the mean non-finite, and the whole window is skipped.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from amp_jax._errors import AmpValueError
from amp_jax._gradients import map_gradients, value_and_grad
from amp_jax._loss_scale import checked_count


def accumulate_gradients(
    fun: Callable[..., Any], opt_state: Any, steps: int, *, has_aux: bool = False
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`value_and_grad` over a batch in micro-batches: the memory of one, the gradients of all.

    The micro-batches run in a `lax.scan`, so that the program is as large as for one. What comes back is what
    `amp.value_and_grad` gives on the whole batch where the loss is a mean over its examples: `tx.update` needs to know
    nothing of it. If the parameters are a Flax nnx Module, its state updates go from each micro-batch to the next and
    are kept.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.dynamic_loss_scaling(optax.sgd(0.1))
    >>> w, x = jnp.float32(2.0), jnp.arange(6.0)
    >>> loss_of = lambda w, x: jnp.mean(w * x)
    >>> loss, grads = amp.accumulate_gradients(loss_of, tx.init(w), steps=3)(w, x)
    >>> loss.item(), grads.item()
    (5.0, 2.5)

    Args:
        fun: `fun(params, batch)` gives the loss, a mean over the examples of the batch, or `(loss, aux)`.
        opt_state: anything with exactly one loss scale in it.
        steps: how many micro-batches, at least 1.
        has_aux: whether `fun` returns a pair of the loss and anything else.

    Returns:
        A function `(params, batch) -> (loss, grads)`, or `((loss, aux), grads)`. `batch` is a pytree of arrays; the
        first axis of each, a multiple of `steps`, is dealt out: the first micro-batch has the examples 0, `steps`,
        2 `steps` and so on, which leaves a batch that is sharded over devices where it is. Loss and gradients are
        float32 means over the micro-batches; `aux` comes stacked, a first axis of length `steps`. What is no gradient
        (float8 overwrite state) is the last micro-batch's.

    Raises:
        AmpValueError: `steps` is less than 1; in the call, an array can't be dealt out into so many parts; `opt_state`
            holds no loss scale, or several.
        AmpTypeError: `steps` is no int, `fun` no function; in the call, as for `value_and_grad`.
    """
    steps = checked_count("steps", steps)
    differentiate = value_and_grad(fun, opt_state, has_aux=has_aux)

    @functools.wraps(fun, updated=())
    def accumulated(params: Any, batch: Any) -> tuple[Any, Any]:
        micro_batches = jax.tree_util.tree_map_with_path(functools.partial(_dealt, steps), batch)
        nnx: Any = sys.modules.get("flax.nnx")
        if nnx is None or not isinstance(params, nnx.Module):
            return _mean(lambda state, one: (state, differentiate(params, one)), (), micro_batches, steps, has_aux)[1]
        graph, state = nnx.split(params)

        def step(state: Any, one: Any) -> tuple[Any, Any]:
            module = nnx.merge(graph, state)
            result = differentiate(module, one)
            return nnx.state(module), result

        state, result = _mean(step, state, micro_batches, steps, has_aux)
        nnx.update(params, state)
        return result

    return accumulated


def _mean(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, micro_batches: Any, steps: int, has_aux: bool
) -> tuple[Any, tuple[Any, Any]]:
    """The state after all steps, and the mean of what they gave."""
    # Sliced under eval_shape, so that nothing runs for the sake of shapes.
    first = lambda state, all_: step(state, jax.tree.map(lambda x: x[0], all_))  # noqa: E731
    _, (value, grads) = jax.eval_shape(first, state, micro_batches)
    shapes, tree = jax.tree.flatten(grads)
    is_gradient = jax.tree.leaves(map_gradients(lambda _: True, grads, other=lambda _: False))
    summed = [x for x, ours in zip(shapes, is_gradient, strict=True) if ours]
    zero = [jnp.zeros(x.shape, x.dtype) for x in (value[0] if has_aux else value, *summed)]

    def body(carry: Any, one: Any) -> tuple[Any, Any]:
        state, total = carry
        state, (value, grads) = step(state, one)
        loss, aux = value if has_aux else (value, None)
        leaves = list(zip(jax.tree.leaves(grads), is_gradient, strict=True))
        total = [a + b for a, b in zip(total, (loss, *(x for x, ours in leaves if ours)), strict=True)]
        # float0, the gradient of an int, has no arrays on a device.
        return (state, total), (aux, [x for x, ours in leaves if not ours and x.dtype != jax.dtypes.float0])

    (state, total), (aux, others) = _scan(body, (state, zero), micro_batches, steps)
    loss, *means = (x / steps for x in total)
    given, last = iter(means), (x[-1] for x in others)
    empty = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    leaves = [
        next(given) if ours else empty(x) if x.dtype == jax.dtypes.float0 else next(last)
        for x, ours in zip(shapes, is_gradient, strict=True)
    ]
    return state, ((loss, aux) if has_aux else loss, jax.tree.unflatten(tree, leaves))


def _scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
    """`lax.scan`; a single step stands in no loop, in which XLA's convolutions on a CPU are ten times as slow."""
    if length > 1:
        return lax.scan(body, carry, xs, length=length)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: jnp.asarray(x)[None], out)


def _dealt(steps: int, path: Any, x: Any) -> Any:
    shape = np.shape(x)
    if not shape or shape[0] % steps:
        where = jax.tree_util.keystr(path) or "itself"
        raise AmpValueError(
            f"`batch` ({where}) has shape {shape}, expected a first axis that {steps} micro-batches (`steps`) divide: "
            "drop the rest of the batch, or close over what is no batch"
        )
    x = jnp.asarray(x)
    return jnp.swapaxes(x.reshape(shape[0] // steps, steps, *shape[1:]), 0, 1)
