"""The report says what the emitted program does."""

import jax
import jax.numpy as jnp
from flax import nnx

import amp_jax as amp


def layer(x, w):
    with jax.named_scope("layer"):
        return jax.nn.softmax(x @ w) @ w


REPORT = amp.explain(layer, "mixed_bfloat16")(jnp.ones((4, 4)), jax.ShapeDtypeStruct((4, 4), jnp.float32))


def test_the_report_is_the_plan_that_autocast_follows():
    dots = [e for e in REPORT.equations if e.primitive == "dot_general"]
    assert [e.results for e in dots] == [("bfloat16",), ("bfloat16",)]
    assert {e.path for e in dots} == {"layer"}
    assert all(e.source.startswith("test_explain.py:") and e.source.endswith("(layer)") for e in dots)
    exp = next(e for e in REPORT.equations if e.primitive == "exp")
    assert (exp.category, exp.operands, exp.results) == ("full", ("float32",), ("float32",))


def test_totals_count_equations_and_casts():
    jaxpr = str(jax.make_jaxpr(amp.autocast(layer, "mixed_bfloat16"))(jnp.ones((4, 4)), jnp.ones((4, 4))))
    assert REPORT.totals["equations"] == len(REPORT.equations)
    # The cast of the function's result to float32 belongs to no equation.
    assert REPORT.totals["casts"] == jaxpr.count("convert_element_type") - 1
    assert REPORT.totals["low"] + REPORT.totals["float32"] <= REPORT.totals["equations"]


def test_text_and_html():
    text = str(REPORT)
    assert "autocast under params=float32,compute=bfloat16,output=float32" in text
    assert "dot_general" in text
    assert "<table>" in REPORT._repr_html_()


def test_opaque_operations_that_get_float32_come_first():
    def called(x):
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((2, 2), jnp.float32), x @ x) @ x

    lines = str(amp.explain(called, "mixed_bfloat16")(jnp.ones((2, 2)))).split("\n")
    assert lines[2].startswith("opaque, in float32: pure_callback")
    assert "opaque, in float32: pure_callback" in amp.explain(called, "mixed_bfloat16")(jnp.ones((2, 2)))._repr_html_()


def test_a_departure_names_the_line_the_reason_and_what_follows():
    def two_layers(x, w):
        with jax.named_scope("norm"):
            y = x @ w
            y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True))
        return y @ w

    report = amp.explain(two_layers, "mixed_bfloat16")(jnp.ones((4, 8)), jnp.ones((8, 8)))
    found = {d.primitive: d for d in report.departures}
    # The product leaves the compute dtype twice: for the square and its mean, and where it meets the statistic, which
    # gives one result of 4 x 8 float32 numbers.
    assert set(found) == {"mul", "square"}
    assert (found["mul"].equations, found["mul"].float32_bytes) == (1, 4 * 8 * 4)
    assert found["mul"].reason == "meets a statistic"
    assert found["mul"].paths == found["square"].paths == ("norm",)
    assert all("test_explain.py" in d.source and "two_layers" in d.source for d in report.departures)
    assert "float32 from here: mul at norm" in str(report)


def test_what_a_float32_region_keeps_from_the_matrix_units_is_a_departure():
    with_region = amp.full_precision()(lambda x, w: x @ w)
    (found,) = amp.explain(with_region, "mixed_bfloat16")(jnp.ones((4, 8)), jnp.ones((8, 8))).departures
    assert (found.primitive, found.reason) == ("dot_general", "inside a float32 region")


def test_a_line_of_jax_itself_is_shown_as_the_line_that_called_it():
    report = amp.explain(lambda x: jax.nn.logsumexp(x @ x), "mixed_bfloat16")(jnp.ones((4, 4)))
    exp = next(e for e in report.equations if e.primitive == "exp")
    assert exp.source.startswith("test_explain.py:")


def test_bytes_saved_for_the_backward_pass():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    totals = amp.explain(loss, "mixed_bfloat16")(jnp.ones((8, 8)), jnp.ones((4, 8))).totals
    # The derivative of sin needs its argument (or its cosine): 4 x 8 numbers, float32 in any case under this policy.
    # What the product's own derivative needs are its operands: inputs, and under the policy their half copies too.
    assert totals["saved_bytes_float32"] == 4 * 8 * 4
    assert totals["saved_bytes_low"] == 4 * 8 * 2
    assert totals["saved_bytes"] <= 4 * 8 * 4 + (8 * 8 + 4 * 8) * 2


def test_bytes_saved_by_a_chain_that_stays_low_are_those_of_all_low():
    def loss(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)
        return jnp.sum(x)

    report = amp.explain(loss, "mixed_bfloat16")([jnp.ones((64, 64))] * 4, jnp.ones((1024, 64)))
    copies = (4 * 64 * 64 + 1024 * 64) * 2  # of four weights, which forward and backward share, and of x
    last = 1024 * 64 * 2  # what goes into the sum is float32
    assert report.totals["saved_bytes"] == report.totals["saved_bytes_low"] + copies + last
    assert report.totals["saved_bytes"] < 0.8 * report.totals["saved_bytes_float32"]
    assert "saved for the backward pass" in str(report)


def test_a_function_without_a_derivative_is_explained_all_the_same():
    def count(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 100.0, lambda c: c @ x, x)

    report = amp.explain(count, "mixed_bfloat16")(jnp.ones((2, 2)))
    assert "saved_bytes" not in report.totals
    assert "dot_general" in str(report)


def test_a_function_of_an_nnx_module():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    report = amp.explain(lambda model, x: jnp.sum(jnp.sin(model(x))), "mixed_bfloat16")(model, jnp.ones((2, 4)))
    assert [e.results for e in report.equations if e.primitive == "dot_general"] == [("bfloat16",)]
    assert report.totals["saved_bytes"] >= 2 * 4 * 4  # the argument of sin
