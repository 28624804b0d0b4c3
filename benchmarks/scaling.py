"""What loss scaling adds to a float16 training step (gpt, AdamW), compiled for an H100: each against the plain step.

    python -m benchmarks.scaling                # peers
    python -m benchmarks.scaling amp_jax        # peers and ours

Exits with 1 where ours costs more than it may.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

from benchmarks.cost import Cost
from benchmarks.h100 import compile_cost
from benchmarks.workloads import workload

TX = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), TX)
SAFE = optax.apply_if_finite(TX, 1000)
INIT, LOSS, BATCH = workload("gpt", jnp.float16)

ALLOWED = {"hbm": 1.0065, "kernels": 1.19, "clipped kernels": 1.03}


class Step(NamedTuple):
    """A training step `run(params, state, tokens)`, and the state that it begins with."""

    run: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    init: Callable[[Any], Any]


def select(ok: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)


def plain(tx: Any) -> Step:
    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        value, g = jax.value_and_grad(LOSS)(p, t)
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return Step(run, tx.init)


def flax_dynamic_scale() -> Step:
    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        s, scale = s
        scale, ok, value, g = scale.value_and_grad(LOSS)(p, t)
        u, new = TX.update(g, s, p)
        return select(ok, optax.apply_updates(p, u), p), (select(ok, new, s), scale), value

    # Arrays for its two leaves, which it declares as Python numbers: with those it would compile a second time.
    state: Any = DynamicScale
    return Step(run, lambda p: (TX.init(p), state(fin_steps=jnp.int32(0), scale=jnp.float32(65536))))


def jmp_dynamic() -> Step:
    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        s, scale = s
        value, g = jax.value_and_grad(lambda p: scale.scale(LOSS(p, t)))(p)
        g = scale.unscale(g)
        ok = jmp.all_finite(g)
        u, new = TX.update(g, s, p)
        return select(ok, optax.apply_updates(p, u), p), (select(ok, new, s), scale.adjust(ok)), value

    return Step(run, lambda p: (TX.init(p), jmp.DynamicLossScale(jnp.float32(2**15))))


def apply_if_finite() -> Step:
    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        value, g = jax.value_and_grad(lambda p: 2.0**15 * LOSS(p, t))(p)
        g = jax.tree.map(lambda x: x / 2.0**15, g)
        u, s = SAFE.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return Step(run, SAFE.init)


def ours(tx: Any) -> Step:
    import amp_jax as amp

    scaled = amp.dynamic_loss_scaling(tx)

    def run(p: Any, s: Any, t: Any) -> tuple[Any, Any, Any]:
        value, g = amp.value_and_grad(LOSS, s)(p, t)
        u, s = scaled.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return Step(run, scaled.init)


def cost(step: Step) -> Cost:
    params = jax.eval_shape(INIT, jax.random.key(0))
    return compile_cost(step.run, params, jax.eval_shape(step.init, params), *BATCH, donate_argnums=(0, 1))


def conditionals(one: Cost) -> int:
    return one.hlo.count(" conditional(")


def report(name: str, one: Cost, base: Cost) -> Cost:
    print(
        f"{name:18s} hbm x{one.hbm / base.hbm:.4f} kernels x{one.kernels / base.kernels:.3f} "
        f"model x{one.seconds / base.seconds:.4f} temp x{one.temp / base.temp:.3f} conditional {conditionals(one)}",
        flush=True,
    )
    return one


def report_peers(base: Cost) -> None:
    report("flax DynamicScale", cost(flax_dynamic_scale()), base)
    try:
        report("jmp", cost(jmp_dynamic()), base)
    except TypeError as error:  # it can't be lowered from shapes, which is a result too
        print(f"{'jmp':18s} fails: {repr(error)[:140]}", flush=True)
    report("apply_if_finite", cost(apply_if_finite()), base)


def report_ours(base: Cost) -> int:
    base_clipped = cost(plain(CLIPPED))
    report("plain f16, clipped", base_clipped, base_clipped)
    clipped = report("amp_jax, clipped", cost(ours(CLIPPED)), base_clipped)
    one = report("amp_jax", cost(ours(TX)), base)
    ratios = {
        "hbm": one.hbm / base.hbm,
        "kernels": one.kernels / base.kernels,
        "clipped kernels": clipped.kernels / base_clipped.kernels,
    }
    print("; ".join(f"{name} x{ratio:.4f} (at most {ALLOWED[name]})" for name, ratio in ratios.items()))
    over = any(ratio > ALLOWED[name] for name, ratio in ratios.items())
    return int(over or conditionals(one) + conditionals(clipped) > 0)


def main(arguments: list[str]) -> int:
    base = cost(plain(TX))
    report("plain f16", base, base)
    report_peers(base)
    return report_ours(base) if "amp_jax" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
