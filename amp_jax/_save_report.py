"""What saving did to each tensor, and the words for it."""

from typing import NamedTuple

from amp_jax._narrowing import Loss


class SavedTensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        shape: Its shape.
        source: The dtype that it had.
        dtype: The dtype that it has in the file.
        bytes: How many bytes it takes there.
        overflowed: How many of its numbers the dtype couldn't hold.
        flushed: How many became zero.
        largest_relative_error: Of its other numbers.
    """

    shape: tuple[int, ...]
    source: str
    dtype: str
    bytes: int
    overflowed: int
    flushed: int
    largest_relative_error: float


class SaveReport(NamedTuple):
    """What `save_params` wrote; prints as a table.

    >>> import amp_jax as amp, jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = amp.save_params(f"{folder}/w.safetensors", {"w": jnp.array([1.0, 1e-9])}, "float16")
    >>> report.tensors["w"].dtype, report.totals
    ('float16', {'tensors': 1, 'bytes': 4, 'overflowed': 0, 'flushed': 1})

    Attributes:
        path: The file.
        tensors: What became of each tensor, by name.
    """

    path: str
    tensors: dict[str, SavedTensor]

    @property
    def totals(self) -> dict[str, int]:
        """`tensors`, `bytes`, `overflowed` and `flushed` of the whole file."""
        held = self.tensors.values()
        counts = {key: sum(getattr(t, key) for t in held) for key in ("bytes", "overflowed", "flushed")}
        return {"tensors": len(self.tensors), **counts}

    @property
    def largest_relative_error(self) -> float:
        """Over all tensors."""
        return max((t.largest_relative_error for t in self.tensors.values()), default=0.0)

    def __str__(self) -> str:
        """The totals, then one line for each tensor."""
        total = self.totals
        lost = f"{total['overflowed']} overflowed, {total['flushed']} flushed to zero"
        lines = [
            f"{self.path}: {total['tensors']} tensors, {total['bytes'] / 1e6:.3g} MB; {lost}; "
            f"largest relative error {self.largest_relative_error:.1e}"
        ]
        rows = [("tensor", "shape", "dtype", "bytes", "overflowed", "flushed", "largest error")]
        rows += [_row(name, tensor) for name, tensor in self.tensors.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        left = lambda row: [cell.ljust(w) for cell, w in zip(row[:3], widths[:3], strict=True)]  # noqa: E731
        right = lambda row: [cell.rjust(w) for cell, w in zip(row[3:], widths[3:], strict=True)]  # noqa: E731
        return "\n".join([*lines, *("  ".join(left(row) + right(row)) for row in rows)])


def _row(name: str, t: SavedTensor) -> tuple[str, ...]:
    dtypes = t.dtype if t.source == t.dtype else f"{t.source} -> {t.dtype}"
    numbers = (str(t.bytes), str(t.overflowed), str(t.flushed), f"{t.largest_relative_error:.1e}")
    return name, "x".join(map(str, t.shape)) or "scalar", dtypes, *numbers


def saved(shape: tuple[int, ...], source: str, dtype: str, nbytes: int, loss: Loss) -> SavedTensor:
    """The entry for a tensor."""
    return SavedTensor(tuple(shape), source, dtype, nbytes, *loss)


def refused(path: str, tensors: dict[str, SavedTensor], verb: str) -> str:
    """The error for numbers that a dtype can't hold: every tensor that has some, and how many."""
    lost = [f"{name}: {t.overflowed} of {t.source} overflow {t.dtype}" for name, t in tensors.items() if t.overflowed]
    return (
        f"{path} was not {verb}: {'; '.join(lost)}. Choose a dtype with more range such as 'bfloat16', exempt tensors "
        "with `keep`, or say on_overflow='clip' (to the largest number) or 'allow' (inf, or NaN in float8)."
    )
