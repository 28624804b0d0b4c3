"""wrap for nnx, and autocast for functions of nnx modules.

An nnx module holds its *Variables* (parameters, statistics, random counts) as attributes and updates them in place. To
be traced it is *split* into a static graph and its state, and *merged* again inside; what the function changed is
handed out and put back into the module that the caller holds.
"""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from amp_jax import _regions
from amp_jax._autocast import Kept, planned
from amp_jax._errors import AmpValueError
from amp_jax._graph import FLOAT32
from amp_jax._methods import public_methods
from amp_jax._policy import Policy

POLICY = "amp_policy"


def wrap(module: nnx.Module, policy: Policy) -> nnx.Module:
    """The same module under a policy, sharing its Variables; see `amp_jax.wrap`."""
    if hasattr(module, POLICY):
        raise AmpValueError(
            f"`amp.wrap(module, policy)`: {type(module).__name__} is wrapped already, with {getattr(module, POLICY)}. "
            "Wrap the plain module, or give parts of it a dtype of their own with `policy.override({path: spec})`."
        )
    if policy.rules:
        policy = policy.bind({"/".join(map(str, path)): type(m) for path, m in nnx.iter_modules(module)})
    wrapped = object.__new__(wrapped_class(type(module)))
    vars(wrapped).update(vars(module))
    setattr(wrapped, POLICY, policy)
    if policy.param_dtype != FLOAT32 or policy.rules:
        params = nnx.state(wrapped, nnx.Param)
        nnx.update(wrapped, policy.cast_to_param(params))
    return wrapped


@functools.cache
def wrapped_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """The subclass whose public methods run under the instance's policy."""
    body: dict[str, Any] = {
        name: _under_policy(kind, method)
        for name, method in public_methods(kind, nnx.Module).items()
        if name not in _STATEFUL
    }
    body |= {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce__": lambda self: (_unpickle, (kind, dict(vars(self)))),
        "amp_wraps": kind,
    }
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), body)


def _unpickle(kind: type[nnx.Module], held: dict[str, Any]) -> nnx.Module:
    wrapped = object.__new__(wrapped_class(kind))
    vars(wrapped).update(held)
    return wrapped


_STATEFUL = frozenset(("train", "eval", "set_attributes", "init_cache", "set_mode", "add_axis", "remove_axis"))
"""Methods that set attributes of the module itself; they compute nothing."""


def _under_policy(kind: type[nnx.Module], method: Callable[..., Any]) -> Callable[..., Any]:
    kept: Kept = OrderedDict()

    @functools.wraps(method)
    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__class__ = kind  # the merged copy is plain: its methods call each other without a border
        _place_rules(self, getattr(self, POLICY).resolve())
        return method(self, *args, **kwargs)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        policy: Policy = getattr(self, POLICY)
        run = functools.partial(planned, policy=dataclasses.replace(policy, rules=()), kept=kept)
        return policy.cast_to_output(with_updates(run, inside, (self, *args), kwargs))

    return call


def _place_rules(root: nnx.Module, policy: Policy) -> None:
    """Give each submodule its scope, and a region where its rule differs from that of the module around it."""
    for path, module in nnx.iter_modules(root):
        if not path or isinstance(module, nnx.Rngs):
            continue
        names = [str(p) for p in path]
        here = policy.at("/".join(names)).compute_dtype
        around = policy.at("/".join(names[:-1])).compute_dtype
        module.__class__ = _scoped(type(module), names[-1], here if here != around else None)


@functools.cache
def _scoped(kind: type[nnx.Module], name: str, dtype: Any) -> type[nnx.Module]:
    """The subclass for one instance whose methods are traced in a scope with its name."""

    def scoped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(name), _regions.region(dtype) if dtype is not None else _regions.nothing():
                return method(self, *args, **kwargs)

        return call

    body = {"__call__": scoped(kind.__call__)} if callable(getattr(kind, "__call__", None)) else {}  # noqa: B004
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **body})


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
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    nodes = [x for x in leaves if _is_node(x)]
    others = [None if _is_node(x) else x for x in leaves]
    where = tuple(_is_node(x) for x in leaves)
    graph, state = nnx.split(nodes)

    def pure(graph: Any, state: Any, others: Any) -> Any:
        with _regions.finished():
            state = jax.tree.map(_as_float32, state)
        inside = nnx.merge(graph, state)
        before, structure = jax.tree.flatten(state)
        merged = iter(inside)
        given = [next(merged) if is_node else x for is_node, x in zip(where, others, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, given)
        out = fun(*args, **kwargs)
        after = nnx.split(inside)[1]
        if jax.tree.structure(after) != structure:
            return out, after, {}
        changed = {i: x for i, (x, old) in enumerate(zip(jax.tree.leaves(after), before, strict=True)) if x is not old}
        return out, None, changed

    out, replaced, changed = run(pure, fun)(graph, state, others)
    if changed:
        now, structure = jax.tree.flatten(state)
        replaced = jax.tree.unflatten(structure, [changed.get(i, x) for i, x in enumerate(now)])
    if replaced is not None:
        nnx.update(nodes, replaced)
    return out


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Module, nnx.Rngs, nnx.Optimizer, nnx.Variable))


def _as_float32(x: Any) -> Any:
    """A half-stored parameter as the float32 model sees it. The plan knows it as half: no cast is made for it."""
    return x.astype(FLOAT32) if getattr(x, "dtype", None) in (jax.numpy.bfloat16, jax.numpy.float16) else x
