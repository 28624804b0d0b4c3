"""Where one module of a model calls another, and a rule makes a difference: on the way in and on the way out."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax import _casting, _dtypes, _regions
from amp_jax._graph import FLOAT32
from amp_jax._policy import Policy
from amp_jax._rule import Rule


class Running(NamedTuple):
    """A module whose method is running.

    Attributes:
        path: Its path.
        dtype: The compute dtype that holds in it.
        output: The rule that gives it an output dtype, if one does.
    """

    path: str
    dtype: Any
    output: Rule | None


def running(policy: Policy, path: str, modules: Mapping[str, type] = MappingProxyType({})) -> Running:
    """The module at this path; `modules` has the types for rules whose key is a class."""
    dtype = policy.at(path, modules).compute_dtype
    return Running(path, dtype, policy.rule_for(path, "output_dtype", modules))


def border(here: Running, caller: Running) -> AbstractContextManager[Any]:
    """A region, where the module runs in another dtype than the one that calls it."""
    return _regions.region(here.dtype) if here.dtype != caller.dtype else _regions.nothing()


def leaving(out: Any, here: Running, caller: Running) -> Any:
    """The results of a module, in its output dtype if that is given by a rule which the caller isn't under.

    They are traced in float32 as before, so that a loop's carry keeps its type; the plan knows what they are held in.
    """
    if here.output is None or here.output == caller.output or not here.path:
        return out  # the whole model's results are cast when they have left autocast
    output = here.output.output_dtype

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.dtype != FLOAT32:
            return _casting.cast_leaf(x, output)
        if output == here.dtype == FLOAT32:
            return x
        half = x.astype(here.dtype if output == FLOAT32 else output)
        with _regions.nothing() if output == FLOAT32 else _regions.finished():
            return half.astype(FLOAT32)

    return jax.tree.map(leaf, out)


@contextmanager
def without_own_dtype(module: Any) -> Generator[None]:
    """A module that a rule gives a compute dtype, as if its author had given it no half `dtype`: the rule wins."""
    own = getattr(module, "dtype", None)
    if not _is_wish(own):
        yield
        return
    held = "dtype" in vars(module)
    object.__setattr__(module, "dtype", jnp.float32)  # linen's modules are frozen, and nnx's note what is set
    try:
        yield
    finally:
        object.__setattr__(module, "dtype", own) if held else object.__delattr__(module, "dtype")


def _is_wish(dtype: Any) -> bool:
    """Whether the value of an attribute is a dtype that an author chose: float32 is only Flax's own spelling."""
    try:
        return dtype is not None and _dtypes.is_float(np.dtype(dtype)) and np.dtype(dtype) != FLOAT32
    except TypeError:
        return False
