"""What tests of transformed programs look at: the dtypes in a jaxpr, and the two half policies."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import amp_jax as amp

LOW = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}
both_halves = pytest.mark.parametrize("policy", list(LOW))


def result_dtypes(fun: Callable[..., Any], *args: Any, of: str = "dot_general") -> list[str]:
    """The result dtype of every equation of one primitive, inner programs included, as jaxprs spell it."""
    return re.findall(rf"(\w+)\[[\d,]*\](?:\{{[^}}]*\}})? = {of}\b", str(jax.make_jaxpr(fun)(*args)))


def products(fun: Callable[..., Any], *args: Any) -> list[tuple[str, str, str]]:
    """The dtypes of both operands and of the result of every matrix product, inner programs included."""
    kinds = ("dot_general", "mixed_dot_general", "conv_general_dilated")
    return [
        tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars))
        for jaxpr in jaxprs(jax.make_jaxpr(fun)(*args))
        for eqn in jaxpr.eqns
        if eqn.primitive.name in kinds
    ]


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    """A program and all that it holds."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            for inner in param if isinstance(param, (tuple, list)) else (param,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from jaxprs(inner)


def dot_operands(fun: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes of all operands of all matrix products."""
    return {operand for x, y, _ in products(fun, *args) for operand in (x, y)}


def autocast(fun: Callable[..., Any], policy: str) -> Callable[..., Any]:
    return amp.autocast(fun, policy)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / 2


def relative_error(got: Any, want: Any) -> float:
    got, want = (jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(t)]) for t in (got, want))
    return float(jnp.linalg.norm(got - want) / (jnp.linalg.norm(want) + 1e-6))
