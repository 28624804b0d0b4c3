"""What people get wrong with a loss scale is right all the same, or an error or one warning that says what to do."""

import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import amp_jax as amp

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}
X = jnp.array([0.5, 1.0, 2.0])
TX = amp.dynamic_loss_scaling(optax.adam(0.1))


def loss_of(params: Any, x: Any) -> Any:
    return jnp.mean((params["w"] * x + params["b"]) ** 2)


def test_plain_jax_grad_with_the_wrapped_optimizer_is_right() -> None:
    # Nothing was scaled, and nothing is unscaled.
    plain = optax.adam(0.1)
    params, state, want, want_state = PARAMS, TX.init(PARAMS), PARAMS, plain.init(PARAMS)
    for x in (X, 2 * X, -X):
        updates, state = TX.update(jax.grad(loss_of)(params, x), state, params)
        params = optax.apply_updates(params, updates)
        updates, want_state = plain.update(jax.grad(loss_of)(want, x), want_state, want)
        want = optax.apply_updates(want, updates)
    chex.assert_trees_all_equal(params, want)
    updates, state = TX.update(jax.grad(loss_of)(params, X * jnp.inf), state, params)
    chex.assert_trees_all_equal(optax.apply_updates(params, updates), want)
    assert int(amp.metrics(state)["skipped_steps"]) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_unscaling_twice_is_an_error(jit: bool) -> None:
    def twice(params: Any, state: Any) -> Any:
        return amp.unscale(amp.grad(loss_of, state)(params, X), state)

    with pytest.raises(amp.AmpValueError, match=r"`grads` are unscaled already.*use them as they are"):
        (jax.jit(twice) if jit else twice)(PARAMS, TX.init(PARAMS))


def test_unscaling_twice_by_hand_is_an_error() -> None:
    state = TX.init(PARAMS)
    scaled = jax.grad(lambda p: amp.scale_loss(loss_of(p, X), state))(PARAMS)
    grads = amp.unscale(scaled, state)
    with pytest.raises(amp.AmpValueError, match="unscaled already"):
        amp.unscale(grads, state)
    # What was scaled may be unscaled again: it is another computation of the same thing.
    chex.assert_trees_all_equal(amp.unscale(scaled, state), grads)


def test_without_a_loss_scale_unscaling_does_nothing_however_often() -> None:
    state = amp.no_loss_scaling(optax.sgd(0.1)).init(PARAMS)
    grads = amp.grad(loss_of, state)(PARAMS, X)
    chex.assert_trees_all_equal(amp.unscale(amp.unscale(grads, state), state), grads)


def test_float16_gradients_from_plain_jax_grad_warn_once() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
    state = TX.init(params)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            updates, state = TX.update(jax.grad(loss_of)(params, X.astype(jnp.float16)), state, params)
    assert len(seen) == 1
    assert "amp.value_and_grad(loss_fn, opt_state)" in str(seen[0].message)
    # The step itself is made all the same.
    assert (np.abs(updates["w"].astype(np.float32)) > 0.05).all()


def test_float16_parameters_with_value_and_grad_do_not_warn() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
    state = TX.init(params)
    grads = amp.grad(lambda p: loss_of(p, X).astype(jnp.float32), state)(params)
    TX.update(grads, state, params)


def test_float16_gradients_without_a_loss_scale_do_not_warn() -> None:
    tx = amp.no_loss_scaling(optax.sgd(0.1))
    tx.update(jnp.ones(2, jnp.float16), tx.init(jnp.ones(2, jnp.float16)))


def test_forgetting_value_and_grad_with_float32_parameters_loses_what_it_must_and_nothing_else() -> None:
    # Here nothing can be seen in what reaches the optimizer: a float32 zero is a float32 zero. docs/composition.md.
    params, state = {"w": jnp.full((3, 2), 0.1)}, TX.init({"w": jnp.ones((3, 2))})
    model = amp.autocast(lambda p, x: jnp.tanh(x @ p["w"]), "mixed_float16")
    loss_fn = lambda p: 1e-9 * jnp.sum(model(p, jnp.ones((4, 3))))  # noqa: E731
    assert (amp.grad(loss_fn, state)(params)["w"] > 3e-9).all()
    assert (jax.grad(loss_fn)(params)["w"] == 0.0).all()


def test_a_float16_loss_warns_and_says_what_to_do() -> None:
    with pytest.warns(UserWarning, match="cast the model's output to float32 before the loss"):
        amp.grad(lambda w: w * w, TX.init(PARAMS))(jnp.float16(1.0))
