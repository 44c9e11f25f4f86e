"""A lock made from a script holds in its job: the digest is that of the run, and a changed script does not start."""

import sys
from pathlib import Path
from shlex import join

import pytest

from mindspeed.engine.planning.lock import read_lock
from tests.megatron_lm.checkout import LLAMA, Checkout, Run

pytestmark = pytest.mark.long

WORDS = [*LLAMA, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--train-iters", "2"]


@pytest.fixture
def lock(checkout: Checkout) -> Path:
    """The lock of a script that trains on two ranks."""
    program = checkout.script_with_line()
    script = checkout.folder / "pretrain.sh"
    script.write_text(f"torchrun --nproc-per-node 2 {program} {join([*checkout.flags, *WORDS])}\n")
    file = checkout.folder / "job.lock"
    checkout.run([sys.executable, "-m", "mindspeed", "lock", str(script), "-o", str(file)], {}).ended_well()
    return file


def refused(run: Run, text: str) -> bool:
    return run.status != 0 and f"MS618 this job differs from the locked one: {text}" in run.log


@pytest.mark.budget(300)
def test_a_lock_of_a_script_holds_for_the_import_line(checkout: Checkout, lock: Path) -> None:
    run = checkout.adapted(2, *WORDS, MINDSPEED_LOCK=str(lock)).ended_well()
    assert run.report["digest"] == read_lock(lock).plan.digest
    assert len(run.losses) == 2
    changed = checkout.adapted(2, *WORDS, "--lr", "2e-3", MINDSPEED_LOCK=str(lock))
    assert refused(changed, "it has option lr 0.002, the lock has 0.001")
    assert not changed.losses


@pytest.mark.budget(300)
def test_a_lock_of_a_script_holds_for_the_launcher(checkout: Checkout, lock: Path) -> None:
    run = checkout.launched(2, ["--lock", str(lock)], *WORDS).ended_well()
    assert run.report["digest"] == read_lock(lock).plan.digest
    one_rank = checkout.launched(1, ["--lock", str(lock)], *WORDS[:-5], *WORDS[-2:])
    assert refused(one_rank, "it has no feature sequence-parallel, the lock has ")


@pytest.mark.budget(60)
def test_a_node_is_checked_against_the_lock_of_a_script(checkout: Checkout, lock: Path) -> None:
    done = checkout.run([sys.executable, "-m", "mindspeed", "preflight", "--lock", str(lock)], {}).ended_well()
    assert f"plan {read_lock(lock).plan.digest}" in done.log
