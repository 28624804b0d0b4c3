"""Random programs for property tests: operations nested in control flow, transformed in any order.

A *program* is plain data, a list of instructions over numbered values, which `run` evaluates; every value is a 4 x 4
matrix of order one. A *function* made of it takes two such matrices and gives one, and an integer that sums the bits of
all that it drew at random; so does every transformation of it, which is why they apply in any order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

import amp_jax as amp

N = 4
Matrix = Any
Function = Callable[[Matrix, Matrix], tuple[Matrix, Any]]
Touch = Callable[[Matrix], Matrix]
"""What is done to every operand and every result: nothing, or a perturbation."""

NUMBERS = jnp.array([2, 0, 3, 1])


@jax.custom_jvp
def with_jvp(a, b):
    return jnp.sin(a) @ b / 2


@with_jvp.defjvp
def _(primals, tangents):
    (a, b), (da, db) = primals, tangents
    return with_jvp(a, b), (jnp.cos(a) * da) @ b / 2 + jnp.sin(a) @ db / 2


@jax.custom_vjp
def with_vjp(a, b):
    return jnp.tanh(a @ b)


with_vjp.defvjp(
    lambda a, b: (jnp.tanh(a @ b), (a, b, jnp.tanh(a @ b))),
    lambda saved, ct: ((ct * (1 - saved[2] ** 2)) @ saved[1].T, saved[0].T @ (ct * (1 - saved[2] ** 2))),
)


def _norm(a):
    centred = a - a.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 0.1)


def _conv(a, b):
    image, kernel = a.reshape(1, 4, 4, 1), b.reshape(2, 2, 1, 4)
    out = lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return out.reshape(4, 4) / 2


SMOOTH_UNARY: tuple[Callable[[Matrix], Matrix], ...] = (
    jnp.tanh,
    jax.nn.gelu,
    jax.nn.silu,
    jnp.sin,
    lambda a: jnp.exp(-a * a),
    lambda a: jax.nn.softmax(a, -1),
    lambda a: jax.nn.log_softmax(a, 0) / 2,
    _norm,
    lambda a: a * 0.5 + 1e-12,
    lambda a: jnp.log1p(a * a),
    lambda a: jnp.sqrt(a * a + 1.0),
    lambda a: 1 / (1 + a**2),
    lambda a: jnp.broadcast_to(a.mean(0), a.shape),
    lambda a: jnp.cumsum(a, 0) / 4,
    jnp.transpose,
    lambda a: a.reshape(2, 8)[::-1].reshape(4, 4),
    lambda a: a[NUMBERS],
    lambda a: jnp.pad(a, ((1, 0), (0, 1)))[:4, 1:],
    lambda a: a.at[NUMBERS[:2]].add(a[:2] / 2),
    lambda a: jnp.stack(jnp.split(a, 2)).sum(0).repeat(2, 0) / 2,
    lambda a: jnp.where(jnp.tri(4, dtype=bool), jax.nn.softmax(jnp.where(jnp.tri(4, dtype=bool), a, -1e9), -1), a),
    lambda a: a + jnp.arange(4.0) / 4,
    lambda a: a.astype(jnp.bfloat16).astype(jnp.float32),
    lambda a: lax.stop_gradient(a) + a / 2,
    lambda a: lax.reduce_precision(a, 8, 7),
    lambda a: lax.optimization_barrier(a),
    lambda a: jnp.real(jnp.fft.ifft(jnp.fft.fft(a) * 0.5)),
    lambda a: jax.ops.segment_sum(a, jnp.array([0, 1, 1, 3]), 4),
)
"""Functions whose derivatives are continuous: what is rounded moves the result in proportion."""
KINKED_UNARY: tuple[Callable[[Matrix], Matrix], ...] = (
    jax.nn.relu,
    jnp.abs,
    jnp.sort,
    lambda a: a[:, jnp.argsort(a[0])],
    lambda a: jax.nn.one_hot(jnp.argmax(a, -1), 4),
    lambda a: jnp.round(a * 4) / 4,
    lambda a: jnp.clip(a, -0.5, 0.5),
    lambda a: lax.top_k(a, 2)[0].repeat(2, 1),
    lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    lambda a: lax.cummax(a),
    lambda a: a.at[0].max(a[1]).at[1].set(a[2]),
    lambda a: (a > 0) * a,
    lambda a: jnp.where(jnp.isfinite(a), a, 0),
    lambda a: a.sum().astype(int) + a,
    lambda a: jnp.sign(a) * jnp.floor(jnp.abs(a)),
    lambda a: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, lax.stop_gradient(jnp.tanh(c[1]))), (0, a))[1],
)
SMOOTH_BINARY: tuple[Callable[[Matrix, Matrix], Matrix], ...] = (
    lambda a, b: (a + b) / 2,
    lambda a, b: a - b / 2,
    jnp.multiply,
    lambda a, b: a / (2 + jnp.cos(b)),
    lambda a, b: a @ b / 2,
    lambda a, b: jnp.einsum("ij,kj->ik", a, b, precision="highest") / 2,
    lambda a, b: jax.vmap(jnp.dot)(a.reshape(2, 2, 4), b.reshape(2, 4, 2)).repeat(4).reshape(-1)[:16].reshape(4, 4),
    lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32) / 2,
    lambda a, b: lax.ragged_dot(a, jnp.stack([b, b / 2]), jnp.array([1, 3])) / 2,
    _conv,
    lambda a, b: jnp.concatenate([a[:2], b[2:]]),
    lambda a, b: lax.dynamic_update_slice(a, b[:2], (1, 0)),
    lambda a, b: jnp.where(jnp.eye(4, dtype=bool), a, b),
    lambda a, b: jnp.arctan2(a, 2 + b * b),
    lambda a, b: jnp.hypot(a, b + 3) / 2,
    lambda a, b: jax.scipy.linalg.solve(a @ a.T / 4 + 4 * jnp.eye(4), b),
    lambda a, b: jnp.logaddexp(a, b) / 2,
    with_jvp,
    with_vjp,
    lambda a, b: lax.associative_scan(jnp.matmul, jnp.stack([a, b]) / 2)[-1],
    lambda a, b: jax.nn.dot_product_attention(a[None, :, None], b[None, :, None], a[None, :, None])[0, :, 0],
)
KINKED_BINARY: tuple[Callable[[Matrix, Matrix], Matrix], ...] = (
    jnp.maximum,
    lambda a, b: jnp.where(a > b, a, b / 2),
    lambda a, b: lax.select(a > 0, a, b),
    lambda a, b: lax.sort((a, b), num_keys=1)[1],
    lambda a, b: lax.rem(a, 1 + jnp.abs(b)),
    lambda a, b: jnp.nextafter(a, b),
    lambda a, b: jnp.take_along_axis(a, jnp.argsort(b, -1), -1),
    lambda a, b: a.at[NUMBERS].max(b),
)
DRAWS: tuple[Callable[[Any], Matrix], ...] = (
    lambda key: jax.random.normal(key, (4, 4)),
    lambda key: jax.random.uniform(key, (4, 4), minval=-1),
    lambda key: 2.0 * jax.random.bernoulli(key, 0.5, (4, 4)),
    lambda key: jax.random.gumbel(key, (4, 4)) / 4,
)
Body = Callable[[Matrix, Matrix], tuple[Matrix, Any]]


def _scan(body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    def step(carry, x):
        value, bits = carry
        new, more = body(value, b + x)
        return (jnp.tanh(new), bits + more), new.mean(0)

    (last, bits), rows = lax.scan(step, (a, jnp.int32(0)), jnp.stack([b, a]), unroll=1, reverse=True)
    return last + rows.sum(0) / 2, bits


def _accumulate(body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    def step(i, carry):
        value, bits = carry
        new, more = body(a * (i + 1) / 2, b)
        return value + new / 2, bits + more

    return lax.fori_loop(0, 2, step, (jnp.zeros((4, 4)), jnp.int32(0)))


def _cond(body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    return lax.cond(jnp.int32(a[0, 0] * 0) == 0, body, lambda a, b: (jnp.exp(-(a**2)), jnp.int32(0)), a, b)


def _switch(body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    still = lambda f: lambda a, b: (f(a, b), jnp.int32(0))  # noqa: E731
    return lax.switch(jnp.argmin(a * 0), [body, still(jnp.matmul), still(lambda a, b: a)], a, b)


def _mapped(body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    values, bits = jax.vmap(body, (0, None))(jnp.stack([a, b]), b)
    return values.mean(0), bits.sum()


def _one_by_one(body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    values, bits = lax.map(lambda a: body(a, b), jnp.stack([a, b]))
    return values[0] - values[1] / 2, bits.sum()


def _region(dtype: str, body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    with amp.precision(dtype):
        return body(a, b)


def _derived(body: Body, a: Matrix, b: Matrix) -> tuple[Matrix, Any]:
    return jax.grad(lambda a: _total(body(a, b)), has_aux=True)(a)


def _total(out: tuple[Matrix, Any]) -> tuple[Any, Any]:
    return jnp.sum(jnp.sin(out[0])), out[1]


HOLDERS: tuple[Callable[[Body, Matrix, Matrix], tuple[Matrix, Any]], ...] = (
    lambda body, a, b: jax.jit(body)(a, b),
    _scan,
    _accumulate,
    _cond,
    _switch,
    _mapped,
    _one_by_one,
    lambda body, a, b: jax.checkpoint(body)(a, b),
    lambda body, a, b: jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)(a, b),
    functools.partial(_region, "float32"),
    functools.partial(_region, "bfloat16"),
    lambda body, a, b: amp.autocast(body, "mixed_bfloat16")(a, b),
    _derived,
)
REGIONS = HOLDERS[9:12]
"""Holders that change dtypes by themselves, autocast around them or not."""


def programs(smooth: bool = False, longest: int = 6, depth: int = 2) -> st.SearchStrategy[Any]:
    """Lists of instructions `(kind, which, i, j, inner program)`; smooth ones have continuous derivatives."""
    number, place = st.integers(0, 99), st.integers(0, 9)
    plain = st.tuples(st.sampled_from(["unary", "binary", "binary", "draw"]), number, place, place, st.none())
    if not depth:
        return st.lists(plain, min_size=1, max_size=3)
    inner = programs(smooth, 3, depth - 1)
    held = st.tuples(st.just("hold"), number, place, place, inner)
    return st.lists(st.one_of(plain, plain, held), min_size=1, max_size=longest)


def function(program: Any, smooth: bool = False, touch: Touch = lambda a: a) -> Function:
    """The function that a program stands for."""
    unary = SMOOTH_UNARY if smooth else SMOOTH_UNARY + KINKED_UNARY
    binary = SMOOTH_BINARY if smooth else SMOOTH_BINARY + KINKED_BINARY

    def start(x: Matrix, w: Matrix) -> tuple[Matrix, Any]:
        return run(program, touch(touch(x) @ touch(w)), w)  # without a product in front nothing is half

    def run(program: Sequence[Any], x: Matrix, w: Matrix) -> tuple[Matrix, Any]:
        values, bits = [x, w], jnp.int32(0)
        for kind, which, i, j, inner in program:
            # Counted from the newest: programs are chains more often than leaves.
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            if kind == "unary":
                value = unary[which % len(unary)](touch(a))
            elif kind == "binary":
                value = binary[which % len(binary)](touch(a), touch(b))
            elif kind == "draw":
                drawn = DRAWS[which % len(DRAWS)](jax.random.key(which))
                bits += lax.bitcast_convert_type(drawn, jnp.int32).sum()
                value = touch(a) * (0.5 + touch(drawn) / 4)
            else:
                value, more = HOLDERS[which % len(HOLDERS)](functools.partial(run, inner), a, b)
                bits += more
            values.append(touch(value))
        return values[-1] + values[-2] / 2, bits

    return start


def _vmapped(fun: Function) -> Function:
    def call(x, w):
        values, bits = jax.vmap(fun, (1, None))(jnp.stack([x, w], 1), w)
        return values.mean(0), bits.sum()

    return call


def _scanned(fun: Function) -> Function:
    def call(x, w):
        def step(carry, _):
            value, bits = carry
            new, more = fun(value, w)
            return (jnp.tanh(new), bits + more), None

        return lax.scan(step, (x, jnp.int32(0)), None, length=2)[0]

    return call


def _moved(fun: Function) -> Function:
    def call(x, w):
        value, tangent, bits = jax.jvp(lambda x: fun(x, w), (x,), (w,), has_aux=True)
        return value + tangent, bits

    return call


def _linearized(fun: Function) -> Function:
    def call(x, w):
        value, push, bits = jax.linearize(lambda w: fun(x, w), w, has_aux=True)
        return value - push(x), bits

    return call


def _pulled(fun: Function) -> Function:
    def call(x, w):
        value, pull, bits = jax.vjp(fun, x, w, has_aux=True)
        of_x, of_w = pull(jnp.cos(value))
        return of_x + of_w, bits

    return call


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "jit": jax.jit,
    "grad": lambda fun: lambda x, w: jax.grad(lambda w: _total(fun(x, w)), has_aux=True)(w),
    "vmap": _vmapped,
    "scan": _scanned,
    "remat": jax.checkpoint,
    "jvp": _moved,
    "linearize": _linearized,
    "vjp": _pulled,
}


def transformed(fun: Function, names: Sequence[str]) -> Function:
    """The function under transformations, the first one innermost."""
    for name in names:
        fun = TRANSFORMS[name](fun)
    return fun
