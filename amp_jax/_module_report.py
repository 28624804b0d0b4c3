"""A model under a policy, module by module: which dtypes each has and who said so, and what it keeps in memory."""

import html
import io
from typing import NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

AUTHOR, POLICY, PLAN = "author", "policy", "plan"
"""Who decides where no rule does: a dtype in the model's code, the policy itself, autocast's plan around the module."""
COLUMNS = ("path", "module", "parameters", "compute", "output", "parameter bytes", "activation bytes")


class ModuleRow(NamedTuple):
    """One module.

    Attributes:
        path: Its path, `decoder/head`; empty for the model itself. Layers under `nn.scan` have one path.
        module: Its class; two with a plus where `nn.share_scope` gives two modules one path.
        param_dtypes: The dtypes that its own parameters are stored in, those of its submodules aside.
        compute_dtypes: The dtypes that its own matrix products and convolutions read; where it has none, the compute
            dtype that holds in it.
        output_dtypes: The dtypes of the floats that it returns; none for a module that isn't called.
        param_from: Who gave `param_dtypes`: the key of a rule, `"policy"`, or `"author"` where a half dtype in the
            model's code was kept. Several are joined by commas; empty where there is nothing to give.
        compute_from: The same for `compute_dtypes`; an `"author"` may also have written `full_precision()`.
        output_from: The same for `output_dtypes`; `"plan"` for a module inside of the model, whose results stay in the
            dtype that suits those who read them, unless a rule has an output dtype.
        param_bytes: The size of its own parameters as they are stored.
        activation_bytes: What it computes by itself and JAX keeps from the forward pass for the backward pass:
            activations, and copies of parameters in the compute dtype. None where the model has no derivative.
        aliases: Further paths of a shared module.
    """

    path: str
    module: str
    param_dtypes: tuple[str, ...]
    compute_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    param_from: str
    compute_from: str
    output_from: str
    param_bytes: int
    activation_bytes: int | None
    aliases: tuple[str, ...]


class ModuleReport(NamedTuple):
    """What `tabulate` gives; prints as a table, in a notebook too.

    >>> import flax.linen as nn, jax.numpy as jnp, amp_jax as amp
    >>> report = amp.tabulate(nn.Dense(4), "mixed_bfloat16", jnp.ones((2, 8)))
    >>> report.rows[0].param_dtypes, report.rows[0].compute_dtypes, report.rows[0].param_bytes
    (('float32',), ('bfloat16',), 144)

    Attributes:
        model: The class of the model.
        policy: The policy, resolved for this device.
        rows: One for each module that is called or has parameters, in the order of the calls.
        totals: `param_bytes`, and where the model has a derivative `activation_bytes` and, under the policy `float32`,
            `activation_bytes_float32`. What is computed between modules or around the model counts in its first row.
    """

    model: str
    policy: str
    rows: tuple[ModuleRow, ...]
    totals: dict[str, int]

    def __str__(self) -> str:
        """The table as plain text."""
        table = Table(title=self._title(), caption=self._caption(), show_lines=True, show_footer=True)
        for name, foot in zip(COLUMNS, self._footer(), strict=True):
            table.add_column(name, footer=foot, no_wrap=True, justify="right" if "bytes" in name else "left")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in _cells(row)))
        out = io.StringIO()
        console = Console(file=out, force_terminal=False, force_jupyter=False, color_system=None, width=100_000)
        console.print(table, width=max(80, Measurement.get(console, console.options, table).maximum), crop=False)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            sides = ("right" if "bytes" in name else "left" for name in COLUMNS)
            written = (html.escape(cell).replace("\n", "<br>") for cell in cells)
            return (
                "<tr>"
                + "".join(f"<{tag} style='text-align:{s}'>{c}</{tag}>" for s, c in zip(sides, written, strict=True))
                + "</tr>"
            )

        body = "".join(line("td", _cells(row)) for row in self.rows)
        title, caption = html.escape(self._title()), html.escape(self._caption())
        table = f"<table><thead>{line('th', COLUMNS)}</thead><tbody>{body}</tbody>"
        return f"<p>{title}</p>{table}<tfoot>{line('th', self._footer())}</tfoot></table><p>{caption}</p>"

    def _title(self) -> str:
        return f"{self.model} under {self.policy}"

    def _caption(self) -> str:
        if "activation_bytes" not in self.totals:
            return "no activation bytes: the model has no derivative"
        return f"activations under float32: {_bytes(self.totals['activation_bytes_float32'])}"

    def _footer(self) -> tuple[str, ...]:
        kept = self.totals.get("activation_bytes")
        return (*[""] * (len(COLUMNS) - 3), "total", _bytes(self.totals["param_bytes"]), _bytes(kept))


def _cells(row: ModuleRow) -> tuple[str, ...]:
    return (
        "\n".join([row.path or "/", *(f"= {alias}" for alias in row.aliases)]),
        row.module,
        _given(row.param_dtypes, row.param_from),
        _given(row.compute_dtypes, row.compute_from),
        _given(row.output_dtypes, row.output_from),
        _bytes(row.param_bytes) if row.param_dtypes else "",
        _bytes(row.activation_bytes),
    )


def _given(dtypes: tuple[str, ...], source: str) -> str:
    """The dtypes, and who gave them where that isn't the policy or the plan."""
    names = ", ".join(dtypes)
    return names if not names or source in ("", POLICY, PLAN) else f"{names} ({source})"


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= of:
            return f"{count / of:.1f} {unit}"
    return f"{count} B"
