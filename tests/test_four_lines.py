"""A float32 training script becomes a mixed one by at most four changed lines, and trains as before."""

import difflib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amp_jax as amp

LINEN = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

x = jax.random.normal(jax.random.key(0), (32, 4))
y = jnp.sin(x.sum(axis=1, keepdims=True))
model = nn.Sequential([nn.Dense(32), nn.LayerNorm(), nn.tanh, nn.Dense(1)])
tx = optax.adam(1e-2)
params = model.init(jax.random.key(1), x)["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def loss_fn(params, x, y):
    return jnp.mean((model.apply({"params": params}, x) - y) ** 2)


@jax.jit
def step(state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
    return state.apply_gradients(grads=grads), loss


losses = []
for _ in range(60):
    state, loss = step(state, x, y)
    losses.append(loss)
"""

LINEN_MIXED = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import amp_jax as amp

x = jax.random.normal(jax.random.key(0), (32, 4))
y = jnp.sin(x.sum(axis=1, keepdims=True))
model = amp.wrap(nn.Sequential([nn.Dense(32), nn.LayerNorm(), nn.tanh, nn.Dense(1)]), "mixed_float16")
tx = amp.loss_scaling(optax.adam(1e-2), "mixed_float16")
params = model.init(jax.random.key(1), x)["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def loss_fn(params, x, y):
    return jnp.mean((model.apply({"params": params}, x) - y) ** 2)


@jax.jit
def step(state, x, y):
    loss, grads = amp.value_and_grad(loss_fn, state.opt_state)(state.params, x, y)
    return state.apply_gradients(grads=grads), loss


losses = []
for _ in range(60):
    state, loss = step(state, x, y)
    losses.append(loss)
"""

NNX = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx

x = jax.random.normal(jax.random.key(0), (32, 4))
y = jnp.sin(x.sum(axis=1, keepdims=True))
rngs = nnx.Rngs(1)
hidden, last = nnx.Linear(4, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
model = nnx.Sequential(hidden, nnx.LayerNorm(32, rngs=rngs), nnx.tanh, last)
state = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def step(model, state, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    state.update(model, grads)
    return loss


losses = []
for _ in range(60):
    losses.append(step(model, state, x, y))
"""

NNX_MIXED = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import amp_jax as amp

x = jax.random.normal(jax.random.key(0), (32, 4))
y = jnp.sin(x.sum(axis=1, keepdims=True))
rngs = nnx.Rngs(1)
hidden, last = nnx.Linear(4, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
model = nnx.Sequential(hidden, nnx.LayerNorm(32, rngs=rngs), nnx.tanh, last)
model = amp.wrap(model, "mixed_float16")
state = nnx.Optimizer(model, amp.loss_scaling(optax.adam(1e-2), "mixed_float16"), wrt=nnx.Param)


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def step(model, state, x, y):
    loss, grads = amp.value_and_grad(loss_fn, state)(model, x, y)
    state.update(model, grads)
    return loss


losses = []
for _ in range(60):
    losses.append(step(model, state, x, y))
"""

PAIRS = {"linen": (LINEN, LINEN_MIXED), "nnx": (NNX, NNX_MIXED)}
HALF = {"mixed_float16": "f16", "mixed_bfloat16": "bf16"}


def changed_lines(before: str, after: str) -> int:
    """Lines that were added or changed (a blank one is none), or taken away without another in their place."""
    lines = [[line for line in script.splitlines() if line] for script in (before, after)]
    blocks = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    return sum(max(a1 - a0, b1 - b0) for kind, a0, a1, b0, b1 in blocks if kind != "equal")


def run(script: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(script, "script", "exec"), names)
    return names


def forward(names: dict[str, Any]) -> str:
    """The jaxpr of the trained model, as text."""
    model, x = names["model"], names["x"]
    if isinstance(model, nn.Module):
        return str(jax.make_jaxpr(model.apply)({"params": names["state"].params}, x))
    graph, variables = nnx.split(model)
    return str(jax.make_jaxpr(lambda variables, x: nnx.merge(graph, variables)(x))(variables, x))


@pytest.mark.parametrize(("before", "after", "lines"), [
    ("a\nb\nc", "a\nb\nc", 0),
    ("a\nb\nc", "a\nB\nc\n\nd", 2),
    ("a\nb\nc\nd", "a\nd", 2),
])  # fmt: skip
def test_changed_lines_are_counted(before: str, after: str, lines: int) -> None:
    assert changed_lines(before, after) == lines


@pytest.mark.parametrize("api", PAIRS)
def test_at_most_four_lines_change(api: str) -> None:
    # The import, the model, the optimizer, the gradient.
    assert changed_lines(*PAIRS[api]) == 4


@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("api", PAIRS)
def test_the_changed_script_trains_as_before(api: str, policy: str) -> None:
    plain, mixed = run(PAIRS[api][0]), run(PAIRS[api][1].replace("mixed_float16", policy))
    before, after = np.array(jnp.stack(plain["losses"])), np.array(jnp.stack(mixed["losses"]))
    assert before[-1] < before[0] / 4
    # A half dtype has a rounding error of 2^-9 (bfloat16) or 2^-11; the loss is a difference that magnifies it.
    np.testing.assert_allclose(after, before, rtol=0.1)
    assert f":{HALF[policy]}[32,32] = dot_general" in forward(mixed)
    assert f"{HALF[policy]}[" not in forward(plain)
    assert amp.metrics(mixed["state"])["loss_scale"] == (2.0**15 if policy == "mixed_float16" else 1)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(parameters(mixed)))


def parameters(names: dict[str, Any]) -> optax.Params:
    state = names["state"]
    return state.params if hasattr(state, "params") else nnx.state(names["model"], nnx.Param)
