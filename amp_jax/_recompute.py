"""Which steps of a plan are computed again for the backward pass, instead of keeping what they gave.

Between two products there often stands nothing but arithmetic on single elements: a bias, a gelu, a gate. Its inputs
are the results of products, which are in memory anyway; whatever its derivative needs can be had from them by reading
them once more. XLA doesn't do so by itself where a tanh or an exp is among it: it writes that one out.

In the body of a scan it can't: whatever the body's derivative needs is stacked for the backward loop. There the whole
body is one block that keeps what is dear, products above all, and computes the rest again.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import jax

from amp_jax._jaxpr import effectful, equations, inner_jaxprs
from amp_jax._plan import Plan, Step

Unit = tuple[int, ...]
"""Numbers of steps that run as one; more than one: a chain that is computed again."""

MOVES = frozenset(["reshape", "transpose", "squeeze", "slice", "split", "broadcast_in_dim", "name"])
LINEAR = frozenset(["add", "sub", "add_any", "neg", "convert_element_type"]) | MOVES
DEAR = frozenset(["tanh", "logistic", "erf", "erfc", "exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt"])
"""What XLA would rather keep than compute twice."""
ELEMENTWISE = (
    frozenset(["mul", "div", "max", "min", "abs", "sign", "clamp", "select_n", "sqrt", "log2", "integer_pow", "square"])
    | frozenset(
        ["one_minus_square", "cbrt", "sin", "cos", "iota", "eq", "ne", "ge", "gt", "le", "lt", "and", "or", "not"]
    )
    | LINEAR
    | DEAR
)
SUMS = frozenset(["reduce_sum", "reduce_max", "reduce_min", "concatenate", "pad", "stop_gradient"])
BLOCKS = ("remat", "remat2", "checkpoint")
DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator")
DRAWN = "amp.drawn"
"""The name of random draws, as they meet data: a mask is a byte, the bits that it was made from are four."""


def schedule(plan: Plan) -> Sequence[Unit]:
    """All steps in an order in which every chain can run as one."""
    chains = _chains(plan)
    if not chains:
        return [(n,) for n in range(len(plan.steps))]
    unit_of = {n: chain for chain in chains for n in chain}
    units = list(dict.fromkeys(unit_of.get(n, (n,)) for n in range(len(plan.steps))))
    makers = {v: unit_of.get(n, (n,)) for n, step in enumerate(plan.steps) for v in step.outputs}
    waits = {u: {makers[v] for n in u for v in plan.steps[n].inputs if v in makers} - {u} for u in units}
    users: dict[Unit, list[Unit]] = {u: [] for u in units}
    for unit, before in waits.items():
        for maker in before:
            users[maker].append(unit)
    left = {u: len(before) for u, before in waits.items()}
    ready = [u for u in units if not left[u]]
    heapq.heapify(ready)
    order: list[Unit] = []
    while ready:
        unit = heapq.heappop(ready)
        order.append(unit)
        for user in users[unit]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, user)
    return order


def loop_body(plan: Plan, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that evaluates a scan's body: `run(args, units, named)`, made to stack little.

    The author's own blocks, and effects, which would happen twice, are left as they stand.
    """
    names = [step.eqn.primitive.name for step in plan.steps]
    if any(effectful(step.eqn) for step in plan.steps) or any(name in BLOCKS for name in names):
        return lambda *args: run(args, schedule(plan), frozenset())
    units, drawn = [(n,) for n in range(len(plan.steps))], _drawn(plan)
    return jax.checkpoint(lambda *args: run(args, units, drawn), prevent_cse=False, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    return params.get("name") == DRAWN or primitive.name not in ELEMENTWISE | SUMS


def _drawn(plan: Plan) -> frozenset[int]:
    """Values made of random bits alone, which meet others."""
    drawn, meeting = set[int](), set[int]()
    for step in plan.steps:
        ours = [v for v in step.inputs if v in drawn]
        if ours and not all(plan.silent[v] for v in step.inputs):
            meeting.update(ours)
        elif ours or _draws(step.eqn):
            drawn.update(step.outputs)
    return frozenset(meeting)


def _draws(eqn: Any) -> bool:
    return eqn.primitive.name in DRAWS or any(_draws(e) for inner in inner_jaxprs(eqn) for e in equations(inner))


def _chains(plan: Plan) -> list[Unit]:
    if any(effectful(step.eqn) for step in plan.steps):  # their order has to stay
        return []
    chains: list[list[int]] = []
    needs: list[set[int]] = []
    """The chains that each chain's inputs were computed from."""
    behind: dict[int, set[int]] = {}
    """The chains that a value was computed from; its own among them."""
    given = {v for v, silent in enumerate(plan.silent) if silent} | set(plan.inputs)
    """Values that are in memory anyway: parameters, a loop's carry, and results of products."""
    of: dict[int, int] = {}
    for n, step in enumerate(plan.steps):
        name, inputs = step.eqn.primitive.name, [v for v in step.inputs if v not in of]
        joins = {of[v] for v in step.inputs if v in of}
        before = set[int]().union(*(behind.get(v, set()) for v in step.inputs))
        ready = not joins and all(v in given for v in inputs)
        moved = ready and (name in MOVES or _sums(plan, step))
        if len(joins) == 1 and _sums(plan, step) and all(v in given for v in inputs):
            # a bias, then the sum of two products: one value to keep, where they are two
            steps = [plan.steps[k] for k in chains[min(joins)]]
            if all(s.eqn.primitive.name in LINEAR for s in steps):
                dissolved = {v for s in steps for v in s.outputs}
                chains[joins.pop()] = []
                of = {v: c for v, c in of.items() if v not in dissolved}
                given |= dissolved
                moved = True
        if step.category == "compute" or moved:
            given.update(step.outputs)
        cheap = not step.plans and name in ELEMENTWISE and not all(plan.silent[v] for v in step.outputs)
        if cheap and not moved and len(joins) <= 1 and all(v in given for v in inputs):
            outside = set[int]().union(*(behind.get(v, set()) for v in inputs))
            chain = joins.pop() if joins else len(chains)
            if chain == len(chains):
                chains.append([])
                needs.append(set())
            if chain not in _closure(outside, needs):
                chains[chain].append(n)
                needs[chain] |= outside
                of.update(dict.fromkeys(step.outputs, chain))
                before |= {chain}
        behind.update(dict.fromkeys(step.outputs, before))
    return [tuple(c) for c in chains if len(c) > 1 and any(plan.steps[n].eqn.primitive.name in DEAR for n in c)]


def _sums(plan: Plan, step: Step) -> bool:
    """Whether it adds several results of products: their sum is one value to keep, they are two."""
    return step.eqn.primitive.name in ("add", "sub", "add_any") and not any(plan.silent[v] for v in step.inputs)


def _closure(chains: set[int], needs: Sequence[set[int]]) -> set[int]:
    found, left = set[int](), list(chains)
    while left:
        chain = left.pop()
        if chain not in found:
            found.add(chain)
            left += needs[chain]
    return found
