"""The emitted programs hold no cast that another one undoes."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import amp_jax as amp
from benchmarks.workloads import MORE, NAMES, workload
from tests.programs import jaxprs

LOW = np.dtype(jnp.bfloat16)


def pairs(program: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The dtypes before, between and after, of every cast of what was itself just cast."""
    for jaxpr in jaxprs(program):
        casts = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive.name == "convert_element_type"}
        for eqn in casts.values():
            first = casts.get(eqn.invars[0]) if not hasattr(eqn.invars[0], "val") else None
            if first is not None:
                yield first.invars[0].aval.dtype, first.outvars[0].aval.dtype, eqn.outvars[0].aval.dtype


def undone(fun: Any, *args: Any) -> list[Any]:
    return [p for p in pairs(jax.make_jaxpr(fun)(*args)) if p == (LOW, np.float32, LOW)]


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_no_value_goes_up_and_straight_down_again(name: str) -> None:
    init, loss, batch = workload(name, scale=0.1)
    params = jax.eval_shape(init, jax.random.key(0))
    fast = amp.autocast(loss, "mixed_bfloat16")
    assert not undone(jax.grad(fast, allow_int=True), params, *batch)


def test_the_search_sees_such_a_pair_inside_of_a_loop() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c.astype(jnp.float32).astype(LOW), None), x, None, length=2)

    assert undone(loop, jnp.ones(2, LOW))
