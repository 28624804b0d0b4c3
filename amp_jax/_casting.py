"""Which leaves of a pytree a policy casts: real floating arrays of 16 bits or more, JAX's and NumPy's.

Left as they come: integers, bools, complex numbers, keys, float0, float8 (whose numbers mean nothing without the scale
beside them), None, and Python scalars, which take the dtype of what they meet anyway.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax import _dtypes


def cast(tree: Any, dtype: Any) -> Any:
    """Every floating leaf of the tree in one dtype.

    >>> cast({"w": np.ones(2), "step": 3}, jnp.bfloat16)["w"].dtype
    dtype(bfloat16)
    """
    return jax.tree.map(lambda leaf: cast_leaf(leaf, dtype), tree)


def cast_by_path(tree: Any, dtype_at: Callable[[str], Any]) -> Any:
    """Every floating leaf in the dtype for its path, a string like `decoder/head/kernel`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: cast_leaf(leaf, dtype_at(path_of(path))), tree)


def path_of(keys: tuple[Any, ...]) -> str:
    """A leaf's path as rules see it: names and numbers between slashes, the linen collection left out."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]
    return "/".join(names[1:] if names[:1] == ["params"] else names)


def cast_leaf(leaf: Any, dtype: Any) -> Any:
    """The leaf in the dtype; the same object where there is nothing to cast."""
    own = _floating(leaf)
    if own is None or own == dtype:
        return leaf if own is None or isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jnp.asarray(leaf, dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    return jnp.asarray(leaf, dtype)


def _floating(leaf: Any) -> np.dtype[Any] | None:
    """The leaf's dtype as JAX reads it, if it is ours to cast."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return None
    return np.dtype(leaf.dtype) if _dtypes.is_float(leaf.dtype) else None
