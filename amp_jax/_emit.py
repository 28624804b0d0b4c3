"""Run a plan: bind every equation again, with the casts in place.

A value is cast at most once to each dtype, where it is first needed in it. Loops, branches and blocks are bound through
JAX's public functions around their own plans; what the plan leaves alone is bound exactly as it was traced.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from amp_jax import _custom_rules
from amp_jax._jaxpr import as_function, bind, current_stack, rebind, scan_lengths, within
from amp_jax._plan import Plan, Step
from amp_jax._product import product
from amp_jax._recompute import DRAWN, Unit, loop_body, schedule

FLOAT32 = np.dtype(np.float32)
_DTYPE_PARAMS = ("preferred_element_type", "out_dtype", "dtype", "new_dtype")


def emit(plan: Plan, args: Sequence[Any]) -> list[Any]:
    """Evaluate the plan; `args` come in `plan.input_dtypes`, results leave in `plan.output_dtypes`."""
    return _evaluate(plan, args, schedule(plan))


def _evaluate(plan: Plan, args: Sequence[Any], units: Sequence[Unit], named: frozenset[int] = frozenset()) -> list[Any]:
    """Evaluate the plan in this order; the values in `named` get a name that a checkpoint policy knows."""
    held = _Held(plan, dict(zip(plan.inputs, args, strict=True)))
    base = current_stack()
    for unit in units:
        if len(unit) == 1:
            _advance(held, unit, base)
        else:
            _recomputed(held, unit, base)
        for value in named.intersection(v for n in unit for v in plan.steps[n].outputs):
            held.values[value] = checkpoint_name(held.values[value], DRAWN)
    return [held.read(i, d) for i, d in zip(plan.outputs, plan.output_dtypes, strict=True)]


class _Held:
    """The values that there are so far, and what they were cast to."""

    def __init__(self, plan: Plan, values: dict[int, Any]):
        self.plan, self.values, self.casts = plan, values, dict[tuple[int, np.dtype[Any]], Any]()

    def read(self, number: int, dtype: np.dtype[Any] | None) -> Any:
        if number not in self.values:
            self.values[number] = self.plan.constants[number]
        value = self.values[number]
        if dtype is None or self.plan.avals[number].dtype != FLOAT32 or _dtype(value) == dtype:
            return value
        key = (number, dtype)
        if key not in self.casts:
            self.casts[key] = cast(value, dtype)
        return self.casts[key]

    def rounded(self, number: int, result: Any) -> Any:
        """A step's result in the dtype that the value is held in."""
        dtype = self.plan.dtypes[number]
        ours = dtype is not None and self.plan.avals[number].dtype == FLOAT32
        return cast(result, dtype) if ours and _dtype(result) != dtype else result


def _advance(held: _Held, numbers: Sequence[int], base: Any) -> None:
    """Run steps, in order."""
    for step in (held.plan.steps[n] for n in numbers):
        with within(step.eqn, base if step.stack is None else base + step.stack):
            operands = [
                spread(held.read(i, None), d, step) if _sinks(held.plan, step, i, d) else held.read(i, d)
                for i, d in zip(step.inputs, step.operand_dtypes, strict=True)
            ]
            if any(held.plan.born_in_float32(step, i) for i in step.inputs):
                x, y = (
                    held.read(i, None if held.plan.born_in_float32(step, i) else d)
                    for i, d in zip(step.inputs, step.operand_dtypes, strict=True)
                )
                held.values[step.outputs[0]] = product((x, y), operands, step.eqn.params)
            else:
                results = zip(step.outputs, run(step, operands), strict=True)
                held.values.update((i, held.rounded(i, x)) for i, x in results)


def _recomputed(held: _Held, numbers: Sequence[int], base: Any) -> None:
    """Run steps as one block that keeps nothing but its inputs for the backward pass."""
    steps, inside = [held.plan.steps[n] for n in numbers], set(numbers)
    made = dict.fromkeys(v for step in steps for v in step.outputs)
    given = dict.fromkeys(v for s in steps for v in s.inputs if v not in made and v not in held.plan.constants)
    leaving = [v for v in made if not inside.issuperset(held.plan.users[v])]

    @jax.checkpoint
    def block(*args: Any) -> list[Any]:
        own = _Held(held.plan, dict(zip(given, args, strict=True)))
        _advance(own, numbers, base)
        return [own.values[v] for v in leaving]

    held.values.update(zip(leaving, block(*(held.read(v, None) for v in given)), strict=True))


def _sinks(plan: Plan, step: Step, number: int, dtype: np.dtype[Any] | None) -> bool:
    """Whether a float32 operand (a bias, a scale) is stretched by a low operation: the cast then comes after.

    Transposed, the stretch is a sum over the batch, which is then a float32 one and costs nothing extra.
    """
    if step.category != "follow" or dtype in (None, FLOAT32) or plan.dtypes[number] != FLOAT32 or step.plans:
        return False
    shape, result = plan.avals[number].shape, plan.avals[step.outputs[0]].shape
    return number not in plan.constants and len(shape) == len(result) > 0 and shape != result


def spread(value: Any, dtype: Any, step: Step) -> Any:
    """Stretch a value to the shape of the step's result, then cast it."""
    aval: Any = step.eqn.outvars[0].aval
    shape = aval.shape
    return lax.convert_element_type(lax.broadcast_in_dim(value, shape, tuple(range(len(shape)))), dtype)


def cast(value: Any, dtype: Any) -> Any:
    """Constants are converted here and now, arrays by an equation."""
    if not isinstance(value, jax.Array) and np.ndim(value) == 0:
        return np.asarray(value).astype(dtype)
    return lax.convert_element_type(value, dtype)


def _dtype(value: Any) -> Any:
    return getattr(value, "dtype", FLOAT32)


def run(step: Step, operands: list[Any]) -> list[Any]:
    """Bind one step."""
    name = step.eqn.primitive.name
    if step.plans and not _as_traced(step):
        return _HOLDERS.get(name, _block)(step, operands)
    if name in _BOUND_BY_JAX:
        return as_function(step.eqn, step.owner)(*operands)
    if name == "convert_element_type":
        return [_convert(step, operands[0])]
    low = next((d for d in step.operand_dtypes if d not in (None, FLOAT32)), None)
    if low is None:
        return bind(step.eqn, operands, step.eqn.params)
    if name in _SCATTERS:
        return [_scatter(step, operands)]
    params = {k: low if k in _DTYPE_PARAMS and v == FLOAT32 else v for k, v in step.eqn.params.items()}
    return bind(step.eqn, operands, params)


_BOUND_BY_JAX = ("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call", "call", "shard_map")
"""What `bind` takes in another form than an equation's params have it."""


def _as_traced(step: Step) -> bool:
    """Whether a step with programs inside changes nothing: it is then bound untouched, its inner caches with it."""
    kept = all(d in (None, FLOAT32) for d in (*step.operand_dtypes, *step.result_dtypes))
    return kept and all(p.unchanged for p in step.plans)


def _convert(step: Step, operand: Any) -> Any:
    """A cast that the author wrote; one to float32 of a value that is held low is none."""
    target = step.result_dtypes[0] or step.eqn.params["new_dtype"]
    if _dtype(operand) == target and not step.eqn.params["weak_type"] and hasattr(operand, "dtype"):
        return operand
    params = dict(step.eqn.params, new_dtype=np.dtype(target) if step.result_dtypes[0] else target)
    return bind(step.eqn, [operand], params)[0]


_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


def _scatter(step: Step, operands: list[Any]) -> Any:
    """A scatter holds the update as a jaxpr of the traced dtype: it is built anew."""
    params = step.eqn.params
    return _SCATTERS[step.eqn.primitive.name](
        *operands,
        dimension_numbers=params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


def _block(step: Step, operands: list[Any]) -> list[Any]:
    """Jit with shardings or donation, remat."""
    return rebind(step.eqn, lambda *args: emit(step.plans[0], args), operands)


def _scan(step: Step, operands: list[Any]) -> list[Any]:
    n, m = scan_lengths(step.eqn)
    consts, params, plan = operands[:n], step.eqn.params, step.plans[0]
    evaluated = loop_body(plan, functools.partial(_evaluate, plan))

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = evaluated(*consts, *carry, *xs)
        return out[:m], out[m:]

    carry, ys = lax.scan(
        body,
        operands[n : n + m],
        operands[n + m :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(step: Step, operands: list[Any]) -> list[Any]:
    n, m = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    asked, consts = operands[:n], operands[n : n + m]
    test, body = step.plans
    return lax.while_loop(
        lambda carry: emit(test, [*asked, *carry])[0],
        lambda carry: emit(body, [*consts, *carry]),
        operands[n + m :],
    )


def _cond(step: Step, operands: list[Any]) -> list[Any]:
    branches = [lambda *args, p=p: emit(p, args) for p in step.plans]
    return lax.switch(operands[0], branches, *operands[1:])


def _shard_map(step: Step, operands: list[Any]) -> list[Any]:
    params = step.eqn.params
    body = jax.shard_map(
        lambda *args: emit(step.plans[0], args),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=frozenset(params.get("newly_manual_axes", params.get("manual_axes", ()))),
    )
    return body(*operands)


def _custom_jvp(step: Step, operands: list[Any]) -> list[Any]:
    return _custom_rules.custom_jvp(step, operands, emit)


def _custom_vjp(step: Step, operands: list[Any]) -> list[Any]:
    return _custom_rules.custom_vjp(step, operands, emit)


_HOLDERS: dict[str, Callable[[Step, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}

__all__ = ["cast", "emit"]
