"""Parameters stored in half and rounded by chance: small updates count on average, skipped steps leave no trace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import amp_jax as amp


def data(tree: Any) -> list[bytes]:
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if keys(x) else x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_updates_too_small_for_the_dtype_count_on_average(dtype: Any) -> None:
    n, size, steps = 20_000, float(jnp.finfo(dtype).eps) / 40, 50
    params = {"half": jnp.full(n, 1.5, dtype), "full": jnp.float32(1.5)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, size), params)
    tx = amp.stochastic_rounding(optax.sgd(1.0), jax.random.key(3))

    def body(carry: Any, _: None) -> tuple[Any, None]:
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (params, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=steps))((params, tx.init(params)))
    half = np.asarray(params["half"]).astype(np.float64)
    # Each step is one in 40 of a step of the dtype: a variance of 1/40 * 39/40 each, plus what crosses no power of two.
    standard_error = float(jnp.finfo(dtype).eps) * np.sqrt(steps / 40 * 39 / 40 / n)
    assert abs(half.mean() - (1.5 - steps * size)) <= 4 * standard_error
    # Half a float32 step for each sum.
    assert params["full"] == pytest.approx(1.5 - steps * size, abs=steps * 2.0**-24)


def test_what_is_stored_is_the_rounded_sum_bit_for_bit() -> None:
    tx = amp.stochastic_rounding(optax.sgd(1.0), 0)
    params, grads = jnp.linspace(-2, 2, 999).astype(jnp.bfloat16), jnp.linspace(-0.3, 0.4, 999)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    got = np.asarray(optax.apply_updates(params, updates)).astype(np.float64)
    exact = (np.asarray(params).astype(np.float32) - np.asarray(grads)).astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    # A neighbour of the float32 sum, and not always the nearer one: a quarter of them is the farther.
    assert (np.abs(got - exact) < step).all()
    assert 0.2 < (np.abs(got - exact) > step / 2).mean() < 0.3


def test_a_skipped_step_leaves_no_trace_in_the_key_either() -> None:
    tx = amp.dynamic_loss_scaling(amp.stochastic_rounding(optax.adam(0.1), 0))
    params = {"w": jnp.array([1.0, -0.0, 0.3], jnp.bfloat16)}
    state = tx.init(params)
    good, bad = {"w": jnp.ones(3)}, {"w": jnp.array([1.0, np.nan, 1.0])}
    one = jax.jit(lambda p, s, g: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p)))
    skipped, after = one(params, state, bad)
    assert data((skipped, after.inner_state)) == data((params, state.inner_state))
    assert data(one(skipped, after, good)[0]) == data(one(params, state, good)[0])
    # Applied steps draw anew.
    applied = one(params, state, good)[1]
    assert data(applied.inner_state.key) != data(state.inner_state.key)


def test_a_key_serves_twice_though_its_state_is_donated() -> None:
    tx = amp.stochastic_rounding(optax.sgd(0.1), key := jax.random.key(0))
    params = jnp.ones(4, jnp.bfloat16)
    for _ in range(2):
        jax.block_until_ready(jax.jit(tx.update, donate_argnums=1)(jnp.ones(4), tx.init(params), params))
    assert not key.is_deleted()


@pytest.mark.parametrize("key", ["0", True, 1.5, None])
def test_what_is_no_key_is_an_error(key: Any) -> None:
    with pytest.raises(amp.AmpTypeError, match="`key` is"):
        amp.stochastic_rounding(optax.sgd(0.1), key)


def test_params_are_needed() -> None:
    tx = amp.stochastic_rounding(optax.sgd(0.1), 0)
    with pytest.raises(amp.AmpValueError, match="`params` is missing"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2, jnp.bfloat16)))
