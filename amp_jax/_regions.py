"""Which compute dtype holds where: regions of a program, marked in the name stack.

A *region* is a part of a program that runs under a compute dtype of its own. It is opened by a `jax.named_scope` with a
reserved name, which every equation inside carries through jit, scan, remat, grad and vmap. Where autocast has already
been at work, its equations carry a mark of their own, and an autocast around them leaves them as they are.

A function that has to know the compute dtype while it is traced (`register_op`) asks which policy is *in force*. JAX
keeps that, by thread, and traces a jitted function once for each: what was traced in half is not run outside.
"""

import re
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from amp_jax import _dtypes
from amp_jax._jaxpr import current_stack
from amp_jax._policy import Policy, get_policy

_DONE = "amp.autocast"
_REGION = re.compile(r"amp\.precision=(\w+)")
_TRANSFORM = re.compile(r"\b\w+\(|\)")
_policy: Any = jax.make_user_context(None)


@contextmanager
def region(dtype: Any) -> Generator[None]:
    """Everything traced inside runs under this compute dtype."""
    name = dtype if isinstance(dtype, str) else _dtypes.name(np.dtype(dtype))
    inside = None if _policy.value is None else get_policy(name).resolve()
    with jax.named_scope(f"amp.precision={name}"), _policy(inside):
        yield


def traced_under(policy: Policy | None) -> AbstractContextManager[Any]:
    """This policy is in force while a function is traced."""
    return _policy(policy)


def in_force() -> np.dtype[Any] | None:
    """The compute dtype for what is being traced here; None outside autocast, and where dtypes are settled."""
    return None if _policy.value is None else compute_dtype(str(current_stack()), _policy.value)


def finished() -> AbstractContextManager[Any]:
    """Everything traced inside has its dtypes already."""
    return jax.named_scope(_DONE)


def module_path(scope: str) -> str:
    """`jvp(GPT)/Block_0/amp.precision=float32` -> `GPT/Block_0`: the scopes that the user or Flax named."""
    names = _TRANSFORM.sub("", scope).split("/")
    return "/".join(name for name in names if name and name != _DONE and not _REGION.fullmatch(name))


def compute_dtype(scope: str, policy: Policy) -> np.dtype[Any] | None:
    """The compute dtype in force at a name stack; None where the equations have their dtypes already."""
    if _DONE in scope:
        return None
    marks = _REGION.findall(scope)
    if marks:
        return np.dtype(get_policy(marks[-1]).resolve().compute_dtype)
    return np.dtype(policy.at(module_path(scope)).compute_dtype)


def nothing() -> AbstractContextManager[Any]:
    """No region: what is traced inside belongs to the one around it."""
    return nullcontext()
