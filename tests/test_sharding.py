"""A wrapped model whose parameters lie on eight devices: it trains as on one, and they stay where they lie."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import amp_jax as amp
from tests.programs import both_halves, dot_operands, normal

DEVICES, STEPS, RATE = 8, 3, 1e-2
pytestmark = pytest.mark.skipif(jax.device_count("cpu") < DEVICES, reason="needs eight CPU devices (see conftest)")

X = normal(0, 16, 8)
KERNEL = {"kernel_init": nn.with_partitioning(nn.initializers.lecun_normal(), (None, "d"))}
NNX_KERNEL = {"kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "d"))}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(name="norm")(x)
        x = x + nn.Dense(8, name="down", **KERNEL)(nn.gelu(nn.Dense(32, name="up", **KERNEL)(x)))
        return nn.Dense(8, name="head", **KERNEL)(x)


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = (nnx.Linear(*n, rngs=rngs, **NNX_KERNEL) for n in ((8, 32), (32, 8)))
        self.head = nnx.Linear(8, 8, rngs=rngs, **NNX_KERNEL)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:DEVICES]), ("d",), axis_types=(AxisType.Auto,))


def loss_of(apply: Any, params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((apply(params, x) - jnp.sin(4 * x)) ** 2)


def train(apply: Any, params: Any, tx: Any, place: Any) -> tuple[Any, Any, list[float]]:
    """A few steps; `place(tree)` puts parameters and optimizer state where they are to lie, and the batch."""
    step = jax.jit(partial(one_step, apply, tx), donate_argnums=(0, 1))
    params, state, x = place(params, tx.init(params), X)
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x)
        losses.append(loss.item())
    return params, state, losses


def one_step(apply: Any, tx: Any, params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, grads = amp.value_and_grad(partial(loss_of, apply), state)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def on_eight(specs: Any, params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
    """Moments lie where their parameters lie, which is told by their shapes, and the batch is cut."""
    where = {p.shape: spec for p, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True)}
    put = lambda a: jax.device_put(a, NamedSharding(mesh(), where.get(a.shape, P())))  # noqa: E731
    return *jax.tree.map(put, (params, state)), jax.device_put(x, NamedSharding(mesh(), P("d")))


def linen(policy: str) -> tuple[Any, Any, Any]:
    model = amp.wrap(Net(), policy)
    params = model.init(jax.random.key(0), X)
    return model.apply, params, nn.get_partition_spec(params)


def nnx_(policy: str) -> tuple[Any, Any, Any]:
    with jax.set_mesh(mesh()):
        graph, state = nnx.split(amp.wrap(NnxNet(), policy))
    specs = nnx.as_pure(nnx.get_partition_spec(state))
    params = jax.device_put(jax.tree.map(np.asarray, nnx.as_pure(state)), jax.devices("cpu")[0])
    return lambda p, x: nnx.merge(graph, p)(x), params, specs


# Sums in another order differ by some units in the last place. Where a number lies between two of the half dtype, that
# may round it to the other one, and Adam makes a step of up to RATE of the sign of a gradient, however small it is: so
# its eps stands well above those differences, and a gradient's error of a half unit moves a step by as much of RATE.
ATOL = {"float32": 1e-6, "mixed_bfloat16": STEPS * RATE * 2.0**-7, "mixed_float16": STEPS * RATE * 2.0**-10}


@pytest.mark.parametrize("policy", ATOL)
@pytest.mark.parametrize("library", [linen, nnx_])
def test_a_model_cut_over_eight_devices_trains_as_on_one(library: Any, policy: str) -> None:
    apply, params, specs = library(policy)
    tx = amp.loss_scaling(optax.adamw(RATE, eps=1e-3), policy)
    want, _, want_losses = train(apply, jax.tree.map(jnp.copy, params), tx, lambda *args: args)
    got, state, losses = train(apply, params, tx, partial(on_eight, specs))
    np.testing.assert_allclose(losses, want_losses, rtol=ATOL[policy])
    assert losses[-1] < losses[0]
    assert jax.tree.structure(got) == jax.tree.structure(want)  # boxes and their names are in the structure
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL[policy])
    cut = [leaf for leaf in jax.tree.leaves((got, state)) if leaf.ndim == 2]
    assert len(cut) == 3 * 3  # three kernels, and two moments of each
    for leaf in cut:
        assert leaf.sharding.spec == P(None, "d")
        assert leaf.dtype == np.float32
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(leaf.shape[0], leaf.shape[1] // DEVICES)}


@both_halves
def test_parameters_stored_in_half_stay_where_they_lie(policy: str) -> None:
    _, params, specs = linen("float32")
    params = on_eight(specs, params, (), X)[0]
    half = amp.get_policy(policy.removeprefix("mixed_")).cast_to_param(params)
    assert jax.tree.structure(half) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(half), jax.tree.leaves(params), strict=True):
        assert a.sharding == b.sharding
        assert a.dtype == policy.removeprefix("mixed_")


@both_halves
def test_sharding_that_is_a_part_of_types_passes_through(policy: str) -> None:
    # Under explicit axes every value's type says where it lies, and a cast that dropped it would be an error.
    with jax.set_mesh(Mesh(np.array(jax.devices("cpu")[:DEVICES]), ("d",), axis_types=(AxisType.Explicit,))):
        w = jax.device_put(normal(1, 8, 32), P("d", None))
        x = jax.device_put(X, P("d", None))

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.mean(jax.nn.gelu(x @ jax.sharding.reshard(w, P(None, None))) ** 2)

        grad = jax.jit(jax.grad(amp.autocast(loss, policy)))(w, x)
        assert jax.typeof(grad).sharding.spec == P("d", None)
        assert dot_operands(jax.grad(amp.autocast(loss, policy)), w, x) == {policy.removeprefix("mixed_")}
        want = jax.grad(loss)(w, x)
    np.testing.assert_allclose(grad, want, atol=2e-2 * float(jnp.abs(want).max()))
