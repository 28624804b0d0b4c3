"""Weights in a file in the dtype asked for, and back (DESIGN §5; CASES: checkpoints)."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import amp_jax as amp
from amp_jax._safetensors import read_header

P = PartitionSpec


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


DTYPES = [
    jnp.bfloat16, jnp.float16, jnp.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, jnp.int8, jnp.uint8,
    jnp.int16, jnp.uint16, jnp.int32, jnp.uint32, jnp.bool_, jnp.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_round_trip_from_file_and_from_bytes(path, dtype, shape):
    tree = {"x": jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)}
    amp.save_params(path, tree)
    same(amp.load_params(path), tree)
    same(amp.load_params(path.read_bytes()), tree)
    same(amp.load_params(str(path), like=tree), tree)


def test_not_contiguous_and_numpy_and_python_leaves(path):
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    tree = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "big": base.astype(">f4"),
        "float": 1.5,
        "int": 3,
        "no": True,
    }
    amp.save_params(path, tree)
    loaded = amp.load_params(path)
    same(loaded, jax.tree.map(jnp.asarray, tree | {"big": base}))


def test_the_package_reads_the_file_under_the_librarys_paths(path):
    variables = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    amp.save_params(path, {"encoder": {"layer_0": variables["params"]}})
    assert sorted(safetensors.numpy.load_file(path)) == ["encoder/layer_0/bias", "encoder/layer_0/kernel"]


def test_files_of_others_are_dicts_of_their_names(path):
    # As PyTorch names them: dots are a part of the name.
    weights = {"encoder.layer.0.weight": np.ones((2, 2), np.float16), "ids": np.arange(3)[None]}
    safetensors.numpy.save_file(weights, path, metadata={"format": "pt"})
    loaded = amp.load_params(path, dtype="float32", like=None)
    assert {k: v.dtype.name for k, v in loaded.items()} == {"encoder.layer.0.weight": "float32", "ids": "int32"}
    same(amp.load_params(path, like=jax.tree.map(jnp.asarray, weights)), jax.tree.map(jnp.asarray, weights))


def test_only_floats_are_cast(path):
    tree = {
        "w": jnp.ones(2), "half": jnp.ones(2, jnp.float16), "scaled": jnp.ones(2, ml_dtypes.float8_e5m2),
        "i": jnp.arange(300), "b": jnp.ones(2, bool), "c": jnp.ones(2, jnp.complex64), "double": np.ones(2),
    }  # fmt: skip
    report = amp.save_params(path, tree, "bf16")
    dtypes = {name: tensor.dtype for name, tensor in report.tensors.items()}
    assert dtypes == {
        "w": "bfloat16", "half": "bfloat16", "scaled": "float8_e5m2", "i": "int32", "b": "bool", "c": "complex64",
        "double": "bfloat16",
    }  # fmt: skip
    assert {k: v.dtype.name for k, v in amp.load_params(path).items()} == dtypes
    assert tree["w"].dtype == jnp.float32


def test_keep_is_a_rule_on_paths(path):
    tree = {
        "params": {"body": {"norm1": {"scale": jnp.ones(2)}, "dense": {"kernel": jnp.ones(2)}}, "head": jnp.ones(2)}
    }
    for keep in ("**/norm*", ["**/norm*"], "params/body/norm1", "body/norm1"):
        report = amp.save_params(path, tree, "float16", keep=keep)
        assert {n for n, t in report.tensors.items() if t.dtype == "float32"} == {"params/body/norm1/scale"}
    with pytest.raises(
        amp.AmpValueError,
        match="`keep` has 'nrom1', which matches none of 3 names. The nearest are: params/body/norm1/",
    ):
        amp.save_params(path, tree, "float16", keep="nrom1")
    with pytest.raises(amp.AmpTypeError, match="`keep` holds 3"):
        amp.save_params(path, tree, "float16", keep=[3])


HARD = np.array([1e5, 1e-8, 65519, 65520], np.float32)


def test_what_float16_cannot_hold_is_refused_before_anything_is_saved(path):
    path.write_bytes(b"old")
    tree = {"fine": jnp.ones(3), "w": HARD, "layers": [jnp.full(7, -1e38)]}
    with pytest.raises(amp.AmpValueError) as caught:
        amp.save_params(path, tree, "float16")
    assert str(path) in str(caught.value)
    assert "w: 2 of float32 overflow float16" in str(caught.value)
    assert "layers/0: 7 of float32 overflow float16" in str(caught.value)
    assert "fine" not in str(caught.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("word", "values"), [("clip", [65504, 0, 65504, 65504]), ("allow", [np.inf, 0, 65504, np.inf])]
)
def test_or_clipped_or_allowed_and_counted(path, word, values):
    report = amp.save_params(path, {"w": HARD}, "float16", on_overflow=word)
    tensor = report.tensors["w"]
    assert (tensor.overflowed, tensor.flushed, tensor.bytes) == (2, 1, 8)
    assert tensor.largest_relative_error == pytest.approx(15 / 65519)  # of 65519, which becomes 65504
    assert amp.load_params(path)["w"].tolist() == values


def test_infinities_that_were_there_stay(path):
    amp.save_params(path, {"w": np.array([np.inf, -np.inf, np.nan], np.float32)}, "float16")
    np.testing.assert_array_equal(amp.load_params(path)["w"], np.array([np.inf, -np.inf, np.nan], np.float16))


def test_the_report_prints_its_totals_and_a_line_for_each_tensor(path):
    report = amp.save_params(path, {"w": jnp.array([1.0, 1e-9]), "n": jnp.int32(3)}, "float16")
    assert report.totals == {"tensors": 2, "bytes": 8, "overflowed": 0, "flushed": 1}
    head, titles, first, second = str(report).splitlines()
    assert head.startswith(f"{path}: 2 tensors, 8e-06 MB; 0 overflowed, 1 flushed to zero")
    assert titles.split()[:3] == ["tensor", "shape", "dtype"]
    assert first.split() == ["n", "scalar", "int32", "4", "0", "0", "0.0e+00"]
    assert second.split() == ["w", "2", "float32", "->", "float16", "4", "0", "1", "0.0e+00"]
    assert len({len(line) for line in (titles, first, second)}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_cast_down_comes_back_as_float32(path, dtype):
    values = jnp.linspace(-2, 2, 33)
    amp.save_params(path, {"w": values}, dtype)
    same(amp.load_params(path, "float32"), {"w": values.astype(dtype).astype(jnp.float32)})
    same(amp.load_params(path, like={"w": values}), {"w": values.astype(dtype).astype(jnp.float32)})


def test_loading_to_a_dtype_that_cannot_hold_the_numbers_is_refused_too(path):
    amp.save_params(path, {"w": HARD})
    with pytest.raises(amp.AmpValueError, match="was not loaded: w: 2 of float32 overflow float16"):
        amp.load_params(path, "float16")
    assert amp.load_params(path, "float16", on_overflow="clip")["w"].tolist() == [65504, 0, 65504, 65504]


def test_trainable_weights_from_a_half_file_are_float32_again(path):
    # diffusers#1246: a tree like the live one trains as the live one does.
    params = {"w": jnp.ones(3)}
    amp.save_params(path, params, "bfloat16")
    same(amp.load_params(path, like=params), params)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.norm, self.dropout = nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layers[0]


def test_an_nnx_module_and_its_state(path):
    net, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    report = amp.save_params(path, net)
    assert {"layers/0/kernel", "norm/mean", "dropout/rngs/key", "dropout/rngs/count"} <= report.tensors.keys()
    loaded = amp.load_params(path, like=other)
    same(nnx.state(loaded), nnx.state(net))
    assert loaded.tied is loaded.layers[0]
    assert jax.random.key_data(loaded.dropout.rngs.key.get_value()).tolist() == (
        jax.random.key_data(net.dropout.rngs.key.get_value()).tolist()
    )
    assert not jnp.array_equal(other.layers[0].kernel, net.layers[0].kernel)  # `like` itself is as it was
    same(nnx.state(amp.load_params(path, like=nnx.eval_shape(lambda: Net(nnx.Rngs(0))))), nnx.state(net))


def test_modules_inside_of_a_tree_keep_what_they_share(path):
    net, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    report = amp.save_params(path, {"net": net, "step": 7})
    assert not any("tied" in name for name in report.tensors)  # it is in the file once, as layers/0
    loaded = amp.load_params(path, like={"net": other, "step": 0})
    assert loaded["step"] == 7
    assert loaded["net"].tied is loaded["net"].layers[0]
    same(nnx.state(loaded["net"]), nnx.state(net))

    params = nnx.state(net, nnx.Param)
    amp.save_params(path, params, "bfloat16")
    same(amp.load_params(path), nnx.to_pure_dict(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)))
    half = amp.load_params(path, like=params)
    assert isinstance(half, nnx.State)
    assert half["layers"][0]["kernel"].dtype == jnp.float32


def test_linen_boxes_frozen_dicts_and_train_states(path):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("x", None)))(x)

    boxed = Model().init(jax.random.key(0), jnp.ones((1, 2)))
    amp.save_params(path, freeze(boxed))
    same(amp.load_params(path), nn.meta.unbox(boxed))
    loaded = amp.load_params(path, like=freeze(boxed))
    same(loaded, freeze(boxed))
    assert loaded["params"]["Dense_0"]["kernel"].names == ("x", None)

    tx = amp.dynamic_loss_scaling(optax.adam(1e-3))
    state = TrainState.create(apply_fn=Model().apply, params=nn.meta.unbox(boxed)["params"], tx=tx)
    amp.save_params(path, state)
    same(amp.load_params(path, like=state), jax.tree.map(jnp.asarray, state))


def test_keys_come_back_as_keys(path):
    tree = {"k": jax.random.split(jax.random.key(1), 3), "rbg": jax.random.key(2, impl="rbg"), "w": jnp.ones(1)}
    amp.save_params(path, tree, "float16")
    for like in (None, tree, jax.eval_shape(lambda: tree)):
        loaded = amp.load_params(path, like=like)
        for name in ("k", "rbg"):
            assert loaded[name].dtype == tree[name].dtype
            assert jax.random.key_data(loaded[name]).tolist() == jax.random.key_data(tree[name]).tolist()


def test_everything_that_does_not_fit_is_in_one_error(path):
    amp.save_params(path, {"a": jnp.ones(2), "b": jnp.ones((2, 3)), "c": jnp.arange(2), "extra": jnp.ones(1)})
    like = {"a": jnp.ones(2), "b": jnp.ones((3, 2)), "c": jnp.ones(2), "lost": jnp.ones(1), "gone": jnp.ones(1)}
    with pytest.raises(amp.AmpValueError) as caught:
        amp.load_params(path, like=like)
    for part in (
        str(path),
        "'lost' is missing",
        "'gone' is missing",
        "'extra' is surplus",
        "'b' has shape (2, 3) in the file and (3, 2) in `like`",
        "'c' is int32 in the file and float32 in `like`",
    ):
        assert part in str(caught.value)
    assert "'a'" not in str(caught.value)


def test_a_part_by_names(path):
    tree = {
        "body": {"w": jnp.ones(2), "b": jnp.zeros(2)},
        "head": {"w": jnp.ones(3)},
        "layers": [jnp.ones(1), jnp.zeros(1)],
    }
    amp.save_params(path, tree)
    same(amp.load_params(path, names="body"), {"body": tree["body"]})
    same(
        amp.load_params(path, names=["head/*", "layers/1"]), {"head": tree["head"], "layers": {"1": tree["layers"][1]}}
    )
    # A new head on an old body.
    like = {"body": {"w": jnp.zeros(2), "b": jnp.ones(2)}, "head": {"w": jnp.full(5, 7.0)}}
    loaded = amp.load_params(path, like=like, names="body/**")
    same(loaded, {"body": tree["body"], "head": like["head"]})
    assert loaded["head"]["w"] is like["head"]["w"]
    with pytest.raises(amp.AmpValueError, match="`names` has 'bdy', which matches none of 5.* nearest are: body/"):
        amp.load_params(path, names="bdy")


def test_only_the_tensors_asked_for_are_read(path):
    amp.save_params(path, {"big": np.zeros(16_000_000, np.float32), "small": np.ones(4, np.float32)})
    tracemalloc.start()
    small = amp.load_params(path, names="small")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert small["small"].tolist() == [1, 1, 1, 1]
    assert peak < 1_000_000


def test_shardings_of_like_and_by_argument(path):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
    rows, both = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("x", "y"))
    tree = {"w": jax.device_put(jnp.arange(16.0).reshape(4, 4), both), "b": jnp.ones(4)}
    amp.save_params(path, tree, "bfloat16")
    loaded = amp.load_params(path, like=tree)
    same(loaded, tree)
    assert loaded["w"].sharding == both
    assert not loaded["b"].committed
    spec = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float16, sharding=rows), "b": jax.ShapeDtypeStruct((4,), jnp.float32)}
    assert amp.load_params(path, like=spec)["w"].sharding == rows
    assert amp.load_params(path, shardings={"w": both})["w"].sharding == both
    assert {x.sharding for x in jax.tree.leaves(amp.load_params(path, shardings=rows))} == {rows}
    with pytest.raises(amp.AmpValueError, match="`shardings` has 'v'"):
        amp.load_params(path, shardings={"v": rows})


def test_sharded_arrays_are_gathered_one_at_a_time(path):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    tree = [jax.device_put(np.full((1024, 1024), i, np.float32), NamedSharding(mesh, P("x"))) for i in range(8)]
    tracemalloc.start()
    amp.save_params(path, tree, "bfloat16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Each has 4 MB, all of them 32: one at a time, and the temporaries of the chunk that is being cast.
    assert peak < 12_000_000
    assert [x[0, 0].item() for x in amp.load_params(path)] == list(range(8))


def test_integers_of_64_bits_are_read_as_jax_reads_them_or_not_at_all(path):
    amp.save_params(path, {"fits": np.arange(3), "not": np.array([2**40])})
    assert safetensors.numpy.load_file(path)["not"].tolist() == [2**40]
    assert amp.load_params(path, names="fits")["fits"].dtype == jnp.int32
    with pytest.raises(amp.AmpValueError, match="'not' with integers beyond int32: set jax_enable_x64"):
        amp.load_params(path)


def test_the_metadata_has_the_version_and_the_policy(path):
    amp.save_params(path, {"w": jnp.ones(1)}, "bf16", policy="mixed_bfloat16")
    with path.open("rb") as file:
        metadata = read_header(file, str(path)).metadata
    assert metadata["amp_jax.version"] == amp.__version__
    assert amp.get_policy(metadata["amp_jax.policy"]) == amp.get_policy("mixed_bfloat16")


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"amp_jax.tree": "{"}, "metadata of amp_jax that can't be read"),
        ({"amp_jax.keys": "[]"}, "metadata of amp_jax that can't be read"),
        ({"amp_jax.keys": '{"w": "unheard"}'}, "has keys that are none"),
        ({"amp_jax.keys": '{"w": "threefry2x32"}'}, "has keys that are none"),
    ],
)
def test_metadata_is_not_trusted(path, metadata, why):
    safetensors.numpy.save_file({"w": np.ones(3, np.uint32)}, path, metadata=metadata)
    with pytest.raises(amp.AmpValueError, match=why):
        amp.load_params(path)


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        ("text", "'x' is a str, expected an array"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "which has no values to save"),
        (np.ones(1, np.complex128), "'x' is of complex128, which safetensors has no name for"),
        (np.ones(1, ml_dtypes.int4), "'x' is of int4, which safetensors has no name for"),
        (np.zeros(1, jax.dtypes.float0), "which safetensors has no name for"),
    ],
)
def test_leaves_that_cannot_be_saved(path, leaf, why):
    with pytest.raises(amp.AmpTypeError, match=why):
        amp.save_params(path, {"x": leaf})
    assert not path.exists()


def test_wrong_arguments_say_what_is_right(path):
    tree = {"w": jnp.ones(1)}
    with pytest.raises(amp.AmpValueError, match="`on_overflow` is 'clamp'. Did you mean 'clip'"):
        amp.save_params(path, tree, on_overflow="clamp")
    with pytest.raises(amp.AmpValueError, match="`dtype` is 'bf61'"):
        amp.save_params(path, tree, "bf61")
    with pytest.raises(amp.AmpValueError, match="can't be saved in"):
        amp.save_params(path, tree, "float8_e8m0fnu")
    with pytest.raises(amp.AmpValueError, match="no leaves"):
        amp.save_params(path, {})
    with pytest.raises(amp.AmpTypeError, match="'w' is traced"):
        jax.jit(lambda w: amp.save_params(path, {"w": w}))(tree["w"])
    with pytest.raises(amp.AmpTypeError, match="`path` is a dict"):
        amp.load_params(tree)
    with pytest.raises(FileNotFoundError):
        amp.load_params(path)


LEAVES = st.sampled_from([jnp.float32(1.5), jnp.ones((2,), jnp.bfloat16), jnp.arange(3), jnp.zeros((0,), bool)])
KEYS = st.text(alphabet=st.sampled_from("a/.~0"), max_size=3)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, min_size=1, max_size=2) | st.dictionaries(KEYS, inner, min_size=1, max_size=2),
    max_leaves=5,
)


@given(TREES)
def test_any_tree_of_dicts_and_lists_round_trips(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("trees") / "x.safetensors"
    amp.save_params(path, tree)
    same(amp.load_params(path), tree)
