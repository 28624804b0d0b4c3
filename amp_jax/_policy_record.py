"""The policy as text beside a checkpoint, and back.

A *record* is a dict of strings, as orbax's `custom_metadata` or a JSON file holds it. It has the dtypes as they were on
the device of the run: what `auto` stood for there, it may not stand for elsewhere.
"""

import json
from collections.abc import Mapping
from typing import Any

from amp_jax import _dtypes
from amp_jax._errors import AmpTypeError, AmpValueError
from amp_jax._policy import Policy, get_policy
from amp_jax._rule import Rule
from amp_jax._saving import POLICY, VERSION

RULES, OPS = "amp_jax.rules", "amp_jax.ops"
_CLASS = "class "


def policy_record(policy: Any) -> dict[str, str]:
    """The policy of a run, to keep beside its checkpoints.

    >>> import amp_jax as amp
    >>> record = amp.policy_record(amp.get_policy("mixed_float16").override({"head": "p=f32,c=f32"}))
    >>> record["amp_jax.policy"], record["amp_jax.rules"]
    ('params=float32,compute=float16,output=float32', '[["head", "params=float32,compute=float32"]]')
    >>> amp.recorded_policy(record).at("head").compute_dtype
    dtype('float32')

    Args:
        policy: A `Policy`, or what `get_policy` takes. What `auto` stands for is asked here, which starts the backend.

    Returns:
        Strings by name, for orbax: `manager.save(step, args=..., custom_metadata=amp.policy_record(policy))`.

    Raises:
        AmpValueError: The policy is unknown.
    """
    from amp_jax import __version__  # it is set after this file is imported

    policy = get_policy(policy).resolve()
    record = {VERSION: __version__, POLICY: str(policy)}
    if policy.rules:
        record[RULES] = json.dumps([[_key(rule), _parts(rule)] for rule in policy.rules])
    if policy.ops:
        record[OPS] = json.dumps(dict(policy.ops))
    return record


def recorded_policy(record: Mapping[str, Any] | None) -> Policy:
    """The policy that a checkpoint was saved under.

    >>> import amp_jax as amp
    >>> record = {"run": 7, **amp.policy_record("mixed_bfloat16")}
    >>> amp.recorded_policy(record) == amp.get_policy("mixed_bfloat16")
    True

    Args:
        record: What holds the entries of `policy_record`: `manager.metadata(step).custom_metadata` in orbax.

    Raises:
        AmpValueError: Nothing is recorded, it can't be read, or a rule was for a class, which text can't bring back.
        AmpTypeError: `record` is no mapping.
    """
    if record is not None and not isinstance(record, Mapping):
        raise AmpTypeError(f"`record` is a {type(record).__name__}, expected a dict with what `policy_record` gave.")
    if record is None or POLICY not in record:
        raise AmpValueError(
            f"`record` is {dict(record or {})!r:.200}, which names no policy. Save with "
            "custom_metadata=amp.policy_record(policy), or name the policy of that run yourself."
        )
    try:
        rules = [(str(key), str(parts)) for key, parts in json.loads(record.get(RULES, "[]"))]
        ops = {str(op): str(category) for op, category in json.loads(record.get(OPS, "{}")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise AmpValueError(f"`record` has rules that can't be read: {error!r}.") from None
    policy = get_policy(record[POLICY]).with_ops(ops)
    for key, parts in rules:
        if key.startswith(_CLASS):
            raise AmpValueError(
                f"`record` has a rule for the {key}, which text can't bring back. Name the policy of that run "
                f"yourself: amp.get_policy({str(policy)!r}).override({{{key.rpartition('.')[2]}: {parts!r}}})"
            )
        policy = policy.override({key: parts})
    return policy


def _key(rule: Rule) -> str:
    if isinstance(rule.key, str):
        return rule.key
    return f"{_CLASS}{rule.key.__module__}.{rule.key.__qualname__}"


def _parts(rule: Rule) -> str:
    given = {"params": rule.param_dtype, "compute": rule.compute_dtype, "output": rule.output_dtype}
    return ",".join(f"{part}={_dtypes.name(dtype)}" for part, dtype in given.items() if dtype is not None)
