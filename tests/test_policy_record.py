"""The policy beside a checkpoint: what is written is text, and what is read is the policy of that run."""

import json

import flax.linen as nn
import jax.numpy as jnp
import pytest

import amp_jax as amp

RULES = {"**/norm*": "float32", "head": "p=bf16", "head/bias": "c=f32,o=f16"}


@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "p=f16,c=f32,o=bf16"])
def test_a_policy_comes_back_through_json(name: str) -> None:
    record = json.loads(json.dumps(amp.policy_record(name)))
    assert amp.recorded_policy(record) == amp.get_policy(name)
    assert record["amp_jax.version"] == amp.__version__


def test_rules_and_operations_come_back_in_their_order() -> None:
    # Two rules with one key can't stand in one dict; the later one wins where both say something.
    policy = amp.get_policy("mixed_float16").override(RULES).override({"head": "p=f16"}).with_ops({"exp": "compute"})
    back = amp.recorded_policy(amp.policy_record(policy))
    assert back == policy
    assert back.at("head").param_dtype == jnp.float16
    assert back.at("encoder/norm_2").compute_dtype == jnp.float32


def test_auto_is_recorded_as_what_it_stood_for() -> None:
    # The tests run on CPUs, where auto is bfloat16; the run may resume where it is something else.
    record = amp.policy_record(amp.get_policy("auto").override({"head": "p=auto"}))
    assert "auto" not in str(record)
    assert amp.recorded_policy(record).compute_dtype == jnp.bfloat16
    assert amp.recorded_policy(record).at("head").param_dtype == jnp.bfloat16


def test_a_rule_for_a_class_is_recorded_and_refused_when_read() -> None:
    record = amp.policy_record(amp.get_policy("bfloat16").override({nn.LayerNorm: "p=f32"}))
    with pytest.raises(amp.AmpValueError, match=r"class flax\.linen\.normalization\.LayerNorm.*LayerNorm: 'params=flo"):
        amp.recorded_policy(record)


@pytest.mark.parametrize("record", [None, {}, {"run": 7}])
def test_where_no_policy_is_recorded_the_error_says_what_to_do(record: dict | None) -> None:
    with pytest.raises(amp.AmpValueError, match=r"names no policy.*custom_metadata=amp\.policy_record"):
        amp.recorded_policy(record)


@pytest.mark.parametrize("rules", ["nonsense", '["a"]', "[[1]]", "7", "[" * 100_000])
def test_a_damaged_record_is_an_error(rules: str) -> None:
    record = amp.policy_record("float32") | {"amp_jax.rules": rules}
    with pytest.raises(amp.AmpValueError, match="can't be read"):
        amp.recorded_policy(record)


def test_what_is_no_record_is_an_error() -> None:
    with pytest.raises(amp.AmpTypeError, match="`record` is a str"):
        amp.recorded_policy("mixed_float16")  # type: ignore[arg-type]
