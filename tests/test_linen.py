"""wrap for linen: the same tree, state and draws; products in half; rules by path and class."""

import pickle
from unittest.mock import Mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import amp_jax as amp
from tests.programs import LOW, both_halves, dot_operands, normal, relative_error, result_dtypes

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
X = normal(2, 2, 4, 4, 3)


class Net(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(self.width, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "pooled", x.mean((1, 2)))
        return nn.Dense(3, kernel_init=nn.initializers.orthogonal())(x.mean((1, 2)))

    @nn.compact
    def features(self, x):
        return nn.Dense(2)(x)


class Inside(nn.Module):
    wrapped: bool

    def setup(self):
        make = (lambda m: amp.wrap(m, "mixed_float16")) if self.wrapped else (lambda m: m)
        self.first = make(nn.Dense(4))
        self.rest = [make(nn.Dense(4)), nn.Dense(2)]

    @nn.compact
    def __call__(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        last = nn.Dense(5)
        return (amp.wrap(last, "mixed_float16") if self.wrapped else last)(x)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_init_gives_the_same_tree_and_the_same_numbers():
    same(amp.wrap(Net(), "mixed_bfloat16").init(KEYS, X), Net().init(KEYS, X))


@both_halves
def test_apply_updates_state_and_draws_as_without(policy):
    variables = Net().init(KEYS, X)
    call = {"mutable": ["batch_stats", "intermediates"], "rngs": {"dropout": jax.random.key(3)}}
    want, want_state = Net().apply(variables, X, **call)
    got, state = amp.wrap(Net(), policy).apply(variables, X, **call)
    assert relative_error(got, want) < 0.02
    assert jax.tree.structure(state) == jax.tree.structure(want_state)
    assert relative_error(state, want_state) < 0.01
    assert {x.dtype for x in jax.tree.leaves(state["batch_stats"])} == {np.dtype("float32")}


def test_running_statistics_do_not_stop_short():
    norm = amp.wrap(nn.BatchNorm(use_running_average=False, momentum=0.99), "mixed_bfloat16")
    variables = norm.init(jax.random.key(0), jnp.ones((2, 1)))

    def step(stats, _):
        _, new = norm.apply({**variables, "batch_stats": stats}, jnp.ones((2, 1)), mutable=["batch_stats"])
        return new["batch_stats"], None

    stats, _ = jax.lax.scan(step, variables["batch_stats"], None, length=1000)
    np.testing.assert_allclose(stats["mean"], 1 - 0.99**1000, rtol=1e-5)  # in bfloat16 it stops at 0.836


def test_products_are_half_forward_and_backward():
    model = amp.wrap(Net(), "mixed_bfloat16")
    variables = Net().init(KEYS, X)

    def loss(params):
        return jnp.sum(model.apply({**variables, "params": params}, X, train=False))

    assert dot_operands(jax.grad(loss), variables["params"]) == {"bfloat16"}
    assert {g.dtype.name for g in jax.tree.leaves(jax.grad(loss)(variables["params"]))} == {"float32"}


def test_it_is_still_the_authors_module():
    model = amp.wrap(Net(width=5), "mixed_bfloat16")
    assert isinstance(model, Net)
    assert model.width == 5
    assert model == amp.wrap(Net(width=5), "mixed_bfloat16")
    assert hash(model) == hash(model.clone())
    assert type(model.clone(width=6)) is type(model)
    assert pickle.loads(pickle.dumps(model)) == model
    assert repr(model) == f"amp.wrap({Net(width=5)!r}, 'params=float32,compute=bfloat16,output=float32')"
    assert model.bind(Net(width=5).init(KEYS, X))(X, train=False).shape == (2, 3)
    assert "Dense_0" in model.tabulate(KEYS, X)
    out, variables = model.init_with_output(KEYS, X)
    assert out.shape == (2, 3)
    assert set(variables) >= {"params", "batch_stats"}


def test_another_method_runs_under_the_policy_too():
    model = amp.wrap(Net(), "mixed_bfloat16")
    x = jnp.ones((2, 3))
    variables = model.init(jax.random.key(0), x, method="features")
    assert result_dtypes(lambda v: model.apply(v, x, method=Net.features), variables) in (["bf16"], ["f32"])
    assert result_dtypes(lambda v: model.apply(v, x, method="features"), variables) == ["bf16"]


def test_as_a_part_of_another_module_it_keeps_its_names():
    x = jnp.ones((2, 3))
    variables = Inside(False).init(jax.random.key(0), x)
    same(Inside(True).init(jax.random.key(0), x), variables)
    assert result_dtypes(lambda v: Inside(True).apply(v, x), variables) == ["f16", "f16", "f32", "f16"]


LIFTED = {
    "remat": lambda kind: nn.remat(kind)(4),
    "jit": lambda kind: nn.jit(kind)(4),
    "vmap": lambda kind: nn.vmap(kind, in_axes=0, variable_axes={"params": None}, split_rngs={"params": False})(4),
}


@pytest.mark.parametrize("name", list(LIFTED))
@pytest.mark.parametrize("outside", [True, False])
def test_under_and_around_lifted_transforms(name, outside):
    class Model(nn.Module):
        wrapped: bool

        @nn.compact
        def __call__(self, x):
            return nn.relu(LIFTED[name](nn.Dense)(x))

    x, plain = normal(0, 2, 3), Model(False)
    variables = plain.init(jax.random.key(0), x)
    model = amp.wrap(plain, "mixed_bfloat16") if outside else amp.wrap(Model(True), "mixed_bfloat16")
    assert result_dtypes(lambda v: model.apply(v, x), variables) == ["bf16"]
    assert relative_error(model.apply(variables, x), plain.apply(variables, x)) < 0.01


def test_scanned_and_rematerialised_layers():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.remat(nn.Dense, prevent_cse=False)
            body = lambda dense, carry, _: (carry + nn.gelu(dense(carry)), None)  # noqa: E731
            return nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(layer(4), x, None)[
                0
            ]

    x = normal(0, 2, 4)
    variables = Layers().init(jax.random.key(0), x)
    model = amp.wrap(Layers(), "mixed_bfloat16")
    same(model.init(jax.random.key(0), x), variables)
    grads = jax.grad(lambda v: jnp.sum(model.apply(v, x)))
    assert dot_operands(grads, variables) == {"bfloat16"}
    assert relative_error(grads(variables), jax.grad(lambda v: jnp.sum(Layers().apply(v, x)))(variables)) < 0.02


def test_a_train_state_learns():
    model = amp.wrap(nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)]), "mixed_float16")
    x = normal(0, 16, 4)
    params = model.init(jax.random.key(0), x)
    tx = amp.loss_scaling(optax.adam(1e-2), "mixed_float16")
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        loss = lambda p: jnp.mean((state.apply_fn(p, x) - x[:, :1] * x[:, 1:2]) ** 2)  # noqa: E731
        value, grads = amp.value_and_grad(loss, state.opt_state)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(60):
        state, value = step(state)
        losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    assert int(amp.metrics(state)["skipped_steps"]) == 0


class Feed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones, name="wo")(nn.Dense(4, name="wi")(x))


def test_a_rule_saves_the_one_module_that_overflows():
    x = jnp.full((1, 4), 1.0)
    variables = {
        "params": {"wi": {"kernel": jnp.full((4, 4), 4375.0), "bias": jnp.zeros(4)}, "wo": {"kernel": jnp.ones((4, 1))}}
    }
    policy = amp.get_policy("mixed_float16")
    assert np.isinf(amp.wrap(Feed(), policy).apply(variables, x))
    saved = amp.wrap(Feed(), policy.override({"**/wo": "float32"}))
    np.testing.assert_allclose(saved.apply(variables, x), 7e4, rtol=1e-3)
    assert result_dtypes(lambda v: saved.apply(v, x), variables) == ["f16", "f32"]


def test_rules_by_class_and_for_stored_parameters():
    policy = amp.get_policy("mixed_bfloat16").override(
        {nn.Dense: "p=bf16", "Dense_0": "c=f32", nn.BatchNorm: "float32"}
    )
    model = amp.wrap(Net(), policy)
    variables = model.init(KEYS, X)
    stored = jax.tree.map(lambda p: p.dtype.name, variables["params"])
    assert set(stored["Dense_0"].values()) == {"bfloat16"}
    assert set(stored["Conv_0"].values()) == set(stored["BatchNorm_0"].values()) == {"float32"}
    assert result_dtypes(lambda v: model.apply(v, X, train=False), variables) == ["f32"]


def test_half_stored_parameters_are_not_cast_on_the_way():
    model = amp.wrap(nn.Dense(4), amp.Policy("bfloat16", "bfloat16", "float32"))
    variables = model.init(jax.random.key(0), jnp.ones((2, 3)))
    jaxpr = str(jax.make_jaxpr(model.apply)(variables, jnp.ones((2, 3))))
    assert "f32[3,4]" not in jaxpr.replace("bf16[3,4]", "").replace(":f32[3,4] = convert_element_type", "")
    assert dot_operands(model.apply, variables, jnp.ones((2, 3))) == {"bfloat16"}


@pytest.mark.parametrize(("key", "name"), [("Dnse_0", "Dense_0"), (nn.LayerNorm, "LayerNorm"), ("deep/**", "deep")])
def test_a_rule_that_matches_nothing_is_named(key, name):
    model = amp.wrap(Net(), amp.get_policy("mixed_bfloat16").override({key: "float32"}))
    with pytest.raises(amp.AmpValueError, match=name):
        model.init(KEYS, X)


def test_a_float32_policy_gives_the_plain_program():
    variables = Net().init(KEYS, X)
    programs = [
        jax.make_jaxpr(lambda v, m=m: m.apply(v, X, train=False))(variables)
        for m in (Net(), amp.wrap(Net(), "float32"))
    ]
    assert str(programs[0]) == str(programs[1])


def test_wrap_and_autocast_plan_alike():
    variables = Net().init(KEYS, X)
    wrapped = jax.make_jaxpr(lambda v: amp.wrap(Net(), "mixed_bfloat16").apply(v, X, train=False))(variables)
    cast = jax.make_jaxpr(amp.autocast(lambda v: Net().apply(v, X, train=False), "mixed_bfloat16"))(variables)
    assert [e.primitive.name for e in wrapped.jaxpr.eqns] == [e.primitive.name for e in cast.jaxpr.eqns]


@pytest.mark.parametrize("policy", list(LOW))
def test_outputs_leave_in_the_output_dtype(policy):
    variables = Net().init(KEYS, X)
    half = amp.get_policy(policy).with_output_dtype("bfloat16")
    assert amp.wrap(Net(), policy).apply(variables, X, train=False).dtype == jnp.float32
    assert amp.wrap(Net(), half).apply(variables, X, train=False).dtype == jnp.bfloat16


class Odd(nn.Module):
    head: nn.Module = nn.Dense(2)

    @nn.compact
    def __call__(self, x, scale: str = "one"):
        TRACED(scale)
        return {"a": self.head(x), "said": scale, "how": len}


TRACED = Mock()


def test_an_eager_apply_traces_once_and_returns_what_is_no_array():
    model = amp.wrap(Odd(), "mixed_bfloat16")
    variables = model.init(KEYS, X)
    TRACED.reset_mock()
    outs = [model.apply(variables, X, scale="two") for _ in range(3)]
    TRACED.assert_called_once_with("two")
    assert outs[2]["said"] == "two"
    assert outs[2]["how"] is len
    assert model.apply(variables, X)["said"] == "one"  # another argument, another trace
    same(outs[0]["a"], outs[2]["a"])


def test_method_names_a_submodule_or_a_function_of_the_module():
    model = amp.wrap(Odd(), "mixed_bfloat16")
    variables = model.init(KEYS, X)
    for method in ("head", lambda m, x: m.head(x), Odd.__call__):
        operands = dot_operands(
            lambda x, method=method: jax.tree.leaves(model.apply(variables, x, method=method))[0], X
        )
        assert operands == {"bfloat16"}


def test_parameters_that_the_author_made_half_stay_half():
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(2)(x)
            return nn.Dense(2, param_dtype=jnp.float16)(x)

    params = amp.wrap(Half(), "params=bfloat16,compute=bfloat16,output=float32").init(KEYS, X)["params"]
    assert {x.dtype.name for x in jax.tree.leaves(params["Dense_0"])} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(params["Dense_1"])} == {"float16"}
