"""A run's whole state (parameters, optimizer, loss scale, counts) on its way through orbax and to another policy.

Orbax saves and restores such a state as it is; docs/checkpoints.md shows how. Here is what it doesn't do: carry a state
over to another policy (`change_policy`), and save in another dtype only what may have one (`orbax_save_args`).

A *wrapper* is the state of an optimizer around another one. It adds leaves of its own and puts those of the optimizer
inside one level deeper. The states of one model under two policies differ in their wrappers and dtypes, and in nothing
else; so leaves are told apart by their *place*, which is their name as it would be without wrappers.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from amp_jax import _dtypes
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._modules import holds_modules, split
from amp_jax._opt_state import nodes_of
from amp_jax._optimizer import LossScalingState
from amp_jax._saving import file_dtype
from amp_jax._tree_names import name_of, named
from amp_jax._weights_file import matching

_WRAPPERS = {LossScalingState: ("inner_state", "scaling")}
"""For each kind of wrapper the field with the optimizer inside, and the field with leaves of its own."""
_SCALE = "scaling/loss_scale"
"""How the name of a loss scale ends. An nnx State has no types around it, only names."""


def change_policy(state: Any, like: Any) -> Any:
    """A run's state in the form that it has under another policy.

    Parameters, optimizer state and counts are those of `state`. Floating numbers are cast to the dtypes of `like`; ints
    and keys never are. The loss scale goes on where both have one. Where only `like` has one it begins as it is there;
    where only `state` has one it ends. `state` may also be from a run whose optimizer wasn't wrapped.

    >>> import amp_jax as amp, jax.numpy as jnp, optax
    >>> half, full = jnp.ones(2, jnp.bfloat16), jnp.zeros(2)
    >>> old = {"params": half, "opt_state": optax.adam(0.1).init(half)}
    >>> new = {"params": full, "opt_state": amp.loss_scaling(optax.adam(0.1), "mixed_float16").init(full)}
    >>> state = amp.change_policy(old, like=new)
    >>> state["params"], amp.metrics(state["opt_state"])["loss_scale"].item()
    (Array([1., 1.], dtype=float32), 32768.0)

    Args:
        state: A pytree of arrays, such as a `TrainState`; in nnx the modules themselves: `(model, optimizer)`.
        like: The state of a run that begins under the other policy. Where `state` has the values,
            `jax.ShapeDtypeStruct`s will do.

    Returns:
        A pytree like `like`, its arrays on the devices where they are in `state`; nnx modules in it are new.

    Raises:
        AmpValueError: The states are of different models or optimizers (all that differs is listed), or numbers are too
            large for their new dtype.
        AmpTypeError: There are no values for a new loss scale, or nnx State came in place of the modules.
    """
    old, new = _taken_apart(state, "state"), _taken_apart(like, "like")
    faults = [f"{leaf.name!r} is missing in `state`" for k, leaf in new.leaves.items() if _needed(k, leaf, old)]
    faults += [f"{leaf.name!r} is not in `like`" for k, leaf in old.leaves.items() if _needed(k, leaf, new)]
    both = {place: (old.leaves[place].value, leaf) for place, leaf in new.leaves.items() if place in old.leaves}
    faults += [fault for value, leaf in both.values() if (fault := _misfit(value, leaf))]
    if faults:
        raise AmpValueError("`state` doesn't fit `like`:\n  " + "\n  ".join(faults))
    cast = {place: _cast(leaf.name, value, _dtype(leaf.value)) for place, (value, leaf) in both.items()}
    _refuse_overflow(cast.values())
    return new.rebuilt([cast[k].values if k in cast else _begun(leaf) for k, leaf in new.leaves.items()])


def orbax_save_args(state: Any, dtype: Any, keep: Any = ()) -> Any:
    """What orbax needs to save a state's floating numbers in another dtype.

    An `ocp.SaveArgs(dtype=...)` for every leaf would cast step counts too, and a loss scale of 65536 to inf. Here ints,
    keys, float8 and the loss scale stay as they are. A run that resumes from rounded numbers is not the same run: this
    is for checkpoints that have to be small.

    >>> import amp_jax as amp, jax.numpy as jnp
    >>> args = amp.orbax_save_args({"w": jnp.ones(2), "norm": jnp.ones(2), "step": jnp.int32(7)}, "bf16", keep="norm")
    >>> args["w"].dtype, args["norm"].dtype, args["step"].dtype
    (dtype(bfloat16), None, None)

    Args:
        state: The tree that is saved, with its arrays; in nnx the `nnx.state(...)`.
        dtype: The floating dtype for the checkpoint, by any of its names.
        keep: Globs on names, as in `save_params`, for what keeps its dtype: `"opt_state"`.

    Returns:
        A tree like `state` with an `orbax.checkpoint.SaveArgs` for each leaf, for
        `ocp.args.StandardSave(state, save_args=...)`.

    Raises:
        AmpValueError: Numbers are too large for the dtype, which orbax would save as inf; the dtype is unknown; `keep`
            matches nothing.
        AmpTypeError: nnx modules came in place of their state.
    """
    import orbax.checkpoint as ocp  # it takes a second, and only this function needs it

    if holds_modules(state):
        raise AmpTypeError("`state` holds nnx modules, expected what is saved of them: nnx.state((model, optimizer)).")
    target, tree = file_dtype(dtype), named(state)
    kept = matching(tree.leaves, keep, "keep")
    floats = {n: x for n, x in tree.leaves.items() if _is_float(x) and n not in kept and not n.endswith(_SCALE)}
    _refuse_overflow(_cast(name, leaf, target)._replace(values=None) for name, leaf in floats.items())
    args = [ocp.SaveArgs(dtype=target) if name in floats else ocp.SaveArgs() for name in tree.leaves]
    return jax.tree.unflatten(tree.structure, args)


class _Leaf(NamedTuple):
    """One leaf: what it is called where it stands, its value, and whether a wrapper added it."""

    name: str
    value: Any
    added: bool


class _Apart(NamedTuple):
    """A state taken apart: its leaves by place, and what puts others in their order into a state like it."""

    leaves: dict[str, _Leaf]
    rebuilt: Callable[[list[Any]], Any]


class _Cast(NamedTuple):
    """A leaf in another dtype, and how many of its numbers are infinite only there."""

    name: str
    values: Any
    dtype: Any
    overflowed: int


def _taken_apart(state: Any, argument: str) -> _Apart:
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(state, nnx.State):
        raise AmpTypeError(
            f"`{argument}` is an nnx State, which doesn't say what its optimizer is. Pass the modules, (model, "
            "optimizer): after nnx.update(modules, restored) where it was restored from a checkpoint."
        )
    arrays, with_modules = split(state)
    tree, wrappers = named(arrays), _wrappers(state)
    leaves: dict[str, _Leaf] = {}
    for name, value in tree.leaves.items():
        place, added = _place(name, wrappers)
        leaves[place] = _Leaf(name, value, added)
    return _Apart(leaves, lambda new: with_modules(jax.tree.unflatten(tree.structure, new)))


def _wrappers(state: Any) -> list[tuple[str, str, str]]:
    """Where wrappers stand, as the beginning of a name, and their two fields; those inside of others first."""
    found = [
        (f"{name_of(path)}/" if path else "", *fields)
        for kind, fields in _WRAPPERS.items()
        for path in nodes_of(state, kind)
    ]
    return sorted(found, key=lambda wrapper: -len(wrapper[0]))


def _place(name: str, wrappers: list[tuple[str, str, str]]) -> tuple[str, bool]:
    place, added = name, False
    for around, inner, own in wrappers:
        if place.startswith(f"{around}{own}/"):
            place, added = f"{around}~{place.removeprefix(around)}", True  # no name of a key has a bare ~
        else:
            start = f"{around}{inner}/"
            place = around + place.removeprefix(start) if place.startswith(start) else place
    return place, added


def _needed(place: str, leaf: _Leaf, other: _Apart) -> bool:
    return not leaf.added and place not in other.leaves


def _misfit(value: Any, leaf: _Leaf) -> str:
    """What is wrong with a value for its place, or nothing."""
    if np.shape(value) != np.shape(leaf.value):
        return f"{leaf.name!r} has shape {np.shape(value)} in `state` and {np.shape(leaf.value)} in `like`"
    if _dtype(value) == _dtype(leaf.value) or (_is_float(value) and _is_float(leaf.value)):
        return ""
    return f"{leaf.name!r} is {_dtype(value)} in `state` and {_dtype(leaf.value)} in `like`: only floats are cast"


def _begun(leaf: _Leaf) -> Any:
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        raise AmpTypeError(
            f"{leaf.name!r} is a jax.ShapeDtypeStruct in `like`, and `state` has no value for it: pass a `like` that "
            "was made by tx.init, not by jax.eval_shape."
        )
    return leaf.value


def _cast(name: str, value: Any, dtype: Any) -> _Cast:
    if _dtype(value) == dtype:
        return _Cast(name, value, dtype, 0)
    values = _astype(value, dtype)
    # A program of its own: within one, XLA may look at the number as it was before it was rounded.
    return _Cast(name, values, dtype, int(_overflowed(value, values)))


_astype = jax.jit(lambda x, dtype: x.astype(dtype), static_argnums=1)
_overflowed = jax.jit(lambda x, cast: jnp.sum(jnp.isfinite(x) & ~jnp.isfinite(cast)))


def _refuse_overflow(casts: Any) -> None:
    lost = [f"{c.name!r}: {c.overflowed} of its numbers are too large for {c.dtype}" for c in casts if c.overflowed]
    if lost:
        raise AmpValueError("`state` doesn't fit its new dtype:\n  " + "\n  ".join(lost))


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _is_float(leaf: Any) -> bool:
    return _dtypes.is_float(_dtype(leaf))
