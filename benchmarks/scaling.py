"""What loss scaling adds to a float16 training step (gpt, AdamW), compiled for an H100: each against the plain step.

    python -m benchmarks.scaling

MPX and Keras are measured where they are installed (mixed-precision-for-jax with equinox, keras with
KERAS_BACKEND=jax). Exits with 1 where ours costs more than it may.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable

import jax
import optax

from benchmarks import scalers
from benchmarks.cost import Cost
from benchmarks.h100 import compile_cost
from benchmarks.run import print_row
from benchmarks.scalers import BATCH, INIT, RATE, Step

TX = optax.adamw(RATE)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), TX)
Build = Callable[[], Step]

BASES: dict[str, tuple[Build, dict[str, Build]]] = {
    "plain float16": (
        lambda: scalers.plain(TX),
        {
            "amp_jax": lambda: scalers.ours(TX),
            "flax DynamicScale": lambda: scalers.flax_dynamic_scale(TX),
            "jmp": lambda: scalers.jmp_dynamic(TX),
            "mpx": lambda: scalers.mpx(TX),
            "optax.apply_if_finite": lambda: scalers.apply_if_finite(TX),
            "isfinite on each leaf": lambda: scalers.naive(TX),
        },
    ),
    "plain float16, clipped by global norm": (
        lambda: scalers.plain(CLIPPED),
        {"amp_jax, clipped": lambda: scalers.ours(CLIPPED)},
    ),
    "plain float16, Keras' AdamW": (
        lambda: scalers.keras(False),
        {"keras LossScaleOptimizer": lambda: scalers.keras(True)},
    ),
}
"""Steps without a loss scale, and the steps that are compared with each."""

NEEDS = {"mpx": "mpx", "plain float16, Keras' AdamW": "keras", "keras LossScaleOptimizer": "keras"}
"""The module that a step needs and that isn't always there."""

ALLOWED = {"amp_jax": {"hbm": 1.0065, "kernels": 1.19}, "amp_jax, clipped": {"kernels": 1.03}}
COLUMNS = ("hbm", "kernels", "seconds", "temp")
HEADER = ("step", "HBM x", "kernels x", "modelled time x", "temporaries x", "conditionals", "host transfers")
PACKAGES = ("jax", "flax", "optax", "jmp", "mixed-precision-for-jax", "keras")


def cost(step: Step) -> Cost:
    params = jax.eval_shape(INIT, jax.random.key(0))
    return compile_cost(step.run, params, jax.eval_shape(step.init, params), *BATCH, donate_argnums=(0, 1))


def conditionals(one: Cost) -> int:
    return one.hlo.count(" conditional(")


def host_transfers(one: Cost) -> int:
    """Arrays in the host's memory (space 5), and instructions that send to the host or call it."""
    return sum(one.hlo.count(sign) for sign in ("S(5)", " infeed(", " outfeed(", " send(", " recv(", "callback"))


def ratios(one: Cost, base: Cost) -> dict[str, float]:
    return {column: getattr(one, column) / getattr(base, column) for column in COLUMNS}


def row(name: str, one: Cost, base: Cost) -> tuple[str, ...]:
    found = ratios(one, base)
    numbers = [f"{found['hbm']:.4f}", *(f"{found[column]:.3f}" for column in COLUMNS[1:])]
    return (name, *numbers, str(conditionals(one)), str(host_transfers(one)))


def there(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def failures(name: str, one: Cost, base: Cost) -> list[str]:
    """What ours does that it may not."""
    allowed = ALLOWED.get(name)
    if allowed is None:
        return []
    found = ratios(one, base)
    over = [f"{name}: {key} x{found[key]:.4f}, at most {limit}" for key, limit in allowed.items() if found[key] > limit]
    return over + [f"{name}: leaves the device"] * (conditionals(one) + host_transfers(one) > 0)


def versions() -> str:
    def of(package: str) -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} not installed"

    return ", ".join(map(of, PACKAGES))


def main() -> int:
    print(f"{versions()}.\n")
    print_row(HEADER)
    print_row(("---", *["---:"] * (len(HEADER) - 1)))
    wrong: list[str] = []
    for name, (build, others) in BASES.items():
        if not there(name):
            continue
        base = cost(build())
        print_row(row(name, base, base))
        for other, build_other in others.items():
            if there(other):
                one = cost(build_other())
                print_row(row(other, one, base))
                wrong += failures(other, one, base)
    print("\n" + "\n".join(wrong or ["ours is within what it may cost"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
