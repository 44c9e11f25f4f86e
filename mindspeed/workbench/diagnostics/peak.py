"""Measure the TFLOP/s of large dense products on this device: a peak to compare a run with."""

from __future__ import annotations

import time
from typing import Final

_SIZES: Final = {"cpu": 1024, "cuda": 8192, "npu": 8192}
_ROUNDS: Final = 5


def measure_peaks(platform: str) -> dict[str, float]:
    """Return the best TFLOP/s of a few square products on one device, by the name of the precision."""
    import torch

    device = torch.device(platform)
    size = _SIZES[platform]
    peaks = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = []
        for _ in range(_ROUNDS + 1):
            start = time.perf_counter()
            c = a @ b
            c[-1, -1].item()  # waits for the device
            seconds.append(time.perf_counter() - start)
        peaks[name] = 2 * size**3 / min(seconds[1:]) / 1e12
    return peaks
