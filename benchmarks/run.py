"""The table of `make bench`: a training step as written in float32, by hand, at the floor, and ours.

python -m benchmarks.run                             measured on a GPU; compiled for an H100 where there is none
python -m benchmarks.run gpt lstm                    only these steps
python -m benchmarks.run --policy mixed_float16
python -m benchmarks.run --timed | --compiled        the one or the other, wherever this runs
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import jax

from benchmarks import variants, workloads

HEADER = (
    "step",
    "variant",
    "ms a step",
    "x float32",
    "x hand",
    "x all-low",
    "peak MB",
    "x float32",
    "x hand",
    "x all-low",
)

Figures = dict[str, tuple[float, float]]
"""Seconds a step and peak bytes, by variant."""


def has_gpu() -> bool:
    """Whether JAX would run on a GPU. Starts the backend."""
    return jax.default_backend() == "gpu"


def measured(name: str, policy: str) -> Figures:
    from benchmarks.timed import time_step

    return {variant: (one.seconds, one.peak) for variant, one in time_step(name, policy).items()}


def compiled(name: str, policy: str) -> Figures:
    from benchmarks.h100 import step_cost

    costs = {variant: step_cost(name, variant, policy) for variant in variants.NAMES}
    return {variant: (cost.seconds, cost.temp + cost.arguments) for variant, cost in costs.items()}


def rows(name: str, figures: Figures) -> Iterator[tuple[str, ...]]:
    """A row for each variant, with its ratios to the other three."""
    for variant, (seconds, peak) in figures.items():
        times = [f"{seconds / figures[other][0]:.3f}" for other in ("float32", "hand", "all-low")]
        bytes_ = [f"{peak / figures[other][1]:.3f}" for other in ("float32", "hand", "all-low")]
        yield (name, variant, f"{seconds * 1e3:.3f}", *times, f"{peak / 1e6:.0f}", *bytes_)


def print_row(cells: tuple[str, ...]) -> None:
    """A line of a Markdown table that also reads well in a terminal."""
    padded = (cell.ljust(9) if i < 2 else cell.rjust(9) for i, cell in enumerate(cells))
    print("| " + " | ".join(padded) + " |", flush=True)


def table(names: Sequence[str], policy: str, source: Callable[[str, str], Figures]) -> None:
    print_row(HEADER)
    print_row(("---", "---", *["---:"] * 8))
    for name in names:
        for row in rows(name, source(name, policy)):
            print_row(row)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps", nargs="*", help=f"{', '.join(workloads.NAMES)}, the default, or {', '.join(workloads.MORE)}"
    )
    parser.add_argument("--policy", default="mixed_bfloat16", choices=sorted(variants.LOW))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--timed", action="store_true", help="measure on the device that JAX finds")
    where.add_argument("--compiled", action="store_true", help="compile for an H100 and model the time")
    where.add_argument("--has-gpu", action="store_true", help="only tell by the exit status whether there is a GPU")
    parsed = parser.parse_args(arguments)
    known = (*workloads.NAMES, *workloads.MORE)
    if unknown := [name for name in parsed.steps if name not in known]:
        parser.error(f"unknown step {', '.join(unknown)}; choose from {', '.join(known)}")
    return parsed


def main(arguments: list[str]) -> int:
    parsed = parse(arguments)
    if parsed.has_gpu:
        return int(not has_gpu())
    names = parsed.steps or workloads.NAMES
    if parsed.timed or (not parsed.compiled and has_gpu()):
        device = jax.devices()[0]
        print(f"Measured on {device.device_kind}, jax {jax.__version__}, {parsed.policy}; AdamW training steps.\n")
        table(names, parsed.policy, measured)
    else:
        print(
            f"No GPU that this jax can use: compiled for an H100, and modelled. jax {jax.__version__}, {parsed.policy}."
        )
        print("On a machine that has one, `make bench EXTRA=cuda12` measures.")
        print("Every kernel takes max(bytes / 3.35 TB/s, flops / peak); peak bytes are XLA's own buffer assignment.\n")
        table(names, parsed.policy, compiled)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
