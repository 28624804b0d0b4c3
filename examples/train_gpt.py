"""A character-level GPT trained under three policies, from the same seed and on the same batches.

    python examples/train_gpt.py                        three minutes on two CPU cores; uses a GPU if there is one
    python examples/train_gpt.py --steps 100 --batch 32 --out curves.png

The text is the manual that Python carries with it. The model is plain Flax: no dtype is mentioned in it. In the middle
of the float16 run one loss is multiplied by 2^100, as a broken batch might do it: that step is skipped, the loss scale
halves, and training goes on.
"""

import argparse
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import amp_jax as amp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Settings

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 128
LEARNING_RATE, WARMUP, WEIGHT_DECAY = 3e-3, 20, 0.1
GROWTH_INTERVAL = 50  # 2000 by default; small here so that growth shows in a short run
SPIKE = 2.0**100  # what the loss of one step of the float16 run is multiplied by
SEED, READ_EVERY, VALIDATION_WINDOWS, SAMPLE = 0, 10, 64, 300


# Data


class Data(NamedTuple):
    """Text as numbers: int32 arrays of shape (characters,), and the characters that the numbers stand for."""

    train: np.ndarray
    validation: np.ndarray
    characters: list[str]


def load_data() -> Data:
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    tokens = np.array([number[character] for character in text], np.int32)
    cut = len(tokens) * 9 // 10
    return Data(tokens[:cut], tokens[cut:], characters)


def windows(tokens: np.ndarray, count: tuple[int, ...], seed: int) -> np.ndarray:
    """Random pieces of the text, of shape (*count, CONTEXT + 1): inputs and, one further, targets."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - CONTEXT, count)
    return tokens[starts[..., None] + np.arange(CONTEXT + 1)]


# Model


class Block(nn.Module):
    """One layer of the transformer: attention to what came before, then a small network at each place."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS)
        x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden)


class GPT(nn.Module):
    """Token numbers of shape (batch, length) to logits of shape (batch, length, vocabulary)."""

    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(self.vocabulary, WIDTH)(tokens) + nn.Embed(CONTEXT, WIDTH)(positions)
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


# Training


class Run(NamedTuple):
    """What one policy's training left behind; `history` has the loss and amp.metrics of every step."""

    state: TrainState
    history: dict[str, np.ndarray]
    validation_loss: float
    saved_bytes: int
    seconds: float


def create_state(policy: str, data: Data, steps: int) -> TrainState:
    model = amp.wrap(GPT(len(data.characters)), policy)
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, min(WARMUP, steps - 1), steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=WEIGHT_DECAY))
    tx = amp.loss_scaling(tx, policy, growth_interval=GROWTH_INTERVAL)
    params = jax.jit(model.init)(jax.random.key(SEED), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def mean_loss(params: Any, state: TrainState, batch: jax.Array, spike: Any = 1.0) -> jax.Array:
    logits = state.apply_fn({"params": params}, batch[:, :-1])
    return spike * optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@jax.jit
def train_step(state: TrainState, batch: jax.Array, spike: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    loss, grads = amp.value_and_grad(mean_loss, state.opt_state)(state.params, state, batch, spike)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss / spike, **amp.metrics(state.opt_state)}


def train(policy: str, data: Data, steps: int, batch: int, bar: Progress) -> Run:
    state = create_state(policy, data, steps)
    batches = windows(data.train, (steps, batch), SEED)
    task, history, started = bar.add_task(policy, total=steps, now=""), [], 0.0
    for i in range(steps):
        broken = policy == "mixed_float16" and i == steps // 2
        state, read = train_step(state, batches[i], np.float32(SPIKE if broken else 1.0))
        history.append(read)
        # Reading waits for the device, so not every step does it; the first one, which compiles, isn't timed.
        if i % READ_EVERY == 0 or i == steps - 1:
            now = jax.device_get(read)
            started = started or time.perf_counter()
            text = f"loss {now['loss']:.3f}, loss scale {now['loss_scale']:.0f}, skipped {now['skipped_steps']}"
            bar.update(task, completed=i + 1, now=text)
    seconds = (time.perf_counter() - started) / max(steps - 1, 1)
    held_out = windows(data.validation, (VALIDATION_WINDOWS,), SEED)
    loss = jax.jit(mean_loss)(state.params, state, held_out)
    history = jax.tree.map(lambda *values: np.array(values), *jax.device_get(history))
    return Run(state, history, float(loss), saved_bytes(state, batches[0]), seconds)


def saved_bytes(state: TrainState, batch: np.ndarray) -> int:
    """What the forward pass keeps for the backward pass, beside the parameters and the batch themselves."""
    traced = jax.make_jaxpr(lambda params, batch: jax.vjp(lambda p: mean_loss(p, state, batch), params)[1])
    jaxpr = traced(state.params, batch).jaxpr
    kept = {id(var): var.aval for var in jaxpr.outvars if not any(var is given for given in jaxpr.invars)}
    return sum(aval.size * aval.dtype.itemsize for aval in kept.values())


# Report


def table(runs: dict[str, Run]) -> Table:
    out = Table(title="One GPT, one seed, the same batches", box=box.SIMPLE_HEAD)
    out.caption = "loss: on held-out text; saved: for the backward pass, parameters apart"
    out.add_column("policy", no_wrap=True)
    for name in ("loss", "to f32", "skips", "loss scale", "params MB", "saved MB", "s/step"):
        out.add_column(name, justify="right")
    reference = runs["float32"].validation_loss
    for policy, run in runs.items():
        difference = f"{100 * (run.validation_loss / reference - 1):+.2f}%"
        scaling = str(run.history["skipped_steps"][-1]), f"{run.history['loss_scale'][-1]:.0f}"
        parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.params))
        sizes = f"{parameters / 1e6:.2f}", f"{run.saved_bytes / 1e6:.1f}"
        out.add_row(policy, f"{run.validation_loss:.4f}", difference, *scaling, *sizes, f"{run.seconds:.3f}")
    return out


def plot(runs: dict[str, Run], path: Path) -> None:
    figure, (losses, scale) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", width_ratios=(3, 2))
    for (policy, run), style in zip(runs.items(), ("-", "--", ":"), strict=True):
        losses.plot(run.history["loss"], style, label=policy, linewidth=1.4)
    losses.set(xlabel="step", ylabel="training loss", title="Three policies, one curve")
    losses.legend(frameon=False)
    scales = runs["mixed_float16"].history["loss_scale"]
    scale.step(range(len(scales)), scales, where="post", color="C2")
    scale.axvline(len(scales) // 2, color="0.6", linestyle=":", label="injected overflow")
    scale.set_yscale("log", base=2)
    scale.set(xlabel="step", ylabel="loss scale", title="float16: growth, skip, recovery")
    scale.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


@jax.jit
def write(state: TrainState, window: jax.Array, key: jax.Array) -> jax.Array:
    """SAMPLE more characters behind a window of shape (CONTEXT,): each drawn from what the model says of the last."""

    def one(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": state.params}, window[None])[0, -1]
        character = jax.random.categorical(key, logits / 0.7)
        return jnp.append(window[1:], character), character

    return jax.lax.scan(one, window, jax.random.split(key, SAMPLE))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="training steps for each policy (default: 250)")
    parser.add_argument("--batch", type=int, default=8, help="pieces of text a step (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("out/train_gpt.png"), help="the picture")
    args = parser.parse_args()
    console, data = Console(), load_data()
    console.print(f"{len(data.train):,} characters, {args.batch} x {CONTEXT} of them a step, on {jax.devices()[0]}")
    columns = TextColumn("{task.description:15}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=console) as bar:
        runs = {policy: train(policy, data, args.steps, args.batch, bar) for policy in POLICIES}
    console.print(table(runs))
    plot(runs, args.out)
    written = np.asarray(write(runs["mixed_float16"].state, data.validation[:CONTEXT], jax.random.key(SEED)))
    console.print(f"{args.out} shows the curves. What the float16 model writes:\n")
    console.print("".join(data.characters[i] for i in written), markup=False, highlight=False)


if __name__ == "__main__":
    main()
