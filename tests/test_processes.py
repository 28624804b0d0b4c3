"""Two processes with one CPU device each save one tree: both gather, the first writes, both learn how it went."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from tests import two_processes

SCRIPT = """
folder = arguments[0]
w = np.arange(8, dtype=np.float32).reshape(4, 2)
tree = {
    "rows": spread(w, P("x")),
    "copies": spread(w + 100, P()),
    "own": jnp.full(3, 7.0 + rank),  # not shared: the writer's counts
    "numpy": np.float32(rank),
    "layers": [spread(w * 2, P("x"))],
}
report = amp.save_params(f"{folder}/good", tree, "bfloat16")
said["totals"] = report.totals
said["dtype"] = report.tensors["rows"].dtype
back = amp.load_params(f"{folder}/good", like=tree)
said["loaded"] = [s.data.tolist() for s in back["rows"].addressable_shards]
said["sharded"] = back["rows"].sharding == tree["rows"].sharding

def failure(path, tree, dtype=None):
    try:
        amp.save_params(path, tree, dtype)
    except Exception as error:
        return [type(error).__name__, str(error)]

said["overflow"] = failure(f"{folder}/good", {**tree, "big": spread(w * 1e5, P("x"))}, "float16")
# Only the writer fails, in the middle, and the gathers that follow must not be left waiting.
import amp_jax._weights_file as file
whole, write_chunks = [], file.st.write_chunks
def full(file, chunks):
    whole.append(chunks)
    if len(whole) == 2:
        raise OSError(28, "No space left on device")
    write_chunks(file, chunks)
file.st.write_chunks = full
said["full"] = failure(f"{folder}/good", tree)
file.st.write_chunks = lambda *_: 1 / 0
said["bug"] = failure(f"{folder}/good", tree)
said["written"] = len(whole)

from amp_jax._processes import shared
def own_failure():
    if rank == 1:
        raise MemoryError("here alone")
    return {}
try:
    said["alone"] = [shared(own_failure)]
except MemoryError as error:
    said["alone"] = str(error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict]:
    return two_processes.run(SCRIPT, str(folder))


def test_the_file_is_whole_and_the_first_processs_and_survives_the_failures(said, folder: Path):
    tensors = dict(deserialize((folder / "good").read_bytes()))
    read = {
        k: np.frombuffer(t["data"], ml_dtypes.bfloat16).astype(float).reshape(t["shape"]) for k, t in tensors.items()
    }
    w = np.arange(8.0).reshape(4, 2)
    expected = {"rows": w, "copies": w + 100, "own": np.full(3, 7.0), "numpy": np.array(0.0), "layers/0": w * 2}
    assert read.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(read[name], values)
    assert os.listdir(folder) == ["good"]


def test_both_have_the_report_and_load_their_shards(said):
    assert said[0]["totals"] == said[1]["totals"] == {"tensors": 5, "bytes": 56, "overflowed": 0, "flushed": 0}
    assert [one["dtype"] for one in said] == ["bfloat16"] * 2
    assert said[0]["loaded"] == [[[0, 1], [2, 3]]]
    assert said[1]["loaded"] == [[[4, 5], [6, 7]]]
    assert all(one["sharded"] for one in said)


def test_both_learn_of_a_refusal(said):
    assert [one["overflow"][0] for one in said] == ["AmpValueError"] * 2
    # 0, and 1e5 to 7e5, which all lie beyond 65504.
    assert all("big: 7 of float32 overflow float16" in one["overflow"][1] for one in said)


def test_both_learn_of_a_full_disk_and_of_a_bug(said):
    assert [one["full"][0] for one in said] == ["OSError"] * 2
    assert all("No space left on device" in one["full"][1] for one in said)
    assert "process 0, which writes, failed" in said[1]["full"][1]
    assert [one["bug"][0] for one in said] == ["ZeroDivisionError", "AmpError"]
    assert said[1]["written"] == 0  # only the first ever wrote


def test_an_error_on_a_process_that_does_not_write_is_not_lost(said):
    assert [one["alone"] for one in said] == [[{}], "here alone"]
