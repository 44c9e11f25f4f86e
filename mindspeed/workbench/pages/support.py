"""The page of support: what was tried, and what never."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

from packaging.version import Version

from mindspeed.platforms.backend_rules import NAMES
from mindspeed.plugins.discovery import Catalog
from mindspeed.workbench.diagnostics import support_matrix
from mindspeed.workbench.diagnostics.support_matrix import backend_results, engine_results, kernel_results, version_results
from mindspeed.workbench.pages.markdown import table
from mindspeed.workbench.verification.kernel_calls import DEVICES

NOT_RUN: Final = "not run"
NOT_AT_HAND: Final = "not at hand when it was run"


def support(catalog: Catalog) -> Iterator[list[str]]:
    """Yield versions and machines with their states, then features and Pythons with the results of their tests."""
    states = [f"- *{state}*: {meaning}" for state, meaning in support_matrix.MEANING.items()]
    yield [
        "`mindspeed doctor --matrix` prints these tables, with `--json` for programs. A state means what it says:",
        "",
        *states,
    ]
    cells = table(("component", "version", "state", "note"), [astuple(cell) for cell in support_matrix.CELLS])
    yield ["## One by one", "", *cells]
    npu = "The rows for npu follow the pairs that [Ascend/pytorch](https://gitcode.com/Ascend/pytorch) publishes."
    headers = ("platform", "megatron-core", "torch", "torch_npu", "CANN", "Python", "hardware", "state")
    yield ["## Together", "", npu, "", *table(headers, [astuple(row) for row in support_matrix.COMBINATIONS])]
    claims = (
        "*passed*: `mindspeed features verify` held the feature to its claim on the CPU (`make test-versions`). "
        "On 0.16.1 the default tests do so at every change. The last column is on layers in the roles of Transformer Engine's "
        "(`make test-engine-layers`)."
    )
    yield ["## Features and versions of Megatron", "", claims, "", *result_table(sorted(catalog.specs))]
    yield kernel_part(catalog)
    rules = (
        "`mindspeed features verify NAME --backend RULES` on the smallest layout of each feature (`make test-backends`). "
        "*passed*: the ranks finish by these rules, and the backend refuses no call. Features without a row run on one rank."
    )
    yield ["## Features and the rules of collective backends", "", rules, "", *backend_table()]
    others = (
        "`make test-pythons`: every module is imported, the tests of the command line, the resolver and the patching pass, "
        "and the claims of two features hold beside each Megatron that takes the Python."
    )
    yield ["## Other versions of Python", "", others, "", *python_table(support_matrix.python_results().values())]


def kernel_part(catalog: Catalog) -> list[str]:
    """Return the part about calls that the kernels of other devices take."""
    text = (
        "Each feature trained a small bf16 job with attention dropout on the CPU, and every call of an operator was judged by "
        "the kernels of the NPU and of CUDA. A cell is the share of calls that a kernel takes; the others run the plain-torch "
        "reference. A dash means that the feature calls no operator of mindspeed. Where a kernel does not take every call, the "
        "plan for that platform says so in a note. The calls are those of the operators that a feature declares, or all of its "
        "job (`python -m pytest -m long tests/features/test_kernel_calls.py`)."
    )
    return ["## Calls that reach kernels", "", text, "", *kernel_table(sorted(catalog.specs))]


def kernel_table(names: Sequence[str]) -> list[str]:
    """Return a row for each feature, with the share of its calls on each device and what its plan notes there."""
    results = kernel_results()
    rows = []
    for name in names:
        row = results.get(name, {})
        cells = [row.get(device, {}).get("share", NOT_RUN) for device in DEVICES]
        notes = [f"{device}: {text}" for device in DEVICES for text in row.get(device, {}).get("notes", [])]
        rows.append([name, *cells, "; ".join(notes)])
    return table(("feature", *DEVICES, "notes of the plan"), rows)


def result_table(names: Sequence[str]) -> list[str]:
    """Return a row for each feature and a column for each version."""
    results = version_results()
    versions = sorted(results, key=Version)
    engine = engine_results()
    columns = {f"{version}, Python {_short(results[version])}": results[version]["features"] for version in versions}
    columns |= {f"{version}, HybridModel": results[version]["hybrid"] for version in versions if "hybrid" in results[version]}
    rows = [[name, *(column.get(name, NOT_RUN) for column in columns.values()), engine.get(name, "-")] for name in names]
    return table(("feature", *columns, "0.16.1, on Transformer Engine's layers"), rows)


def backend_table() -> list[str]:
    """Return a row for each feature with communication and a column for each set of rules."""
    results = backend_results()
    return table(("feature", *NAMES), [[name, *(results[name].get(rules, NOT_RUN) for rules in NAMES)] for name in results])


def _short(result: Mapping[str, Any]) -> str:
    """Return the Python of a version's results without its last number."""
    return str(result["python"]).rpartition(".")[0]


def python_table(results: Collection[Mapping[str, Any]]) -> list[str]:
    """Return a row for each check and each Megatron, a column for each Python."""
    checks = sorted({name for result in results for name in result["checks"]})
    megatrons = sorted({version for result in results for version in result["claims"]}, key=Version)
    rows = [[name, *(result["checks"].get(name, NOT_AT_HAND) for result in results)] for name in checks]
    rows += [
        [f"claims beside megatron-core {version}", *(result["claims"].get(version, NOT_AT_HAND) for result in results)]
        for version in megatrons
    ]
    return table(("what", *(f"Python {result['python']}, torch {result['torch']}" for result in results)), rows)
