"""Which part of a model a rule means.

A *rule* gives part of a model dtypes of its own. Its key is a glob on paths (`decoder/*`, `**/norm`) or a module class;
it covers the modules that it matches and everything inside them.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

LateDtype = np.dtype[Any] | str
"""A dtype, or the name of one that waits for the device."""


@dataclass(frozen=True)
class Rule:
    """A part of a model and the dtypes that it has instead of the policy's; None leaves one as it is.

    >>> Rule("decoder/*", compute_dtype=np.dtype("float32")).covers("decoder/head/dense")
    True
    """

    key: str | type
    param_dtype: LateDtype | None = None
    compute_dtype: LateDtype | None = None
    output_dtype: LateDtype | None = None

    def covers(self, path: str, modules: Mapping[str, type] = MappingProxyType({})) -> bool:
        """Whether the module at this path is meant, or one around it; `modules` has the types for class keys."""
        parts = path.split("/") if path else []
        around = ("/".join(parts[:n]) for n in range(len(parts) + 1))
        return any(self.matches(p, modules.get(p)) for p in around)

    def matches(self, path: str, kind: type | None) -> bool:
        """Whether the key names this very module."""
        if isinstance(self.key, type):
            return kind is not None and issubclass(kind, self.key)
        return _glob(self.key).fullmatch(path) is not None


@functools.lru_cache(maxsize=1024)
def _glob(key: str) -> re.Pattern[str]:
    """`*` and `?` stay within a name, `**` crosses names: `a/**` is `a` and all inside, `**/b` every `b`."""
    pattern, i = "", 0
    while i < len(key):
        if key.startswith("**/", i):
            pattern, i = pattern + "(?:.*/)?", i + 3
        elif key.startswith("/**", i) and i + 3 == len(key):
            pattern, i = pattern + "(?:/.*)?", i + 3
        elif key.startswith("**", i):
            pattern, i = pattern + ".*", i + 2
        elif key[i] in "*?":
            pattern, i = pattern + {"*": "[^/]*", "?": "[^/]"}[key[i]], i + 1
        elif key[i] == "[" and "]" in key[i:]:
            end = key.index("]", i)
            inside = key[i + 1 : end].replace("!", "^", 1).replace("\\", "\\\\").replace("[", "\\[")
            pattern, i = f"{pattern}[{inside}]", end + 1
        else:
            pattern, i = pattern + re.escape(key[i]), i + 1
    return re.compile(pattern)


def escaped(path: str) -> str:
    """The glob that matches this path alone."""
    return re.sub(r"([*?\[])", r"[\1]", path)
