"""The report says what the emitted program does."""

import jax
import jax.numpy as jnp

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
