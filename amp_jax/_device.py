"""What `auto` stands for: the half dtype that a device is good at."""

from typing import Any

import jax
import numpy as np

from amp_jax import _dtypes


def choose(platform: str, compute_capability: str | None) -> np.dtype[Any]:
    """The compute dtype that a device is good at.

    >>> choose("gpu", "7.5"), choose("gpu", "9.0")
    (dtype('float16'), dtype(bfloat16))

    Args:
        platform: JAX's name: cpu, gpu, cuda, rocm, tpu.
        compute_capability: NVIDIA's, such as "8.0"; None for other devices.
    """
    bfloat16 = _dtypes.parse("bfloat16")
    if platform not in ("gpu", "cuda") or compute_capability is None:
        return bfloat16
    try:
        major = int(compute_capability.partition(".")[0])
    except ValueError:  # AMD's cards name an architecture, such as gfx90a
        return bfloat16
    if major >= 8:
        return bfloat16
    return np.dtype(np.float16) if major == 7 else np.dtype(np.float32)


def device_dtype() -> np.dtype[Any]:
    """What `choose` says of the default device; asking starts the backend."""
    device: Any = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return choose(device.platform, getattr(device, "compute_capability", None))
