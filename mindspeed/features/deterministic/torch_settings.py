"""Torch's own switches, and the operators that it refuses under them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import extract_tb
from typing import Final

import torch

from mindspeed import plugins as ms
from mindspeed.problems import advice

_REFUSAL: Final = re.compile(r"^(\S+) does not have a deterministic implementation")
_FEATURE: Final = re.compile(r"mindspeed/features/(\w+)/")
NAME: Final = "deterministic"


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Hold the switches of torch that decide which algorithms run."""

    deterministic: bool
    warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool

    @classmethod
    def make_deterministic(cls) -> TorchSettings:
        """Switch to deterministic algorithms and return how the switches stood. No generator is seeded."""
        cudnn = torch.backends.cudnn
        before = cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn.deterministic,
            cudnn.benchmark,
        )
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        return before

    def restore(self) -> None:
        """Put the switches back."""
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


@contextmanager
def refusals_named() -> Iterator[None]:
    """Turn torch's refusal of an operator into MS616, which names the operator and the feature that called it."""
    try:
        yield
    except RuntimeError as error:
        refused = _REFUSAL.search(str(error))
        if refused is None:
            raise
        frames = extract_tb(error.__traceback__)
        callers = [match[1].replace("_", "-") for frame in frames if (match := _FEATURE.search(frame.filename))]
        caller = next((name for name in reversed(callers) if name != NAME), "")
        by = f", which {caller} calls," if caller else ""
        text = f"the operator {refused[1]}{by} has no deterministic implementation on this device"
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        fix = f"remove {caller or NAME}"
        names = tuple(dict.fromkeys((NAME, caller or NAME)))
        raise ms.MindSpeedError([ms.Problem("MS616", text, names, where=where, fix=advice(fix))]) from error
