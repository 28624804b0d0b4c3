"""Where an optimizer that lands its updates on half numbers may stand inside of others, and how it starts there.

`master_weights` and `stochastic_rounding` give updates that fit the stored numbers bit for bit. What selects among
updates may stand around them: masks, groups, accumulation, skipping. What changes updates may not: half of such an
update leads between two numbers of the half dtype, is rounded away, and the run loses what the masters were for.
"""

from typing import Any

import jax
import optax

from amp_jax._errors import AmpValueError
from amp_jax._gradients import map_gradients
from amp_jax._inside import shown, zeros
from amp_jax._master import MasterWeightsState
from amp_jax._stochastic_optimizer import StochasticRoundingState

# By type of state: these pass an update on or leave it out. Other states of Optax's own belong to what changes it.
_AROUND = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.MaskedState,
    optax.MultiStepsState,
    optax.PartitionState,
)
_LANDING = {MasterWeightsState: "amp.master_weights", StochasticRoundingState: "amp.stochastic_rounding"}


def first_state(inner: optax.GradientTransformationExtraArgs, params: optax.Params) -> optax.OptState:
    """The state that an optimizer starts with: float32 as its first update will make it, masters for what is half.

    Raises:
        AmpValueError: the optimizer changes updates that have to stay as they are.
    """
    state = inner.init(shown(params))
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_lands)
    for path, node in nodes:
        if _lands(node):
            _check_place(state, path, _LANDING[type(node)])
    if not any(_keeps_masters(node) for _, node in nodes):
        return state
    # Whether a parameter needs a master can only be told from what is stored.
    stored = inner.init(map_gradients(lambda leaf: leaf, params, other=zeros))
    return jax.tree.map(lambda a, b: a if _keeps_masters(a) else b, stored, state, is_leaf=_keeps_masters)


def _check_place(state: Any, path: tuple[Any, ...], name: str) -> None:
    node = state
    for key in path:
        if type(node) is tuple and key.idx + 1 < len(node):
            raise AmpValueError(_wrong_place(name, "is followed by something else in an optax.chain"))
        if isinstance(node, tuple) and type(node).__module__.startswith("optax.") and not isinstance(node, _AROUND):
            raise AmpValueError(_wrong_place(name, f"lies inside of an Optax optimizer with a {type(node).__name__}"))
        node = _child(node, key)


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]


def _wrong_place(name: str, place: str) -> str:
    return (
        f"`tx` has {name} that {place}, which changes updates that fit the stored parameters bit for bit. It goes "
        f"directly inside of the loss scale: amp.loss_scaling({name}(optax.chain(...)), policy)"
    )


def _lands(node: Any) -> bool:
    return type(node) in _LANDING


def _keeps_masters(node: Any) -> bool:
    return isinstance(node, MasterWeightsState)
