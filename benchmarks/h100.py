"""Compile a JAX function for an H100 on a machine that has none, and read its cost off the result.

    python -m benchmarks.h100 gpt resnet

Needs the wheels jax-cuda12-plugin and jax-cuda12-pjrt of jax's own version, installed with --no-deps, and
JAX_PLATFORMS=cpu: `make hlo` sets up both. A *target* describes the card to XLA.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.experimental import topologies

from benchmarks import variants, workloads
from benchmarks.cost import Cost, cost_of_compiled

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# XLA's default on a GPU, said aloud: tests of values switch it off for the whole process.
OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": True}


def missing() -> str | None:
    """What keeps this process from compiling for an H100, in words; None where nothing does."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        return "jax-cuda12-plugin isn't installed: `make hlo` makes an environment that has it"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "JAX_PLATFORMS=cpu isn't set: without it the CUDA plugin looks for a GPU"
    return None


@cache
def topology(shape: str = "1x1x1") -> Any:
    """H100s that exist only for the compiler; "1x8x1" is one host with eight."""
    if reason := missing():
        raise RuntimeError(f"Can't compile for an H100 here: {reason}.")
    return topologies.get_topology_desc(topology_name=shape, platform="cuda", target_config=TARGET, topology=shape)


def on(sharding: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_cost(
    fun: Callable[..., Any], *args: Any, donate_argnums: tuple[int, ...] = (), sharding: Any = None
) -> Cost:
    """The cost of `jit(fun)` for arguments of these shapes, which may be `jax.ShapeDtypeStruct`s."""
    sharding = sharding or jax.sharding.SingleDeviceSharding(topology().devices[0])
    lowered = jax.jit(fun, donate_argnums=donate_argnums).lower(*on(sharding, args))
    return cost_of_compiled(lowered.compile(OPTIONS))


def step_cost(name: str, variant: str, policy: str = "mixed_bfloat16") -> Cost:
    """The cost of one training step; the names are in `workloads.NAMES` and `variants.NAMES`."""
    step, args = variants.step(name, variant, policy)
    return compile_cost(step, *args, donate_argnums=(0, 1))


def main(names: list[str]) -> None:
    for name in names or workloads.NAMES:
        for variant in variants.NAMES:
            print(f"{name:9s} {variant:8s} {step_cost(name, variant)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
