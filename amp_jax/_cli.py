"""The command `amp-jax`: convert and inspect files of weights, and see what this machine makes of the dtypes."""

import argparse
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from amp_jax._convert import Advance, Extremes, convert, inspect
from amp_jax._doctor import diagnose
from amp_jax._errors import AmpError
from amp_jax._weights_file import ON_OVERFLOW


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; what it returns is the exit status.

    >>> main(["convert", "no-such-file", "out", "--dtype", "bf16"])
    1
    """
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except (AmpError, OSError) as error:
        print(f"amp-jax {given.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="amp-jax", description="Weights in the dtype you ask for.")
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("convert", help="write a safetensors file in another dtype, streaming")
    one.add_argument("source", metavar="IN")
    one.add_argument("path", metavar="OUT")
    one.add_argument("--dtype", required=True, help="bf16, f16, f32, e4m3, e5m2, ...")
    one.add_argument("--keep", action="append", default=[], metavar="PATTERN", help="tensors that keep their dtype")
    one.add_argument("--on-overflow", choices=ON_OVERFLOW, default="error", help="numbers that don't fit")
    one.set_defaults(run=_convert)

    one = commands.add_parser("inspect", help="names, shapes, dtypes, bytes, extremes; what each would survive")
    one.add_argument("path", metavar="FILE")
    one.set_defaults(run=_inspect)

    one = commands.add_parser("doctor", help="devices, dtypes, what `auto` picks, versions")
    one.set_defaults(run=_doctor)
    return parser


_COLUMNS = ("tensor", "shape", "dtype", "bytes", "lowest", "highest", "smallest", "NaN, inf", "survives")


def _convert(given: argparse.Namespace) -> None:
    with _progress(given.source) as advance:
        report = convert(given.source, given.path, given.dtype, given.keep, given.on_overflow, advance)
    print(report)


def _inspect(given: argparse.Namespace) -> None:
    with _progress(given.path) as advance:
        tensors, metadata = inspect(given.path, advance)
    table = Table(*_COLUMNS, box=None)
    for name, found in tensors.items():
        table.add_row(*(Text(cell) for cell in _row(name, found)))
    _wide().print(table)
    print(f"{len(tensors)} tensors, {sum(found.spec.nbytes for found in tensors.values()) / 1e6:.3g} MB")
    for key, text in metadata.items():
        print(f"{key}: {text}")


def _row(name: str, found: Extremes) -> tuple[str, ...]:
    spec = found.spec
    number = lambda x: "" if x is None else f"{x:.4g}"  # noqa: E731
    shape = "x".join(map(str, spec.shape)) or "scalar"
    extremes = (number(found.lowest), number(found.highest), number(found.smallest))
    return name, shape, spec.dtype.name, str(spec.nbytes), *extremes, str(found.nonfinite), ", ".join(found.survives)


def _doctor(given: argparse.Namespace) -> None:
    found = diagnose()
    table = Table(box=None, show_header=False)
    for device, count in found.devices.items():
        table.add_row("device", f"{count} x {device}")
    for name, how in found.dtypes.items():
        table.add_row(name, how)
    table.add_row("auto", found.auto)
    table.add_row("", found.why)
    for package, number in found.versions.items():
        table.add_row(package, number)
    _wide().print(table)


def _wide() -> Console:
    """A console that cuts no line, whoever reads it: names have to come out whole."""
    return Console(width=None if sys.stdout.isatty() else 10_000)


@contextmanager
def _progress(path: str) -> Generator[Advance]:
    """A bar of bytes on standard error, if someone looks at it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(os.path.basename(path), total=os.path.getsize(path))
        yield lambda count: bar.advance(task, count)
