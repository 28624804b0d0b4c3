"""One decision for all devices: an overflow on one of eight skips the step on all, and the run is that of one device.

A *layout* is a way to spread a training step over devices. `run` takes any of them through batches of which some
overflow on one device only.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import amp_jax as amp

DEVICES = 8
BATCH = 16
pytestmark = pytest.mark.skipif(jax.device_count("cpu") < DEVICES, reason="needs eight CPU devices (see conftest)")

PARAMS = {
    "first": jnp.asarray(np.arange(-32, 32).reshape(8, 8) / 32, jnp.float32),
    "bias": jnp.full(8, -0.0, jnp.float32),
    "last": jnp.asarray(np.arange(8) / 4 - 1, jnp.float32),
    "pushed": jnp.array([1.0, -0.0, 0.5, -0.5, 2.0, -2.0, 0.25, 0.0], jnp.float32),
}


def push(params: Any, batch: Any) -> jax.Array:
    """A float16 product per example, finite, whose gradient overflows for a large `push` in one element alone."""
    pushed = jnp.broadcast_to(params["pushed"], batch["push"].shape).astype(jnp.float16)
    return (pushed * batch["push"].astype(jnp.float16)).astype(jnp.float32).sum(-1).mean()


def linear_loss(params: Any, batch: Any) -> jax.Array:
    """All its numbers are small multiples of a power of two, which float32 adds exactly, in any order."""
    return jnp.mean(batch["x"] @ (params["last"] + params["bias"] + params["first"].sum(0))) + push(params, batch)


def network_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    hidden = jax.nn.gelu(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["last"] - jnp.sin(x.sum(-1))) ** 2)


def model_loss(policy: str) -> Callable[[Any, Any], jax.Array]:
    network = amp.autocast(network_loss, policy)
    return lambda params, batch: network(params, batch) + push(params, batch)


class Task(NamedTuple):
    """A loss with an optimizer, and how far apart the parameters of two runs may end."""

    loss: Callable[[Any, Any], jax.Array]
    optimizer: Any
    atol: float


STEPS, RATE = 12, 0.01
ADAMW = optax.adamw(RATE, eps=1e-3)
TASKS = {
    "linear": Task(linear_loss, optax.sgd(0.25, momentum=0.5), 0.0),
    # Sums in another order differ by a few units in the last place, and a step moves a parameter by about RATE; adding
    # that to a parameter of up to 2 rounds by half a unit.
    "float32": Task(model_loss("float32"), ADAMW, STEPS * (RATE * 8 + 1) * 2.0**-23),
    # Where a product lies between two float16 numbers, another order of its sum may round it to the other one.
    "float16": Task(model_loss("mixed_float16"), ADAMW, STEPS * RATE * 2.0**-10),
}


def batches(steps: int = STEPS) -> list[tuple[Any, int | None]]:
    """Batches, and the device on which each overflows."""
    rng = np.random.default_rng(0)
    made: list[tuple[Any, int | None]] = []
    for step in range(steps):
        bad = {2: 5, 3: 0, 7: 7}.get(step)
        pushes = rng.integers(-1, 2, (BATCH, DEVICES)).astype(np.float32)
        if bad is not None:
            # Only in the row of one device, and only in the gradient of one number, which lies on another.
            pushes[2 * bad, 3] = 2.0**15
        x = rng.integers(-1, 2, (BATCH, 8)).astype(np.float32)
        made.append(({"x": jnp.asarray(x), "push": jnp.asarray(pushes)}, bad))
    return made


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:DEVICES]), ("d",))


def update(tx: Any, params: Any, state: Any, loss: jax.Array, grads: Any) -> tuple[Any, Any, jax.Array]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def wrapped(task: Task, axis_name: Any = None) -> Any:
    return amp.dynamic_loss_scaling(task.optimizer, init_scale=2.0**8, growth_interval=3, axis_name=axis_name)


def by_rows(tree: Any) -> Any:
    """Every array cut along its first axis, as FSDP stores parameters and moments; the loss scale on all devices."""
    return jax.tree.map(lambda x: P("d") if jnp.ndim(x) else P(), tree)


def everywhere(tree: Any) -> Any:
    return jax.tree.map(lambda _: P(), tree)


Step = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]


def global_step(tx: Any, task: Task) -> Step:
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        return update(tx, params, state, *amp.value_and_grad(task.loss, state)(params, batch))

    return step


def one_device(task: Task) -> tuple[Step, Any, Any]:
    tx = wrapped(task)
    return jax.jit(global_step(tx, task)), PARAMS, tx.init(PARAMS)


def sharded_jit(task: Task, layout: Callable[[Any], Any]) -> tuple[Step, Any, Any]:
    tx = wrapped(task)
    tree = PARAMS, tx.init(PARAMS)
    shardings = jax.tree.map(partial(NamedSharding, mesh()), layout(tree))
    batch = NamedSharding(mesh(), P("d"))
    out = (*shardings, NamedSharding(mesh(), P()))
    step = jax.jit(global_step(tx, task), in_shardings=(*shardings, batch), out_shardings=out)
    return step, *jax.device_put(tree, shardings)


def data_parallel(task: Task) -> tuple[Step, Any, Any]:
    return sharded_jit(task, everywhere)


def fsdp(task: Task) -> tuple[Step, Any, Any]:
    return sharded_jit(task, by_rows)


def mapped(step: Step, tree: tuple[Any, Any], specs: Any) -> tuple[Step, Any, Any]:
    """`step` under shard_map, which checks that what it says is equal on all devices is."""
    inside = jax.shard_map(step, mesh=mesh(), in_specs=(*specs, P("d")), out_specs=(*specs, P()))
    return jax.jit(inside), *jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh()), specs))


def shard_map_of_a_mean_loss(task: Task) -> tuple[Step, Any, Any]:
    """JAX adds the gradients: the parameters are the same on all devices, the loss that is differentiated too."""
    tx = wrapped(task, "d")

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss_fn = lambda p, b: jax.lax.pmean(task.loss(p, b), "d")  # noqa: E731
        return update(tx, params, state, *amp.value_and_grad(loss_fn, state)(params, batch))

    tree = PARAMS, tx.init(PARAMS)
    return mapped(step, tree, everywhere(tree))


def shard_map_of_mean_gradients(task: Task) -> tuple[Step, Any, Any]:
    tx = wrapped(task, "d")

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        own = jax.lax.pcast(params, "d", to="varying")
        found = amp.value_and_grad(task.loss, state)(own, batch)
        return update(tx, params, state, *jax.lax.pmean(found, "d"))

    tree = PARAMS, tx.init(PARAMS)
    return mapped(step, tree, everywhere(tree))


def shard_map_fsdp(task: Task) -> tuple[Step, Any, Any]:
    """Each device has the gradients of its rows alone, so that seven of them see nothing of an overflow."""
    tx = wrapped(task, "d")

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        def loss_fn(rows: Any, batch: Any) -> jax.Array:
            whole = jax.tree.map(lambda x: jax.lax.all_gather(x, "d", tiled=True), rows)
            return task.loss(whole, batch) / DEVICES

        loss, grads = amp.value_and_grad(loss_fn, state)(params, batch)
        return update(tx, params, state, jax.lax.psum(loss, "d"), grads)

    tree = PARAMS, tx.init(PARAMS)
    return mapped(step, tree, by_rows(tree))


def pmap(task: Task) -> tuple[Step, Any, Any]:
    """The optimizer adds the gradients, so that each device judges those of its own examples."""
    mean = optax.stateless(lambda grads, params: jax.lax.pmean(grads, "d"))
    tx = wrapped(task._replace(optimizer=optax.chain(mean, task.optimizer)), "d")

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = amp.value_and_grad(task.loss, state)(params, batch)
        return update(tx, params, state, jax.lax.pmean(loss, "d"), grads)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax says that pmap is on its way out
        one = jax.pmap(step, axis_name="d", devices=jax.devices("cpu")[:DEVICES])

    def split(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        return one(params, state, jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch))

    copies = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), (PARAMS, tx.init(PARAMS)))
    return split, *copies


LAYOUTS = {
    one.__name__: one
    for one in (
        data_parallel,
        fsdp,
        shard_map_of_a_mean_loss,
        shard_map_of_mean_gradients,
        shard_map_fsdp,
        pmap,
    )
}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def on_each_device(x: jax.Array) -> list[Any]:
    return [np.asarray(shard.data).reshape(-1).tolist() for shard in x.addressable_shards]


def first_copy(tree: Any, like: Any) -> Any:
    """What pmap keeps once per device, once."""
    return jax.tree.map(lambda x, y: x[0] if x.ndim > y.ndim else x, tree, like)


class Run(NamedTuple):
    params: Any
    inner_state: Any
    metrics: list[dict[str, Any]]
    losses: list[float]


def run(layout: Callable[[Task], tuple[Step, Any, Any]], task: Task) -> Run:
    step, params, state = layout(task)
    history, losses = [], []
    for batch, bad in batches():
        before = bits((params, state.inner_state))
        params, state, loss = step(params, state, batch)
        for leaf in state.scaling:
            copies = on_each_device(leaf)
            assert len(copies) == (1 if layout is one_device else DEVICES)
            assert copies == copies[:1] * len(copies)
        assert (bits((params, state.inner_state)) == before) == (bad is not None)
        history.append({name: np.ravel(value)[0].item() for name, value in amp.metrics(state).items()})
        losses.append(np.ravel(loss)[0].item())
    inner_state = state.inner_state[1] if layout is pmap else state.inner_state
    like = PARAMS, task.optimizer.init(PARAMS)
    return Run(*first_copy((params, inner_state), like), history, losses)


@pytest.fixture(scope="module")
def alone() -> dict[str, Run]:
    return {name: run(one_device, task) for name, task in TASKS.items()}


def test_the_run_on_one_device_has_steps_of_every_kind(alone: dict[str, Run]) -> None:
    for one in alone.values():
        scales = [entry["loss_scale"] for entry in one.metrics]
        # Two bad steps on end, three good ones, a bad one, three good ones.
        assert np.log2(scales).tolist() == [8, 8, 7, 6, 6, 6, 7, 6, 6, 6, 7, 7]
        assert one.metrics[-1]["skipped_steps"] == 3
        # The overflow is one of the backward pass: the loss itself is finite.
        assert np.isfinite(one.losses).all()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_device_skips_all_and_the_run_is_that_of_one_device(
    layout: str, task: str, alone: dict[str, Run]
) -> None:
    got, want = run(LAYOUTS[layout], TASKS[task]), alone[task]
    assert got.metrics == want.metrics
    if TASKS[task].atol == 0:
        assert bits((got.params, got.inner_state)) == bits((want.params, want.inner_state))
        assert got.losses == want.losses
    else:
        chex.assert_trees_all_close(got.params, want.params, rtol=0, atol=TASKS[task].atol)


def test_devices_along_several_axes_decide_together() -> None:
    grid = Mesh(np.array(jax.devices("cpu")[:DEVICES]).reshape(2, 4), ("a", "b"))
    for wrapper in (partial(amp.dynamic_loss_scaling, init_scale=8.0), partial(amp.static_loss_scaling, scale=8.0)):
        tx = wrapper(optax.adam(0.1), axis_name=("a", "b"))
        inside = jax.shard_map(
            lambda g, s, p, tx=tx: tx.update(g, s, p),
            mesh=grid,
            in_specs=(specs := (P("a", "b"), by_grid(tx), P("a", "b"))),
            out_specs=specs[:2],
        )
        params = jnp.ones((2, 4))
        for row, column in ((0, 0), (1, 2)):
            grads = params.at[row, column].set(jnp.inf)
            updates, state = jax.jit(inside)(grads, tx.init(params), params)
            assert np.signbit(updates).all()
            assert not updates.any()
            assert not amp.metrics(state)["grads_finite"]
        updates, _ = jax.jit(inside)(params, tx.init(params), params)
        assert (updates < 0).all()


def by_grid(tx: Any) -> Any:
    return jax.tree.map(lambda x: P("a", "b") if x.ndim else P(), jax.eval_shape(tx.init, jnp.ones((2, 4))))


def test_a_forgotten_axis_name_is_an_error_where_devices_could_differ() -> None:
    task = TASKS["linear"]
    forgotten = amp.dynamic_loss_scaling(task.optimizer)
    inside = jax.shard_map(
        lambda g, s: forgotten.update(g, s)[1].scaling,
        mesh=mesh(),
        in_specs=(P("d"), by_rows(forgotten.init(jnp.ones(8)))),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(inside)(jnp.ones(8), forgotten.init(jnp.ones(8)))


# Sums over devices


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ w)


def scaling(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x * w[:, 0])


def by_sharding(loss_fn: Any, two: Mesh) -> Any:
    batch = NamedSharding(two, P("d"))
    return jax.jit(jax.grad(loss_fn), in_shardings=(NamedSharding(two, P()), batch))


def by_transposition(loss_fn: Any, two: Mesh) -> Any:
    inside = lambda w, x: jax.grad(lambda w: jax.lax.psum(loss_fn(w, x), "d"))(w)  # noqa: E731
    return jax.jit(jax.shard_map(inside, mesh=two, in_specs=(P(), P("d")), out_specs=P()))


def by_psum(loss_fn: Any, two: Mesh) -> Any:
    def inside(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.grad(loss_fn)(jax.lax.pcast(w, "d", to="varying"), x), "d")

    return jax.jit(jax.shard_map(inside, mesh=two, in_specs=(P(), P("d")), out_specs=P()))


def by_autocast_of_all(loss_fn: Any, two: Mesh) -> Any:
    """The shard_map inside of the autocast instead of around it."""
    total = jax.shard_map(
        lambda w, x: jax.lax.psum(loss_fn(w, x), "d"), mesh=two, in_specs=(P(), P("d")), out_specs=P()
    )
    return jax.jit(jax.grad(amp.autocast(total, "mixed_bfloat16")))


@pytest.mark.parametrize("loss_fn", [product, scaling])
@pytest.mark.parametrize("add", [by_sharding, by_transposition, by_psum, by_autocast_of_all])
def test_gradients_of_several_devices_are_added_in_float32(add: Any, loss_fn: Any) -> None:
    # 257 is no bfloat16 number: jax#27496 gave 256.
    two = Mesh(np.array(jax.devices("cpu")[:2]), ("d",))
    grad = add(loss_fn if add is by_autocast_of_all else amp.autocast(loss_fn, "mixed_bfloat16"), two)
    w, x = jnp.ones((1, 1)), jnp.array([[256.0], [1.0]])
    got = grad(w, x)
    assert (got.item(), got.dtype) == (257.0, np.float32)


@pytest.mark.parametrize("layout", ["shard_map_of_a_mean_loss", "shard_map_of_mean_gradients", "shard_map_fsdp"])
def test_every_sum_over_devices_in_a_step_is_one_of_float32(layout: str) -> None:
    # Without the product that is float16 by the author's own cast, which JAX adds as it was written.
    step, params, state = LAYOUTS[layout](TASKS["float16"]._replace(loss=amp.autocast(network_loss, "mixed_float16")))
    found = collectives(jax.make_jaxpr(step)(params, state, batches(1)[0][0]).jaxpr)
    # A sum for each parameter's gradient and for the loss; the decision is a minimum of one integer.
    sums = [aval for name, aval in found if name.startswith(("psum", "reduce_scatter"))]
    assert len(sums) >= len(PARAMS)  # one parameter isn't used, and the loss is added too
    assert {aval.dtype for aval in sums} == {np.dtype(np.float32)}
    assert [aval.shape for name, aval in found if name.startswith("pmin")] == [()]


def collectives(jaxpr: Any) -> list[tuple[str, Any]]:
    """The reductions over devices that stand anywhere in a jaxpr, with what each adds."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("psum", "reduce_scatter", "pmin", "pmax")):
            found += [(eqn.primitive.name, v.aval) for v in eqn.invars]
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += collectives(inner) if hasattr(inner, "eqns") else []
    return found
