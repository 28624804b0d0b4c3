"""Small models that together have every layer of `flax.linen` and of `flax.nnx`, each as a function of what it holds.

As a function a model of either library is a tree (`"params"`, and all other state) and `call(tree, *args) -> (result,
tree afterwards)`, so that one test speaks for both. The layers do here what they do in training: statistics move,
dropout draws, caches fill.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.programs import normal

X = normal(0, 2, 6, 8)
TOKENS = jnp.array([[1, 4, 2, 7], [0, 3, 3, 5]])
IMAGES = normal(1, 2, 6, 6, 4)


class Model(NamedTuple):
    """One model of the zoo.

    Attributes:
        make: Makes it, plain.
        args: What it is called with.
        depth: How many layers with weights stand behind one another, a recurrent one once for each step.
        first: What it is initialised with, where that is something else.
    """

    make: Callable[[], Any]
    args: tuple[Any, ...]
    depth: int
    first: tuple[Any, ...] | None = None


class Function(NamedTuple):
    """A model as a function: where it starts, and what it does."""

    init: Callable[[], Any]
    call: Callable[..., tuple[Any, Any]]


def function(module: Any, model: Model, transform: Callable[[Any], Any] = lambda fun: fun) -> Function:
    """`module`, made by `model` and wrapped or not, as a function; what runs it goes through `transform`."""
    if isinstance(module, nn.Module):
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

        def apply(tree: Any, *args: Any) -> Any:
            return module.apply(tree, *args, rngs={"dropout": jax.random.key(2)}, mutable=True)

        return Function(lambda: module.init(keys, *(model.first or model.args)), transform(apply))

    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def call(tree: Any, *args: Any) -> Any:
        merged = nnx.merge(graph, tree["params"], tree["rest"])
        out = transform(lambda module, *args: module(*args))(merged, *args)
        return out, pure(*nnx.state(merged, nnx.Param, ...))

    def pure(params: Any, rest: Any) -> Any:
        return {"params": nnx.as_pure(params), "rest": nnx.as_pure(rest)}

    return Function(lambda: pure(params, rest), call)


def layers(model: Model) -> set[type]:
    """The classes of all modules that run when the model does."""
    module, seen = model.make(), set[type]()
    if isinstance(module, nnx.Module):
        return {type(part) for _, part in nnx.iter_modules(module)}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.add(type(context.module))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(function(module, model).init)
    return seen


# linen


class Compact(nn.Module):
    """A module whose body is a plain function."""

    body: Callable[..., Any]

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        return self.body(*args)


def linen(body: Callable[..., Any], *args: Any, depth: int, first: tuple[Any, ...] | None = None) -> Model:
    return Model(lambda: Compact(body), args, depth, first)


def _mlp(x: Any) -> Any:
    x = nn.Sequential([nn.Dense(16), nn.PReLU(), nn.LayerNorm(), nn.DenseGeneral((4, 2))])(x)
    x = nn.Einsum((4, 2, 8), "...ab,abc->...c")(nn.gelu(x))
    return nn.Dropout(0.5, deterministic=False)(x)


def _attention(x: Any) -> Any:
    settings = {"dropout_rate": 0.2, "broadcast_dropout": False, "deterministic": False}
    x = x + nn.MultiHeadDotProductAttention(2, **settings)(nn.RMSNorm()(x))
    return nn.Dense(8)(nn.Dropout(0.5, deterministic=False)(x))


def _self_attention(x: Any) -> Any:
    return nn.SelfAttention(2, deterministic=True, normalize_qk=True)(x, mask=nn.make_causal_mask(jnp.ones((2, 6))))


def _convolutions(x: Any) -> Any:
    x = nn.relu(nn.GroupNorm(2)(nn.Conv(8, (3, 3), feature_group_count=2)(x)))
    x = nn.avg_pool(x, (2, 2), (2, 2))
    return nn.ConvLocal(4, (2, 2))(nn.ConvTranspose(4, (2, 2))(x))


def _batch_norm(x: Any) -> Any:
    x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
    x = nn.InstanceNorm()(nn.max_pool(x, (2, 2), (2, 2)))
    return nn.Dense(3)(x)


def _recurrent(x: Any) -> Any:
    x = nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.GRUCell(4)))(x)
    return nn.RNN(nn.OptimizedLSTMCell(4))(x)


def _fp8(kind: Any, x: Any) -> Any:
    return nn.Dense(8, dot_general_cls=functools.partial(kind, amax_history_length=2))(x)


def _fp8_einsum(x: Any, w: Any) -> Any:
    return nn.Dense(4)(nn.Fp8Einsum(amax_history_length=2)("abc,cd->abd", x, w))


LINEN = {
    "mlp": linen(_mlp, X, depth=3),
    "attention": linen(_attention, X, depth=4),
    "self attention": linen(_self_attention, X, depth=3),
    "decode": linen(lambda x: nn.MultiHeadAttention(2, decode=True)(x), X[:, :1], depth=3, first=(X,)),
    "convolutions": linen(_convolutions, IMAGES, depth=4),
    "batch norm": linen(_batch_norm, IMAGES, depth=3),
    "weight norm": linen(lambda x: nn.WeightNorm(nn.Dense(8))(x), X, depth=1),
    "spectral norm": linen(lambda x: nn.SpectralNorm(nn.Dense(8))(x, update_stats=True), X, depth=1),
    "recurrent": linen(_recurrent, X[:, :3], depth=6),
    "more cells": linen(lambda x: nn.RNN(nn.SimpleCell(4))(nn.RNN(nn.MGUCell(4))(x)), X[:, :3], depth=6),
    "convolutional cell": linen(lambda x: nn.RNN(nn.ConvLSTMCell(4, (3,)))(x), IMAGES[:, :3], depth=3),
    "embedding": linen(lambda t: (e := nn.Embed(8, 8)).attend(nn.Dense(8)(e(t))), TOKENS, depth=2),
    "float8 direct": linen(functools.partial(_fp8, nn.Fp8DirectDotGeneralOp), X, depth=1),
    "float8": linen(functools.partial(_fp8, nn.Fp8DotGeneralOp), X, depth=1),
    "float8 of AMD": linen(functools.partial(_fp8, nn.NANOOFp8DotGeneralOp), X, depth=1),
    "float8 einsum": linen(_fp8_einsum, X, X[0, :4].T, depth=2),
}


# nnx


def sequence(make: Callable[[nnx.Rngs], list[Any]], *args: Any, depth: int) -> Model:
    return Model(lambda: nnx.Sequential(*make(nnx.Rngs(0, dropout=1))), args, depth)


class Branches(nnx.Module):
    """Layers in a list and in a dict."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.LinearGeneral(8, (4, 2), rngs=rngs)])
        self.named = nnx.Dict(mix=nnx.Einsum("...ab,abc->...c", (4, 2, 8), (8,), rngs=rngs), out=nnx.PReLU())

    def __call__(self, x: Any) -> Any:
        for layer in self.first:
            x = layer(nnx.gelu(x))
        return self.named["out"](self.named["mix"](x))


class Spectral(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.normed = nnx.SpectralNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.normed(x, update_stats=True)


class Tied(nnx.Module):
    """An embedding that is read and, by another method, multiplied with."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.dense = nnx.Embed(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.embed.attend(self.dense(self.embed(tokens)))


def _decoder() -> Any:
    module = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    module.init_cache((2, 6, 8))
    return module


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        settings = {"dropout_rate": 0.2, "broadcast_dropout": False, "deterministic": False, "decode": False}
        self.attend = nnx.MultiHeadAttention(2, 8, **settings, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.attend(x)


class Rotary(nnx.Module):
    """Attention with rotated queries and keys; flax 0.12.8 has no RoPE yet."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.project = nnx.LinearGeneral(8, (3, 2, 4), rngs=rngs)
        self.rope = nnx.RoPE(embedding_size=4, max_seq_len=6)

    def __call__(self, x: Any) -> Any:
        q, k, v = jnp.moveaxis(self.project(x), -3, 0)
        return nnx.dot_product_attention_with_rope(q, k, v, rope=self.rope)


NNX = {
    "mlp": sequence(lambda r: [Branches(r), nnx.LayerNorm(8, rngs=r), nnx.Dropout(0.5, rngs=r)], X, depth=3),
    "attention": sequence(
        lambda r: [
            nnx.RMSNorm(8, rngs=r),
            Attention(r),
            nnx.Dropout(0.5, rngs=r),
            nnx.Linear(8, 8, rngs=r),
        ],
        X,
        depth=4,
    ),
    "decode": Model(_decoder, (X[:, :1],), depth=3),
    "convolutions": sequence(
        lambda r: [
            nnx.Conv(4, 8, (3, 3), feature_group_count=2, rngs=r),
            nnx.GroupNorm(8, 2, rngs=r),
            lambda x: nnx.avg_pool(nnx.relu(x), (2, 2), (2, 2)),
            nnx.ConvTranspose(8, 4, (2, 2), rngs=r),
        ],
        IMAGES,
        depth=3,
    ),
    "batch norm": sequence(
        lambda r: [
            nnx.Conv(4, 8, (3, 3), rngs=r),
            nnx.BatchNorm(8, rngs=r),
            lambda x: nnx.max_pool(nnx.relu(x), (2, 2), (2, 2)),
            nnx.InstanceNorm(8, rngs=r),
            lambda x: nnx.min_pool(x, (2, 2), (2, 2)),
            nnx.Linear(8, 3, rngs=r),
        ],
        IMAGES,
        depth=3,
    ),
    "weight norm": sequence(lambda r: [nnx.WeightNorm(nnx.Linear(8, 8, rngs=r), rngs=r)], X, depth=1),
    "spectral norm": Model(lambda: Spectral(nnx.Rngs(0)), (X,), depth=1),
    "recurrent": sequence(
        lambda r: [
            nnx.Bidirectional(nnx.RNN(nnx.LSTMCell(8, 4, rngs=r)), nnx.RNN(nnx.GRUCell(8, 4, rngs=r))),
            nnx.RNN(nnx.OptimizedLSTMCell(8, 4, rngs=r)),
        ],
        X[:, :3],
        depth=6,
    ),
    "simple cell": sequence(lambda r: [nnx.RNN(nnx.SimpleCell(8, 4, rngs=r))], X[:, :3], depth=3),
    "embedding": Model(lambda: Tied(nnx.Rngs(0)), (TOKENS,), depth=2),
    "low rank": sequence(
        lambda r: [
            nnx.LoRALinear(8, 8, lora_rank=2, b_initializer=nnx.initializers.lecun_normal(), rngs=r),
            nnx.LoRA(8, 2, 8, base_module=nnx.Linear(8, 8, rngs=r), rngs=r),
        ],
        X,
        depth=4,
    ),
}
if hasattr(nnx, "RoPE"):
    NNX["rotary"] = Model(lambda: Rotary(nnx.Rngs(0)), (X,), depth=2)

ZOO = {f"linen {name}": model for name, model in LINEN.items()} | {f"nnx {name}": model for name, model in NNX.items()}
