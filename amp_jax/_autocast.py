"""autocast: run a function in mixed precision, each operation in the dtype that suits it.

A *trace* records what the function does; the plan decides (`_plan`), and the emitted function does it (`_emit`). A
*region* is a part of the function that runs under a compute dtype of its own (`precision`, `full_precision`).
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np

from amp_jax import _regions
from amp_jax._closures import Closure, Same, closure_of
from amp_jax._emit import emit
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._graph import FLOAT32, dtype_of
from amp_jax._jaxpr import Trace, is_eager, is_tracer, scopes, trace
from amp_jax._plan import Plan, Rules, entry, plan
from amp_jax._policy import Policy, get_policy

F = TypeVar("F", bound=Callable[..., Any])
KEPT = 64
"""How many traces of one function are kept for eager calls."""


class Split(NamedTuple):
    """The arguments of a call: arrays, and everything else, which the trace takes as it is."""

    arrays: list[Any]
    static: tuple[Any, ...]
    tree: Any

    def join(self, arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(self.tree, [next(given) if x is _ARRAY else x for x in self.static])


_ARRAY: Any = object()


def split(args: Any) -> Split:
    leaves, tree = jax.tree.flatten(args)
    arrays = [x for x in leaves if _is_array(x)]
    return Split(arrays, tuple(_ARRAY if _is_array(x) else x for x in leaves), tree)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, (jax.Array, np.generic, jax.ShapeDtypeStruct))


@overload
def autocast(fun: F, policy: Any = "auto") -> F: ...
@overload
def autocast(fun: None = None, policy: Any = "auto") -> Callable[[F], F]: ...
def autocast(fun: Any = None, policy: Any = "auto") -> Any:
    """Run a function in mixed precision: matmuls and convolutions in the compute dtype, what needs float32 in float32.

    The whole computation is looked at before a dtype is chosen, inside jit, scan, cond, remat and custom derivative
    rules too. The function itself stays as it is, and what it returns has the dtypes that it would have had.

    >>> import jax, jax.numpy as jnp, amp_jax as amp
    >>> def layer(x, w):
    ...     return jax.nn.relu(x @ w)
    >>> x, w = jnp.ones((2, 8)), jnp.ones((8, 4))
    >>> fast = amp.autocast(layer, policy="mixed_bfloat16")
    >>> fast(x, w).dtype
    dtype('float32')
    >>> "bf16[2,4] = dot_general" in str(jax.make_jaxpr(fast)(x, w))
    True
    >>> @amp.autocast(policy="mixed_float16")
    ... def loss(w, x):
    ...     return jnp.mean(jnp.square(x @ w))
    >>> jax.grad(loss)(w, x).dtype
    dtype('float32')

    Args:
        fun: Any function of pytrees. Arrays are traced; everything else (Python numbers, strings, functions) is taken
            as it is. Arguments that are `nnx.Module`s keep their state updates.
        policy: A `Policy`, or what `get_policy` takes. Its compute dtype and its rules on scopes hold here; param and
            output dtype are `wrap`'s. `"auto"` asks for the device when the function is called.

    Returns:
        A function like `fun`; it composes with jit, grad, vmap, scan, remat and shard_map on either side. A second
        eager call with arrays of the same shapes and dtypes doesn't trace again.

    Raises:
        AmpTypeError: `fun` can't be called, or closes over an `nnx.Module`.

    The idea is `torch.autocast`'s; the difference is that a plan of the whole program decides, not each operation for
    itself.
    """
    chosen = get_policy(policy)
    if fun is None:
        return lambda f: autocast(f, chosen)
    if not callable(fun):
        raise AmpTypeError(
            f"`amp.autocast(fun)` expects a function, got {type(fun).__name__}: {fun!r:.80}. "
            "To give the policy alone, write `@amp.autocast(policy=...)`."
        )
    kept: Kept = OrderedDict()

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        if holds_modules((args, kwargs)):
            from amp_jax.nnx import with_updates

            return with_updates(functools.partial(planned, policy=chosen, kept=kept), fun, args, kwargs)
        return planned(fun, fun, chosen, kept)(*args, **kwargs)

    return autocast_fun


def holds_modules(args: Any) -> bool:
    """Whether an nnx Module is anywhere in a tree."""
    nnx: Any = sys.modules.get("flax.nnx")  # it can only be in play if someone has imported it
    if nnx is None:
        return False
    is_module = lambda x: isinstance(x, nnx.Module)  # noqa: E731
    return any(map(is_module, jax.tree.leaves(args, is_leaf=is_module)))


def _plain(policy: Policy) -> bool:
    return policy.compute_dtype == FLOAT32 and not policy.rules and not policy.ops


Kept = OrderedDict[Any, tuple[Callable[..., Any], list[Any]]]
"""Jitted traces of one function for eager calls, and for each the arrays that make it unfit for another call."""


def planned(fun: Callable[..., Any], author: Callable[..., Any], policy: Policy, kept: Kept) -> Callable[..., Any]:
    """`fun`, planned and emitted under the trace that calls it; eagerly, through jit, kept for the next call.

    `author` is the function that the user wrote, where `fun` is one made around it for this call.
    """
    unresolved = policy

    def call(*args: Any, **kwargs: Any) -> Any:
        policy = unresolved.resolve()
        if _plain(policy):
            with _regions.region(FLOAT32):
                return fun(*args, **kwargs)
        inputs = split((args, kwargs))
        if not is_eager() or any(is_tracer(x) for x in inputs.arrays):
            return run_plan(fun, policy, inputs, inputs.arrays)[0]
        closure = closure_of(author)
        _refuse_modules(closure)
        key = _key(author, policy, inputs, closure)
        if key not in kept:
            kept[key] = _jitted(fun, policy, inputs, closure)
            while len(kept) > KEPT:
                kept.popitem(last=False)
        jitted, hidden = kept[key]
        out = jitted(*inputs.arrays)
        if hidden:
            kept.pop(key, None)
        return out

    return call


def _jitted(fun: Callable[..., Any], policy: Policy, inputs: Split, closure: Closure) -> tuple[Callable[..., Any], Any]:
    """The planned function under jit, and a list of the arrays that it read from where we can't see them replaced."""
    hidden: list[Any] = []

    def flat(*arrays: Any) -> Any:
        before = jax.live_arrays()
        out, traced = run_plan(fun, policy, inputs, arrays)
        old = {id(x) for x in before} - closure.arrays
        hidden[:] = [c for c in traced.consts if id(c) in old]
        return out

    return jax.jit(flat), hidden


def _key(fun: Any, policy: Policy, inputs: Split, closure: Closure) -> Any:
    static = tuple((type(x), _hashable(x)) for x in inputs.static if x is not _ARRAY)
    where = tuple(x is _ARRAY for x in inputs.static)
    return Same(fun), policy, inputs.tree, where, static, closure.key


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return value


def _refuse_modules(closure: Closure) -> None:
    nnx: Any = sys.modules.get("flax.nnx")
    for held in closure.objects:
        if nnx is not None and isinstance(held, nnx.Module):
            raise AmpTypeError(
                f"`amp.autocast(fun)`: `fun` closes over an nnx.Module ({type(held).__name__}), whose state updates "
                "would be lost. Pass it as an argument: `amp.autocast(lambda model, x: model(x))(model, x)`."
            )


def run_plan(fun: Callable[..., Any], policy: Policy, inputs: Split, arrays: Sequence[Any]) -> tuple[Any, Trace]:
    """Trace, plan, and run the plan on `arrays`."""
    traced, made = plan_of(fun, policy, inputs, arrays)
    with _regions.finished():
        out = emit(made, arrays)
    return jax.tree.unflatten(jax.tree.structure(traced.shapes), out), traced


def of_arrays(fun: Callable[..., Any], inputs: Split) -> Callable[..., Any]:
    """The function as one of its arrays alone."""

    def flat(*arrays: Any) -> Any:
        args, kwargs = inputs.join(arrays)
        return fun(*args, **kwargs)

    return flat


def plan_of(fun: Callable[..., Any], policy: Policy, inputs: Split, arrays: Sequence[Any]) -> tuple[Trace, Plan]:
    """Trace a function and plan it."""
    try:
        with _regions.traced_under(policy):
            traced = trace(of_arrays(fun, inputs), *arrays)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            f"amp.autocast traces `{getattr(fun, '__name__', fun)}`, as jax.jit does: a Python `if`, `while` or "
            "`int()` can't look at an array's value there. Use jnp.where or lax.cond, or pass the value as a Python "
            "number, not an array."
        )
        raise
    _check_rules(policy, traced)
    entries = [entry(v.aval) for v in traced.jaxpr.invars]
    returned = [FLOAT32 if dtype_of(v.aval) == FLOAT32 else None for v in traced.jaxpr.outvars]
    return traced, plan(traced.jaxpr, traced.consts, entries, rules_of(policy), returned=returned)


def _check_rules(policy: Policy, traced: Trace) -> None:
    """In plain autocast a path is a chain of `jax.named_scope`s; a rule has to name one that there is."""
    for rule in policy.rules:
        if isinstance(rule.key, type):
            raise AmpTypeError(
                f"`policy` has a rule for the class {rule.key.__name__}: autocast sees operations, not modules. Use "
                "`amp.wrap(module, policy)`, or a rule for a path of `jax.named_scope`s."
            )
    if policy.rules:
        paths = {_regions.module_path(scope) for scope in scopes(traced.jaxpr)}
        policy.bind({"/".join(p.split("/")[:n]): object for p in paths for n in range(p.count("/") + 2)})


def rules_of(policy: Policy) -> Rules:
    """The planner's view of a policy, remembering what it said about each scope.

    Raises:
        AmpValueError: The policy computes in float64.
    """
    for dtype in (policy.compute_dtype, *(r.compute_dtype for r in policy.rules)):
        if dtype is not None and np.dtype(dtype).itemsize > FLOAT32.itemsize:
            raise AmpValueError(
                f"`policy` is {policy}: autocast computes in bfloat16, float16 or float32. What is float64 in your "
                "function stays float64 under any policy."
            )
    region = functools.lru_cache(maxsize=None)(lambda scope: _regions.compute_dtype(scope, policy))
    return Rules(region, dict(policy.ops), policy)


@contextmanager
def precision(spec: Any) -> Generator[None]:
    """Run everything inside under this compute dtype, forward and backward, as a `with` block or a decorator.

    The region holds wherever it sits: in a scan, under jit, in a rematerialised block. The innermost one wins. Outside
    `autocast` it changes nothing.

    >>> import jax, jax.numpy as jnp, amp_jax as amp
    >>> @amp.autocast(policy="mixed_bfloat16")
    ... def f(x, w):
    ...     with amp.precision("float32"):
    ...         y = x @ w
    ...     return y @ w
    >>> jaxpr = str(jax.make_jaxpr(f)(jnp.ones((4, 4)), jnp.ones((4, 4))))
    >>> "f32[4,4] = dot_general" in jaxpr and "bf16[4,4] = dot_general" in jaxpr
    True

    Args:
        spec: A policy or what `get_policy` takes; its compute dtype counts.

    The mark is a `jax.named_scope`: there is no global or thread-local state.
    """
    with _regions.region(get_policy(spec).compute_dtype):
        yield


def full_precision() -> Any:
    """Run everything inside in float32, whatever the policy around it says: `precision("float32")`.

    >>> import jax, jax.numpy as jnp, amp_jax as amp
    >>> @amp.full_precision()
    ... def exact(x, w):
    ...     return x @ w
    >>> f = amp.autocast(exact, policy="mixed_float16")
    >>> "f16" in str(jax.make_jaxpr(f)(jnp.ones((2, 2)), jnp.ones((2, 2))))
    False
    """
    return precision("float32")
