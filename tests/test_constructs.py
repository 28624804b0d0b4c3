"""Whatever JAX can express, under every transformation: nothing raises, types stay, values stay near.

A construct is a function of `(x, w)`, float32 matrices of 4 x 4, made so that its values are of order one. What the
plan decides for them is tested elsewhere; here is that it decides something right for all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs import autocast, normal, relative_error

CONSTRUCTS = {}
MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])


def construct(fun):
    CONSTRUCTS[fun.__name__] = fun
    return fun


@construct
def scan_reversed_and_unrolled(x, w):
    carry, ys = lax.scan(lambda c, a: (jnp.tanh(c @ w + a), c * a), x, jnp.stack([x, w, x]), reverse=True, unroll=2)
    return carry + ys.sum(0)


@construct
def scan_without_inputs(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]


@construct
def scan_of_length_zero(x, w):
    return lax.scan(lambda c, a: (jnp.tanh(c @ w + a), c), x, jnp.zeros((0, 4, 4)))[0] @ w


@construct
def scan_with_a_mixed_carry(x, w):
    def body(carry, a):
        n, total, h, key = carry
        key, sub = jax.random.split(key)
        h = jnp.tanh(h @ w + a) * jax.random.bernoulli(sub, 0.5, (4, 4))
        return (n + 1, total + h.sum(), h, key), (h > 0, n)

    (n, total, h, _), (mask, numbers) = lax.scan(body, (0, 0.0, x, jax.random.key(0)), jnp.stack([x, w]))
    return h + total / 16 + mask.mean(0) + numbers.sum() + n


@construct
def scan_of_a_scan(x, w):
    def inner(c, a):
        return jnp.tanh(c @ w + a), c.sum()

    def outer(c, a):
        return lax.scan(inner, c, jnp.stack([a, a]))

    return lax.scan(outer, x, jnp.stack([x, w]))[0]


@construct
def scan_with_a_cond_inside(x, w):
    def body(c, n):
        return lax.cond(n % 2 == 0, lambda c: jnp.tanh(c @ w), lambda c: c / 2, c), None

    return lax.scan(body, x, jnp.arange(4))[0]


@construct
def fori_loop_of_known_length(x, w):
    return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c @ w + i), x)


@construct
def cond_with_constants_in_a_branch(x, w):
    return lax.cond(x.sum() > 100, lambda: jnp.ones((4, 4)), lambda: x @ w)


@construct
def switch_of_three(x, w):
    return lax.switch((x[0, 0] > 0).astype(int) + 1, [lambda a: a, lambda a: a @ w, lambda a: jnp.exp(-a * a) @ w], x)


@construct
def associative_scan(x, w):
    return lax.associative_scan(jnp.matmul, jnp.stack([x, w, x]) / 2)[-1]


@construct
def map_in_batches(x, w):
    return lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=2)


@construct
def custom_linear_solve(x, w):
    matrix = w @ w.T + 4 * jnp.eye(4)
    solve = lambda matvec, b: jnp.linalg.solve(matrix, b)  # noqa: E731
    return lax.custom_linear_solve(lambda v: matrix @ v, x, solve, symmetric=True)


@construct
def linear_algebra(x, w):
    positive = w @ w.T + 4 * jnp.eye(4)
    factor = jnp.linalg.cholesky(positive)
    return jax.scipy.linalg.solve_triangular(factor, x, lower=True) + jnp.linalg.inv(positive)


@construct
def remat_that_saves_products(x, w):
    fun = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w), policy=jax.checkpoint_policies.dots_saveable)
    return fun(x)


@construct
def remat_that_saves_names(x, w):
    policy = jax.checkpoint_policies.save_only_these_names("h")
    return jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x @ w), "h") @ w), policy=policy)(x)


@construct
def remat_in_a_scan(x, w):
    body = jax.checkpoint(lambda c, a: (jnp.tanh(c @ w + a), c.sum()), prevent_cse=False)
    return lax.scan(body, x, jnp.stack([x, w]))[0]


@construct
def custom_jvp_of_two(x, w):
    @jax.custom_jvp
    def f(a, b):
        return jnp.sin(a) @ b

    @f.defjvp
    def rule(primals, tangents):
        (a, b), (da, db) = primals, tangents
        return f(a, b), (jnp.cos(a) * da) @ b + jnp.sin(a) @ db

    return f(x, w)


@construct
def custom_jvp_with_symbolic_zeros(x, w):
    @jax.custom_jvp
    def f(a, b):
        return a @ b

    def rule(primals, tangents):
        (a, b), (da, db) = primals, tangents
        zero = jax.custom_derivatives.SymbolicZero
        left = jnp.zeros((4, 4)) if isinstance(da, zero) else da @ b
        return f(a, b), left + (jnp.zeros((4, 4)) if isinstance(db, zero) else a @ db)

    f.defjvp(rule, symbolic_zeros=True)
    return f(jnp.sin(x), w)


def scaled_matmul(n):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def f(n, a, b, k):
        return n * (a @ b) + k

    f.defvjp(
        lambda n, a, b, k: (f(n, a, b, k), (a, b)),
        lambda n, saved, ct: (n * (ct @ saved[1].T), n * (saved[0].T @ ct), None),
    )
    return functools.partial(f, n)


@construct
def custom_vjp_with_nondiff_and_integers(x, w):
    return scaled_matmul(2)(x, w, 3)


@construct
def custom_vjp_in_a_scan(x, w):
    return lax.scan(lambda c, a: (jnp.tanh(scaled_matmul(1)(c, a, 0)), None), x, jnp.stack([w, w]))[0]


@construct
def custom_vjp_with_symbolic_zeros(x, w):
    @jax.custom_vjp
    def f(a, b):
        return a @ b

    def fwd(a, b):
        return f(a.value, b.value), (a.value, b.value, b.perturbed)

    def bwd(saved, ct):
        a, b, perturbed = saved
        ct = jnp.zeros((4, 4)) if isinstance(ct, jax.custom_derivatives.SymbolicZero) else ct
        return ct @ b.T, a.T @ ct if perturbed else None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f(jnp.sin(x), w)


@construct
def a_rule_that_returns_integers_too(x, w):
    @jax.custom_vjp
    def f(a, b):
        return a @ b, jnp.argmax(a, -1)

    f.defvjp(lambda a, b: (f(a, b), (a, b)), lambda saved, ct: (ct[0] @ saved[1].T, saved[0].T @ ct[0]))
    y, best = f(x, w)
    return y * (1 + best[:, None])


@construct
def shard_map_with_collectives(x, w):
    def body(x, w):
        y = jnp.tanh(x @ w)
        total = lax.psum(y.sum(0, keepdims=True), "d") / 4
        return y + total + lax.ppermute(y, "d", [(0, 1), (1, 0)]) + lax.all_gather(y, "d").mean(0)

    return jax.shard_map(body, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))(x, w)


@construct
def shard_map_over_a_scan(x, w):
    def body(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w + lax.pmean(c.mean(), "d")), None), x, None, length=2)[0]

    return jax.shard_map(body, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))(x, w)


@construct
def jit_with_shardings(x, w):
    sharded = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=NamedSharding(MESH, P("d")))
    return sharded(lax.with_sharding_constraint(x, NamedSharding(MESH, P("d"))), w) @ w


@construct
def weak_types(x, w):
    scale = lax.scan(lambda c, _: (c * 0.5, None), 1.0, None, length=2)[0]
    return jnp.where(x @ w > 0, scale, 2.0) * (x @ w) + lax.cond(True, lambda: 1.0, lambda: 2.0)


@construct
def references(x, w):
    ref = jax.new_ref(jnp.zeros((4, 4)))
    ref[...] = x @ w
    ref[...] += 1.0
    return jnp.sin(ref[...]) @ w


@construct
def vmap_inside_with_a_collective(x, w):
    return jax.vmap(lambda row: jnp.tanh(row @ w) - lax.pmean(row @ w, "rows"), axis_name="rows")(x)


@construct
def custom_vmap(x, w):
    @jax.custom_batching.custom_vmap
    def f(row):
        return jnp.sin(row) @ w

    @f.def_vmap
    def rule(size, batched, rows):
        return jnp.sin(rows) @ w, batched[0]

    return jax.vmap(f)(x)


@construct
def grad_inside(x, w):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))(x) @ w


@construct
def sorts_and_gathers(x, w):
    y = x @ w
    keys, values = lax.sort((y, x * 2), num_keys=1)
    top, where = lax.top_k(y, 2)
    return keys + values + top.sum() + jnp.take_along_axis(y, where[:, :1], 1) + y.at[0, jnp.array([1, 1])].add(2.0)


@construct
def scatters(x, w):
    y, n = x @ w, jnp.array([2, 0])
    return y.at[n].set(x[:2]).at[n].max(w[:2]).at[n].mul(0.5) + jax.ops.segment_sum(y, jnp.array([0, 1, 1, 3]), 4)


@construct
def windows_and_pads(x, w):
    y = lax.pad(x @ w, 0.0, ((0, 1, 0), (1, 0, 0)))
    high = lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")
    return high + lax.dynamic_update_slice(y, w[:1], (1, 0))[:4, :4] + jnp.cumsum(x @ w, 0) / 4


@construct
def convolutions(x, w):
    image = (x @ w).reshape(1, 2, 2, 4)
    depthwise = lax.conv_general_dilated(
        image, w.reshape(2, 2, 1, 4), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
    )
    return lax.conv_transpose(depthwise, w.reshape(1, 1, 4, 4), (1, 1), "SAME").reshape(4, 4)


@construct
def complex_numbers(x, w):
    return jnp.real(jnp.fft.ifft(jnp.fft.fft(x @ w) * jnp.exp(1j * x)))


@construct
def an_own_reduction(x, w):
    return lax.reduce(x @ w, 1.0, lambda a, b: a * jnp.cos(b), (1,))[:, None] * w


@construct
def optimization_barrier(x, w):
    y, z = lax.optimization_barrier((x @ w, x))
    return y + z


@construct
def ragged_products(x, w):
    return lax.ragged_dot(x, jnp.stack([w, 2 * w]), jnp.array([1, 3]))


@construct
def a_callback(x, w):
    @jax.custom_jvp
    def host(a):
        return jax.pure_callback(
            lambda a: np.sin(a), jax.ShapeDtypeStruct((4, 4), jnp.float32), a, vmap_method="sequential"
        )

    host.defjvp(lambda p, t: (host(*p), jnp.cos(p[0]) * t[0]))
    return host(x @ w) @ w


X, W = normal(0, 4, 4), normal(1, 4, 4)
# What JAX itself can't do with them.
FORWARD_ONLY = {"references"}
NOT_MAPPED = {"a_callback", "references", "jit_with_shardings", "ragged_products"}


def total(fun):
    return lambda x, w: jnp.sum(jnp.sin(fun(x, w)))


TRANSFORMS = {
    "none": lambda cast, f: cast(f)(X, W),
    "grad": lambda cast, f: jax.grad(cast(total(f)), (0, 1))(X, W),
    "cast of grad": lambda cast, f: cast(jax.grad(total(f), (0, 1)))(X, W),
    "vmap": lambda cast, f: jax.vmap(cast(f), (0, None))(jnp.stack([X, W]), W),
    "cast of vmap": lambda cast, f: cast(jax.vmap(f, (0, None)))(jnp.stack([X, W]), W),
    "jvp": lambda cast, f: jax.jvp(cast(f), (X, W), (W, X)),
    "linearize": lambda cast, f: jax.linearize(cast(f), X, W)[1](W, X),
    "grad of remat": lambda cast, f: jax.grad(jax.checkpoint(cast(total(f))), (0, 1))(X, W),
    "grad of cast of jit": lambda cast, f: jax.grad(cast(jax.jit(total(f))), (0, 1))(X, W),
    "grad in a scan": lambda cast, f: jax.grad(
        lambda w: lax.scan(lambda c, _: (cast(f)(c, w), None), X, None, length=2)[0].sum()
    )(W),
    "second": lambda cast, f: jax.jvp(lambda w: jax.grad(cast(total(f)), 1)(X, w), (W,), (X,)),
}


def possible(name, transform):
    derived = transform not in ("none", "vmap", "cast of vmap")
    backward_only = "custom_vjp" in name or name == "a_rule_that_returns_integers_too"
    if backward_only and transform in ("jvp", "linearize", "second"):
        return False
    return not (name in FORWARD_ONLY and derived) and not (name in NOT_MAPPED and "vmap" in transform)


CASES = [(c, t) for c in CONSTRUCTS for t in TRANSFORMS if possible(c, t)]


@pytest.mark.parametrize(("name", "transform"), CASES)
def test_types_stay_and_values_stay_near(name, transform):
    fun, run = CONSTRUCTS[name], TRANSFORMS[transform]
    want = jax.jit(lambda: run(lambda f: f, fun))()
    got = jax.jit(lambda: run(lambda f: autocast(f, "mixed_bfloat16"), fun))()
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
    assert relative_error(got, want) < 0.1  # of the order of ten roundings to 2 ** -9, where values nearly cancel
