"""An overflow in one of two processes skips the step in both; the run is that of one device, bit for bit.

All numbers are small multiples of a power of two, so that float32 adds them exactly in any order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import amp_jax as amp
from tests import two_processes

STEPS = """
import functools, optax

def loss_of(params, batch):
    # float16, and finite: only the gradient of what a large number multiplies overflows.
    rows = jnp.broadcast_to(params["w"], batch.shape).astype(jnp.float16)
    return (rows * batch.astype(jnp.float16)).astype(jnp.float32).sum(-1).mean() + params["b"].sum() / 4

def batch_of(step):
    batch = np.full((4, 2), step - 2.0, np.float32)
    if step in (1, 4):
        batch[3, 1] = 2.0**14  # a row of the second process, the gradient of the second number
    return batch

def adder(axis_name=None):
    return amp.dynamic_loss_scaling(
        optax.sgd(0.5, momentum=0.5), init_scale=2.0**6, growth_interval=2, axis_name=axis_name
    )

def train(tx, loss_of, mean=lambda found: found):
    def step(params, state, batch):
        loss, grads = mean(amp.value_and_grad(loss_of, state)(params, batch))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss
    return step

def shards(tree):
    return [np.asarray(leaf.addressable_shards[0].data).tobytes().hex() for leaf in jax.tree.leaves(tree)]

def follow(step, params, state, place):
    told = []
    for number in range(6):
        before = shards((params, state.inner_state))
        params, state, loss = step(params, state, place(batch_of(number)))
        after = shards((params, state.inner_state))
        own = {name: np.asarray(x.addressable_shards[0].data).item() for name, x in amp.metrics(state).items()}
        told.append({**own, "unchanged": after == before, "shards": after})
    return told
"""

SCRIPT = (
    STEPS
    + """
tree = {"w": np.array([1.0, -0.0], np.float32), "b": np.array([-0.5, 0.25], np.float32)}
rows = lambda tree: jax.tree.map(lambda x: P("x") if np.ndim(x) else P(), tree)
whole = lambda tree: jax.tree.map(lambda x: P(), tree)
place = lambda tree, specs: jax.tree.map(lambda x, s: spread(np.asarray(x), s), tree, specs)
batch = functools.partial(spread, spec=P("x"))

for name, layout in {"data parallel": whole, "fsdp": rows}.items():
    tx = adder()
    start = tree, tx.init(tree)
    put = place(start, layout(start))
    out = (*jax.tree.map(lambda x: x.sharding, put), NamedSharding(mesh, P()))
    said[name] = follow(jax.jit(train(tx, loss_of), out_shardings=out), *put, batch)

tx = adder("x")
start = tree, tx.init(tree)
specs = rows(start)

def of_rows(rows, batch):
    return loss_of(jax.tree.map(lambda x: jax.lax.all_gather(x, "x", tiled=True), rows), batch) / 2

def summed(found):
    return jax.lax.psum(found[0], "x"), found[1]

step = jax.shard_map(
    train(tx, of_rows, summed), mesh=mesh, in_specs=(*specs, P("x")), out_specs=(*specs, P())
)
said["shard_map"] = follow(jax.jit(step), *place(start, specs), batch)
"""
)


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    return two_processes.run(SCRIPT)


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    """The same functions in this process, on one device."""
    space: dict[str, Any] = {"amp": amp, "jax": jax, "jnp": jnp, "np": np}
    exec(STEPS, space)
    params, tx = {"w": jnp.array([1.0, -0.0]), "b": jnp.array([-0.5, 0.25])}, space["adder"]()
    step = jax.jit(space["train"](tx, space["loss_of"]))
    return space["follow"](step, params, tx.init(params), jnp.asarray)


METRICS = ("loss_scale", "grads_finite", "skipped_steps", "consecutive_skipped")
LAYOUTS = ["data parallel", "fsdp", "shard_map"]


def test_the_run_on_one_device_skips_what_overflows(alone: list[dict[str, Any]]) -> None:
    assert [step["grads_finite"] for step in alone] == [True, False, True, True, False, True]
    assert [np.log2(step["loss_scale"]) for step in alone] == [6, 5, 5, 6, 5, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_skip_and_agree_with_one_device(layout: str, said: Any, alone: list[dict[str, Any]]) -> None:
    for process in said:
        for step, want in zip(process[layout], alone, strict=True):
            assert {name: step[name] for name in METRICS} == {name: want[name] for name in METRICS}
            assert step["unchanged"] == (not want["grads_finite"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parameters_are_those_of_one_device(layout: str, said: Any, alone: list[dict[str, Any]]) -> None:
    first, second = (process[layout] for process in said)
    for one, other, want in zip(first, second, alone, strict=True):
        if layout == "data parallel":
            assert one["shards"] == other["shards"] == want["shards"]
        else:
            # Each of the two holds its half of the bytes.
            assert [a + b for a, b in zip(one["shards"], other["shards"], strict=True)] == want["shards"]
