"""Says after a run how many published verdicts of docs/matrix.json are stale."""

from pathlib import Path
from typing import Any, Final

PUBLISHED: Final = Path(__file__).resolve().parents[1] / "docs" / "matrix.json"
TESTS: Final = "tests/workbench/verification/matrix/"
"""Counting takes two seconds: it is done after runs with these tests, as a whole run is."""


class StaleVerdicts:
    """Counts in the process that starts the others."""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reports = [report for found in terminalreporter.stats.values() for report in found]
        if any(getattr(report, "nodeid", "").startswith(TESTS) for report in reports):
            terminalreporter.write_line(summary())


def summary(path: Path = PUBLISHED) -> str:
    """One line about the verdicts of a file."""
    from mindspeed import registry
    from mindspeed.workbench.verification.matrix.page import published
    from mindspeed.workbench.verification.matrix.reach import Sources
    from mindspeed.workbench.verification.matrix.store import is_stale

    if not path.exists():
        return f"{path.name} does not exist: no verdict of the matrix is published"
    verdicts = published(path.read_text(encoding="utf-8")).values()
    sources = Sources(registry.catalog())
    stale = sum(is_stale(result, sources) for result in verdicts)
    return f"{path.name}: {stale} of {len(verdicts)} verdicts are stale; mindspeed features matrix run judges these again"
