"""A run's state through orbax and to another policy: nothing is lost, nothing is rounded unasked, ints stay ints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import amp_jax as amp

X = jax.random.normal(jax.random.key(1), (3, 4))
Y = jnp.linspace(0.0, 1.0, 6).reshape(3, 2)
BAD = X.at[1, 2].set(jnp.inf)


def inner() -> Any:
    return optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))


def create(policy: Any, tx: Any = None) -> TrainState:
    """The state of a linear model, its first weights none of which a half dtype holds exactly."""
    w = {"w": jnp.linspace(0.1, 0.9, 8).reshape(4, 2), "b": jnp.full(2, 1 / 3)}
    tx = amp.loss_scaling(inner(), policy, growth_interval=3) if tx is None else tx
    return TrainState.create(apply_fn=linear, params=amp.get_policy(policy).cast_to_param(w), tx=tx)


def linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def train(state: TrainState, policy: Any, batches: list[jax.Array]) -> TrainState:
    @jax.jit
    def step(state: TrainState, x: jax.Array) -> TrainState:
        loss_of = amp.autocast(lambda params: jnp.mean((linear(params, x) - Y) ** 2), policy)
        return state.apply_gradients(grads=amp.grad(loss_of, state.opt_state)(state.params))

    for x in batches:
        state = step(state, x)
    return state


class Net(nnx.Module):
    """Linear layers with one of them used twice, batch statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.body
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.drop(self.norm(self.again(self.body(x)))))


def create_nnx(policy: Any) -> tuple[Net, nnx.Optimizer]:
    model = amp.wrap(Net(nnx.Rngs(0, dropout=1)), policy)
    # Statistics of three examples have gradients so large that from 2^15 they would overflow a few times by themselves.
    tx = amp.loss_scaling(inner(), policy, growth_interval=3, init_scale=2.0**8)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def nnx_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    before = nnx.as_pure(nnx.state(model, nnx.BatchStat))
    grads = amp.grad(lambda model: jnp.mean((model(x) - Y) ** 2), optimizer)(model)
    optimizer.update(model, grads)
    nnx.update(model, amp.where_finite(optimizer, nnx.state(model, nnx.BatchStat), before))


def train_nnx(model: Net, optimizer: nnx.Optimizer, batches: list[jax.Array]) -> None:
    for x in batches:
        nnx_step(model, optimizer, x)


def bits(tree: Any) -> dict[str, tuple[str, bytes]]:
    def of(leaf: Any) -> tuple[str, bytes]:
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
        return str(jnp.result_type(leaf)), np.asarray(leaf, jnp.result_type(leaf)).tobytes()

    return {jax.tree_util.keystr(path): of(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def scaling(state: Any) -> dict[str, Any]:
    found = state.opt_state.scaling
    return {name: getattr(found, name).item() for name in found._fields}


@pytest.fixture
def checkpointer() -> Any:
    with ocp.StandardCheckpointer() as one:
        yield one


# Orbax, as its users use it

# One step before growth, with a skipped one behind it.
BEFORE, AFTER = [X, BAD, X, 2 * X], [X, -X, BAD, X]


def before(policy: str) -> list[jax.Array]:
    """Without a loss scale no step is skipped, and a bad one would leave nothing but NaN to compare."""
    return BEFORE if policy == "mixed_float16" else [X, -X, X, 2 * X]


def test_a_train_state_goes_through_a_checkpoint_manager_and_the_run_goes_on(tmp_path: Path) -> None:
    state = train(create("mixed_float16"), "mixed_float16", BEFORE)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        args, record = ocp.args.StandardSave(state), amp.policy_record("mixed_float16")
        manager.save(int(state.step), args=args, custom_metadata={"run": 7, **record})
        manager.wait_until_finished()
        step = manager.latest_step()
        assert step == 4
        policy = amp.recorded_policy(manager.metadata(step).custom_metadata)
        target = jax.eval_shape(lambda: create(policy))
        restored = manager.restore(step, args=ocp.args.StandardRestore(target))
    assert policy == amp.get_policy("mixed_float16")
    assert bits(restored) == bits(state)
    expected = {"loss_scale": 2.0**14, "growth_count": 2, "grads_finite": True, "skipped_steps": 1}
    assert scaling(restored) == expected | {"consecutive_skipped": 0}
    assert bits(train(restored, policy, AFTER)) == bits(train(state, policy, AFTER))
    # The count went on where it was: one more good step was enough to grow.
    assert scaling(train(restored, policy, AFTER[:1]))["loss_scale"] == 2.0**15


def test_nnx_modules_go_through_a_checkpoint_and_the_run_goes_on(tmp_path: Path, checkpointer: Any) -> None:
    model, optimizer = create_nnx("mixed_float16")
    train_nnx(model, optimizer, BEFORE)
    checkpointer.save(tmp_path / "run", nnx.state((model, optimizer)))
    checkpointer.wait_until_finished()
    modules = nnx.eval_shape(lambda: create_nnx("mixed_float16"))
    nnx.update(modules, checkpointer.restore(tmp_path / "run", nnx.state(modules)))
    assert bits(nnx.state(modules)) == bits(nnx.state((model, optimizer)))
    assert scaling(modules[1])["growth_count"] == 2
    train_nnx(*modules, AFTER)
    train_nnx(model, optimizer, AFTER)
    # Parameters, moments, statistics, the count of dropout's keys, the loss scale.
    assert bits(nnx.state(modules)) == bits(nnx.state((model, optimizer)))
    assert scaling(modules[1])["skipped_steps"] == 2


@pytest.mark.parametrize("saved", ["mixed_float16", "mixed_bfloat16"])
def test_orbax_refuses_a_target_with_or_without_a_loss_scale(tmp_path: Path, checkpointer: Any, saved: str) -> None:
    # What docs/checkpoints.md says: no loss scale is lost or made up in silence.
    (other,) = {"mixed_float16", "mixed_bfloat16"} - {saved}
    checkpointer.save(tmp_path / "run", create(saved))
    checkpointer.wait_until_finished()
    with pytest.raises(ValueError, match="scaling"):
        checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: create(other)))


def test_orbax_rounds_to_a_half_target_in_silence(tmp_path: Path, checkpointer: Any) -> None:
    # The other half of what the page says, and why one restores under the policy that was saved under.
    state = create("float32")
    checkpointer.save(tmp_path / "run", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: create("bfloat16")))
    assert restored.params["w"].dtype == jnp.bfloat16
    assert bits(checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: create("float32")))) == bits(state)


# Another dtype in the checkpoint


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_every_name_of_a_dtype_is_one_that_orbax_takes(tmp_path: Path, checkpointer: Any, dtype: Any) -> None:
    state = {"w": jnp.full(3, 1 / 3), "n": np.full(2, 1 / 3, np.float32), "step": jnp.int32(257)}
    checkpointer.save(tmp_path / "run", state, save_args=amp.orbax_save_args(state, dtype))
    checkpointer.wait_until_finished()
    held = checkpointer.restore(tmp_path / "run")
    assert {name: str(leaf.dtype) for name, leaf in held.items()} == {"w": "bfloat16", "n": "bfloat16", "step": "int32"}
    assert bits(held["w"]) == bits(state["w"].astype(jnp.bfloat16))
    assert held["step"] == 257


def advanced(state: Any) -> Any:
    """The state with a loss scale and a count that float16 doesn't hold."""
    big = {"loss_scale": 2.0**20, "growth_count": 2049, "count": 2049}

    def put(path: Any, leaf: Any) -> Any:
        names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        return next((jnp.full_like(leaf, value) for name, value in big.items() if name in names), leaf)

    return jax.tree_util.tree_map_with_path(put, state)


@pytest.mark.parametrize("made", [lambda: create("mixed_float16"), lambda: nnx.state(create_nnx("mixed_float16"))])
def test_counts_keys_and_the_loss_scale_are_never_cast(tmp_path: Path, checkpointer: Any, made: Callable[[], Any]):
    state = advanced(made())
    args = amp.orbax_save_args(state, "float16", keep="**/nu")
    checkpointer.save(tmp_path / "run", state, save_args=args)
    checkpointer.wait_until_finished()
    # Into the dtypes that the state has: what was rounded shows in the numbers.
    held, own = bits(checkpointer.restore(tmp_path / "run", state)), bits(state)
    rounded = {name for name in own if held[name] != own[name]}
    assert rounded
    assert all("params" in name or "kernel" in name for name in rounded)
    assert any("nu" in name for name in own)
    assert any("2049" in str(leaf) for leaf in jax.tree.leaves(state))


def test_numbers_that_a_checkpoint_would_hold_as_inf_are_refused() -> None:
    state = {"a": jnp.array([1e5, 65519.0, jnp.inf, 7e4]), "b": {"c": np.full(2, 1e6, np.float32)}}
    # The infinite one was so before; 65519 rounds to 65504.
    with pytest.raises(amp.AmpValueError, match=r"(?s)'a': 2 of its numbers.*float16.*'b/c': 2 of"):
        amp.orbax_save_args(state, "float16")
    assert amp.orbax_save_args(state, "float16", keep=("a", "b"))["a"].dtype is None
    assert amp.orbax_save_args(state, "bfloat16")["a"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("dtype", "keep"), [("int8", ()), ("nonsense", ()), ("bf16", "nothing")])
def test_a_dtype_or_a_pattern_that_means_nothing_is_refused(dtype: str, keep: Any) -> None:
    with pytest.raises(amp.AmpValueError):
        amp.orbax_save_args({"w": jnp.ones(2)}, dtype, keep)


def test_save_args_for_modules_are_refused() -> None:
    modules = create_nnx("float32")
    with pytest.raises(amp.AmpTypeError, match=r"expected .*nnx\.state\(\(model, optimizer\)\)"):
        amp.orbax_save_args(modules, "bf16")
    assert jax.tree.leaves(amp.orbax_save_args({"params": nnx.state(modules[0], nnx.Param)}, "bf16"))


# Another policy

PLAIN = "an optimizer that isn't wrapped"


def begun(policy: str) -> TrainState:
    return create("float32", inner()) if policy == PLAIN else create(policy)


def inside(state: TrainState) -> Any:
    return getattr(state.opt_state, "inner_state", state.opt_state)


@pytest.mark.parametrize("new", ["mixed_float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("old", [PLAIN, "float32", "mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_a_run_goes_on_under_another_policy(old: str, new: str) -> None:
    state = begun(old)
    if old != PLAIN:
        state = train(state, old, before(old))
    assert amp.all_finite(state.params)
    like = create(new)
    after = amp.change_policy(state, like)
    assert jax.tree.structure(after) == jax.tree.structure(like)
    # Half a dtype fits into float32: the parameters are the old ones to the last bit, and the rest is untouched.
    assert bits(after.params) == bits(jax.tree.map(lambda p: p.astype(jnp.float32), state.params))
    assert bits(inside(after)) == bits(inside(state))
    assert int(after.step) == int(state.step)
    scales = {"mixed_float16": like.opt_state.scaling} | ({new: state.opt_state.scaling} if old == new else {})
    assert bits(after.opt_state.scaling) == bits(scales.get(new, like.opt_state.scaling))
    # And it trains: as a run with these numbers that never was anything else.
    by_hand = like.replace(
        step=state.step,
        params=jax.tree.map(lambda p: p.astype(jnp.float32), state.params),
        opt_state=like.opt_state._replace(scaling=after.opt_state.scaling, inner_state=inside(state)),
    )
    assert bits(train(after, new, [X])) == bits(train(by_hand, new, [X]))


def test_going_to_half_stored_parameters_rounds_them_and_nothing_else() -> None:
    state = train(create("float32"), "float32", BEFORE[:1])
    after = amp.change_policy(state, create("bfloat16"))
    assert bits(after.params) == bits(jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params))
    assert bits(after.params) != bits(state.params)
    # The moments are float32 under every policy.
    assert bits(after.opt_state) == bits(state.opt_state)


def test_a_loss_scale_that_ended_begins_anew() -> None:
    state = train(create("mixed_float16"), "mixed_float16", BEFORE)
    there = amp.change_policy(state, create("mixed_bfloat16"))
    assert amp.metrics(there)["skipped_steps"] == 0
    back = amp.change_policy(there, create("mixed_float16"))
    assert scaling(back) == scaling(create("mixed_float16"))
    assert scaling(amp.change_policy(state, create("mixed_float16"))) == scaling(state) != scaling(back)


def test_parameters_too_large_for_float16_are_refused_with_their_names() -> None:
    state = create("float32")
    big = state.replace(params={"w": state.params["w"].at[0].set(7e4), "b": state.params["b"]})
    with pytest.raises(amp.AmpValueError, match="'params/w': 2 of its numbers are too large for float16"):
        amp.change_policy(big, create("float16"))
    assert amp.change_policy(big, create("bfloat16")).params["w"][0, 0] == jnp.bfloat16(7e4)


def test_two_loss_scales_of_one_state_go_on_each_by_itself() -> None:
    def pair(policy: str) -> Any:
        return {"critic": [create(policy)], "generator": create(policy)}

    old = pair("mixed_float16")
    old["critic"][0] = train(old["critic"][0], "mixed_float16", [BAD, BAD])
    after = amp.change_policy(old, pair("mixed_float16"))
    assert [scaling(s)["loss_scale"] for s in (after["critic"][0], after["generator"])] == [2.0**13, 2.0**15]


def test_all_that_does_not_fit_is_listed() -> None:
    like = create("mixed_float16")
    params = {"w": jnp.ones((4, 3)), "extra": jnp.ones(2), "b": jnp.ones(2, jnp.int32)}
    with pytest.raises(amp.AmpValueError) as error:
        amp.change_policy(like.replace(params=params), like)
    assert str(error.value).splitlines()[1:] == [
        "  'params/extra' is not in `like`",
        "  'params/b' is int32 in `state` and float32 in `like`: only floats are cast",
        "  'params/w' has shape (4, 3) in `state` and (4, 2) in `like`",
    ]
    with pytest.raises(amp.AmpValueError, match="'params/extra' is missing in `state`"):
        amp.change_policy(like, like.replace(params=params | like.params))


def test_another_optimizer_is_another_run() -> None:
    with pytest.raises(amp.AmpValueError, match=r"'opt_state/inner_state/0/trace/w' is missing"):
        amp.change_policy(create("float32"), create("float32", amp.no_loss_scaling(optax.sgd(0.1, momentum=0.9))))


def test_a_target_without_values_will_do_but_for_a_new_loss_scale() -> None:
    state = train(create("mixed_float16"), "mixed_float16", BEFORE)
    after = amp.change_policy(state, jax.eval_shape(lambda: create("mixed_float16")))
    assert bits(after) == bits(state)
    with pytest.raises(amp.AmpTypeError, match=r"'opt_state/scaling/loss_scale' is a jax\.ShapeDtypeStruct.*tx\.init"):
        amp.change_policy(create("float32"), jax.eval_shape(lambda: create("mixed_float16")))


@pytest.mark.parametrize(("old", "new"), [("mixed_float16", "mixed_bfloat16"), ("bfloat16", "mixed_float16")])
def test_nnx_modules_go_on_under_another_policy(old: str, new: str) -> None:
    model, optimizer = create_nnx(old)
    train_nnx(model, optimizer, before(old))
    assert amp.all_finite(nnx.state((model, optimizer)))
    own, like = bits(nnx.state((model, optimizer))), create_nnx(new)
    of_like = bits(nnx.state(like))
    after, after_optimizer = amp.change_policy((model, optimizer), like)
    assert after.again is after.body
    assert "float16" in repr(after).splitlines()[-1]
    assert amp.metrics(after_optimizer)["loss_scale"] == (2.0**8 if new == "mixed_float16" else 1)
    assert bits(nnx.state(after, nnx.Param)) == bits(
        jax.tree.map(lambda p: p.astype(jnp.float32), nnx.state(model, nnx.Param))
    )
    others = nnx.Not(nnx.Param)
    assert bits(nnx.state(after, others)) == bits(nnx.state(model, others))
    assert bits(after_optimizer.opt_state.inner_state) == bits(optimizer.opt_state.inner_state)
    assert after_optimizer.step[...] == 4
    train_nnx(after, after_optimizer, [X])
    # Both that it was made from are as they were: nothing is shared.
    assert bits(nnx.state((model, optimizer))) == own
    assert bits(nnx.state(like)) == of_like


def test_what_stands_beside_modules_goes_on_too() -> None:
    def run(policy: str, step: Any, fill: float) -> dict[str, Any]:
        model, optimizer = create_nnx(policy)
        return {"step": step, "ema": jnp.full(2, fill), "net": [model, optimizer], "same": model, "none": None}

    old = run("mixed_float16", 7, 0.5)
    train_nnx(*old["net"], BEFORE)
    for new in (run("mixed_bfloat16", 0, 0.0), run("mixed_bfloat16", np.int32(0), 0.0)):
        after = amp.change_policy(old, new)
        assert after["step"] == 7
        assert after["ema"].tolist() == [0.5, 0.5]
        assert after["same"] is after["net"][0]
        assert bits(nnx.state(after["net"][0])) == bits(nnx.state(old["net"][0]))


def test_nnx_state_in_place_of_modules_is_an_error_that_says_so() -> None:
    modules = create_nnx("mixed_float16")
    with pytest.raises(amp.AmpTypeError, match=r"`state` is an nnx State.*\(model, optimizer\)"):
        amp.change_policy(nnx.state(modules), modules)
