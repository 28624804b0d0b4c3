"""Writing tensors to a file in dtypes of their own: cast as they stream by, counted, and refused if they don't fit."""

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from amp_jax import _safetensors as st
from amp_jax._atomic import replacing
from amp_jax._dtypes import suggest
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._narrowing import Loss, narrowed
from amp_jax._rule import Rule
from amp_jax._save_report import SavedTensor, SaveReport, refused, saved

ON_OVERFLOW = ("error", "clip", "allow")


class Stream(NamedTuple):
    """A tensor on its way to a file.

    Attributes:
        name: Its name.
        source: The dtype that it has.
        chunks: Its numbers, flat and in order.
    """

    name: str
    source: np.dtype[Any]
    chunks: Iterable[np.ndarray[Any, Any]]


def write(
    path: str | os.PathLike[str],
    placed: Mapping[str, st.Spec],
    streams: Iterable[Stream],
    metadata: Mapping[str, str],
    on_overflow: str,
) -> SaveReport:
    """Write the tensors, or refuse and leave what was at the path.

    Args:
        path: The file.
        placed: The dtype, shape and place that each gets, from `_safetensors.laid_out`.
        streams: The tensors, in the order of `placed`.
        metadata: Strings for the header.
        on_overflow: "error", "clip" or "allow".

    Raises:
        AmpValueError: `on_overflow` is "error", and there are numbers that don't fit.
        OSError: The file can't be written.
    """
    report: dict[str, SavedTensor] = {}
    with replacing(path) as file:
        file.write(st.header_bytes(placed, metadata))
        fits = True
        for stream in streams:
            spec, loss = placed[stream.name], Loss()
            for values, lost in narrowed(stream.chunks, spec.dtype, clip=on_overflow == "clip"):
                loss = loss.plus(lost)
                # Once one doesn't fit, the rest is only counted, so that the error lists all.
                fits = fits and (on_overflow != "error" or not loss.overflowed)
                if fits:
                    st.write_chunks(file, [values])
            report[stream.name] = saved(spec.shape, stream.source.name, spec.dtype.name, spec.nbytes, loss)
        if not fits:
            raise AmpValueError(refused(str(path), report, "saved"))
    return SaveReport(str(path), report)


def check_on_overflow(on_overflow: Any) -> None:
    """Raise unless it is one of the three words."""
    if on_overflow not in ON_OVERFLOW:
        raise AmpValueError(f"`on_overflow` is {on_overflow!r}. {suggest(str(on_overflow), ON_OVERFLOW)}")


def matching(names: Iterable[str], patterns: Any, argument: str) -> set[str]:
    """The names that a glob covers: as policy rules do, with or without the linen collection in front.

    Args:
        names: The names of all tensors.
        patterns: A glob or several; one that covers a module covers what is in it.
        argument: What they are for; errors name it.

    Raises:
        AmpTypeError: A pattern is no string.
        AmpValueError: A pattern matches no name.
    """
    known = list(names)
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else tuple(patterns):
        if not isinstance(pattern, str):
            raise AmpTypeError(f"`{argument}` holds {pattern!r}, expected a glob on names such as '**/norm/*'.")
        rule = Rule(pattern)
        covered = {name for name in known if rule.covers(name) or rule.covers(name.removeprefix("params/"))}
        if not covered:
            near = difflib.get_close_matches(pattern, known, n=5, cutoff=0)
            raise AmpValueError(
                f"`{argument}` has {pattern!r}, which matches none of {len(known)} names. The nearest are: "
                f"{', '.join(near)}. `*` stays between two slashes, `**` crosses them."
            )
        found |= covered
    return found
