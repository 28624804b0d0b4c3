"""A policy's rules in a linen model: which module is running, and in which compute dtype.

linen calls every method through *interceptors*. Ours knows the module's path and class, and opens a region where a rule
makes a difference.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from amp_jax._borders import Running, border, leaving, running, without_own_dtype
from amp_jax._policy import Policy
from amp_jax._rule import Rule


class Lifted(NamedTuple):
    """One lifted call: its policy, the path of the module, whether this is `init`, and whether the whole model runs."""

    policy: Policy
    root: tuple[str, ...]
    creates: bool
    whole: bool


class Rules:
    """A method interceptor that opens a region where a module's rule differs from that of the module that calls it."""

    def __init__(self, run: Lifted):
        self.run, self.policy, self.root = run, run.policy, run.root
        self.modules: dict[str, type] = {}
        """The type of each module that was called, and of those around it, by path."""
        self.running = Running("", run.policy.compute_dtype, None)
        """The module whose method is running."""

    def __call__(self, method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "setup" or module.path[: len(self.root)] != self.root:
            return method(*args, **kwargs)
        path, caller = self._know(module), self.running
        self.running = running(self.policy, path, self.modules)
        own = without_own_dtype(module) if self.policy.rule_for(path, "compute_dtype", self.modules) else nullcontext()
        try:
            with border(self.running, caller), own:
                out = method(*args, **kwargs)
        finally:
            here, self.running = self.running, caller
        return out if self.run.creates else leaving(out, here, caller)

    def _know(self, module: Any) -> str:
        path = "/".join(module.path[len(self.root) :])
        self.modules[path] = type(module)
        while isinstance(module.parent, nn.Module) and len(module.parent.path) >= len(self.root):
            module = module.parent
            self.modules.setdefault("/".join(module.path[len(self.root) :]), type(module))
        return path

    def bound(self, groups: Any) -> Policy:
        """The policy with its class keys as paths, checked against the modules that were called or hold variables.

        A method of a part of the model may leave rules for other parts unmatched, and a class key may stay unmatched by
        a call that makes no parameters: such a module may be there, and not called.
        """
        known: dict[str, type] = {**dict.fromkeys(_module_paths(groups), nn.Module), **self.modules}
        rules = tuple(rule for rule in self.policy.rules if self._must_match(rule) or _matches(rule, known))
        return dataclasses.replace(self.policy, rules=rules).bind(known)

    def _must_match(self, rule: Rule) -> bool:
        return self.run.whole and (self.run.creates or isinstance(rule.key, str))


def _matches(rule: Rule, modules: Mapping[str, type]) -> bool:
    inside = isinstance(rule.key, str)
    return any(rule.matches(path, kind) or (inside and rule.covers(path)) for path, kind in modules.items())


def _collections(groups: Any) -> list[Mapping[str, Any]]:
    if isinstance(groups, Mapping):
        return [groups]
    return [c for g in groups for c in _collections(g)] if isinstance(groups, (tuple, list)) else []


def _module_paths(groups: Any) -> set[str]:
    """The paths of all modules that hold variables, and of those around them."""
    paths: set[str] = set()
    for collections in _collections(groups):
        for tree in collections.values():
            for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
                names = [str(getattr(k, "key", k)) for k in keys]
                paths |= {"/".join(names[:n]) for n in range(len(names))}
    return paths
