"""The program that a plan is made for: a flat list of nodes over numbered values.

A *value* is what an equation reads or gives. Its dtype is the one that it is held in: the compute dtype for a *low*
value, else what the trace says. A *silent* value is a parameter, a constant, an input, or computed from those alone: it
stays float32, and has no say in the dtype of an operation that it takes part in.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_jax._jaxpr import JaxprEqn

FLOAT32 = np.dtype(np.float32)
OUTPUT = -1
"""The user of a value that the program returns, in place of a node's number."""


@dataclass(slots=True)
class Value:
    """What is known of a value while the plan is made."""

    aval: Any
    dtype: np.dtype[Any] | None
    """The dtype that it is held in; None for keys, tokens and refs."""
    silent: bool = False
    numbers: int = 0
    """How many numbers it carries: fewer than it has elements where it was broadcast."""
    peak: float = 0.0
    """The largest constant, in absolute value, that it may hold as it was written: -1e9 in a mask."""
    reduced: bool = False
    """Whether it is a sum or maximum over others, or computed from such alone."""
    constant: Any = None
    """A literal or a small closed-over array, by value."""
    literal: bool = False
    users: list[int] = field(default_factory=list[int])

    @property
    def traced(self) -> bool:
        """Whether it was traced in float32: only then is its dtype ours to choose."""
        return dtype_of(self.aval) == FLOAT32

    @property
    def low(self) -> bool:
        return self.traced and self.dtype != FLOAT32

    @property
    def loud(self) -> bool:
        """Float32 for a reason."""
        return self.traced and self.dtype == FLOAT32 and not self.silent


@dataclass(slots=True)
class Node:
    """An equation, the region that it stands in, and what the plan decides for it."""

    eqn: JaxprEqn
    stack: Any
    """The name stack of the calls that it was inlined from; its own comes after it."""
    calls: tuple[JaxprEqn, ...]
    """These calls, the outermost first."""
    scope: str
    owner: Any
    """The jaxpr that the equation stands in."""
    inputs: list[int]
    outputs: list[int]
    category: str
    reason: str
    low: np.dtype[Any] | None
    """The compute dtype of its region; None where everything stays as traced."""
    run: np.dtype[Any] | None = None
    """The dtype that its float32 operands are read in; None: each as it is held."""
    pinned: bool = False
    """Float32 for a reason of its own, whoever uses it."""
    plans: tuple[Any, ...] = ()
    """For a loop, a branch or a custom rule: the plans of what it holds."""


def dtype_of(aval: Any) -> Any:
    """The dtype of an abstract value; None for a token or a ref."""
    return getattr(aval, "dtype", None)


def size(aval: Any) -> int:
    return int(np.prod(getattr(aval, "shape", ()), dtype=np.int64))


@dataclass(slots=True)
class Graph:
    """A program and the values in it."""

    values: list[Value]
    nodes: list[Node]
    inputs: list[int]
    outputs: list[int]
    constants: dict[int, Any]

    def connect(self) -> None:
        """Tell every value who reads it."""
        for number, node in enumerate(self.nodes):
            for i in node.inputs:
                self.values[i].users.append(number)
        for i in self.outputs:
            self.values[i].users.append(OUTPUT)
