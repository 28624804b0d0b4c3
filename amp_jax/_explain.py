"""The plan as a report: what autocast does with every equation and why, and what that costs."""

import html
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from amp_jax import _dtypes, _regions
from amp_jax._autocast import holds, plan_of, run_plan, split
from amp_jax._graph import FLOAT32, size
from amp_jax._jaxpr import source_line
from amp_jax._plan import Plan, Step
from amp_jax._policy import get_policy
from amp_jax._residuals import saved_bytes

SHOWN = 12
"""How many of the places that leave the compute dtype are printed, the largest first."""


class Equation(NamedTuple):
    """One equation of the plan.

    Attributes:
        primitive: Its name.
        category: The row of the table that it is in.
        reason: Why it runs in its dtype.
        operands: The dtype that each operand is read in.
        results: The dtype of each result.
        path: The module path or `jax.named_scope`s that it stands in.
        source: The line of the user's code.
        casts: How many of its operands are cast for it, each value once.
        cast_bytes: How many bytes these casts write.
        depth: 0 for the function itself, 1 inside a loop or branch, and so on.
        origin: For a float32 equation, the number (in `Report.equations`) of the one that took the values it works
            on out of the compute dtype; its own number where it did so itself. None where none was taken out.
        result_bytes: How many bytes its float results hold.
    """

    primitive: str
    category: str
    reason: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    path: str
    source: str
    casts: int
    cast_bytes: int
    depth: int
    origin: int | None
    result_bytes: int


class Departure(NamedTuple):
    """A line of code at which values leave the compute dtype.

    Attributes:
        source: The line.
        paths: The module paths or scopes that do so there.
        primitive: The operation that is the first in float32.
        reason: Why it is.
        equations: How many equations there and behind it run in float32 until values are in the compute dtype again.
        float32_bytes: How many bytes these give.
    """

    source: str
    paths: tuple[str, ...]
    primitive: str
    reason: str
    equations: int
    float32_bytes: int


class Report(NamedTuple):
    """What autocast does with a function under a policy; prints as text, and as a table in a notebook.

    Attributes:
        policy: The policy, resolved for this device.
        equations: One entry for each equation that computes with floats, in order.
        totals: Counts: `equations`, `low`, `float32`, `casts`, `cast_bytes`, and `category:...` for each category.
            Where the function has a derivative, `saved_bytes` are kept for the backward pass, inputs and parameters
            aside; it would be `saved_bytes_float32` without autocast and `saved_bytes_low` if all floats were in the
            compute dtype.
        departures: Where values leave the compute dtype, most float32 bytes first.
    """

    policy: str
    equations: tuple[Equation, ...]
    totals: dict[str, int]
    departures: tuple[Departure, ...]

    def __str__(self) -> str:
        """A summary, where and why float32 comes in, then every equation."""
        rows = [_row(e) for e in self.equations]
        widths = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(r[:4], widths, strict=True)), r[4]]).rstrip() for r in rows]
        return "\n".join([*self._summary(), *lines])

    def _repr_html_(self) -> str:
        cells = [[html.escape(c) for c in _row(e)] for e in self.equations]
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{c}</td>" for c in row) + "</tr>" for row in cells
        )
        names = ("operation", "dtypes", "category", "path", "why, and where from")
        titles = "".join(f"<th style='text-align:left'>{t}</th>" for t in names)
        summary = "<br>".join(html.escape(line) for line in self._summary())
        table = f"<table><tr>{titles}</tr>{body}</table>"
        return f"<p>{summary}</p><details><summary>every equation</summary>{table}</details>"

    def _summary(self) -> list[str]:
        total = self.totals
        lines = [
            f"autocast under {self.policy}",
            f"{total['equations']} equations: {total['low']} in the compute dtype, {total['float32']} in float32; "
            f"{total['casts']} casts of {_megabytes(total['cast_bytes'])}",
        ]
        if "saved_bytes" in total:
            lines.append(
                f"saved for the backward pass: {_megabytes(total['saved_bytes'])}; without autocast "
                f"{_megabytes(total['saved_bytes_float32'])}, all in the compute dtype "
                f"{_megabytes(total['saved_bytes_low'])}"
            )
        opaque = [e for e in self.equations if e.category == "opaque" and "float32" in e.operands]
        lines += [f"opaque, in float32: {e.primitive} at {e.path or '/'} ({e.source})" for e in opaque]
        lines += [
            f"float32 from here: {d.primitive} at {_some(d.paths)} ({d.source}): {d.reason}; {d.equations} equations, "
            f"{_megabytes(d.float32_bytes)}"
            for d in self.departures[:SHOWN]
        ]
        hidden = len(self.departures) - SHOWN
        if hidden > 0:
            lines.append(f"and {hidden} more in `.departures`")
        if self.departures:
            lines.append(
                "(an `astype(float32)` of what is float32 as traced leaves no equation; `amp.full_precision()` does)"
            )
        return lines


def _some(paths: tuple[str, ...]) -> str:
    return (paths[0] or "/") + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


def _row(e: Equation) -> tuple[str, str, str, str, str]:
    dtypes = f"{','.join(dict.fromkeys(e.operands))} -> {','.join(dict.fromkeys(e.results))}"
    return "  " * e.depth + e.primitive, dtypes, e.category, e.path or "/", f"{e.reason} ({e.source})"


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
        plain = _saved(lambda *arrays: _call(pure, inputs.join(arrays)), inputs.arrays)
        if plain is not None:
            ours = saved_bytes(lambda *arrays: run_plan(pure, resolved, inputs, arrays)[0], inputs.arrays)
            narrow = 1 - np.dtype(resolved.compute_dtype).itemsize / FLOAT32.itemsize
            totals["saved_bytes"] = ours.total()
            totals["saved_bytes_float32"] = plain.total()
            totals["saved_bytes_low"] = plain.total() - int(plain[FLOAT32] * narrow)
        return Report(str(resolved), equations, dict(totals), tuple(_departures(equations)))

    return explained


def _without_modules(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not holds(nnx.Module, (args, kwargs)):
        return fun, args, kwargs
    from amp_jax.nnx import purified

    pure = purified(fun, args, kwargs)
    return pure.fun, pure.args, {}


def _call(fun: Callable[..., Any], joined: Any) -> Any:
    args, kwargs = joined
    return fun(*args, **kwargs)


def _saved(fun: Callable[..., Any], arrays: Any) -> Counter[Any] | None:
    """None for a function that has no derivative, which its author may not miss."""
    try:
        return saved_bytes(fun, arrays)
    except (ValueError, TypeError, NotImplementedError):  # a `while_loop`, a callback, a kernel
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
