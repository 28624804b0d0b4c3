"""A matrix product on the half-precision units whose cotangents are born in float32.

Casting a weight before the product, `dot(x, w.astype(bfloat16))`, gives its gradient in half: the product's transpose
rounds it, and the cast's transpose carries the rounded numbers up. The matrix units accumulate in float32 anyway, so
here the cast is a part of the product, forward and backward: the cotangent of each operand is a product of half
operands with a result in the dtype that the operand came in. The gradient isn't rounded, and a pass over it is saved.

Forward and backward share one cast of each operand. With a second cast in the backward pass, XLA would gather a weight
that is sharded over devices once for each: as many bytes as float32 sends.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from amp_jax._jaxpr import cotangent, new_bilinear


def product(sources: Sequence[Any], operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """`lax.dot_general` of low operands.

    Args:
        sources: The two values, each in the dtype that its cotangent is to have.
        operands: The same two, in the compute dtype.
        params: The other arguments of `lax.dot_general`; the result is in the compute dtype too.
    """
    compute = np.dtype(operands[0].dtype)
    params = dict(params, preferred_element_type=compute)

    # The value stays a dot_general, for jax.checkpoint's policies to know; only the tangent is of our own making.
    @jax.custom_jvp
    def call(x: Any, y: Any, x_low: Any, y_low: Any) -> Any:
        return lax.dot_general(x_low, y_low, **params)

    def rule(primals: Any, tangents: Any) -> Any:
        (_, _, x_low, y_low), (x_dot, y_dot, *_) = primals, tangents
        parts: list[Any] = []
        if not isinstance(x_dot, SymbolicZero):
            parts.append(_bilinear.bind(x_dot, y_low, compute=compute, **params))
        if not isinstance(y_dot, SymbolicZero):
            parts.append(_bilinear.bind(x_low, y_dot, compute=compute, **params))
        value = lax.dot_general(x_low, y_low, **params)
        return value, sum(parts[1:], parts[0]) if parts else SymbolicZero(jax.typeof(value))

    call.defjvp(rule, symbolic_zeros=True)
    return call(*sources, *operands)


def _to(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _apply(x: Any, y: Any, *, compute: Any, **params: Any) -> Any:
    return lax.dot_general(_to(x, compute), _to(y, compute), **params)


def _on_cpu(x: Any, y: Any, *, compute: Any, preferred_element_type: Any, **params: Any) -> Any:
    """XLA's CPU fails on some shapes of `BF16 x BF16 = F32`, which ones depends on what it has made of the operands."""
    x, y = (_to(_to(v, compute), preferred_element_type) for v in (x, y))
    return lax.dot_general(x, y, preferred_element_type=preferred_element_type, **params)


def _transpose(side: int, result: Any, aval: Any, other: Any, compute: Any, params: dict[str, Any]) -> Any:
    params = dict(params, preferred_element_type=np.dtype(aval.dtype))
    result, other = _to(result, compute), _to(other, compute)
    plain = np.dtype(aval.dtype) == compute
    new = _apply if plain else _bilinear.bind
    return cotangent(lax.dot_general_p, side, result, aval, other, params, functools.partial(new, compute=compute))


def _transpose_x(result: Any, x: Any, y: Any, *, compute: Any, **params: Any) -> Any:
    return _transpose(0, result, x.aval, y, compute, params)


def _transpose_y(result: Any, x: Any, y: Any, *, compute: Any, **params: Any) -> Any:
    return _transpose(1, result, y.aval, x, compute, params)


def _batched(operands: Any, axes: tuple[Any, Any], *, dimension_numbers: Any, **params: Any) -> tuple[Any, int]:
    """A mapped axis of both operands is one more batch axis; of one, one more of its free axes."""
    (x, y), (x_axis, y_axis) = operands, axes
    (x_sum, y_sum), (x_batch, y_batch) = dimension_numbers
    x_sum, x_batch = _skip(x_sum, x_axis), _skip(x_batch, x_axis)
    y_sum, y_batch = _skip(y_sum, y_axis), _skip(y_batch, y_axis)
    free = lambda ndim, *taken: [i for i in range(ndim) if not any(i in some for some in taken)]  # noqa: E731
    if x_axis is not None and y_axis is not None:
        x_batch, y_batch, result_axis = (x_axis, *x_batch), (y_axis, *y_batch), 0
    elif x_axis is not None:
        result_axis = len(x_batch) + free(x.ndim, x_sum, x_batch).index(int(x_axis))
    else:
        left = len(free(x.ndim, x_sum, x_batch))
        result_axis = len(x_batch) + left + free(y.ndim, y_sum, y_batch).index(int(y_axis or 0))
    dims = ((x_sum, y_sum), (x_batch, y_batch))
    return _bilinear.bind(x, y, dimension_numbers=dims, **params), result_axis


def _skip(dims: Any, axis: int | None) -> tuple[int, ...]:
    """The same axes once a mapped one is put among them."""
    return tuple(d + (axis is not None and d >= axis) for d in dims)


_bilinear = new_bilinear(
    "mixed_dot_general",
    _apply,
    _on_cpu,
    (_transpose_x, _transpose_y),
    _batched,
    ("compute", "dimension_numbers", "precision", "preferred_element_type", "out_sharding"),
)
