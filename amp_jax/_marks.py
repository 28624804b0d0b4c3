"""Which module an equation belongs to: marks in a program, for `tabulate`.

While a module is watched, everything that it computes stands in a `jax.named_scope` with the module's number, and what
it returns is named with it. Both go through every transform of JAX and change no dtype, so the finished program can be
read.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from amp_jax import _dtypes
from amp_jax._errors import AmpValueError


class Part(NamedTuple):
    """A module of a model.

    Attributes:
        path: Its first path.
        kinds: Its class, or classes where several modules have one path.
        aliases: The further paths of a shared module.
        params: The shapes and dtypes of its own parameters, as they are stored.
    """

    path: str
    kinds: tuple[type, ...]
    aliases: tuple[str, ...]
    params: tuple[Any, ...]


class Watched(NamedTuple):
    """A model under a policy, whose calls leave marks.

    Attributes:
        call: The model's call, its state first.
        state: The shapes and dtypes of its variables.
        parts: Gives its modules by number; it knows them all once `call` was traced.
    """

    call: Callable[..., Any]
    state: Any
    parts: Callable[[], Mapping[int, Part]]


_MARK = re.compile(r"amp\.module=(\d+)")


def inside(number: int) -> AbstractContextManager[Any]:
    """Everything traced inside belongs to this module, or to one that it calls."""
    return jax.named_scope(f"amp.module={number}")


def returned(number: int, out: Any) -> Any:
    """The results of a module, named; a name takes no time and no memory."""

    def named(x: Any) -> Any:
        is_float = isinstance(x, jax.Array) and _dtypes.is_float(x.dtype)
        return checkpoint_name(x, f"amp.module={number}") if is_float else x

    return jax.tree.map(named, out)


def around(scope: str) -> tuple[int, ...]:
    """The modules that a name stack lies in, the innermost last."""
    return tuple(map(int, _MARK.findall(scope)))


def returned_by(eqn: Any) -> int | None:
    """The module whose result this equation names."""
    found = _MARK.fullmatch(str(eqn.params.get("name"))) if eqn.primitive.name == "name" else None
    return int(found[1]) if found else None


def its_own(wrapped: bool, policy: Any, held: Any) -> Any:
    """The policy of a module that is to be watched: its own where it has one.

    Raises:
        AmpValueError: It has one, and another is asked for.
    """
    if wrapped and policy is not None:
        raise AmpValueError(
            f"`amp.tabulate(module, policy)`: the module is wrapped already, with {held}. Give None as the policy to "
            "see what that means, or the plain module to see another."
        )
    return held if wrapped else policy
