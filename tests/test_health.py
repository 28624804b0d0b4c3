"""What is wrong with a run is named, and a healthy run warns of nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amp_jax as amp

PARAMS = {"w": jnp.ones(2), "b": jnp.zeros(())}
TX = amp.dynamic_loss_scaling(optax.adam(1e-2))


def after(count: int, **settings: Any) -> Any:
    tx = amp.dynamic_loss_scaling(optax.adam(1e-2), **settings)
    bad = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    return jax.lax.fori_loop(0, count, lambda _, s: tx.update(bad, s, PARAMS)[1], tx.init(PARAMS))


def test_leaves_are_named_and_counted() -> None:
    tree = {
        "a": [jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.0]), jnp.ones(2)],
        "half": jnp.array([jnp.inf], jnp.float16),
        "complex": jnp.array([complex(0, jnp.nan), complex(jnp.inf, 0)]),
        "numpy": np.array([np.nan]),
        "float": float("inf"),
        "n": 3,
        "key": jax.random.key(0),
        "none": None,
    }
    assert amp.nonfinite_leaves(tree) == {
        "a/0": {"inf": 2, "nan": 1},
        "half": {"inf": 1, "nan": 0},
        "complex": {"inf": 1, "nan": 1},
        "numpy": {"inf": 0, "nan": 1},
        "float": {"inf": 1, "nan": 0},
    }
    assert amp.nonfinite_leaves({"w": jnp.full(3, 3e38)}) == {}
    assert amp.nonfinite_leaves(None) == {}


def test_the_gradients_of_a_skipped_step() -> None:
    params, state = {"big": jnp.ones(2), "small": jnp.ones(3)}, TX.init({"big": jnp.ones(2), "small": jnp.ones(3)})
    # The gradient is 3e34: times 2^15 it overflows, and so nothing else does.
    loss = lambda p: jnp.sum(p["big"]) * 3e34 + jnp.sum(p["small"])  # noqa: E731
    _, grads = amp.value_and_grad(loss, state)(params)
    _, state = TX.update(grads, state, params)
    assert not amp.metrics(state)["grads_finite"]
    assert amp.nonfinite_leaves(grads) == {"big": {"inf": 0, "nan": 2}}


def test_nnx_paths_are_those_of_attributes() -> None:
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(0)))
    model.layers[0].kernel[...] = jnp.full((2, 3), jnp.nan)
    assert amp.nonfinite_leaves(model) == {"layers/0/kernel": {"inf": 0, "nan": 6}}
    assert amp.nonfinite_leaves(nnx.state(model, nnx.Param)) == {"layers/0/kernel": {"inf": 0, "nan": 6}}


def test_under_a_trace_the_error_says_what_to_do() -> None:
    with pytest.raises(amp.AmpTypeError, match="return it from the compiled function"):
        jax.jit(amp.nonfinite_leaves)(PARAMS)


@pytest.mark.parametrize("state", [TX.init(PARAMS), amp.no_loss_scaling(optax.sgd(0.1)).init(PARAMS)])
def test_a_healthy_run_warns_of_nothing(state: Any) -> None:
    # Warnings are errors here.
    assert amp.check_health(state, PARAMS)
    assert amp.check_health(state)


def test_a_search_for_the_loss_scale_is_healthy() -> None:
    # From Megatron's 2^32, twenty bad steps on end.
    assert amp.check_health(after(20, init_scale=2.0**32, max_scale=2.0**32), PARAMS)


def test_steps_that_are_skipped_for_ever() -> None:
    state = after(50, init_scale=2.0**15, min_scale=1.0)
    with pytest.warns(UserWarning, match=r"50 or more steps in a row.*amp\.nonfinite_leaves\(grads\)"):
        assert not amp.check_health(state, PARAMS)


def test_a_loss_scale_below_one() -> None:
    with pytest.warns(UserWarning, match="fallen below 1.*bfloat16"):
        assert not amp.check_health(after(16), PARAMS)


def test_parameters_that_are_not_finite() -> None:
    # As they are loaded from a broken checkpoint: no step of a loss scaled run lets them in.
    params = {f"layer{i}": jnp.array([jnp.nan]) for i in range(5)}
    with pytest.warns(UserWarning, match=r"not finite: layer0, layer1, layer2 and 2 more.*checkpoint"):
        assert not amp.check_health(TX.init(params), params)


def test_one_sick_member_of_an_ensemble() -> None:
    states = jax.tree.map(lambda a, b: jnp.stack([a, b]), TX.init(PARAMS), after(16))
    with pytest.warns(UserWarning, match="fallen below 1"):
        assert not amp.check_health(states)
