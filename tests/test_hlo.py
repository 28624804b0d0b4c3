"""The programs that the real compiler makes for an H100: dtypes of the products, bytes and modelled time.

Figures depend on XLA's fusion choices, so each is compared with its neighbours of the same compiler, in the same run.
"""

from collections.abc import Callable
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import amp_jax as amp
from amp_jax._landing import widen
from benchmarks import h100
from benchmarks.cost import Cost
from benchmarks.hlo import Product, parse, products

pytestmark = [
    pytest.mark.hlo,
    pytest.mark.skipif(h100.missing() is not None, reason=str(h100.missing())),
]

# One process compiles all variants of a step, so that each is compiled once.
STEPS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("gpt", "resnet")]
HALF = {"bf16", "f16"}


@cache
def cost(name: str, variant: str, policy: str = "mixed_bfloat16") -> Cost:
    return h100.step_cost(name, variant, policy)


def describe(one: Product) -> str:
    name = one.instruction.attribute(r'op_name="([^"]*)"')
    return f"{one.lhs.dtype} x {one.rhs.dtype}: {name}"


def products_of(one: Cost) -> list[Product]:
    return products(parse(one.hlo))


@pytest.mark.parametrize("name", STEPS)
def test_every_product_of_a_training_step_has_two_half_operands(name: str) -> None:
    found = products_of(cost(name, "ours"))
    # A layer's product has two in the backward pass: one for its input, one for its weights. Two thirds are theirs.
    backward = [one for one in found if "transpose" in describe(one)]
    assert len(backward) > len(found) / 2
    wide = [describe(one) for one in found if not {one.lhs.dtype, one.rhs.dtype} <= HALF]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("name", STEPS)
def test_the_check_for_half_operands_sees_a_float32_step(name: str) -> None:
    found = products_of(cost(name, "float32"))
    assert {one.lhs.dtype for one in found} | {one.rhs.dtype for one in found} == {"f32"}
    # The same model multiplies as much in whatever dtype: no product is lost to the reader of the text.
    assert sum(one.flops for one in found) == sum(one.flops for one in products_of(cost(name, "ours")))


@pytest.mark.parametrize("name", STEPS)
def test_memory_and_time_stay_below_hand_written(name: str, record_property: Callable[[str, object], None]) -> None:
    hand, floor, ours = (cost(name, variant) for variant in ("hand", "all-low", "ours"))
    record_property(
        "figures",
        f"{name}: temporaries {ours.temp / 1e6:.0f} MB, x{ours.temp / floor.temp:.3f} of all-low; "
        f"modelled {ours.seconds * 1e3:.2f} ms, x{ours.seconds / floor.seconds:.3f}",
    )
    # Layers with dtype= set one by one are what users have today.
    assert ours.temp <= 1.05 * hand.temp
    assert ours.seconds <= 1.05 * hand.seconds


@pytest.mark.parametrize("name", STEPS)
def test_no_kernel_does_nothing_but_convert_where_hand_written_has_none(name: str) -> None:
    ours, hand = (cost(name, variant).convert_kernels for variant in ("ours", "hand"))
    assert ours <= hand


class Attention(nn.Module):
    """Flax's own attention layer with cuDNN's kernel in it, and nothing said of dtypes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fused = partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=True)
        attend = amp.register_op(fused, "compute")
        return nn.MultiHeadDotProductAttention(4, attention_fn=lambda q, k, v, mask=None: attend(q, k, v))(x)


@pytest.mark.xdist_group("attention")
@pytest.mark.parametrize(("policy", "dtype"), [("mixed_bfloat16", "bf16"), ("mixed_float16", "f16")])
def test_a_registered_fused_attention_is_cudnn_s_forward_and_backward(policy: str, dtype: str) -> None:
    model, x = amp.wrap(Attention(), policy), jax.ShapeDtypeStruct((2, 128, 256), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    step = jax.grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2))
    calls = [line for line in h100.compile_cost(step, params, x).hlo.split("\n") if "__cudnn$fmha" in line]
    assert len(calls) == 2
    assert all(f"{dtype}[2,4,128,64]" in call for call in calls)
    with pytest.raises(NotImplementedError):  # what there is without autocast
        jax.eval_shape(Attention().init, jax.random.key(0), x)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_rounding_of_a_master_is_in_the_program(dtype: str) -> None:
    """XLA drops a cast to half that is cast back; a master would then never be what is stored, and start anew."""
    master = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    half = jnp.bfloat16 if dtype == "bf16" else jnp.float16
    dropped = h100.compile_cost(lambda x: x.astype(half).astype(jnp.float32) - x, master).hlo
    assert f"{dtype}[1024,1024]" not in dropped
    kept = h100.compile_cost(lambda x: widen(x.astype(half)) - x, master).hlo
    assert f"{dtype}[1024,1024]" in kept
