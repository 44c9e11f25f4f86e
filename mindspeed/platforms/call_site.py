"""The line of a program that has called into torch or the emulation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

import torch

_PACKAGE: Final = Path(__file__).parents[1]
_FEATURES: Final = str(_PACKAGE / "features") + "/"
_EMULATION: Final = tuple(_PACKAGE / name for name in ("platforms", "plugins", "features/device_emulation"))
_SKIPPED: Final = (*map(str, (Path(torch.__file__).parent, *_EMULATION)), "<")


class CallSite(NamedTuple):
    """File, line and function of a caller, and the functions of torch that were called in between."""

    file: str
    line: int
    function: str
    through: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The built-in feature whose code called."""
        if not self.file.startswith(_FEATURES):
            return ()
        return (self.file.removeprefix(_FEATURES).partition("/")[0].replace("_", "-"),)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def call_site() -> CallSite:
    """Return the innermost caller outside of torch and the emulation."""
    frame = sys._getframe(1)
    through = []
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        through.append(frame.f_code.co_name)
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, tuple(through))
