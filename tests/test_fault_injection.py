"""A float16 run with inf and NaN thrown into it ends, bit for bit, where the run of its applied batches ends."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import amp_jax as amp

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 17, 16, 8, 4, 60
SITES = ("nothing", "gradient", "activation", "loss")


class Fault(NamedTuple):
    """Where a number is put (by SITES), which number, and in which gradient leaf."""

    site: Any
    value: Any
    leaf: Any


NOTHING = Fault(np.int32(0), np.float32(0.0), np.int32(0))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, fault: Fault) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        broken = jnp.where(fault.site == SITES.index("activation"), fault.value, hidden[0, 0, 0])
        return x + nn.Dense(WIDTH)(hidden.at[0, 0, 0].set(broken.astype(hidden.dtype)))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, fault: Fault) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(Block()(x, fault)))


MODEL = amp.wrap(GPT(), "mixed_float16")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, STEPS)))
# The first steps overflow by themselves, and so do some of those at which the loss scale grows.
TX = amp.dynamic_loss_scaling(OPTIMIZER, init_scale=2.0**22, growth_interval=4)


def mean_loss(params: Any, tokens: jax.Array, fault: Fault) -> jax.Array:
    logits = MODEL.apply({"params": params}, tokens[:, :-1], fault)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return jnp.where(fault.site == SITES.index("loss"), fault.value, 1.0) * loss


@jax.jit
def train_step(params: Any, state: Any, tokens: jax.Array, fault: Fault) -> tuple[Any, Any, jax.Array]:
    loss, grads = amp.value_and_grad(mean_loss, state)(params, tokens, fault)
    leaves, structure = jax.tree.flatten(grads)
    for number, leaf in enumerate(leaves):
        here = (fault.site == SITES.index("gradient")) & (fault.leaf == number)
        leaves[number] = leaf.at[(0,) * leaf.ndim].set(jnp.where(here, fault.value, leaf[(0,) * leaf.ndim]))
    updates, state = TX.update(jax.tree.unflatten(structure, leaves), state, params)
    return optax.apply_updates(params, updates), state, loss


def at_scale(state: Any, loss_scale: float) -> Any:
    return state._replace(scaling=state.scaling._replace(loss_scale=jnp.float32(loss_scale)))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def first_params() -> Any:
    return MODEL.init(jax.random.key(0), jnp.zeros((BATCH, LENGTH), jnp.int32), NOTHING)["params"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_with_faults_is_the_run_of_its_applied_batches(seed: int, first_params: Any) -> None:
    rng = np.random.default_rng(seed)
    batches = rng.integers(0, VOCABULARY, (STEPS, BATCH, LENGTH + 1)).astype(np.int32)
    sites = np.where(rng.random(STEPS) < 0.3, rng.integers(1, len(SITES), STEPS), 0).astype(np.int32)
    values = rng.choice(np.array([np.inf, -np.inf, np.nan], np.float32), STEPS)
    where = rng.integers(0, len(jax.tree.leaves(first_params)), STEPS).astype(np.int32)

    params, state = first_params, TX.init(first_params)
    scales, applied, losses = [], [], []
    for batch, *fault in zip(batches, sites, values, where, strict=True):
        scales.append(float(amp.metrics(state)["loss_scale"]))
        before = params, state
        params, state, loss = train_step(params, state, batch, Fault(*fault))
        applied.append(bool(amp.metrics(state)["grads_finite"]))
        losses.append(float(loss))
        if not applied[-1]:
            assert bits((params, state.inner_state)) == bits((before[0], before[1].inner_state))

    # Every fault was noticed, and there were overflows that nobody injected; each kind of step is in the run.
    assert not any(applied[i] for i in np.flatnonzero(sites))
    assert set(sites) == {0, 1, 2, 3}
    assert sum(applied) < (sites == 0).sum()
    assert len(set(scales)) > 4
    # A fault in the gradients leaves the loss as it is.
    assert np.isfinite([loss for loss, site in zip(losses, sites, strict=True) if SITES[site] in SITES[:2]]).all()

    want, want_state = first_params, TX.init(first_params)
    for i in np.flatnonzero(applied):
        # Another loss scale may flush other small numbers to zero.
        want, want_state, _ = train_step(want, at_scale(want_state, scales[i]), batches[i], NOTHING)
        assert bool(amp.metrics(want_state)["grads_finite"])
    assert bits(params) == bits(want)
    assert bits(state.inner_state) == bits(want_state.inner_state)
    assert bits(params) != bits(first_params)
