"""What wrap needs to know of a Flax module's methods: which run under the policy, and how they hand out their results.

A *sealed* result carries what is no array (numbers, strings, functions) beside its leaves, as it was returned: a traced
function may give arrays alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from amp_jax._graph import FLOAT32
from amp_jax._policy import Policy
from amp_jax._rule import Rule


def public_methods(kind: type, root: type) -> dict[str, Callable[..., Any]]:
    """`__call__` and the methods without an underscore that `kind` and its bases define below `root`."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(root)]):
        members: dict[str, Any] = dict(vars(base))
        for name, held in members.items():
            called = callable(held) and not isinstance(held, (staticmethod, classmethod, type))
            if called and (name == "__call__" or not name.startswith("_")):
                found[name] = held
    return found


def without_rules(policy: Policy) -> Policy:
    """The policy of the whole module, for autocast: the parts open regions of their own where rules say so."""
    # A float32 policy without rules would run the function as it is, regions included.
    rules = (Rule("", compute_dtype=FLOAT32),) if policy.rules and policy.compute_dtype == FLOAT32 else ()
    return dataclasses.replace(policy, rules=rules)


def stored_dtype(policy: Policy, path: str, dtype: Any) -> Any:
    """The dtype that a new parameter is kept in: a rule's, the author's where it isn't float32, or the policy's."""
    ruled = any(rule.param_dtype is not None and rule.covers(path) for rule in policy.rules)
    return policy.at(path).param_dtype if ruled or dtype == FLOAT32 else dtype


@jax.tree_util.register_static
class Sealed:
    """A result that is no array, as a tree without leaves."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sealed) and type(self.held) is type(other.held) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def sealed(out: Any, bare: type | tuple[type, ...] = ()) -> Any:
    """The results of a method, for a trace to return; those of the types `bare` stay as they are."""
    arrays = (jax.Array, np.ndarray, np.generic)
    whole = (*arrays, *(bare if isinstance(bare, tuple) else (bare,)))
    return jax.tree.map(lambda x: x if isinstance(x, whole) else Sealed(x), out)


def opened(out: Any) -> Any:
    """The results as the method returned them."""
    is_sealed = lambda x: isinstance(x, Sealed)  # noqa: E731
    return jax.tree.map(lambda x: x.held if is_sealed(x) else x, out, is_leaf=is_sealed)
