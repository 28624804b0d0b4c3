"""FSDP on eight H100s: weights travel in half, gradients are added in float32.

A training step is compiled for eight cards by the real compiler, with every weight cut over them. What it sends is
priced as a ring sends it: of an array of n bytes an all-gather or a reduce-scatter moves n, an all-reduce 2 n.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import amp_jax as amp
from benchmarks import h100
from benchmarks.hlo import BYTES
from benchmarks.models import GPT
from benchmarks.workload import language, spec
from tests.collectives import moved, read

pytestmark = [
    pytest.mark.hlo,
    pytest.mark.skipif(h100.missing() is not None, reason=str(h100.missing())),
    pytest.mark.xdist_group("sharding"),
]

DEVICES = 8
TOKENS = spec((16, 256), np.int32)


def cut(tree: Any) -> Any:
    """Every weight cut along its first axis that eight divides; biases and scales on all devices."""

    def where(x: Any) -> Any:
        axis = next((a for a, n in enumerate(x.shape) if n % DEVICES == 0), None)
        return P() if axis is None or x.size < 2**12 else P(*[None] * axis, "d")

    return jax.tree.map(where, tree)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(256, 512, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(512, 2048, rngs=rngs), nnx.Linear(2048, 512, rngs=rngs)])
        self.norm, self.head = nnx.LayerNorm(512, rngs=rngs), nnx.Linear(512, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.layers[1](nnx.gelu(self.layers[0](self.norm(x))))
        return self.head(x)


def nnx_loss(model: nnx.Module) -> tuple[Callable[..., jax.Array], Any]:
    graph, state = nnx.split(model)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.as_pure(state))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens).mean()

    return loss, params


def linen_loss(model: Any) -> tuple[Callable[..., jax.Array], Any]:
    made = language(model, TOKENS)
    return made.loss, jax.eval_shape(made.init, jax.random.key(0))


def gpt(dtype: Any = None) -> GPT:
    return GPT(256, 512, 8, 1, dtype)


VARIANTS: dict[str, Callable[[], tuple[Callable[..., jax.Array], Any]]] = {
    "linen float32": lambda: linen_loss(gpt()),
    "linen hand": lambda: linen_loss(gpt(jnp.bfloat16)),
    "linen bfloat16": lambda: linen_loss(amp.wrap(gpt(), "mixed_bfloat16")),
    "linen float16": lambda: linen_loss(amp.wrap(gpt(), "mixed_float16")),
    "nnx float32": lambda: nnx_loss(Net()),
    "nnx bfloat16": lambda: nnx_loss(amp.wrap(Net(), "mixed_bfloat16")),
}


@cache
def sent(name: str) -> dict[tuple[str, str], float]:
    """Numbers that all collectives of a kind and dtype carry, whole arrays, in units of the model's parameters."""
    loss, params = VARIANTS[name]()
    tx = optax.adamw(1e-3)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    mesh = Mesh(np.array(h100.topology(f"1x{DEVICES}x1").devices), ("d",))
    args = params, jax.eval_shape(tx.init, params), TOKENS
    shardings = jax.tree.map(lambda where: NamedSharding(mesh, where), (*cut(args[:2]), P("d")))
    args = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), args, shardings)
    out = (*shardings[:2], NamedSharding(mesh, P()))
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(*args).compile(h100.OPTIONS)
    count = sum(x.size for x in jax.tree.leaves(params))
    whole = {"all-gather": DEVICES}
    return {key: n * whole.get(key[0], 1) / count for key, n in moved(read(compiled.as_text())).items()}


def price(name: str) -> float:
    """Bytes on the wire for each parameter."""
    return sum((1 + (kind == "all-reduce")) * n * BYTES[dtype] for (kind, dtype), n in sent(name).items())


def total(name: str, *kinds: str, dtype: str | None = None) -> float:
    return sum(n for (kind, d), n in sent(name).items() if kind in kinds and dtype in (None, d))


OURS = {"linen bfloat16": "bf16", "linen float16": "f16", "nnx bfloat16": "bf16"}


@pytest.mark.parametrize("name", OURS)
def test_weights_travel_in_half_and_once(name: str) -> None:
    plain = f"{name.split()[0]} float32"
    # The table of embeddings is read row by row, and only the rows are cast.
    embeddings = 256 * 512 / sum(x.size for x in jax.tree.leaves(VARIANTS[plain]()[1]))
    assert total(name, "all-gather") == pytest.approx(total(plain, "all-gather"))
    assert total(name, "all-gather", dtype="f32") <= embeddings + 1e-9
    assert total(name, "all-gather", dtype=OURS[name]) == pytest.approx(total(plain, "all-gather") - embeddings)


@pytest.mark.parametrize("name", OURS)
def test_gradients_are_added_over_devices_in_float32(name: str) -> None:
    kinds = ("all-reduce", "reduce-scatter")
    assert total(name, *kinds, dtype="f32") == total(name, *kinds) >= 1


@pytest.mark.parametrize("name", OURS)
def test_the_price_on_the_wire(name: str, record_property: Callable[[str, object], None]) -> None:
    plain = price(f"{name.split()[0]} float32")
    record_property("figures", f"{name}: x{price(name) / plain:.3f} of the bytes that float32 sends")
    # Two bytes down and four up for each parameter, where float32 has four and four.
    assert price(name) <= 0.78 * plain


def test_the_price_beside_gradients_added_in_half(record_property: Callable[[str, object], None]) -> None:
    hand, ours = price("linen hand"), price("linen bfloat16")
    record_property("figures", f"linen bfloat16: x{ours / hand:.3f} of hand-written bfloat16, which adds in half")
    assert total("linen hand", "reduce-scatter", dtype="bf16") > 0.9
    assert ours <= 1.6 * hand
