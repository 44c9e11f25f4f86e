"""What Megatron alone does otherwise under tensor parallelism; a line that has changed says that Megatron was repaired."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_two_losses_of_megatron_alone_and_a_norm_of_gradients_are_not_those_of_one_process() -> None:
    script = Path(__file__).with_name("stock_tensor_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [
        "loss of logits in shares: 2.749 on 2 ranks, 2.749 on one",
        "loss of gathered logits: 3.442 on 2 ranks, 2.749 on one",
        "loss with label smoothing: 4.133 on 2 ranks, 4.118 on one",
        "norm of attention sinks: 2.236 on 2 ranks, 5.477 on one",
    ]
