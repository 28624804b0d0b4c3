"""wrap: a Flax module under a policy. Here the kind of module is told apart; `linen` and `nnx` do the work."""

import sys
from typing import Any, Literal, TypeVar

from amp_jax._errors import AmpTypeError
from amp_jax._policy import get_policy

M = TypeVar("M")


def wrap(module: M, policy: Any = "auto") -> M:
    """The same Flax module, run under a policy: same parameters, methods and attributes, other dtypes inside.

    >>> import flax.linen as nn, jax, jax.numpy as jnp, amp_jax as amp
    >>> model = amp.wrap(nn.Dense(4), "mixed_bfloat16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    >>> jax.tree.map(lambda p: p.dtype.name, variables["params"])
    {'bias': 'float32', 'kernel': 'float32'}
    >>> "bf16[1,4] = dot_general" in str(jax.make_jaxpr(model.apply)(variables, jnp.ones((1, 8))))
    True
    >>> isinstance(model, nn.Dense), model.features
    (True, 4)

    Args:
        module: A linen module (not yet bound to variables), or an nnx module, whose variables the result shares.
        policy: A `Policy`, or what `get_policy` takes. Parameters are kept in its param dtype, operations run under its
            compute dtype, outputs leave in its output dtype. Rules are matched against module paths.

    Returns:
        A module of a subclass of `type(module)` with the same name.

    Raises:
        AmpTypeError: `module` is a class, or no Flax module. For plain functions, Haiku and Equinox use `autocast`.
        AmpValueError: `module` is wrapped already, or a rule matches no module.
    """
    chosen = get_policy(policy)
    if library_of(module, "amp.wrap") == "linen":
        from amp_jax import linen as adapter

        return adapter.wrap(module, chosen)  # type: ignore[return-value, arg-type]
    from amp_jax import nnx as other

    return other.wrap(module, chosen)  # type: ignore[return-value, arg-type]


def library_of(module: Any, caller: str) -> Literal["linen", "nnx"]:
    """Whose module this is.

    Raises:
        AmpTypeError: Nobody's; the message says what to do instead of `caller(module)`.
    """
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(module, linen.Module):
        return "linen"
    if nnx is not None and isinstance(module, nnx.Module):
        return "nnx"
    of_functions = {"amp.wrap": "amp.autocast(fun, policy)", "amp.tabulate": "amp.explain(fun, policy)(*args)"}
    instead = (
        f"Make an instance first: `{caller}(Model(...), policy)`."
        if isinstance(module, type)
        else f"For a function, or a model of another library, use `{of_functions[caller]}`."
    )
    raise AmpTypeError(f"`{caller}(module)` expects a flax.linen or flax.nnx module, got {module!r:.80}. {instead}")
