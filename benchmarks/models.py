"""Flax linen models of five kinds, in float32 as written or with `dtype=` set by hand on every layer."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    width: int
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, force_fp32_for_softmax=True)(y, mask=mask)
        x = x + y
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.Dense(4 * self.width, dtype=self.dtype)(y)
        y = nn.Dense(self.width, dtype=self.dtype)(nn.gelu(y))
        return x + y


class GPT(nn.Module):
    vocab: int
    width: int
    heads: int
    depth: int
    dtype: Any = None
    scan: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        if self.scan:
            layer = nn.remat(Block, prevent_cse=False)(self.width, self.heads, self.dtype)
            x, _ = nn.scan(
                lambda block, carry, _: (block(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth,
            )(layer, x, None)
        else:
            for _ in range(self.depth):
                x = Block(self.width, self.heads, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)


class ResBlock(nn.Module):
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.Conv(self.width, (3, 3), dtype=self.dtype)(nn.silu(nn.GroupNorm(8, dtype=self.dtype)(x)))
        y = y + nn.Dense(self.width, dtype=self.dtype)(nn.silu(time))[:, None, None, :]
        y = nn.Conv(self.width, (3, 3), dtype=self.dtype)(nn.silu(nn.GroupNorm(8, dtype=self.dtype)(y)))
        if x.shape[-1] != self.width:
            x = nn.Dense(self.width, dtype=self.dtype)(x)
        return x + y


class UNet(nn.Module):
    width: int = 128
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        half = self.width // 2
        freq = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / half)
        emb = jnp.concatenate([jnp.sin(time[:, None] * freq), jnp.cos(time[:, None] * freq)], -1)
        emb = nn.Dense(4 * self.width, dtype=self.dtype)(nn.silu(nn.Dense(4 * self.width, dtype=self.dtype)(emb)))
        x = nn.Conv(self.width, (3, 3), dtype=self.dtype)(x)
        skips: list[jax.Array] = []
        for mult in (1, 2, 2):
            x = ResBlock(self.width * mult, self.dtype)(x, emb)
            skips.append(x)
            x = nn.Conv(self.width * mult, (3, 3), (2, 2), dtype=self.dtype)(x)
        x = ResBlock(self.width * 2, self.dtype)(x, emb)
        b, h, w, c = x.shape
        y = nn.GroupNorm(8, dtype=self.dtype)(x).reshape(b, h * w, c)
        y = nn.MultiHeadDotProductAttention(4, dtype=self.dtype, force_fp32_for_softmax=True)(y)
        x = x + y.reshape(x.shape)
        for mult in (2, 2, 1):
            x = jax.image.resize(x, (b, 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
            x = ResBlock(self.width * mult, self.dtype)(jnp.concatenate([x, skips.pop()], -1), emb)
        return nn.Conv(3, (3, 3), dtype=self.dtype)(nn.silu(nn.GroupNorm(8, dtype=self.dtype)(x)))


class ResNet(nn.Module):
    width: int = 64
    stages: tuple[int, ...] = (2, 2, 2, 2)
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        x = nn.relu(norm()(conv(self.width, (7, 7), (2, 2))(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                stride = (2, 2) if i and not j else (1, 1)
                y = nn.relu(norm()(conv(self.width * 2**i, (3, 3), stride)(x)))
                y = norm()(conv(self.width * 2**i, (3, 3))(y))
                if x.shape != y.shape:
                    x = norm()(conv(self.width * 2**i, (1, 1), stride)(x))
                x = nn.relu(x + y)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


class LSTM(nn.Module):
    vocab: int = 4096
    width: int = 512
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x: Any = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)
