"""A loss scale is found wherever it lies, or the error says what was found instead and what to do."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._loss_scale import NoLossScaleState
from amp_jax._opt_state import find_loss_scale, metrics, where_finite
from amp_jax._optimizer import dynamic_loss_scaling, no_loss_scaling, static_loss_scaling

PARAMS = {"w": jnp.ones(2)}
INF = {"w": jnp.array([jnp.inf, 1.0])}


def scaled(scale: float = 8.0) -> optax.GradientTransformationExtraArgs:
    return dynamic_loss_scaling(optax.adam(1e-3), init_scale=scale)


def holders() -> dict[str, Any]:
    tx = scaled()
    chain = optax.chain(optax.clip_by_global_norm(1.0), tx, optax.scale(1.0))
    return {
        "state": tx.init(PARAMS),
        "chain": chain.init(PARAMS),
        "masked": optax.masked(tx, {"w": True}).init(PARAMS),
        "hyperparams": optax.inject_hyperparams(
            lambda learning_rate: dynamic_loss_scaling(optax.sgd(learning_rate), init_scale=8.0)
        )(learning_rate=0.1).init(PARAMS),
        "dict": {"opt": tx.init(PARAMS), "step": 3},
        "TrainState": TrainState.create(apply_fn=nn.Dense(1).apply, params=PARAMS, tx=tx),
        "nnx.Optimizer": nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param),
        "nnx.ModelAndOptimizer": nnx.ModelAndOptimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param),
    }


@pytest.mark.parametrize("name", holders())
def test_found_in(name: str) -> None:
    holder = holders()[name]
    state = find_loss_scale(holder)
    assert float(state.loss_scale) == 8.0
    assert all(isinstance(leaf, jax.Array) for leaf in state)
    assert float(metrics(holder)["loss_scale"]) == 8.0


def test_found_under_jit_and_nnx_jit() -> None:
    every = holders()
    assert float(jax.jit(lambda s: metrics(s)["loss_scale"])(every["chain"])) == 8.0
    assert float(nnx.jit(lambda o: metrics(o)["loss_scale"])(every["nnx.Optimizer"])) == 8.0


def test_metrics_have_the_documented_names_and_dtypes() -> None:
    state = scaled().init(PARAMS)
    _, state = scaled().update(INF, state, PARAMS)
    got = {name: (value.item(), value.dtype.name, value.shape) for name, value in metrics(state).items()}
    assert got == {
        "loss_scale": (4.0, "float32", ()),
        "grads_finite": (False, "bool", ()),
        "skipped_steps": (1, "int32", ()),
        "consecutive_skipped": (1, "int32", ()),
    }


def test_metrics_without_loss_scaling() -> None:
    state = no_loss_scaling(optax.sgd(0.1)).init(PARAMS)
    assert isinstance(find_loss_scale(state), NoLossScaleState)
    got = {name: (value.item(), value.dtype.name) for name, value in metrics(state).items()}
    assert got == {
        "loss_scale": (1.0, "float32"),
        "grads_finite": (True, "bool"),
        "skipped_steps": (0, "int32"),
        "consecutive_skipped": (0, "int32"),
    }


def test_none_found_says_what_was_found_and_what_to_do() -> None:
    with pytest.raises(
        AmpValueError, match=r"a tuple of ScaleByAdamState, EmptyState.*amp\.loss_scaling\(tx, policy\)"
    ):
        find_loss_scale(optax.adam(1e-3).init(PARAMS))
    with pytest.raises(AmpValueError, match=r"a dict with the keys 'w'"):
        find_loss_scale(PARAMS)
    with pytest.raises(AmpValueError, match="of type NoneType"):
        find_loss_scale(None)


def test_two_found_says_where_and_how_to_choose() -> None:
    both = {"gen": scaled().init(PARAMS), "disc": static_loss_scaling(optax.sgd(0.1), 2.0).init(PARAMS)}
    with pytest.raises(
        AmpValueError, match=r"2 loss scales.*opt_state\['disc'\]\.scaling, opt_state\['gen'\]\.scaling"
    ):
        find_loss_scale(both)
    assert float(find_loss_scale(both["disc"]).loss_scale) == 2.0


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_an_int_shows_the_right_call(argnums: Any) -> None:
    with pytest.raises(AmpTypeError, match=r"amp\.value_and_grad\(fun, opt_state, argnums=\(?0"):
        find_loss_scale(argnums)


def test_an_optimizer_in_its_state_place() -> None:
    with pytest.raises(AmpTypeError, match=r"opt_state = tx\.init\(params\)"):
        find_loss_scale(scaled())


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.MultiSteps(scaled(), 2), r"inside of optax\.MultiSteps.*dynamic_loss_scaling\(optax\.MultiSteps\(tx"),
        (
            optax.apply_if_finite(scaled(), 5),
            r"inside of optax\.apply_if_finite.*dynamic_loss_scaling\(optax\.apply_if",
        ),
        (
            optax.chain(optax.zero_nans(), scaled()),
            r"stands after optax\.zero_nans.*dynamic_loss_scaling\(optax\.chain\(optax\.zero_nans\(\), tx\)\)",
        ),
        (
            optax.multi_transform({"a": scaled(), "b": optax.sgd(0.1)}, {"w": "a"}),
            r"inside of optax\.multi_transform.*one group alone.*dynamic_loss_scaling\(optax\.multi_transform\(",
        ),
        (
            optax.chain(optax.trace(0.9), scaled()),
            r"stands after an Optax transformation with a TraceState.*keeps a NaN.*dynamic_loss_scaling\(optax\.ch",
        ),
    ],
)
def test_an_order_that_hides_overflows_shows_the_right_one(tx: Any, message: str) -> None:
    with pytest.raises(AmpValueError, match=message):
        find_loss_scale(tx.init(PARAMS))


@pytest.mark.parametrize(
    "inner",
    [
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.apply_if_finite(optax.adam(1e-3), 5),
        optax.chain(optax.zero_nans(), optax.adam(1e-3)),
    ],
)
def test_the_same_wrappers_inside_are_right(inner: Any) -> None:
    assert float(find_loss_scale(dynamic_loss_scaling(inner).init(PARAMS)).loss_scale) == 2.0**15
    # What stands after the loss scale hides nothing from it.
    after = optax.chain(scaled(), optax.zero_nans(), optax.trace(0.9))
    assert float(find_loss_scale(after.init(PARAMS)).loss_scale) == 8.0
    # Nor do hyperparameters or a count before it: no gradient is kept in them.
    before = optax.chain(optax.inject_hyperparams(optax.clip)(max_delta=1.0), optax.scale_by_schedule(abs), scaled())
    assert float(find_loss_scale(before.init(PARAMS)).loss_scale) == 8.0


def test_an_ensemble_is_logged_as_a_whole_but_used_one_by_one() -> None:
    states = jax.vmap(scaled().init)({"w": jnp.ones((3, 2))})
    assert metrics(states)["loss_scale"].tolist() == [8.0] * 3
    with pytest.raises(AmpValueError, match=r"shape \(3,\).*inside of the mapped function"):
        find_loss_scale(states)
    assert jax.vmap(lambda s: find_loss_scale(s).loss_scale)(states).tolist() == [8.0] * 3


def test_where_finite_picks_by_the_last_step() -> None:
    tx, new, old = (
        scaled(),
        {"mean": jnp.array([2.0]), "n": jnp.array(5)},
        {"mean": jnp.array([1.0]), "n": jnp.array(4)},
    )
    _, good = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    _, bad = tx.update(INF, tx.init(PARAMS), PARAMS)
    assert jax.tree.map(jnp.sum, where_finite(good, new, old)) == {"mean": 2.0, "n": 5}
    assert jax.tree.map(jnp.sum, jax.jit(where_finite)(bad, new, old)) == {"mean": 1.0, "n": 4}


def test_where_finite_without_loss_scaling_is_new_itself() -> None:
    state = no_loss_scaling(optax.sgd(0.1)).init(PARAMS)
    assert where_finite(state, new := {"mean": jnp.ones(1)}, {"mean": jnp.zeros(1)}) is new


def test_where_finite_on_other_structures() -> None:
    with pytest.raises(AmpValueError, match="another structure"):
        where_finite(scaled().init(PARAMS), {"a": jnp.ones(1)}, {"b": jnp.ones(1)})


def test_where_finite_on_nnx_state_needs_a_snapshot() -> None:
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    alias, snapshot = nnx.state(model, nnx.BatchStat), nnx.as_pure(nnx.state(model, nnx.BatchStat))
    model(jnp.full((3, 2), 7.0))
    _, bad = scaled().update(INF, scaled().init(PARAMS), PARAMS)
    # nnx.state gives the model's own Variables: "before" the step is after it.
    with pytest.raises(AmpValueError, match=r"same Variables.*nnx\.as_pure"):
        where_finite(bad, nnx.state(model, nnx.BatchStat), alias)
    assert not np.array_equal(model.mean[...], [0.0, 0.0])
    nnx.update(model, where_finite(bad, nnx.state(model, nnx.BatchStat), snapshot))
    assert model.mean[...].tolist() == [0.0, 0.0]
