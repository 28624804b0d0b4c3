"""A linen model whose modules leave marks when they are called, for `tabulate`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList
from flax.traverse_util import flatten_dict

from amp_jax import _marks
from amp_jax._autocast import of_arrays, split
from amp_jax._marks import Part, Watched
from amp_jax._methods import sealed
from amp_jax._policy import Policy
from amp_jax.linen import POLICY, plain, wrap


def unwrapped(module: nn.Module, policy: Any) -> tuple[nn.Module, Any]:
    """The plain module, and the policy to watch it under."""
    wrapped = hasattr(module, POLICY)
    chosen = _marks.its_own(wrapped, policy, getattr(module, POLICY, None))
    return (plain(module) if wrapped else module), chosen


def watched(module: nn.Module, policy: Policy, method: str, args: Any, kwargs: Any) -> Watched:
    """The model under the policy, with variables of its own `init`."""
    model, watch = wrap(module.clone(parent=None), policy), _Watch()
    inputs = split((args, kwargs))

    def init(*args: Any, **kwargs: Any) -> Any:
        return model.init(jax.random.key(0), *args, method=method, **kwargs)

    variables = jax.eval_shape(of_arrays(init, inputs), *inputs.arrays)

    def call(variables: Any, *args: Any, **kwargs: Any) -> Any:
        rngs, mutable = {"params": jax.random.key(0)}, DenyList(("params", "intermediates"))
        with nn.intercept_methods(watch):
            out, _ = model.apply(variables, *args, rngs=rngs, mutable=mutable, method=method, **kwargs)
        return sealed(out)

    return Watched(call, variables, lambda: watch.parts(variables.get("params", {})))


class _Watch:
    """A method interceptor that marks what each module computes and returns."""

    def __init__(self):
        self.kinds: dict[str, dict[type, None]] = {}
        """The classes of the modules at each path, in the order of the calls."""
        self.aliases: dict[str, dict[str, None]] = defaultdict(dict)

    def __call__(self, method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "setup":
            return method(*args, **kwargs)
        path = "/".join(module.path)
        own: Any = type(module)
        self.kinds.setdefault(path, {})[own.__mro__[1] if hasattr(own, POLICY) else own] = None
        for other, held in _submodules(module):
            if held.scope is not None and "/".join(held.path) != other and held.path != module.path:
                self.aliases["/".join(held.path)][other] = None
        number = list(self.kinds).index(path)
        with _marks.inside(number):
            out = method(*args, **kwargs)
        return _marks.returned(number, out)

    def parts(self, params: Mapping[str, Any]) -> Mapping[int, Part]:
        own: dict[str, list[Any]] = defaultdict(list)
        for names, leaf in flatten_dict(params).items():
            around = ("/".join(names[:n]) for n in range(len(names) - 1, -1, -1))
            own[next((path for path in around if path in self.kinds), "")] += jax.tree.leaves(leaf)
        return {
            number: Part(path, tuple(kinds), tuple(self.aliases[path]), tuple(own[path]))
            for number, (path, kinds) in enumerate(self.kinds.items())
        }


def _submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that this one holds in fields and attributes, with the paths that these would give them."""
    is_module = lambda x: isinstance(x, nn.Module)  # noqa: E731
    held = {name: x for name, x in vars(module).items() if name != "parent" and not name.startswith("_")}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(held, is_leaf=is_module):
        if is_module(leaf):
            names = (str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)
            yield "/".join((*module.path, "_".join(names))), leaf
