"""One float16 training step under every loss scaler for JAX, as its documentation says to write it.

A *scaler* makes a `Step` of an Optax optimizer. The model is the same for all, in float16 by hand, with a float32 loss.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

from benchmarks.workloads import workload

INIT, LOSS, BATCH = workload("gpt", jnp.float16)
RATE = 1e-3


class Step(NamedTuple):
    """A training step `run(params, state, tokens)`, and the state that it begins with."""

    run: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    init: Callable[[Any], Any]


def select(ok: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(partial(jnp.where, ok), new, old)


def plain(tx: Any) -> Step:
    """No loss scale and no check: what the others are compared with."""

    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        value, g = jax.value_and_grad(LOSS)(p, t)
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return Step(run, tx.init)


def ours(tx: Any) -> Step:
    """Imported late, so that the others can be measured without the package."""
    import amp_jax as amp

    scaled = amp.dynamic_loss_scaling(tx)

    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        value, g = amp.value_and_grad(LOSS, s)(p, t)
        u, s = scaled.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return Step(run, scaled.init)


def flax_dynamic_scale(tx: Any) -> Step:
    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        s, scale = s
        scale, ok, value, g = scale.value_and_grad(LOSS)(p, t)
        u, new = tx.update(g, s, p)
        return select(ok, optax.apply_updates(p, u), p), (select(ok, new, s), scale), value

    # Arrays for its two leaves, which it declares as Python numbers: with those it would compile a second time.
    state: Any = DynamicScale
    return Step(run, lambda p: (tx.init(p), state(fin_steps=jnp.int32(0), scale=jnp.float32(65536))))


def jmp_dynamic(tx: Any) -> Step:
    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        # Rebuilt in each step: as an argument it can't be lowered from shapes.
        s, (loss_scale, counter) = s
        scale = jmp.DynamicLossScale(loss_scale, counter)
        value, g = jax.value_and_grad(lambda p: scale.scale(LOSS(p, t)))(p)
        g = scale.unscale(g)
        ok = jmp.all_finite(g)
        u, new = tx.update(g, s, p)
        scale = scale.adjust(ok)
        state = jmp.select_tree(ok, new, s), (scale.loss_scale, scale.counter)
        return jmp.select_tree(ok, optax.apply_updates(p, u), p), state, value

    return Step(run, lambda p: (tx.init(p), (jnp.float32(2**15), jnp.int32(0))))


def mpx(tx: Any) -> Step:
    """mixed-precision-for-jax, in the parts that its `filter_value_and_grad` is made of."""
    peer: Any = importlib.import_module("mpx")

    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        s, scale = s
        value, g = jax.value_and_grad(peer.scaled(lambda p: LOSS(p, t), scale))(p)
        ok = peer.all_finite(g)
        scale = scale.adjust(ok)
        value, g = scale.unscale((value, g))
        p, s = peer.optimizer_update(p, tx, s, g, ok)
        return p, (s, scale), value

    return Step(run, lambda p: (tx.init(p), peer.DynamicLossScaling(jnp.float32(2**15), jnp.float32(1))))


def apply_if_finite(tx: Any) -> Step:
    """optax's own check, around a loss scale that stays."""
    safe = optax.apply_if_finite(tx, 1000)

    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        value, g = jax.value_and_grad(lambda p: 2.0**15 * LOSS(p, t))(p)
        g = jax.tree.map(lambda x: x / 2.0**15, g)
        u, s = safe.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return Step(run, safe.init)


def naive(tx: Any) -> Step:
    """What one writes by hand: isfinite on every leaf, and `where` on everything."""

    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        s, scale, good = s
        value, g = jax.value_and_grad(lambda p: scale * LOSS(p, t))(p)
        g = jax.tree.map(lambda x: x / scale, g)
        ok = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(g)]).all()
        u, new = tx.update(g, s, p)
        grow = ok & (good == 1999)
        scale = jnp.where(ok, jnp.where(grow, 2 * scale, scale), scale / 2)
        state = select(ok, new, s), scale, jnp.where(ok & ~grow, good + 1, 0)
        return select(ok, optax.apply_updates(p, u), p), state, value

    return Step(run, lambda p: (tx.init(p), jnp.float32(2**15), jnp.int32(0)))


def keras(scaled: bool) -> Step:
    """Keras' AdamW with or without its LossScaleOptimizer: it takes no Optax optimizer, so it has a base of its own."""
    peer: Any = importlib.import_module("keras")
    shapes, structure = jax.tree.flatten(jax.eval_shape(INIT, jax.random.key(0)))
    optimizer = peer.optimizers.AdamW(RATE)
    if scaled:
        optimizer = peer.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build([peer.Variable(np.zeros(x.shape, np.float32)) for x in shapes])
    first = [np.asarray(v) for v in optimizer.variables]
    where = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True) if scaled else None

    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        scale = 1.0 if where is None else s[where]
        value, g = jax.value_and_grad(lambda p: scale * LOSS(p, t))(p)
        leaves, s = optimizer.stateless_apply(s, jax.tree.leaves(g), jax.tree.leaves(p))
        return jax.tree.unflatten(structure, leaves), s, value

    return Step(run, lambda _: [jnp.zeros(v.shape, v.dtype) for v in first])
