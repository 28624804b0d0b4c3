"""wrap for linen: the module itself, of a subclass made on the spot, whose methods run under autocast.

A linen module's variables live in *scopes* outside of it, so a method can't be traced like a function: it is *lifted*,
as `nn.remat` does it, which hands it its variables and takes back what it changed. A subclass of the same name keeps
the parameter tree, `isinstance`, attributes, `clone`, and hashing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift

from amp_jax import _regions
from amp_jax._autocast import autocast
from amp_jax._errors import AmpValueError
from amp_jax._graph import FLOAT32
from amp_jax._policy import Policy

POLICY, INSIDE = "amp_policy", "amp_inside"


def wrap(module: nn.Module, policy: Policy) -> nn.Module:
    """The same module under a policy; see `amp_jax.wrap`."""
    if hasattr(module, POLICY):
        raise AmpValueError(
            f"`amp.wrap(module, policy)`: {type(module).__name__} is wrapped already, with {getattr(module, POLICY)}. "
            "Wrap the plain module, or give parts of it a dtype of their own with `policy.override({path: spec})`."
        )
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return wrapped_class(type(module))(**fields, parent=module.parent, **{POLICY: policy})


@functools.cache
def wrapped_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass whose public methods run under the instance's policy."""
    body: dict[str, Any] = {
        name: _under_policy(method)
        for name, method in _methods(kind).items()
    }  # fmt: skip
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
    """What the author defined and others call: public methods and `__call__`, below `nn.Module` itself."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        members: dict[str, Any] = dict(vars(base))
        for name, held in members.items():
            called = callable(held) and not isinstance(held, (staticmethod, classmethod, type))
            if called and name != "setup" and (name == "__call__" or not name.startswith("_")):
                found[name] = held
    fields = {f.name for f in dataclasses.fields(kind)}
    return {name: method for name, method in found.items() if name not in fields}


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
    """autocast for a function of scopes."""
    policy = policy.resolve()
    plain = dataclasses.replace(policy, rules=())

    def inner(scopes_of: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def run(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            scopes = scopes_of(_as_float32(variables), rngs)
            with nn.intercept_methods(_Rules(policy, root)) if policy.rules else _regions.nothing():
                out = scope_fun(scopes, *args, **kwargs)
            return out, repack(scopes)

        run.__name__ = getattr(scope_fun, "__name__", "method")
        out, changed = autocast(run, plain)(variables, rngs, *args, **kwargs)
        return out, _stored(changed, policy)

    return lift.pack(inner, (True,), (True,), (True,), name="amp", enable_kwargs=True)


def _as_float32(variables: Any) -> Any:
    """Half-stored parameters as the float32 model sees them. The plan knows them as half: no cast is made for it."""
    with _regions.finished():
        return jax.tree.map(lambda x: x.astype(FLOAT32) if _is_half(x) else x, variables)


def _is_half(x: Any) -> bool:
    return getattr(x, "dtype", None) in (jax.numpy.bfloat16, jax.numpy.float16)


def _stored(groups: Any, policy: Policy) -> Any:
    """Parameters that were just created, in the param dtype; every other collection stays as it is."""

    def stored(collections: Any) -> Any:
        return {k: policy.cast_to_param(v) if k == "params" else v for k, v in collections.items()}

    is_collections = lambda x: isinstance(x, dict)  # noqa: E731
    return jax.tree.map(lambda x: stored(x) if is_collections(x) else x, groups, is_leaf=is_collections)


class _Rules:
    """A method interceptor that opens a region where a module's rule differs from that of the module around it."""

    def __init__(self, policy: Policy, root: tuple[str, ...]):
        self.policy, self.root = policy, root

    def __call__(self, method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "setup":
            return method(*args, **kwargs)
        path = module.path[len(self.root) :]
        here = self.policy.at("/".join(path)).compute_dtype
        around = self.policy.at("/".join(path[:-1])).compute_dtype
        with _regions.region(here) if here != around else _regions.nothing():
            return method(*args, **kwargs)
