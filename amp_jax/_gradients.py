"""Gradients of the true loss, computed from a scaled one.

The *seed* of a backward pass is the number that it starts with, normally 1. Starting with the loss scale instead
multiplies every gradient on the way, so that a half dtype holds the small ones; the loss itself is never multiplied and
can't overflow. *Unscaling* divides the gradients by the loss scale in float32, after which nobody needs to know that
there was one.

A *gradient leaf* is a leaf of a gradient tree that holds a gradient: real or complex numbers of at least 16 bits. Ints,
keys, float0 and float8 are none, nor is what Flax keeps under `_overwrite_with_gradient`: new values of float8 scaling
factors that travel in the gradient tree. They pass through everything here as they are.
"""

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._finite import is_floating
from amp_jax._loss_scale import LossScaleState, NoLossScaleState
from amp_jax._opt_state import find_loss_scale


def value_and_grad(
    fun: Callable[..., Any], opt_state: Any, *, argnums: Any = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` with the loss scale that an optimizer state holds.

    The backward pass runs on a scaled loss, but what comes back is true: the loss as `fun` computed it, and unscaled
    gradients, ready for clipping, for logging and for `tx.update`. Where an overflow hit them they hold NaN, and
    `tx.update` skips the step. If an argument is (or holds) a Flax nnx Module, this is `nnx.value_and_grad`: it keeps
    what the call did to batch statistics and random counts.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.dynamic_loss_scaling(optax.sgd(0.1))
    >>> params = jnp.array([0.5, 0.25], jnp.float16)
    >>> loss, grads = amp.value_and_grad(lambda p: jnp.sum(p.astype(jnp.float32) ** 2), tx.init(params))(params)
    >>> loss.item(), grads.tolist(), grads.dtype.name
    (0.3125, [1.0, 0.5], 'float32')

    Args:
        fun: a function whose result is a scalar loss, or `(loss, aux)` with `has_aux`. The loss should be float32.
        opt_state: anything with exactly one loss scale in it: an optimizer state, a whole chain's, a `TrainState`, an
            `nnx.Optimizer`.
        argnums: which positional arguments to differentiate: an int or several, or `nnx.DiffState`s.
        has_aux: whether `fun` returns a pair of the loss and anything else.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`. The loss is
        float32, and so are the gradients, of half-precision parameters too; only float64 stays float64. Ints and keys
        inside of a differentiated argument have float0 gradients.

    Raises:
        AmpTypeError: `fun` is not a function, or `opt_state` is no state; in the call, the loss is not a real
            floating-point scalar, or there is nothing to differentiate.
        AmpValueError: `opt_state` holds no loss scale, or several.
    """
    _check_function(fun)
    find_loss_scale(opt_state)

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Looked up again: the state of an nnx.Optimizer changes in place.
        state = find_loss_scale(opt_state)
        seeded = _seeded(fun, state, has_aux)
        transform = _transform(args, kwargs, argnums)
        value, grads = transform(seeded, argnums=argnums, has_aux=has_aux, allow_int=True)(*args, **kwargs)
        return value, _unscale(grads, state)

    return value_and_grad_fun


def grad(fun: Callable[..., Any], opt_state: Any, *, argnums: Any = 0, has_aux: bool = False) -> Callable[..., Any]:
    """`jax.grad` with the loss scale that an optimizer state holds: `value_and_grad` without the value.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.static_loss_scaling(optax.sgd(0.1), 1024.0)
    >>> amp.grad(lambda p: jnp.sum(p**2), tx.init(jnp.ones(2)))(jnp.ones(2)).tolist()
    [2.0, 2.0]

    Args:
        fun: as for `value_and_grad`.
        opt_state: as for `value_and_grad`.
        argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.

    Returns:
        A function of the arguments of `fun` that returns the gradients, or `(grads, aux)` with `has_aux`.

    Raises:
        AmpTypeError: as for `value_and_grad`.
        AmpValueError: as for `value_and_grad`.
    """
    value_and_grad_fun = value_and_grad(fun, opt_state, argnums=argnums, has_aux=has_aux)

    @functools.wraps(fun, updated=())
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def scale_loss(loss: Any, opt_state: Any) -> jax.Array:
    """The loss times the loss scale, in float32: the first half of `value_and_grad`, by hand.

    For `jax.vjp`, several losses, penalties on gradients. Only the gradients matter: a large product may be inf without
    harm to them, so report the loss itself.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> opt_state = amp.static_loss_scaling(optax.sgd(0.1), 1024.0).init(jnp.ones(2))
    >>> amp.scale_loss(jnp.bfloat16(100.0), opt_state).item()
    102400.0

    Args:
        loss: real floating-point array of any shape.
        opt_state: anything with exactly one loss scale in it.

    Returns:
        float32 array of the shape of `loss` (float64 where that is).

    Raises:
        AmpTypeError: `loss` is not real floating-point.
        AmpValueError: `opt_state` holds no loss scale, or several.
    """
    state = find_loss_scale(opt_state)
    loss = _float32_loss("loss", loss, state)
    return loss if isinstance(state, NoLossScaleState) else loss * state.loss_scale


def unscale(grads: Any, opt_state: Any) -> Any:
    """Gradients of a scaled loss divided by the loss scale, in float32: the second half of `value_and_grad`, by hand.

    A power of two divides exactly. What overflowed comes out as NaN, never as inf: a clip of single values, which turns
    inf into a plausible gradient, then can't hide it.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> opt_state = amp.static_loss_scaling(optax.sgd(0.1), 1024.0).init(jnp.ones(2))
    >>> amp.unscale({"w": jnp.float16(512.0), "b": jnp.float16(jnp.inf)}, opt_state)
    {'b': Array(nan, dtype=float32), 'w': Array(0.5, dtype=float32)}

    Args:
        grads: pytree of gradients, as `jax.grad` of `scale_loss(...)` gives them.
        opt_state: anything with exactly one loss scale in it, as it was before the step's update.

    Returns:
        A pytree of the same structure, its gradients float32, or float64 or complex where they were. What is no
        gradient (ints, keys, float0, float8 and its overwrite state) is returned as it came.

    Raises:
        AmpValueError: `grads` came out of this function or of `value_and_grad`; `opt_state` holds no loss scale, or
            several.
    """
    state = find_loss_scale(opt_state)
    if any(_UNSCALED.get(id(leaf)) is leaf for leaf in jax.tree.leaves(grads)):
        raise AmpValueError(
            "`grads` are unscaled already, by amp.value_and_grad, amp.grad or amp.unscale: use them as they are. "
            "amp.unscale is for the gradients of amp.scale_loss(loss, opt_state)"
        )
    return _unscale(grads, state)


def map_gradients(function: Callable[[Any], Any], grads: Any, other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A tree with a function applied to its gradient leaves, and another, or nothing, to its other leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(leaf) if _is_gradient(path, leaf) else other(leaf), grads
    )


def float32(x: Any) -> jax.Array:
    """An array with at least float32's precision: half becomes float32, the others stay."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), np.float32))


def _is_gradient(path: Sequence[Any], leaf: Any) -> bool:
    if any(getattr(key, "key", None) == "_overwrite_with_gradient" for key in path):
        return False
    return is_floating(leaf) and jnp.result_type(leaf).itemsize >= 2


def _unscale(grads: Any, state: LossScaleState | NoLossScaleState) -> Any:
    if isinstance(state, NoLossScaleState):
        return map_gradients(float32, grads)

    def divide(gradient: Any) -> jax.Array:
        quotient = _divide(gradient, state.loss_scale)
        _UNSCALED[id(quotient)] = quotient
        return quotient

    return map_gradients(divide, grads)


# The unscaled gradients that are alive, by identity: it only serves to notice that some are unscaled twice.
_UNSCALED: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


@functools.partial(jax.jit, inline=True)
def _divide(gradient: jax.Array, loss_scale: jax.Array) -> jax.Array:
    # Compiled, so that `jax_debug_nans` outside of jit doesn't take the constant for a result.
    # Divided, not multiplied by a reciprocal: 1 / 2**127 would be flushed to zero.
    quotient = float32(gradient) / loss_scale
    return jnp.where(jnp.isfinite(quotient), quotient, np.nan)


def _seeded(fun: Callable[..., Any], state: LossScaleState | NoLossScaleState, has_aux: bool) -> Callable[..., Any]:
    """`fun` with a checked float32 loss whose backward pass starts with the loss scale."""

    @functools.wraps(fun, updated=())
    def seeded_fun(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        loss, aux = _split_aux(result) if has_aux else (result, None)
        loss = _scalar_loss(loss, state)
        if isinstance(state, LossScaleState):
            loss = _seed(loss, state.loss_scale)
        return (loss, aux) if has_aux else loss

    return seeded_fun


@jax.custom_vjp
def _seed(loss: jax.Array, loss_scale: jax.Array) -> jax.Array:
    """The loss as it is; its cotangent is multiplied by the loss scale."""
    del loss_scale
    return loss


def _seed_forward(loss: jax.Array, loss_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss, loss_scale


def _seed_backward(loss_scale: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return cotangent * loss_scale.astype(cotangent.dtype), None


_seed.defvjp(_seed_forward, _seed_backward)


def _transform(args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Any) -> Callable[..., Any]:
    """JAX's value_and_grad, or nnx's where a Module is among the arguments."""
    # Flax can only be in play if someone has imported it.
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None:
        numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
        nodes = jax.tree.leaves((args, kwargs), is_leaf=lambda node: isinstance(node, nnx.Pytree))
        if any(isinstance(x, nnx.Pytree) for x in nodes) or any(isinstance(n, nnx.DiffState) for n in numbers):
            return nnx.value_and_grad
    _check_differentiable(args, argnums)
    return jax.value_and_grad


def _check_differentiable(args: tuple[Any, ...], argnums: Any) -> None:
    for number in argnums if isinstance(argnums, Sequence) else (argnums,):
        # A number out of range is left to JAX, which says so.
        leaves = jax.tree.leaves(args[number]) if -len(args) <= number < len(args) else []
        if leaves and not any(map(is_floating, leaves)):
            raise AmpTypeError(
                f"`argnums` asks for the gradient of argument {number}, which holds no floating-point array: "
                "differentiate the argument with the parameters"
            )


def _check_function(fun: Any) -> None:
    if not callable(fun):
        raise AmpTypeError(
            f"`fun` is of type {type(fun).__name__}, expected a function that returns the loss: "
            "amp.value_and_grad(loss_fn, opt_state)(params, batch)"
        )
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and inspect.ismethod(fun) and isinstance(fun.__self__, nnx.Module):
        raise AmpTypeError(
            f"`fun` is a method of an nnx Module, {fun.__qualname__}: its Module would be a constant. Pass a function "
            "that takes the Module as an argument"
        )


def _split_aux(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise AmpTypeError(
            f"`fun` returned {type(result).__name__}, expected a pair (loss, aux) since `has_aux` is True: return a "
            "pair, or leave `has_aux` out"
        )
    return result


def _scalar_loss(loss: Any, state: LossScaleState | NoLossScaleState) -> jax.Array:
    if isinstance(loss, tuple | list | dict):
        raise AmpTypeError(
            f"`fun` returned a {type(loss).__name__}, expected a scalar loss: pass has_aux=True if it returns "
            "(loss, aux)"
        )
    loss = _float32_loss("fun", loss, state)
    if loss.shape:
        raise AmpTypeError(
            f"`fun` returned a loss of shape {loss.shape}, expected a scalar: reduce it, for example by jnp.mean"
        )
    return loss


def _float32_loss(name: str, loss: Any, state: LossScaleState | NoLossScaleState) -> jax.Array:
    what = "returned a loss" if name == "fun" else "is"
    if not isinstance(loss, int | float | complex) and not hasattr(loss, "dtype"):
        raise AmpTypeError(f"`{name}` {what} of type {type(loss).__name__}, expected a real floating-point array")
    dtype = jnp.result_type(loss)
    if not jnp.issubdtype(dtype, np.floating):
        raise AmpTypeError(f"`{name}` {what} of dtype {dtype}, expected real floating-point: cast it to float32")
    if dtype == np.float16 and isinstance(state, LossScaleState):
        # Level 1, this line: Python shows a warning once for each place that it comes from.
        warnings.warn(
            "the loss was computed in float16, where a loss scale of 65536 or more is inf, and so are all gradients: "
            "cast the model's output to float32 before the loss",
            stacklevel=1,
        )
    return float32(loss)
