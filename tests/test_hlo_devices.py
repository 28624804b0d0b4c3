"""What the loss scale costs eight H100s: at most one collective of one scalar. Gradients are added in float32.

Each step is compiled for eight cards by the real compiler, with and without a loss scale. XLA joins and splits
collectives as it likes, so what is compared is how many there are and how many numbers they move together.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import amp_jax as amp
from benchmarks import h100
from benchmarks.models import GPT
from benchmarks.workload import language, spec
from tests.collectives import Collective, moved, read

pytestmark = [
    pytest.mark.hlo,
    pytest.mark.skipif(h100.missing() is not None, reason=str(h100.missing())),
    pytest.mark.xdist_group("eight"),
]

DEVICES = 8
INIT, LOSS, BATCH = language(GPT(256, 128, 4, 1), spec((16, 64), np.int32))
LOW = amp.autocast(LOSS, "mixed_float16")
PARAMS = jax.eval_shape(INIT, jax.random.key(0))

Grad = Callable[[Callable[..., Any], Any], Callable[..., Any]]
"""Of a loss function and an optimizer state: `amp.value_and_grad`, or JAX's, which has no use for the state."""


def whole(tree: Any) -> Any:
    return jax.tree.map(lambda _: P(), tree)


def cut(tree: Any) -> Any:
    """Every array cut along the first axis that eight divides, as FSDP stores parameters and moments."""

    def where(x: Any) -> Any:
        axis = next((axis for axis, size in enumerate(x.shape) if size % DEVICES == 0), None)
        return P() if axis is None else P(*[None] * axis, "d")

    return jax.tree.map(where, tree)


def update(tx: Any, params: Any, state: Any, loss: jax.Array, grads: Any) -> tuple[Any, Any, jax.Array]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def under_jit(tx: Any, grad: Grad) -> Callable[..., Any]:
    return lambda params, state, *batch: update(tx, params, state, *grad(LOW, state)(params, *batch))


def mapped(tx: Any, grad: Grad) -> Callable[..., Any]:
    """Under shard_map, every device with all parameters."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        own = jax.lax.pcast(params, "d", to="varying")
        return update(tx, params, state, *jax.lax.pmean(grad(LOW, state)(own, *batch), "d"))

    return step


def mapped_by_parts(tx: Any, grad: Grad) -> Callable[..., Any]:
    """Under shard_map, every device with a part of each parameter and of its gradient."""

    def gather(x: jax.Array, where: Any) -> jax.Array:
        return jax.lax.all_gather(x, "d", axis=len(where) - 1, tiled=True)

    def loss_of(params: Any, *batch: Any) -> jax.Array:
        return LOW(jax.tree.map(gather, params, cut(PARAMS)), *batch) / DEVICES

    def step(params: Any, state: Any, *batch: Any) -> Any:
        loss, grads = grad(loss_of, state)(params, *batch)
        return update(tx, params, state, jax.lax.psum(loss, "d"), grads)

    return step


class Layout(NamedTuple):
    """Which step runs, where its arrays lie, and over which axis it is mapped."""

    step: Callable[[Any, Grad], Callable[..., Any]]
    specs: Callable[[Any], Any]
    axis: str | None


LAYOUTS = {
    "data parallel": Layout(under_jit, whole, None),
    "fsdp": Layout(under_jit, cut, None),
    "shard_map": Layout(mapped, whole, "d"),
    "shard_map fsdp": Layout(mapped_by_parts, cut, "d"),
}


@cache
def collectives(name: str, scaled: bool) -> list[list[Collective]]:
    """Those of a step: one list for each instruction, which may work on several arrays at once."""
    layout, tx = LAYOUTS[name], optax.adamw(1e-3)
    if scaled:
        tx = amp.dynamic_loss_scaling(tx, axis_name=layout.axis)
    step = layout.step(tx, amp.value_and_grad if scaled else lambda loss_of, _: jax.value_and_grad(loss_of))
    args = PARAMS, jax.eval_shape(tx.init, PARAMS), *BATCH
    specs = (*layout.specs(args[:2]), *[P("d")] * len(BATCH))
    mesh = Mesh(np.array(h100.topology(f"1x{DEVICES}x1").devices), ("d",))
    if layout.axis:
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(*specs[:2], P()))
    shardings = jax.tree.map(lambda where: NamedSharding(mesh, where), specs)
    args = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), args, shardings)
    out = (*shardings[:2], NamedSharding(mesh, P()))
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(*args).compile(h100.OPTIONS)
    return read(compiled.as_text())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_check_adds_at_most_one_collective_of_one_scalar(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    plain, ours = collectives(name, False), collectives(name, True)
    added = moved(ours) - moved(plain)
    record_property("figures", f"{name}: {len(plain)} collectives, {len(ours)} with a loss scale; moves {dict(added)}")
    assert len(ours) <= len(plain) + 1
    assert added.total() <= 1
    assert not moved(plain) - moved(ours)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_added_in_float32(name: str) -> None:
    sums = moved([one for one in collectives(name, True) if one[0].kind in ("all-reduce", "reduce-scatter")])
    # The decision under shard_map is a minimum of one integer.
    assert {dtype for _, dtype in sums} <= {"f32", "s32"}
    assert sum(count for (_, dtype), count in sums.items() if dtype == "s32") <= 1
    # Every gradient is in there.
    assert sums.total() >= sum(x.size for x in jax.tree.leaves(PARAMS))


@pytest.mark.parametrize("name", ["fsdp", "shard_map fsdp"])
def test_the_decision_of_parts_takes_the_scalar(name: str) -> None:
    # So that the first test isn't passed by a check that looks at its own part alone.
    assert (moved(collectives(name, True)) - moved(collectives(name, False))).total() == 1
