"""A disagreement of Megatron's own layouts, shown by a file that needs no mindspeed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_with_tensor_parallelism_the_shared_keys_of_latent_attention_have_the_gradient_of_one_ranks_heads() -> None:
    """When this fails, Megatron is repaired, and the page of the matrix has one line less."""
    script = Path(__file__).with_name("stock_latent_attention.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    differences = {name: float(difference) for name, difference in map(str.split, done.stdout.splitlines())}
    assert differences.pop("linear_kv_down_proj.weight") > 0.1
    assert len(differences) == 4
    assert max(differences.values()) < 1e-6
