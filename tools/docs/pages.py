"""Every generated page and picture by its path below ``docs/``."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import click

from mindspeed.files.text_files import write_files
from mindspeed.plugins.discovery import Catalog
from mindspeed.workbench.diagnostics import support_matrix
from tools.docs.drawing import svg
from tools.docs.drift import drift_page
from tools.docs.features import feature_page, index_page, pictures
from tools.docs.lint import lint_page
from tools.docs.markdown import page, table
from tools.docs.operators import operators_page
from tools.docs.plan_picture import plan_picture
from tools.docs.python_api import python_api_page
from tools.docs.python_results import python_table
from tools.docs.reference import command_line_page, errors_page, hooks_page, settings_page, variables_page
from tools.docs.version_results import result_table


def pages(catalog: Catalog, main: click.Group) -> dict[str, str]:
    """``{"features/rms-norm.md": text, ...}`` for the features of ``catalog`` and the verbs of ``main``."""
    found = {f"features/{name}.md": feature_page(row) for name, row in catalog.usable.items()}
    drawn = [picture for row in catalog.usable.values() if row.feature for picture in pictures(row.feature)]
    return found | {
        **{f"features/{picture.name}.svg": svg(picture) for picture in drawn},
        "features/index.md": index_page(catalog),
        "errors.md": errors_page(),
        "hooks.md": hooks_page(),
        "operators.md": operators_page(),
        "settings.md": settings_page(catalog),
        "environment-variables.md": variables_page(),
        "python-api.md": python_api_page(),
        "cli.md": command_line_page(main),
        "lint.md": lint_page(),
        "support.md": support_page(catalog),
        "drift.md": drift_page(catalog),
        "plan.svg": svg(plan_picture()),
    }


def support_page(catalog: Catalog) -> str:
    """What was tried, and what never."""
    states = [f"- *{state}*: {meaning}" for state, meaning in support_matrix.MEANING.items()]
    cells = table(("component", "version", "state", "note"), [astuple(cell) for cell in support_matrix.CELLS])
    headers = ("platform", "megatron-core", "torch", "torch_npu", "CANN", "Python", "hardware", "state")
    together = table(headers, [astuple(row) for row in support_matrix.COMBINATIONS])
    words = "`mindspeed doctor --matrix` prints these tables, with `--json` for programs. A state means what it says:"
    claims = (
        "*passed*: `mindspeed features verify` held the feature to its claim on the CPU (`make test-versions`). "
        "On 0.16.1 the default tests do so at every change. The last column is on layers in the roles of Transformer Engine's "
        "(`make test-engine-layers`)."
    )
    others = (
        "`make test-pythons`: every module is imported, the tests of the command line, the resolver and the patching pass, "
        "and two claims hold (`sequence-parallel`, `swiglu`) beside each Megatron that takes the Python."
    )
    npu = "The rows for npu follow the pairs that [Ascend/pytorch](https://gitcode.com/Ascend/pytorch) publishes."
    return page(
        "Support",
        "mindspeed/workbench/diagnostics/support_matrix.yaml",
        [words, "", *states],
        ["## One by one", "", *cells],
        ["## Together", "", npu, "", *together],
        ["## Features and versions of Megatron", "", claims, "", *result_table(sorted(catalog.specs))],
        ["## Other versions of Python", "", others, "", *python_table(support_matrix.python_results().values())],
    )


def write(folder: Path, made: dict[str, str]) -> None:
    """Write pages, and remove generated pages and pictures of features that are no more."""
    write_files({folder / name: text for name, text in made.items()}, fix="choose another --write FOLDER")
    for old in (folder / "features").iterdir():
        if old.suffix in (".md", ".svg") and f"features/{old.name}" not in made:
            old.unlink()
