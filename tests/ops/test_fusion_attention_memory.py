"""Attention never holds a matrix of scores or of dropout: every allocation of the process is counted, inside kernels too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from mindspeed.ops.attention_arguments import AttentionOptions
from tests.ops.attention_calls import KERNELS, choose
from tests.ops.attention_formula import MASKS

BEFORE = 300
WIDTH = 8


def peak_bytes(function: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that are allocated at one time while ``function`` runs, and its result, which counts too."""
    with profile(profile_memory=True) as seen:
        result = function()
    alive = peak = 0
    for event in seen.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak, result


def peak_of_training(length: int, mode: int, keep: float = 1.0) -> int:
    """Of one forward or one backward call, beside their inputs."""
    q, k, v, dout = (torch.randn(1, 1, length, WIDTH) for _ in range(4))
    how = AttentionOptions(1, "BNSD", 0.3, keep, BEFORE, 0, None, None, None, mode, 1, 0, 0)
    ops = torch.ops.mindspeed
    forward, results = peak_bytes(lambda: ops.fusion_attention(q, k, v, None, MASKS[2], *how))
    *results, state = results
    inputs = (dout, q, k, v, None, MASKS[2], state if keep < 1 else None, *results, False, *how)
    backward, _ = peak_bytes(lambda: ops.fusion_attention_backward(*inputs))
    return max(forward, backward)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", [2, 4])
def test_twice_the_length_takes_about_twice_the_memory(kernel: str, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(kernel, monkeypatch)
    short, long = peak_of_training(4096, mode), peak_of_training(8192, mode)
    assert long <= 2.2 * short
    assert long < 8192 * 8192 * 4


def test_dropout_keeps_no_mask() -> None:
    short, long = peak_of_training(4096, 2, keep=0.9), peak_of_training(8192, 2, keep=0.9)
    assert long <= 2.2 * short


def test_the_flash_kernel_of_this_device_takes_a_fraction_of_the_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = peak_of_training(2048, 2)
    choose("reference", monkeypatch)
    assert flash < peak_of_training(2048, 2) / 10


def test_a_full_matrix_would_be_seen() -> None:
    x = torch.randn(1024, 8)
    peak, _ = peak_bytes(lambda: torch.softmax(x @ x.t(), -1) @ x)
    assert peak >= 2 * 1024 * 1024 * 4
