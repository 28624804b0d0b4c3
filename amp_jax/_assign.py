"""The rules by which each operation gets its dtype.

Four passes over a program's nodes. *Forward*, each node takes its dtype from its category and its operands. *Lower*,
from the end, a float32 operation whose users all want the compute dtype moves down to it: this puts the cast before
relu or gelu instead of behind, and what is saved for the backward pass is half. *Raise*, from the end, the chain that
leads to a float32 operation and to nothing else joins it. *Round once*: what a norm gives to a gelu, whose cube is
float32, is held low for all its users.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from amp_jax import _dtypes
from amp_jax._graph import FLOAT32, OUTPUT, Graph, Node, Value, size
from amp_jax._ops import COMPARISONS

Dtype = np.dtype  # spelled once: every dtype here is a NumPy one
MOVABLE = ("follow", "keep", "widest")


def assign(node: Node, operands: Sequence[Value], results: Sequence[Value]) -> None:
    """Decide a first-order node by its category and operands; its results take the dtype from it."""
    ours = [v for v in operands if v.traced]
    silent = all(v.silent for v in ours)
    if not ours and not any(r.traced for r in results):
        return
    if node.low is None or node.category in ("opaque", "honour") or _foreign(operands):
        _as_traced(node, operands, results, silent)
        return
    wide = max((size(r.aval) for r in results), default=0)
    node.run, why, node.pinned = _run_dtype(node, ours, silent, wide)
    node.reason = why or node.reason
    if node.category == "keep" and len(ours) > 1 and len(ours) == len([r for r in results if r.traced]):
        node.run = None  # a sort of several operands, a barrier: each stays as it is
        for value, result in zip(ours, (r for r in results if r.traced), strict=True):
            _inherit(result, [value])
        return
    for result in results:
        if not result.traced:
            continue
        _inherit(result, operands)
        result.dtype = node.run
        result.silent = silent and node.run == FLOAT32
        heard = [v for v in ours if not v.silent]
        reduces = node.eqn.primitive.name.startswith("reduce_")
        result.reduced = reduces or (bool(heard) and all(v.reduced for v in heard))
        if node.category in ("full", "compute"):
            result.peak = 0.0
        if node.category == "compute":
            result.numbers = size(result.aval)
        if node.category == "keep" and len(operands) == 1:
            result.constant = operands[0].constant


def _run_dtype(node: Node, ours: list[Value], silent: bool, wide: int) -> tuple[np.dtype, str, bool]:
    """The dtype a node runs in, the reason where it isn't the category's, and whether its users can't change that."""
    low = node.low
    assert low is not None
    if low == FLOAT32:
        return FLOAT32, "inside a float32 region", True
    if node.category == "compute":
        return low, "", False
    if node.category == "full":
        return FLOAT32, "", True
    if silent:
        return FLOAT32, "only parameters, constants and inputs so far", False
    unheld = next((v for v in ours if not _held(v, low)), None)
    if unheld is not None and node.category != "keep":
        return FLOAT32, f"{_dtypes.name(low)} can't hold the constant {_shown(unheld)}", True
    lows, louds = [v for v in ours if v.low], [v for v in ours if v.loud]
    if node.eqn.primitive.name in COMPARISONS:
        return (low, "", False) if all(v.low or v.literal for v in ours) else (FLOAT32, "compared exactly", True)
    if not lows:
        settled = any(v.numbers < wide for v in louds) or any(v.silent and v.constant is None for v in ours)
        return FLOAT32, "follows float32 operands", settled and node.category == "follow"
    if not louds:
        return low, "follows low operands", False
    if any(v.numbers < wide for v in louds):
        return FLOAT32, "meets a statistic", True
    if all(v.reduced for v in (*lows, *louds)):
        return FLOAT32, "statistics meet each other", True
    if node.category == "widest" or wide == 1:
        return FLOAT32, "the widest of its operands", False
    return low, "full-size operands meet in the compute dtype", False


def _as_traced(node: Node, operands: Sequence[Value], results: Sequence[Value], silent: bool) -> None:
    """The node keeps the dtypes that it was traced with."""
    node.run = None if node.category == "honour" else FLOAT32
    node.pinned = True
    for result in results:
        _inherit(result, operands)
        result.dtype = getattr(result.aval, "dtype", None)
        result.silent = silent and not any(_half(v) for v in operands)
    if node.eqn.primitive.name == "convert_element_type" and results[0].traced:
        source = operands[0]
        results[0].constant = source.constant
        if source.traced:  # a change of weak type alone
            node.run, results[0].dtype, node.pinned = source.dtype, source.dtype, False
        elif node.low is None and _half(source):  # the way out of an inner autocast: the value is low
            results[0].dtype = source.dtype


def _inherit(result: Value, operands: Sequence[Value]) -> None:
    """A result has no more numbers in it than its operands, and may hold their constants."""
    sources = [v for v in operands if v.traced or v.dtype is None or v.dtype.kind in "iufb"]
    result.numbers = min(size(result.aval), max((v.numbers for v in sources), default=size(result.aval)))
    result.peak = max((v.peak for v in sources), default=0.0)
    if len(operands) == 1:
        result.dtype, result.silent = operands[0].dtype, operands[0].silent


def _foreign(operands: Sequence[Value]) -> bool:
    """Whether an operand is a float that isn't ours: the author's own half, float64, complex."""
    return any(not v.traced and v.dtype is not None and v.dtype.kind not in "iub" for v in operands)


def _half(value: Value) -> bool:
    return not value.traced and value.dtype is not None and _dtypes.is_float(value.dtype)


def _held(value: Value, low: np.dtype) -> bool:
    if value.constant is not None:
        return _dtypes.holds(value.constant, low)
    return not value.silent or value.peak <= float(jnp.finfo(low).max)


def _shown(value: Value) -> str:
    return f"{value.peak:.6g}" if value.constant is None or np.size(value.constant) != 1 else f"{value.constant:.6g}"


Reads = Callable[[int, int], "np.dtype | None"]
"""(node, value) -> the dtype that the node reads the value in, None where it takes it as it is."""


def lower(graph: Graph, reads: Reads, returned: Sequence[np.dtype | None]) -> None:
    """A float32 operation that nothing pins, and whose users are all low, is low."""
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        if node.category not in MOVABLE or node.pinned or node.run != FLOAT32 or node.low in (None, FLOAT32):
            continue
        results = [i for i in node.outputs if graph.values[i].traced]
        if any(graph.values[i].silent for i in results):
            continue
        wanted = {w for i in results for w in _wanted(graph, i, reads, returned)}
        if wanted == {node.low}:
            _move(graph, node, node.low, "its users are all low")


def lift(graph: Graph, reads: Reads, returned: Sequence[np.dtype | None]) -> None:
    """A low operation with one user, or that is returned in float32, and whose users are all float32, joins them."""
    makers = {i: node for node in graph.nodes for i in node.outputs}
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        if node.category not in MOVABLE or node.run is None or node.run != node.low or node.low == FLOAT32:
            continue
        results = [i for i in node.outputs if graph.values[i].traced]
        users = [u for i in results for u in graph.values[i].users]
        wanted = {w for i in results for w in _wanted(graph, i, reads, returned)}
        if wanted == {FLOAT32} and (len(users) == 1 or OUTPUT in users) and _rounds(graph, node, makers):
            _move(graph, node, FLOAT32, "leads to a float32 operation alone")


def round_once(graph: Graph, reads: Reads, returned: Sequence[np.dtype | None]) -> None:
    """A float32 result that some users read low, and others in float32 only to give something low, is held low."""
    for node in graph.nodes:
        if node.category not in MOVABLE or node.run != FLOAT32 or node.low in (None, FLOAT32) or len(node.outputs) != 1:
            continue
        value, number = graph.values[node.outputs[0]], node.outputs[0]
        if not value.loud or value.numbers < size(value.aval) or OUTPUT in value.users:
            continue
        wide = [graph.nodes[u] for u in value.users if reads(u, number) != node.low]
        if 0 < len(wide) < len(value.users) and all(_narrows(graph, n, reads, returned) for n in wide):
            value.dtype = node.low


def _narrows(graph: Graph, node: Node, reads: Reads, returned: Sequence[np.dtype | None]) -> bool:
    """Whether a float32 operation on single elements is read low by all its users."""
    if node.category != "full" or len(node.outputs) != 1 or node.plans:
        return False
    shapes = [graph.values[i].aval.shape for i in (node.inputs[0], node.outputs[0])]
    return shapes[0] == shapes[1] and _wanted(graph, node.outputs[0], reads, returned) == {node.low}


def _rounds(graph: Graph, node: Node, makers: dict[int, Node]) -> bool:
    """Whether a rounding goes away when the node runs in float32: what only moves data passes on those before it."""
    while node.category == "keep":
        value = next(i for i in node.inputs if graph.values[i].traced)
        maker = makers.get(value)
        if maker is None or maker.category not in MOVABLE or len(graph.values[value].users) > 1:
            return False
        if maker.run != maker.low or not graph.values[value].low:
            return False
        node = maker
    return True


def _wanted(graph: Graph, value: int, reads: Reads, returned: Sequence[np.dtype | None]) -> set[np.dtype | None]:
    wanted: set[np.dtype | None] = {reads(u, value) for u in graph.values[value].users if u != OUTPUT}
    wanted |= {r for o, r in zip(graph.outputs, returned, strict=True) if o == value}
    return wanted


def _move(graph: Graph, node: Node, dtype: np.dtype, reason: str) -> None:
    node.run, node.reason = dtype, reason
    for i in node.outputs:
        if graph.values[i].traced:
            graph.values[i].dtype = dtype
