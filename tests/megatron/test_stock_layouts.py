"""Disagreements of Megatron's own layouts, each shown by a file that needs no mindspeed.

When a test fails, Megatron is repaired, and the page of the matrix has one line less.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def printed(script: str, *launcher: str) -> dict[str, str]:
    """The table that a script of this folder prints: names and values."""
    command = [sys.executable, *launcher, str(Path(__file__).with_name(script))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return {name.rstrip(": "): value for name, _, value in (line.rpartition(" ") for line in done.stdout.splitlines())}


TWO_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.long
def test_with_tensor_parallelism_the_shared_keys_of_latent_attention_have_the_gradient_of_one_ranks_heads() -> None:
    differences = {name: float(value) for name, value in printed("stock_latent_attention.py", *TWO_RANKS).items()}
    assert differences.pop("linear_kv_down_proj.weight") > 0.1
    assert len(differences) == 4
    assert max(differences.values()) < 1e-6


@pytest.mark.long
def test_the_global_auxiliary_loss_depends_on_how_many_replicas_share_a_step() -> None:
    assert printed("stock_global_aux_loss.py", *TWO_RANKS) == {"aux_loss": "1.000", "global_aux_loss": "0.450"}


@pytest.mark.long
def test_sinkhorn_routing_gives_tokens_to_other_experts_where_ranks_share_a_micro_batch() -> None:
    assert printed("stock_sinkhorn.py") == {"tokens of another expert": "2.6%"}
