"""tabulate: what a policy means for each module of a model, read from the program that `wrap` makes of it."""

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_jax import _dtypes, _marks
from amp_jax._autocast import of_arrays, split
from amp_jax._graph import dtype_of, size
from amp_jax._jaxpr import equations, inner_jaxprs, trace
from amp_jax._marks import Part, Watched
from amp_jax._module_report import AUTHOR, PLAN, POLICY, ModuleReport, ModuleRow
from amp_jax._ops import OPS
from amp_jax._policy import Policy, get_policy
from amp_jax._residuals import residuals
from amp_jax._wrap import library_of


def tabulate(module: Any, policy: Any, *args: Any, method: str = "__call__", **kwargs: Any) -> ModuleReport:
    """A table of a model's modules: their dtypes under a policy and which rule gave them, and the bytes that they keep.

    Nothing is computed and no parameter is made: the model is traced as `wrap` runs it. Use it to choose a policy, and
    to see that its rules mean the modules that they should.

    >>> import flax.linen as nn, jax.numpy as jnp, amp_jax as amp
    >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(4)])
    >>> policy = amp.get_policy("mixed_bfloat16").override({"layers_2": "float32"})
    >>> for row in amp.tabulate(model, policy, jnp.ones((8, 16))).rows[1:]:
    ...     print(row.path, row.module, row.param_dtypes, row.compute_dtypes, row.compute_from)
    layers_0 Dense ('float32',) ('bfloat16',) policy
    layers_2 Dense ('float32',) ('float32',) layers_2

    Args:
        module: A linen or nnx module; the module itself stays as it is. One that is wrapped brings its policy along.
        policy: A `Policy`, or what `get_policy` takes. None for a wrapped module.
        *args: What the model is called with; arrays may be `jax.ShapeDtypeStruct`s.
        method: The name of the method that is called.
        **kwargs: The same by name.

    Returns:
        A `ModuleReport`: `str()`, `_repr_html_()`, `.rows`, `.totals`.

    Raises:
        AmpTypeError: `module` is no Flax module.
        AmpValueError: A rule matches no module; or the module is wrapped, and `policy` isn't None.

    The layout is that of `flax.linen.tabulate`.
    """
    adapter: Any = importlib.import_module(f"amp_jax._{library_of(module, 'amp.tabulate')}_watch")
    module, chosen = adapter.unwrapped(module, policy)
    chosen = get_policy(chosen)
    watched: Watched = adapter.watched(module, chosen, method, args, kwargs)
    inputs = split(((watched.state, *args), kwargs))
    call = of_arrays(watched.call, inputs)
    facts = _read(trace(call, *inputs.arrays).jaxpr)
    kept = _kept(call, inputs.arrays)
    parts = watched.parts()
    modules = {part.path: part.kinds[0] for part in parts.values()}
    order = dict.fromkeys([*facts, *parts])
    row = functools.partial(_row, policy=chosen.resolve(), modules=modules)
    rows = tuple(
        row(parts[n], facts[n], None if kept is None else kept[n])
        for n in order
        if n in parts and (n in facts or parts[n].params)
    )
    totals = {"param_bytes": sum(r.param_bytes for r in rows)}
    if kept is not None:
        plain: Watched = adapter.watched(module, get_policy("float32"), method, args, kwargs)
        inputs = split(((plain.state, *args), kwargs))
        before = _kept(of_arrays(plain.call, inputs), inputs.arrays)
        totals["activation_bytes"] = sum(kept.values())
        totals["activation_bytes_float32"] = sum((before or {}).values())
    return ModuleReport(type(module).__name__, str(chosen.resolve()), rows, totals)


@dataclass
class _Facts:
    """What the program shows of one module: the dtypes that its products read, and those of what it returns."""

    products: dict[str, None] = field(default_factory=dict[str, None])
    results: dict[str, None] = field(default_factory=dict[str, None])


def _read(jaxpr: Any) -> dict[int, _Facts]:
    """The facts by module number, in the order of the calls."""
    facts: dict[int, _Facts] = defaultdict(_Facts)
    for eqn, scope in _all(jaxpr, ""):
        path = _marks.around(scope)
        for number in path:
            facts.setdefault(number, _Facts())
        whose = _marks.returned_by(eqn)
        if whose is not None and path[-1:] != (whose,):  # else one of its methods called another
            facts[whose].results |= _floats(eqn.outvars)
        elif path and OPS.get(eqn.primitive.name, ("",))[0] == "compute":
            facts[path[-1]].products |= _floats(eqn.invars)
    return facts


def _all(jaxpr: Any, around: str) -> Iterator[tuple[Any, str]]:
    """Every equation with its name stack; of what holds equations, these."""
    for eqn in equations(jaxpr):
        scope = "/".join(filter(None, (around, str(eqn.source_info.name_stack))))
        yield eqn, scope
        for inner in inner_jaxprs(eqn):
            yield from _all(inner, scope)


def _floats(variables: Any) -> dict[str, None]:
    dtypes = (dtype_of(v.aval) for v in variables)
    return {_dtypes.name(d): None for d in dtypes if d is not None and _dtypes.is_float(d)}


def _kept(call: Callable[..., Any], arrays: Any) -> dict[int, int] | None:
    """The bytes of what each module keeps for the backward pass; None for a function that has none."""
    kept: dict[int, int] = defaultdict(int)
    try:
        for residual in residuals(call, arrays):
            kept[(_marks.around(residual.scope) or (0,))[-1]] += residual.bytes
    except (ValueError, TypeError, NotImplementedError):
        return None
    return kept


def _row(part: Part, facts: _Facts, kept: int | None, policy: Policy, modules: Mapping[str, type]) -> ModuleRow:
    key = functools.partial(_key, policy, part.path, modules)
    here = policy.at(part.path, modules)
    params = tuple(dict.fromkeys(_dtypes.name(p.dtype) for p in part.params))
    param_from = [AUTHOR if d != _dtypes.name(here.param_dtype) else key("param_dtype") for d in params]
    compute = _dtypes.name(here.compute_dtype)
    computes = tuple(facts.products) or (compute,)
    compute_from = [key("compute_dtype") if d == compute else AUTHOR for d in computes]
    results = tuple(facts.results)
    output_from = key("output_dtype")
    if part.path and output_from == POLICY:
        output_from = PLAN
    return ModuleRow(
        part.path,
        " + ".join(kind.__name__ for kind in part.kinds),
        params,
        computes,
        results,
        ", ".join(dict.fromkeys(param_from)),
        ", ".join(dict.fromkeys(compute_from)),
        output_from if results else "",
        sum(size(p) * np.dtype(p.dtype).itemsize for p in part.params),
        kept,
        part.aliases,
    )


def _key(policy: Policy, path: str, modules: Mapping[str, type], part: str) -> str:
    """The key of the rule that decides this dtype, or who else does."""
    rule = policy.rule_for(path, part, modules)
    if rule is None:
        return POLICY
    return rule.key.__name__ if isinstance(rule.key, type) else rule.key
