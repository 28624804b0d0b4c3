"""A plan as a report: what autocast does with every equation and why, and what that costs, as text and as a table."""

import html
from typing import NamedTuple

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
