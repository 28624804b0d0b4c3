"""What a program compiled for several devices sends between them."""

from collections import Counter
from typing import NamedTuple

from benchmarks.cost import COLLECTIVES
from benchmarks.hlo import parse


class Collective(NamedTuple):
    """A collective's kind, the dtype that it works on and how many numbers each device gives."""

    kind: str
    dtype: str
    size: int


def read(text: str) -> list[list[Collective]]:
    """Those of a program's text: one list for each instruction, which may work on several arrays at once."""
    found = []
    for computation in parse(text).computations.values():
        for one in computation.values():
            kind = next((kind for kind in COLLECTIVES if one.op in (kind, f"{kind}-start")), None)
            if kind:
                arrays = [shape for name in one.operands for shape in computation[name].shapes]
                found.append([Collective(kind, shape.dtype, shape.size) for shape in arrays])
    return found


def moved(of: list[list[Collective]]) -> Counter[tuple[str, str]]:
    """How many numbers of each dtype all collectives of a kind work on."""
    count: Counter[tuple[str, str]] = Counter()
    for one in of:
        for array in one:
            count[array.kind, array.dtype] += array.size
    return count
