"""Finding: a line of the report of ``mindspeed doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.problems import Problem, Text, advice


@dataclass(frozen=True, slots=True)
class Finding:
    """Describe a line of the report. ``state`` is ok, missing (training needs it), optional, or warning.

    All of them are texts that the catalogue may have.
    """

    subject: str
    value: str
    state: str = "ok"
    fix: str = ""

    def problem(self) -> Problem | None:
        """The problem of a finding without which nothing trains."""
        if self.state != "missing":
            return None
        code = "MS502" if self.subject.startswith("megatron") else "MS501"
        text = Text.of("{name}: {text}", name=self.subject, text=self.value)
        return Problem(code, text, fix=advice(self.fix))
