"""What the glob of a rule matches."""

import jax.numpy as jnp
import pytest

import amp_jax as amp


@pytest.mark.parametrize(
    ("key", "path", "covered"),
    [
        ("decoder/head", "decoder/head", True),
        ("decoder/head", "decoder/head/norm", True),  # what is inside a module is covered with it
        ("decoder/head", "decoder/heads", False),
        ("decoder/*", "decoder/head", True),
        ("decoder/*", "decoder", False),
        ("base/**", "base", True),
        ("base/**", "base/a/b", True),
        ("base/**", "database/a", False),
        ("**/norm*", "norm_1", True),
        ("**/norm*", "a/b/norm_out", True),
        ("**/norm*", "a/b/prenorm", False),
        ("layer_[0-3]", "layer_2/dense", True),
        ("layer_?", "layer_12", False),
        ("*", "anything/inside", True),
        ("a.b", "aXb", False),
    ],
)
def test_what_a_key_covers(key, path, covered):
    policy = amp.get_policy("mixed_bfloat16").override({key: "float32"})
    assert (policy.at(path).compute_dtype == jnp.float32) is covered
