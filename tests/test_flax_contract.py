"""What Flax promises of a module still holds of a wrapped one: boxes and metadata, transforms, the author's dtypes."""

import copy
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import amp_jax as amp
from tests.programs import both_halves, dot_operands, normal, relative_error, result_dtypes

X = normal(0, 2, 6, 8)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# The author's dtypes


class Threaded(nn.Module):
    """As half of the published models are written: one `dtype`, handed to every layer."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        d = self.dtype
        given = {} if d is None else {"dtype": d, "param_dtype": d}
        x = nn.LayerNorm(**given)(nn.Conv(8, (3,), **given)(x))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, deterministic=True, **given)(x)
        x = nn.BatchNorm(use_running_average=True, **given)(nn.gelu(nn.DenseGeneral(8, **given)(x)))
        x = x + nn.Embed(8, 8, **given)(jnp.zeros((2, 6), int))
        # LSTMCell's own initializer is a QR, which there is not in float16.
        cell = nn.LSTMCell(8, recurrent_kernel_init=nn.initializers.lecun_normal(), **given)
        x = nn.RNN(cell)(nn.GroupNorm(num_groups=2, **given)(x))
        return nn.Dense(3, **given)(nn.RMSNorm(**given)(x).astype(jnp.float32 if d is None else d))


class NnxThreaded(nnx.Module):
    def __init__(self, dtype=None):
        given = {"rngs": nnx.Rngs(0)} | ({} if dtype is None else {"dtype": dtype, "param_dtype": dtype})
        self.layers = nnx.List([nnx.Conv(8, 8, (3,), **given), nnx.LayerNorm(8, **given), nnx.Linear(8, 8, **given)])
        self.norms = nnx.List([nnx.BatchNorm(8, use_running_average=True, **given), nnx.RMSNorm(8, **given)])
        self.attend = nnx.MultiHeadAttention(2, 8, decode=False, **given)

    def __call__(self, x):
        for layer in (*self.layers, *self.norms):
            x = layer(x)
        return self.attend(x)


@both_halves
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_float32_threaded_through_all_layers_is_no_wish(library, policy):
    def program(dtype):
        if library == "linen":
            model = amp.wrap(Threaded(dtype), policy)
            variables = jax.eval_shape(model.init, jax.random.key(0), X)
            return jax.make_jaxpr(model.apply)(variables, X)
        graph, state = nnx.split(amp.wrap(NnxThreaded(dtype), policy))
        return jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, X)

    spelled = str(program(None))
    assert str(program(jnp.float32)) == spelled
    assert {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[policy] + "[" in spelled


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_half_threaded_through_all_layers_is_kept(library):
    if library == "linen":
        model = amp.wrap(Threaded(jnp.float16), "mixed_bfloat16")
        variables = model.init(jax.random.key(0), X)
        apply, params = functools.partial(model.apply, variables), variables["params"]
    else:
        model = amp.wrap(NnxThreaded(jnp.float16), "mixed_bfloat16")
        graph, state = nnx.split(model)
        apply, params = lambda x: nnx.merge(graph, nnx.as_pure(state))(x), nnx.state(model, nnx.Param)
    assert {p.dtype.name for p in jax.tree.leaves(params)} == {"float16"}
    assert dot_operands(apply, X) == {"float16"}


def test_preferred_element_type_is_the_authors():
    make = lambda **given: nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0), **given)  # noqa: E731

    def program(model):
        graph, state = nnx.split(amp.wrap(model, "mixed_bfloat16"))
        return lambda x: nnx.merge(graph, nnx.as_pure(state))(x)

    assert result_dtypes(program(make()), X) == ["bf16"]
    half = make(dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    assert result_dtypes(program(half), X) == ["f32"]
    assert dot_operands(program(half), X) == {"bfloat16"}


def test_an_authors_promote_dtype_is_called():
    def to_float16(values, *, dtype):
        return tuple(None if v is None else v.astype(jnp.float16) for v in values)

    model = amp.wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0), promote_dtype=to_float16), "mixed_bfloat16")
    graph, state = nnx.split(model)
    assert result_dtypes(lambda x: nnx.merge(graph, nnx.as_pure(state))(x), X) == ["f16"]


# linen


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(8, kernel_init=init, name="boxed")(x)
        self.sow("intermediates", "between", x)
        return nn.Dense(2, name="plain")(x)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_partitioned_boxes_stay(stored):
    model, plain = amp.wrap(Boxed(), amp.Policy(stored, "bfloat16", "float32")), Boxed()
    variables, want = model.init(jax.random.key(0), X), plain.init(jax.random.key(0), X)
    assert jax.tree.structure(variables) == jax.tree.structure(want)  # boxes and their names are in the structure
    assert variables["params"]["boxed"]["kernel"].names == (None, "model")
    assert {p.dtype.name for p in jax.tree.leaves(variables["params"])} == {stored}
    assert nn.get_partition_spec(variables) == nn.get_partition_spec(want)
    same(model.apply(variables, X), model.apply(nn.unbox(variables), X))
    grads = jax.grad(lambda p: jnp.sum(model.apply({"params": p}, X)))(variables["params"])
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])
    assert relative_error(model.apply(variables, X), plain.apply(want, X)) < 0.02


def test_boxes_under_scan_keep_their_axis():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(8, kernel_init=init)(x), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            axis = {nn.PARTITION_NAME: "layers"}
            scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
            return nn.scan(nn.remat(Layer), metadata_params=axis, **scan)()(x, None)[0]

    model = amp.wrap(Layers(), "mixed_bfloat16")
    variables = model.init(jax.random.key(0), X)
    same(variables, Layers().init(jax.random.key(0), X))
    (kernel,) = [
        x for x in jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nn.Partitioned)) if hasattr(x, "names")
    ]
    assert kernel.names == ("layers", None, "model")
    assert result_dtypes(model.apply, variables, X) == ["bf16"]


def test_sown_and_captured_intermediates_are_those_of_the_plain_model():
    model, plain = amp.wrap(Boxed(), "mixed_bfloat16"), Boxed()
    variables = nn.unbox(plain.init(jax.random.key(0), X))
    for settings in ({"mutable": ["intermediates"]}, {"capture_intermediates": True, "mutable": ["intermediates"]}):
        (_, got), (_, want) = (m.apply(freeze(variables), X, **settings) for m in (model, plain))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert relative_error(got, want) < 0.02


class Part(nn.Module):
    """A layer with state and draws, for transforms around it."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
        return nn.BatchNorm(use_running_average=False)(x)


class Stack(nn.Module):
    """`kind` transforms the layer; with `wrapped` the layer is wrapped inside of the transform."""

    kind: str
    wrapped: bool = False

    @nn.compact
    def __call__(self, x):
        rngs = {"params": True, "dropout": True}
        axes = {"params": 0, "batch_stats": 0}

        def body(layer, carry, _):
            return layer(carry), None

        layer = amp.wrap(Part(name="part"), "mixed_bfloat16") if self.wrapped else Part(name="part")
        if self.kind == "scan":
            return nn.scan(body, variable_axes=axes, split_rngs=rngs, length=2)(layer, x, None)[0]
        if self.kind == "remat_scan":
            step = nn.remat(body, prevent_cse=False)
            return nn.scan(step, variable_axes=axes, split_rngs=rngs, length=2)(layer, x, None)[0]
        if self.kind == "vmap":
            return nn.vmap(lambda m, x: m(x), variable_axes=axes, split_rngs=rngs)(layer, x)
        assert self.kind == "jit"
        return nn.jit(nn.remat(lambda m, x: m(x)))(layer, x)


@pytest.mark.parametrize(
    ("kind", "inside"),
    [("scan", True), ("vmap", True), ("scan", False), ("remat_scan", False), ("vmap", False), ("jit", False)],
)
def test_state_and_draws_under_every_lifted_transform(kind, inside):
    plain = Stack(kind)
    model = Stack(kind, wrapped=True) if inside else amp.wrap(plain, "mixed_bfloat16")
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    call = {"rngs": {"dropout": jax.random.key(2)}, "mutable": ["batch_stats"]}

    @jax.jit
    def both():
        variables = plain.init(keys, X)
        return variables, model.init(keys, X), [m.apply(variables, X, **call) for m in (plain, model)]

    variables, ours, ((want, want_state), (got, state)) = both()
    same(ours, variables)
    assert relative_error(got, want) < 0.03  # other draws would be off by more than 1
    assert jax.tree.structure(state) == jax.tree.structure(want_state)
    assert relative_error(state, want_state) < 0.02
    loss = lambda v: jnp.sum(model.apply(v, X, **call)[0] ** 2)  # noqa: E731
    assert dot_operands(jax.grad(loss), variables) == {"bfloat16"}


# nnx


class Stateful(nnx.Module):
    def __init__(self, **given):
        rngs = nnx.Rngs(0, dropout=1)
        self.dense = nnx.Linear(8, 8, **given, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.dense(x)))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_partitioning_metadata_of_variables_survives(stored):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"), note="mine")
    with jax.set_mesh(jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))):
        plain, model = (
            Stateful(kernel_init=init),
            amp.wrap(Stateful(kernel_init=init), amp.Policy(stored, "bfloat16", "float32")),
        )
        model(X)
    kernel = model.dense.kernel
    assert kernel.get_metadata() == plain.dense.kernel.get_metadata()
    assert kernel.get_metadata()["note"] == "mine"
    assert kernel.get_value().sharding.spec == plain.dense.kernel.get_value().sharding.spec == P(None, "model")
    assert nnx.get_partition_spec(nnx.state(model, nnx.Param)) == nnx.get_partition_spec(nnx.state(plain, nnx.Param))
    assert kernel.dtype == np.dtype(stored)


def pair():
    return Stateful(), amp.wrap(Stateful(), "mixed_bfloat16")


NNX_CALLS = {
    "jit": lambda m: nnx.jit(lambda m: m(X))(m),
    "value_and_grad": lambda m: nnx.value_and_grad(lambda m: jnp.sum(m(X) ** 2))(m)[0],
    "remat": lambda m: nnx.remat(lambda m, x: m(x))(m, X),
    "cond": lambda m: nnx.cond(jnp.bool_(True), lambda m: m(X), lambda m: m(X) * 2, m),
    "scan": lambda m: nnx.scan(
        lambda carry: (carry[0], carry[0](carry[1])), length=3, in_axes=(nnx.Carry,), out_axes=nnx.Carry
    )((m, X))[1],
    "merge": lambda m: _updated(m, *nnx.split(m)),
}


def _updated(model, graph, state):
    other = nnx.merge(graph, state)
    out = other(X)
    nnx.update(model, nnx.state(other))
    return out


@pytest.mark.parametrize("name", list(NNX_CALLS))
def test_state_and_draws_under_every_nnx_transform(name):
    plain, model = pair()
    want, got = (NNX_CALLS[name](m) for m in (plain, model))
    assert relative_error(got, want) < 0.03
    before, after = nnx.state(Stateful()), nnx.state(model)
    assert jax.tree.structure(after) == jax.tree.structure(nnx.state(plain))
    assert model.drop.rngs.count[...] == plain.drop.rngs.count[...] > before["drop"]["rngs"]["count"][...]
    assert relative_error(model.norm.var[...], plain.norm.var[...]) < 0.02
    assert model.norm.var[...].dtype == jnp.float32
    assert not np.array_equal(model.norm.mean[...], np.zeros(8))


def test_an_ensemble_under_nnx_vmap():
    make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=0)
    plain = make(nnx.Rngs(0).split(3))
    model = amp.wrap(plain, "mixed_bfloat16")
    call = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))
    assert call(model, X).shape == (3, *X.shape[:2], 8)
    assert relative_error(call(model, X), call(plain, X)) < 0.02
    graph, state = nnx.split(model)
    assert dot_operands(lambda x: call(nnx.merge(graph, nnx.as_pure(state)), x), X) == {"bfloat16"}


def test_a_wrapped_nnx_module_is_copied_compared_and_hashed_as_any():
    model = amp.wrap(Stateful(), "mixed_bfloat16")
    assert isinstance(model, Stateful)
    assert len({model, model, amp.wrap(Stateful(), "mixed_bfloat16")}) == 2
    for other in (copy.deepcopy(model), nnx.clone(model)):
        assert type(other) is type(model)
        assert other.dense.kernel is not model.dense.kernel
        same(*(nnx.as_pure(nnx.state(m, nnx.Param)) for m in (other, model)))
        other.eval()
        other(X)
    assert int(model.drop.rngs.count[...]) == 0
    assert repr(model).endswith("'params=float32,compute=bfloat16,output=float32')")
    abstract = nnx.eval_shape(lambda: amp.wrap(Stateful(), "mixed_bfloat16"))
    assert type(abstract) is type(model)
