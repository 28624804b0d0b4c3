"""What a function reads besides its arguments: closure cells, globals, the object that it is bound to.

An eager call of an autocast function reuses an earlier trace only if all of this is the same: a closed-over array that
was replaced must not go stale.
"""

import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

_ATOMS = (bool, int, float, complex, str, bytes, type(None))


class Same:
    """Equal to itself alone, and keeps what it stands for alive: an `id` could be given to another object later."""

    __slots__ = ("held",)

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class Closure(NamedTuple):
    """A hashable account of what a function closes over, and the objects in it."""

    key: tuple[Any, ...]
    arrays: frozenset[int]
    objects: tuple[Any, ...]


def closure_of(fun: Callable[..., Any]) -> Closure:
    """Follow cells, globals and bound objects through the functions that they hold."""
    found = list(_walk(fun, set()))
    key = tuple(x if isinstance(x, _ATOMS) else Same(x) for x in found)
    return Closure(key, frozenset(id(x) for x in found if isinstance(x, (jax.Array, np.ndarray))), tuple(found))


def _walk(held: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(held, _ATOMS):
        yield held
        return
    if id(held) in seen or isinstance(held, (types.ModuleType, type)):
        return
    seen.add(id(held))
    if isinstance(held, functools.partial):
        for part in (held.func, held.args, held.keywords):
            yield from _walk(part, seen)
    elif isinstance(held, types.MethodType):
        yield from _walk(held.__self__, seen)
        yield from _walk(held.__func__, seen)
    elif isinstance(held, types.FunctionType):
        if held.__module__ and held.__module__.split(".")[0] in ("jax", "flax", "optax", "numpy"):
            return
        for read in _reads(held):
            yield from _walk(read, seen)
    elif isinstance(held, (list, tuple, dict, set, frozenset)):
        for part in held.values() if isinstance(held, dict) else held:
            yield from _walk(part, seen)
    else:
        yield held
        if not isinstance(held, (jax.Array, np.ndarray)) and hasattr(held, "__dict__"):
            # Numbers count where they are what an object is made of, as an array does; a counter that a trainer keeps
            # is no reason to trace again.
            whole = dataclasses.is_dataclass(held)
            for part in vars(held).values():
                yield from (x for x in _walk(part, seen) if whole or not isinstance(x, _ATOMS))


def _reads(fun: types.FunctionType) -> Iterator[Any]:
    for cell in fun.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell that isn't filled yet: a function that refers to itself
            continue
    for name in _globals(fun.__code__):
        if name in fun.__globals__:
            yield fun.__globals__[name]
    yield from fun.__defaults__ or ()
    yield from (fun.__kwdefaults__ or {}).values()


@functools.lru_cache(maxsize=1024)
def _globals(code: types.CodeType) -> tuple[str, ...]:
    """The global names that the code loads, functions defined inside it included."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for const in code.co_consts:
        names += _globals(const) if isinstance(const, types.CodeType) else ()
    return tuple(dict.fromkeys(names))
