"""What a workload is: a model with its loss and the shapes of its batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Workload(NamedTuple):
    """`init(key)` gives the variables, `loss(variables, *batch)` a scalar; `batch` holds shapes."""

    init: Callable[[jax.Array], Any]
    loss: Callable[..., jax.Array]
    batch: tuple[jax.ShapeDtypeStruct, ...]


def language(model: Any, tokens: jax.ShapeDtypeStruct) -> Workload:
    """A linen model of token ids, trained to tell the next one."""
    return Workload(
        lambda key: model.init(key, jnp.zeros(tokens.shape, jnp.int32)),
        lambda p, t: next_token(model.apply(p, t), t),
        (tokens,),
    )


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def classify(
    init: Callable[[jax.Array], Any], logits: Callable[[Any, jax.Array], jax.Array], shape: tuple[int, ...]
) -> Workload:
    """`logits(variables, images)`, trained to tell one of its classes; `shape` is that of the images."""

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(p, x).astype(jnp.float32), y).mean()

    return Workload(init, loss, (spec(shape), spec((shape[0],), jnp.int32)))


def spec(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
