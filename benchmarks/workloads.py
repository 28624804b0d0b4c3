"""Training steps: five that everything is tuned on, and those of `zoo`, which nothing is.

A *step* is one AdamW update of a workload.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import zoo
from benchmarks.models import GPT, LSTM, ResNet, UNet
from benchmarks.workload import Workload, classify, language, spec

NAMES = ("gpt", "gpt-scan", "unet", "resnet", "lstm")
MORE = tuple(zoo.MODELS)


def workload(name: str, dtype: Any = None, scale: float = 1) -> Workload:
    """One of `NAMES` or `MORE`, with `dtype=` set on every layer.

    Any `scale` below 1 takes a small model that a CPU can run, and of the first five that share of the batch.
    """
    if name in MORE:
        return zoo.MODELS[name](dtype, scale == 1)
    if name not in NAMES:
        raise ValueError(f"`name` is {name!r}; it is one of {', '.join((*NAMES, *MORE))}.")
    build = {"gpt": gpt, "gpt-scan": gpt_scan, "unet": unet, "resnet": resnet, "lstm": lstm}[name]
    return build(dtype, scale == 1, lambda n: max(1, int(n * scale)))


def gpt(dtype: Any, full: bool, share: Callable[[int], int], scan: bool = False) -> Workload:
    model = GPT(8192, 768, 12, 4, dtype, scan) if full else GPT(256, 128, 4, 4, dtype, scan)
    return language(model, spec((share(16), 512 if full else 64), jnp.int32))


def gpt_scan(dtype: Any, full: bool, share: Callable[[int], int]) -> Workload:
    return gpt(dtype, full, share, scan=True)


def lstm(dtype: Any, full: bool, share: Callable[[int], int]) -> Workload:
    model = LSTM(4096, 512, dtype) if full else LSTM(256, 64, dtype)
    return language(model, spec((share(64), 128 if full else 32), jnp.int32))


def unet(dtype: Any, full: bool, share: Callable[[int], int]) -> Workload:
    model = UNet(128 if full else 32, dtype)
    image, time = spec((share(64), 32, 32, 3)), spec((share(64),))

    def loss(p: Any, x: jax.Array, t: jax.Array, noise: jax.Array) -> jax.Array:
        guess: Any = model.apply(p, x, t)
        return jnp.mean(jnp.square(guess.astype(jnp.float32) - noise))

    return Workload(
        lambda key: model.init(key, jnp.zeros(image.shape), jnp.zeros(time.shape)), loss, (image, time, image)
    )


def resnet(dtype: Any, full: bool, share: Callable[[int], int]) -> Workload:
    model = ResNet(64 if full else 16, (2, 2, 2, 2) if full else (1, 1), dtype)
    shape = share(64), *((224, 224, 3) if full else (32, 32, 3))

    def logits(p: Any, x: jax.Array) -> jax.Array:
        return model.apply(p, x, mutable=["batch_stats"])[0]

    return classify(lambda key: model.init(key, jnp.zeros(shape)), logits, shape)


def step(
    name: str,
    dtype: Any = None,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda loss: loss,
    scale: float = 1,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`train_step(params, opt_state, *batch)` with the loss function transformed, and the shapes of its arguments."""
    init, loss, batch = workload(name, dtype, scale)
    tx = optax.adamw(1e-3)
    loss = transform(loss)
    params = jax.eval_shape(init, jax.random.key(0))

    def train_step(params: Any, opt_state: Any, *batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step, (params, jax.eval_shape(tx.init, params), *batch)


def example(specs: tuple[jax.ShapeDtypeStruct, ...], key: jax.Array) -> list[jax.Array]:
    """A random batch of these shapes: small ids, standard normal arrays, times up to 1000."""
    return [draw(one, jax.random.fold_in(key, i)) for i, one in enumerate(specs)]


def draw(one: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(one.dtype, jnp.integer):
        return jax.random.randint(key, one.shape, 0, 10)
    return jax.random.normal(key, one.shape) if len(one.shape) > 1 else jax.random.uniform(key, one.shape) * 1000
