"""Error texts of Megatron, torch and the system whose cause is known: ``mindspeed explain "<error text>"``. Light."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from mindspeed.files.tables import table_beside


@dataclass(frozen=True, slots=True)
class Symptom:
    """A text that others print (a regular expression), its usual cause, and what to do.

    ``example`` is such a text, and ``source`` the page of a public report, or of the code that prints it.
    """

    pattern: str
    cause: str
    fix: str
    example: str
    source: str


SYMPTOMS: Final = tuple(Symptom(**row) for row in table_beside(__file__))


def symptoms_in(text: str) -> list[Symptom]:
    """Return every known symptom that a text shows, in the order of the table."""
    return [symptom for symptom in SYMPTOMS if re.search(symptom.pattern, text, re.IGNORECASE | re.DOTALL)]
