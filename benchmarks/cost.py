"""What a compiled program costs on an H100, by a model simple enough to trust.

Every *kernel*, an instruction of the scheduled program that does work, takes max(bytes / bandwidth, flops / peak of its
dtype), and kernels run one after the other. Loops count their known trip count.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.hlo import Computation, Instruction, Module, Product, parse, product, products_in

BANDWIDTH = 3.35e12
"""Bytes a second of an H100 SXM."""

PEAK = {
    # Dense tensor-core rates of NVIDIA's datasheet (SXM). float32 products run as TF32, JAX's default on this chip.
    **dict.fromkeys(("f32", "tf32"), 494e12),
    **dict.fromkeys(("bf16", "f16"), 989e12),
    **dict.fromkeys(("f8e4m3fn", "f8e5m2"), 1979e12),
    "f64": 67e12,
}
LAUNCH = 2e-6
"""Seconds between two kernels; not part of the modelled time."""

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("partition-id", "replica-id"),
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass
class Cost:
    """Sums over one run of a program.

    Attributes:
        temp: bytes of temporaries at the peak, as XLA assigned them.
        arguments: bytes of the arguments.
        hbm: bytes that all kernels read and write.
        flops: of matrix products, by dtype.
        kernels: how many run.
        seconds: the modelled time.
        converts: convert instructions in the text, fused ones included.
        convert_kernels: kernels that do nothing but convert.
        collectives: how many of each kind run.
        hlo: the program's text.
    """

    temp: int = 0
    arguments: int = 0
    hbm: float = 0.0
    flops: Counter[str] = field(default_factory=Counter[str])
    kernels: float = 0.0
    seconds: float = 0.0
    converts: int = 0
    convert_kernels: float = 0.0
    collectives: Counter[str] = field(default_factory=Counter[str])
    hlo: str = field(default="", repr=False)

    @property
    def launch(self) -> float:
        """Seconds of launch gaps, which `seconds` leaves out."""
        return self.kernels * LAUNCH

    def __str__(self) -> str:
        flops = ", ".join(f"{dtype} {count / 1e9:.0f}" for dtype, count in sorted(self.flops.items()))
        return (
            f"temp {self.temp / 1e6:.1f} MB, hbm {self.hbm / 1e6:.1f} MB, gflop [{flops}], "
            f"kernels {self.kernels:.0f}, model {self.seconds * 1e3:.3f} ms, "
            f"converts {self.converts} (alone {self.convert_kernels:.0f})"
        )


def cost_of_compiled(compiled: Any) -> Cost:
    """The cost of what `jax.jit(f).lower(...).compile()` gives, with XLA's own buffer assignment."""
    memory = compiled.memory_analysis()
    cost = cost_of_text(compiled.as_text())
    cost.temp, cost.arguments = memory.temp_size_in_bytes, memory.argument_size_in_bytes
    return cost


def cost_of_text(text: str) -> Cost:
    """The cost of a program's text; memory is not in there."""
    cost = Cost(hlo=text, converts=text.count(" convert("))
    module = parse(text)
    add_computation(cost, module, module.entry, 1.0)
    return cost


def add_computation(cost: Cost, module: Module, name: str, times: float) -> None:
    computation = module.computations[name]
    for one in computation.values():
        if one.op in FREE or one.op.endswith("-done"):
            continue
        if one.op == "while":
            trips = one.attribute(r'known_trip_count":\{"n":"(\d+)"')
            for body in one.called("body"):
                add_computation(cost, module, body, times * (int(trips) if trips else 1))
        elif one.op in ("call", "conditional", "async-start"):
            for callee in one.called("to_apply", "calls", "true_computation", "false_computation"):
                add_computation(cost, module, callee, times)
        else:
            add_kernel(cost, module, computation, one, times)


def add_kernel(cost: Cost, module: Module, computation: Computation, one: Instruction, times: float) -> None:
    moved = traffic(module, computation, one)
    busy = 0.0
    for each in products_of_kernel(module, computation, one):
        cost.flops[each.dtype] += int(each.flops * times)
        busy += each.flops / PEAK.get(each.dtype, PEAK["f64"])
    cost.collectives.update({kind: int(times) for kind in COLLECTIVES if one.op.startswith(kind)})
    cost.convert_kernels += times * sum(only_converts(module, callee) for callee in one.called("calls"))
    cost.hbm += moved * times
    cost.kernels += times
    cost.seconds += max(moved / BANDWIDTH, busy) * times


def products_of_kernel(module: Module, computation: Computation, one: Instruction) -> list[Product]:
    alone = product(computation, one)
    return [alone] if alone else [each for callee in one.called("calls") for each in products_in(module, callee)]


def only_converts(module: Module, name: str) -> bool:
    ops = {one.op for one in module.computations[name].values()} - FREE
    return "convert" in ops and ops <= {"convert", "transpose", "copy", "reshape"}


def traffic(module: Module, computation: Computation, one: Instruction) -> int:
    """Bytes that a kernel reads and writes."""
    read = [computation[name].bytes if name in computation else 0 for name in one.operands]
    if one.op == "dynamic-slice":
        return 2 * one.bytes
    if one.op == "dynamic-update-slice":
        return 2 * read[1]
    callee = one.attribute(r"calls=%?([\w.\-]+)")
    if one.op in ("fusion", "fusion-start") and callee in module.computations:
        return fusion_traffic(module.computations[callee], read)
    return sum(read) + one.bytes


def fusion_traffic(body: Computation, read: list[int]) -> int:
    """A fusion reads only the slice of an operand that it slices, and an update in place writes only the update."""
    # An asynchronous start names its operands in its own result too, so what is written is asked of the body.
    written = next(reversed(body.values())).bytes
    for parameter in body.values():
        users = [one for one in body.values() if one.op != "parameter" and parameter.name in one.operands]
        found = re.search(r"parameter\((\d+)\)", parameter.text) if parameter.op == "parameter" else None
        if found is None or not users or any(one.operands[0] != parameter.name for one in users):
            continue
        if all(one.op == "dynamic-slice" for one in users):
            read[int(found.group(1))] = sum(one.bytes for one in users)
        elif all(one.op == "dynamic-update-slice" for one in users):
            written += sum(body[one.operands[1]].bytes - one.bytes for one in users)
            read[int(found.group(1))] = 0
    return sum(read) + max(written, 0)
