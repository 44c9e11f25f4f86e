"""Error texts of Megatron, torch and the system whose cause is known: ``mindspeed explain "<error text>"``. Light."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import yaml


@dataclass(frozen=True, slots=True)
class Symptom:
    """A text that others print (a regular expression), its usual cause, and what to do."""

    pattern: str
    cause: str
    fix: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


_TABLE: Final = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
SYMPTOMS: Final = tuple(Symptom(**row) for row in yaml.safe_load(_TABLE))


def symptoms_in(text: str) -> list[Symptom]:
    """Return every known symptom that a text shows, in the order of the table."""
    return [symptom for symptom in SYMPTOMS if re.search(symptom.pattern, text, re.IGNORECASE | re.DOTALL)]
