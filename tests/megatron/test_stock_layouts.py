"""Disagreements of Megatron's own layouts, each shown by a file that needs no mindspeed.

When a test fails, Megatron is repaired, and the page of the matrix has one line less.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOUR_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node", "4")
TWO_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def printed(script: str, *launcher: str, path: Path | None = None) -> list[str]:
    """The lines that a script of this folder prints, with the installed Megatron or the one at ``path``."""
    command = [sys.executable, *launcher, str(Path(__file__).with_name(script))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()


@pytest.mark.long
def test_with_tensor_parallelism_the_shared_keys_of_latent_attention_have_the_gradient_of_one_ranks_heads() -> None:
    lines = map(str.split, printed("stock_latent_attention.py", *TWO_RANKS))
    differences = {name: float(value) for name, value in lines}
    assert differences.pop("linear_kv_down_proj.weight") > 0.1
    assert len(differences) == 4
    assert max(differences.values()) < 1e-6


@pytest.mark.long
def test_the_global_auxiliary_loss_depends_on_how_many_replicas_share_a_step() -> None:
    assert printed("stock_global_aux_loss.py", *TWO_RANKS) == ["aux_loss: 1.000", "global_aux_loss: 0.450"]


@pytest.mark.long
def test_sinkhorn_routing_gives_tokens_to_other_experts_where_ranks_share_a_micro_batch() -> None:
    assert printed("stock_sinkhorn.py") == ["tokens of another expert: 2.6%"]


@pytest.mark.long
def test_two_losses_and_a_norm_of_gradients_are_not_those_of_one_process() -> None:
    assert printed("stock_tensor_parallel.py", *TWO_RANKS) == [
        "loss of logits in shares: 2.749 on 2 ranks, 2.749 on one",
        "loss of gathered logits: 3.442 on 2 ranks, 2.749 on one",
        "loss with label smoothing: 4.133 on 2 ranks, 4.118 on one",
        "norm of attention sinks: 2.236 on 2 ranks, 5.477 on one",
    ]


@pytest.mark.long
def test_with_a_loss_per_token_losses_of_routers_weigh_a_share_of_the_tokens() -> None:
    assert printed("stock_loss_weights.py", *TWO_RANKS) == [
        "tp 2, a loss per micro-batch: aux loss 1.000, z-loss 1.000",
        "tp 2, a loss per token: aux loss 0.500, z-loss 0.500",
        "cp 2, a loss per micro-batch: aux loss 1.000, z-loss 1.000",
        "cp 2, a loss per token: aux loss 0.500, z-loss 0.500",
    ]


@pytest.mark.long
def test_a_padding_mask_is_split_by_the_global_groups_whatever_the_groups_of_the_model() -> None:
    assert printed("stock_padding_mask.py", *FOUR_RANKS) == ["ranks with the padding mask of other tokens: [1, 2]"]


@pytest.mark.long
def test_a_loss_per_token_of_multi_token_prediction_weighs_tokens_by_the_counts_of_their_replica() -> None:
    folders = [Path(folder) for folder in os.environ.get("MINDSPEED_MEGATRONS", "").split(os.pathsep) if folder]
    newer = [root for folder in folders for root in sorted(folder.glob("*")) if _counts_tokens_of_prediction(root)]
    if not newer or importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton and, in MINDSPEED_MEGATRONS, a Megatron of 0.19 or newer")
    for root in newer:
        (line,) = printed("stock_mtp_loss.py", path=root)
        assert line == "on two replicas: 1.333 and 2.000, in one process: 1.500 and 1.500"


def _counts_tokens_of_prediction(root: Path) -> bool:
    module = root / "megatron" / "core" / "transformer" / "multi_token_prediction.py"
    return module.is_file() and "original_num_tokens" in module.read_text(encoding="utf-8")
