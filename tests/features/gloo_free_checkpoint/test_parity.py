"""Files of the optimizer against those that Megatron writes through gloo."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import VerificationCase, build_case
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.gloo_free_checkpoint.jobs import assert_same, load, save, tensors

pytestmark = pytest.mark.long

NAME = "gloo-free-checkpoint"
SHARD = 9504
"""Numbers in the shard of four ranks."""


def case_of(size: int, nproc: int, *names: str) -> VerificationCase:
    layer = Layer("test", settings={NAME: {"slice": size}}, world={"dtype": "bf16"})
    case = build_case([NAME, *names], [layer], ["distributed-optimizer"], nproc)
    return replace(case, recipe=replace(case.recipe, steps=2))


SLICES = {
    "larger than a shard": (10_000_000, 2, lambda size, shard: size > shard),
    "equal to a shard": (SHARD, 4, lambda size, shard: size == shard),
    "a divisor of a shard": (SHARD // 4, 4, lambda size, shard: size < shard and shard % size == 0),
    "no divisor of a shard": (1000, 2, lambda size, shard: size < shard and shard % size > 0),
}


@pytest.mark.parametrize("kind", SLICES)
def test_files_hold_what_gloo_brings_and_either_run_reads_the_other(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    size, nproc, relation = SLICES[kind]
    case = case_of(size, nproc)
    plans = {"gloo": case.baseline, "free": case.plan}
    saved = {name: pool.call(save, nproc, case.recipe, str(tmp_path / name), plan=plan) for name, plan in plans.items()}
    assert [relation(size, shard) for shard in saved["free"][0]["shards"]] == [True]
    files = {name: torch.load(tmp_path / name, weights_only=False) for name in plans}
    assert_same(files["gloo"], files["free"])
    assert {name: bool(ranks[0]["groups"]) for name, ranks in saved.items()} == {"gloo": True, "free": False}
    for written, reader in (("gloo", case.plan), ("free", case.baseline)):
        loaded = pool.call(load, nproc, case.recipe, str(tmp_path / written), plan=reader)
        for states, before in zip(loaded, saved["gloo"], strict=True):
            assert_same(states, before["states"])


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_rank_but_the_first_sends_its_shards_once(pool: WorkerPool, tmp_path: Path, nproc: int) -> None:
    case = case_of(1000, nproc)
    ranks = pool.call(save, nproc, case.recipe, str(tmp_path / "file"), plan=case.plan)
    file = torch.load(tmp_path / "file", weights_only=False)
    shard = sum(-(-tensor.numel() // nproc) for name, tensor in tensors(file).items() if name.endswith("/param"))
    assert shard <= sum(ranks[0]["shards"])
    assert [rank["sent"] for rank in ranks] == [0] + (nproc - 1) * [3 * 4 * sum(ranks[0]["shards"])]


def test_main_weights_and_states_that_are_elsewhere_are_saved_and_loaded(pool: WorkerPool, tmp_path: Path) -> None:
    case = case_of(1000, 2, "reuse-fp32-param", "swap-optimizer")
    plain = pool.call(save, 2, case.recipe, str(tmp_path / "gloo"), plan=case.baseline)
    pool.call(save, 2, case.recipe, str(tmp_path / "free"), plan=case.plan)
    assert_same(*(torch.load(tmp_path / name, weights_only=False) for name in ("gloo", "free")))
    loaded = pool.call(load, 2, case.recipe, str(tmp_path / "gloo"), plan=case.plan)
    for states, before in zip(loaded, plain, strict=True):
        assert_same(states, before["states"])
