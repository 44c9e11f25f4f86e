"""A training script of two ranks for docs/troubleshooting.md: ``torchrun --nproc-per-node 2 train.py``.

``FAULT`` names what goes wrong on rank 1; ``packages/rank0`` and ``packages/rank1`` hold what is installed there.
"""

import os
import signal
import sys
from pathlib import Path

fault, rank = os.environ.get("FAULT", ""), int(os.environ["RANK"])
sys.path.insert(0, str(Path(__file__).parent / "packages" / f"rank{rank}"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import mindspeed  # noqa: E402

if fault == "exit" and rank == 1:
    os._exit(3)
plan = mindspeed.plan(["acme-clip"], platform="cpu")
mindspeed.activate(plan)
if fault == "exit after activation" and rank == 1:
    os._exit(3)
dist.init_process_group("gloo")
for step in range(100):
    with mindspeed.step():
        dist.all_reduce(torch.ones(1))
        if fault == "kill" and rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
