"""What autocast is going to do with a program, as plain data, before anything is done.

A *plan* lists a program's steps in order: for each equation its category, the reason, the region it stands in, and the
dtype of every operand and result. Calls (`jit`) are flattened into it; a loop, a branch or a custom derivative rule is
one step with plans of its own. `_emit` turns the plan into a function, `_explain` into text: there is no second
analysis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from amp_jax import _assign, _control_flow
from amp_jax._errors import AmpValueError
from amp_jax._graph import FLOAT32, OUTPUT, Graph, Node, Value, dtype_of, size
from amp_jax._jaxpr import (
    JaxprEqn,
    Literal,
    category_of,
    equations,
    inner_jaxprs,
    is_known,
    open_jaxpr,
    source_line,
)
from amp_jax._ops import OPS, UNKNOWN

CALLS = ("jit", "pjit", "closed_call", "core_call", "call")


class Entry(NamedTuple):
    """How a value comes into a program, or leaves it."""

    dtype: np.dtype[Any] | None
    silent: bool
    numbers: int
    peak: float = 0.0


class Step(NamedTuple):
    """One equation and its dtypes; None stands for "as it is held" (operands) and "not a float32" (results)."""

    eqn: JaxprEqn
    stack: Any
    calls: tuple[JaxprEqn, ...]
    scope: str
    owner: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    category: str
    reason: str
    region: np.dtype[Any] | None
    operand_dtypes: tuple[np.dtype[Any] | None, ...]
    result_dtypes: tuple[np.dtype[Any] | None, ...]
    plans: "tuple[Plan, ...]"


class Plan(NamedTuple):
    """The steps of a program, over values numbered from 0."""

    steps: tuple[Step, ...]
    avals: tuple[Any, ...]
    dtypes: tuple[np.dtype[Any] | None, ...]
    """The dtype that each value is held in."""
    silent: tuple[bool, ...]
    """Whether each is a parameter, a constant, an input, or computed from those alone."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: Mapping[int, Any]
    """Literals and closed-over arrays, by value number."""
    input_dtypes: tuple[np.dtype[Any] | None, ...]
    output_dtypes: tuple[np.dtype[Any] | None, ...]
    entries: tuple[Entry, ...]
    exits: tuple[Entry, ...]
    users: tuple[tuple[int, ...], ...]
    rules: "Rules"

    @property
    def unchanged(self) -> bool:
        """Whether the program runs exactly as it was traced."""
        inner = all(p.unchanged for step in self.steps for p in step.plans)
        return inner and all(d is None or d == dtype_of(a) for d, a in zip(self.dtypes, self.avals, strict=True))

    def born_in_float32(self, step: Step, value: int) -> bool:
        """Whether this operand's cotangent is to be born in float32: a parameter in a low matrix product."""
        low = any(d not in (None, FLOAT32) for d in step.operand_dtypes)
        return low and step.eqn.primitive.name == "dot_general" and self.silent[value]


@dataclass(frozen=True)
class Rules:
    """What the planner asks of a policy."""

    region: Callable[[str], "np.dtype[Any] | None"]
    """Name stack -> compute dtype in force; None: leave as traced."""
    categories: Mapping[str, str] = field(default_factory=dict[str, str])
    policy: Any = None
    """In force while a custom derivative rule is traced."""

    def category(self, eqn: JaxprEqn) -> tuple[str, str]:
        name, registered = eqn.primitive.name, category_of(eqn.primitive)
        if name in self.categories:
            _refuse(eqn, self.categories[name])
            return self.categories[name], "the policy says so"
        return (registered, "registered so") if registered else OPS.get(name, UNKNOWN)


def _refuse(eqn: JaxprEqn, category: str) -> None:
    """What holds a program, or calls a kernel, was traced for one dtype, and can't be given another."""
    name = eqn.primitive.name
    sealed = inner_jaxprs(eqn) or OPS.get(name, (None,))[0] == "opaque"
    if sealed and category not in ("full", "opaque"):
        raise AmpValueError(
            f"`ops` says {category!r} for {name} ({source_line(eqn)}), which was traced for float32 and holds a "
            "program or a kernel that can't run in another dtype. Register the function around it: "
            f"`fun = amp.register_op(fun, {category!r})`."
        )


def entry(aval: Any, dtype: np.dtype[Any] | None = None) -> Entry:
    """A silent input, or with a dtype other than its own, a low one."""
    own = np.dtype(aval.dtype) if isinstance(getattr(aval, "dtype", None), np.dtype) else None
    return Entry(dtype or own, dtype is None or dtype == own, size(aval))


def plan(
    jaxpr: Any,
    consts: Sequence[Any],
    entries: Sequence[Entry],
    rules: Rules,
    scope: str = "",
    returned: Sequence[np.dtype[Any] | None] | None = None,
) -> Plan:
    """Plan a program.

    Args:
        jaxpr: The program.
        consts: The arrays that it closed over; none given: those that it holds itself.
        entries: One for each input.
        rules: The policy's regions and categories.
        scope: The name stack around the program.
        returned: The dtype in which each output has to leave; None for an output that leaves as it comes.
    """
    graph = Graph([], [], [], [], {})
    builder = _Builder(graph, rules)
    jaxpr, own = open_jaxpr(jaxpr)
    consts = tuple(consts) or own
    for var, given in zip(jaxpr.invars, entries, strict=True):
        graph.inputs.append(builder.new(var.aval, given))
    env: dict[Any, int] = dict(zip(jaxpr.invars, graph.inputs, strict=True))
    env |= {v: builder.constant(v.aval, c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
    builder.walk(jaxpr, env, None, scope)
    graph.outputs = [builder.read(env, atom) for atom in jaxpr.outvars]
    graph.connect()
    leaving = tuple(returned) if returned is not None else (None,) * len(graph.outputs)
    reads = _reads(graph)
    _assign.lower(graph, reads, leaving)
    _assign.lift(graph, reads, leaving)
    _assign.round_once(graph, reads, leaving)
    return _freeze(graph, entries, leaving, rules)


class _Builder:
    """Walks a jaxpr, flattening calls, and decides each node as it comes."""

    def __init__(self, graph: Graph, rules: Rules):
        self.graph, self.rules = graph, rules

    def new(self, aval: Any, given: Entry | None = None) -> int:
        own = getattr(aval, "dtype", None)
        dtype = np.dtype(own) if isinstance(own, np.dtype) else None
        given = given or Entry(dtype, True, size(aval))
        self.graph.values.append(Value(aval, given.dtype, given.silent, given.numbers, given.peak))
        return len(self.graph.values) - 1

    def constant(self, aval: Any, held: Any, literal: bool = False) -> int:
        number = self.new(aval)
        self.graph.constants[number] = held
        value = self.graph.values[number]
        value.literal = literal
        value.numbers = 1 if literal else value.numbers
        if value.dtype is not None and value.dtype.kind in "iuf" and size(aval) <= 64 and is_known(held):
            value.constant = np.asarray(held)
            value.peak = float(np.max(np.abs(value.constant), initial=0.0, where=np.isfinite(value.constant)))
        return number

    def read(self, env: dict[Any, int], atom: Any) -> int:
        return self.constant(atom.aval, atom.val, True) if isinstance(atom, Literal) else env[atom]

    def walk(self, jaxpr: Any, env: dict[Any, int], stack: Any, scope: str, calls: tuple[JaxprEqn, ...] = ()) -> None:
        for eqn in jaxpr.eqns:
            own = eqn.source_info.name_stack
            here = "/".join(filter(None, (scope, str(own))))
            inputs = [self.read(env, atom) for atom in eqn.invars]
            name = eqn.primitive.name
            if name in CALLS and self.flattens(eqn, inputs, here):
                body, consts = open_jaxpr(inner_jaxprs(eqn)[0])
                inner = dict(zip(body.invars, inputs, strict=True))
                inner |= {v: self.constant(v.aval, c) for v, c in zip(body.constvars, consts, strict=True)}
                self.walk(body, inner, own if stack is None else stack + own, here, (*calls, eqn))
                env.update(zip(eqn.outvars, [self.read(inner, atom) for atom in body.outvars], strict=True))
                continue
            outputs = [self.new(v.aval) for v in eqn.outvars]
            category, reason = self.rules.category(eqn)
            node = Node(eqn, stack, calls, here, jaxpr, inputs, outputs, category, reason, self.rules.region(here))
            self.decide(node)
            self.graph.nodes.append(node)
            env.update(zip(eqn.outvars, outputs, strict=True))

    def flattens(self, eqn: JaxprEqn, inputs: list[int], scope: str) -> bool:
        """A call is looked into unless nothing in it can change, or it carries shardings or donation."""
        if _control_flow.bound_as_call(eqn):
            return False
        values = [self.graph.values[i] for i in inputs]
        return self.rules.region(scope) is not None and not (
            all(v.silent for v in values if v.traced) and self.inert(eqn)
        )

    def inert(self, eqn: JaxprEqn) -> bool:
        """Whether a call on silent operands stays as traced: nothing in it is a product."""
        for inner in inner_jaxprs(eqn):
            for e in equations(inner):
                if (
                    self.rules.category(e)[0] == "compute"
                    or "amp." in str(e.source_info.name_stack)
                    or not self.inert(e)
                ):
                    return False
        return True

    def decide(self, node: Node) -> None:
        operands = [self.graph.values[i] for i in node.inputs]
        results = [self.graph.values[i] for i in node.outputs]
        silent = all(v.silent for v in operands if v.traced)
        if node.category != "recurse":
            _assign.assign(node, operands, results)
        elif node.low is None or (silent and self.inert(node.eqn)):
            node.category, node.reason = "keep", "nothing in it changes"
            node.run, node.pinned = FLOAT32, True
            peak = max((v.peak for v in operands), default=0.0)
            for result in results:
                result.silent, result.peak = silent, max(peak, _largest_literal(node.eqn))
        elif _control_flow.follows(node.eqn, self.rules.category):
            node.category = "follow"
            _assign.assign(node, operands, results)
        else:
            node.pinned = True
            exits = _control_flow.enter(node, [leaving(v) for v in operands], self.rules, plan)
            for result, given in zip(results, exits, strict=True):
                result.dtype, result.silent, result.numbers, result.peak = given


def _largest_literal(eqn: JaxprEqn) -> float:
    """The largest finite constant written in what an equation holds."""
    inside = [e for inner in inner_jaxprs(eqn) for e in equations(inner)]
    floats = [abs(v.val) for e in inside for v in e.invars if isinstance(v, Literal) and dtype_of(v.aval) == FLOAT32]
    return max((float(x) for x in (*floats, *map(_largest_literal, inside)) if np.isfinite(x)), default=0.0)


def leaving(value: Value) -> Entry:
    return Entry(value.dtype, value.silent, value.numbers, value.peak)


def _reads(graph: Graph) -> _assign.Reads:
    """In which dtype a node reads a value, looking through nodes that only move data."""

    def reads(number: int, value: int) -> np.dtype[Any] | None:
        node = graph.nodes[number]
        if node.plans and node.category == "recurse":
            wanted = {d for i, d in zip(node.inputs, _control_flow.wanted(node), strict=True) if i == value}
            return wanted.pop() if len(wanted) == 1 else None
        return node.run if node.run is not None else graph.values[value].dtype

    return reads


def _freeze(graph: Graph, entries: Sequence[Entry], leaving_in: Sequence[Any], rules: Rules) -> Plan:
    """The decisions as data; what holds programs is planned once more, for the dtypes that its operands got."""
    values, steps = graph.values, list[Step]()
    for node in graph.nodes:
        operands = [values[i] for i in node.inputs]
        results = [values[i] for i in node.outputs]
        reads = tuple(node.run if v.traced else None for v in operands)
        gives = tuple(v.dtype if v.traced else None for v in results)
        if node.category == "recurse":
            _control_flow.settle(node, [leaving(v) for v in operands], gives, rules, plan)
            reads = _control_flow.operand_dtypes(node)
        elif node.category == "follow" and inner_jaxprs(node.eqn) and node.run != FLOAT32:
            into = [Entry(node.run if v.traced else v.dtype, False, v.numbers, v.peak) for v in operands]
            body = inner_jaxprs(node.eqn)[0]
            node.plans = (plan(body, (), into, rules, node.scope, gives),)
        where = node.eqn, node.stack, node.calls, node.scope, node.owner, tuple(node.inputs), tuple(node.outputs)
        steps.append(Step(*where, node.category, node.reason, node.low, reads, gives, node.plans))
    outputs = [values[i] for i in graph.outputs]
    given = tuple((want or v.dtype) if v.traced else None for v, want in zip(outputs, leaving_in, strict=True))
    return Plan(
        tuple(steps),
        tuple(v.aval for v in values),
        tuple(v.dtype for v in values),
        tuple(v.silent for v in values),
        tuple(graph.inputs),
        tuple(graph.outputs),
        graph.constants,
        tuple(values[i].dtype if values[i].traced else None for i in graph.inputs),
        given,
        tuple(entries),
        tuple(leaving(v) for v in outputs),
        tuple(tuple(v.users) for v in values),
        rules,
    )


__all__ = ["OUTPUT", "Entry", "Plan", "Rules", "Step", "entry", "leaving", "plan"]
