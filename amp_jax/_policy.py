"""The policy: in which dtype parameters live, work runs, and results leave.

A policy's *rules* (`_rule`) give parts of a model a policy of their own; of several the last one counts. *Resolving*
replaces `auto` by what the device is good at. That asks for the device, so it waits until something runs.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jmp
import numpy as np

from amp_jax import _casting, _device, _dtypes
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._ops import CATEGORIES
from amp_jax._rule import LateDtype, Rule, escaped

FLOAT32 = np.dtype(np.float32)
AUTO, HALF = "auto", "half"
"""Dtypes that wait for the device: `auto` may be float32, `half` (jmp's word) is always a half dtype."""
PRESETS = ("float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16", "auto")
_PARTS = {
    "p": "param_dtype",
    "param": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
}


@dataclass(frozen=True)
class Policy:
    """Which dtype parameters are kept in, work runs in, and results leave in: a frozen, hashable value.

    >>> import amp_jax as amp, jax.numpy as jnp
    >>> policy = amp.Policy("float32", "bfloat16", "float32")
    >>> str(policy)
    'params=float32,compute=bfloat16,output=float32'
    >>> policy.cast_to_compute({"w": jnp.ones(2), "step": jnp.int32(1)})["w"].dtype
    dtype(bfloat16)
    >>> policy.override({"decoder/head": "float32"}).at("decoder/head/dense").compute_dtype
    dtype('float32')

    Args:
        param_dtype: A dtype or its name; compute_dtype, output_dtype likewise. `"auto"` and jmp's `"half"` wait for the
            device.
        rules: Parts of a model with dtypes of their own; written with `override`.
        ops: Primitive name and category; written with `with_ops`.

    Raises:
        AmpValueError: A dtype is unknown, or one that autocast can't compute in (float8).

    The three dtypes and their names are jmp's (https://github.com/google-deepmind/jmp).
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any
    rules: tuple[Rule, ...] = ()
    ops: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Read the dtypes."""
        for part in ("param_dtype", "compute_dtype", "output_dtype"):
            object.__setattr__(self, part, _late(getattr(self, part), part))

    def cast_to_param(self, tree: Any) -> Any:
        """Floating leaves in the param dtype; rules count."""
        return self._cast(tree, "param_dtype")

    def cast_to_compute(self, tree: Any) -> Any:
        """Floating leaves in the compute dtype; rules count."""
        return self._cast(tree, "compute_dtype")

    def cast_to_output(self, tree: Any) -> Any:
        """Floating leaves in the output dtype; rules count."""
        return self._cast(tree, "output_dtype")

    def _cast(self, tree: Any, part: str) -> Any:
        policy = self.resolve()
        if not policy.rules:
            return _casting.cast(tree, getattr(policy, part))
        return _casting.cast_by_path(tree, lambda path: getattr(policy.at(path), part))

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """The same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def override(self, rules: Mapping[str | type, Any]) -> "Policy":
        """The same policy with other dtypes for parts of a model.

        >>> import amp_jax as amp
        >>> str(amp.get_policy("mixed_float16").override({"base/**": "p=bf16"}).at("base/dense"))
        'params=bfloat16,compute=float16,output=float32'

        Args:
            rules: A glob on module paths or a module class, and what holds there: a policy or preset, or in jmp's
                grammar the parts that change. Later keys win.

        Raises:
            AmpTypeError: A key is neither a path nor a class.
            AmpValueError: A spec can't be read.
        """
        return dataclasses.replace(self, rules=(*self.rules, *(_rule(k, spec) for k, spec in rules.items())))

    def with_ops(self, ops: Mapping[str, str]) -> "Policy":
        """The same policy with other categories for primitives: `{"exp": "compute", "my_primitive": "full"}`.

        Raises:
            AmpValueError: A category is unknown.
        """
        assignable(ops, "ops")
        return dataclasses.replace(self, ops=tuple((dict(self.ops) | dict(ops)).items()))

    def at(self, path: str, modules: Mapping[str, type] = MappingProxyType({})) -> "Policy":
        """The policy that holds for the module at a path such as `decoder/head`.

        Args:
            path: The module path, or that of a parameter in it.
            modules: The types of the modules around it, by path, for rules whose key is a class.
        """
        rules = {part: self.rule_for(path, part, modules) for part in set(_PARTS.values())}
        held = {part: getattr(rule, part) for part, rule in rules.items() if rule is not None}
        return dataclasses.replace(self, rules=(), **held)

    def rule_for(self, path: str, part: str, modules: Mapping[str, type] = MappingProxyType({})) -> Rule | None:
        """The rule that decides one dtype of the module at a path; None where the policy itself does.

        Args:
            path: The module path, or that of a parameter in it.
            part: `"param_dtype"`, `"compute_dtype"` or `"output_dtype"`.
            modules: As for `at`.
        """
        given = (rule for rule in reversed(self.rules) if getattr(rule, part) is not None)
        return next((rule for rule in given if rule.covers(path, modules)), None)

    def bind(self, modules: Mapping[str, type]) -> "Policy":
        """The policy for one model: class keys become paths, and every key has to match.

        Args:
            modules: The type of the module at each path.

        Raises:
            AmpValueError: A key matches no module.
        """
        bound: list[Rule] = []
        for rule in self.rules:
            found = [p for p, kind in modules.items() if rule.matches(p, kind) or _inside(rule, p)]
            if not found:
                name = rule.key.__name__ if isinstance(rule.key, type) else rule.key
                paths = tuple(p for p in modules if p) or ("(no submodules)",)
                raise AmpValueError(f"rule {name!r} matches no module. {_dtypes.suggest(name, paths)}")
            keys = [escaped(p) for p in found] if isinstance(rule.key, type) else [rule.key]
            bound += [dataclasses.replace(rule, key=key) for key in keys]
        return dataclasses.replace(self, rules=tuple(bound))

    def resolve(self) -> "Policy":
        """The policy with `auto` and `half` replaced by this device's dtype: this starts the backend if it has to."""
        if not any(isinstance(d, str) for d in _dtypes_of(self)):
            return self
        auto = _device.device_dtype()
        half = auto if auto != FLOAT32 else np.dtype(np.float16)
        known = {AUTO: auto, HALF: half}
        fill = lambda x: {p: known.get(d, d) for p in set(_PARTS.values()) if isinstance(d := getattr(x, p), str)}  # noqa: E731
        rules = tuple(dataclasses.replace(rule, **fill(rule)) for rule in self.rules)
        return dataclasses.replace(self, rules=rules, **fill(self))

    def to_jmp(self) -> jmp.Policy:
        """The same policy for jmp.

        Raises:
            AmpValueError: It has rules, for which jmp has no place.
        """
        if self.rules or self.ops:
            raise AmpValueError(
                "`Policy.to_jmp()`: jmp has no rules; call it on `policy.at(path)`, the policy of one module."
            )
        policy = self.resolve()
        return jmp.Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)

    def __str__(self) -> str:
        """`params=...,compute=...,output=...`, as `get_policy` reads it; rules are left out."""
        names = [
            d if isinstance(d, str) else _dtypes.name(d)
            for d in (self.param_dtype, self.compute_dtype, self.output_dtype)
        ]
        return "params={},compute={},output={}".format(*names)


def assignable(ops: Mapping[str, str], argument: str) -> None:
    """Refuse a category that can't be given to a primitive."""
    valid = tuple(c for c in CATEGORIES if c not in ("recurse", "honour"))
    for op, category in ops.items():
        if category not in valid:
            raise AmpValueError(
                f"`{argument}`: category {category!r} of {op!r} is unknown. {_dtypes.suggest(str(category), valid)}"
            )


def get_policy(spec: Any) -> Policy:
    """Read a policy.

    >>> import amp_jax as amp
    >>> str(amp.get_policy("mixed_float16"))
    'params=float32,compute=float16,output=float32'
    >>> amp.get_policy("p=f32,c=bf16,o=f32") == amp.get_policy("mixed_bfloat16")
    True

    Args:
        spec: A `Policy` or `jmp.Policy`; a preset (`float32`, `bfloat16`, `float16`: everything in it;
            `mixed_bfloat16`, `mixed_float16`: parameters and outputs in float32; `auto`: mixed, by device); or jmp's
            grammar, where compute and output dtype are the param dtype unless given, and that is float32.

    Raises:
        AmpValueError: The name or a part of it is unknown.
        AmpTypeError: It is nothing of these.
    """
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, jmp.Policy):
        return Policy(spec.param_dtype, spec.compute_dtype, spec.output_dtype)
    if not isinstance(spec, str):
        raise AmpTypeError(
            f"`policy` is {spec!r:.80}, expected a Policy, a jmp.Policy, or a name such as 'mixed_bfloat16'."
        )
    if "=" in spec:
        parts = _parts(spec)
        params = parts.get("param_dtype", FLOAT32)
        return Policy(
            params, parts.get("compute_dtype", params), parts.get("output_dtype", parts.get("compute_dtype", params))
        )
    name = spec.strip().lower()
    if name == AUTO or name.startswith("mixed_"):
        if name in PRESETS:
            return Policy(FLOAT32, name.removeprefix("mixed_"), FLOAT32)
        raise AmpValueError(f"`policy` is {spec!r}, which is unknown. {_dtypes.suggest(spec, PRESETS)}")
    try:
        dtype = _late(name, "policy")
    except AmpValueError:
        raise AmpValueError(
            f"`policy` is {spec!r}, which is unknown. {_dtypes.suggest(spec, PRESETS)} "
            'Or write the parts: "params=float32,compute=bfloat16,output=float32".'
        ) from None
    return Policy(dtype, dtype, dtype)


def _parts(spec: str) -> dict[str, LateDtype]:
    """Jmp's grammar: `p=f32,c=bf16`, each part at most once."""
    parts: dict[str, LateDtype] = {}
    for item in spec.split(","):
        name, _, dtype = item.partition("=")
        part = _PARTS.get(name.strip().lower())
        if part is None or not dtype:
            raise AmpValueError(
                f"`policy` is {spec!r}: can't read {item!r}. Write parts like 'params=float32,compute=bfloat16'."
            )
        if part in parts:
            raise AmpValueError(f"`policy` is {spec!r}: it gives the {part} twice.")
        parts[part] = _late(dtype, part)
    return parts


def _late(spec: Any, part: str) -> LateDtype:
    """A dtype, or the name of one that waits for the device."""
    if isinstance(spec, str) and spec.strip().lower() in (AUTO, HALF):
        return spec.strip().lower()
    dtype = _dtypes.parse(spec, part)
    if part == "compute_dtype" and _dtypes.is_float8(dtype):
        raise AmpValueError(
            f"`compute_dtype` is {_dtypes.name(dtype)}: autocast computes in bfloat16, float16, float32 or float64."
        )
    return dtype


def _rule(key: Any, spec: Any) -> Rule:
    if not isinstance(key, (str, type)):
        raise AmpTypeError(f"`rules`: key {key!r} is neither a module path nor a module class.")
    if isinstance(spec, str) and "=" in spec:
        return Rule(key, **_parts(spec))
    policy = get_policy(spec)
    return Rule(key, policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def _inside(rule: Rule, path: str) -> bool:
    return isinstance(rule.key, str) and rule.covers(path)


def _dtypes_of(policy: Policy) -> list[Any]:
    return [getattr(x, part) for x in (policy, *policy.rules) for part in set(_PARTS.values())]
