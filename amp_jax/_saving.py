"""save_params: weights in a file, in the dtype asked for.

The file is in the safetensors format. Each leaf of the tree is a tensor in it, whose *name* is the leaf's path
(`_tree_names`). Only floating numbers are ever cast.
"""

import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax import _dtypes
from amp_jax import _safetensors as st
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._jaxpr import is_tracer
from amp_jax._modules import split
from amp_jax._narrowing import flat_chunks
from amp_jax._policy import get_policy
from amp_jax._processes import is_writer, shared, to_host
from amp_jax._save_report import SavedTensor, SaveReport
from amp_jax._tree_names import named
from amp_jax._weights_file import Stream, check_on_overflow, matching, write

VERSION, POLICY, TREE, KEYS = "amp_jax.version", "amp_jax.policy", "amp_jax.tree", "amp_jax.keys"
"""The file's metadata: by what it was written, under which policy, where the tree has lists, which tensors are keys."""


def save_params(
    path: str | os.PathLike[str],
    params: Any,
    dtype: Any = None,
    keep: Any = (),
    on_overflow: str = "error",
    *,
    policy: Any = None,
) -> SaveReport:
    """Save weights as safetensors in the dtype you ask for.

    The live parameters stay as they are. One array at a time comes to the host and is cast there on its way to the
    file, which replaces an older one only when it is whole and on the disk. Integers, bools, complex numbers, PRNG keys
    and float8 are never cast. In a run of several processes call it on all of them: process 0 writes.

    >>> import amp_jax as amp, jax.numpy as jnp, tempfile
    >>> params = {"body": {"w": jnp.full((2, 2), 1 / 3)}, "head": {"w": jnp.ones(2)}, "step": jnp.int32(7)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = amp.save_params(f"{folder}/model.safetensors", params, "bfloat16", keep="head")
    ...     loaded = amp.load_params(f"{folder}/model.safetensors")
    >>> {name: tensor.dtype for name, tensor in report.tensors.items()}
    {'head/w': 'float32', 'step': 'int32', 'body/w': 'bfloat16'}
    >>> loaded["body"]["w"].dtype, loaded["step"].item()
    (dtype(bfloat16), 7)

    Args:
        path: The file, usually `*.safetensors`.
        params: A pytree of arrays; an nnx module stands for its state. Nested dicts, lists and dataclasses, nnx State,
            FrozenDicts, boxed parameters.
        dtype: The floating dtype for the file; None leaves each as it is.
        keep: Globs on names, like the keys of policy rules, for tensors that keep their dtype: `"**/norm*"`.
        on_overflow: What to do with numbers that the dtype can't hold: `"error"` lists them and saves nothing,
            `"clip"` takes the largest number it has, `"allow"` saves inf (NaN where there is no inf).
        policy: A policy, or what `get_policy` takes, to note in the file.

    Returns:
        A `SaveReport`: for each tensor the dtypes and bytes, how many numbers overflowed or were flushed to zero, and
        the largest relative error of the others.

    Raises:
        AmpValueError: Numbers overflow; `keep` matches nothing; `on_overflow` or `dtype` is unknown.
        AmpTypeError: A leaf is no array, or of a dtype that the format doesn't have.
        OSError: The file can't be written. The older one is untouched.

    The format is safetensors' (https://github.com/huggingface/safetensors).
    """
    check_on_overflow(on_overflow)
    target = None if dtype is None else file_dtype(dtype)
    tree = named(split(params)[0])
    if not tree.leaves:
        raise AmpValueError("`params` has no leaves, so there is nothing to save.")
    keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in tree.leaves.items() if is_key(leaf)}
    leaves = {name: _array(name, leaf) for name, leaf in tree.leaves.items()}
    kept = matching(leaves, keep, "keep")
    placed = st.laid_out(
        {
            name: st.Spec(_native(leaf.dtype) if name in kept else cast_to(leaf.dtype, target), leaf.shape)
            for name, leaf in leaves.items()
        }
    )
    metadata = _metadata(policy) | {TREE: tree.containers} | ({KEYS: json.dumps(keys)} if keys else {})
    st.header_bytes(placed, metadata)  # what the format can't hold is found here, before any process waits for another

    def written() -> dict[str, Any]:
        streams = (Stream(name, _native(leaves[name].dtype), flat_chunks(to_host(leaves[name]))) for name in placed)
        try:
            return write(path, placed, streams, metadata, on_overflow).tensors if is_writer() else {}
        finally:
            for _ in streams:  # the other processes wait for this one in each gather, whatever happened here
                pass

    told = shared(written)
    return SaveReport(str(path), {name: SavedTensor(tuple(t[0]), *t[1:]) for name, t in told.items()})


def file_dtype(dtype: Any) -> np.dtype[Any]:
    """Read a dtype that the format has and that numbers can be cast to."""
    target = _dtypes.parse(dtype)
    if target not in st.CODES or target.name == "float8_e8m0fnu":
        floats = [d.name for d in st.CODES if jnp.issubdtype(d, np.floating) and d.name != "float8_e8m0fnu"]
        raise AmpValueError(f"`dtype` is {dtype!r}, which weights can't be saved in. Valid are: {', '.join(floats)}.")
    return target


def cast_to(dtype: Any, target: np.dtype[Any] | None) -> np.dtype[Any]:
    """The dtype in a file of a tensor that isn't kept: floats change, but for float8."""
    return target if target is not None and _dtypes.is_float(dtype) else _native(dtype)


def _native(dtype: Any) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("=")


def _metadata(policy: Any) -> dict[str, str]:
    from amp_jax import __version__  # it is set after this file is imported

    return {VERSION: __version__} | ({} if policy is None else {POLICY: str(get_policy(policy))})


def is_key(leaf: Any) -> bool:
    """Whether it is an array of typed PRNG keys."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.bool_), jax.dtypes.prng_key)


def _array(name: str, leaf: Any) -> Any:
    """The leaf as an array that can be saved."""
    if is_tracer(leaf):
        raise AmpTypeError(f"{name!r} is traced by jit or grad and has no values yet: call save_params outside.")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise AmpTypeError(f"{name!r} is a jax.ShapeDtypeStruct, which has no values to save.")
    if is_key(leaf):
        return jax.random.key_data(leaf)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf
    if isinstance(leaf, (bool, int, float, complex)):
        try:
            return np.asarray(leaf, jnp.result_type(leaf))
        except OverflowError:
            raise AmpValueError(f"{name!r} is {leaf!r}, more than an int32 holds: make it a NumPy array.") from None
    raise AmpTypeError(f"{name!r} is a {type(leaf).__name__}, expected an array. Leave it out of the tree.")
