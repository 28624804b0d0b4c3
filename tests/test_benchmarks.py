"""The reader of compiled programs and the model of their cost, on programs small enough to count by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import numerics, run, variants, workloads
from benchmarks.all_low import all_low
from benchmarks.cost import BANDWIDTH, PEAK, cost_of_text
from benchmarks.hlo import Shape, parse, products
from benchmarks.timed import peak_bytes, time_step

MATMUL = 2 * 8 * 32 * 16
"""Floating-point operations of an 8 x 16 by 16 x 32 product."""

FUSED = """HloModule jit_f, is_scheduled=true

%fused_dot (param_0: f32[8,16], param_1: bf16[16,32]) -> f32[8,32] {
  %param_0 = f32[8,16]{1,0} parameter(0)
  %convert.1 = bf16[8,16]{1,0} convert(%param_0), metadata={op_name="jit(f)/convert_element_type"}
  %param_1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,32]{1,0} dot(%convert.1, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_convert (param_0.1: f32[8,32]) -> bf16[8,32] {
  %param_0.1 = f32[8,32]{1,0} parameter(0)
  ROOT %convert.2 = bf16[8,32]{1,0} convert(%param_0.1)
}

ENTRY %main.1 (x: f32[8,16], w: bf16[16,32]) -> bf16[8,32] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %fusion.1 = f32[8,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_dot
  ROOT %fusion.2 = bf16[8,32]{1,0} fusion(%fusion.1), kind=kLoop, calls=%fused_convert
}
"""

LOOP = """HloModule jit_g

%fused_slice (param_0: f32[5,8], param_1: s32[]) -> f32[8] {
  %param_0 = f32[5,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %constant.0 = s32[] constant(0)
  %dynamic-slice.1 = f32[1,8]{1,0} dynamic-slice(%param_0, %param_1, %constant.0), dynamic_slice_sizes={1,8}
  ROOT %bitcast.1 = f32[8]{0} bitcast(%dynamic-slice.1)
}

%body (state: (s32[], f32[5,8])) -> (s32[], f32[5,8]) {
  %state = (s32[], f32[5,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %xs = f32[5,8]{1,0} get-tuple-element(%state), index=1
  %fusion.3 = f32[8]{0} fusion(%xs, %i), kind=kLoop, calls=%fused_slice
  %all-reduce.1 = f32[8]{0} all-reduce(%fusion.3), replica_groups={}, to_apply=%add
  ROOT %tuple.1 = (s32[], f32[5,8]{1,0}) tuple(%i, %xs)
}

ENTRY %main.2 (init: (s32[], f32[5,8])) -> (s32[], f32[5,8]) {
  %init = (s32[], f32[5,8]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[5,8]{1,0}) while(%init), body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""

CONVOLUTION = """HloModule jit_h

ENTRY %main.3 (x: f16[2,8,8,3], k: f16[4,3,3,3]) -> f16[2,8,8,4] {
  %x = f16[2,8,8,3]{3,2,1,0} parameter(0)
  %k = f16[4,3,3,3]{3,2,1,0} parameter(1)
  %conv = (f16[2,8,8,4]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  ROOT %out = f16[2,8,8,4]{3,2,1,0} get-tuple-element(%conv), index=0
}
"""

CUBLAS = """HloModule jit_k

ENTRY %main.4 (a: f32[8,16], b: f32[16,32]) -> f32[8,32] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,32]{1,0} parameter(1)
  %gemm = (f32[8,32]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_batch_dimensions":[]}}}
  ROOT %out = f32[8,32]{1,0} get-tuple-element(%gemm), index=0
}
"""


def test_a_product_inside_a_fusion_is_found_with_its_operands_dtypes() -> None:
    (one,) = products(parse(FUSED))
    # What counts is what the product is fed, not what the fusion around it reads.
    assert (one.lhs, one.rhs, one.out) == (Shape("bf16", (8, 16)), Shape("bf16", (16, 32)), Shape("f32", (8, 32)))
    assert one.flops == MATMUL


def test_a_kernel_moves_its_operands_and_its_result_once() -> None:
    cost = cost_of_text(FUSED)
    first, second = 4 * 8 * 16 + 2 * 16 * 32 + 4 * 8 * 32, 4 * 8 * 32 + 2 * 8 * 32
    assert cost.hbm == first + second
    assert cost.flops == {"bf16": MATMUL}
    assert (cost.kernels, cost.converts, cost.convert_kernels) == (2, 2, 1)
    assert cost.seconds == pytest.approx((first + second) / BANDWIDTH)


def test_a_product_that_takes_longer_than_its_bytes_counts_its_flops() -> None:
    cost = cost_of_text(FUSED.replace("8,16", "9000,9000").replace("16,32", "9000,9000").replace("8,32", "9000,9000"))
    compute = 2 * 9000**3 / PEAK["bf16"]
    convert = 6 * 9000**2 / BANDWIDTH
    assert cost.seconds == pytest.approx(compute + convert)


def test_a_loop_counts_its_trips_and_a_slice_only_what_it_reads() -> None:
    cost = cost_of_text(LOOP)
    slice_, reduce = (4 * 8 + 4) + 4 * 8, 2 * 4 * 8
    assert cost.hbm == 5 * (slice_ + reduce)
    assert cost.kernels == 10
    assert cost.collectives == {"all-reduce": 5}


def test_a_convolution_by_cudnn_is_a_product() -> None:
    (one,) = products(parse(CONVOLUTION))
    assert (one.lhs.dtype, one.rhs.dtype) == ("f16", "f16")
    assert one.flops == 2 * (2 * 8 * 8 * 4) * (3 * 3 * 3)


def test_a_matmul_by_cublas_is_a_product() -> None:
    (one,) = products(parse(CUBLAS))
    assert (one.dtype, one.flops) == ("f32", MATMUL)


def test_the_reader_agrees_with_a_program_that_xla_printed() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bjk->bik", x, w)

    x, w = jax.ShapeDtypeStruct((3, 8, 16), jnp.float32), jax.ShapeDtypeStruct((3, 16, 32), jnp.float32)
    (one,) = products(parse(jax.jit(f).lower(x, w).compile().as_text()))
    assert one.flops == 3 * MATMUL


def products_of_jaxpr(jaxpr: object) -> list[set[str]]:
    lines = [line for line in str(jaxpr).splitlines() if "= dot_general[" in line]
    return [{part.partition("[")[0] for part in line.split("=")[0].split(":")[1:]} for line in lines]


def test_the_floor_has_no_product_in_float32_and_keeps_the_results_dtypes() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.nn.softmax(jax.jit(jnp.dot)(x, w)), None

        return jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0].sum()

    w, x = jnp.ones((4, 4)), jnp.ones((3, 4))
    jaxpr = jax.make_jaxpr(jax.grad(all_low(loss)))(w, x)
    found = products_of_jaxpr(jaxpr)
    assert len(found) >= 3
    assert all(one == {"bf16"} for one in found)
    assert [v.aval.dtype for v in jaxpr.jaxpr.outvars] == [np.dtype("float32")]
    assert jax.eval_shape(all_low(loss), w, x).dtype == jnp.float32


@pytest.mark.parametrize("name", [*workloads.NAMES, *workloads.MORE])
def test_a_step_can_be_traced_in_float32_and_by_hand(name: str) -> None:
    for variant in ("float32", "hand"):
        step, args = variants.step(name, variant, scale=1 / 8)
        params, _, loss = jax.eval_shape(step, *args)
        assert loss.dtype == jnp.float32
        assert jax.tree.map(lambda x: x.dtype, params) == jax.tree.map(lambda x: x.dtype, args[0])


def test_an_unknown_name_is_told_with_the_ones_that_exist() -> None:
    with pytest.raises(ValueError, match="'gtp'; it is one of gpt, "):
        workloads.workload("gtp")
    with pytest.raises(ValueError, match="'half'; it is one of float32, "):
        variants.step("gpt", "half")


def test_gradient_error_of_float32_is_nothing_and_of_half_is_not() -> None:
    exact = numerics.gradient_error("lstm", "bfloat16", lambda loss: loss, seeds=(0,))
    rounded = numerics.gradient_error("lstm", "bfloat16", all_low, seeds=(0,))
    assert exact < 1e-5 < 1e-3 < rounded


def test_timing_gives_each_variant_a_time_and_its_peak_bytes() -> None:
    figures = time_step("lstm", "mixed_bfloat16", scale=1 / 16, rounds=1, calls=1, among=("float32", "hand"))
    params = sum(x.size * 4 for x in jax.tree.leaves(variants.step("lstm", "float32", scale=1 / 16)[1][0]))
    assert all(one.seconds > 0 for one in figures.values())
    # The parameters and AdamW's two moments are there at any time.
    assert all(one.peak > 3 * params for one in figures.values())


@pytest.mark.parametrize(("donated", "arrays"), [((), 2), ((0,), 1)])
def test_peak_bytes_count_an_argument_and_the_result_in_its_place_once(donated: tuple[int, ...], arrays: int) -> None:
    lowered = jax.jit(lambda x: x + 1, donate_argnums=donated).lower(jax.ShapeDtypeStruct((1000,), jnp.float32))
    assert peak_bytes(lowered.compile()) == arrays * 4000


def test_a_row_of_the_table_compares_with_the_other_variants() -> None:
    figures = {"float32": (4e-3, 8e6), "hand": (2e-3, 4e6), "all-low": (1e-3, 2e6), "ours": (1e-3, 4e6)}
    assert list(run.rows("gpt", figures))[-1] == (
        *("gpt", "ours"),
        *("1.000", "0.250", "0.500", "1.000"),
        *("4", "0.500", "1.000", "2.000"),
    )
