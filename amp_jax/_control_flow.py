"""Planning what holds programs: loops, branches, rematerialised blocks, custom derivative rules.

A *carry* is what a loop hands from one iteration to the next; its dtype is a fix-point. It is the compute dtype where
the body reads it in that, since a carry is what a scan over layers saves for the backward pass. A sum that only grows
(`carry = carry + something`) is float32: in half it stops growing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from amp_jax._graph import FLOAT32, OUTPUT, Node, size
from amp_jax._jaxpr import JaxprEqn, Var, equations, inner_jaxprs, open_jaxpr, scan_lengths

CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_ARITHMETIC = frozenset(["add", "sub", "mul", "add_any", "neg"])
_MOVES = frozenset(["convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "copy"])


class Planner(Protocol):
    def __call__(
        self, jaxpr: Any, consts: Any, entries: Any, rules: Any, scope: str = ..., returned: Any = ..., /
    ) -> Any: ...


def bound_as_call(eqn: JaxprEqn) -> bool:
    """Whether a jitted call carries shardings or donation: it then stays a call, with the dtypes it was traced with."""
    params = eqn.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    specified = any(s is not None and type(s).__name__ != "UnspecifiedValue" for s in shardings)
    return specified or any(params.get("donated_invars", ()))


def follows(eqn: JaxprEqn, category: Callable[[JaxprEqn], tuple[str, str]]) -> bool:
    """Whether a custom rule's function is all follow operations (relu): it then takes the dtype of its neighbours."""
    if eqn.primitive.name not in CUSTOM or len(eqn.outvars) != 1 or eqn.params.get("symbolic_zeros"):
        return False

    def simple(jaxpr: Any) -> bool:
        return all(
            category(e)[0] in ("follow", "keep")
            or (e.primitive.name == "jit" and simple(inner_jaxprs(e)[0]))
            or (e.primitive.name == "convert_element_type" and e.params["new_dtype"] == FLOAT32)
            for e in equations(jaxpr)
        )

    return simple(inner_jaxprs(eqn)[0])


def enter(node: Node, entries: Sequence[Any], rules: Any, plan: Planner) -> list[Any]:
    """Plan the bodies for the way the operands come in; returns how each result leaves."""
    name = node.eqn.primitive.name
    if name == "scan":
        return _scan(node, entries, rules, plan)
    if name == "while":
        return _while(node, entries, rules, plan)
    if name == "cond":
        return _cond(node, entries, rules, plan)
    return _block(node, entries, rules, plan)


def settle(node: Node, entries: Sequence[Any], gives: Sequence[Any], rules: Any, plan: Planner) -> None:
    """Plan the bodies again where an operand's dtype has changed since `enter`; the results' dtypes stay."""
    bodies = inner_jaxprs(node.eqn)
    made = [_again(node, k, entries) for k in range(len(node.plans))]
    node.plans = tuple(
        old if list(old.entries) == new else plan(body, (), new, rules, node.scope, old.output_dtypes)
        for old, new, body in zip(node.plans, made, bodies, strict=True)
    )


def operand_dtypes(node: Node) -> tuple[np.dtype[Any] | None, ...]:
    """The dtype in which the equation reads each of its operands."""
    name, dtypes = node.eqn.primitive.name, [p.input_dtypes for p in node.plans]
    if name == "while":
        n = node.eqn.params["cond_nconsts"]
        return (*dtypes[0][:n], *dtypes[1])
    if name == "cond":
        return (None, *dtypes[0])
    return dtypes[0]


def wanted(node: Node) -> list[np.dtype[Any] | None]:
    """For each operand the one dtype in which the bodies use it, or None."""
    name, uses = node.eqn.primitive.name, [[_one(used(p, i)) for i in p.inputs] for p in node.plans]
    if name == "while":
        n = node.eqn.params["cond_nconsts"]
        return [*uses[0][:n], *uses[1]]
    if name == "cond":
        return [None, *(_one(set(several)) for several in zip(*uses, strict=True))]
    return uses[0]


def used(plan: Any, value: int) -> set[Any]:
    """The dtypes in which a program reads a value, looking through what only moves data."""
    found: set[Any] = set()
    for user in plan.users[value]:
        if user == OUTPUT:
            found |= {d for o, d in zip(plan.outputs, plan.output_dtypes, strict=True) if o == value}
            continue
        step = plan.steps[user]
        if step.category == "keep" and len(step.outputs) == 1 and step.result_dtypes[0] is not None and not step.plans:
            found |= used(plan, step.outputs[0])
        else:
            found |= {d for i, d in zip(step.inputs, step.operand_dtypes, strict=True) if i == value}
    return found


def _one(dtypes: set[Any]) -> Any:
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _fit(entry: Any, aval: Any) -> Any:
    """An entry as the body sees it: a slice of what comes in."""
    return entry._replace(numbers=min(entry.numbers, size(aval)))


def _block(node: Node, entries: Sequence[Any], rules: Any, plan: Planner) -> list[Any]:
    """One body, run once: remat, shard_map, a custom rule's function, a call that keeps its signature."""
    body = inner_jaxprs(node.eqn)[0]
    avals = [v.aval for v in open_jaxpr(body)[0].invars]
    inside = [_fit(e, a) for e, a in zip(entries, avals, strict=True)]
    returned = None
    if _keeps_signature(node.eqn):
        inside = [_traced(e, a) for e, a in zip(inside, avals, strict=True)]
        returned = [_float32(v.aval) for v in node.eqn.outvars]
    node.plans = (plan(body, (), inside, rules, node.scope, returned),)
    exits = node.plans[0].exits
    if returned is not None:
        exits = [e._replace(dtype=d or e.dtype, silent=False) for e, d in zip(exits, returned, strict=True)]
    return [_spread(e, v.aval) for e, v in zip(exits, node.eqn.outvars, strict=True)]


def _keeps_signature(eqn: JaxprEqn) -> bool:
    return bound_as_call(eqn) or bool(eqn.params.get("symbolic_zeros"))


def _traced(entry: Any, aval: Any) -> Any:
    return entry._replace(dtype=FLOAT32, silent=True) if _float32(aval) is not None else entry


def _float32(aval: Any) -> np.dtype[Any] | None:
    return FLOAT32 if getattr(aval, "dtype", None) == FLOAT32 else None


def _spread(entry: Any, aval: Any) -> Any:
    return entry._replace(numbers=size(aval)) if entry.numbers == 0 else entry


def _again(node: Node, k: int, entries: Sequence[Any]) -> list[Any]:
    """The entries of body number k for the operands as they come in now; what `enter` decided for carries stays."""
    name, old = node.eqn.primitive.name, node.plans[k].entries
    if name == "scan":
        n, m = scan_lengths(node.eqn)
        decided = [i < n + m and (i >= n or old[i] != _fit(entries[i], _aval(node, k, i))) for i in range(len(old))]
        fresh = list(entries)
    elif name == "while":
        n, m = node.eqn.params["cond_nconsts"], node.eqn.params["body_nconsts"]
        consts = (n, m)[k]
        decided = [i >= consts for i in range(len(old))]
        fresh = [*entries[(0, n)[k] : (n, n + m)[k]], *entries[n + m :]]
    else:
        decided = [_keeps_signature(node.eqn)] * len(old)
        fresh = list(entries[1:] if name == "cond" else entries)
    return [o if d else _fit(f, _aval(node, k, i)) for i, (o, d, f) in enumerate(zip(old, decided, fresh, strict=True))]


def _aval(node: Node, k: int, i: int) -> Any:
    return open_jaxpr(inner_jaxprs(node.eqn)[k])[0].invars[i].aval


def _scan(node: Node, entries: Sequence[Any], rules: Any, plan: Planner) -> list[Any]:
    n, m = scan_lengths(node.eqn)
    body = inner_jaxprs(node.eqn)[0]
    inside = [_fit(e, v.aval) for e, v in zip(entries, open_jaxpr(body)[0].invars, strict=True)]
    consts, carry, xs = inside[:n], inside[n : n + m], inside[n + m :]

    def run(carry: list[Any], returned: Any = None) -> Any:
        return plan(body, (), [*consts, *carry, *xs], rules, node.scope, returned)

    carry, made = _fix_point(run, body, carry, n, node.low)
    consts = [_cast_before(c, made, i, node.low) for i, c in enumerate(consts)]
    exits = [*carry, *made.exits[m:]]
    node.plans = (
        run(
            carry,
            [e.dtype if _float32(v.aval) is not None else None for e, v in zip(exits, _results(body), strict=True)],
        ),
    )
    return [e._replace(numbers=size(v.aval)) for e, v in zip(exits, node.eqn.outvars, strict=True)]


def _results(body: Any) -> Sequence[Any]:
    return open_jaxpr(body)[0].outvars


def _cast_before(entry: Any, made: Any, i: int, low: Any) -> Any:
    """A constant that the body only multiplies matrices with is cast once, before the loop."""
    if entry.dtype != FLOAT32 or low in (None, FLOAT32) or not _multiplies(made, made.inputs[i], low):
        return entry
    return entry._replace(dtype=low, silent=False)


def _multiplies(plan: Any, value: int, low: Any) -> bool:
    """Whether a value goes into low products alone, moved and joined with others on its way."""
    for user in plan.users[value]:
        if user == OUTPUT:
            return False
        step = plan.steps[user]
        if step.category == "compute" and step.region == low:
            continue
        moves = step.category in ("keep", "widest") and not step.plans
        if not moves or not all(_multiplies(plan, o, low) for o in step.outputs):
            return False
    return bool(plan.users[value])


def _while(node: Node, entries: Sequence[Any], rules: Any, plan: Planner) -> list[Any]:
    n, m = node.eqn.params["cond_nconsts"], node.eqn.params["body_nconsts"]
    test, body = inner_jaxprs(node.eqn)
    asked, consts, carry = list(entries[:n]), list(entries[n : n + m]), list(entries[n + m :])

    def run(carry: list[Any], returned: Any = None) -> Any:
        return plan(body, (), [*consts, *carry], rules, node.scope, returned)

    carry, _ = _fix_point(run, body, carry, m, node.low)
    returned = [e.dtype if _float32(v.aval) is not None else None for e, v in zip(carry, _results(body), strict=True)]
    node.plans = (plan(test, (), [*asked, *carry], rules, node.scope), run(carry, returned))
    return carry


def _fix_point(run: Callable[..., Any], body: Any, carry: list[Any], first: int, low: Any) -> tuple[list[Any], Any]:
    """Find the carries' dtypes. `first` is the number of the first carry among the body's inputs.

    Each carry moves at most three times (silent, float32, compute dtype), so this ends.
    """
    grows = [_accumulates(body, first + i, i) for i in range(len(carry))]
    settled = [e.dtype != FLOAT32 and not _is_low(e, low) for e in carry]
    while True:
        made = run(carry)
        before = list(carry)
        for i, (now, out) in enumerate(zip(before, made.exits[: len(carry)], strict=True)):
            if settled[i] or (now.silent and out.silent):
                continue
            loud, lowered = now._replace(dtype=FLOAT32, silent=False), now._replace(dtype=low, silent=False)
            if grows[i]:
                carry[i], settled[i] = loud, True
            elif out.dtype != FLOAT32:
                carry[i], settled[i] = lowered, out.dtype == low and now.dtype == low
            elif now == loud:
                alone = used(made, made.inputs[first + i]) <= {FLOAT32, None}
                carry[i], settled[i] = (loud if alone else lowered), True
            else:
                carry[i] = loud
        if carry == before:
            return carry, made


def _is_low(entry: Any, low: Any) -> bool:
    return entry.dtype == low


def _accumulates(body: Any, into: int, out: int) -> bool:
    """Whether a carry is only added to: its one use leads by sums and products to its own next value alone."""
    jaxpr = open_jaxpr(body)[0]
    var, moved = jaxpr.invars[into], False
    while True:
        users = [e for e in jaxpr.eqns if any(v is var for v in e.invars)]
        if not users:
            return moved and isinstance(jaxpr.outvars[out], Var) and jaxpr.outvars[out] is var
        if (
            len(users) > 1
            or users[0].primitive.name not in _ARITHMETIC | _MOVES
            or any(v is var for v in jaxpr.outvars)
        ):
            return False
        var, moved = users[0].outvars[0], True


def _cond(node: Node, entries: Sequence[Any], rules: Any, plan: Planner) -> list[Any]:
    """All branches leave in one dtype: float32 where one of them insists on it."""
    branches = inner_jaxprs(node.eqn)
    made = [plan(b, (), list(entries[1:]), rules, node.scope) for b in branches]
    exits = [_join(several) for several in zip(*(p.exits for p in made), strict=True)]
    returned = [e.dtype if _float32(v.aval) is not None else None for e, v in zip(exits, node.eqn.outvars, strict=True)]
    node.plans = tuple(plan(b, (), list(entries[1:]), rules, node.scope, returned) for b in branches)
    return exits


def _join(exits: Sequence[Any]) -> Any:
    loud = [e for e in exits if not e.silent and e.dtype == FLOAT32]
    heard = loud or [e for e in exits if not e.silent] or list(exits)
    return heard[0]._replace(peak=max(e.peak for e in exits), numbers=max(e.numbers for e in exits))
