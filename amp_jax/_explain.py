"""explain: the plan of a function, read into a report."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from amp_jax import _dtypes, _regions
from amp_jax._autocast import holds_modules, of_arrays, plan_of, split
from amp_jax._emit import emit
from amp_jax._graph import FLOAT32, size
from amp_jax._jaxpr import source_line
from amp_jax._plan import Plan, Step
from amp_jax._policy import get_policy
from amp_jax._report import Departure, Equation, Report
from amp_jax._residuals import saved_bytes


def explain(fun: Callable[..., Any], policy: Any = "auto") -> Callable[..., Report]:
    """The plan that `autocast(fun, policy)` follows, for given arguments.

    >>> import jax, jax.numpy as jnp, amp_jax as amp
    >>> report = amp.explain(lambda x, w: jax.nn.softmax(x @ w), "mixed_bfloat16")(jnp.ones((4, 8)), jnp.ones((8, 8)))
    >>> {e.primitive: e.results[0] for e in report.equations if e.primitive in ("dot_general", "exp")}
    {'dot_general': 'bfloat16', 'exp': 'float32'}

    Args:
        fun: Any function of pytrees.
        policy: A `Policy`, or what `get_policy` takes.

    Returns:
        A function of `fun`'s arguments that gives a `Report`; arrays may be `jax.ShapeDtypeStruct`s. Nothing is
        computed.
    """
    chosen = get_policy(policy)

    def explained(*args: Any, **kwargs: Any) -> Report:
        resolved = chosen.resolve()
        pure, args, kwargs = _without_modules(fun, args, kwargs)
        inputs = split((args, kwargs))
        _, plan = plan_of(pure, resolved, inputs, inputs.arrays)
        equations = tuple(_equations(plan, 0, 0, ""))
        totals = Counter({f"category:{k}": n for k, n in Counter(e.category for e in equations).items()})
        totals["equations"] = len(equations)
        totals["low"] = sum(any(r in ("bfloat16", "float16") for r in e.results) for e in equations)
        totals["float32"] = sum("float32" in e.results for e in equations)
        totals["casts"] = sum(e.casts for e in equations)
        totals["cast_bytes"] = sum(e.cast_bytes for e in equations)
        plain = _saved(of_arrays(pure, inputs), inputs.arrays)
        if plain is not None:
            ours = saved_bytes(lambda *arrays: emit(plan, arrays), inputs.arrays)
            narrow = 1 - np.dtype(resolved.compute_dtype).itemsize / FLOAT32.itemsize
            totals["saved_bytes"] = ours.total()
            totals["saved_bytes_float32"] = plain.total()
            totals["saved_bytes_low"] = plain.total() - int(plain[FLOAT32] * narrow)
        return Report(str(resolved), equations, dict(totals), tuple(_departures(equations)))

    return explained


def _without_modules(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
    if not holds_modules((args, kwargs)):
        return fun, args, kwargs
    from amp_jax.nnx import purified

    pure = purified(fun, args, kwargs)
    return pure.fun, pure.args, {}


def _saved(fun: Callable[..., Any], arrays: Any) -> Counter[Any] | None:
    """None for a function that has no derivative, which its author may not miss.

    The function itself has been traced before: these are JAX's ways to refuse the derivative of a `while_loop`, a
    callback, a kernel.
    """
    try:
        return saved_bytes(fun, arrays)
    except (ValueError, TypeError, NotImplementedError):
        return None


def _departures(equations: tuple[Equation, ...]) -> list[Departure]:
    behind: dict[int, list[Equation]] = {}
    for e in equations:
        if e.origin is not None:
            behind.setdefault(e.origin, []).append(e)
    firsts: dict[tuple[str, str, str], list[int]] = {}
    for n in behind:
        firsts.setdefault((equations[n].source, equations[n].primitive, equations[n].reason), []).append(n)
    found: list[Departure] = []
    for (source, primitive, reason), numbers in firsts.items():
        paths = tuple(dict.fromkeys(equations[n].path for n in numbers))
        members = [e for n in numbers for e in behind[n]]
        total = sum(e.result_bytes for e in members)
        found.append(Departure(source, paths, primitive, reason, len(members), total))
    return sorted(found, key=lambda d: -d.float32_bytes)


def _equations(plan: Plan, depth: int, number: int, around: str) -> Iterator[Equation]:
    """The plan's equations; `number` is that of the first, `around` the line of what holds the plan."""
    done: set[tuple[int, Any]] = set()
    origins: dict[int, int] = {}
    for step in plan.steps:
        operands = [plan.dtypes[i] if d is None else d for i, d in zip(step.inputs, step.operand_dtypes, strict=True)]
        results = [plan.dtypes[i] for i in step.outputs]
        cast = {
            (i, d): size(plan.avals[i]) * np.dtype(d).itemsize
            for i, d in zip(step.inputs, operands, strict=True)
            if d is not None and d != plan.dtypes[i] and plan.avals[i].dtype == FLOAT32 and i not in plan.constants
        }
        new = {k: n for k, n in cast.items() if k not in done}
        source = _source(step, around)
        done |= set(new)
        if any(_is_float(d) for d in (*operands, *results)):
            origin = _origin(plan, step, results, origins, number)
            origins.update(
                (i, origin) for i, d in zip(step.outputs, results, strict=True) if d == FLOAT32 and origin is not None
            )
            yield _equation(plan, step, operands, results, source, (len(new), sum(new.values())), depth, origin)
            number += 1
        for inner in step.plans:
            for equation in _equations(inner, depth + 1, number, source):
                yield equation
                number += 1


def _origin(plan: Plan, step: Step, results: Any, origins: dict[int, int], number: int) -> int | None:
    """Which equation took what a float32 step works on out of the compute dtype."""
    traced = [plan.avals[i].dtype == FLOAT32 for i in step.outputs if hasattr(plan.avals[i], "dtype")]
    if step.plans or FLOAT32 not in results or not any(traced):
        return None
    low = [i for i in step.inputs if plan.avals[i].dtype == FLOAT32 and plan.dtypes[i] != FLOAT32]
    if low or (step.category == "compute" and step.region is not None):
        return number
    return next((origins[i] for i in step.inputs if i in origins), None)


def _equation(
    plan: Plan,
    step: Step,
    operands: Any,
    results: Any,
    source: str,
    casts: tuple[int, int],
    depth: int,
    origin: int | None,
) -> Equation:
    given = zip(step.outputs, results, strict=True)
    return Equation(
        step.eqn.primitive.name,
        step.category,
        step.reason,
        tuple(_dtypes.name(d) for d in operands if _is_float(d)),
        tuple(_dtypes.name(d) for d in results if d is not None),
        _regions.module_path(step.scope),
        source,
        *casts,
        depth,
        origin,
        sum(size(plan.avals[i]) * np.dtype(d).itemsize for i, d in given if _is_float(d)),
    )


def _source(step: Step, around: str) -> str:
    """The innermost line outside of JAX: its own functions are traced once for all who call them."""
    lines = (source_line(eqn) for eqn in (step.eqn, *reversed(step.calls)))
    return next(filter(None, lines), around)


def _is_float(dtype: Any) -> bool:
    return dtype is not None and _dtypes.is_float(dtype)
