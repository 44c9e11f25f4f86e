"""Times of C++ operators on this processor and of what a job runs without them; ``mindspeed ops build`` measures them. Light.

A kernel that wins on one processor loses on another whose instructions the library of torch uses better, so what level 1
switches on, and whether a product is ours or torch's, follows from these times.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

from mindspeed.files.text_files import replace_text
from mindspeed.ops.instruction_sets import processor_model
from mindspeed.ops.variants import digest

EQUAL: Final = 0.9
"""The lowest ratio of two equal speeds: seven probes of one processor gave ratios from 0.97 to 1.17 for one call."""
DTYPES: Final = ("bf16", "fp32")
"""Types that operators are measured in."""
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
PRODUCTS: Final = frozenset({"npu_gmm", "npu_groupmatmul_add_fp32", "npu_matmul_add_fp32"})
"""Those that can leave their products to torch, measured with large and with small matrices, where calls cost more."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a call in ``dtype``: with our ``kernel``, with products of torch's ``library`` where it has any, and without.

    ``peer`` names what a job runs ``without`` the operator. ``small``: its matrices have at most 2^24 multiplications each.
    """

    op: str
    dtype: str
    kernel: float
    library: float | None
    without: float
    peer: str
    small: bool = False

    @property
    def label(self) -> str:
        """The data type, and whether matrices are small, in two words."""
        return f"small {self.dtype}" if self.small else self.dtype

    @property
    def scope(self) -> str:
        """The data type, and whether matrices are small, as the end of a sentence."""
        return f"in {self.dtype} with small matrices" if self.small else f"in {self.dtype}"

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
    def comparison(self) -> str:
        """The ratio as a sentence."""
        return f"{self.op} has {self.ratio:.2f} times the speed of {self.peer} {self.scope} on this processor"

    @property
    def verdict(self) -> str:
        """The consequence of the times as a sentence; '' where the kernel wins."""
        if self.loses:
            return self.comparison
        return f"{self.op} runs products of torch {self.scope}, which are faster here" if self.leaves_to_library else ""


def cases(op: str) -> list[tuple[str, bool]]:
    """Return in which types an operator is measured, and whether with small matrices."""
    return [(dtype, small) for dtype in DTYPES for small in ((False, True) if op in PRODUCTS else (False,))]


def read(library: Path) -> tuple[Speed, ...]:
    """Return the times measured for a library on a processor of this model, without damaged rows."""
    try:
        rows = json.loads(_file(library).read_text(encoding="utf-8"))
        return tuple(speed for row in rows if (speed := _speed(row)) is not None)
    except (OSError, ValueError, TypeError):
        return ()


def write(library: Path, speeds: tuple[Speed, ...]) -> None:
    """Store the times of a library on this processor, in one step. Raises OSError."""
    replace_text(_file(library), json.dumps([asdict(speed) for speed in speeds], indent=2) + "\n", private=True)


def _speed(row: Any) -> Speed | None:
    """Return the times of a row, or None for a damaged one."""
    try:
        speed = Speed(**row)
    except TypeError:
        return None
    times = (speed.kernel, speed.without, *(() if speed.library is None else (speed.library,)))
    are_times = all(isinstance(time, float) and isfinite(time) and time > 0 for time in times)
    is_known = speed.op in MEASURED and (speed.dtype, speed.small) in cases(speed.op)
    return speed if are_times and is_known and isinstance(speed.peer, str) else None


def _file(library: Path) -> Path:
    """Return the file of a library's times: processors of another model that share the cache have another one."""
    return library.with_suffix(f".{digest(processor_model())}.speeds")
