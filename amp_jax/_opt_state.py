"""The loss scale found inside of whatever holds it, and what it says about the last step.

An `opt_state` here is any pytree with exactly one loss scale in it: the state of a wrapped optimizer, the tuple of a
chain around one, a Flax `TrainState` or `nnx.Optimizer`, a dict of one's own.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._finite import is_floating
from amp_jax._loss_scale import LossScaleState, NoLossScaleState, initial_state, select


def find_loss_scale(opt_state: Any) -> LossScaleState | NoLossScaleState:
    """The one loss scale state inside of an optimizer state, or of anything that holds one.

    Args:
        opt_state: a pytree: the state of a wrapped optimizer, a chain's tuple, a `TrainState`, an `nnx.Optimizer`.

    Returns:
        The state, its arrays bare where a Flax `nnx.Optimizer` has put them into Variables.

    Raises:
        AmpValueError: there are none or several, or it lies inside of a wrapper that hides overflows from it.
        AmpTypeError: `opt_state` can't hold one.
    """
    state = _find_any_shape(opt_state)
    if isinstance(state, LossScaleState) and jnp.shape(state.loss_scale):
        raise AmpValueError(
            f"`opt_state` holds loss scales of shape {jnp.shape(state.loss_scale)}, expected one of shape (): under "
            "jax.vmap or jax.pmap, call this inside of the mapped function"
        )
    return state


def holds_loss_scale(tree: Any) -> bool:
    """Whether there is a loss scale anywhere in a tree, or the statement that there is none."""
    return bool(nodes_of(tree, (LossScaleState, NoLossScaleState)))


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """What there is to know about the loss scale, as device scalars to log with the loss.

    Nothing here waits for the device. `consecutive_skipped` that keeps growing means that the loss scale can't help:
    the parameters or the data hold NaN.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.dynamic_loss_scaling(optax.sgd(0.1))
    >>> {name: value.item() for name, value in amp.metrics(tx.init(jnp.ones(2))).items()}
    {'loss_scale': 32768.0, 'grads_finite': True, 'skipped_steps': 0, 'consecutive_skipped': 0}

    Args:
        opt_state: anything with exactly one loss scale in it.

    Returns:
        A dict of arrays of shape (), or of one per member of a vmapped state: float32 `loss_scale`, the one that the
        next step uses; bool `grads_finite`, whether the last step was applied; int32 `skipped_steps` and
        `consecutive_skipped`. Without loss scaling they read 1, True, 0, 0.

    Raises:
        AmpValueError: `opt_state` holds no loss scale, or several.
        AmpTypeError: `opt_state` is something else.
    """
    state = _find_any_shape(opt_state)
    if isinstance(state, NoLossScaleState):
        state = initial_state(1.0)
    return {name: value for name, value in state._asdict().items() if name != "growth_count"}


def where_finite(opt_state: Any, new: Any, old: Any) -> Any:
    """`new` if the last step was applied, `old` if it was skipped.

    For what stands outside of the optimizer and must not move on a skipped step either: batch statistics, averages,
    counters. In Flax nnx, `nnx.state(model)` gives the model's own Variables, which the step then changes: take
    `old = nnx.as_pure(nnx.state(model, nnx.BatchStat))` before the step.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> tx = amp.dynamic_loss_scaling(optax.sgd(0.1))
    >>> params, state = jnp.ones(2), tx.init(jnp.ones(2))
    >>> _, state = tx.update(jnp.array([jnp.inf, 1.0]), state, params)
    >>> amp.where_finite(state, {"mean": jnp.inf}, {"mean": 0.5})["mean"].item()
    0.5

    Args:
        opt_state: anything with exactly one loss scale in it, after the step's update.
        new: a pytree of arrays.
        old: a pytree of arrays like those of `new`.

    Returns:
        A pytree like `new`; `new` itself without loss scaling.

    Raises:
        AmpValueError: `old` is no snapshot but holds the very Variables of `new`, its structure is another, or
            `opt_state` holds no loss scale, or several.
    """
    state = find_loss_scale(opt_state)
    _check_snapshot(new, old)
    if isinstance(state, NoLossScaleState):
        return new
    # By leaves, since a snapshot of nnx state has no Variables around them.
    leaves, structure = jax.tree.flatten(new)
    return jax.tree.unflatten(structure, select(state.grads_finite, leaves, jax.tree.leaves(old)))


def _find_any_shape(opt_state: Any) -> LossScaleState | NoLossScaleState:
    _check_opt_state(opt_state)
    found = nodes_of(opt_state, (LossScaleState, NoLossScaleState))
    if len(found) != 1:
        raise AmpValueError(_no_loss_scale(opt_state) if not found else _several(list(found)))
    (path, state), *_ = found.items()
    if isinstance(state, NoLossScaleState):
        return state
    _check_order(opt_state, path)
    # A Variable is a pytree node with one leaf: this unwraps them without importing Flax.
    return LossScaleState(*jax.tree.leaves(state))


def _check_snapshot(new: Any, old: Any) -> None:
    # Flax can only be in play if someone has imported it.
    if (nnx := sys.modules.get("flax.nnx")) is not None:
        before, after = nodes_of(old, nnx.Variable), nodes_of(new, nnx.Variable)
        if any(before.get(path) is variable for path, variable in after.items()):
            raise AmpValueError(
                "`old` holds the same Variables as `new`, so it has changed with them: take it before the step as "
                "nnx.as_pure(nnx.state(model, nnx.BatchStat))"
            )
        new, old = nnx.as_pure(new), nnx.as_pure(old)
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise AmpValueError(
            f"`old` has another structure than `new`: {jax.tree.structure(old)} and {jax.tree.structure(new)}"
        )


def nodes_of(tree: Any, kinds: type | tuple[type, ...]) -> dict[tuple[Any, ...], Any]:
    """The nodes of the given types that a tree holds, by path; nothing inside of them."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))
    return {path: node for path, node in nodes if isinstance(node, kinds)}


def _check_opt_state(opt_state: Any) -> None:
    numbers = opt_state if isinstance(opt_state, tuple) and opt_state else (opt_state,)
    if all(isinstance(number, int) for number in numbers):
        raise AmpTypeError(
            f"`opt_state` is {opt_state!r}, expected an optimizer state: argnums is a keyword here. Write "
            f"amp.value_and_grad(fun, opt_state, argnums={opt_state!r})"
        )
    if isinstance(opt_state, optax.GradientTransformation):
        raise AmpTypeError("`opt_state` is an optimizer, expected its state: opt_state = tx.init(params)")


def _no_loss_scale(opt_state: Any) -> str:
    return (
        f"`opt_state` holds no loss scale; it is {_describe(opt_state)}. Wrap the optimizer before its init: "
        "tx = amp.loss_scaling(tx, policy), or tx = amp.no_loss_scaling(tx) to train without a loss scale"
    )


def _several(paths: list[tuple[Any, ...]]) -> str:
    names = [f"opt_state{jax.tree_util.keystr(path)}" for path in paths]
    return (
        f"`opt_state` holds {len(paths)} loss scales, expected one: {', '.join(names)}. Pass the part that belongs to "
        f"this loss, the one with {names[0]} for example"
    )


def _describe(tree: Any) -> str:
    if type(tree) is tuple:
        return f"a tuple of {', '.join(type(item).__name__ for item in tree) or 'nothing'}"
    if isinstance(tree, dict):
        return f"a dict with the keys {', '.join(map(repr, tree)) or '(none)'}"
    return f"of type {type(tree).__name__}"


# What may stand around a loss scale, or before it in a chain, and changes what it sees: type of state, name, harm, the
# right order.
_AROUND = (
    (optax.MultiStepsState, "optax.MultiSteps", "keeps a NaN in its accumulator for ever", "optax.MultiSteps(tx, ...)"),
    (
        optax.ApplyIfFiniteState,
        "optax.apply_if_finite",
        "hides overflows, so that the loss scale never falls",
        "optax.apply_if_finite(tx, ...)",
    ),
    (
        optax.PartitionState,
        "optax.multi_transform",
        "shows it the gradients of one group alone, so that an overflow in another group is applied",
        "optax.multi_transform({...}, labels)",
    ),
)
_BEFORE = (
    (
        optax.ZeroNansState,
        "optax.zero_nans",
        "hides overflows, so that a wrong step is applied",
        "optax.chain(optax.zero_nans(), tx)",
    ),
)


def _check_order(opt_state: Any, scale_path: tuple[Any, ...]) -> None:
    """Raise where an optimizer's structure shows that the loss scale isn't outermost and would miss overflows.

    A clip before the loss scale leaves no trace in the state; `unscale` makes that order right.
    """
    for kind, name, harm, inside in _AROUND:
        for path in nodes_of(opt_state, kind):
            if scale_path[: len(path)] == path:
                raise AmpValueError(_wrong_order(f"lies inside of {name}", harm, inside))
    for kind, name, harm, inside in _BEFORE:
        for path in nodes_of(opt_state, kind):
            if _is_before(path, scale_path):
                raise AmpValueError(_wrong_order(f"stands after {name}", harm, inside))
    for path, node in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_remembers_gradients):
        if _remembers_gradients(node) and _is_before(path, scale_path):
            raise AmpValueError(
                _wrong_order(
                    f"stands after an Optax transformation with a {type(node).__name__}",
                    "keeps a NaN for ever",
                    "optax.chain(...)",
                )
            )


def _remembers_gradients(node: Any) -> bool:
    """Whether a node is an Optax state with numbers that come from gradients, such as momentum."""
    # Hyperparameters are numbers that don't.
    if not type(node).__module__.startswith("optax.") or hasattr(node, "hyperparams"):
        return False
    return any(map(is_floating, jax.tree.leaves(node)))


def _is_before(path: tuple[Any, ...], scale_path: tuple[Any, ...]) -> bool:
    """Whether two paths part in one tuple, the first of them earlier: an Optax chain runs in the order of its tuple."""
    for here, there in zip(path, scale_path, strict=False):
        if here != there:
            first, second = getattr(here, "idx", None), getattr(there, "idx", None)
            return first is not None and second is not None and first < second
    return False


def _wrong_order(place: str, harm: str, inside: str) -> str:
    return (
        f"`opt_state` has a loss scale that {place}, which {harm}. The loss scale goes outermost: "
        f"amp.dynamic_loss_scaling({inside})"
    )
