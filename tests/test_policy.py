"""Policies: presets, jmp's grammar, rules, and `auto`."""

import pickle
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import amp_jax as amp
from amp_jax import AmpTypeError, AmpValueError

NAMES = st.sampled_from(["float32", "bfloat16", "float16"])


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("float32", "params=float32,compute=float32,output=float32"),
        ("bfloat16", "params=bfloat16,compute=bfloat16,output=bfloat16"),
        ("mixed_bfloat16", "params=float32,compute=bfloat16,output=float32"),
        ("mixed_float16", "params=float32,compute=float16,output=float32"),
        ("auto", "params=float32,compute=auto,output=float32"),
        ("p=f32,c=bf16,o=f32", "params=float32,compute=bfloat16,output=float32"),
        ("params=float32, compute=float16", "params=float32,compute=float16,output=float16"),
        ("c=f16", "params=float32,compute=float16,output=float16"),
        ("p=bf16", "params=bfloat16,compute=bfloat16,output=bfloat16"),
    ],
)
def test_presets_and_grammar(spec, text):
    assert str(amp.get_policy(spec)) == text


@pytest.mark.parametrize(
    "spec", ["p=f32,c=bf16,o=f32", "c=f16", "params=float16,output=float32", "float16", "bfloat16", "o=f16"]
)
def test_the_grammar_means_what_it_means_in_jmp(spec):
    theirs = jmp.get_policy(spec)
    ours = amp.get_policy(spec)
    assert [ours.param_dtype, ours.compute_dtype, ours.output_dtype] == [
        np.dtype(d) for d in (theirs.param_dtype, theirs.compute_dtype, theirs.output_dtype)
    ]


@given(NAMES, NAMES, NAMES)
def test_a_policy_survives_text_jmp_and_pickle(p, c, o):
    policy = amp.Policy(p, c, o)
    assert amp.get_policy(str(policy)) == policy == amp.get_policy(policy) == amp.get_policy(policy.to_jmp())
    assert hash(pickle.loads(pickle.dumps(policy))) == hash(policy)


@pytest.mark.parametrize("spec", ["mixed_bf61", "mixed_float32", "bfloat61", "x=f32", "p=f32,p=f16", "p=", "int8"])
def test_an_unknown_spec_is_named(spec):
    with pytest.raises(AmpValueError) as error:
        amp.get_policy(spec)
    assert repr(spec.split(",")[-1].split("=")[0])[1:-1].split("=")[0] in str(error.value)


def test_the_error_lists_presets_and_the_nearest():
    with pytest.raises(AmpValueError, match=r"Did you mean 'mixed_bfloat16'.*mixed_float16"):
        amp.get_policy("mixed_bfloat61")


@pytest.mark.parametrize("spec", [None, 16, jnp.float32, ["float32"]])
def test_what_is_no_policy_is_a_type_error(spec):
    with pytest.raises(AmpTypeError, match="`policy` is"):
        amp.get_policy(spec)


def test_float8_is_no_compute_dtype():
    with pytest.raises(AmpValueError, match="`compute_dtype` is float8_e4m3fn"):
        amp.Policy("float32", "float8_e4m3fn", "float32")


def test_later_rules_win_and_parts_are_kept():
    policy = amp.get_policy("mixed_float16").override({"base/**": "p=bf16", "base/out": "float32", "**/out": "c=bf16"})
    assert str(policy.at("base/in")) == "params=bfloat16,compute=float16,output=float32"
    assert str(policy.at("base/out")) == "params=float32,compute=bfloat16,output=float32"
    assert str(policy.at("head")) == str(amp.get_policy("mixed_float16"))


def test_class_rules_become_paths_and_every_key_has_to_match():
    modules = {"": nn.Module, "a": nn.Dense, "a/norm": nn.LayerNorm, "b[0]": nn.LayerNorm}
    bound = amp.get_policy("mixed_bfloat16").override({nn.LayerNorm: "float32"}).bind(modules)
    assert bound.at("a/norm").compute_dtype == bound.at("b[0]").compute_dtype == jnp.float32
    assert bound.at("a").compute_dtype == jnp.bfloat16
    for rules, name in (({"a/nrom": "float32"}, "a/norm"), ({nn.BatchNorm: "float32"}, "BatchNorm")):
        with pytest.raises(AmpValueError, match=name):
            amp.get_policy("mixed_bfloat16").override(rules).bind(modules)


def test_rules_count_when_a_checkpoint_is_cast():
    policy = amp.get_policy("bfloat16").override({"**/norm": "float32"})
    params = {"params": {"a": {"norm": {"scale": jnp.ones(2)}, "dense": {"kernel": jnp.ones(2)}}}}
    cast = policy.cast_to_param(params)["params"]["a"]
    assert cast["norm"]["scale"].dtype == jnp.float32
    assert cast["dense"]["kernel"].dtype == jnp.bfloat16
    with pytest.raises(AmpValueError, match="no rules"):
        policy.to_jmp()


def test_ops_take_known_categories_alone():
    policy = amp.get_policy("mixed_bfloat16").with_ops({"exp": "compute"}).with_ops({"mine": "full"})
    assert dict(policy.ops) == {"exp": "compute", "mine": "full"}
    jaxpr = str(jax.make_jaxpr(amp.autocast(jnp.exp, policy))(jnp.ones(2)))
    assert "bf16[2] = exp" in jaxpr
    with pytest.raises(AmpValueError, match=r"'fast' of 'exp'.*Valid are: compute"):
        policy.with_ops({"exp": "fast"})


def test_auto_is_bfloat16_on_a_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        assert amp.get_policy("auto").resolve() == amp.get_policy("mixed_bfloat16")


def test_policies_start_no_backend():
    code = """
import jax, optax
jax.config.update("jax_platforms", "no_such_platform")  # starting a backend would raise
import amp_jax as amp
policy = amp.get_policy("auto").override({"a/**": "p=half"}).with_output_dtype("bf16")
amp.autocast(lambda x: x, policy), amp.loss_scaling(optax.sgd(1.0), "auto"), amp.precision("auto"), str(policy)
try:
    jax.devices()
except RuntimeError:
    print("untouched")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "untouched"
