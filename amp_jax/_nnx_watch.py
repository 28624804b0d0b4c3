"""An nnx model whose modules leave marks when they are called, for `tabulate`."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from amp_jax import _marks
from amp_jax._marks import Part, Watched
from amp_jax._methods import public_methods, sealed
from amp_jax._policy import Policy
from amp_jax.nnx import POLICY, STATEFUL, become, wrap


def unwrapped(module: nnx.Module, policy: Any) -> tuple[nnx.Module, Any]:
    """A plain module with the same variables, and the policy to watch it under."""
    wrapped = hasattr(module, POLICY)
    chosen = _marks.its_own(wrapped, policy, getattr(module, POLICY, None))
    if not wrapped:
        return module, chosen
    copy = nnx.clone(module, variables=False)
    become(copy, type(module).__mro__[1])
    return copy, chosen


def watched(module: nnx.Module, policy: Policy, method: str, args: Any, kwargs: Any) -> Watched:
    """The model under the policy, with its variables as `wrap` stores them; the module itself isn't touched."""
    graph, state = nnx.split(module)
    paths = {id(held): "/".join(map(str, path)) for path, held in nnx.iter_modules(module)}
    parts = _parts(module, paths)
    numbers = {part.path: number for number, part in parts.items()}
    after: list[Any] = []

    def stored(state: Any) -> Any:
        copy = nnx.merge(graph, state)
        for path, held in nnx.iter_modules(copy):
            name = "/".join(map(str, path))
            if name in numbers and name:
                become(held, _watched_class(type(held), numbers[name]))
        after[:] = nnx.split(wrap(copy, policy))
        return after[1]

    held = jax.eval_shape(stored, state)
    own: dict[str, list[Any]] = defaultdict(list)
    for names, variable in nnx.to_flat_state(nnx.filter_state(held, nnx.Param)):
        around = ("/".join(map(str, names[:n])) for n in range(len(names) - 1, -1, -1))
        own[next(path for path in around if path in numbers)] += jax.tree.leaves(variable)

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        model = nnx.merge(after[0], state)
        with _marks.inside(numbers[""]):
            out = getattr(model, method)(*args, **kwargs)
        return sealed(_marks.returned(numbers[""], out))

    return Watched(call, held, lambda: {n: p._replace(params=tuple(own[p.path])) for n, p in parts.items()})


def _parts(module: nnx.Module, paths: Mapping[int, str]) -> dict[int, Part]:
    """All modules by number, a shared one under its first path."""
    found: dict[str, tuple[type, dict[str, None]]] = {}

    def visit(held: Any, path: str) -> None:
        first = paths[id(held)]
        new = first not in found
        _, aliases = found.setdefault(first, (type(held), {}))
        if path != first:
            aliases[path] = None
        if new:
            for names, inner in _submodules(vars(held), ()):
                visit(inner, "/".join(filter(None, (first, *map(str, names)))))

    visit(module, "")
    return {n: Part(path, (kind,), tuple(also), ()) for n, (path, (kind, also)) in enumerate(found.items())}


def _submodules(held: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], nnx.Module]]:
    """The nearest modules in attributes, lists and dicts."""
    inner: Mapping[Any, Any] = {}
    if isinstance(held, nnx.Module) and path:
        if not isinstance(held, nnx.Rngs):
            yield path, held
    elif isinstance(held, Mapping):
        inner = held
    elif isinstance(held, (nnx.Dict, nnx.List, Sequence)) and not isinstance(held, (str, bytes)):
        inner = dict(held.items() if isinstance(held, nnx.Dict) else enumerate(held))
    for key, value in inner.items():
        if not (isinstance(key, str) and key.startswith("_pytree__")):
            yield from _submodules(value, (*path, key))


@functools.lru_cache(maxsize=4096)
def _watched_class(kind: type[nnx.Module], number: int) -> type[nnx.Module]:
    """The subclass for one instance whose methods leave marks."""

    def watched(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _marks.inside(number):
                out = method(self, *args, **kwargs)
            return _marks.returned(number, out)

        return call

    methods = public_methods(kind, nnx.Module).items()
    body = {name: watched(method) for name, method in methods if name not in STATEFUL}
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), {**body, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
