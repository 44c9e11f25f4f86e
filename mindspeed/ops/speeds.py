"""Times of C++ operators on this processor and of what a job runs without them; ``mindspeed ops build`` measures them. Light.

A kernel that wins on one processor loses on another whose instructions the library of torch uses better, so what level 1
switches on, and whether a product is ours or torch's, follows from these times.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

EQUAL: Final = 0.9
"""The lowest ratio of two equal speeds: measurements of one call differ by a few per cent."""
MEASURED: Final = (
    "logit_statistics",
    "npu_fused_moe_token_permute",
    "npu_fused_moe_token_unpermute",
    "npu_gmm",
    "npu_groupmatmul_add_fp32",
    "npu_matmul_add_fp32",
    "npu_rotary_position_embedding",
    "rms_norm",
    "swiglu",
)
"""The C++ operators that replace calls of torch in features."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a call in ``dtype``: with our ``kernel``, with products of torch's ``library`` where it has any, and without.

    ``peer`` names what a job runs ``without`` the operator.
    """

    op: str
    dtype: str
    kernel: float
    library: float | None
    without: float
    peer: str

    @property
    def leaves_to_library(self) -> bool:
        """True where torch's products are faster here."""
        return self.library is not None and self.library < EQUAL * self.kernel

    @property
    def ratio(self) -> float:
        """The speed of a call over that of ``peer``: above 1 the operator wins."""
        best = self.kernel if self.library is None else min(self.kernel, self.library)
        return self.without / best

    @property
    def loses(self) -> bool:
        return self.ratio < EQUAL

    @property
    def verdict(self) -> str:
        """The consequence of the times as a sentence; '' where the kernel wins."""
        if self.loses:
            return f"{self.op} has {self.ratio:.2f} of the speed of {self.peer} in {self.dtype} on this processor"
        return f"{self.op} runs products of torch in {self.dtype}, which are faster here" if self.leaves_to_library else ""


def read(library: Path) -> tuple[Speed, ...]:
    """The times measured for a library on this processor; none where it was another one, or where nothing was measured."""
    try:
        data: dict[str, Any] = json.loads(_file(library).read_text(encoding="utf-8"))
        return tuple(Speed(**row) for row in data["speeds"]) if data["processor"] == processor_model() else ()
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def write(library: Path, speeds: tuple[Speed, ...]) -> None:
    """Store the times of a library, in one step."""
    draft = _file(library).with_suffix(f".{os.getpid()}.draft")
    content = {"processor": processor_model(), "speeds": [asdict(speed) for speed in speeds]}
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.chmod(0o600)
    os.replace(draft, _file(library))


def processor_model() -> str:
    """The name of the first processor, as the kernel gives it; '' where it gives none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))), "")
    except OSError:
        return ""


def _file(library: Path) -> Path:
    return library.with_suffix(".speeds")
