"""`jax_debug_nans` stops at NaN that the program made, not at the overflow that a loss scale provokes on purpose."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import amp_jax as amp

PARAMS = {"w": jnp.full((4, 4), 0.1), "v": jnp.ones(4)}
X = np.ones((2, 4), np.float32)
# So large that the first steps overflow float16.
TX = amp.dynamic_loss_scaling(optax.adam(1e-2), init_scale=2.0**24)

Step = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]


def loss_of(params: Any, x: Any) -> jax.Array:
    model = amp.autocast(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], "mixed_float16")
    return jnp.mean(model(params, x) ** 2)


def train_step(params: Any, state: Any, x: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = amp.value_and_grad(loss_of, state)(params, x)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


@pytest.fixture(params=["jax_debug_nans", "jax_debug_infs"])
def debugging(request: pytest.FixtureRequest) -> Iterator[str]:
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, False)


@pytest.fixture
def debug_nans() -> Iterator[None]:
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


def test_a_run_that_overflows_at_first_goes_on(debugging: str) -> None:
    params, state, step = PARAMS, TX.init(PARAMS), jax.jit(train_step)
    for _ in range(20):
        params, state, _ = step(params, state, X)
    assert int(amp.metrics(state)["skipped_steps"]) > 3
    assert int(amp.metrics(state)["consecutive_skipped"]) == 0
    assert not np.array_equal(params["w"], PARAMS["w"])


def test_so_does_a_scan_of_steps(debugging: str) -> None:
    @jax.jit
    def run(params: Any, state: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            *carry, loss = train_step(*carry, X)
            return tuple(carry), loss

        return jax.lax.scan(body, (params, state), length=20)

    (_, state), losses = run(PARAMS, TX.init(PARAMS))
    assert int(amp.metrics(state)["skipped_steps"]) > 3
    assert losses[-1] < losses[0]


def test_a_nan_of_the_forward_pass_stops_the_run(debug_nans: None) -> None:
    # The square root of a negative number, while the loss scale is one that doesn't overflow.
    def bad_step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = amp.value_and_grad(lambda p, x: loss_of(p, x) + jnp.sqrt(jnp.sum(x)), state)(params, x)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    with pytest.raises(FloatingPointError, match="nan"):
        jax.jit(bad_step)(PARAMS, TX.init(PARAMS), -X)


def test_gradients_that_leave_the_compiled_step_stop_it(debug_nans: None) -> None:
    # What an overflow leaves behind is a NaN like any other once it is a result: docs/composition.md.
    with pytest.raises(FloatingPointError, match="nan"):
        jax.jit(lambda state: amp.grad(loss_of, state)(PARAMS, X))(TX.init(PARAMS))


def test_finite_gradients_outside_of_jit_stop_nothing(debug_nans: None) -> None:
    state = amp.static_loss_scaling(optax.sgd(0.1), 8.0).init(PARAMS)
    grads = amp.grad(loss_of, state)(PARAMS, X)
    assert np.isfinite(grads["w"]).all()
