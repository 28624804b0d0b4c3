"""Where the plan puts each operation: norms, softmax, masks, sums, positions, and the rules one by one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.programs import LOW, autocast, both_halves, dot_operands, normal, result_dtypes


def rms_norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def test_rms_norm_of_large_values_in_float16():
    # 600 squared overflows float16: the square, its mean and the scaled product are float32.
    x = jnp.array([[-300.0, 0.0, 300.0, 600.0]])
    want = [[-0.8165, 0.0, 0.8165, 1.633]]
    np.testing.assert_allclose(autocast(rms_norm, "mixed_float16")(x), want, atol=1e-3)
    behind_matmul = autocast(lambda x: rms_norm(x @ jnp.eye(4)), "mixed_float16")
    np.testing.assert_allclose(behind_matmul(x), want, atol=2e-3)


def test_an_eps_that_float16_rounds_to_zero_still_guards_the_norm():
    def norm(x):
        x = x @ jnp.eye(4)
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-12)

    np.testing.assert_array_equal(autocast(norm, "mixed_float16")(jnp.full((1, 4), 3.0)), 0.0)


def test_a_module_that_upcasts_by_itself_gets_no_second_cast():
    def norm(x, w):
        y = (x @ w).astype(jnp.float32)  # no equation: the value is float32 in the trace already
        return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True))).astype(jnp.float32) @ w

    jaxpr = str(jax.make_jaxpr(autocast(norm, "mixed_bfloat16"))(jnp.ones((2, 4)), jnp.ones((4, 4))))
    # Casts: x and w to half, the product up, the normed value down, the result up.
    assert jaxpr.count("convert_element_type") == 5


@both_halves
@pytest.mark.parametrize("fill", [-1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("added", [True, False])
def test_a_fully_masked_row_stays_finite(policy, fill, added):
    # -1e9 is -inf in float16, float32's minimum is -inf in both halves; a row of -inf has a NaN softmax.
    def attention(s, mask, w):
        s = s @ w
        return jax.nn.softmax(s + jnp.where(mask, 0.0, fill) if added else jnp.where(mask, s, fill))

    mask = jnp.array([[True, True, False, True], [False] * 4])
    args = jnp.arange(8.0).reshape(2, 4), mask, jnp.eye(4)
    np.testing.assert_allclose(autocast(attention, policy)(*args), attention(*args), atol=4e-3)


@both_halves
def test_softmax_inside_a_library_runs_in_float32(policy):
    def attend(q):
        return jax.nn.dot_product_attention(q, q, q)

    fun = autocast(attend, policy)
    q = jnp.ones((1, 4, 2, 8))
    assert set(result_dtypes(fun, q, of="exp")) == {"f32"}
    assert set(result_dtypes(fun, q, of="reduce_sum")) <= {"f32"}
    assert set(result_dtypes(fun, q)) == {LOW[policy]}


def test_cross_entropy_matches_float32_on_the_same_logits():
    logits = jax.random.uniform(jax.random.key(0), (8, 100))

    def loss(x):
        return optax.softmax_cross_entropy_with_integer_labels(x, jnp.arange(8)).mean()

    assert abs(float(autocast(loss, "mixed_bfloat16")(logits)) - float(loss(logits))) < 1e-5


def test_segment_sum_counts_to_a_thousand():
    def count(x):
        return jax.ops.segment_sum(x, jnp.zeros(1000, jnp.int32), num_segments=1)

    assert float(autocast(count, "mixed_bfloat16")(jnp.ones(1000))[0]) == 1000


@pytest.mark.parametrize(("policy", "lookups"), [("mixed_bfloat16", 1000), ("mixed_float16", 4096)])
def test_the_gradient_of_a_row_looked_up_often_is_summed_in_float32(policy, lookups):
    def loss(table):
        return (table[jnp.zeros(lookups, jnp.int32)] @ jnp.eye(2)).sum()

    table = jnp.ones((3, 2))
    assert float(jax.grad(autocast(loss, policy))(table)[0, 0]) == lookups
    assert float(autocast(jax.grad(loss), policy)(table)[0, 0]) == lookups


def test_average_pooling_adds_in_float32():
    pooled = autocast(lambda x: nn.avg_pool(x, (64, 64)), "mixed_bfloat16")(jnp.ones((1, 64, 64, 1)))
    assert float(pooled.squeeze()) == 1.0  # 4096 ones added in bfloat16 give 1024 at most


def test_time_steps_are_rounded_after_the_sine_not_before():
    def embed(t, w):
        freq = jnp.exp(-jnp.log(10000.0) * jnp.arange(8) / 8)
        return jnp.concatenate([jnp.sin(t[:, None] * freq), jnp.cos(t[:, None] * freq)], -1) @ w

    t = jnp.array([749.0, 750.0, 751.0])
    got = autocast(embed, "mixed_bfloat16")(t, jnp.eye(16))
    # Rounded first, 749 and 751 would become 748 and 752, and sin(t) would be off by 0.8.
    np.testing.assert_allclose(got, embed(t, jnp.eye(16)), atol=4e-3)


def test_a_whole_sgd_step_keeps_small_updates():
    def step(w):
        return w - 8e-5 * jax.grad(lambda w: (jnp.ones((1, 1)) @ w).sum())(w)

    w, fast = jnp.ones((1, 1)), autocast(step, "mixed_bfloat16")
    for _ in range(100):
        w = fast(w)
    np.testing.assert_allclose(w, 0.992, atol=1e-4)  # in bfloat16, 1 - 8e-5 is 1


def test_a_numpy_scalar_does_not_end_half_precision():
    def model(x, w):
        return (x @ w) * np.float32(2) @ w

    assert result_dtypes(autocast(model, "mixed_bfloat16"), jnp.ones((4, 4)), jnp.ones((4, 4))) == ["bf16", "bf16"]


@both_halves
@pytest.mark.parametrize(
    "draw",
    [
        lambda k: jax.random.bernoulli(k, 0.3, (32,)),
        lambda k: jax.random.uniform(k, (32,)),
        lambda k: jax.random.normal(k, (32,)),
        lambda k: jax.random.truncated_normal(k, -2, 2, (32,)),
        lambda k: jax.random.gumbel(k, (32,)),
        lambda k: jax.random.categorical(k, jnp.log(jnp.arange(1.0, 6.0)), shape=(32,)),
        lambda k: nn.Dropout(0.5, deterministic=False).apply({}, jnp.ones(32), rngs={"dropout": k}),
    ],
    ids=["bernoulli", "uniform", "normal", "truncated_normal", "gumbel", "categorical", "dropout"],
)
def test_draws_are_the_same_bits(policy, draw):
    key = jax.random.key(7)
    np.testing.assert_array_equal(autocast(draw, policy)(key), draw(key))
    np.testing.assert_array_equal(jax.jit(autocast(draw, policy))(key), jax.jit(draw)(key))


@both_halves
def test_operands_that_must_agree_agree(policy):
    def strict(x, w, mask):
        low, full = x @ w, jnp.exp(x)
        return (
            lax.select(mask, low, full),
            jnp.concatenate([low, full]),
            lax.dynamic_update_slice(full, low[:1], (0, 0)),
            full.at[0].set(low[0]),
            low.at[0].max(full[0]),
            lax.pad(low, jnp.float32(-1e9), ((1, 0, 0), (0, 0, 0))),
            lax.clamp(jnp.float32(0), low, jnp.float32(2)),
        )

    x, w = normal(0, 4, 4), normal(1, 4, 4)
    got, want = autocast(strict, policy)(x, w, x > 0), strict(x, w, x > 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2), got, want)


def test_the_cast_stands_before_relu_and_the_residual_add():
    def block(x, w, scale):
        y = x @ w
        mean, square = y.mean(-1, keepdims=True), jnp.square(y).mean(-1, keepdims=True)
        y = (y - mean) * lax.rsqrt(square - mean * mean + 1e-6) * scale
        return (y + jax.nn.relu(y)) @ w

    fun, args = autocast(block, "mixed_bfloat16"), (jnp.ones((2, 4)), jnp.ones((4, 4)), jnp.ones(4))
    assert result_dtypes(fun, *args, of="max") == ["bf16"]  # what the backward pass of relu keeps is half
    assert set(result_dtypes(fun, *args, of="rsqrt")) == {"f32"}
    assert set(result_dtypes(fun, *args, of="sub")) == {"f32"}  # centring in half costs a factor of 12


def test_bias_and_scale_stay_float32_until_they_are_broadcast():
    def layer(x, w, b):
        return jnp.tanh(x @ w + jnp.broadcast_to(b, (2, 4))) @ w

    jaxpr = str(jax.make_jaxpr(autocast(layer, "mixed_bfloat16"))(jnp.ones((2, 4)), jnp.ones((4, 4)), jnp.ones(4)))
    assert "f32[2,4] = broadcast_in_dim" in jaxpr  # so the bias gradient is summed in float32


@both_halves
def test_a_value_is_cast_once(policy):
    def reuse(x, w):
        return (x @ w) + (x @ w.T) + (x @ (w + 0))

    jaxpr = str(jax.make_jaxpr(autocast(reuse, policy))(jnp.ones((2, 4)), jnp.ones((4, 4))))
    half = LOW[policy]
    # x, w, w transposed, and the sum w + 0: four down-casts, one up-cast for the result at most three.
    assert jaxpr.count(f":{half}[2,4] = convert_element_type") == 1
    assert jaxpr.count(f":{half}[4,4] = convert_element_type") <= 3


def test_a_float32_policy_gives_the_plain_jaxpr_back():
    def model(x, w):
        return lax.scan(lambda c, _: (jax.nn.gelu(c @ w), c.sum()), x, None, length=2)

    args = jnp.ones((4, 4)), jnp.ones((4, 4))
    assert str(jax.make_jaxpr(autocast(model, "float32"))(*args)) == str(jax.make_jaxpr(model)(*args))


UNARY = (jnp.tanh, jnp.exp, jax.nn.relu, jax.nn.gelu, jnp.sin, jnp.transpose, jax.nn.softmax, jnp.abs, jnp.sort)
BINARY = (jnp.add, jnp.multiply, jnp.maximum, jnp.matmul, jnp.subtract, lambda a, b: jnp.where(a > 0, a, b))
STEPS = st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9))
LOOPS = (
    lambda f: f,
    jax.jit,
    jax.checkpoint,
    lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, 2)[0],
)


@given(st.lists(STEPS, min_size=3, max_size=10), st.sampled_from(LOOPS), st.sampled_from(list(LOW)))
def test_any_program_keeps_its_types_under_any_transformation(instructions, loop, policy):
    def program(x, w):
        values = [x, w]
        for op, i, j in instructions:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(UNARY[op](a) if op < len(UNARY) else BINARY[op - len(UNARY)](a, b))
        return jnp.tanh(values[-1])

    model, x, w = loop(program), jnp.ones((3, 3)), jnp.ones((3, 3))
    half = autocast(model, policy)
    plain = jax.eval_shape(model, x, w)
    assert jax.eval_shape(half, x, w) == plain
    assert jax.eval_shape(jax.vmap(half, in_axes=(0, None)), x[None], w).shape == (1, *plain.shape)
    grads = jax.grad(lambda x, w: jnp.sum(half(x, w)), argnums=(0, 1))
    assert [g.dtype for g in jax.eval_shape(grads, x, w)] == [jnp.float32] * 2
    step = autocast(jax.grad(lambda x, w: jnp.sum(model(x, w))), policy)
    assert jax.eval_shape(step, x, w).dtype == jnp.float32
    # Every matrix product that is left in the program runs in half, both operands.
    assert dot_operands(half, x, w) <= {{"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}[policy]}


def test_a_norm_read_low_and_cubed_is_rounded_once():
    # gelu cubes its argument in float32 and multiplies it low: read twice, the norm's result would be held twice, and
    # its cotangent written in float32.
    def block(x, w):
        y = rms_norm(x @ w)
        return (y + y**3) @ w

    jaxpr = jax.make_jaxpr(autocast(block, "mixed_bfloat16"))(jnp.ones((4, 4)), jnp.ones((4, 4)))
    rsqrt = next(e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "rsqrt")
    normed = next(e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "mul" and rsqrt in e.invars)
    (reader,) = [e for e in jaxpr.eqns if normed in e.invars]
    assert reader.outvars[0].aval.dtype == jnp.bfloat16
