"""The public names: exactly these, each with a docstring that shows how."""

import types

import pytest

import amp_jax as amp

NAMES = {
    "Policy", "get_policy", "autocast", "precision", "full_precision", "wrap", "value_and_grad", "grad", "metrics",
    "where_finite", "scale_loss", "unscale", "dynamic_loss_scaling", "static_loss_scaling", "no_loss_scaling",
    "loss_scaling", "load_loss_scale", "loss_scale_settings", "check_health", "nonfinite_leaves", "all_finite",
    "accumulate_gradients", "register_op", "explain", "Report", "AmpError", "AmpTypeError", "AmpValueError",
    "save_params", "load_params", "SaveReport", "tabulate", "ModuleReport", "change_policy", "orbax_save_args",
    "policy_record", "recorded_policy",
    "master_weights", "stochastic_round", "stochastic_rounding", "ema",
}  # fmt: skip


def test_the_names_are_these():
    assert set(amp.__all__) == NAMES
    public = {n for n, held in vars(amp).items() if not n.startswith("_") and not isinstance(held, types.ModuleType)}
    assert public == NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"Report", "AmpTypeError", "AmpValueError"}))
def test_every_name_has_a_docstring_with_an_example(name):
    assert ">>>" in getattr(amp, name).__doc__
