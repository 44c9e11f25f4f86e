"""Megatron-LM's pretrain_gpt.py by MindSpeed's flag for linear position bias, alone and with a sequence spread over ranks."""

from collections.abc import Callable
from shlex import split

import pytest

from tests.megatron_lm.checkout import Run
from tests.megatron_lm.warm_ranks import WarmCheckout

pytestmark = pytest.mark.long

ALIBI = split("--position-embedding-type alibi --num-attention-heads 6 --hidden-size 48 --train-iters 4")
SPREAD = {
    "ring": (2, "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo --alibi-fusion-attn-type 2"),
    "Ulysses": (2, "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"),
    "gathered": (2, "--context-parallel-size 2 --features kv-allgather-cp"),
}


@pytest.fixture(scope="module")
def alone(warm_ranks: WarmCheckout, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process in which Megatron's own core attention has the bias added to its scores."""
    unfused = split("--set alibi.fused=false --without flash-attention")
    return warm_ranks.at(tmp_path_factory.mktemp("alone")).adapted(1, *ALIBI, *unfused).ended_well()


def assert_alike(run: Run, other: Run) -> None:
    assert run.losses == pytest.approx(other.losses, rel=1e-5)
    assert len(set(run.losses)) == 4
    assert run.report["problems"] == []


def test_the_operator_trains_as_megatrons_scores(warm: WarmCheckout, alone: Run) -> None:
    assert_alike(warm.adapted(1, *ALIBI).ended_well(), alone)
    assert "position_embedding_type ......................... none" in alone.log


@pytest.mark.parametrize("name", SPREAD)
def test_a_share_of_the_sequence_does(warm: WarmCheckout, alone: Run, name: str) -> None:
    nproc, flags = SPREAD[name]
    assert_alike(warm.adapted(nproc, *ALIBI, *split(flags)).ended_well(), alone)


def test_without_the_bias_it_is_another_model(stock: Callable[..., Run], alone: Run) -> None:
    assert stock("gpt").losses != pytest.approx(alone.losses, rel=1e-4)
