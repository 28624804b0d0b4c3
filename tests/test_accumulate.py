"""Gradients in micro-batches equal those of the whole batch, and one overflow skips the window."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amp_jax as amp

TX = amp.dynamic_loss_scaling(optax.adam(1e-2))
W = jax.random.normal(jax.random.key(0), (4, 3))
X = jax.random.normal(jax.random.key(1), (12, 4))
Y = jax.random.normal(jax.random.key(2), (12, 3))


def loss_of(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_equals_the_whole_batch(steps: int) -> None:
    params, batch = {"w": W}, {"x": X, "y": Y}
    state = TX.init(params)
    loss, grads = jax.jit(amp.accumulate_gradients(loss_of, state, steps))(params, batch)
    whole = amp.value_and_grad(loss_of, state)(params, batch)
    # float32 sums in another order: a few units in the last place of the largest term.
    np.testing.assert_allclose(loss, whole[0], rtol=1e-6)
    np.testing.assert_allclose(grads["w"], whole[1]["w"], atol=1e-6)


def test_half_gradients_are_added_in_float32() -> None:
    """1 + 2^-12 + 2^-12 + ... is 1 for ever in bfloat16 and in float16."""
    state = TX.init(jnp.bfloat16(0.0))
    x = jnp.full(4096, 2.0**-12).at[0].set(1.0)
    fun = lambda w, x: jnp.sum((w * x.astype(jnp.bfloat16)).astype(jnp.float32))  # noqa: E731
    _, grads = jax.jit(amp.accumulate_gradients(fun, state, 4096))(jnp.bfloat16(0.0), x)
    assert grads.dtype == jnp.float32
    assert float(grads * 4096) == 1 + 4095 * 2.0**-12


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_an_overflow_in_one_micro_batch_skips_the_whole_window(bad: int) -> None:
    params = {"w": W}
    state = TX.init(params)
    batch = {"x": X.at[bad].set(jnp.inf), "y": Y}
    _, grads = amp.accumulate_gradients(loss_of, state, 4)(params, batch)
    updates, after = TX.update(grads, state, params)
    assert bool(jnp.all(optax.apply_updates(params, updates)["w"] == W))
    assert amp.metrics(after)["skipped_steps"] == 1
    assert amp.metrics(after)["loss_scale"] == 2.0**14


def test_one_program_whatever_the_number_of_steps() -> None:
    params, state = {"w": W}, TX.init({"w": W})
    count = lambda n: str(  # noqa: E731
        jax.make_jaxpr(amp.accumulate_gradients(loss_of, state, n))(params, {"x": X, "y": Y})
    ).count("dot_general")
    assert count(2) == count(12)


def test_aux_is_stacked_in_the_order_in_which_examples_are_dealt_out() -> None:
    state = TX.init(W)
    fun = lambda w, x: (jnp.mean(x @ w), x[:, 0])  # noqa: E731
    (_, aux), _ = amp.accumulate_gradients(fun, state, 3, has_aux=True)(W, X)
    np.testing.assert_array_equal(aux, X[:, 0].reshape(4, 3).T)


def test_keys_and_ints_of_a_batch_are_dealt_out_too() -> None:
    state = TX.init(W)

    def fun(w: Any, batch: Any) -> Any:
        keys, label = batch
        return jnp.sum(w) * jnp.mean(jax.vmap(jax.random.normal)(keys)) * label.astype(jnp.float32).mean()

    keys = jax.random.split(jax.random.key(0), 4)
    loss, _ = amp.accumulate_gradients(fun, state, 4)(W, (keys, jnp.ones(4, jnp.int32)))
    np.testing.assert_allclose(loss, jnp.sum(W) * jax.vmap(jax.random.normal)(keys).mean(), rtol=1e-5)


def test_one_step_is_no_loop() -> None:
    """XLA's convolutions on a CPU are ten times as slow in one."""

    def with_aux(params: Any, batch: Any) -> Any:
        return loss_of(params, batch), batch["y"]

    params, batch = {"w": W}, {"x": X, "y": Y}
    loops = {}
    for steps in (1, 2):
        accumulated = amp.accumulate_gradients(with_aux, TX.init(params), steps, has_aux=True)
        loops[steps] = str(jax.make_jaxpr(accumulated)(params, batch)).count("scan[")
        (_, aux), _ = jax.eval_shape(accumulated, params, batch)
        assert aux.shape == (steps, 12 // steps, 3)
    assert loops == {1: 0, 2: 1}


def test_leaves_that_are_no_gradients_pass_through() -> None:
    params = {"w": W, "step": jnp.int32(3)}
    state = TX.init({"w": W})
    _, grads = amp.accumulate_gradients(lambda p, x: jnp.mean(x @ p["w"]), state, 2)(params, X)
    assert grads["step"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(grads["w"], jnp.repeat(X.mean(0)[:, None], 3, 1) / 3, atol=1e-6)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.layer(x))


def test_an_nnx_module_keeps_the_updates_of_every_micro_batch() -> None:
    model, expected = Model(), Model()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    fun = lambda model, x: jnp.mean(jnp.square(model(x)))  # noqa: E731

    @nnx.jit
    def gradients(model: Any, optimizer: Any, x: Any) -> Any:
        return amp.accumulate_gradients(fun, optimizer, 3)(model, x)

    loss, grads = gradients(model, optimizer, X)
    parts = [X[i::3] for i in range(3)]
    results = [nnx.value_and_grad(fun)(expected, part) for part in parts]
    np.testing.assert_allclose(loss, np.mean([value for value, _ in results]), rtol=1e-6)
    mean = jax.tree.map(lambda *g: sum(g) / 3, *(g for _, g in results))
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    np.testing.assert_allclose(model.norm.mean[...], expected.norm.mean[...], rtol=1e-5)
    optimizer.update(model, grads)


@pytest.mark.parametrize(("batch", "says"), [({"x": X[:5]}, r"\['x'\].*\(5, 4\)"), (jnp.float32(1.0), r"itself.*\(\)")])
def test_a_batch_that_can_not_be_dealt_out_is_named(batch: Any, says: str) -> None:
    with pytest.raises(amp.AmpValueError, match=says):
        amp.accumulate_gradients(loss_of, TX.init(W), 2)(W, batch)


@pytest.mark.parametrize(
    ("steps", "error"), [(0, amp.AmpValueError), (2.0, amp.AmpTypeError), (True, amp.AmpTypeError)]
)
def test_steps_are_checked_at_once(steps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="steps"):
        amp.accumulate_gradients(loss_of, TX.init(W), steps)
