"""What `auto` stands for on each kind of device."""

import pytest

from amp_jax._device import choose


@pytest.mark.parametrize(
    ("platform", "capability", "name"),
    [("tpu", None, "bfloat16"), ("cpu", None, "bfloat16"), ("gpu", "9.0", "bfloat16"), ("cuda", "8.0", "bfloat16"),
     ("gpu", "12.0", "bfloat16"), ("gpu", "7.5", "float16"), ("gpu", "7.0", "float16"), ("gpu", "6.1", "float32"),
     ("rocm", "gfx90a", "bfloat16"), ("gpu", "gfx90a", "bfloat16")],
)  # fmt: skip
def test_auto_by_device(platform, capability, name):
    assert choose(platform, capability).name == name
