"""Everything that the documentation shows as Python runs as written: README, docs, and every docstring's example."""

import doctest
import importlib
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import amp_jax

ROOT = Path(__file__).parents[1]
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]
FENCE = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A fenced block of Python and the line of the page that its code begins on."""

    page: Path
    line: int
    code: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent = len(found["indent"])
        lines = (line[indent:] for line in found["code"].splitlines())
        yield Block(page, text.count("\n", 0, found.start("code")) + 1, "\n".join(lines))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def modules() -> Iterator[str]:
    yield amp_jax.__name__
    yield from (one.name for one in pkgutil.walk_packages(amp_jax.__path__, f"{amp_jax.__name__}."))


def run(block: Block, module: types.ModuleType) -> None:
    # Blank lines in front, so that a traceback names the page's own line.
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    exec(code, module.__dict__)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b.page.relative_to(ROOT)}:{b.line}")
def test_code_block_runs_as_written(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A module that can be found by its name: dataclasses and pickle look there for what the block defines.
    module = types.ModuleType("block")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run(block, module)


@pytest.mark.parametrize("name", sorted(set(modules())))
def test_docstring_examples_give_what_they_show(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0, capsys.readouterr().out


def test_a_block_is_found_and_its_failure_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n1. A list\n\n   ```python\n   value = 1 / 0\n   ```\n\n```bash\nls\n```\n")
    (block,) = blocks_of(page)
    assert block.code == "value = 1 / 0"
    with pytest.raises(ZeroDivisionError) as failure:
        run(block, types.ModuleType("block"))
    assert failure.traceback[-1].lineno + 1 == 6
