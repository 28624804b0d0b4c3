"""What is counted as kept for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from amp_jax._residuals import residuals, saved_bytes

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
ONE = 4 * 8 * 4  # the bytes of one float32 array of that shape


def test_two_calls_of_one_jitted_function_keep_a_value_each():
    sin = jax.jit(jnp.sin)
    assert saved_bytes(lambda x: sin(sin(x)), [X])[np.dtype("float32")] == 2 * ONE


def test_a_name_is_no_second_value():
    def named(x):
        y = jnp.sin(x)
        return checkpoint_name(y, "y") * y  # keeps both of its operands, which are one

    assert saved_bytes(named, [X])[np.dtype("float32")] == 2 * ONE  # that, and the derivative of sin


def test_the_scope_of_what_a_loop_keeps_is_that_inside_of_it():
    def loop(x):
        def body(c, _):
            with jax.named_scope("inner"):
                return jnp.sin(c), None

        with jax.named_scope("outer"):
            return jax.lax.scan(body, x, None, length=3)[0]

    (kept,) = residuals(loop, [X])
    assert kept.bytes == 3 * ONE
    assert kept.scope.index("outer") < kept.scope.index("inner")
