"""What the package takes from JAX: which of its less stable modules, and where; and that importing starts nothing.

A *backend* is what JAX starts when it first asks for a device; `jax.distributed.initialize` fails after that.
"""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "amp_jax"
INNER = ("jax.extend", "jax.core", "jax.interpreters")
"""Public, but they change between releases: one file follows them."""

SOURCES = sorted(
    path for folder in ("amp_jax", "benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")
)


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` for the expression a.b.c."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def names_used(source: str) -> Iterator[str]:
    """Every dotted name that the source imports or spells out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield name


def below(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import jax.core", True),
        ("from jax import core", True),
        ("from jax.extend.core import Literal", True),
        ("import jax\njax.interpreters.mlir.ir_constant(1)", True),
        ("import jax\njax.jit", False),
        ("from jax import numpy as core", False),
    ],
)
def test_the_search_for_names_finds_each_spelling(source: str, found: bool) -> None:
    assert any(below(name, *INNER) for name in names_used(source)) == found


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if PACKAGE in p.parents and p.name != "_jaxpr.py"], ids=lambda p: p.name
)
def test_only_one_file_of_the_package_uses_jaxs_inner_modules(path: Path) -> None:
    assert [name for name in names_used(path.read_text()) if below(name, *INNER)] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_uses_jaxs_private_modules(path: Path) -> None:
    assert [name for name in names_used(path.read_text()) if below(name, "jax._src")] == []


CONSTRUCTIONS = """
    import flax.linen as nn
    import jax
    import optax

    import amp_jax as amp

    policy = amp.get_policy("auto")
    amp.Policy("float32", "bfloat16", "float32").override({"**/norm*": "float32"})

    @amp.autocast(policy="auto")
    def double(x):
        return 2 * x

    amp.wrap(nn.Dense(3), "auto")
    for tx in (amp.dynamic_loss_scaling, lambda tx: amp.static_loss_scaling(tx, 8.0), amp.no_loss_scaling):
        tx(optax.adamw(1e-3))
    amp.loss_scaling(optax.adamw(1e-3), "auto")
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_importing_and_constructing_start_no_backend() -> None:
    # A platform that doesn't exist: whatever starts a backend fails, and says so.
    quiet = run(CONSTRUCTIONS, JAX_PLATFORMS="no_such_platform")
    assert quiet.returncode == 0, quiet.stderr
    loud = run(f"{CONSTRUCTIONS}\n    jax.devices()", JAX_PLATFORMS="no_such_platform")
    assert "no_such_platform" in loud.stderr


def test_distributed_initialisation_works_after_construction() -> None:
    start = """
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % free.getsockname()[1]
    jax.distributed.initialize(address, num_processes=1, process_id=0)
    jax.distributed.shutdown()
    """
    done = run(f"{CONSTRUCTIONS}\n{start}", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
