"""Half products whose cotangents are born in the dtype of the operand, under every transformation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from amp_jax._product import product
from tests.programs import both_halves, jaxprs, normal, products

LOW = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
DIMS = {
    "matmul": ((4, 3), (3, 5), (((1,), (0,)), ((), ()))),
    "transposed": ((3, 4), (5, 3), (((0,), (1,)), ((), ()))),
    "two axes": ((2, 4, 3), (3, 5, 2), (((0, 2), (2, 0)), ((), ()))),
    "batch": ((2, 4, 3), (3, 2, 5), (((2,), (0,)), ((0,), (1,)))),
    "no sum": ((4,), (5,), (((), ()), ((), ()))),
}


def dot(name, low=jnp.bfloat16):
    def fun(x, y):
        params = {"dimension_numbers": DIMS[name][2], "precision": None, "out_sharding": None}
        return product((x, y), (x.astype(low), y.astype(low)), params)

    return fun


def plain(name, low=jnp.bfloat16):
    return lambda x, y: jax.lax.dot_general(x.astype(low), y.astype(low), DIMS[name][2])


def operands(name):
    return normal(0, *DIMS[name][0]), normal(1, *DIMS[name][1])


def total(fun):
    return lambda *args: jnp.sum(jnp.sin(fun(*args).astype(jnp.float32)))


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=1e-2)


@both_halves
def test_a_float32_operands_gradient_is_a_half_product_into_float32(policy):
    low, (x, y) = LOW[policy], operands("matmul")
    name = np.dtype(low).name
    grads = products(jax.grad(total(dot("matmul", low)), argnums=(0, 1)), x.astype(low), y)
    assert sorted(grads) == sorted([(name, name, name), (name, name, name), (name, name, "float32")])


def test_forward_and_backward_share_one_cast_of_each_operand():
    # Of a sharded weight XLA gathers each cast by itself: two of half the bytes are no less than one of float32.
    args = operands("matmul")
    grads = jax.make_jaxpr(jax.grad(total(dot("matmul")), argnums=(0, 1)))(*args)
    cast = [
        eqn.invars[0].aval.shape
        for jaxpr in jaxprs(grads)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.bfloat16
    ]
    operand_shapes = [x.shape for x in args]
    assert sorted(shape for shape in cast if shape in operand_shapes) == sorted(operand_shapes)
    made = [eqn for j in jaxprs(grads) for eqn in j.eqns if "dot_general" in eqn.primitive.name]
    assert {v.aval.dtype.name for eqn in made for v in eqn.invars} == {"bfloat16"}


def test_the_gradient_is_not_rounded():
    # One product of 2 ** -9 beside one of 1: bfloat16 has 8 bits, so in half the small one is lost.
    x, y = jnp.array([[1.0, 2.0**-9]]).T.astype(jnp.bfloat16), jnp.ones((1, 1))
    exact = jnp.array([[1 + 2.0**-9]])
    half_sum = lambda f: jax.grad(lambda y: jnp.sum(f(x, y).astype(jnp.float32)))(y)  # noqa: E731
    np.testing.assert_array_equal(half_sum(dot("matmul")), exact)
    np.testing.assert_array_equal(half_sum(plain("matmul")), [[1.0]])


@pytest.mark.parametrize("name", list(DIMS))
def test_every_kind_of_product_is_differentiated_as_dot_general_is(name):
    args = operands(name)
    ours, theirs = total(dot(name)), total(plain(name))
    close(ours(*args), theirs(*args))
    close(jax.grad(ours, (0, 1))(*args), jax.grad(theirs, (0, 1))(*args))
    close(jax.jvp(ours, args, args), jax.jvp(theirs, args, args))
    close(jax.jacfwd(jax.grad(ours, 1), 0)(*args), jax.jacfwd(jax.grad(theirs, 1), 0)(*args))
    close(jax.jacrev(jax.grad(ours, 0), 1)(*args), jax.jacrev(jax.grad(theirs, 0), 1)(*args))


AXES = [axes for axes in itertools.product((None, 0, 1, -1), repeat=2) if axes != (None, None)]


@pytest.mark.parametrize(("x_axis", "y_axis"), AXES)
@pytest.mark.parametrize("name", ["transposed", "batch"])
def test_vmap_inside_and_outside_of_grad(name, x_axis, y_axis):
    x, y = operands(name)
    if x_axis is not None:
        x = jnp.stack([x, 2 * x, x / 3], x_axis)
    if y_axis is not None:
        y = jnp.stack([y, y / 2, -y], y_axis)
    axes = (x_axis, y_axis)
    ours, theirs = (total(jax.vmap(f(name), axes)) for f in (dot, plain))
    close(jax.grad(ours, (0, 1))(x, y), jax.grad(theirs, (0, 1))(x, y))
    ours, theirs = (jax.vmap(jax.grad(total(f(name)), (0, 1)), axes) for f in (dot, plain))
    close(ours(x, y), theirs(x, y))
    tangent = lambda f: jax.vmap(lambda x, y: jax.jvp(f(name), (x, y), (x, y))[1], axes)  # noqa: E731
    close(tangent(dot)(x, y), tangent(plain)(x, y))


@pytest.mark.parametrize(
    ("x", "y", "dims"),
    [
        ((32, 4), (4, 32), (((1,), (0,)), ((), ()))),
        ((48, 48), (48, 32, 32, 32), (((1,), (0,)), ((), ()))),
        ((32, 32), (32, 1, 32), (((1,), (0,)), ((), ()))),
    ],
)
def test_shapes_that_the_cpu_cannot_multiply_into_float32(x, y, dims):
    # XLA: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32", for some layouts only.
    x, y = normal(0, *x).astype(jnp.bfloat16), normal(1, *y)
    params = {"dimension_numbers": dims, "precision": None, "out_sharding": None}
    fun = lambda y: product((x, y), (x, y.astype(jnp.bfloat16)), params)  # noqa: E731
    gradient = jax.grad(total(fun))
    want = jax.grad(total(lambda y: lax.dot_general(x, y.astype(jnp.bfloat16), dims)))(y)
    close(gradient(y), want)
    close(jax.jit(gradient)(y), want)


def test_a_policy_that_saves_products_saves_it():
    fun = jax.checkpoint(total(dot("matmul")), policy=jax.checkpoint_policies.dots_saveable)
    grads = products(jax.grad(fun), *operands("matmul"))
    assert len(grads) == 2  # the product itself, and one cotangent: nothing is computed twice


def test_in_a_scan_and_under_checkpoint():
    x, y = normal(0, 4, 4), normal(1, 6, 4, 4)

    def model(dot):
        return lambda x, y: jax.lax.scan(lambda c, w: (jax.checkpoint(dot)(c, w).astype(jnp.float32), None), x, y)[0]

    ours, theirs = (jax.grad(total(model(f("matmul"))), (0, 1)) for f in (dot, plain))
    close(ours(x, y), theirs(x, y))
