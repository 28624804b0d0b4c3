"""load_params: weights from a safetensors file, in the dtype, the tree and the shardings asked for."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from amp_jax import _safetensors as st
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._modules import split
from amp_jax._narrowing import Loss, narrowed
from amp_jax._save_report import SavedTensor, refused, saved
from amp_jax._saving import KEYS, TREE, file_dtype, is_key
from amp_jax._tree_names import Named, named, nested
from amp_jax._weights_file import check_on_overflow, matching


def load_params(
    path: str | os.PathLike[str] | bytes,
    dtype: Any = None,
    like: Any = None,
    *,
    names: Any = None,
    shardings: Any = None,
    on_overflow: str = "error",
) -> Any:
    """Load weights from a safetensors file, ours or anyone's.

    Only the header is read at once, and checked; then each tensor that is asked for, one at a time. Nothing is ever
    unpickled. In a run of several processes each reads the file.

    >>> import amp_jax as amp, jax.numpy as jnp, tempfile
    >>> params = {"body": [jnp.ones(2), jnp.ones(3)], "head": {"w": jnp.zeros(2)}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = amp.save_params(f"{folder}/model.safetensors", params, "bfloat16")
    ...     body = amp.load_params(f"{folder}/model.safetensors", names="body")
    ...     whole = amp.load_params(f"{folder}/model.safetensors", like=params)
    >>> body["body"][0].dtype, whole["body"][0].dtype
    (dtype(bfloat16), dtype('float32'))

    Args:
        path: The file, or its bytes.
        dtype: A dtype for all floating tensors, float8 included; None for that of `like`, or of the file.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`s, or an nnx module: the result has its structure, shapes,
            dtypes and shardings.
        names: Globs on names; only these tensors are read. With `like`, its other leaves come back as they are.
        shardings: A `jax.sharding.Sharding` for all, or a pytree of them whose names are the file's.
        on_overflow: As in `save_params`, for numbers that the dtype loaded to can't hold.

    Returns:
        A pytree like `like`. Without it, the nested dicts and lists that `save_params` was given (tuples are lists now,
        whatever else held arrays is a dict); for a file that it didn't write, a dict from names to arrays.

    Raises:
        AmpValueError: The file is malformed; its tensors don't fit `like` (all that are missing, surplus or of another
            shape or kind are listed); numbers overflow; a pattern matches nothing.
        FileNotFoundError: There is no such file.

    The format is safetensors' (https://github.com/huggingface/safetensors).
    """
    check_on_overflow(on_overflow)
    target = None if dtype is None else _here(file_dtype(dtype))
    with _opened(path) as (file, where):
        header = st.read_header(file, where)
        tree, rebuilt = (None, _nested(header)) if like is None else _taken_apart(like)
        known = dict.fromkeys((*header.specs, *(tree.leaves if tree else ())))
        wanted = set(known) if names is None else matching(known, names, "names")
        keys = _keys(header)
        if tree is None:
            goals = {n: _goal_alone(header.specs[n], target, keys.get(n)) for n in header.specs if n in wanted}
        else:
            goals = {n: _goal_like(leaf, target, keys.get(n)) for n, leaf in tree.leaves.items() if n in wanted}
            _check_fit(header, goals, wanted, where)
        goals = _with_shardings(goals, shardings, header)
        leaves = _read(file, header, goals, on_overflow)
    return rebuilt(leaves)


class _Goal(NamedTuple):
    """What one tensor becomes: floating numbers of a dtype, or what they are; a key's implementation; its place."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    key: str | None = None
    sharding: Any = None


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str] | bytes) -> Generator[tuple[BinaryIO, str]]:
    if isinstance(path, (bytes, bytearray, memoryview)):
        yield io.BytesIO(path), "`path`, given as bytes,"
        return
    if not isinstance(path, (str, os.PathLike)):
        raise AmpTypeError(f"`path` is a {type(path).__name__}, expected a path or the bytes of a file.")
    with open(path, "rb") as file:
        yield file, str(path)


def _taken_apart(like: Any) -> tuple[Named, Callable[[dict[str, Any]], Any]]:
    """A tree's leaves by name, and what puts new ones into a tree like it."""
    arrays, with_modules = split(like)
    tree = named(arrays)

    def rebuilt(leaves: dict[str, Any]) -> Any:
        new = [leaves.get(name, old) for name, old in tree.leaves.items()]
        return with_modules(jax.tree.unflatten(tree.structure, new))

    return tree, rebuilt


def _nested(header: st.Header) -> Callable[[dict[str, Any]], Any]:
    if TREE not in header.metadata:
        return lambda leaves: leaves
    return lambda leaves: nested(leaves, header.metadata[TREE], header.where)


def _keys(header: st.Header) -> dict[str, str]:
    """The implementation of each tensor that holds PRNG keys, if the file says that there are any."""
    try:
        keys = json.loads(header.metadata.get(KEYS, "{}"))
        return {str(name): str(kind) for name, kind in keys.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise AmpValueError(f"{header.where} has metadata of amp_jax that can't be read: {error!r}.") from None


def _goal_alone(spec: st.Spec, target: np.dtype[Any] | None, key: str | None) -> _Goal:
    return _Goal((target or _here(spec.dtype)) if _is_floating(spec.dtype) else None, spec.shape, key)


def _goal_like(leaf: Any, target: np.dtype[Any] | None, key: str | None) -> _Goal:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        sharding = None  # it is on the default device, but may move
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        known = leaf if isinstance(leaf, jax.Array) else jax.random.key(0)
        kind = str(jax.random.key_impl(known))
        return _Goal(np.dtype(data.dtype), data.shape, kind if known is leaf else key or kind, sharding)
    dtype = _here(getattr(leaf, "dtype", None) or jnp.result_type(leaf))
    return _Goal(target if target is not None and _is_floating(dtype) else dtype, np.shape(leaf), None, sharding)


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.floating)


def _here(dtype: Any) -> np.dtype[Any]:
    """The dtype as JAX has it: without `jax_enable_x64`, none of 64 bits."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _check_fit(header: st.Header, goals: Mapping[str, _Goal], wanted: set[str], where: str) -> None:
    """Raise with everything that differs between the file and `like`."""
    faults = [f"{name!r} is missing in the file" for name in goals if name not in header.specs]
    faults += [f"{name!r} is surplus in the file" for name in header.specs if name in wanted and name not in goals]
    for name, goal in goals.items():
        spec = header.specs.get(name)
        if spec is None:
            continue
        if spec.shape != goal.shape:
            faults.append(f"{name!r} has shape {spec.shape} in the file and {goal.shape} in `like`")
        both_float = _is_floating(spec.dtype) and _is_floating(goal.dtype)
        if not both_float and _here(spec.dtype) != goal.dtype:
            faults.append(f"{name!r} is {spec.dtype} in the file and {goal.dtype} in `like`")
    if faults:
        raise AmpValueError(f"{where} doesn't fit `like`: {'; '.join(faults)}. `names` loads a part.")


def _with_shardings(goals: dict[str, _Goal], shardings: Any, header: st.Header) -> dict[str, _Goal]:
    if shardings is None:
        return goals
    if isinstance(shardings, Sharding):
        return {name: goal._replace(sharding=shardings) for name, goal in goals.items()}
    places = named(shardings).leaves
    if unknown := [name for name in places if name not in header.specs]:
        raise AmpValueError(f"`shardings` has {', '.join(map(repr, unknown))}, which {header.where} hasn't.")
    return {name: goal._replace(sharding=places.get(name, goal.sharding)) for name, goal in goals.items()}


def _read(file: BinaryIO, header: st.Header, goals: Mapping[str, _Goal], on_overflow: str) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    report: dict[str, SavedTensor] = {}
    for name in (name for name in header.specs if name in goals):
        goal, spec = goals[name], header.specs[name]
        if not _is_floating(spec.dtype):
            leaves[name] = _placed(_as_here(st.read_tensor(file, header, name), name, header.where), goal, header.where)
            continue
        dtype = cast(np.dtype[Any], goal.dtype)
        whole, loss, first = np.empty(spec.size, dtype), Loss(), 0
        for values, lost in narrowed(st.read_chunks(file, header, name), dtype, clip=on_overflow == "clip"):
            whole[first : first + values.size] = values
            loss, first = loss.plus(lost), first + values.size
        report[name] = saved(spec.shape, spec.dtype.name, dtype.name, whole.nbytes, loss)
        if on_overflow != "error" or not loss.overflowed:
            leaves[name] = _placed(whole.reshape(spec.shape), goal, header.where)
    if on_overflow == "error" and any(tensor.overflowed for tensor in report.values()):
        raise AmpValueError(refused(header.where, report, "loaded"))
    return leaves


def _as_here(values: np.ndarray[Any, Any], name: str, where: str) -> np.ndarray[Any, Any]:
    """Integers of 64 bits in 32 where JAX has no others, if that changes none."""
    here = _here(values.dtype)
    if here != values.dtype and values.size:
        limits = np.iinfo(here)
        if values.min() < limits.min or values.max() > limits.max:
            raise AmpValueError(
                f"{where} has {name!r} with integers beyond {here}: set jax_enable_x64, or leave it out with `names`."
            )
    return values.astype(here, copy=False)


def _placed(values: np.ndarray[Any, Any], goal: _Goal, where: str) -> jax.Array:
    if goal.key is not None:
        try:
            key = jax.random.wrap_key_data(jnp.asarray(values), impl=goal.key)
        except (TypeError, ValueError) as error:
            raise AmpValueError(f"{where} has keys that are none: {error}.") from None
        return key if goal.sharding is None else jax.device_put(key, goal.sharding)
    if goal.sharding is None:
        return jnp.asarray(values)
    return jax.make_array_from_callback(values.shape, goal.sharding, lambda index: values[index])
