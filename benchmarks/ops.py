"""How fast are the operators on this machine's processor? Against every peer, at 4 and 16 MiB, forward and backward.

Two torch threads. Without the built library (``mindspeed ops build``) the references are measured, and the table says so.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.operators import attention, moe, streaming
from benchmarks.table import Row, main

THREADS = 2


def rows() -> list[Row]:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    return [*streaming.rows(), *moe.rows(), *attention.rows()]


if __name__ == "__main__":
    print(f"{THREADS} torch threads, {torch.backends.cpu.get_cpu_capability()}", file=sys.stderr)
    main(rows)
