"""How each primitive behaves under autocast: data, with the reason.

*compute*: operands and result in the compute dtype; the hardware accumulates in float32.
*full*: float32, since the result or its range needs it.
*follow*: cheap and safe in either; takes the dtype of its neighbours.
*widest*: operands must agree on one dtype.
*keep*: moves or compares data; the dtype stays.
*honour*: a dtype that the author wrote.
*recurse*: holds jaxprs that are planned on their own.
*opaque*: gets exactly the dtypes that it was traced with. Everything that is not listed is opaque.
"""

from types import MappingProxyType
from typing import Literal, get_args

Category = Literal["compute", "full", "follow", "widest", "keep", "honour", "recurse", "opaque"]
CATEGORIES: tuple[str, ...] = get_args(Category)

_TABLE: dict[tuple[Category, str], str] = {
    ("compute", "a product on the matrix units, accumulated in float32"): """
        dot_general conv_general_dilated ragged_dot ragged_dot_general""",
    ("full", "its result covers more range or precision than a half dtype has"): """
        exp exp2 expm1 exp2m1 log log2 log1p log2p1 pow integer_pow square rsqrt cbrt reciprocal logaddexp""",
    ("full", "its argument is an angle, which rounds away"): "sin cos tan sinpi cospi tanpi",
    ("full", "it was written for its single rounding, which not every device has in half"): "fma",
    ("full", "a special function, exact only where its argument is"): """
        acos acosh acospi asin asinh asinpi atan atanh atanpi atan2pi sinh cosh bessel_i0e bessel_i1e digamma
        erf_inv igamma igamma_grad_a igammac lgamma polygamma polynomial random_gamma_grad
        regularized_incomplete_beta zeta""",
    ("full", "adds or multiplies many values"): """
        reduce_sum reduce_prod reduce reduce_window reduce_window_sum cumsum cumprod cumlogsumexp scatter-add
        scatter-sub scatter-mul select_and_scatter select_and_scatter_add""",
    ("full", "adds up over devices"): """
        psum psum_invariant unreduced_psum reduce_scatter unreduced_reduce_scatter""",
    ("full", "there is no half kernel"): """
        cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
        symmetric_product triangular_solve tridiagonal tridiagonal_solve custom_linear_solve""",
    ("follow", "cheap, and as exact as its operands"): """
        add sub mul div neg max min abs sign clamp select_n tanh logistic erf erfc sqrt add_any floor ceil round
        one_minus_square fmuladd""",
    ("widest", "its operands must agree"): """
        concatenate stack atan2 dynamic_update_slice scatter scatter-min scatter-max pad rem nextafter
        select_and_gather_add""",
    ("keep", "moves data"): """
        reshape transpose broadcast_in_dim broadcast_to slice dynamic_slice split unstack tile squeeze rev copy gather
        sort top_k approx_top_k name stop_gradient optimization_barrier expand_dims real imag conj empty empty2 iota
        device_put""",
    ("keep", "picks values"): "argmax argmin reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min",
    ("keep", "compares values"): "eq ne ge gt le lt eq_to le_to lt_to is_finite",
    ("keep", "works on bits or integers"): """
        and or xor not shift_left shift_right_logical shift_right_arithmetic population_count clz mulhi reduce_and
        reduce_or reduce_xor lu_pivots_to_permutation axis_index""",
    ("keep", "draws random bits"): """
        random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
        threefry2x32 threefry4x32 philox2x32 philox4x32 rng_bit_generator rng_uniform iota_2x32_shape""",
    ("keep", "moves data between devices"): """
        all_gather all_gather_invariant all_gather_reduced all_to_all ppermute pbroadcast pbroadcast_dynamic pmax pmin
        pvary reshard sharding_constraint layout_constraint ragged_all_to_all reduced_vary_cast vary_unreduced_cast
        unreduced_pmax unreduced_pmin with_memory_space_constraint relayout""",
    ("honour", "the author wrote this dtype"): "convert_element_type reduce_precision bitcast_convert_type",
    ("recurse", "holds a program"): """
        jit call closed_call core_call remat2 checkpoint remat scan while cond custom_jvp_call custom_vjp_call
        shard_map""",
    ("opaque", "runs code that jax can't see"): """
        call_exported ffi_call pallas_call pure_callback io_callback debug_callback debug_print mpmd_map core_map
        custom_partitioning custom_vmap_call eval_jaxpr composite dce_sink""",
    ("opaque", "reads or writes a reference, whose dtype stays"): "get swap addupdate empty_ref new_ref freeze",
    ("opaque", "a kernel written for the dtypes that it gets"): """
        cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper scaled_dot scaled_matmul scaled_matmul_wrapper
        mixed_dot_general""",
    ("opaque", "part of JAX's own machinery"): """
        after_all create_token check custom_lin create_linear linear_call dim_as_value dimension_size multiple_of
        inspect_sharding platform_index pin unpin tie preduced precv psend remat_opt run_scoped run_state
        shape_assertion stage unreachable xla_metadata_call xla_metadata_value complex from_edtype to_edtype
        all_gather_start all_gather_done all_gather_reduced_start all_gather_reduced_done all_to_all_start
        all_to_all_done pbroadcast_start pbroadcast_done ppermute_start ppermute_done psum_start psum_done
        psum_invariant_start reduce_scatter_start reduce_scatter_done unreduced_psum_start
        unreduced_reduce_scatter_start reduced_vary_cast_p vary_unreduced_cast_p""",
}

OPS: MappingProxyType[str, tuple[Category, str]] = MappingProxyType(
    {name: (category, reason) for (category, reason), names in _TABLE.items() for name in names.split()}
)
COMPARISONS = frozenset(_TABLE["keep", "compares values"].split())
UNKNOWN: tuple[Category, str] = ("opaque", "not known to amp_jax: it gets the dtypes that it was traced with")
