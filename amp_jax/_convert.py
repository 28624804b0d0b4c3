"""Files of weights to files of weights: converted as they stream by, or looked at, never whole in memory."""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from amp_jax import _dtypes
from amp_jax import _safetensors as st
from amp_jax._narrowing import Loss, narrowed
from amp_jax._save_report import SaveReport
from amp_jax._saving import cast_to, file_dtype
from amp_jax._weights_file import Stream, check_on_overflow, matching, write

Advance = Callable[[int], None]
"""Called with the number of bytes that were just read."""

CANDIDATES = tuple(_dtypes.parse(name) for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"))


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    dtype: Any,
    keep: Any = (),
    on_overflow: str = "error",
    advance: Advance = lambda _: None,
) -> SaveReport:
    """Write a file's tensors to another file (or the same one) in another dtype.

    As in `save_params` floats alone are cast, float8 excepted, and the rest of the header stays.

    Args:
        source: A safetensors file of any size.
        path: Where to write.
        dtype: The floating dtype to have.
        keep: Globs on names of tensors that keep their dtype.
        on_overflow: "error", "clip" or "allow".
        advance: Told how far it has got.

    Raises:
        AmpValueError: The file is malformed, or numbers don't fit.
        OSError: A file can't be read or written.
    """
    check_on_overflow(on_overflow)
    target = file_dtype(dtype)
    with open(source, "rb") as file:
        header = st.read_header(file, str(source))
        kept = matching(header.specs, keep, "keep")
        specs = {n: s if n in kept else s._replace(dtype=cast_to(s.dtype, target)) for n, s in header.specs.items()}
        placed = st.laid_out(specs)
        read = lambda name: _told(st.read_chunks(file, header, name), advance)  # noqa: E731
        streams = (Stream(name, header.specs[name].dtype, read(name)) for name in placed)
        return write(path, placed, streams, header.metadata, on_overflow)


def _told(chunks: Iterator[np.ndarray[Any, Any]], advance: Advance) -> Iterator[np.ndarray[Any, Any]]:
    for chunk in chunks:
        yield chunk
        advance(chunk.nbytes)


class Extremes(NamedTuple):
    """What there is to know of a tensor's numbers before casting them.

    Attributes:
        spec: Its dtype and shape.
        lowest: The least finite number; None where there is none, or the tensor isn't of floats.
        highest: The greatest.
        smallest: The least absolute value that isn't zero.
        nonfinite: How many are NaN or infinite.
        survives: The dtypes in which none overflows or becomes zero.
    """

    spec: st.Spec
    lowest: float | None = None
    highest: float | None = None
    smallest: float | None = None
    nonfinite: int = 0
    survives: tuple[str, ...] = ()


def inspect(
    path: str | os.PathLike[str], advance: Advance = lambda _: None
) -> tuple[dict[str, Extremes], dict[str, str]]:
    """A file's tensors, by name, and its metadata.

    Raises:
        AmpValueError: The file is malformed.
    """
    with open(path, "rb") as file:
        header = st.read_header(file, str(path))
        found: dict[str, Extremes] = {}
        for name, spec in header.specs.items():
            if jnp.issubdtype(spec.dtype, np.floating):
                found[name] = _extremes(spec, _told(st.read_chunks(file, header, name), advance))
            else:
                found[name] = Extremes(spec)
                advance(spec.nbytes)
        return found, header.metadata


def _extremes(spec: st.Spec, chunks: Iterator[np.ndarray[Any, Any]]) -> Extremes:
    lowest = highest = smallest = None
    nonfinite = 0
    losses = dict.fromkeys(CANDIDATES, Loss())
    for chunk in chunks:
        numbers = chunk.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        nonfinite += numbers.size - finite.size
        sizes = np.abs(finite[finite != 0])
        if finite.size:
            lowest = min(float(finite.min()), np.inf if lowest is None else lowest)
            highest = max(float(finite.max()), -np.inf if highest is None else highest)
        if sizes.size:
            smallest = min(float(sizes.min()), np.inf if smallest is None else smallest)
        for dtype in CANDIDATES:
            for _, loss in narrowed([chunk], dtype):
                losses[dtype] = losses[dtype].plus(loss)
    survives = tuple(d.name for d, loss in losses.items() if not loss.overflowed and not loss.flushed)
    return Extremes(spec, lowest, highest, smallest, nonfinite, survives)
