"""A loss scale around any Optax optimizer, and where it does not belong: docs/composition.md, row by row."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import amp_jax as amp

PAGE = Path(__file__).parents[1] / "docs" / "composition.md"
PARAMS = {"w": jnp.array([[0.5, -0.25], [1.0, 0.125]]), "b": jnp.array([-0.0, 0.5])}
LABELS = {"w": "matrix", "b": "vector"}
GOOD = [jnp.array([1.0, -0.5]), jnp.array([0.25, 2.0]), jnp.array([-1.5, 0.75]), jnp.array([0.5, 0.5])]
INF, NAN = jnp.array([jnp.inf, 1.0]), jnp.array([1.0, jnp.nan])
# Bad steps first, last, one by one and in a row.
MIXED = [INF, GOOD[0], NAN, GOOD[1], INF, INF, GOOD[2], GOOD[3], NAN]
SCHEDULE = optax.piecewise_constant_schedule(0.1, {1: 0.5, 2: 0.5, 3: 0.5})

INSIDE: dict[str, Callable[[], Any]] = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "schedule": lambda: optax.adam(SCHEDULE),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "MultiSteps that skips": lambda: optax.MultiSteps(optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), {"w": True, "b": False}), optax.sgd(0.1, momentum=0.9)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(SCHEDULE, momentum=0.9)}, LABELS
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(1e-2)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "sam": lambda: optax.contrib.sam(
        optax.adam(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2
    ),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "lion": lambda: optax.lion(SCHEDULE),
}


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(params["w"] @ x) + params["b"] - 1.0) ** 2) + 0.0 * jnp.sum(x)


def run(tx: Any, xs: Sequence[jax.Array], params: Any = None, loss_fn: Any = loss_of) -> tuple[Any, Any]:
    params = PARAMS if params is None else params
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        _, grads = amp.value_and_grad(loss_fn, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for x in xs:
        params, state = step(params, state, x)
    return params, state


def bits(tree: Any) -> list[bytes]:
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes() for leaf, key in zip(leaves, keys, strict=True)
    ]


@pytest.mark.parametrize("name", INSIDE)
def test_a_run_with_bad_steps_is_the_run_of_its_good_steps(name: str) -> None:
    tx = amp.dynamic_loss_scaling(INSIDE[name](), init_scale=2.0**10)
    params, state = run(tx, MIXED)
    want, want_state = run(tx, GOOD)
    assert bits(params) == bits(want)
    assert bits(params) != bits(PARAMS)
    assert bits(state.inner_state) == bits(want_state.inner_state)
    got = amp.metrics(state)
    assert (float(got["loss_scale"]), int(got["skipped_steps"]), int(got["consecutive_skipped"])) == (2.0**5, 5, 1)


@pytest.mark.parametrize("name", ["chain", "multi_transform", "MultiSteps", "schedule_free", "sam"])
def test_a_run_without_bad_steps_is_that_of_the_optimizer_alone(name: str) -> None:
    params, state = run(amp.dynamic_loss_scaling(INSIDE[name]()), GOOD)
    want, want_state = run(amp.no_loss_scaling(INSIDE[name]()), GOOD)
    chex.assert_trees_all_close(params, want, rtol=1e-6)
    chex.assert_trees_all_close(state.inner_state, want_state.inner_state, rtol=1e-6)


def test_a_schedule_counts_applied_steps() -> None:
    _, state = run(amp.dynamic_loss_scaling(optax.inject_hyperparams(optax.sgd)(SCHEDULE)), [GOOD[0], INF, NAN])
    # One applied step: the one after it will be made at the rate of step 1.
    assert int(state.inner_state.count) == 1
    _, state = run(amp.dynamic_loss_scaling(optax.inject_hyperparams(optax.sgd)(SCHEDULE)), [INF, *GOOD[:2]])
    assert state.inner_state.hyperparams["learning_rate"] == pytest.approx(0.05)


def test_an_overflow_in_one_group_of_multi_transform_skips_both() -> None:
    tx = amp.dynamic_loss_scaling(INSIDE["multi_transform"]())
    state = tx.init(PARAMS)
    updates, state = tx.update({"w": jnp.ones((2, 2)), "b": INF}, state, PARAMS)
    assert bits(optax.apply_updates(PARAMS, updates)) == bits(PARAMS)
    assert int(amp.metrics(state)["skipped_steps"]) == 1


def test_the_averaged_parameters_of_schedule_free_are_found_inside() -> None:
    params, state = run(amp.dynamic_loss_scaling(INSIDE["schedule_free"]()), MIXED)
    want, want_state = run(amp.no_loss_scaling(INSIDE["schedule_free"]()), GOOD)
    averaged = optax.contrib.schedule_free_eval_params(state.inner_state, params)
    chex.assert_trees_all_close(
        averaged, optax.contrib.schedule_free_eval_params(want_state.inner_state, want), rtol=1e-6
    )


def opaque_sam() -> Any:
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.adam(1e-2), ascent, opaque_mode=True)


def test_sam_with_its_own_gradients_skips_when_only_those_overflow() -> None:
    # The gradients at the parameters are finite, those at the perturbed parameters aren't.
    tx = amp.dynamic_loss_scaling(opaque_sam(), init_scale=8.0)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, worse: jax.Array) -> tuple[Any, Any]:
        grads = amp.grad(loss_of, state)(params, x)
        inner = amp.grad(lambda p, _: loss_of(p, worse), state)
        updates, state = tx.update(grads, state, params, grad_fn=inner)
        return optax.apply_updates(params, updates), state

    params, state = step(PARAMS, tx.init(PARAMS), GOOD[0], GOOD[0])
    skipped, after = step(params, state, GOOD[1], INF)
    assert bits(params) != bits(PARAMS)
    assert bits(skipped) == bits(params)
    assert bits(after.inner_state) == bits(state.inner_state)
    assert float(amp.metrics(after)["loss_scale"]) == 4.0


def test_in_a_gan_only_the_optimizer_that_overflowed_skips() -> None:
    tx = amp.dynamic_loss_scaling(optax.adam(1e-2), init_scale=8.0)

    def generate(params: Any, z: jax.Array) -> jax.Array:
        return jnp.tanh(params["w"] @ z) + params["b"]

    @jax.jit
    def step(generator: Any, critic: Any, g_state: Any, c_state: Any, z: jax.Array, real: jax.Array) -> Any:
        def critic_loss(p: Any) -> jax.Array:
            return jnp.mean(generate(p, generate(generator, z))) - jnp.mean(generate(p, real))

        def generator_loss(p: Any) -> jax.Array:
            return -jnp.mean(generate(critic, generate(p, z)))

        c_updates, c_state = tx.update(amp.grad(critic_loss, c_state)(critic), c_state, critic)
        g_updates, g_state = tx.update(amp.grad(generator_loss, g_state)(generator), g_state, generator)
        return optax.apply_updates(generator, g_updates), optax.apply_updates(critic, c_updates), g_state, c_state

    start = (PARAMS, PARAMS, tx.init(PARAMS), tx.init(PARAMS))
    good = step(*start, GOOD[0], GOOD[1])
    # Only the critic sees the real data.
    bad = step(*start, GOOD[0], NAN)
    assert bits(bad[1]) == bits(PARAMS)
    assert bits((bad[0], bad[2])) == bits((good[0], good[2]))
    assert [float(amp.metrics(state)["loss_scale"]) for state in bad[2:]] == [8.0, 4.0]


@pytest.mark.parametrize("second", [GOOD[1], INF])
def test_one_scale_for_two_losses(second: jax.Array) -> None:
    # Two backward passes, one decision: an overflow in either skips the step.
    tx = amp.dynamic_loss_scaling(optax.sgd(0.5), init_scale=8.0)
    state = tx.init(PARAMS)
    first, other = (amp.grad(loss_of, state)(PARAMS, x) for x in (GOOD[0], second))
    updates, state = tx.update(jax.tree.map(jnp.add, first, other), state, PARAMS)
    params = optax.apply_updates(PARAMS, updates)
    if second is INF:
        assert bits(params) == bits(PARAMS)
        assert float(amp.metrics(state)["loss_scale"]) == 4.0
    else:
        both = jax.grad(lambda p: loss_of(p, GOOD[0]) + loss_of(p, second))(PARAMS)
        chex.assert_trees_all_close(params, jax.tree.map(lambda p, g: p - 0.5 * g, PARAMS, both), rtol=1e-6)


def test_a_gradient_penalty_has_the_gradients_of_float32() -> None:
    # The penalty is on true gradients: an inner gradient that stayed scaled would count 2^20 times as much.
    state = amp.static_loss_scaling(optax.sgd(0.1), 2.0**10).init(PARAMS)
    model = amp.autocast(lambda p, x: jnp.tanh(p["w"] @ x) + p["b"], "mixed_float16")

    def penalised(grad: Any, model: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            slope = grad(lambda x: jnp.sum(model(params, x)))(GOOD[0])
            return jnp.mean(model(params, GOOD[0]) ** 2) + jnp.sum(slope**2)

        return loss_fn

    ours = amp.grad(penalised(lambda f: amp.grad(f, state), model), state)(PARAMS)
    want = jax.grad(penalised(jax.grad, lambda p, x: jnp.tanh(p["w"] @ x) + p["b"]))(PARAMS)
    # float16 has eleven bits; the second derivative passes through several roundings.
    chex.assert_trees_all_close(ours, want, rtol=0.02, atol=2e-3)


def test_per_example_gradients_show_which_example_overflowed() -> None:
    tx = amp.dynamic_loss_scaling(optax.sgd(0.5), init_scale=8.0)
    state, xs = tx.init(PARAMS), jnp.stack([GOOD[0], INF, GOOD[1]])
    grads = jax.vmap(amp.grad(loss_of, state), in_axes=(None, 0))(PARAMS, xs)
    finite = jax.vmap(amp.all_finite)(grads)
    assert finite.tolist() == [True, False, True]
    # All of them together are one bad step; without the bad example it is a good one.
    _, bad = tx.update(jax.tree.map(lambda g: g.mean(0), grads), state, PARAMS)
    assert not amp.metrics(bad)["grads_finite"]
    kept = jax.tree.map(lambda g: g[finite].mean(0), grads)
    updates, good = tx.update(kept, state, PARAMS)
    assert amp.metrics(good)["grads_finite"]
    want = jax.grad(lambda p: (loss_of(p, GOOD[0]) + loss_of(p, GOOD[1])) / 2)(PARAMS)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.5 * g, want), rtol=1e-6)


def test_every_member_of_an_ensemble_has_a_scale_of_its_own() -> None:
    tx = amp.dynamic_loss_scaling(optax.adam(1e-2), init_scale=8.0)
    members = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), PARAMS)

    @jax.jit
    @jax.vmap
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = amp.grad(loss_of, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.vmap(tx.init)(members)
    after, state = step(members, state, jnp.stack([GOOD[0], INF, GOOD[0]]))
    assert amp.metrics(state)["loss_scale"].tolist() == [8.0, 4.0, 8.0]
    assert amp.metrics(state)["skipped_steps"].tolist() == [0, 1, 0]
    alone, _ = run(tx, GOOD[:1], jax.tree.map(lambda p: p[2], members))
    chex.assert_trees_all_close(jax.tree.map(lambda p: p[2], after), alone, rtol=1e-6)
    assert bits(jax.tree.map(lambda p: p[1], after)) == bits(jax.tree.map(lambda p: p[1], members))


# The tables of the page


def rows(heading: str) -> list[tuple[str, str, str]]:
    """Code, what happens, and what is said about it, of each row of the table under a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([^|]+)` \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    return [(code, result.strip(), words.strip()) for code, result, words in found]


NAMES = {"amp": amp, "optax": optax, "tx": optax.adam(1e-2), "labels": LABELS, "scaled": amp.dynamic_loss_scaling}
AROUND = rows("The loss scale inside of something else")
RUNS_ON = "works, but what stands outside runs on skipped steps too"


def build(code: str) -> Any:
    return eval(code, dict(NAMES))


@pytest.mark.parametrize("code", [code for code, *_ in rows("The loss scale outermost")])
def test_outermost_works_as_the_page_says(code: str) -> None:
    tx = build(code)
    params, state = run(tx, MIXED)
    want, _ = run(tx, GOOD)
    assert bits(params) == bits(want)
    assert int(amp.metrics(state)["skipped_steps"]) == 5


@pytest.mark.parametrize(("code", "result", "words"), AROUND, ids=[code for code, *_ in AROUND])
def test_inside_of_something_else_does_what_the_page_says(code: str, result: str, words: str) -> None:
    tx = build(code)
    if result == "error":
        with pytest.raises(amp.AmpValueError) as error:
            run(tx, GOOD[:1])
        # The page shows the order that the error shows.
        assert re.findall(r"`([^`]+)`", words)[0] in str(error.value)
        return
    params, state = run(tx, MIXED)
    assert (float(amp.metrics(state)["loss_scale"]), int(amp.metrics(state)["skipped_steps"])) == (2.0**10, 5)
    want, _ = run(tx, GOOD)
    assert (bits(params) == bits(want)) == (result == "works")
    assert amp.all_finite(params)


def test_the_page_has_the_orders_that_people_try() -> None:
    codes = " ".join(code for code, *_ in AROUND)
    for name in ("clip(", "clip_by_global_norm", "MultiSteps", "should_skip_update_fn", "apply_if_finite", "zero_nans"):
        assert name in codes
    assert {result for _, result, _ in AROUND} == {"works", "error", RUNS_ON}
    # Every row that is on the page was read.
    assert len(AROUND) + len(rows("The loss scale outermost")) == PAGE.read_text().count("\n| `")
