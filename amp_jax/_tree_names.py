"""Names for the leaves of a tree: the path as one string, from which the tree can be built again.

A name is the keys between slashes: `decoder/layers/0/kernel`. What only holds one array (an nnx Variable, linen's boxes
such as `nn.Partitioned`) adds nothing to it. Inside of a key `/` is written `~1` and `~` is written `~0`, as in JSON
Pointer (RFC 6901); a dot is a dot.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, SequenceKey

from amp_jax._errors import AmpValueError

BARE = "~"
"""The name where the tree is a single array; no key is written like this."""
_RESERVED = "__metadata__"  # the format's own
_DEEPEST = 200


class Named(NamedTuple):
    """A tree taken apart.

    Attributes:
        leaves: Its leaves by name.
        structure: What `jax.tree.unflatten` needs to put leaves in this order together.
        containers: Which of its nodes aren't dicts of strings, as text for a file's metadata.
    """

    leaves: dict[str, Any]
    structure: Any
    containers: str


def named(tree: Any) -> Named:
    """The leaves of a tree by name.

    >>> list(named({"layers": [{"w": 1.0}, {"w": 2.0}], "a/b.c": 3.0}).leaves)
    ['a~1b.c', 'layers/0/w', 'layers/1/w']

    Raises:
        AmpValueError: Two leaves have one name, such as those of the keys 1 and "1".
    """
    names: dict[str, Any] = {}
    lists: set[str] = set()
    ints: set[str] = set()
    for path, leaf in _leaves(tree):
        parts = [_written(key) for key in path]
        name = _joined(parts)
        if name in names:
            raise AmpValueError(f"two leaves of the tree have the name {name!r}; rename one of them.")
        names[name] = leaf
        for depth, key in enumerate(path):
            around = "".join(f"{part}/" for part in parts[:depth])
            if isinstance(key, SequenceKey):
                lists.add(around)
            elif isinstance(key, DictKey) and type(key.key) is int:
                ints.add(around)
    containers = json.dumps({"lists": sorted(lists), "ints": sorted(ints)})
    return Named(names, jax.tree.structure(tree), containers)


def name_of(path: tuple[Any, ...]) -> str:
    """The name of what lies at a path of `jax.tree_util`."""
    return _joined([_written(key) for key in path])


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    found: list[tuple[tuple[Any, ...], Any]] = []
    boxes = _box_types()
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, boxes)):
        inside = jax.tree_util.tree_leaves_with_path(node)
        if len(inside) == 1:
            found.append((path, inside[0][1]))
        else:
            found += [((*path, *rest), leaf) for rest, leaf in inside]
    return found


def _box_types() -> tuple[type, ...]:
    # Flax can only be in play if someone has imported it.
    linen, nnx = sys.modules.get("flax.core.meta"), sys.modules.get("flax.nnx")
    return (*((linen.AxisMetadata,) if linen else ()), *((nnx.Variable,) if nnx else ()))


def _written(key: Any) -> str:
    part = str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
    return part.replace("~", "~0").replace("/", "~1")


def _read(part: str) -> str:
    return part.replace("~_", "_").replace("~1", "/").replace("~0", "~")


def _joined(parts: list[str]) -> str:
    if not parts:
        return BARE
    name = "/".join(parts)
    return "~" + name if name == _RESERVED else name


def nested(leaves: Mapping[str, Any], containers: str, where: str) -> Any:
    """The tree with these leaves: dicts and lists.

    >>> nested({"layers/0": 1.0, "layers/1": 2.0, "a~1b": 3.0}, '{"lists": ["layers/"], "ints": []}', "file")
    {'layers': [1.0, 2.0], 'a/b': 3.0}

    Args:
        leaves: What to put where.
        containers: As `named` gives it.
        where: The file that it is from; errors name it.

    Raises:
        AmpValueError: The names fit into no tree.
    """
    if list(leaves) == [BARE]:
        return leaves[BARE]
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *around, last = name.split("/")
        if len(around) > _DEEPEST:
            raise AmpValueError(
                f"{where} has a name of {len(around)} parts, {name[:80]!r}...; {_DEEPEST} is the limit."
            )
        node = root
        for part in around:
            inner = node.setdefault(part, _Node())
            if not isinstance(inner, _Node):
                raise AmpValueError(f"{where} has a tensor {name!r} and another whose name is the beginning of that.")
            node = inner
        if last in node:
            raise AmpValueError(f"{where} has a tensor {name!r} and others whose names begin with that and a slash.")
        node[last] = leaf
    lists, ints = _containers(containers, where)
    return _restored(root, "", lists, ints)


class _Node(dict[str, Any]):
    """A node of the tree being built; no leaf is one."""


def _containers(text: str, where: str) -> tuple[set[str], set[str]]:
    try:
        held = json.loads(text)
        return set(map(str, held["lists"])), set(map(str, held["ints"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AmpValueError(f"{where} has metadata of amp_jax that can't be read: {error!r}.") from None


def _restored(node: dict[str, Any], path: str, lists: set[str], ints: set[str]) -> Any:
    inner = {
        part: _restored(held, f"{path}{part}/", lists, ints) if isinstance(held, _Node) else held
        for part, held in node.items()
    }
    # Of a list that was loaded in part, the rest keeps its numbers as keys.
    if path in lists and set(inner) == {str(i) for i in range(len(inner))}:
        return [inner[str(i)] for i in range(len(inner))]
    if path in ints and all(part.removeprefix("-").isdecimal() and len(part) < 20 for part in inner):
        return {int(part): held for part, held in inner.items()}
    return {_read(part): held for part, held in inner.items()}
