"""Whether the numbers of a tree are finite.

A *tree* is any JAX pytree, a *leaf* one of its arrays. A leaf *counts* if it holds real or complex floating-point
numbers; ints, bools, random keys, float0 and None can't be infinite and are ignored.

Two checks with one bool each. `all_finite` is exact. `norm_is_finite` asks whether the sum of all squares is finite:
the answer differs only for numbers so large that their squares overflow float32, and the sum is what clipping by global
norm computes too, so that the compiler does both in one pass over the gradients.

A GPU spends two kernels on every full reduction, whatever its size. Small leaves of one shape are therefore combined
element by element first and reduced together. They are never concatenated: that would move data between devices where
leaves are sharded.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Elements below which a reduction costs its launches rather than its bytes: 4 MB of float32 take an H100 a microsecond.
# Larger leaves stay alone. If two of one shape are sharded differently, which can't be seen under jit, combining them
# moves one of them between devices; and a sum over one leaf is what a clip by global norm can share.
SMALL = 2**20


def all_finite(tree: Any) -> jax.Array:
    """Whether no leaf of a tree holds inf or NaN.

    Exact: no finite number, however large, fails. Complex numbers are finite if both parts are. An empty tree is
    finite. Works on arrays, NumPy arrays and Python floats, inside jit, vmap and shard_map; outside of jit it is one
    compiled call. On sharded arrays the answer is that for the whole array.

    >>> import jax.numpy as jnp
    >>> import amp_jax as amp
    >>> bool(amp.all_finite({"w": jnp.ones(3), "step": 7}))
    True
    >>> bool(amp.all_finite([jnp.array([1.0, jnp.inf])]))
    False

    Args:
        tree: any pytree. Ints, bools, keys, float0 and None are ignored.

    Returns:
        A bool array of shape ().
    """
    return _all_finite([leaf for leaf in jax.tree.leaves(tree) if is_floating(leaf)])


def norm_is_finite(leaves: Sequence[jax.Array]) -> jax.Array:
    """Whether the float32 sum of the squares of all leaves is finite.

    Written as `optax.global_norm` writes it: XLA then merges the check with a clipping by global norm that sees the
    same gradients.

    >>> import jax.numpy as jnp
    >>> bool(norm_is_finite([jnp.ones(3), jnp.array(jnp.nan)])), bool(norm_is_finite([jnp.array(2.0**100)]))
    (False, False)

    Args:
        leaves: floating-point or complex arrays.

    Returns:
        A bool array of shape ().
    """
    return _norm_is_finite(list(leaves))


def is_floating(leaf: Any) -> bool:
    """Whether a leaf counts: a real or complex floating-point array or Python number."""
    if isinstance(leaf, float | complex):
        return True
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, np.inexact)


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    flags = [jnp.all(_merge(operator.and_, jnp.isfinite, group)) for group in _groups(leaves)]
    return functools.reduce(operator.and_, flags, jnp.bool_(True))


@jax.jit
def _norm_is_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.isfinite(sum(jnp.sum(_merge(operator.add, _square, group)) for group in _groups(leaves)))


def _groups(leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Leaves to reduce together: small, of one shape, and of one sharding where the trace knows it."""
    groups: dict[Any, list[jax.Array]] = {}
    for number, leaf in enumerate(leaves):
        key = (leaf.shape, jax.typeof(leaf).sharding) if leaf.size < SMALL else number
        groups.setdefault(key, []).append(leaf)
    return list(groups.values())


def _merge(
    operation: Callable[[jax.Array, jax.Array], jax.Array],
    function: Callable[[jax.Array], jax.Array],
    group: Sequence[jax.Array],
) -> jax.Array:
    return functools.reduce(operation, map(function, group))


def _square(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.promote_types(x.dtype, np.float32))
    return (x.conj() * x).real
