"""wrap for linen: the module itself, of a subclass made on the spot, whose methods run under autocast.

A linen module's variables live in *scopes* outside of it, so a method can't be traced like a function: it is *lifted*,
as `nn.remat` does it, which hands it its variables and takes back what it changed. A subclass of the same name keeps
the parameter tree, `isinstance`, attributes, `clone`, and hashing.
"""

import dataclasses
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import lift

from amp_jax import _casting, _regions
from amp_jax._autocast import Kept, autocast, planned
from amp_jax._closures import Same
from amp_jax._errors import AmpValueError
from amp_jax._graph import FLOAT32
from amp_jax._jaxpr import is_eager, is_tracer
from amp_jax._linen_rules import Lifted, Rules
from amp_jax._methods import opened, public_methods, sealed, stored_dtype, without_rules
from amp_jax._policy import Policy

POLICY, INSIDE, UNDER = "amp_policy", "amp_inside", "amp_under_policy"


def wrap(module: nn.Module, policy: Policy) -> nn.Module:
    """The same module under a policy; see `amp_jax.wrap`."""
    if hasattr(module, POLICY):
        raise AmpValueError(
            f"`amp.wrap(module, policy)`: {type(module).__name__} is wrapped already, with {getattr(module, POLICY)}. "
            "Wrap the plain module, or give parts of it a dtype of their own with `policy.override({path: spec})`."
        )
    kind = wrapped_class(type(module), policy)
    if isinstance(module.parent, nn.Module) and module.name is not None:  # made in a compact method: its name is taken
        object.__setattr__(module, "__class__", kind)
        return module
    return kind(**_fields(module), parent=module.parent)


def plain(module: nn.Module) -> nn.Module:
    """The module without its policy."""
    kind: Any = type(module).__mro__[1]
    return kind(**_fields(module))


@functools.cache
def wrapped_class(kind: type[nn.Module], policy: Policy) -> type[nn.Module]:
    """The subclass whose public methods run under the policy.

    The policy belongs to the class, not to a field: `nn.vmap` and `nn.scan` hand all fields to the class below.
    """
    body: dict[str, Any] = {name: _under_policy(method) for name, method in _methods(kind).items()}
    body |= {
        "__annotations__": {},
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__repr__": nn.nowrap(lambda self: f"amp.wrap({kind.__repr__(self)}, {str(policy)!r})"),
        "__reduce__": nn.nowrap(lambda self: (_unpickle, (kind, policy, _fields(self)))),
        "apply": nn.nowrap(_apply(kind)),
        "init_with_output": nn.nowrap(_init_with_output(kind)),
        POLICY: policy,
    }
    return type(kind.__name__, (kind,), body)


def _fields(module: nn.Module) -> dict[str, Any]:
    return {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}


def _unpickle(kind: type[nn.Module], policy: Policy, fields: dict[str, Any]) -> nn.Module:
    return wrapped_class(kind, policy)(**fields)


def _methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Public methods, but for `setup`, which only declares, and fields that hold functions."""
    left = {"setup", *(f.name for f in dataclasses.fields(kind))}
    return {name: method for name, method in public_methods(kind, nn.Module).items() if name not in left}


def _under_policy(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method under the policy of its instance; a call from within another method is part of that one."""
    if hasattr(method, "nowrap"):  # the author says that it touches no variables
        return method

    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        object.__setattr__(self, INSIDE, True)
        return sealed(method(self, *args, **kwargs), bare=nn.Module)

    functools.update_wrapper(inside, method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None or getattr(self, INSIDE, False):
            return method(self, *args, **kwargs)
        policy: Policy = getattr(self, POLICY).resolve()
        run = Lifted(policy, self.path, self.is_initializing(), method.__name__ == "__call__")
        lifted = nn.transforms.decorator_lift_transform(_lift, inside, run=run)
        out = opened(lifted(self, *args, **kwargs))
        return _casting.cast(out, policy.at("", {"": type(self)}).output_dtype)

    setattr(call, UNDER, True)
    return call


def _lift(scope_fun: Callable[..., Any], run: Lifted) -> Callable[..., Any]:
    """Autocast for a function of scopes."""
    policy, plain = run.policy, without_rules(run.policy)

    def inner(scopes_of: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def body(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            scopes, rules = scopes_of(_as_float32(variables, policy), rngs), Rules(run)
            with nn.intercept_methods(rules) if policy.rules else _regions.nothing():
                out = scope_fun(scopes, *args, **kwargs)
            changed = repack(scopes)
            bound = rules.bound((variables, changed)) if policy.rules else policy
            return out, _stored(changed, variables, bound)

        body.__name__ = getattr(scope_fun, "__name__", "method")
        if run.creates:  # as written: the initial values are the plain module's, bit for bit
            with _regions.traced_under(plain):  # a registered kernel takes half operands here too
                return body(variables, rngs, *args, **kwargs)
        return autocast(body, plain)(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="amp", enable_kwargs=True)


def _apply(kind: type[nn.Module]) -> Callable[..., Any]:
    kept: Kept = OrderedDict()

    @functools.wraps(kind.apply)
    def apply(
        self: Any,
        variables: Any,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Any = False,
        capture_intermediates: Any = False,
        **kwargs: Any,
    ) -> Any:
        author, method = method, _own(self, method)

        def run(_: Any, variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            settings = {"method": method, "mutable": mutable, "capture_intermediates": capture_intermediates}
            return sealed(kind.apply(self, variables, *args, rngs=rngs, **settings, **kwargs))

        given = (variables, rngs, args, kwargs)
        if self.scope is not None or not is_eager() or any(is_tracer(x) for x in jax.tree.leaves(given)):
            return opened(run(None, *given))
        called = getattr(kind, author or "__call__", None) if author is None or isinstance(author, str) else author
        key = _Key(frozen((self, author, mutable, capture_intermediates)))
        policy = without_rules(getattr(self, POLICY))
        return opened(planned(run, inspect.unwrap(called) if called else run, policy, kept)(key, *given))

    return apply


def _init_with_output(kind: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(kind.init_with_output)
    def init_with_output(self: Any, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return kind.init_with_output(self, rngs, *args, method=_own(self, method), **kwargs)

    return init_with_output


def _own(module: nn.Module, method: Any) -> Any:
    """What `method=` means here: methods of the plain module, and functions of it, run under the policy too."""
    if isinstance(method, str) and isinstance(getattr(module, method, None), nn.Module):
        return _under_policy(lambda self, *args, **kwargs: getattr(self, method)(*args, **kwargs))
    if not callable(method) or isinstance(method, nn.Module):
        return method
    fun = getattr(method, "__func__", method)
    held: Any = getattr(type(module), getattr(fun, "__name__", ""), None)
    if hasattr(held, UNDER) and inspect.unwrap(held) is inspect.unwrap(fun):
        return held
    return _under_policy(fun)


@dataclasses.dataclass(frozen=True)
class _Key:
    """What an eager call's program depends on, besides its arrays."""

    held: Hashable


def frozen(value: Any) -> Hashable:
    """A hashable account of modules, functions and settings; what can't be compared is equal to itself alone."""
    if isinstance(value, nn.Module):
        return type(value), tuple((name, frozen(x)) for name, x in _fields(value).items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(frozen(x) for x in value)
    if isinstance(value, Mapping):
        return type(value), tuple((k, frozen(x)) for k, x in value.items())
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value


def _as_float32(variables: Any, policy: Policy) -> Any:
    """Half-stored parameters as the float32 model sees them. The plan knows them as half: no cast is made for it."""
    if policy.param_dtype == policy.compute_dtype == FLOAT32 and not policy.rules:
        return variables  # they are the author's own
    cast = lambda x: x.astype(FLOAT32) if _is_half(x) else x  # noqa: E731
    with _regions.finished():
        return _for_collections(lambda n, tree, _: jax.tree.map(cast, tree) if n == "params" else tree, variables)


def _is_half(x: Any) -> bool:
    return getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)


def _stored(groups: Any, before: Any, policy: Policy) -> Any:
    """Parameters that were just created, in the param dtype; every other one, and every other collection, stays."""

    def collection(name: str, tree: Any, old: Any) -> Any:
        if name != "params":
            return tree
        dtypes = {path: x.dtype for path, x in jax.tree_util.tree_leaves_with_path(old)}

        def leaf(keys: Any, x: Any) -> Any:
            path = _casting.path_of(keys)
            return _casting.cast_leaf(x, dtypes[keys] if keys in dtypes else stored_dtype(policy, path, x.dtype))

        return jax.tree_util.tree_map_with_path(leaf, tree)

    return _for_collections(collection, groups, before)


def _for_collections(fun: Callable[[str, Any, Any], Any], groups: Any, others: Any = None) -> Any:
    """Apply a function to each collection in what a lifted function gets and gives: dicts of collections in tuples."""
    if isinstance(groups, Mapping):
        return {name: fun(name, tree, (others or {}).get(name)) for name, tree in groups.items()}
    if isinstance(groups, (tuple, list)):
        beside = others if others is not None else [None] * len(groups)
        return type(groups)(_for_collections(fun, g, o) for g, o in zip(groups, beside, strict=True))
    return groups
