"""A run saved on 8 devices goes on with the same numbers on 8 in another way, on 2 processes of 4, and on one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import amp_jax as amp

ROOT = Path(__file__).parents[1]
BEFORE, AFTER = [1.0, np.inf, 2.0, -1.0], [1.0, -2.0, np.inf, 1.0]
"""What each step's batch is multiplied by. Saved between the two: one good step before growth, after a skipped one."""


def create() -> TrainState:
    params = {"w": jnp.linspace(0.1, 0.9, 64).reshape(8, 8), "b": jnp.full(3, 1 / 3), "rows": jnp.arange(8.0) / 7}
    tx = amp.loss_scaling(optax.sgd(2.0**-6, momentum=0.5), "mixed_float16", growth_interval=3)
    return TrainState.create(apply_fn=None, params=params, tx=tx)


@amp.autocast(policy="mixed_float16")
def loss_of(params: Any, factor: jax.Array) -> jax.Array:
    # Every number of a gradient is made of one parameter and of powers of two: it is the same on any devices.
    return sum(jnp.sum((factor * p - 0.5) ** 2) for p in params.values())


@jax.jit
def train_step(state: TrainState, factor: jax.Array) -> TrainState:
    return state.apply_gradients(grads=amp.grad(loss_of, state.opt_state)(state.params, factor))


def train(state: TrainState, factors: list[float]) -> TrainState:
    for factor in factors:
        state = train_step(state, np.float32(factor))
    return state


def sharded(state: Any, mesh: Mesh, axis: int) -> Any:
    """The same tree without values, its arrays in pieces along an axis wherever that divides into the devices."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
        fits = x.ndim > axis and x.shape[axis] % mesh.size == 0
        spec = P(*(None,) * axis, "fsdp") if fits else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, state)


def everything(state: TrainState) -> dict[str, str]:
    """All numbers of a state as text, put together from the pieces of all devices."""

    def whole(x: Any) -> str:
        gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh_of_all(), P()))(x)
        return f"{gathered.dtype} {np.asarray(gathered.addressable_data(0)).tobytes().hex()}"

    return {jax.tree_util.keystr(path): whole(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def mesh_of_all() -> Mesh:
    return Mesh(np.array(jax.devices()), ("fsdp",))


def restore_and_go_on(path: Path, axis: int = 0) -> dict[str, Any]:
    """What a run that resumes has at first, after some more steps, and under another policy."""
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(path, sharded(jax.eval_shape(create), mesh_of_all(), axis))
    there = amp.change_policy(state, jax.eval_shape(lambda: create_bfloat16(state.params)))
    assert jax.tree.structure(there.opt_state) != jax.tree.structure(state.opt_state)
    return {
        "restored": everything(state),
        "later": everything(train(state, AFTER)),
        "bfloat16": everything(there.params),
        "shards": {name: x.addressable_shards[0].data.shape for name, x in state.params.items()},
        "processes": jax.process_count(),
    }


def create_bfloat16(params: Any) -> TrainState:
    tx = amp.no_loss_scaling(optax.sgd(2.0**-6, momentum=0.5))
    return TrainState.create(apply_fn=None, params=amp.get_policy("bfloat16").cast_to_param(params), tx=tx)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    """A checkpoint of a run on 8 devices, its parameters and optimizer in pieces, and the state that it is of."""
    path = tmp_path_factory.mktemp("run") / "state"
    target = sharded(jax.eval_shape(create), mesh_of_all(), 0)
    state = jax.jit(create, out_shardings=jax.tree.map(lambda x: x.sharding, target))()
    state = train(state, BEFORE)
    assert state.params["w"].addressable_shards[0].data.shape == (1, 8)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path, state


def run_processes(path: Path, processes: int, devices: int) -> list[dict[str, Any]]:
    """`restore_and_go_on` in as many processes as asked for, with as many devices each."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_allow_excess_precision=false"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    # On CPUs a program of several processes that comes out of the compilation cache waits forever in its first gather.
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-m", "tests.test_training_processes", str(path), str(port), str(processes)]
    running = [
        subprocess.Popen(
            [*command, str(i)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(processes)
    ]
    try:
        told = [one.communicate(timeout=100) for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert [one.returncode for one in running] == [0] * processes, told
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def check(went_on: dict[str, Any], state: TrainState) -> None:
    assert went_on["restored"] == everything(state)
    # One skipped, and one good step away from growing.
    scaling = state.opt_state.scaling
    assert [scaling.loss_scale, scaling.growth_count, scaling.skipped_steps] == [2.0**14, 2, 1]
    later = train(state, AFTER)
    assert went_on["later"] == everything(later)
    assert [later.opt_state.scaling.loss_scale, later.opt_state.scaling.skipped_steps] == [2.0**14, 2]
    assert went_on["bfloat16"] == everything(amp.get_policy("bfloat16").cast_to_param(state.params))


def test_on_8_devices_in_other_pieces(saved: tuple[Path, TrainState]) -> None:
    path, state = saved
    went_on = restore_and_go_on(path, axis=1)
    assert went_on["shards"]["w"] == (8, 1)
    check(went_on, state)


@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (2, 4)])
def test_on_another_number_of_processes_and_devices(
    saved: tuple[Path, TrainState], processes: int, devices: int
) -> None:
    path, state = saved
    for went_on in run_processes(path, processes, devices):
        assert went_on["processes"] == processes
        assert went_on["shards"]["w"] == [8 // (processes * devices), 8]
        check(went_on, state)


if __name__ == "__main__":
    path, port, processes, rank = Path(sys.argv[1]), *map(int, sys.argv[2:])
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=rank)
    print(json.dumps(restore_and_go_on(path)))
