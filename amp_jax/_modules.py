"""nnx modules in a tree: their arrays in their place, and modules made of such a tree again."""

import sys
from collections.abc import Callable
from typing import Any

import jax


def holds_modules(tree: Any) -> bool:
    """Whether there is an nnx module (or an `nnx.Optimizer`) anywhere in a tree."""
    # Flax can only be in play if someone has imported it.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(isinstance(part, nnx.Pytree) for part in _parts(tree, nnx)[0])


def split(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The tree with each nnx module replaced by its state, and what makes new modules of such a tree.

    What two modules share is held once, by the first, and is shared again in the new ones.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
    >>> arrays, with_modules = split({"layer": layer, "again": layer, "step": 3})
    >>> jax.tree.map(jnp.shape, nnx.to_pure_dict(arrays["again"])), arrays["step"]
    ({'bias': (2,), 'kernel': (1, 2)}, 3)
    >>> new = with_modules(arrays)
    >>> new["layer"] is new["again"], new["layer"] is layer
    (True, False)
    """
    if not holds_modules(tree):
        return tree, lambda arrays: arrays
    from flax import nnx

    parts, around = _parts(tree, nnx)
    # All at once, for what they share; and they alone, since nnx takes a number beside them for static.
    graph, states = nnx.split({i: part for i, part in enumerate(parts) if isinstance(part, nnx.Pytree)})
    held = [states.get(i, {}) if isinstance(part, nnx.Pytree) else part for i, part in enumerate(parts)]

    def with_modules(arrays: Any) -> Any:
        new = around.flatten_up_to(arrays)
        modules = nnx.merge(graph, nnx.State({i: new[i] for i in states}))
        return jax.tree.unflatten(around, [modules.get(i, part) for i, part in enumerate(new)])

    return jax.tree.unflatten(around, held), with_modules


def _parts(tree: Any, nnx: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))
