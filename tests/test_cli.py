"""The command `amp-jax`: convert, inspect, doctor."""

import re
import tomllib
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import amp_jax as amp
from amp_jax import _convert, _doctor
from amp_jax._cli import main
from amp_jax._safetensors import read_header

WEIGHTS = {
    "layer.0.norm.weight": np.array([1.0, 2.0], np.float32),
    "layer.0.weight": np.array([[1e5, -1e5], [1e-9, 3.0]], np.float32),
    "ids": np.arange(4),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(WEIGHTS, path, metadata={"format": "pt"})
    return path


def test_the_command_is_installed_under_its_name():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"amp-jax": "amp_jax._cli:main"}


def test_convert_casts_floats_and_keeps_the_rest(source, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["convert", str(source), str(out), "--dtype", "bf16", "--keep", "*norm*"]) == 0
    loaded = amp.load_params(out)
    assert loaded["layer.0.norm.weight"].dtype == jnp.float32
    assert loaded["layer.0.weight"].tolist() == WEIGHTS["layer.0.weight"].astype(ml_dtypes.bfloat16).tolist()
    assert safetensors.numpy.load_file(source).keys() == loaded.keys()
    assert loaded["ids"].tolist() == [0, 1, 2, 3]
    with out.open("rb") as file:
        header = read_header(file, "out")
    assert header.metadata == {"format": "pt"}
    assert header.specs["ids"].dtype == np.int64  # in the file, ints are as they were
    assert "float32 -> bfloat16" in capsys.readouterr().out


def test_convert_refuses_clips_and_may_write_over_its_source(source, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["convert", str(source), str(out), "--dtype", "f16"]) == 1
    assert "layer.0.weight: 2 of float32 overflow float16" in capsys.readouterr().err
    assert not out.exists()
    assert main(["convert", str(source), str(source), "--dtype", "f16", "--on-overflow", "clip"]) == 0
    assert amp.load_params(source)["layer.0.weight"].tolist() == [[65504, -65504], [0, 3]]


def test_what_save_params_wrote_is_a_tree_after_it_too(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    amp.save_params(a, {"layers": [jnp.ones(2), jnp.zeros(2)], "key": jax.random.key(3)})
    assert main(["convert", str(a), str(b), "--dtype", "bf16"]) == 0
    loaded = amp.load_params(b)
    assert [x.dtype.name for x in loaded["layers"]] == ["bfloat16"] * 2
    assert loaded["key"] == jax.random.key(3)


def test_converting_takes_memory_for_a_chunk_not_for_the_file(tmp_path):
    path = tmp_path / "big"
    amp.save_params(path, {"big": np.ones(16_000_000, np.float32)})  # 64 MB in one tensor
    seen: list[int] = []
    tracemalloc.start()
    _convert.convert(path, tmp_path / "out", "bfloat16", advance=seen.append)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12_000_000
    assert sum(seen) == 64_000_000
    assert len(seen) > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "none", "out", "--dtype", "bf16"], "amp-jax convert: [Errno 2] No such file or directory: 'none'"),
        (["convert", "{source}", "out", "--dtype", "bf61"], "`dtype` is 'bf61'"),
        (["convert", "{source}", "out", "--dtype", "bf16", "--keep", "nrom"], "`keep` has 'nrom'"),
        (["inspect", __file__], "test_cli.py is no safetensors file"),
    ],
)
def test_errors_are_one_line_and_a_status(source, arguments, said, capsys):
    assert main([part.format(source=source) for part in arguments]) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_inspect_prints_what_each_tensor_holds_and_would_survive(source, capsys):
    assert main(["inspect", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: re.split(r"  +", line.strip()) for line in lines if line.strip()}
    # 1e5 is too much for float16 and e5m2 (57344), and 1e-9 too little for both.
    assert rows["layer.0.weight"] == [
        "layer.0.weight", "2x2", "float32", "16", "-1e+05", "1e+05", "1e-09", "0", "bfloat16",
    ]  # fmt: skip
    assert rows["layer.0.norm.weight"][-1] == "bfloat16, float16, float8_e4m3fn, float8_e5m2"
    assert rows["ids"] == ["ids", "4", "int64", "32", "0"]
    assert "3 tensors, 5.6e-05 MB" in lines
    assert "format: pt" in lines


def test_inspect_counts_what_is_not_finite(tmp_path):
    path = tmp_path / "x"
    amp.save_params(path, {"x": np.array([np.nan, np.inf, -2.0, 0.5], np.float32), "empty": np.zeros(0, np.float32)})
    tensors, _ = _convert.inspect(path)
    assert tensors["x"][1:5] == (-2.0, 0.5, 0.5, 2)
    assert tensors["empty"][1:5] == (None, None, None, 0)


def test_doctor_says_what_auto_picks_and_why(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "params=float32,compute=bfloat16,output=float32" in printed
    assert re.search(r"float32 +native", printed)
    assert re.search(rf"jax +{re.escape(jax.__version__)}", printed)
    assert re.search(r"device +8 x cpu", printed)


@pytest.mark.parametrize(
    ("platform", "capability", "native"),
    [
        ("gpu", "9.0", {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64"}),
        ("gpu", "10.0", {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64"}),
        ("gpu", "8.0", {"float32", "bfloat16", "float16", "float64"}),
        ("gpu", "7.5", {"float32", "float16", "float64"}),
        ("gpu", "6.1", {"float32", "float64"}),
        ("gpu", "gfx90a", {"float32", "bfloat16", "float16", "float64"}),
        ("tpu", None, {"float32", "bfloat16"}),
    ],
)
def test_which_dtypes_a_device_has_units_for(platform, capability, native):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert {name for name in _doctor.DTYPES if _doctor.is_native(device, name)} == native


def test_a_dtype_that_a_device_fails_on_is_none(monkeypatch):
    def failing(*_):
        raise RuntimeError("no such kernel")

    assert _doctor.support(jax.devices("cpu")[0], "float64") == "none (jax_enable_x64 is off)"
    monkeypatch.setattr(_doctor.jax, "device_put", failing)
    assert _doctor.support(jax.devices("cpu")[0], "float32") == "none"
