"""A training script of two ranks for docs/troubleshooting.md: ``torchrun --nproc-per-node 2 train.py``.

``FAULT`` names what goes wrong on rank 1. ``packages/rank0`` and ``packages/rank1`` hold what is installed there.
"""

import os
import signal
import sys
import time
from pathlib import Path

fault, rank, here = os.environ["FAULT"], int(os.environ["RANK"]), Path(__file__).parent
sys.path.insert(0, str(here / "packages" / f"rank{rank}"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import mindspeed  # noqa: E402


def reach(place: str) -> None:
    """End rank 1 if this is the place of the fault."""
    if rank != 1 or not fault.startswith(place):
        return
    (here / "fault").write_text(str(time.time()))
    if fault.endswith("exit"):
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


plan = mindspeed.plan(["acme-clip"], platform="cpu", without=["flash-attention", "matmul-add"])
reach("plan")
mindspeed.activate(plan)
reach("setup")
dist.init_process_group("gloo")
for step in range(200):
    with mindspeed.step():
        dist.all_reduce(torch.ones(1))
        if step == 5:
            reach("step")
