"""Speeds of matrix products on this machine's device: what an operation and a byte that is read or written take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mindspeed.job.arithmetic import BYTES
from mindspeed.workbench.tuning.measure import Store, is_amount, read_mapping
from mindspeed.workbench.tuning.time import Machine, nonnegative

UNITS: Final = ("flops", "moved")
ROWS: Final = (64, 256, 1024, 4096)
WIDTHS: Final = ((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096))
"""Columns of the two operands that are measured with each number of rows: [rows, k] times [k, n]."""
SECONDS: Final = 0.05
"""Time that is spent on one product at least."""
_WEIGHT: Final = 1e-3
"""Weight beside one measured product of the speed at which operations, or bytes, alone would take all of the time."""


def measured_products(dtype: str, device: str, say: Callable[[str], None]) -> dict[str, float]:
    """Time products of many sizes, and return the seconds of an operation and of a byte that fit all of them best."""
    import torch

    torch.set_num_threads(1)  # as in a rank
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    synchronize: Callable[[], Any] = getattr(torch.get_device_module(device), "synchronize", lambda: None)
    rows = []
    for m, (k, n) in ((m, widths) for m in ROWS for widths in WIDTHS):
        x, weight = (torch.randn(shape, device=device).to(types[dtype]) for shape in ((m, k), (k, n)))
        taken = min(_times(lambda x=x, weight=weight: torch.mm(x, weight), synchronize))  # type: ignore[misc]
        say(f"[{m:,}, {k:,}] x [{k:,}, {n:,}]: {2 * m * k * n / taken / 1e9:,.0f} GFLOP/s")
        rows.append((2 * m * k * n / taken, BYTES[dtype] * (m * k + k * n + m * n) / taken))
    design = np.array(rows)
    scale = 1 / design.max(axis=0)
    return dict(zip(UNITS, map(float, scale * nonnegative(design * scale, _WEIGHT)), strict=True))


def _times(run: Callable[[], object], synchronize: Callable[[], Any]) -> Iterator[float]:
    """Yield the seconds of a call until they sum up to `SECONDS`, without those of the first two."""
    spent, calls = 0.0, 0
    while spent < SECONDS or calls < 4:
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        calls += 1
        if calls > 2:
            spent += time.perf_counter() - begin
            yield time.perf_counter() - begin


def keep(store: Store, dtype: str, speeds: Mapping[str, float]) -> None:
    """Write the speeds of this machine for later searches. Raises PlatformError with MS516."""
    store.write({store.file_of_products(dtype): speeds})


def with_products(machine: Machine, store: Store, dtype: str) -> Machine:
    """Return a machine with the speeds of products that were measured on this one, if there are any.

    Raises MindSpeedError with MS518 for a file that other users could have written.
    """
    known = read_mapping(store.file_of_products(dtype))
    measured = {unit: known[unit] for unit in UNITS if is_amount(known.get(unit))}
    is_whole = len(measured) == len(UNITS) and any(measured.values())  # a fit may leave one of them 0
    return replace(machine, seconds={**machine.seconds, **measured}) if is_whole else machine
