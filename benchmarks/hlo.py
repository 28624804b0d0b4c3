"""Read a compiled program's text: which instructions run, on which shapes, and what its matrix products are.

HLO is XLA's assembly: a *module* holds *computations*, one of them the entry, each a list of *instructions*. A
*product* is a dot or a convolution, alone, inside a fusion, or as a call to cuBLAS or cuDNN.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
    "token": 0,
}
"""Bytes of one element."""

SHAPE = re.compile(r"\b(" + "|".join(BYTES) + r")\[([\d,]*)\]")
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
ASSIGNMENT = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.+)$")
OPERATION = re.compile(r"(?:^|\s|\))([a-z][a-z0-9\-]*)\(")
NAME = re.compile(r"%([\w.\-]+)")


class Shape(NamedTuple):
    """An array's dtype, in HLO's spelling, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype] * self.size


class Instruction(NamedTuple):
    """One line: `name = shapes op(operands), attributes`. `text` is all that follows the equals sign."""

    name: str
    op: str
    text: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.text)
        return found and found.group(1)

    def called(self, *keys: str) -> list[str]:
        """The computations that it names under any of the attributes."""
        return re.findall(rf"(?:{'|'.join(keys)})=%?([\w.\-]+)", self.text)


Computation = dict[str, Instruction]
"""Instructions by name, in the order in which they stand; the last one is the result."""


class Module(NamedTuple):
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str


class Product(NamedTuple):
    """A dot or a convolution: the shapes of its operands and its result, and its floating-point operations."""

    instruction: Instruction
    lhs: Shape
    rhs: Shape
    out: Shape
    flops: float

    @property
    def dtype(self) -> str:
        """The dtype whose rate the hardware runs it at: the narrower operand's."""
        return self.lhs.dtype if BYTES[self.lhs.dtype] <= BYTES[self.rhs.dtype] else self.rhs.dtype


def shapes(text: str) -> tuple[Shape, ...]:
    return tuple(Shape(t, tuple(int(n) for n in dims.split(",") if n)) for t, dims in SHAPE.findall(text))


def parse(text: str) -> Module:
    """The module that `compiled.as_text()` prints."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = computations.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := ASSIGNMENT.match(line)):
            current[found.group(1)] = instruction(found.group(1), found.group(2))
    return Module(computations, entry)


def instruction(name: str, text: str) -> Instruction:
    found = OPERATION.search(text)
    if found is None:
        return Instruction(name, "?", text, shapes(text), ())
    return Instruction(name, found.group(1), text, shapes(text[: found.start(1)]), operands(text[found.end() :]))


def operands(text: str) -> tuple[str, ...]:
    """Names up to the bracket that closes the argument list, which may hold brackets itself."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return tuple(NAME.findall(text[:position]))
    return tuple(NAME.findall(text))


def product(computation: Computation, one: Instruction) -> Product | None:
    """What the instruction multiplies; None where it is no product."""
    target = one.attribute(r'custom_call_target="__(\w+\$[\w$]+)"') or ""
    if one.op == "dot":
        contracted = one.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    elif target.startswith("cublas$"):
        contracted = (one.attribute(r'"lhs_contracting_dimensions":\[([\d",]*)\]') or "").replace('"', "")
    elif one.op == "convolution" or target.startswith("cudnn$conv"):
        return convolution(computation, one, target.removeprefix("cudnn$conv"))
    else:
        return None
    lhs, rhs = (computation[name].shapes[0] for name in one.operands[:2])
    out = one.shapes[0]
    inner = math.prod(lhs.dims[int(axis)] for axis in contracted.split(",") if axis)
    return Product(one, lhs, rhs, out, 2.0 * out.size * inner)


def convolution(computation: Computation, one: Instruction, kind: str) -> Product:
    """Every element of what plays the output takes one multiply-add for each kernel element and input channel.

    In cuDNN's backward calls the output's part is played by an operand.
    """
    lhs, rhs = (computation[name].shapes[0] for name in one.operands[:2])
    out = one.shapes[0]
    output, kernel = {"BackwardInput": (lhs, rhs), "BackwardFilter": (rhs, out)}.get(kind, (out, rhs))
    labels = one.attribute(r"dim_labels=\w+_(\w+)->\w+") or ""
    inner = math.prod(size for size, label in zip(kernel.dims, labels, strict=True) if label != "o")
    return Product(one, lhs, rhs, out, 2.0 * output.size * inner)


def products_in(module: Module, name: str) -> Iterator[Product]:
    """The products of one computation and of those that its instructions call."""
    computation = module.computations.get(name, {})
    for one in computation.values():
        if found := product(computation, one):
            yield found
        for callee in one.called("calls", "to_apply"):
            yield from products_in(module, callee)


def products(module: Module) -> list[Product]:
    """Every product that stands in the program, a loop's body counted once."""
    found = (product(c, one) for c in module.computations.values() for one in c.values())
    return [one for one in found if one is not None]
