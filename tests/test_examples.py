"""The examples run from start to end, and print and draw what they promise."""

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
TRAIN_GPT = ROOT / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def output_and_picture(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """What the command prints and draws in two steps, in a process of its own as a user runs it."""
    picture = tmp_path_factory.mktemp("demo") / "new folder" / "curves.png"
    command = [sys.executable, "-W", "error", TRAIN_GPT, "--steps", "2", "--batch", "1", "--out", picture]
    # COLUMNS: as wide as it takes for a row of the table to stay one line.
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=env, cwd=picture.parents[1], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, picture.read_bytes()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, its model cut down."""
    spec = importlib.util.spec_from_file_location("train_gpt", TRAIN_GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, which linen modules are, look up their module by name.
    monkeypatch.setitem(sys.modules, "train_gpt", module)
    spec.loader.exec_module(module)
    sizes = {"LAYERS": 1, "WIDTH": 8, "HEADS": 2, "CONTEXT": 8, "VALIDATION_WINDOWS": 2, "GROWTH_INTERVAL": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    # So small that the parameters hardly move: gradients that grow may overflow in steps that aren't meant to be bad.
    monkeypatch.setattr(module, "LEARNING_RATE", 1e-5)
    return module


def rows_of(output: str) -> dict[str, list[str]]:
    table = output[output.index("policy") : output.index("loss: on")]
    return {cells[0]: cells[1:] for cells in map(str.split, table.splitlines()) if len(cells) == 8}


def test_train_gpt_prints_a_row_for_each_policy(output_and_picture: tuple[str, bytes]) -> None:
    rows = rows_of(output_and_picture[0])
    assert list(rows) == ["float32", "mixed_bfloat16", "mixed_float16"]
    loss, difference, skipped, scale, params, saved, _ = zip(*rows.values(), strict=True)
    # The second of the two steps of the float16 run is the broken one: skipped, and the first loss scale halved.
    assert skipped == ("0", "0", "1")
    assert scale == ("1", "1", str(2**14))
    assert difference[0] == "+0.00%"
    # One applied step in bfloat16: as in float32 but for rounding. ln(104) = 4.6 is what a uniform guess loses.
    assert abs(float(difference[1].rstrip("%"))) < 1
    assert all(2 < float(one) < 7 for one in loss)
    # Parameters stay in float32, what the backward pass needs doesn't.
    assert params[0] == params[1] == params[2]
    assert float(saved[1]) == float(saved[2]) < float(saved[0])


def test_train_gpt_draws_a_picture(output_and_picture: tuple[str, bytes]) -> None:
    picture = output_and_picture[1]
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 2 * height > 400


def test_train_gpt_skips_the_broken_step_and_recovers(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Mock(side_effect=small.mean_loss)
    monkeypatch.setattr(small, "mean_loss", traced)
    with Progress(disable=True) as bar:
        run = small.train("mixed_float16", small.load_data(), steps=6, batch=8, bar=bar)
    # Two good steps double it, the broken one (the fourth) halves it and starts the count anew.
    assert run.history["loss_scale"].tolist() == [2.0**15, 2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**16]
    assert run.history["skipped_steps"].tolist() == [0, 0, 0, 1, 1, 1]
    assert np.isfinite(run.history["loss"]).all()
    # Once for what is saved, for the validation loss and for all steps: no factor and no scale is compiled into one.
    assert traced.call_count == 3
