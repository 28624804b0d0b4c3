"""The plan as a report: what autocast does with every equation, and why."""

import html
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from amp_jax import _dtypes, _regions
from amp_jax._autocast import plan_of, split
from amp_jax._graph import FLOAT32, size
from amp_jax._jaxpr import source_line
from amp_jax._plan import Plan, Step
from amp_jax._policy import get_policy


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


class Report(NamedTuple):
    """What autocast does with a function under a policy; prints as text, and as a table in a notebook.

    Attributes:
        policy: The policy, resolved for this device.
        equations: One entry for each equation that computes with floats, in order.
        totals: Counts: `equations`, `low`, `float32`, `casts`, `cast_bytes`, and `category:...` for each category.
    """

    policy: str
    equations: tuple[Equation, ...]
    totals: dict[str, int]

    def __str__(self) -> str:
        """A summary, opaque operations that got float32, then every equation."""
        total = self.totals
        lines = [
            f"autocast under {self.policy}",
            f"{total['equations']} equations: {total['low']} in the compute dtype, {total['float32']} in float32; "
            f"{total['casts']} casts of {total['cast_bytes'] / 1e6:.3g} MB",
        ]
        opaque = [e for e in self.equations if e.category == "opaque" and "float32" in e.operands]
        lines += [f"opaque, in float32: {e.primitive} at {e.path or '/'} ({e.source})" for e in opaque]
        rows = [_row(e) for e in self.equations]
        widths = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
        lines += ["  ".join([*(c.ljust(w) for c, w in zip(r[:4], widths, strict=True)), r[4]]).rstrip() for r in rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head, *rest = str(self).split("\n", 2)[:2]
        cells = [[html.escape(c) for c in _row(e)] for e in self.equations]
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{c}</td>" for c in row) + "</tr>" for row in cells
        )
        names = ("operation", "dtypes", "category", "path", "why, and where from")
        titles = "".join(f"<th style='text-align:left'>{t}</th>" for t in names)
        summary = "<br>".join(html.escape(line) for line in (head, *rest))
        return f"<details open><summary>{summary}</summary><table><tr>{titles}</tr>{body}</table></details>"


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
        inputs = split((args, kwargs))
        _, plan = plan_of(fun, resolved, inputs, inputs.arrays)
        equations = tuple(_equations(plan, 0))
        totals = Counter({f"category:{k}": n for k, n in Counter(e.category for e in equations).items()})
        totals["equations"] = len(equations)
        totals["low"] = sum(any(r in ("bfloat16", "float16") for r in e.results) for e in equations)
        totals["float32"] = sum("float32" in e.results for e in equations)
        totals["casts"] = sum(e.casts for e in equations)
        totals["cast_bytes"] = sum(e.cast_bytes for e in equations)
        return Report(str(resolved), equations, dict(totals))

    return explained


def _equations(plan: Plan, depth: int) -> Iterator[Equation]:
    done: set[tuple[int, Any]] = set()
    for step in plan.steps:
        operands = [plan.dtypes[i] if d is None else d for i, d in zip(step.inputs, step.operand_dtypes, strict=True)]
        results = [plan.dtypes[i] for i in step.outputs]
        cast = {
            (i, d): size(plan.avals[i]) * np.dtype(d).itemsize
            for i, d in zip(step.inputs, operands, strict=True)
            if d is not None and d != plan.dtypes[i] and plan.avals[i].dtype == FLOAT32 and i not in plan.constants
        }
        new = {k: n for k, n in cast.items() if k not in done}
        done |= set(new)
        if any(_is_float(d) for d in (*operands, *results)):
            yield _equation(step, operands, results, len(new), sum(new.values()), depth)
        for inner in step.plans:
            yield from _equations(inner, depth + 1)


def _equation(step: Step, operands: Any, results: Any, casts: int, cast_bytes: int, depth: int) -> Equation:
    names = (
        tuple(_dtypes.name(d) for d in operands if _is_float(d)),
        tuple(_dtypes.name(d) for d in results if d is not None),
    )
    path = _regions.module_path(step.scope)
    primitive = step.eqn.primitive.name
    return Equation(
        primitive, step.category, step.reason, *names, path, source_line(step.eqn), casts, cast_bytes, depth
    )


def _is_float(dtype: Any) -> bool:
    return dtype is not None and _dtypes.is_float(dtype)
