"""Time the training steps on the device that JAX runs on, all variants of a step side by side in one run.

The variants take turns, so that a card that heats up or is shared slows all of them. Peak bytes are XLA's assignment
for the step: arguments, results and temporaries, an argument that a result takes the place of counted once.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from benchmarks import variants, workloads


class Figures(NamedTuple):
    """Of one variant of a step: seconds a step (the median over the rounds) and bytes at the peak."""

    seconds: float
    peak: int


class Running(NamedTuple):
    """A compiled step, what it carries from one call to the next, and its batch."""

    call: Callable[..., Any]
    carried: list[Any]
    batch: list[jax.Array]


def time_step(
    name: str, policy: str, scale: float = 1, rounds: int = 7, calls: int = 10, among: Sequence[str] = variants.NAMES
) -> dict[str, Figures]:
    """Figures by variant. Each round calls every variant `calls` times."""
    running: dict[str, Running] = {}
    peaks: dict[str, int] = {}
    for variant in among:
        running[variant], peaks[variant] = start(name, variant, policy, scale)
    seconds: dict[str, list[float]] = {variant: [] for variant in among}
    for _ in range(rounds):
        for variant, one in running.items():
            seconds[variant].append(run(one, calls))
    running.clear()
    gc.collect()  # the arrays of this step leave the device before the next one comes
    return {variant: Figures(statistics.median(seconds[variant]), peaks[variant]) for variant in among}


def start(name: str, variant: str, policy: str, scale: float) -> tuple[Running, int]:
    """Compile a variant and run it once, which also leaves it with arrays of its own."""
    step, _ = variants.step(name, variant, policy, scale)
    init, _, specs = workloads.workload(name, None, scale)
    params = jax.jit(init)(jax.random.key(0))
    carried = [params, jax.jit(optax.adamw(1e-3).init)(params)]
    batch = workloads.example(specs, jax.random.key(1))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carried, *batch).compile()
    one = Running(compiled, carried, batch)
    run(one, 1)
    return one, peak_bytes(compiled)


def run(one: Running, calls: int) -> float:
    """Seconds a call, waiting for the last one only."""
    begin = time.perf_counter()
    for _ in range(calls):
        *one.carried[:], _ = one.call(*one.carried, *one.batch)
    jax.block_until_ready(one.carried)
    return (time.perf_counter() - begin) / calls


def peak_bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
