"""How JAX and hypothesis are set up for the tests; it has to happen before jax is imported."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
FLAGS = {
    # XLA may otherwise drop a float32 -> bfloat16 -> float32 pair, and with it the rounding that a test looks for.
    "xla_allow_excess_precision": "false",
    "xla_force_host_platform_device_count": "8",
}


def xla_flags(given: str) -> str:
    """The flags above behind those that the user gave, which win."""
    ours = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given]
    return " ".join([*ours, given]).strip()


def platforms() -> str | None:
    """CPU first, so that values don't depend on the machine; the GPU beside it for the tests that ask for it.

    Without a GPU the CUDA plugin, which `make hlo` installs for its compiler, must not be started.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        return None
    return "cpu,cuda" if any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")) else "cpu"


os.environ["XLA_FLAGS"] = xla_flags(os.environ.get("XLA_FLAGS", ""))
if chosen := platforms():
    os.environ.setdefault("JAX_PLATFORMS", chosen)
if chosen == "cpu":
    # What is compiled here for a GPU that isn't there is written to the cache, but can't be read back.
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Several test processes share one GPU, and the compilation cache's loader logs each hit as an error.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

OWN = frozenset({"unheard_of"})
"""Primitives that tests make for themselves."""

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def every_primitive_that_a_test_meets_is_placed() -> Iterator[None]:
    """A new JAX may split a primitive or add one, which would then silently run as traced."""
    from amp_jax._ops import UNKNOWN
    from amp_jax._plan import Rules

    met: set[str] = set()
    category = Rules.category

    def watched(self: Rules, eqn: Any) -> tuple[str, str]:
        found = category(self, eqn)
        if found == UNKNOWN:
            met.add(eqn.primitive.name)
        return found

    Rules.category = watched
    yield
    Rules.category = category
    assert met <= OWN, f"not in the table of _ops.py: {sorted(met - OWN)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as their figures, also those that ran in another process."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, [])]
    figures = [value for one in reports for key, value in one.user_properties if key == "figures"]
    if figures:
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.write_line(str(line))
