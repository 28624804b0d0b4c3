"""wrap tells what it is given."""

import flax.linen as nn
import jax.numpy as jnp
import pytest
from flax import nnx

import amp_jax as amp


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Dense, "Make an instance first"),
        (nnx.Linear, "Make an instance first"),
        (jnp.tanh, "amp.autocast"),
        ({"w": 1}, "amp.autocast"),
    ],
)
def test_what_is_no_module_is_told_where_to_go(module, says):
    with pytest.raises(amp.AmpTypeError, match=says):
        amp.wrap(module, "mixed_bfloat16")


@pytest.mark.parametrize("make", [lambda: nn.Dense(2), lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
def test_a_module_is_wrapped_once(make):
    with pytest.raises(amp.AmpValueError, match="is wrapped already.*override"):
        amp.wrap(amp.wrap(make(), "mixed_bfloat16"), "mixed_float16")


def test_an_unknown_policy_is_named_at_once():
    with pytest.raises(amp.AmpValueError, match="bf61"):
        amp.wrap(nn.Dense(2), "bf61")
