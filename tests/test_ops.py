"""The category table: every primitive of the supported JAX versions is placed, or opaque on purpose."""

from pathlib import Path

import jax.extend.core.primitives as known
import pytest

from amp_jax._ops import CATEGORIES, OPS

# What has a lowering on jax 0.10.2, 0.12.0 or 0.12.1; several of these aren't public.
LOWERED = Path(__file__).with_name("data").joinpath("primitives.txt").read_text().split()
PRIMITIVES = sorted({p.name for p in vars(known).values() if hasattr(p, "multiple_results")} | set(LOWERED))


def test_there_are_primitives_to_place():
    assert len(PRIMITIVES) > 280


@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_primitive_is_placed(name):
    assert OPS[name][0] in CATEGORIES


def test_nothing_is_listed_twice():
    from amp_jax._ops import _TABLE

    names = [name for listed in _TABLE.values() for name in listed.split()]
    assert len(names) == len(set(names))
