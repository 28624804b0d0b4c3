"""tabulate: what a policy means for each module, and the bytes, for linen and nnx."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import amp_jax as amp
from tests.programs import LOW, both_halves

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(32, name="wi")(x))
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(4, name="wo")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.wi = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.wo = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.wo(self.norm(nnx.gelu(self.wi(x))))


MODELS = {"linen": Linen, "nnx": lambda: Nnx(nnx.Rngs(0))}
NORMS = {"linen": nn.LayerNorm, "nnx": nnx.LayerNorm}
both_libraries = pytest.mark.parametrize("library", list(MODELS))


def rows(report):
    return {row.path: row for row in report.rows}


@both_libraries
@both_halves
def test_dtypes_bytes_and_who_gave_them(library, policy):
    low = policy.removeprefix("mixed_")
    report = amp.tabulate(MODELS[library](), policy, X)
    assert [r.path for r in report.rows] == ["", "wi", "norm", "wo"]  # in the order of the calls
    root, wi, norm, wo = report.rows
    assert wi.module == {"linen": "Dense", "nnx": "Linear"}[library]
    assert (wi.param_dtypes, wi.compute_dtypes, wi.output_dtypes) == (("float32",), (low,), (low,))
    assert (wi.param_from, wi.compute_from, wi.output_from) == ("policy", "policy", "plan")
    assert (wi.param_bytes, norm.param_bytes, wo.param_bytes) == ((8 + 1) * 32 * 4, 2 * 32 * 4, (32 + 1) * 4 * 4)
    assert (root.param_dtypes, root.param_from, root.param_bytes) == ((), "", 0)
    assert (root.output_dtypes, root.output_from) == (("float32",), "policy")
    assert wo.output_dtypes == ("float32",)  # nothing reads it but the caller, who gets float32
    assert report.totals["param_bytes"] == sum(r.param_bytes for r in report.rows)


@both_libraries
def test_keys_of_rules_by_path_and_class(library):
    policy = amp.get_policy("mixed_bfloat16").override({"w*": "p=bf16", NORMS[library]: "float32", "wo": "c=f32"})
    found = rows(amp.tabulate(MODELS[library](), policy, X))
    assert (found["wi"].param_dtypes, found["wi"].param_from) == (("bfloat16",), "w*")
    assert (found["wi"].compute_dtypes, found["wi"].compute_from) == (("bfloat16",), "policy")
    assert (found["wo"].param_from, found["wo"].compute_dtypes, found["wo"].compute_from) == ("w*", ("float32",), "wo")
    assert (found["norm"].compute_dtypes, found["norm"].compute_from) == (("float32",), "LayerNorm")
    assert found["wi"].param_bytes == (8 + 1) * 32 * 2


@both_libraries
def test_the_authors_half_dtypes_are_said_to_be_kept(library):
    model = {
        "linen": lambda: nn.Dense(4, dtype=jnp.float16, param_dtype=jnp.float16),
        "nnx": lambda: nnx.Linear(8, 4, dtype=jnp.float16, param_dtype=jnp.float16, rngs=nnx.Rngs(0)),
    }[library]()
    (row,) = amp.tabulate(model, "mixed_bfloat16", X).rows
    assert (row.param_dtypes, row.param_from) == (("float16",), "author")
    assert (row.compute_dtypes, row.compute_from) == (("float16",), "author")
    (row,) = amp.tabulate(model, amp.get_policy("mixed_bfloat16").override({"**": "float32"}), X).rows
    assert (row.param_dtypes, row.param_from) == (row.compute_dtypes, row.compute_from) == (("float32",), "**")


@pytest.mark.parametrize("policy", [*LOW, "float32"])
@both_libraries
def test_activation_bytes_are_those_that_explain_counts(library, policy):
    model = MODELS[library]()
    if library == "linen":
        variables = jax.eval_shape(model.init, jax.random.key(0), X)
        want = amp.explain(model.apply, policy)(variables, X).totals
    else:
        want = amp.explain(lambda model, x: model(x), policy)(model, X).totals
    report = amp.tabulate(model, policy, X)
    assert report.totals["activation_bytes"] == sum(r.activation_bytes for r in report.rows) == want["saved_bytes"]
    assert report.totals["activation_bytes_float32"] == want["saved_bytes_float32"]


@both_libraries
def test_activations_belong_to_the_module_that_computes_them(library):
    class L(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="wo")(jnp.sin(nn.Dense(32, name="wi", use_bias=False)(x)))

    class N(nnx.Module):
        def __init__(self):
            self.wi = nnx.Linear(8, 32, use_bias=False, rngs=nnx.Rngs(0))
            self.wo = nnx.Linear(32, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.wo(jnp.sin(self.wi(x)))

    root, wi, wo = amp.tabulate({"linen": L, "nnx": N}[library](), "mixed_bfloat16", X).rows
    # sin keeps its derivative in float32, wi and wo the half copies of what their products read: the input or sin's
    # result, and the weight.
    assert root.activation_bytes == 16 * 32 * 4
    assert wi.activation_bytes == (16 * 8 + 8 * 32) * 2
    assert wo.activation_bytes == (16 * 32 + 32 * 4) * 2


def test_layers_under_scan_are_one_row_and_count_as_many():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.sin(nn.Dense(8, name="dense")(x)), None

    class Layers(nn.Module):
        length: int

        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.length)
            return scan(name="layers")(x, None)[0]

    one, three = (rows(amp.tabulate(Layers(n), "mixed_bfloat16", X)) for n in (1, 3))
    assert list(three) == ["", "layers", "layers/dense"]
    assert three["layers/dense"].param_bytes == 3 * one["layers/dense"].param_bytes == 3 * 9 * 8 * 4
    assert three["layers/dense"].activation_bytes == 3 * one["layers/dense"].activation_bytes == 3 * 16 * 8 * 2


def test_a_shared_module_has_one_row_with_all_its_paths():
    class Tied(nn.Module):
        dense: nn.Module

        def __call__(self, x):
            return self.dense(x)

    class L(nn.Module):
        def setup(self):
            self.first = nn.Dense(8)
            self.tied = Tied(self.first)

        def __call__(self, x):
            return self.tied(self.first(x))

    class N(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.tied = nnx.Dict(dense=self.first)

        def __call__(self, x):
            return self.tied["dense"](self.first(x))

    for report in (amp.tabulate(L(), "mixed_bfloat16", X), amp.tabulate(N(), "mixed_bfloat16", X)):
        (row,) = [r for r in report.rows if r.param_bytes]
        assert (row.path, row.aliases) == ("first", ("tied/dense",))
        assert "= tied/dense" in str(report)
        assert report.totals["param_bytes"] == 9 * 8 * 4


@both_libraries
def test_nothing_runs_and_the_module_stays_as_it_is(library):
    policy = amp.get_policy("bfloat16")
    if library == "linen":
        model, kind = Linen(), Linen
    else:
        model, kind = MODELS["nnx"](), Nnx
        kernel, value = model.wi.kernel, model.wi.kernel.get_value()
        held = [dict(vars(k)) for k in (Nnx, nnx.Linear, nnx.LayerNorm)]
    live = len(jax.live_arrays())
    report = amp.tabulate(model, policy, X)
    assert len(jax.live_arrays()) == live
    assert {d for r in report.rows for d in r.param_dtypes} == {"bfloat16"}
    assert type(model) is kind
    if library == "nnx":
        assert model.wi.kernel is kernel
        assert kernel.get_value() is value
        assert [type(m) for _, m in nnx.iter_modules(model)] == [nnx.LayerNorm, nnx.Linear, nnx.Linear, Nnx]
        assert held == [dict(vars(k)) for k in (Nnx, nnx.Linear, nnx.LayerNorm)]


@both_libraries
def test_an_nnx_or_linen_module_that_is_wrapped_brings_its_policy(library):
    policy = amp.get_policy("mixed_float16").override({"wo": "float32"})
    want = amp.tabulate(MODELS[library](), policy, X)
    wrapped = amp.wrap(MODELS[library](), policy)
    assert amp.tabulate(wrapped, None, X) == want
    with pytest.raises(amp.AmpValueError, match=r"wrapped already, with .*float16.*None"):
        amp.tabulate(wrapped, "mixed_bfloat16", X)
    with pytest.raises(amp.AmpTypeError, match="`policy` is None"):
        amp.tabulate(MODELS[library](), None, X)


@both_libraries
def test_a_rule_that_matches_nothing_is_named(library):
    with pytest.raises(amp.AmpValueError, match="Did you mean 'norm'"):
        amp.tabulate(MODELS[library](), amp.get_policy("mixed_bfloat16").override({"norn": "float32"}), X)


def test_what_is_no_module_is_told_where_to_go():
    with pytest.raises(amp.AmpTypeError, match=r"amp.tabulate.*explain\(fun, policy\)"):
        amp.tabulate(jnp.tanh, "mixed_bfloat16", X)


@both_libraries
def test_what_a_module_hands_to_itself_is_no_output(library):
    class L(nn.Module):
        def setup(self):
            self.dense = nn.Dense(8)

        def features(self, x):
            with amp.full_precision():
                return jnp.sin(self.dense(x))

        def __call__(self, x):
            features = self.features(x)
            with amp.full_precision():
                return (features * jnp.cos(features)).astype(jnp.bfloat16)

    class N(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        features, __call__ = L.features, L.__call__

    class Around(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(L(name="inner")(x))

    around = nnx.Sequential(N(), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    found = rows(amp.tabulate(Around() if library == "linen" else around, "mixed_bfloat16", X))
    inner = found["inner" if library == "linen" else "layers/0"]
    assert inner.output_dtypes == ("bfloat16",)


def test_another_method_and_static_arguments():
    class L(nn.Module):
        @nn.compact
        def other(self, x, train, *, times=1):
            for _ in range(times):
                x = nn.Dropout(0.5, deterministic=not train)(nn.BatchNorm(use_running_average=not train)(x))
            return nn.Dense(2)(x), "text"

    report = amp.tabulate(L(), "mixed_bfloat16", X, True, method="other", times=2)
    assert [r.path for r in report.rows][1:] == ["BatchNorm_0", "Dropout_0", "BatchNorm_1", "Dropout_1", "Dense_0"]


def test_a_model_without_a_derivative():
    class L(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c + 1.0, nn.Dense(8)(x))

    report = amp.tabulate(L(), "mixed_bfloat16", X)
    assert report.rows[1].activation_bytes is None
    assert list(report.totals) == ["param_bytes"]
    assert "no derivative" in str(report)


@both_libraries
def test_marks_change_nothing_in_the_program(library):
    """What is tabulated is what runs: the same equations but for names."""
    from amp_jax import _linen_watch, _nnx_watch

    adapter = {"linen": _linen_watch, "nnx": _nnx_watch}[library]
    policy = amp.get_policy("mixed_bfloat16")
    watched = adapter.watched(MODELS[library](), policy, "__call__", (X,), {})
    marked = jax.make_jaxpr(watched.call)(watched.state, X)
    if library == "linen":
        plain = jax.make_jaxpr(amp.wrap(Linen(), policy).apply)(watched.state, X)
    else:
        graph, state = nnx.split(amp.wrap(MODELS["nnx"](), policy))
        plain = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, X)
    spelled = [
        [
            (e.primitive.name, *(v.aval.str_short() for v in e.outvars))
            for e in j.jaxpr.eqns
            if e.primitive.name not in ("name", "random_seed")  # the key that tabulate makes for a linen model
        ]
        for j in (marked, plain)
    ]
    assert spelled[0] == spelled[1]


def test_text_and_html():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="<b>[red]&")(x)

    policy = amp.get_policy("mixed_bfloat16").override({"<b>*": "float32"})
    report = amp.tabulate(Odd(), policy, X)
    lines = str(report).split("\n")
    assert "Odd under params=float32,compute=bfloat16,output=float32" in lines[0]
    (line,) = [line for line in lines if "Dense" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["<b>[red]&", "Dense", *["float32 (<b>*)"] * 3, f"{9 * 2 * 4} B", cells[-1]]
    assert "total" in lines[-3]
    assert "\x1b" not in str(report)
    html = report._repr_html_()
    assert "&lt;b&gt;[red]&amp;" in html
    assert "<b>" not in html
    assert "http" not in html  # nothing is fetched
    tags = re.findall(r"<(/?)(table|thead|tbody|tfoot|tr|td|th|p)\b", html)
    open_tags = []
    for closing, tag in tags:
        assert not closing or open_tags.pop() == tag
        open_tags += [] if closing else [tag]
    assert open_tags == []


def test_many_modules_are_tabulated_in_full():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(30):
                x = nn.Dense(8, name=f"a_rather_long_name_for_a_layer_that_is_one_of_many_{i}")(x)
            return x

    report = amp.tabulate(Deep(), "mixed_float16", X)
    text = str(report)
    assert all(row.path in text for row in report.rows)
    assert np.isclose(report.totals["param_bytes"], 30 * 9 * 8 * 4)
