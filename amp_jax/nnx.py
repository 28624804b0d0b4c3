"""wrap for nnx, and autocast for functions of nnx modules.

An nnx module holds its *Variables* (parameters, statistics, random counts) as attributes and updates them in place. To
be traced it is *split* into a static graph and its state, and *merged* again inside; what the function changed is
handed out and put back into the module that the caller holds.
"""

import contextvars
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from amp_jax import _casting, _regions
from amp_jax._autocast import Kept, planned
from amp_jax._borders import Running, border, leaving, running, without_own_dtype
from amp_jax._errors import AmpValueError
from amp_jax._graph import FLOAT32
from amp_jax._methods import Sealed, opened, public_methods, sealed, stored_dtype, without_rules
from amp_jax._policy import Policy

POLICY, SCOPED = "amp_policy", "amp_scoped"


def wrap(module: nnx.Module, policy: Policy) -> nnx.Module:
    """The same module under a policy, sharing its Variables; see `amp_jax.wrap`."""
    if hasattr(module, POLICY):
        raise AmpValueError(
            f"`amp.wrap(module, policy)`: {type(module).__name__} is wrapped already, with {getattr(module, POLICY)}. "
            "Wrap the plain module, or give parts of it a dtype of their own with `policy.override({path: spec})`."
        )
    if policy.rules:
        policy = policy.bind({_joined(path): type(m) for path, m in nnx.iter_modules(module)})
    wrapped = object.__new__(wrapped_class(type(module), policy))
    vars(wrapped).update(vars(module))
    if policy.param_dtype != FLOAT32 or policy.rules:
        params = nnx.state(wrapped, nnx.Param)
        resolved = policy.resolve()
        stored = lambda keys, x: _casting.cast_leaf(x, stored_dtype(resolved, _casting.path_of(keys), x.dtype))  # noqa: E731
        nnx.update(wrapped, jax.tree_util.tree_map_with_path(stored, params))
    return wrapped


@functools.cache
def wrapped_class(kind: type[nnx.Module], policy: Policy) -> type[nnx.Module]:
    """The subclass whose public methods run under the policy; an attribute for it would be a part of the model."""
    body: dict[str, Any] = {
        name: _under_policy(kind, policy, method)
        for name, method in public_methods(kind, nnx.Module).items()
        if name not in STATEFUL
    }
    body |= {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__repr__": lambda self: f"amp.wrap({kind.__repr__(self)}, {str(policy)!r})",
        "__reduce__": lambda self: (_unpickle, (kind, policy, dict(vars(self)))),
        POLICY: policy,
    }
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), body)


def _unpickle(kind: type[nnx.Module], policy: Policy, held: dict[str, Any]) -> nnx.Module:
    wrapped = object.__new__(wrapped_class(kind, policy))
    vars(wrapped).update(held)
    return wrapped


STATEFUL = frozenset(
    ("train", "eval", "set_attributes", "set_view", "init_cache", "set_mode", "add_axis", "remove_axis")
)
"""Methods that set attributes of the module itself; they compute nothing."""


def _under_policy(kind: type[nnx.Module], policy: Policy, method: Callable[..., Any]) -> Callable[..., Any]:
    kept: Kept = OrderedDict()
    run = functools.partial(planned, policy=without_rules(policy), kept=kept)

    @functools.wraps(method)
    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = type(self)
        become(self, kind)  # the merged copy is plain: its methods call each other without a border
        resolved = policy.resolve()
        _place_scopes(self, resolved)
        here = running(resolved, "")
        outside = here._replace(dtype=resolved.compute_dtype)
        token = _RUNNING.set(here)
        try:
            with border(here, outside), _own_dtype(self, resolved.rule_for("", "compute_dtype")):
                return method(self, *args, **kwargs)
        finally:
            _RUNNING.reset(token)
            _take_scopes(self)
            become(self, wrapped)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _casting.cast(with_updates(run, inside, (self, *args), kwargs), policy.resolve().at("").output_dtype)

    return call


_RUNNING: contextvars.ContextVar[Running] = contextvars.ContextVar("amp_running")
"""Follows the calls of one trace, as the call stack does; between traces it holds nothing."""


def _place_scopes(root: nnx.Module, policy: Policy) -> None:
    """Give each submodule its scope, and a region where its rule differs from that of the module that calls it."""
    for path, module in nnx.iter_modules(root):
        if path and not isinstance(module, nnx.Rngs):
            ruled = policy.rule_for(_joined(path), "compute_dtype")
            become(module, _scoped(type(module), running(policy, _joined(path)), ruled))


def _take_scopes(root: nnx.Module) -> None:
    for _, module in nnx.iter_modules(root):
        become(module, getattr(type(module), SCOPED, type(module)))


def become(module: nnx.Module, kind: type[nnx.Module]) -> None:
    """Change the class beneath nnx, which would note it as one more attribute of the model."""
    object.__setattr__(module, "__class__", kind)


def _own_dtype(module: nnx.Module, ruled: Any) -> AbstractContextManager[Any]:
    return without_own_dtype(module) if ruled else _regions.nothing()


@functools.lru_cache(maxsize=4096)
def _scoped(kind: type[nnx.Module], here: Running, ruled: Any) -> type[nnx.Module]:
    """The subclass for one instance whose methods are traced in a scope with its path."""

    def scoped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            caller = _RUNNING.get(here)
            if caller.path == here.path:
                return method(self, *args, **kwargs)
            token = _RUNNING.set(here)
            try:
                name = jax.named_scope(here.path.removeprefix(caller.path + "/"))
                with name, border(here, caller), _own_dtype(self, ruled):
                    out = method(self, *args, **kwargs)
            finally:
                _RUNNING.reset(token)
            return leaving(out, here, caller)

        return call

    methods = public_methods(kind, nnx.Module).items()
    body = {name: scoped(method) for name, method in methods if name not in STATEFUL}
    metaclass: Any = type(kind)
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, SCOPED: kind}
    return metaclass(kind.__name__, (kind,), body)


def _joined(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


class _Changed(NamedTuple):
    """What a function changed in its modules: leaves of their state, and the graph if that is another now.

    Attributes:
        leaves: New leaves of the state after the call, by number.
        old: The number that every other leaf had before the call, by its number now; sealed.
        state: The structure of the state after the call, sealed; None where it is as before.
        graph: The graph after the call; None where it is as before, attributes and submodules included.
    """

    leaves: dict[int, Any]
    old: Any = None
    state: Any = None
    graph: Any = None


class Pure(NamedTuple):
    """A function of modules as one of arrays: `fun(*args)` gives its result and what it changed in the modules."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    nodes: list[Any]


def with_updates(
    run: Callable[..., Any], fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `fun` through `run(pure, author)`, a transform of pure functions, and put back what it changed.

    Args:
        run: Gives the transformed pure function of a graph, its state and other arguments.
        fun: The function of modules.
        args: Its arguments; modules may stand anywhere in them.
        kwargs: Its keyword arguments.
    """
    pure = purified(fun, args, kwargs)
    out, changed = run(pure.fun, fun)(*pure.args)
    _put_back(pure.nodes, pure.args[1], changed)
    return opened(out)


def purified(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pure:
    """The modules among the arguments split into graph and state."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    nodes = [x for x in leaves if _is_node(x)]
    others = [None if _is_node(x) else x for x in leaves]
    where = tuple(_is_node(x) for x in leaves)
    graph, state = nnx.split(nodes)

    def pure(graph: Any, state: Any, others: Any) -> Any:
        stored = [getattr(x, "dtype", None) for x in jax.tree.leaves(state)]
        with _regions.finished():
            state = _as_float32(state)
        inside = nnx.merge(graph, state)
        before, structure = jax.tree.flatten(state)
        merged = iter(inside)
        given = [next(merged) if is_node else x for is_node, x in zip(where, others, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, given)
        out = sealed(fun(*args, **kwargs))
        return out, _changes(inside, graph, before, structure, stored)

    return Pure(pure, (graph, state, others), nodes)


def _changes(inside: list[Any], graph: Any, before: list[Any], structure: Any, stored: list[Any]) -> _Changed:
    """What differs from before; parameters leave in the dtype that they are stored in."""
    graph_after, after = nnx.split(inside)
    leaves, structure_after = jax.tree.flatten(after)
    if structure_after == structure and graph_after == graph:
        new = enumerate(zip(leaves, before, stored, strict=True))
        return _Changed({i: _casting.cast_leaf(x, dtype) for i, (x, old, dtype) in new if x is not old})
    number = {id(x): i for i, x in enumerate(before)}
    old = {i: number[id(x)] for i, x in enumerate(leaves) if id(x) in number}
    new = {i: x for i, x in enumerate(leaves) if i not in old}
    return _Changed(new, Sealed(old), Sealed(structure_after), graph_after)


def _put_back(nodes: list[Any], state: Any, changed: _Changed) -> None:
    leaves, structure = jax.tree.flatten(state)
    if changed.graph is not None:
        held = changed.leaves | {i: leaves[j] for i, j in changed.old.held.items()}
        after = jax.tree.unflatten(changed.state.held, [held[i] for i in range(len(held))])
        for old, new in zip(nodes, nnx.merge(changed.graph, after), strict=True):
            _adopt(old, new, set())
    elif changed.leaves:
        nnx.update(nodes, jax.tree.unflatten(structure, [changed.leaves.get(i, x) for i, x in enumerate(leaves)]))


def _adopt(old: Any, new: Any, seen: set[int]) -> None:
    """Make `old` what `new` is, keeping its own Variables and submodules wherever they are still of one kind."""
    if id(new) in seen:
        return
    seen.add(id(new))
    if isinstance(new, nnx.Variable):
        if old.get_value() is not new.get_value():
            old.set_value(new.get_value())
        return
    mine, theirs = dict(_attributes(old)), dict(_attributes(new))
    for name in mine.keys() - theirs.keys():
        delattr(old, name)
    for name, value in theirs.items():
        held = mine.get(name)
        if isinstance(value, (nnx.Pytree, nnx.Variable)) and type(held) is type(value):
            _adopt(held, value, seen)
        elif held is not value:
            setattr(old, name, value)


def _attributes(node: Any) -> Iterator[tuple[str, Any]]:
    return ((name, held) for name, held in vars(node).items() if not name.startswith("_pytree__"))


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Module, nnx.Rngs, nnx.Optimizer, nnx.Variable))


def _as_float32(state: Any) -> Any:
    """Half-stored parameters as the float32 model sees them. The plan knows them as half: no cast is made for it."""

    def cast(x: Any) -> Any:
        if not isinstance(x, nnx.Param) or x.dtype not in (jnp.bfloat16, jnp.float16):
            return x
        return x.replace(x.get_value().astype(FLOAT32))

    return jax.tree.map(cast, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
