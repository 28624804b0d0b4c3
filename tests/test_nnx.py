"""wrap for nnx: shared Variables, state updates, draws, modes, rules, optimizers."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amp_jax as amp
from tests.programs import both_halves, dot_operands, normal, relative_error, result_dtypes

X = normal(2, 2, 4, 4, 3)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.drop(nnx.relu(self.norm(self.conv(x)))).mean((1, 2))
        return self.head(self.features(x))

    def features(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def net():
    return Net(nnx.Rngs(0))


def pure(model, call=lambda model, x: model(x)):
    """The module's call as a function of its state: what can be traced by `jax.make_jaxpr`."""
    graph, state = nnx.split(model)
    return lambda x: call(nnx.merge(graph, nnx.as_pure(state)), x)


@both_halves
def test_a_call_updates_state_and_draws_as_without(policy):
    plain, wrapped = net(), amp.wrap(net(), policy)
    for _ in range(2):  # traced, then kept
        assert relative_error(wrapped(X), plain(X)) < 0.02
    assert isinstance(wrapped, Net)
    assert jax.tree.structure(nnx.state(wrapped)) == jax.tree.structure(nnx.state(plain))
    assert int(wrapped.drop.rngs.count[...]) == int(plain.drop.rngs.count[...]) == 2
    np.testing.assert_allclose(wrapped.norm.mean[...], plain.norm.mean[...], rtol=1e-2, atol=1e-5)
    assert dot_operands(pure(wrapped), X) == {{"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}[policy]}


def test_the_wrapped_module_shares_its_variables():
    plain = net()
    wrapped = amp.wrap(plain, "mixed_bfloat16")
    wrapped(X)
    assert int(plain.drop.rngs.count[...]) == 1
    assert wrapped.head.kernel is plain.head.kernel


def test_modes_attributes_and_methods():
    model = amp.wrap(net(), "mixed_bfloat16")
    model.eval()
    np.testing.assert_array_equal(model(X), model(X))
    model.note = "set later"
    assert model.note == "set later"
    assert result_dtypes(pure(model, lambda m, x: m.features(x)), jnp.ones((2, 8))) == ["bf16"]
    model.train()
    assert float(jnp.abs(model(X) - model(X)).max()) > 0


def test_one_training_step_moves_everything_and_keeps_float32():
    model = amp.wrap(net(), "mixed_float16")
    optimizer = nnx.Optimizer(model, amp.loss_scaling(optax.adam(1e-2), "mixed_float16"), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model)))

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = amp.value_and_grad(lambda m: jnp.mean(m(x) ** 2), optimizer)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(10)]
    assert losses[-1] < losses[0]
    after = nnx.as_pure(nnx.state(model))
    assert not np.allclose(after["norm"]["mean"], before["norm"]["mean"])
    assert int(model.drop.rngs.count[...]) == 10
    floats = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}


def test_statistics_roll_back_on_a_skipped_step():
    model = amp.wrap(net(), "mixed_float16")
    optimizer = nnx.Optimizer(model, amp.loss_scaling(optax.sgd(1e-2), "mixed_float16"), wrt=nnx.Param)
    kernel, mean = jnp.copy(model.head.kernel[...]), jnp.copy(model.norm.mean[...])

    @nnx.jit
    def step(model, optimizer, x):
        before = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        _, grads = amp.value_and_grad(lambda m: jnp.sum(m(x)) * jnp.inf, optimizer)(model)
        optimizer.update(model, grads)
        nnx.update(model, amp.where_finite(optimizer, nnx.as_pure(nnx.state(model, nnx.BatchStat)), before))

    step(model, optimizer, X)
    assert int(amp.metrics(optimizer)["skipped_steps"]) == 1
    np.testing.assert_array_equal(model.head.kernel[...], kernel)
    np.testing.assert_array_equal(model.norm.mean[...], mean)


def test_nnx_transforms_around_a_wrapped_module():
    model, plain = amp.wrap(net(), "mixed_bfloat16"), net()
    loss = lambda m: jnp.sum(m(X))  # noqa: E731
    assert relative_error(nnx.as_pure(nnx.grad(loss)(model)), nnx.as_pure(nnx.grad(loss)(plain))) < 0.05
    graph, state = nnx.split(model)
    assert relative_error(nnx.merge(graph, state)(X), nnx.merge(*nnx.split(plain))(X)) < 0.05
    assert nnx.remat(lambda m, x: m(x))(model, X).shape == (2, 3)
    assert nnx.clone(model)(X).shape == (2, 3)
    assert pickle.loads(pickle.dumps(model)).head.kernel[...].shape == (8, 3)


def test_rules_by_path_and_class():
    policy = amp.get_policy("mixed_bfloat16").override({"head": "float32", nnx.Conv: "float32", "layers/**": "p=bf16"})
    model = amp.wrap(net(), policy)
    assert result_dtypes(pure(model), X) == ["bf16", "f32"]
    assert result_dtypes(pure(model), X, of="conv_general_dilated") == ["f32"]
    assert model.layers[0].kernel[...].dtype == jnp.bfloat16
    assert model.head.kernel[...].dtype == jnp.float32


@pytest.mark.parametrize(("key", "name"), [("haed", "head"), (nnx.LayerNorm, "LayerNorm")])
def test_a_rule_that_matches_nothing_is_named(key, name):
    with pytest.raises(amp.AmpValueError, match=name):
        amp.wrap(net(), amp.get_policy("mixed_bfloat16").override({key: "float32"}))


def test_submodules_give_their_names_to_the_plan():
    model = amp.wrap(net(), "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(pure(model))(X)
    stacks = {e.primitive.name: str(e.source_info.name_stack) for e in jaxpr.jaxpr.eqns}
    assert "conv" in stacks["conv_general_dilated"]
    assert "head" in stacks["custom_jvp_call"]  # holds the product and how it is differentiated


def test_a_module_called_twice_and_shared():
    class Shared(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(4, 4, rngs=rngs)
            self.b = self.a

        def __call__(self, x):
            return self.b(nnx.relu(self.a(x)))

    model, x = amp.wrap(Shared(nnx.Rngs(0)), "mixed_bfloat16"), normal(0, 2, 4)
    assert result_dtypes(pure(model), x) == ["bf16", "bf16"]
    assert relative_error(model(x), Shared(nnx.Rngs(0))(x)) < 0.02


def test_sown_values_come_out():
    class Sower(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            y = self.dense(x)
            self.sow(nnx.Intermediate, "y", y)
            return y

    model, x = amp.wrap(Sower(nnx.Rngs(0)), "mixed_bfloat16"), normal(0, 2, 4)
    out, captured = nnx.capture(lambda m, x: m(x), nnx.Intermediate)(model, x)
    np.testing.assert_array_equal(jax.tree.leaves(captured)[0], out)


def test_a_call_may_change_what_the_module_is_made_of():
    class Grows(nnx.Module):
        def __init__(self, rngs):
            self.first, self.calls = nnx.Linear(3, 3, rngs=rngs), 0

        def __call__(self, x):
            self.calls += 1
            if self.calls == 2:
                self.cache = nnx.Cache(x)
                self.second = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
            return (self.second if self.calls >= 2 else self.first)(x)

    plain, wrapped = Grows(nnx.Rngs(0)), amp.wrap(Grows(nnx.Rngs(0)), "mixed_bfloat16")
    kernel = wrapped.first.kernel
    for _ in range(3):
        assert relative_error(wrapped(X), plain(X)) < 0.02
    assert wrapped.calls == plain.calls == 3
    assert wrapped.first.kernel is kernel
    np.testing.assert_array_equal(wrapped.cache.get_value(), X)


def test_it_says_what_it_is():
    assert (
        repr(amp.wrap(net(), "mixed_float16"))
        == f"amp.wrap({net()!r}, 'params=float32,compute=float16,output=float32')"
    )
