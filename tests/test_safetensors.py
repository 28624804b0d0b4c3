"""The format, beside the package safetensors: what either writes the other reads, and no bad file gets through."""

import io
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as strategies
from safetensors.numpy import save as theirs

import amp_jax as amp
from amp_jax import _narrowing
from amp_jax import _safetensors as st

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def ours(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    placed = st.laid_out({name: st.Spec(x.dtype, x.shape) for name, x in arrays.items()})
    file.write(st.header_bytes(placed, {}))
    for name in placed:
        st.write_chunks(file, [arrays[name]])
    return file.getvalue()


def read(content: bytes) -> dict[str, np.ndarray]:
    file = io.BytesIO(content)
    header = st.read_header(file, "x.safetensors")
    return {name: st.read_tensor(file, header, name) for name in header.specs}


ARRAYS = {dtype.name: np.arange(6).reshape(2, 3).astype(dtype) for dtype in st.CODES if dtype.name != "float8_e8m0fnu"}
ARRAYS |= {
    "e8m0": np.ones(4, st.DTYPES["F8_E8M0"]),
    "scalar": np.array(1.5, np.float32),
    "empty": np.zeros((0, 3), np.float16),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "strided": np.arange(12, dtype=np.int32)[::3],
    "big-endian": np.arange(4, dtype=">f4"),
}


@pytest.mark.parametrize("name", list(ARRAYS))
def test_the_package_reads_what_we_write_and_so_do_we(name):
    array = ARRAYS[name]
    native = array.astype(array.dtype.newbyteorder("="))
    content = ours({name: native if name == "big-endian" else array})
    [(there, tensor)] = safetensors.deserialize(content)
    assert there == name
    assert tensor["shape"] == list(array.shape)
    assert tensor["dtype"] == st.CODES[native.dtype]
    assert bytes(tensor["data"]) == native.tobytes()
    back = read(content)[name]
    assert back.dtype == native.dtype
    assert back.shape == array.shape
    assert back.tobytes() == native.tobytes()


def test_we_read_what_the_package_writes():
    arrays = {k: np.ascontiguousarray(v) for k, v in ARRAYS.items() if v.dtype.name in ("float32", "int64", "bool")}
    back = read(theirs(arrays, metadata={"format": "pt"}))
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_wide_dtypes_come_first_so_that_all_are_aligned():
    arrays = {"a": np.ones(3, np.bool_), "b": np.ones(3, np.float64), "c": np.ones(3, np.float16)}
    header = st.read_header(io.BytesIO(ours(arrays)), "x")
    assert list(header.specs) == ["b", "c", "a"]
    assert all((header.end + spec.start) % spec.dtype.itemsize == 0 for spec in header.specs.values())


def test_a_tensor_of_many_chunks(monkeypatch):
    monkeypatch.setattr(_narrowing, "CHUNK", 4)
    array = np.arange(10, dtype=np.int16).reshape(5, 2)
    np.testing.assert_array_equal(read(ours({"x": array}))["x"], array)


def test_a_bool_of_neither_0_nor_1_is_true():
    values = read(raw({"x": entry("BOOL", (3,), (0, 3))}, b"\0\1\7"))["x"]
    assert values.view(np.uint8).tolist() == [0, 1, 1]


ENTRY = json.dumps(entry()).encode()
GOOD = raw({"x": entry()}, b"\0\0\0\0")
BAD = {
    "empty": (b"", "it has 0 bytes"),
    "too short": (b"\0" * 7, "it has 7 bytes"),
    "cut off in the data": (GOOD[:-1], "its tensors take 4 bytes, but 3 follow the header"),
    "cut off in the header": (GOOD[:20], "but the whole file has 20; is it cut off"),
    "too long": (GOOD + b"\0", "but 5 follow the header"),
    "header length of 2^63": (raw({}, length=2**63), "is the limit of the format"),
    "header length beyond the file": (raw({}, length=50), "its header would have 50 bytes"),
    "header length too small": (raw({"x": entry()}, b"\0" * 4, length=5), "its header can't be read"),
    "no JSON": (raw(b"{nothing}"), "its header can't be read"),
    "a list": (raw(b"[]"), "does not begin with a brace"),
    "a deep list": (raw(b'{"x":' + b"[" * 100_000), "its header can't be read"),
    "a number of a million digits": (raw(b'{"x":' + b"1" * 1_000_000 + b"}"), "its header can't be read"),
    "no UTF-8": (raw(b'{"\xff": 1}'), "its header can't be read"),
    "half a surrogate pair": (raw({"\ud800": entry()}, b"\0" * 4), "its header can't be read"),
    "overlap": (raw({"x": entry(), "y": entry(offsets=(2, 6))}, b"\0" * 6), "'y' begins at byte 2 and overlaps"),
    "the same bytes twice": (raw({"x": entry(), "y": entry()}, b"\0" * 4), "overlaps"),
    "gap": (raw({"x": entry(), "y": entry(offsets=(6, 10))}, b"\0" * 10), "'y' begins at byte 6 and leaves a gap"),
    "gap at the start": (raw({"x": entry(offsets=(4, 8))}, b"\0" * 8), "leaves a gap"),
    "beyond the file": (raw({"x": entry(shape=(2**40,), offsets=(0, 2**42))}), "its tensors take 4398046511104 bytes"),
    "absurd shape": (raw({"x": entry(shape=(2**40, 2**40))}, b"\0" * 4), "more than can exist"),
    "absurd empty shape": (raw({"x": entry(shape=(0, 2**62), offsets=(0, 0))}), "more than can exist"),
    "shape and bytes differ": (raw({"x": entry(shape=(2,))}, b"\0" * 4), "has 4 bytes, and F32[2] takes 8"),
    "negative size": (raw({"x": entry(shape=(-1,))}, b"\0" * 4), "the shape of its tensor 'x' is [-1]"),
    "a thousand axes": (raw({"x": entry(shape=(1,) * 1000)}, b"\0" * 4), "expected at most 32 sizes"),
    "shape of floats": (raw({"x": entry(shape=(1.0,))}, b"\0" * 4), "the shape of its tensor 'x' is [1.0]"),
    "shape of bools": (raw({"x": entry(shape=(True,))}, b"\0" * 4), "the shape of its tensor 'x' is [True]"),
    "negative offsets": (raw({"x": entry(offsets=(-4, 0))}, b"\0" * 4), "the data_offsets of its tensor 'x'"),
    "one offset": (raw({"x": entry(offsets=(4,))}, b"\0" * 4), "the data_offsets of its tensor 'x'"),
    "offsets swapped": (raw({"x": entry(offsets=(4, 0))}, b"\0" * 4), "has -4 bytes"),
    "duplicate name": (
        raw(b'{"x":%s,"x":%s}' % (ENTRY, ENTRY), b"\0" * 4),
        "'x' is there twice",
    ),
    "unknown dtype": (raw({"x": entry("F4")}, b"\0" * 4), "the dtype of its tensor 'x' is 'F4'"),
    "dtype of another kind": (raw({"x": entry(["F32"])}, b"\0" * 4), "the dtype of its tensor 'x'"),
    "entry lacks something": (raw({"x": {"dtype": "F32"}}), "lacks dtype, shape or data_offsets"),
    "entry of another kind": (raw({"x": 3}), "lacks dtype, shape or data_offsets"),
    "metadata of another kind": (raw({"__metadata__": {"a": 1}}), "no table of strings"),
    "a pickle": (pickle.dumps({"x": [1.0] * 100}), "begins like a pickle"),
    "an archive of torch.save": (b"PK\x03\x04" + b"\0" * 100, "it is a zip archive"),
    "text": (b"# Weights\n\nThese are not the weights.", "header would have"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_file_is_refused_with_its_name_and_the_reason(name, tmp_path: Path):
    content, why = BAD[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(amp.AmpValueError) as caught:
        amp.load_params(path)
    assert str(path) in str(caught.value)
    assert why in str(caught.value)
    with pytest.raises(amp.AmpValueError, match="given as bytes"):
        amp.load_params(content)


class Bomb:
    """Unpickling it runs code, which a loader of weights must never do."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_a_pickle_is_not_opened(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(amp.AmpValueError, match="could run any code"):
        amp.load_params(path)


def test_lies_about_sizes_allocate_nothing():
    liars = [raw({"x": entry("U8", (2**36,), (0, 2**36))}), raw({}, length=99_000_000), raw({}, length=2**60)]
    tracemalloc.start()
    for content in liars:
        with pytest.raises(amp.AmpValueError):
            amp.load_params(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def accepted_by_the_package(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except Exception:
        return False
    return True


VALUES = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(max_size=3),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=3), inner),
    max_leaves=4,
)
SIZES = strategies.integers(-1, 9) | strategies.sampled_from([2**31, 2**63, 2**64])
ENTRIES = VALUES | strategies.fixed_dictionaries(
    {
        "dtype": strategies.sampled_from([*st.DTYPES, "F4", "X"]),
        "shape": strategies.lists(SIZES, max_size=3),
        "data_offsets": strategies.lists(SIZES, min_size=2, max_size=2),
    }
)
HEADERS = strategies.dictionaries(strategies.text(max_size=3) | strategies.just("__metadata__"), ENTRIES, max_size=3)


@settings(max_examples=300)
@given(HEADERS, strategies.binary(max_size=20))
def test_fuzzed_headers_are_read_or_refused(header, data):
    content = raw(header, data)
    try:
        arrays = amp.load_params(content)
    except amp.AmpValueError:
        return
    # What we take, the package takes: we are never the more credulous.
    assert accepted_by_the_package(content)
    assert isinstance(arrays, dict)


WHOLE = ours({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), jnp.bfloat16), "c": np.zeros(0, np.int8)})


@settings(max_examples=300)
@given(strategies.integers(0, len(WHOLE)), strategies.binary(max_size=6), strategies.integers(0, 6))
def test_fuzzed_bytes_are_read_or_refused(place, new, cut):
    content = WHOLE[:place] + new + WHOLE[place + cut :]
    try:
        amp.load_params(content)
    except amp.AmpValueError:
        return
    assert accepted_by_the_package(content)
