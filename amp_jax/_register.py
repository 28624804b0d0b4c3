"""One's own operation under autocast: a primitive, a kernel, a function with derivative rules of its own.

autocast can't look into a kernel, and gives it what it was traced with: float32. Who knows better says so here. A
*registered* function is called with its operands in the dtype that its category names, so that a kernel written for
half precision is traced in half precision, forward and backward.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax import _dtypes, _regions
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._graph import FLOAT32
from amp_jax._jaxpr import Primitive, is_primitive, mark_primitive
from amp_jax._ops import OPS
from amp_jax._policy import assignable

F = TypeVar("F")
WHOLE = ("compute", "full", "opaque")
"""The categories of a function, which runs in one dtype from end to end."""


@overload
def register_op(op: F, category: str) -> F: ...
@overload
def register_op(op: None = None, category: str = ...) -> Callable[[F], F]: ...
def register_op(op: Any = None, category: str = "opaque") -> Any:
    """Say how autocast treats an operation of your own: a primitive, a Pallas kernel, a custom_vjp function.

    >>> import functools, jax, jax.numpy as jnp, amp_jax as amp
    >>> @functools.partial(amp.register_op, category="compute")
    ... def my_kernel(x, y):  # pallas_call, ffi_call, or what else autocast can't look into
    ...     assert x.dtype == y.dtype == jnp.bfloat16, x.dtype
    ...     return x @ y
    >>> f = amp.autocast(lambda x, y: my_kernel(x, y) + 1, "mixed_bfloat16")
    >>> f(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype
    dtype('float32')

    cuDNN's fused attention takes half operands alone. Registered, it serves any Flax model that takes an attention
    function:

    >>> fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    >>> attention = amp.register_op(fused, "compute")

    Args:
        op: A function of pytrees, or a `jax.extend.core.Primitive` of your own.
        category: Of a function: `"compute"`: float32 arrays among its arguments come in the compute dtype in force;
            `"full"`: everything in it, forward and backward, runs in float32; `"opaque"`: exactly as it is written. A
            primitive may have any category of `Policy.with_ops`, which wins over this one.

    Returns:
        The function to call in place of `op`; outside autocast, and where the compute dtype is float32, it is `op`.
        A primitive itself, which carries its category from now on.

    Raises:
        AmpTypeError: `op` can't be called.
        AmpValueError: The category is unknown, or the primitive is JAX's own: `Policy.with_ops` is for those.
    """
    if op is None:
        return lambda op: register_op(op, category)
    if is_primitive(op):
        return _primitive(op, category)
    if not callable(op):
        raise AmpTypeError(f"`amp.register_op(op)` expects a function or a primitive, got {type(op).__name__}: {op!r}.")
    if category not in WHOLE:
        raise AmpValueError(
            f"`category` of a function is {category!r}, which is unknown. {_dtypes.suggest(str(category), WHOLE)}"
        )

    @functools.wraps(op)
    def registered(*args: Any, **kwargs: Any) -> Any:
        dtype = _regions.in_force()
        if dtype is None or dtype == FLOAT32:
            return op(*args, **kwargs)
        if category == "full":
            with _regions.region(FLOAT32):
                return op(*args, **kwargs)
        with _regions.finished():
            return _low(op, dtype, args, kwargs) if category == "compute" else op(*args, **kwargs)

    return registered


def _primitive(primitive: Primitive, category: str) -> Primitive:
    assignable({primitive.name: category}, "category")
    if primitive.name in OPS:
        raise AmpValueError(
            f"`op` is {primitive.name}, JAX's own, and has a category. For one policy: "
            f'`policy.with_ops({{"{primitive.name}": "{category}"}})`.'
        )
    mark_primitive(primitive, category)
    return primitive


def _low(fun: Callable[..., Any], dtype: np.dtype[Any], args: Any, kwargs: Any) -> Any:
    """Call `fun` in the compute dtype; what comes out in it goes on as float32, as autocast traces."""
    leaves = jax.tree.leaves((args, kwargs))
    if not any(_is_float32(x) for x in leaves):
        return fun(*args, **kwargs)
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x, dtype) if _is_float32(x) else x, (args, kwargs))
    out = fun(*args, **kwargs)
    return jax.tree.map(lambda x: x.astype(FLOAT32) if getattr(x, "dtype", None) == dtype else x, out)


def _is_float32(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype == FLOAT32
