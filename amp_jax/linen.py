"""wrap for linen: the module itself, of a subclass made on the spot, whose methods run under autocast.

A linen module's variables live in *scopes* outside of it, so a method can't be traced like a function: it is *lifted*,
as `nn.remat` does it, which hands it its variables and takes back what it changed. A subclass of the same name keeps
the parameter tree, `isinstance`, attributes, `clone`, and hashing.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import lift

from amp_jax import _regions
from amp_jax._autocast import autocast
from amp_jax._errors import AmpValueError
from amp_jax._graph import FLOAT32
from amp_jax._methods import public_methods
from amp_jax._policy import Policy

POLICY, INSIDE = "amp_policy", "amp_inside"


def wrap(module: nn.Module, policy: Policy) -> nn.Module:
    """The same module under a policy; see `amp_jax.wrap`."""
    if hasattr(module, POLICY):
        raise AmpValueError(
            f"`amp.wrap(module, policy)`: {type(module).__name__} is wrapped already, with {getattr(module, POLICY)}. "
            "Wrap the plain module, or give parts of it a dtype of their own with `policy.override({path: spec})`."
        )
    kind = wrapped_class(type(module))
    if isinstance(module.parent, nn.Module) and module.name is not None:  # made in a compact method: its name is taken
        object.__setattr__(module, "__class__", kind)
        object.__setattr__(module, POLICY, policy)
        return module
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return kind(**fields, parent=module.parent, **{POLICY: policy})


@functools.cache
def wrapped_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass whose public methods run under the instance's policy."""
    body: dict[str, Any] = {name: _under_policy(method) for name, method in _methods(kind).items()}
    body |= {
        "__annotations__": {POLICY: Policy},
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce__": lambda self: (_unpickle, (kind, *_fields(self))),
        POLICY: dataclasses.field(kw_only=True, default=None),
    }
    return type(kind.__name__, (kind,), body)


def _fields(module: nn.Module) -> tuple[dict[str, Any], Policy]:
    names = [f.name for f in dataclasses.fields(module) if f.init and f.name not in ("parent", POLICY)]
    return {name: getattr(module, name) for name in names}, getattr(module, POLICY)


def _unpickle(kind: type[nn.Module], fields: dict[str, Any], policy: Policy) -> nn.Module:
    return wrapped_class(kind)(**fields, **{POLICY: policy})


def _methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Public methods, but for `setup`, which only declares, and fields that hold functions."""
    left = {"setup", *(f.name for f in dataclasses.fields(kind))}
    return {name: method for name, method in public_methods(kind, nn.Module).items() if name not in left}


def _under_policy(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method under the policy of its instance; a call from within another method is part of that one."""

    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        object.__setattr__(self, INSIDE, True)
        return method(self, *args, **kwargs)

    functools.update_wrapper(inside, method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        policy: Policy | None = getattr(self, POLICY)
        if policy is None or self.scope is None or getattr(self, INSIDE, False):
            return method(self, *args, **kwargs)
        lifted = nn.transforms.decorator_lift_transform(_lift, inside, policy=policy, root=self.path)
        return policy.cast_to_output(lifted(self, *args, **kwargs))

    return call


def _lift(scope_fun: Callable[..., Any], policy: Policy, root: tuple[str, ...]) -> Callable[..., Any]:
    """Autocast for a function of scopes."""
    policy = policy.resolve()
    plain = dataclasses.replace(policy, rules=())

    def inner(scopes_of: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def run(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            scopes, rules = scopes_of(_as_float32(variables), rngs), _Rules(policy, root)
            with nn.intercept_methods(rules) if policy.rules else _regions.nothing():
                out = scope_fun(scopes, *args, **kwargs)
            changed = repack(scopes)
            bound = rules.bound((variables, changed)) if policy.rules else policy
            return out, _stored(changed, bound)

        run.__name__ = getattr(scope_fun, "__name__", "method")
        return autocast(run, plain)(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="amp", enable_kwargs=True)


def _as_float32(variables: Any) -> Any:
    """Half-stored parameters as the float32 model sees them. The plan knows them as half: no cast is made for it."""
    with _regions.finished():
        return jax.tree.map(lambda x: x.astype(FLOAT32) if _is_half(x) else x, variables)


def _is_half(x: Any) -> bool:
    return getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)


def _stored(groups: Any, policy: Policy) -> Any:
    """Parameters that were just created, in the param dtype; every other collection stays as it is."""
    return _for_collections(lambda name, tree: policy.cast_to_param(tree) if name == "params" else tree, groups)


def _for_collections(fun: Callable[[str, Any], Any], groups: Any) -> Any:
    """Apply a function to each collection in what a lifted function gets and gives: dicts of collections in tuples."""
    if isinstance(groups, Mapping):
        return {name: fun(name, tree) for name, tree in groups.items()}
    return type(groups)(_for_collections(fun, g) for g in groups) if isinstance(groups, (tuple, list)) else groups


class _Rules:
    """A method interceptor that opens a region where a module's rule differs from that of the module around it."""

    def __init__(self, policy: Policy, root: tuple[str, ...]):
        self.policy, self.root = policy, root
        self.modules: dict[str, type] = {}
        """The type of each module that was called, by path."""

    def __call__(self, method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "setup":
            return method(*args, **kwargs)
        path = module.path[len(self.root) :]
        self.modules["/".join(path)] = type(module)
        here = self.policy.at("/".join(path), self.modules).compute_dtype
        around = self.policy.at("/".join(path[:-1]), self.modules).compute_dtype if path else self.policy.compute_dtype
        with _regions.region(here) if here != around else _regions.nothing():
            return method(*args, **kwargs)

    def bound(self, groups: Any) -> Policy:
        """The policy with its class keys as paths, checked against the modules that were called or hold variables.

        A class key may stay unmatched by a method that doesn't call such a module; a path has to exist.
        """
        held = dict.fromkeys(_module_paths(groups), nn.Module)
        known = held | self.modules
        called = [r for r in self.policy.rules if isinstance(r.key, str) or any(r.matches(*m) for m in known.items())]
        creates = any("params" in collections for collections in _collections(groups[1]))
        rules = self.policy.rules if creates else tuple(called)
        return dataclasses.replace(self.policy, rules=rules).bind(known)


def _collections(groups: Any) -> list[Mapping[str, Any]]:
    if isinstance(groups, Mapping):
        return [groups]
    return [c for g in groups for c in _collections(g)] if isinstance(groups, (tuple, list)) else []


def _module_paths(groups: Any) -> set[str]:
    """The paths of all modules that hold variables, and of those around them."""
    paths: set[str] = set()
    for collections in _collections(groups):
        for tree in collections.values():
            for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
                names = [str(getattr(k, "key", k)) for k in keys]
                paths |= {"/".join(names[:n]) for n in range(len(names))}
    return paths
