"""The wheel and the sdist build, install into an empty environment, and import from there."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = """
import sys
from importlib.metadata import version
from pathlib import Path
import amp_jax
print(version("amp-jax"), Path(amp_jax.__file__).is_relative_to(sys.prefix), amp_jax.get_policy("mixed_bfloat16"))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; no PYTHONPATH, which would let the source tree be imported instead."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both distributions, by suffix. Built by the backend alone, which needs no network."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return {path.suffix: path for path in folder.iterdir()}


def empty_environment(folder: Path) -> Path:
    """The interpreter of a new environment: its dependencies are this one's, the package itself is not there."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A .pth file adds the folder, but reads none of the .pth files in it, as an editable install of this package is.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


@pytest.mark.parametrize("suffix", [".whl", ".gz"])
def test_distribution_installs_and_imports(built: dict[str, Path], suffix: str, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv")
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *offline, built[suffix], cwd=tmp_path)
    # -P keeps the current folder off the path, -W error lets no warning pass.
    out = run(python, "-P", "-W", "error", "-c", CHECK, cwd=tmp_path)
    assert out.strip() == "0.1.0 True params=float32,compute=bfloat16,output=float32"


def test_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    names = zipfile.ZipFile(built[".whl"]).namelist()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "amp_jax").rglob("*.py")} | {"amp_jax/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_what_the_tests_need(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("README.md", "LICENSE", "pyproject.toml", "Makefile", "tests/conftest.py", "benchmarks/hlo.py")
    assert {"amp_jax/py.typed", *needed} <= names
