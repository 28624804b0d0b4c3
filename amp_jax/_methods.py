"""Which methods of a Flax module run under its policy: those that the author defined and others call."""

from collections.abc import Callable
from typing import Any


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
