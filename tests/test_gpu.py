"""A float16 training step on a real GPU: it trains, skips, stays on the device, and compiles once."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import amp_jax as amp
from benchmarks.hlo import parse, products

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> Iterator[Any]:
    """The first GPU, as the device that everything in the test runs on."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {str(error).splitlines()[0]}")
    with jax.default_device(device):
        yield device


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.gelu(nn.LayerNorm()(nn.Dense(64)(x)))
        return nn.Dense(16)(x)


class Training(NamedTuple):
    """A jitted step `(params, opt_state, x, y) -> (params, opt_state, loss)` and what it begins with."""

    step: Callable[..., Any]
    params: Any
    opt_state: Any
    x: jax.Array
    y: jax.Array


def training(policy: str, growth_interval: int = 2000) -> Training:
    model = amp.wrap(Model(), policy)
    tx = amp.dynamic_loss_scaling(optax.adamw(1e-2), init_scale=2.0**12, growth_interval=growth_interval)
    x, y = (jax.random.normal(jax.random.key(seed), (128, width)) for seed, width in ((0, 32), (1, 16)))
    params = model.init(jax.random.key(2), x)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((model.apply(params, x) - y) ** 2)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = amp.value_and_grad(loss, opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    chex.clear_trace_counter()
    return Training(step, params, jax.jit(tx.init)(params), x, y)


def test_a_float16_step_trains_like_float32(gpu: Any) -> None:
    losses: dict[str, list[float]] = {}
    for policy in ("float32", "mixed_float16"):
        step, params, state, x, y = training(policy)
        losses[policy] = []
        for _ in range(20):
            params, state, loss = step(params, state, x, y)
            losses[policy].append(float(loss))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
        assert all(leaf.devices() == {gpu} for leaf in jax.tree.leaves(params))
        assert amp.metrics(state)["skipped_steps"] == 0
    assert losses["float32"][-1] < 0.8 * losses["float32"][0]
    np.testing.assert_allclose(losses["mixed_float16"], losses["float32"], rtol=1e-2)


def test_the_products_run_in_float16(gpu: Any) -> None:
    step, *args = training("mixed_float16")
    found = products(parse(step.lower(*args).compile().as_text()))
    # Two forward, two for the weights, one for the hidden layer; XLA may split one, never drop it.
    assert len(found) >= 5
    assert {(one.lhs.dtype, one.rhs.dtype) for one in found} == {("f16", "f16")}


def test_a_step_that_overflows_changes_nothing_but_the_scale(gpu: Any) -> None:
    step, params, state, x, y = training("mixed_float16")
    params, state, _ = step(params, state, x, y)
    skipped, after, _ = step(params, state, x.at[0, 0].set(jnp.inf), y)
    chex.assert_trees_all_equal(skipped, params)
    assert amp.metrics(after)["loss_scale"] == amp.metrics(state)["loss_scale"] / 2
    assert not amp.metrics(after)["grads_finite"]
    assert amp.metrics(after)["skipped_steps"] == 1
    applied, recovered, _ = step(skipped, after, x, y)
    assert amp.metrics(recovered)["grads_finite"]
    assert any(bool(jnp.any(new != old)) for new, old in zip(*map(jax.tree.leaves, (applied, params)), strict=True))


def test_nothing_is_moved_between_host_and_device(gpu: Any) -> None:
    step, params, state, x, y = training("mixed_float16", growth_interval=2)
    overflowing = x.at[0, 0].set(jnp.inf)
    params, state, _ = step(params, state, x, y)
    jax.block_until_ready(params)
    with jax.transfer_guard("disallow"):
        for batch in (x, overflowing, x, x):
            params, state, loss = step(params, state, batch, y)
    assert np.isfinite(loss)


def test_the_step_is_compiled_once_while_the_scale_moves(gpu: Any) -> None:
    # The step itself refuses a second trace.
    step, params, state, x, y = training("mixed_float16", growth_interval=2)
    overflowing = x.at[0, 0].set(jnp.inf)
    scales: list[float] = []
    for batch in (x, x, overflowing, x, x):
        params, state, _ = step(params, state, batch, y)
        scales.append(float(amp.metrics(state)["loss_scale"]))
    assert scales == [2.0**12, 2.0**13, 2.0**12, 2.0**12, 2.0**13]
