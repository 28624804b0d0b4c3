"""Several processes saving one tree: all gather, one writes, and all learn how that went.

An array may be spread over the devices of several processes. To put it together they have to act at the same time,
so each takes part in each gather, in the same order, even after an error.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from amp_jax._errors import AmpError, AmpValueError


def to_host(leaf: Any) -> np.ndarray[Any, Any]:
    """The whole array as NumPy's, on every process.

    JAX keeps the NumPy copy of an array for as long as the array lives; over a whole tree that would be a second one
    on the host. So the copy is of its shards' copies.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    whole = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0 or leaf.is_fully_replicated:
            whole[shard.index] = np.asarray(shard.data.copy())
        if leaf.is_fully_replicated:
            break
    return whole


def is_writer() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def shared(outcome: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `outcome` gives or raises on the writer, given or raised on every process.

    Args:
        outcome: Called on every process; gives what JSON can hold. What it gives elsewhere is not looked at; what it
            raises there alone is raised there.

    Raises:
        AmpValueError: The writer refused.
        OSError: The writer couldn't write.
        AmpError: The writer failed in another way.
    """
    if jax.process_count() == 1:
        return outcome()
    error: Exception | None = None
    told: dict[str, Any] = {}
    try:
        told = {"value": outcome()}
    except Exception as caught:
        error = caught
        kind = "value" if isinstance(caught, AmpValueError) else "os" if isinstance(caught, OSError) else "other"
        told = {"kind": kind, "errno": getattr(caught, "errno", None), "text": str(caught)}
    told = _from_writer(told)
    if error is not None and (is_writer() or "value" in told):
        raise error  # a reader's own, where it isn't told of the writer's
    if "value" in told:
        return told["value"]
    text = f"process 0, which writes, failed: {told['text']}"
    if told["kind"] == "os":
        raise OSError(told["errno"] or 0, text)
    raise (AmpValueError if told["kind"] == "value" else AmpError)(text)


def _from_writer(told: dict[str, Any]) -> dict[str, Any]:
    raw = np.frombuffer(json.dumps(told).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(raw.size)))
    padded = np.resize(raw, length)  # the same shape everywhere; only the writer's numbers count
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)))
