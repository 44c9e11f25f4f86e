"""A script that knows nothing of mindspeed trains under ``mindspeed run``, and every layout gives the losses of one process.

The layout comes from the script's own flags in one half of the cases, in the other from features alone.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed import plan
from mindspeed.context_parallel.conditions import predicts_one_token
from mindspeed.workbench.verification.pool import WorkerPool
from tests.warm_processes import warm_python

SCRIPT = Path(__file__).with_name("plain_script.py")
EXPERTS = ("--experts", "4")


def run(nproc: int, options: tuple[str, ...], flags: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the script; ``options`` are those of ``mindspeed run``, ``flags`` the script's own."""
    command = [*warm_python(), "-m", "mindspeed", "run", "--platform", "cpu", "--nproc", str(nproc), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([*command, "--", str(SCRIPT), *flags], capture_output=True, text=True, check=False, env=environment)


def losses_and_layout(nproc: int, options: tuple[str, ...], flags: tuple[str, ...]) -> tuple[list[float], dict[str, Any]]:
    done = run(nproc, options, flags)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    return data["losses"], data["layout"]


def losses_and_norms(nproc: int, options: tuple[str, ...], flags: tuple[str, ...]) -> list[float]:
    done = run(nproc, options, ("--share-sequence", *flags))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    return [*data["losses"], *data["norms"]]


@lru_cache
def one_process(flags: tuple[str, ...]) -> tuple[list[float], dict[str, Any]]:
    return losses_and_layout(1, (), flags)


MOE = {
    "alltoall": ("moe-alltoall-overlap", "--set", "moe-alltoall-overlap.parts=2"),
    "once per rank": ("moe-alltoall-overlap", "--set", "moe-alltoall-dispatcher.once_per_rank=true"),
    "allgather": ("moe-allgather-overlap",),
    "zero memory": ("moe-zero-memory", "--set", "moe-zero-memory.level=level1"),
    "adaptive": ("moe-alltoall-overlap,moe-adaptive-recompute", "--set", "moe-adaptive-recompute.scale=1"),
}


@pytest.mark.exhaustive("the next test has the losses, norms and every gradient of the same runs")
@pytest.mark.long
@pytest.mark.parametrize("name", MOE)
def test_experts_on_two_ranks_give_the_losses_and_norms_of_one_process(name: str) -> None:
    model = ("--llama", "--experts", "4")
    options = ("--ep", "2", "--num-experts", "4", "--router-topk", "2", "--features", *MOE[name])
    assert losses_and_norms(2, options, model) == pytest.approx(losses_and_norms(1, (), model), rel=1e-5)


def gradients_of(folder: Path) -> dict[str, Tensor]:
    """The whole gradients of the first step, joined from the shares of all ranks."""
    whole: dict[str, Tensor] = {}
    for file in sorted(folder.iterdir()):
        for name, shape, offset, share in torch.load(file):
            gradient = whole.setdefault(name, torch.full(shape, torch.nan))
            gradient[tuple(slice(start, start + size) for start, size in zip(offset, share.shape, strict=True))] = share
    return whole


KNOWN = ("--num-experts", "4", "--router-topk", "2")
LIMITED = (*KNOWN, "--set", "deepspeed-moe.capacity_factor=0.75")
FORMULA = ("--set", "deepspeed-moe.reference=true", "--features", "deepspeed-moe,moe-grouped-gemm")
CAPACITY = {
    "masks": "deepspeed-moe,moe-grouped-gemm",
    "rows by index, in units": "deepspeed-moe,deepspeed-moe-rearrange,pipe-experts",
}
GRADIENTS = {
    **{name: ((*KNOWN, "--features", *MOE[name]), ("--optimization-level", "0"), ()) for name in MOE},
    **{name: ((*LIMITED, "--features", CAPACITY[name]), (*LIMITED, *FORMULA), ("--balance", "0.01")) for name in CAPACITY},
}
"""Options of two ranks and of one, and flags of the script."""


@pytest.mark.long
@pytest.mark.parametrize("name", GRADIENTS)
def test_experts_on_two_ranks_give_every_gradient_of_one_process(name: str, tmp_path: Path) -> None:
    two_ranks, alone, flags = GRADIENTS[name]
    model = ("--llama", "--experts", "4", *flags, "--steps", "1", "--gradients")
    ours = losses_and_norms(2, ("--ep", "2", *two_ranks), (*model, str(tmp_path / "two")))
    assert ours == pytest.approx(losses_and_norms(1, alone, (*model, str(tmp_path / "one"))), rel=1e-5)
    one, two = (gradients_of(tmp_path / folder) for folder in ("one", "two"))
    assert one.keys() == two.keys()
    assert len(one) == 10 or name in CAPACITY  # of all layers a name is one gradient
    assert any("experts" in name for name in one)
    assert any("router" in name for name in one)
    for key, gradient in one.items():
        norm = float(torch.linalg.norm(gradient))
        assert norm > 0
        assert float(torch.linalg.norm(two[key] - gradient)) <= 1e-5 * norm, key


@dataclass(frozen=True)
class Case:
    """One layout: ``differs`` is where it is not that of one process."""

    nproc: int
    differs: dict[str, Any]
    options: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    model: tuple[str, ...] = ()


RECOMPUTE = ("--set", "recompute.granularity=full", "--set", "recompute.method=uniform", "--set", "recompute.num_layers=1")
OVERLAPS = {"dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERT_RANKS = {"ep": 2, "dp": 2}
CHUNKS = {"pp": 2, "chunks": 2, "overlap_p2p": True}

SHORT = {
    "tp2, sequence parallel and full recompute by features": Case(
        2,
        {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        ("--tp", "2", "--features", "sequence-parallel,recompute", *RECOMPUTE),
    ),
    "dp2, distributed optimizer and both overlaps by features": Case(
        2, OVERLAPS, ("--features", "distributed-optimizer,async-ddp,async-param-gather")
    ),
}
LONG = {
    "tp2 x pp2 by flags": Case(4, {"tp": 2, "pp": 2}, flags=("--tp", "2", "--pp", "2")),
    "pp2 x vpp2 with overlapped p2p by features": Case(2, CHUNKS, ("--pp", "2", "--vpp", "2")),
    "tp2 and sequence parallel by flags": Case(
        2, {"tp": 2, "sequence_parallel": True}, flags=("--tp", "2", "--sequence-parallel")
    ),
    "tp2 and sequence parallel by features": Case(
        2, {"tp": 2, "sequence_parallel": True}, ("--tp", "2", "--features", "sequence-parallel")
    ),
    "pp2 x vpp2 with overlapped p2p by flags": Case(2, CHUNKS, flags=("--pp", "2", "--vpp", "2", "--overlap-p2p")),
    "tp2 x pp2 by features": Case(4, {"tp": 2, "pp": 2}, ("--tp", "2", "--pp", "2")),
    "dp2, distributed optimizer and both overlaps by flags": Case(
        2, OVERLAPS, flags=("--distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    ),
    "ep2 with all-to-all by features": Case(
        2,
        EXPERT_RANKS | {"dispatcher": "alltoall"},
        ("--ep", "2", "--num-experts", "4", "--set", "expert-parallel.dispatcher=alltoall"),
        model=EXPERTS,
    ),
    "ep2 with all-to-all by flags": Case(
        2, EXPERT_RANKS | {"dispatcher": "alltoall"}, flags=("--ep", "2", "--dispatcher", "alltoall"), model=EXPERTS
    ),
    "ep2 with all-gather by flags": Case(2, EXPERT_RANKS, flags=("--ep", "2", "--dispatcher", "allgather"), model=EXPERTS),
    "ep2 with all-gather by features": Case(
        2,
        EXPERT_RANKS,
        ("--ep", "2", "--num-experts", "4", "--set", "expert-parallel.dispatcher=allgather"),
        model=EXPERTS,
    ),
    "full recompute by flags": Case(1, {"recompute": "full"}, flags=("--recompute", "full")),
    "full recompute by features": Case(1, {"recompute": "full"}, ("--features", "recompute", *RECOMPUTE)),
    "selective recompute by flags": Case(1, {"recompute": "selective"}, flags=("--recompute", "selective")),
    "selective recompute by features": Case(
        1, {"recompute": "selective"}, ("--features", "recompute", "--set", "recompute.granularity=selective")
    ),
}
FLAGS = pytest.mark.exhaustive("tests/megatron/test_layouts.py has the layouts of the platform by Megatron's own arguments")
BY_FLAGS = [name for name in LONG if name.endswith("by flags") and "vpp2" not in name]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=[pytest.mark.long, *([FLAGS] if name in BY_FLAGS else [])]) for name in LONG)]
)
def test_the_script_gives_the_losses_of_one_process(name):
    case = (SHORT | LONG)[name]
    expected, alone = one_process(case.model)
    losses, layout = losses_and_layout(case.nproc, case.options, (*case.flags, *case.model))
    assert layout == alone | case.differs
    assert losses == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.long
def test_a_script_that_asks_for_something_else_than_the_plan_is_told_where():
    done = run(1, ("--features", "recompute", *RECOMPUTE), ("--recompute", "selective"))
    assert (done.returncode, done.stdout) == (1, "")
    line = SCRIPT.read_text().split("else TransformerConfig)(")[0].count("\n") + 1
    assert done.stderr.endswith(
        "MS605 the script sets recompute_granularity='selective', but the plan sets recompute_granularity='full' for "
        "recompute\n"
        f"  where: TransformerConfig at {SCRIPT}:{line}\n"
        "  fix: remove recompute_granularity from the script, or change the settings of recompute\n"
    )


def shared(cp: int, *features: str) -> tuple[str, ...]:
    degree = ("--set", "hybrid-attention.ulysses_degree=2") if "hybrid-attention" in features else ()
    return ("--cp", str(cp), "--features", ",".join(features), *degree)


OVERLAPPED = ("distributed-optimizer", "async-ddp", "async-param-gather")
BESIDE_SHARES = {
    "alone": (1, (), ()),
    "tp2 and sequence parallel": (2, ("sequence-parallel",), ("--tp", "2")),
    "pp2": (2, (), ("--pp", "2")),
    "the distributed optimizer and both overlaps": (1, OVERLAPPED, ()),
    "the distributed optimizer, both overlaps and dp2": (2, OVERLAPPED, ()),
}


@lru_cache
def whole_sequences(flags: tuple[str, ...]) -> list[float]:
    return losses_and_norms(1, (), flags)


@pytest.mark.cover(1, because="tests/features/context_parallel/test_parity.py has every algorithm beside every layout")
@pytest.mark.long
@pytest.mark.parametrize("beside", BESIDE_SHARES)
@pytest.mark.parametrize("algorithm", ["ring-attention", "ulysses-attention", "hybrid-attention", "kv-allgather-cp"])
def test_a_script_that_slices_its_batches_gives_the_losses_and_norms_of_one_process(algorithm, beside):
    """The plan makes the loss right: the tokens that count are not spread evenly, and the script says nothing of it."""
    times, features, options = BESIDE_SHARES[beside]
    cp = 4 if algorithm == "hybrid-attention" else 2
    shares = losses_and_norms(cp * times, (*shared(cp, algorithm, *features), *options), ("--llama",))
    assert shares == pytest.approx(whole_sequences(("--llama",)), rel=5e-6)


@pytest.mark.cover
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ring-attention", "kv-allgather-cp"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("divided", [(), ("--per-token",)], ids=["a micro-batch", "a token"])
def test_further_tokens_are_predicted_across_the_borders_of_a_zigzag(algorithm, cp, divided):
    flags = ("--llama", "--further-tokens", "2", *divided)
    assert losses_and_norms(cp, shared(cp, algorithm), flags) == pytest.approx(whole_sequences(flags), rel=5e-6)


@pytest.mark.long
def test_further_tokens_are_refused_elsewhere_also_when_the_plan_knows_nothing_of_them():
    done = run(2, shared(2, "ulysses-attention"), ("--llama", "--further-tokens", "1"))
    assert (done.returncode, done.stdout) == (1, "")
    sentence = predicts_one_token.message.format(feature="ulysses-attention")
    assert f"MS304 ulysses-attention: {sentence}" in done.stderr


def trained(*flags: str) -> list[float]:
    """Losses and gradient norms of the script's own loop, as one rank of a group that is there."""
    from tests.megatron.plain_script import parse, train

    losses, norms, _ = train(parse(["--share-sequence", *flags]))
    return [*losses, *norms]


@pytest.mark.long
def test_a_loop_that_slices_its_batches_gives_the_losses_and_norms_of_one_process(pool: WorkerPool) -> None:
    whole = pool.call(trained, 1, "--llama", plan=plan(platform="cpu", world={"world_size": 1}))
    world = {"world_size": 2, "cp": 2, "num_attention_heads": 4, "seq_length": 32}
    shares = pool.call(trained, 2, "--llama", plan=plan(["ulysses-attention"], platform="cpu", world=world))
    assert shares[0] == shares[1] == pytest.approx(whole[0], rel=5e-6)
