"""The example's float16 GPT, stopped after any of its steps and resumed in a new process, is as if never stopped.

Bit for bit: parameters, moments, schedule, loss scale, its counts, and each step's loss, which shows that the batches
come in the same order. One step in the middle overflows.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import amp_jax as amp

ROOT = Path(__file__).parents[1]
POLICY, STEPS, BATCH, BROKEN = "mixed_float16", 12, 2, 5
SIZES = {"LAYERS": 1, "WIDTH": 8, "HEADS": 2, "CONTEXT": 8, "GROWTH_INTERVAL": 4, "WARMUP": 4}


def small_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses, which linen modules are, look up their module by name
    spec.loader.exec_module(module)
    for name, value in SIZES.items():
        setattr(module, name, value)
    return module


def run_on(example: ModuleType, data: Any, state: Any) -> Iterator[tuple[Any, dict[str, str]]]:
    """Each state from here to the end, and what its step had to say, as bits."""
    batches = example.windows(data.train, (STEPS, BATCH), example.SEED)
    # The step counts the batches read, skipped ones too: it stands outside of the loss scale.
    for i in range(int(state.step), STEPS):
        state, read = example.train_step(state, batches[i], np.float32(example.SPIKE if i == BROKEN else 1.0))
        yield state, {name: np.asarray(value).tobytes().hex() for name, value in read.items()}


def digest(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for path, leaf in leaves}


def resumed(folder: Path) -> dict[int, Any]:
    """For every checkpoint the rest of the run: what each step said, and the last state."""
    example = small_example()
    data, rest = example.load_data(), {}
    with ocp.CheckpointManager(folder) as manager:
        for step in manager.all_steps():
            policy = amp.recorded_policy(manager.metadata(step).custom_metadata)
            target = jax.eval_shape(lambda policy=policy: example.create_state(policy, data, STEPS))
            state = manager.restore(step, args=ocp.args.StandardRestore(target))
            went_on = list(run_on(example, data, state))
            rest[step] = {"said": [said for _, said in went_on], "last": digest(went_on[-1][0])}
    return rest


def test_a_run_stopped_after_any_step_goes_on_as_if_it_had_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "train_gpt", sys)  # put back what was there
    example = small_example()
    data = example.load_data()
    run = list(run_on(example, data, example.create_state(POLICY, data, STEPS)))
    with ocp.CheckpointManager(tmp_path) as manager:
        for state, _ in run[:-1]:
            args = ocp.args.StandardSave(state)
            manager.save(int(state.step), args=args, custom_metadata=amp.policy_record(POLICY))
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_resume", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rest = json.loads(done.stdout.splitlines()[-1])

    counts = [int(state.opt_state.scaling.growth_count) for state, _ in run]
    # Growth after the fourth good step, the sixth step bad, and growth again: most stops lie within an interval.
    assert counts == [1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1, 2]
    scales = [float(state.opt_state.scaling.loss_scale) / 2**15 for state, _ in run]
    assert scales == [1, 1, 1, 2, 2, 1, 1, 1, 1, 2, 2, 2]
    assert sorted(map(int, rest)) == list(range(1, STEPS))
    for step, went_on in rest.items():
        assert went_on["said"] == [said for _, said in run[int(step) :]], step
        assert went_on["last"] == digest(run[-1][0]), step


if __name__ == "__main__":
    print(json.dumps(resumed(Path(sys.argv[1]))))
