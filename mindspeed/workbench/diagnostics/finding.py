"""Finding: a line of the report of ``mindspeed doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.problems import Problem, advice


@dataclass(frozen=True, slots=True)
class Finding:
    """Describe a line of the report. ``state`` is ok, missing (training needs it), optional, or warning."""

    subject: str
    value: str
    state: str = "ok"
    fix: str = ""

    def problem(self) -> Problem | None:
        """The problem of a finding without which nothing trains."""
        if self.state != "missing":
            return None
        code = "MS502" if self.subject.startswith("megatron") else "MS501"
        return Problem(code, f"{self.subject}: {self.value}", fix=advice(self.fix))
