"""What this machine makes of the dtypes: devices, which dtypes they have matrix units for, and what `auto` picks.

*Native* is a dtype that the device multiplies matrices in; *emulated* one that it computes in by way of another; *none*
one that it can't multiply in at all.
"""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from amp_jax import _dtypes
from amp_jax._policy import get_policy

PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp", "numpy", "ml_dtypes", "orbax-checkpoint")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64")

# The first compute capability whose tensor cores, or for float32 and float64 whose cores, take the dtype: NVIDIA's
# CUDA C++ programming guide, "Compute capabilities".
_NVIDIA = {
    "float32": 1.0, "float64": 1.3, "float16": 7.0, "bfloat16": 8.0, "float8_e4m3fn": 8.9, "float8_e5m2": 8.9,
}  # fmt: skip
_X86 = {"bfloat16": ("amx_bf16", "avx512_bf16"), "float16": ("amx_fp16", "avx512_fp16")}


class Diagnosis(NamedTuple):
    """What `amp-jax doctor` says.

    Attributes:
        versions: Of Python and the packages.
        devices: Each kind of device, and how many there are.
        dtypes: "native", "emulated" or "none" for each dtype, on the default device.
        auto: The policy that `auto` stands for here.
        why: And why.
    """

    versions: dict[str, str]
    devices: dict[str, int]
    dtypes: dict[str, str]
    auto: str
    why: str


def diagnose() -> Diagnosis:
    """Ask the devices; this starts the backend."""
    (device,) = jnp.zeros(()).devices()
    devices: dict[str, int] = {}
    for one in jax.devices():
        devices[_described(one)] = devices.get(_described(one), 0) + 1
    policy = get_policy("auto").resolve()
    dtypes = {name: support(device, name) for name in DTYPES}
    return Diagnosis(_versions(), devices, dtypes, str(policy), _why(device, _dtypes.name(policy.compute_dtype)))


def _why(device: Any, chosen: str) -> str:
    """The reason for what `_device.choose` chooses."""
    if device.platform == "tpu":
        return "the matrix units of a TPU take bfloat16, which has the range of float32"
    if device.platform != "gpu":
        return "no loss scale is needed in bfloat16; on a CPU it shows what other devices compute and may save no time"
    return {
        "bfloat16": "the tensor cores take bfloat16, which has the range of float32",
        "float16": "the tensor cores take float16 but, before compute capability 8.0, not bfloat16",
        "float32": "before compute capability 7.0 there are no tensor cores, so that half precision saves little",
    }[chosen]


def support(device: Any, name: str) -> str:
    """Whether a device multiplies matrices in a dtype: native, emulated or none."""
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        return "none (jax_enable_x64 is off)"
    try:
        x = jax.device_put(jnp.ones((16, 16), _dtypes.parse(name)), device)
        jax.block_until_ready(jnp.dot(x, x))
    except (RuntimeError, TypeError, ValueError):  # a backend's ways to say that it can't; JAX's own error is the first
        return "none"
    return "native" if is_native(device, name) else "emulated"


def is_native(device: Any, name: str) -> bool:
    """Whether a device has units for products in a dtype."""
    if device.platform == "gpu":
        capability = str(getattr(device, "compute_capability", ""))
        if capability.replace(".", "", 1).isdecimal():
            return float(capability) >= _NVIDIA[name]
        # AMD's cards name an architecture, and their matrix cores differ in float8.
        return not name.startswith("float8")
    if device.platform == "tpu":
        return name in ("float32", "bfloat16")
    return name in ("float32", "float64") or any(flag in _cpu_flags() for flag in _X86.get(name, ()))


def _cpu_flags() -> frozenset[str]:
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def _described(device: Any) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.platform} {device.device_kind}" + (f" (compute capability {capability})" if capability else "")


def _versions() -> dict[str, str]:
    from amp_jax import __version__  # it is set after this file may be imported

    found = {"python": platform.python_version(), "amp-jax": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
