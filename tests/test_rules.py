"""Rules in whole models, linen and nnx: which modules they mean, and what they change there."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amp_jax as amp
from tests.programs import normal, relative_error, result_dtypes

X = normal(0, 4, 8)
MIXED = amp.get_policy("mixed_bfloat16")


class LBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8, name="proj")(nn.gelu(nn.Dense(8, name="fc")(x)))


class LModel(nn.Module):
    def setup(self):
        self.blocks = [LBlock(), LBlock()]
        self.heads = {"a": nn.Dense(8), "b": nn.Dense(8)}

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["b"](self.heads["a"](x))


class NBlock(nnx.Module):
    def __init__(self, rngs):
        self.fc, self.proj = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.proj(nnx.gelu(self.fc(x)))


class NModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([NBlock(rngs), NBlock(rngs)])
        self.heads = nnx.Dict(a=nnx.Linear(8, 8, rngs=rngs), b=nnx.Linear(8, 8, rngs=rngs))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["b"](self.heads["a"](x))


def linen_program(model, policy):
    """The wrapped model as a function of x, and its parameters."""
    model = amp.wrap(model, policy)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    return functools.partial(model.apply, variables), variables.get("params", {})


def nnx_program(model, policy):
    model = amp.wrap(model, policy)
    graph, state = nnx.split(model)
    return lambda x: nnx.merge(graph, nnx.as_pure(state))(x), nnx.as_pure(nnx.state(model, nnx.Param))


PROGRAMS = {"linen": (LModel, linen_program), "nnx": (NModel, nnx_program)}
both_libraries = pytest.mark.parametrize("library", list(PROGRAMS))
L, F = "bf16", "f32"
# How a library spells the paths of lists and dicts, and its classes.
SPELLED = {
    "linen": {"b0": "blocks_0", "b1": "blocks_1", "ha": "heads_a", "block": LBlock, "dense": nn.Dense},
    "nnx": {"b0": "blocks/0", "b1": "blocks/1", "ha": "heads/a", "block": NBlock, "dense": nnx.Linear},
}


@both_libraries
@pytest.mark.parametrize(
    ("rules", "want"),  # of both blocks' fc and proj, and of both heads
    [
        ({"b0": "float32"}, [F, F, L, L, L, L]),
        ({"b1/fc": "c=f32", "ha": "c=f32"}, [L, L, F, L, F, L]),
        ({"**/proj": "float32"}, [L, F, L, F, L, L]),
        ({"block": "float32"}, [F, F, F, F, L, L]),
        ({"dense": "float32"}, [F] * 6),
        ({"block": "float32", "**/fc": "c=bf16"}, [L, F, L, F, L, L]),  # a rule inside of what another covers
        ({"**/fc": "c=bf16", "block": "float32"}, [F, F, F, F, L, L]),  # the later one wins, whichever is inside
        ({"**": "c=f32", "b0": "c=bf16"}, [L, L, F, F, F, F]),
        ({"dense": "p=bf16"}, [L] * 6),
        ({"dense": "o=bf16"}, [L] * 6),
    ],
)
def test_which_products_a_compute_rule_means(library, rules, want):
    make, program = PROGRAMS[library]
    spelled = SPELLED[library]
    keys = {}
    for key, spec in rules.items():
        first, *rest = key.split("/")
        keys["/".join([spelled[first], *rest]) if rest and first in spelled else spelled.get(key, key)] = spec
    apply, _ = program(make(), MIXED.override(keys))
    assert result_dtypes(apply, X) == want


class Special(nn.Dense):
    """A subclass."""


class NSpecial(nnx.Linear):
    """A subclass."""


@both_libraries
def test_a_class_means_its_subclasses_and_not_its_bases(library):
    if library == "linen":
        model, program, base, sub = nn.Sequential([Special(8), nn.Dense(8)]), linen_program, nn.Dense, Special
    else:
        layers = NSpecial(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        model, program, base, sub = nnx.Sequential(*layers), nnx_program, nnx.Linear, NSpecial
    assert result_dtypes(program(model, MIXED.override({base: "float32"}))[0], X) == [F, F]
    assert result_dtypes(program(model, MIXED.override({sub: "float32"}))[0], X) == [F, L]


@both_libraries
@pytest.mark.parametrize("key", ["**", "class"])
def test_a_rule_for_the_whole_model_holds_in_its_own_products_too(library, key):
    if library == "linen":
        model, program, kind = nn.Dense(8), linen_program, nn.Dense
    else:
        model, program, kind = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx_program, nnx.Linear
    policy = MIXED.override({kind if key == "class" else key: "c=f32,o=bf16"})
    apply, _ = program(model, policy)
    assert result_dtypes(apply, X) == [F]
    assert apply(X).dtype == jnp.bfloat16


@both_libraries
def test_the_whole_models_results_are_named_by_no_rule(library):
    """A dict that is returned may have the keys of modules: these are the results of the whole model."""
    if library == "linen":

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return {"head": nn.Dense(8, name="head")(x)}

        apply, _ = linen_program(Model(), MIXED.override({"head": "o=bf16"}))
    else:

        class Model(nnx.Module):
            def __init__(self):
                self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

            def __call__(self, x):
                return {"head": self.head(x)}

        apply, _ = nnx_program(Model(), MIXED.override({"head": "o=bf16"}))
    assert apply(X)["head"].dtype == jnp.float32


@both_libraries
def test_an_output_rule_rounds_what_leaves_its_module_and_nothing_inside(library):
    if library == "linen":

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(8, name="head")(x)

    else:

        class Model(nnx.Module):
            def __init__(self):
                self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

            def __call__(self, x):
                return self.head(x)

    program = PROGRAMS[library][1]
    exact = program(Model(), MIXED.override({"head": "c=f32"}))[0](X)
    for name in ("bf16", "f16"):
        half = program(Model(), MIXED.override({"head": f"c=f32,o={name}"}))[0](X)
        rounded = exact.astype({"bf16": jnp.bfloat16, "f16": jnp.float16}[name])
        np.testing.assert_array_equal(half, rounded.astype(jnp.float32))


@both_libraries
def test_a_float32_output_keeps_float32_behind_a_half_module(library):
    """The residual stream behind a module whose output is float32 isn't rounded again."""
    policy = MIXED.override({SPELLED[library]["block"]: "o=f32"})
    make, program = PROGRAMS[library]
    apply, _ = program(make(), policy)
    jaxpr = str(jax.make_jaxpr(apply)(X))
    plain = str(jax.make_jaxpr(program(make(), MIXED)[0])(X))
    assert result_dtypes(apply, X) == [L] * 6
    to_float32 = "= convert_element_type[new_dtype=float32"
    assert jaxpr.count(to_float32) > plain.count(to_float32)


@both_libraries
def test_a_half_output_of_a_half_module_changes_nothing_behind_it(library):
    """The plan knows that it is half: the residual adds of the next block stay half too."""
    make, program = PROGRAMS[library]
    ruled, plain = (program(make(), p)[0] for p in (MIXED.override({SPELLED[library]["block"]: "o=bf16"}), MIXED))
    assert result_dtypes(ruled, X, of="add") == result_dtypes(plain, X, of="add")
    casts = [result_dtypes(apply, X, of="convert_element_type").count(F) for apply in (ruled, plain)]
    assert casts[0] == casts[1]


@both_libraries
@pytest.mark.parametrize("rule", ["o=bf16", "float16", "o=f32", "c=f32,o=f16"])
def test_output_rules_in_a_model_give_the_right_numbers_and_gradients(library, rule):
    make, program = PROGRAMS[library]
    policy = MIXED.override({SPELLED[library]["block"]: rule})
    apply, _ = program(make(), policy)
    want, _ = program(make(), "float32")
    assert relative_error(apply(X), want(X)) < 0.03
    assert apply(X).dtype == jnp.float32
    grads = jax.grad(lambda x: jnp.sum(apply(x) ** 2))(X), jax.grad(lambda x: jnp.sum(want(x) ** 2))(X)
    assert relative_error(*grads) < 0.05


def test_an_output_rule_leaves_the_carry_of_a_scan_as_it_is():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8, name="dense")(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return scan(name="layers")(x, None)[0]

    for rule in ("bfloat16", "o=f32", "c=f32,o=f16"):
        apply, _ = linen_program(Model(), MIXED.override({"layers": rule}))
        assert jax.eval_shape(apply, X).dtype == jnp.float32
        assert result_dtypes(apply, X) == [F if "c=f32" in rule else L]


@both_libraries
def test_the_authors_half_dtype_is_kept_and_a_rule_wins_over_it(library):
    if library == "linen":
        half = functools.partial(nn.Dense, dtype=jnp.float16, param_dtype=jnp.float16)
        make, program = lambda: nn.Sequential([half(8), half(8)]), linen_program
    else:
        half = functools.partial(nnx.Linear, 8, 8, dtype=jnp.float16, param_dtype=jnp.float16)
        make, program = lambda: nnx.Sequential(half(rngs=nnx.Rngs(0)), half(rngs=nnx.Rngs(1))), nnx_program
    key = {"linen": "layers_1", "nnx": "layers/1"}[library]
    apply, params = program(make(), MIXED)
    assert result_dtypes(apply, X) == ["f16", "f16"]
    assert {p.dtype.name for p in jax.tree.leaves(params)} == {"float16"}
    for rule, dtype in (("float32", F), ("c=bf16", L)):
        assert result_dtypes(program(make(), MIXED.override({key: rule}))[0], X) == ["f16", dtype]
    _, params = program(make(), MIXED.override({key: "p=f32"}))
    assert sorted(p.dtype.name for p in jax.tree.leaves(params)) == ["float16"] * 2 + ["float32"] * 2


def test_a_rule_over_an_authors_dtype_leaves_the_module_as_it_was():
    model = nnx.Sequential(nnx.Linear(8, 8, dtype=jnp.float16, rngs=nnx.Rngs(0)))
    wrapped = amp.wrap(model, MIXED.override({"**": "float32"}))
    wrapped(X)
    assert wrapped.layers[0].dtype == model.layers[0].dtype == jnp.float16


@both_libraries
def test_a_half_stored_frozen_base_with_float32_adapters(library):
    """LoRA: the base is stored in half and not trained, the adapters are float32 and learn."""
    policy = MIXED.override({"base": "p=bf16"})
    if library == "linen":

        class Lora(nn.Module):
            @nn.compact
            def __call__(self, x):
                down = nn.Dense(2, use_bias=False, name="down")(x)
                return nn.Dense(8, name="base")(x) + nn.Dense(8, use_bias=False, name="up")(down)

        model = amp.wrap(Lora(), policy)
        params = model.init(jax.random.key(0), X)["params"]
        stored = jax.tree.map(lambda p: p.dtype.name, params)
        assert set(stored["base"].values()) == {"bfloat16"}
        assert stored["up"] == stored["down"] == {"kernel": "float32"}
        base, adapters = {"base": params["base"]}, {k: params[k] for k in ("up", "down")}
        tx = optax.sgd(0.1)
        opt_state = tx.init(adapters)
        loss = lambda adapters: jnp.mean((model.apply({"params": base | adapters}, X) - 1) ** 2)  # noqa: E731
        before = loss(adapters)
        for _ in range(20):
            updates, opt_state = tx.update(jax.grad(loss)(adapters), opt_state)
            adapters = optax.apply_updates(adapters, updates)
        assert loss(adapters) < 0.8 * before
        assert {p.dtype.name for p in jax.tree.leaves(adapters)} == {"float32"}
    else:

        class Lora(nnx.Module):
            def __init__(self):
                self.base = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
                self.lora = nnx.LoRA(8, 2, 8, rngs=nnx.Rngs(1))

            def __call__(self, x):
                return self.base(x) + self.lora(x)

        model = amp.wrap(Lora(), policy)
        assert {p.dtype.name for p in jax.tree.leaves(nnx.state(model.base))} == {"bfloat16"}
        assert {p.dtype.name for p in jax.tree.leaves(nnx.state(model.lora))} == {"float32"}
        optimizer = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.LoRAParam)
        loss = lambda model: jnp.mean((model(X) - 1) ** 2)  # noqa: E731
        before, kernel = loss(model), model.base.kernel[...]
        for _ in range(20):
            optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model))
        assert loss(model) < 0.8 * before
        np.testing.assert_array_equal(model.base.kernel[...], kernel)
        assert {p.dtype.name for p in jax.tree.leaves(nnx.state(model.lora))} == {"float32"}


@both_libraries
def test_the_error_shows_the_nearest_paths(library):
    make, program = PROGRAMS[library]
    near = SPELLED[library]["b0"] + "/proj"
    with pytest.raises(amp.AmpValueError, match=f"matches no module. Did you mean {near!r}"):
        program(make(), MIXED.override({near.replace("proj", "prj"): "float32"}))


def test_linen_scan_has_one_path_for_all_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(8, name="b")(nn.Dense(8, name="a")(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return scan(name="layers")(x, None)[0]

    apply, params = linen_program(Model(), MIXED.override({"layers/a": "c=f32", "layers/b": "p=bf16", Layer: "o=f32"}))
    assert result_dtypes(apply, X) == [F, L]
    assert params["layers"]["b"]["kernel"].dtype == jnp.bfloat16
    assert params["layers"]["a"]["kernel"].dtype == jnp.float32
    assert result_dtypes(jax.grad(lambda x: jnp.sum(apply(x))), X).count(F) >= 2  # the backward pass of `a` too


def test_nnx_scan_has_one_path_for_all_layers():
    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(NBlock, in_axes=0)(nnx.Rngs(0).split(3))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    apply, _ = nnx_program(Model(), MIXED.override({"layers/fc": "float32"}))
    assert result_dtypes(apply, X) == [F, L]
    assert relative_error(apply(X), nnx_program(Model(), "float32")[0](X)) < 0.02
    assert result_dtypes(nnx_program(Model(), MIXED.override({NBlock: "float32"}))[0], X) == [F, F]


def test_a_shared_linen_module_is_meant_by_its_first_path():
    class Uses(nn.Module):
        dense: nn.Module

        def __call__(self, x):
            return self.dense(x)

    class Model(nn.Module):
        def setup(self):
            self.first = nn.Dense(8)
            self.other = Uses(self.first)

        def __call__(self, x):
            return self.other(self.first(x))

    assert result_dtypes(linen_program(Model(), MIXED.override({"first": "float32"}))[0], X) == [F, F]


def test_a_shared_nnx_module_is_meant_by_its_first_path_wherever_it_is_called():
    class Model(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.second = nnx.Dict(dense=self.first)

        def __call__(self, x):
            return self.second["dense"](self.first(x))

    assert result_dtypes(nnx_program(Model(), MIXED.override({"first": "float32"}))[0], X) == [F, F]


def test_modules_that_share_a_scope():
    class Lora(nn.Module):
        inner: nn.Module

        def setup(self):
            nn.share_scope(self, self.inner)
            self.adapter = nn.Dense(8)

        def __call__(self, x):
            return self.inner(x) + self.adapter(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Lora(nn.Dense(8))(x)

    plain = Model().init(jax.random.key(0), X)
    apply, params = linen_program(Model(), MIXED.override({"**/adapter": "float32"}))
    assert jax.tree.structure(params) == jax.tree.structure(plain["params"])
    jax.tree.map(np.testing.assert_array_equal, params, plain["params"])
    assert result_dtypes(apply, X) == [L, F]


@both_libraries
def test_a_module_called_twice_and_by_another_method(library):
    if library == "linen":

        class Embed(nn.Module):
            def setup(self):
                self.table = nn.Embed(8, 8)
                self.body = nn.Dense(8)

            def __call__(self, x):
                x = self.body(self.body(self.table(x)))
                return self.table.attend(x)

        model = amp.wrap(Embed(), MIXED.override({"table": "float32"}))
        tokens = jnp.arange(4)
        variables = model.init(jax.random.key(0), tokens)
        apply = functools.partial(model.apply, variables)
    else:

        class Embed(nnx.Module):
            def __init__(self):
                self.table = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
                self.body = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

            def __call__(self, x):
                return self.table.attend(self.body(self.body(self.table(x))))

        apply, _ = nnx_program(Embed(), MIXED.override({"table": "float32"}))
    assert result_dtypes(apply, jnp.arange(4)) == [L, L, F]


def test_nnx_rules_are_on_instances_never_on_classes():
    kinds = (NModel, NBlock, nnx.Linear, nnx.Module, nnx.List, nnx.Dict)
    before = [dict(vars(kind)) for kind in kinds]
    other = NModel()
    plain = str(jax.make_jaxpr(nnx_program_of(other))(X))
    model = NModel()
    wrapped = amp.wrap(model, MIXED.override({NBlock: "float32", "heads/a": "c=f16"}))
    wrapped(X)
    assert [dict(vars(kind)) for kind in kinds] == before
    assert str(jax.make_jaxpr(nnx_program_of(other))(X)) == plain
    assert "bf16" not in plain
    # The modules inside are the caller's own, and are what they were once the call is over.
    for one in (model, other):
        assert {type(m) for _, m in nnx.iter_modules(one)} == {type(m) for _, m in nnx.iter_modules(NModel())}
    assert str(jax.make_jaxpr(nnx_program_of(model))(X)) == plain


def nnx_program_of(model):
    graph, state = nnx.split(model)
    return lambda x: nnx.merge(graph, nnx.as_pure(state))(x)
