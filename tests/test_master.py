"""What is stored is the cast of a float32 master, bit for bit, after every step, applied or skipped."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import amp_jax as amp
from amp_jax._master import MasterWeightsState

HALVES = [jnp.bfloat16, jnp.float16]


def params_in(dtype: Any) -> dict[str, Any]:
    w = jax.random.normal(jax.random.key(0), (32, 8))
    return {"w": w.astype(dtype), "zero": jnp.array([-0.0, 0.0, 1e-6], dtype), "full": jnp.linspace(-1, 1, 5)}


def gradients(n: int) -> dict[str, jax.Array]:
    one, two, three = jax.random.split(jax.random.key(n), 3)
    w = jax.random.normal(one, (32, 8)) * 10.0 ** jax.random.randint(two, (32, 8), -4, 1)
    return {"w": w, "zero": jnp.array([0.0, 1e-4, 1e-8]), "full": jax.random.normal(three, (5,))}


def masters_of(state: Any) -> Any:
    (found,) = (
        node
        for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MasterWeightsState))
        if isinstance(node, MasterWeightsState)
    )
    return found.masters


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_stored_is_cast(params: Any, state: Any) -> None:
    masters = masters_of(state)
    assert isinstance(masters["full"], optax.MaskedNode)  # a float32 parameter is its own master
    for name in ("w", "zero"):
        assert masters[name].dtype == jnp.float32
        # Cast by NumPy: XLA could leave it out.
        assert np.asarray(masters[name]).astype(params[name].dtype).tobytes() == np.asarray(params[name]).tobytes()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_stored_is_the_cast_of_the_master_and_the_master_is_the_float32_run(dtype: Any, jit: bool) -> None:
    inner = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(1e-2))
    tx = amp.dynamic_loss_scaling(amp.master_weights(inner), init_scale=8.0)
    params = params_in(dtype)
    state = tx.init(params)
    wide = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    wide_tx = amp.dynamic_loss_scaling(inner, init_scale=8.0)
    wide_state = wide_tx.init(wide)

    def step(tx: Any, params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # XLA's default, which lets it leave out roundings.
    options = {"xla_allow_excess_precision": True}
    one = jax.jit(step, static_argnums=0, donate_argnums=(1, 2), compiler_options=options) if jit else step
    for n in range(12 if jit else 3):
        grads = gradients(n)
        if n % 4 == 1:
            before = bits(params), bits(state.inner_state)
            grads["full"] = grads["full"].at[0].set(np.inf)
        params, state = one(tx, params, state, grads)
        assert_stored_is_cast(params, state)
        if n % 4 == 1:
            assert (bits(params), bits(state.inner_state)) == before
        wide, wide_state = one(wide_tx, wide, wide_state, grads)
    masters = {**masters_of(state), "full": params["full"]}
    # Compiled apart, the programs round differently in the last bit; without masters it would be one in 2^8.
    for name, want in wide.items():
        np.testing.assert_allclose(masters[name], want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_hundred_updates_too_small_for_the_dtype_add_up(dtype: Any) -> None:
    # MPX#2 and pytorch#120376: in half alone 1.0 - 0.0001 is 1.0.
    tx = amp.master_weights(optax.sgd(1.0))
    params = jnp.ones((), dtype)

    def body(carry: Any, _: None) -> tuple[Any, None]:
        updates, state = tx.update(jnp.float32(1e-4), carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (params, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=100))((params, tx.init(params)))
    assert state.masters == pytest.approx(0.99, abs=1e-5)
    assert params == np.asarray(state.masters).astype(dtype)


def test_what_is_stored_wins_over_the_master() -> None:
    tx = amp.master_weights(optax.sgd(1.0))
    state = tx.init(params := jnp.ones(2, jnp.bfloat16))
    _, state = tx.update(jnp.full(2, 1e-3), state, params)
    # One number was replaced from outside, the other one goes on from its master.
    loaded = jnp.array([3.0, 1.0], jnp.bfloat16)
    updates, state = tx.update(jnp.full(2, 1e-3), state, loaded)
    np.testing.assert_allclose(state.masters, [2.999, 0.998], rtol=1e-6)
    assert optax.apply_updates(loaded, updates).tolist() == [3.0, 0.99609375]


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_that_shrink_by_any_factor_are_stored_as_the_cast(dtype: Any) -> None:
    # The master is a float32 sum too: where half is finer than a float32 step of the old number, it holds the new one.
    tx = amp.master_weights(optax.sgd(1.0))
    params = jax.random.normal(jax.random.key(0), (24, 200)).astype(dtype)
    state = tx.init(params)
    # First to masters that lie between two half numbers.
    updates, state = tx.update(jax.random.normal(jax.random.key(1), params.shape) * 1e-3, state, params)
    params = optax.apply_updates(params, updates)
    factor = 2.0 ** -jnp.arange(1.0, 25.0)[:, None]
    updates, state = jax.jit(tx.update)(state.masters * (1 - factor), state, params)
    params = optax.apply_updates(params, updates)
    assert (np.asarray(params) == np.asarray(state.masters).astype(dtype)).all()


def test_the_optimizer_inside_sees_float32_masters_and_gradients() -> None:
    seen: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(jax.tree.map(lambda x: x.dtype.name, (updates, params)))
        return updates, state

    params = {**params_in(jnp.bfloat16), "count": jnp.int32(3), "f8": jnp.ones(2, jnp.float8_e4m3fn), "none": None}
    grads = {**gradients(0), "count": np.zeros((), jax.dtypes.float0), "f8": jnp.ones(2, jnp.float8_e4m3fn)}
    grads = {**grads, "none": None, "w": jnp.ones((32, 8), jnp.bfloat16)}
    tx = amp.master_weights(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    updates, state = tx.update(grads, tx.init(params), params)
    assert set(jax.tree.leaves(seen)) == {"float32"}
    assert updates["count"].dtype == jax.dtypes.float0
    assert updates["f8"] is grads["f8"]
    assert updates["none"] is None
    assert len(jax.tree.leaves(state.masters)) == 2


def test_flax_train_state_stores_the_cast() -> None:
    model = nn.Dense(4, param_dtype=jnp.bfloat16)
    x = jnp.ones((2, 3))
    tx = amp.loss_scaling(amp.master_weights(optax.adam(1e-2)), "mixed_float16")
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx)

    @jax.jit
    def step(state: TrainState) -> TrainState:
        grads = amp.grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - 1.0) ** 2), state.opt_state)(
            state.params
        )
        return state.apply_gradients(grads=grads)

    for _ in range(3):
        state = step(state)
    for master, stored in zip(jax.tree.leaves(masters_of(state.opt_state)), jax.tree.leaves(state.params), strict=True):
        assert np.asarray(master).astype(stored.dtype).tobytes() == np.asarray(stored).tobytes()


def test_nnx_trains_float32_adapters_over_a_frozen_half_base() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.base = nnx.Linear(4, 4, rngs=rngs)
            self.head = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(nnx.relu(self.base(x)))

    policy = amp.get_policy("mixed_float16").override({"base": amp.Policy("float16", "float16", "float16")})
    model = amp.wrap(Model(nnx.Rngs(0)), policy)
    assert model.base.kernel.dtype == jnp.float16
    assert model.head.kernel.dtype == jnp.float32
    labels = nnx.map_state(lambda path, _: "frozen" if "base" in path else "trained", nnx.state(model, nnx.Param))
    groups = {"trained": amp.master_weights(optax.adam(1e-1)), "frozen": optax.set_to_zero()}
    tx = amp.loss_scaling(optax.multi_transform(groups, nnx.as_pure(labels)), policy)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = bits(nnx.state(model.base))
    x = jnp.ones((2, 4))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, grads = amp.value_and_grad(lambda model: jnp.mean((model(x) - 1.0) ** 2), optimizer)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0] / 2
    assert bits(nnx.state(model.base)) == before
    assert model.head.kernel.dtype == jnp.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_adapters_alone_are_differentiated_beside_a_half_base(dtype: Any) -> None:
    # Not weakly typed, as a bare jnp.full(..., 0.1) is: such a number takes the half dtype of the base.
    base, adapter = jnp.ones((3, 3), dtype), {"a": jnp.array([[0.1]] * 3), "b": jnp.array([[0.1] * 3])}
    tx = amp.dynamic_loss_scaling(amp.master_weights(optax.sgd(0.1)))
    state = tx.init(adapter)
    assert not jax.tree.leaves(masters_of(state))

    def loss_fn(adapter: Any, base: jax.Array) -> jax.Array:
        return jnp.mean((jnp.ones(3) @ (base + adapter["a"] @ adapter["b"])) ** 2)

    grads = amp.grad(loss_fn, state)(adapter, base)
    updates, _ = tx.update(grads, state, adapter)
    want = jax.tree.map(lambda g: -0.1 * g, jax.grad(loss_fn)(adapter, base.astype(jnp.float32)))
    for name, update in updates.items():
        np.testing.assert_allclose(update, want[name], rtol=1e-6)


@pytest.mark.parametrize(
    "place",
    [
        lambda master: amp.dynamic_loss_scaling(optax.masked(master, {"w": True, "zero": True, "full": False})),
        lambda master: amp.dynamic_loss_scaling(
            optax.multi_transform({"a": master, "b": optax.adam(0.1)}, {"w": "a", "zero": "a", "full": "b"})
        ),
        lambda master: amp.dynamic_loss_scaling(optax.MultiSteps(master, 2)),
        lambda master: amp.dynamic_loss_scaling(optax.chain(optax.clip(1.0), master)),
        lambda master: amp.dynamic_loss_scaling(optax.apply_if_finite(master, 3)),
        lambda _: amp.master_weights(amp.dynamic_loss_scaling(optax.adam(0.1))),
    ],
    ids=["masked", "multi_transform", "MultiSteps", "chain", "apply_if_finite", "around the loss scale"],
)
def test_it_works_inside_of_what_selects(place: Any) -> None:
    tx = place(amp.master_weights(optax.adam(0.1)))
    params = params_in(jnp.bfloat16)
    state = tx.init(params)

    def body(carry: Any, scale: jax.Array) -> tuple[Any, None]:
        grads = jax.tree.map(lambda g: g * scale, gradients(0))
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    # A scan: the state has the same dtypes after a step as in init.
    (after, state), _ = jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))(
        (params, state), jnp.array([1.0, np.inf, 0.5, -0.3])
    )
    masters = masters_of(state)
    assert np.asarray(masters["w"]).astype(jnp.bfloat16).tobytes() == np.asarray(after["w"]).tobytes()
    assert (after["w"] != params["w"]).mean() > 0.9
    assert amp.metrics(state)["skipped_steps"] == 1


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(amp.master_weights(optax.adam(0.1)), optax.scale(0.5)),
        optax.contrib.schedule_free(amp.master_weights(optax.sgd(0.1)), 0.1, 0.9),
        optax.chain(amp.stochastic_rounding(optax.adam(0.1), 0), optax.scale(0.5)),
    ],
)
def test_what_changes_its_updates_is_an_error_that_shows_the_order(tx: Any) -> None:
    with pytest.raises(amp.AmpValueError, match=r"amp.loss_scaling\(amp.\w+\(optax.chain"):
        amp.loss_scaling(tx, "mixed_bfloat16").init(params_in(jnp.bfloat16))


def test_params_are_needed_and_in_the_dtypes_of_init() -> None:
    tx, params = amp.master_weights(optax.sgd(0.1)), params_in(jnp.bfloat16)
    with pytest.raises(amp.AmpValueError, match="`params` is missing"):
        tx.update(gradients(0), tx.init(params))
    with pytest.raises(amp.AmpValueError, match=r"\['w'\]"):
        tx.update(gradients(0), tx.init({**params, "w": params["w"].astype(jnp.float32)}), params)
    with pytest.raises(amp.AmpTypeError, match="`tx` is of type float"):
        amp.master_weights(0.1)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:jax.sharding.SingleDeviceSharding is deprecated:DeprecationWarning")  # orbax
def test_masters_are_sharded_like_the_params_and_survive_a_checkpoint(tmp_path: Any) -> None:
    import orbax.checkpoint as ocp

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params, grads = params_in(jnp.bfloat16), gradients(0)
    spread = {**params, "w": jax.device_put(params["w"], sharding)}
    tx = amp.dynamic_loss_scaling(amp.master_weights(optax.adam(0.1)))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    want = step(*step(params, tx.init(params)))
    state = tx.init(spread)
    assert masters_of(state)["w"].sharding == sharding
    first = step(spread, state)
    assert masters_of(first[1])["w"].sharding.is_equivalent_to(sharding, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", first)
        checkpointer.wait_until_finished()
        first = checkpointer.restore(tmp_path / "state", first)
    assert bits(step(*first)) == bits(want)
