"""Automatic mixed precision for JAX and Flax.

    policy ──> autocast ──> a function in mixed precision     (trace -> plan -> emit)
       │          │
       │          └──> wrap: the same for a Flax module
       │
       └──> loss_scaling ──> an Optax optimizer that skips the steps that overflow
                   │
                   └──> value_and_grad: the true loss, and unscaled float32 gradients

A `Policy` says in which dtype parameters live, work runs and results leave. `autocast` applies it to a computation,
operation by operation; `wrap` to a Flax module. Where the compute dtype is float16, gradients need a loss scale:
`loss_scaling` keeps it in the optimizer state, `value_and_grad` uses it.
"""

from amp_jax._accumulate import accumulate_gradients
from amp_jax._autocast import autocast, full_precision, precision
from amp_jax._ema import ema
from amp_jax._errors import AmpError, AmpTypeError, AmpValueError
from amp_jax._explain import explain
from amp_jax._finite import all_finite
from amp_jax._gradients import grad, scale_loss, unscale, value_and_grad
from amp_jax._health import check_health, nonfinite_leaves
from amp_jax._loading import load_params
from amp_jax._master import master_weights
from amp_jax._module_report import ModuleReport
from amp_jax._opt_state import metrics, where_finite
from amp_jax._optimizer import dynamic_loss_scaling, loss_scaling, no_loss_scaling, static_loss_scaling
from amp_jax._policy import Policy, get_policy
from amp_jax._policy_record import policy_record, recorded_policy
from amp_jax._presets import load_loss_scale, loss_scale_settings
from amp_jax._register import register_op
from amp_jax._report import Report
from amp_jax._save_report import SaveReport
from amp_jax._saving import save_params
from amp_jax._stochastic_optimizer import stochastic_rounding
from amp_jax._stochastic_round import stochastic_round
from amp_jax._tabulate import tabulate
from amp_jax._training_state import change_policy, orbax_save_args
from amp_jax._wrap import wrap

__version__ = "0.1.0"

__all__ = [
    "AmpError",
    "AmpTypeError",
    "AmpValueError",
    "ModuleReport",
    "Policy",
    "Report",
    "SaveReport",
    "accumulate_gradients",
    "all_finite",
    "autocast",
    "change_policy",
    "check_health",
    "dynamic_loss_scaling",
    "ema",
    "explain",
    "full_precision",
    "get_policy",
    "grad",
    "load_loss_scale",
    "load_params",
    "loss_scale_settings",
    "loss_scaling",
    "master_weights",
    "metrics",
    "no_loss_scaling",
    "nonfinite_leaves",
    "orbax_save_args",
    "policy_record",
    "precision",
    "recorded_policy",
    "register_op",
    "save_params",
    "scale_loss",
    "static_loss_scaling",
    "stochastic_round",
    "stochastic_rounding",
    "tabulate",
    "unscale",
    "value_and_grad",
    "where_finite",
    "wrap",
]
