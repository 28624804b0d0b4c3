"""Nine more models, of other kinds and from other libraries, each in float32 as written or with its dtypes set by hand.

`linen` where nothing else is said. Each is a function of `dtype` (None: as written) and of `full`, the size.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.workload import Workload, classify, language, spec

Dtype = Any


def llama(dtype: Dtype, full: bool, scan: bool = False) -> Workload:
    """RoPE, RMSNorm, grouped queries, SwiGLU, tied embeddings."""
    sizes = (8192, 768, 12, 4, 4) if full else (256, 128, 4, 2, 2)
    tokens = spec((16, 512) if full else (2, 32), jnp.int32)
    model = Llama(*sizes, dtype, scan)
    return language(model, tokens)


def llama_scan(dtype: Dtype, full: bool) -> Workload:
    """The same decoder, its layers in one scan without remat."""
    return llama(dtype, full, scan=True)


class Decoder(nn.Module):
    heads: int
    groups: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        h, g, dtype = self.heads, self.groups, self.dtype
        proj = lambda n, name, y: nn.Dense(n, use_bias=False, dtype=dtype, name=name)(y)  # noqa: E731
        y = nn.RMSNorm(dtype=dtype, name="norm1")(x)
        q = rotate(proj(d, "q", y).reshape(b, t, h, d // h))
        k = rotate(proj(d // h * g, "k", y).reshape(b, t, g, d // h))
        v = proj(d // h * g, "v", y).reshape(b, t, g, d // h)
        q = q.reshape(b, t, g, h // g, d // h)
        s = jnp.einsum("btgrd,bsgd->bgrts", q, k) / (d // h) ** 0.5
        s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s.astype(jnp.float32), -1e30)
        p = jax.nn.softmax(s).astype(v.dtype)
        x = x + proj(d, "o", jnp.einsum("bgrts,bsgd->btgrd", p, v).reshape(b, t, d))
        y = nn.RMSNorm(dtype=dtype, name="norm2")(x)
        return x + proj(d, "down", nn.silu(proj(3 * d, "gate", y)) * proj(3 * d, "up", y))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of `[batch, time, heads, width]`, computed in float32."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


class Llama(nn.Module):
    vocab: int
    width: int
    heads: int
    groups: int
    depth: int
    dtype: Dtype = None
    scan: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        x = embed(tokens)
        if self.scan:
            x, _ = nn.scan(
                lambda block, carry, _: (block(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth,
            )(Decoder(self.heads, self.groups, self.dtype), x, None)
        else:
            for _ in range(self.depth):
                x = Decoder(self.heads, self.groups, self.dtype)(x)
        return embed.attend(nn.RMSNorm(dtype=self.dtype)(x))


def vit(dtype: Dtype, full: bool) -> Workload:
    """nnx: a vision transformer whose token count is a multiple of 16."""
    width, depth, side = (384, 6, 256) if full else (64, 2, 64)
    graph, state = nnx.split(nnx.eval_shape(lambda: ViT(width, depth, side, dtype, nnx.Rngs(0))))

    def init(key: jax.Array) -> Any:
        return nnx.state(ViT(width, depth, side, dtype, nnx.Rngs(key)), nnx.Param)

    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.filter_state(state, nnx.Not(nnx.Param)))
    apply = lambda p, x: nnx.merge(graph, p, rest)(x)  # noqa: E731
    return classify(init, apply, (64 if full else 4, side, side, 3))


class ViTBlock(nnx.Module):
    def __init__(self, width: int, heads: int, dtype: Dtype, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(b, t, self.heads, -1), 3, -1)
        s = jnp.einsum("bthd,bshd->bhts", q, k) * (d // self.heads) ** -0.5
        p = jax.nn.softmax(s.astype(jnp.float32)).astype(v.dtype)
        x = x + self.out(jnp.einsum("bhts,bshd->bthd", p, v).reshape(b, t, d))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    def __init__(self, width: int, depth: int, side: int, dtype: Dtype, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, width, (16, 16), (16, 16), dtype=dtype, rngs=rngs)
        self.place = nnx.Param(jax.random.normal(rngs.params(), ((side // 16) ** 2, width)) * 0.02)
        self.blocks = nnx.List([ViTBlock(width, width // 32, dtype, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, 1000, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.place[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def mixer(dtype: Dtype, full: bool) -> Workload:
    """Plain JAX: an MLP-mixer. By hand: weights cast where they are used, norms in float32."""
    width, depth, side = (512, 6, 256) if full else (64, 2, 64)
    places = (side // 16) ** 2
    low = dtype or jnp.float32

    def init(key: jax.Array) -> Any:
        shapes = {"patches": (768, width), "head": (width, 1000)}
        for i in range(depth):
            shapes |= {f"{i}/t1": (places, 2 * places), f"{i}/t2": (2 * places, places)}
            shapes |= {f"{i}/c1": (width, 4 * width), f"{i}/c2": (4 * width, width)}
        keys = jax.random.split(key, len(shapes))
        weights = {n: jax.random.normal(k, s) / s[0] ** 0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
        return weights | {f"{n}/bias": jnp.zeros(w.shape[1]) for n, w in weights.items()}

    def dense(p: Any, name: str, x: jax.Array) -> jax.Array:
        return x @ p[name].astype(low) + p[f"{name}/bias"].astype(low)

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)).astype(low)

    def apply(p: Any, x: jax.Array) -> jax.Array:
        b = x.shape[0]
        x = x.reshape(b, side // 16, 16, side // 16, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, places, 768)
        x = dense(p, "patches", x.astype(low))
        for i in range(depth):
            y = norm(x).swapaxes(1, 2)
            x = x + dense(p, f"{i}/t2", jax.nn.gelu(dense(p, f"{i}/t1", y))).swapaxes(1, 2)
            x = x + dense(p, f"{i}/c2", jax.nn.gelu(dense(p, f"{i}/c1", norm(x))))
        return dense(p, "head", norm(x).mean(1))

    return classify(init, apply, (64 if full else 4, side, side, 3))


def haiku_convnet(dtype: Dtype, full: bool) -> Workload:
    """Haiku: convolutions, LayerNorm over channels, gelu. By hand: weights cast at each layer, norms in float32."""
    import haiku as hk  # where it isn't installed, the other models still run

    widths, side = ((96, 192, 384), 128) if full else ((16, 32), 32)
    low = dtype or jnp.float32

    def conv(x: jax.Array, width: int, kernel: int, stride: int = 1) -> jax.Array:
        make = hk.initializers.VarianceScaling(2.0)
        w = hk.get_parameter(f"w{kernel}_{stride}", (kernel, kernel, x.shape[-1], width), init=make)
        b = hk.get_parameter(f"b{kernel}_{stride}", (width,), init=jnp.zeros)
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x.astype(low), w.astype(low), (stride, stride), "SAME", dimension_numbers=dims)
        return y + b.astype(low)

    class Stage(hk.Module):
        def __init__(self, width: int):
            super().__init__()
            self.width = width

        def __call__(self, x: jax.Array) -> jax.Array:
            x = conv(x, self.width, 2, 2)
            y = hk.LayerNorm(-1, True, True)(conv(x, self.width, 3).astype(jnp.float32)).astype(low)
            return x + conv(jax.nn.gelu(y), self.width, 1)

    def apply(x: jax.Array) -> jax.Array:
        for width in widths:
            x = Stage(width)(x)
        w = hk.get_parameter("head", (x.shape[-1], 1000), init=hk.initializers.VarianceScaling(1.0))
        return x.mean((1, 2)).astype(low) @ w.astype(low)

    net = hk.without_apply_rng(hk.transform(lambda x: apply(x)))
    shape = (64 if full else 4, side, side, 3)
    return classify(lambda key: net.init(key, jnp.zeros(shape)), net.apply, shape)


def gru(dtype: Dtype, full: bool) -> Workload:
    vocab, width, tokens = (4096, 512, (64, 128)) if full else (256, 64, (8, 32))
    model = GRU(vocab, width, dtype)
    return language(model, spec(tokens, jnp.int32))


class GRU(nn.Module):
    vocab: int
    width: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x: Any = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.GRUCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)


def attention(dtype: Dtype, full: bool) -> Workload:
    """`jax.nn.dot_product_attention` in an encoder with masks by length."""
    width, heads, depth, shape = (512, 8, 4, (16, 512)) if full else (64, 4, 2, (2, 32))
    model = Encoder(width, heads, depth, dtype)
    x = spec((*shape, width))
    return Workload(
        lambda key: model.init(key, jnp.zeros(x.shape), jnp.zeros(shape[0])),
        lambda p, x, n: jnp.mean(jnp.square(model.apply(p, x, n).astype(jnp.float32) - x)),  # pyright: ignore
        (x, spec((shape[0],))),
    )


class Encoder(nn.Module):
    width: int
    heads: int
    depth: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = jnp.arange(x.shape[1]) <= lengths[:, None]
        x = nn.Dense(self.width, dtype=self.dtype)(x)
        for _ in range(self.depth):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            q, k, v = (nn.DenseGeneral((self.heads, self.width // self.heads), dtype=self.dtype)(y) for _ in range(3))
            y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
            x = x + nn.DenseGeneral(self.width, (-2, -1), dtype=self.dtype)(y)
            y = nn.Dense(4 * self.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(self.width, dtype=self.dtype)(nn.relu(y))
        return nn.Dense(self.width, dtype=self.dtype)(x)


def mobile(dtype: Dtype, full: bool) -> Workload:
    """Depthwise and transposed convolutions, BatchNorm, swish: an autoencoder."""
    model, side = Mobile(64 if full else 16, dtype), 128 if full else 32
    x = spec((64 if full else 4, side, side, 3))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y, _ = model.apply(p, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y.astype(jnp.float32) - x))

    return Workload(lambda key: model.init(key, jnp.zeros(x.shape)), loss, (x,))


class Mobile(nn.Module):
    width: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = lambda y: nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)  # noqa: E731
        conv = lambda n, k, s, y, g=1: nn.Conv(  # noqa: E731
            n, (k, k), (s, s), feature_group_count=g, use_bias=False, dtype=self.dtype
        )(y)
        x = nn.swish(norm(conv(self.width, 3, 2, x)))
        for mult in (1, 2):
            wide = 4 * self.width * mult
            y = nn.swish(norm(conv(wide, 1, 1, x)))
            y = nn.swish(norm(conv(wide, 3, 2, y, wide)))
            x = norm(conv(self.width * mult, 1, 1, y))
        for mult in (1, 1, 1):
            x = nn.swish(norm(nn.ConvTranspose(self.width * mult, (4, 4), (2, 2), dtype=self.dtype)(x)))
        return nn.Conv(3, (3, 3), dtype=self.dtype)(x)


def moe(dtype: Dtype, full: bool) -> Workload:
    """Top-2 routing over experts that are multiplied by `ragged_dot`."""
    vocab, width, experts, depth, tokens = (4096, 512, 8, 2, (16, 256)) if full else (256, 64, 4, 2, (2, 32))
    model = MoE(vocab, width, experts, depth, dtype)
    return language(model, spec(tokens, jnp.int32))


class MoE(nn.Module):
    vocab: int
    width: int
    experts: int
    depth: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        for i in range(self.depth):
            x = x + self.layer(nn.RMSNorm(dtype=self.dtype, name=f"norm{i}")(x), i)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)

    def layer(self, x: jax.Array, i: int) -> jax.Array:
        d, n = self.width, self.experts
        flat = x.reshape(-1, d)
        scores = jax.nn.softmax(nn.Dense(n, dtype=self.dtype, name=f"router{i}")(flat).astype(jnp.float32))
        weight, chosen = jax.lax.top_k(scores, 2)
        weight = weight / weight.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=n)
        w1 = self.param(f"w1_{i}", nn.initializers.lecun_normal(batch_axis=0), (n, d, 2 * d))
        w2 = self.param(f"w2_{i}", nn.initializers.lecun_normal(batch_axis=0), (n, 2 * d, d))
        y = jnp.repeat(flat, 2, 0)[order]
        y = nn.silu(jax.lax.ragged_dot(y, w1.astype(y.dtype), sizes))
        y = jax.lax.ragged_dot(y, w2.astype(y.dtype), sizes)
        y = y[jnp.argsort(order)].reshape(-1, 2, d)
        return (y * weight[..., None].astype(y.dtype)).sum(1).reshape(x.shape)


MODELS = {
    "llama": llama,
    "llama-scan": llama_scan,
    "vit": vit,
    "mixer": mixer,
    "haiku": haiku_convnet,
    "gru": gru,
    "attention": attention,
    "mobile": mobile,
    "moe": moe,
}
