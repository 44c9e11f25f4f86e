"""The bugs of Megatron in ``traps.yaml``: each is mended by a patch of every plan or shown by a test."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import mindspeed
from mindspeed import registry
from mindspeed.cli import main
from mindspeed.engine.resolution.environment import version_in
from mindspeed.megatron.fixes.feature import TABLES
from mindspeed.workbench.lint.traps import known_traps
from tests.megatron import bug_proofs
from tests.megatron.test_stock_layouts import TWO_RANKS, printed

BUGS = [trap for trap in known_traps() if trap.is_bug]
ROOT = Path(__file__).resolve().parents[2]


def test_every_fix_of_megatron_mends_a_bug_that_is_listed():
    fixes = {row["target"] for row in TABLES["fixes"]}
    assert {target for bug in BUGS for target in bug.mended} == fixes


def test_every_proof_exists():
    assert [bug.name for bug in BUGS if bug.proof and not (ROOT / bug.proof).is_file()] == []


def mended(script: str, *launcher: str) -> list[str]:
    """The lines that a script of this folder prints under a plan without features."""
    command = [sys.executable, "-m", "mindspeed", "run", "--platform", "cpu", *launcher, "--optimization-level", "0", "--"]
    command += [str(Path(__file__).with_name(script))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()


@pytest.mark.long
def test_under_a_plan_latent_attention_has_the_gradients_of_all_heads():
    differences = [float(line.split()[1]) for line in mended("stock_latent_attention.py", "--nproc", "2")]
    assert len(differences) == 5
    assert max(differences) < 1e-6


@pytest.mark.long
def test_under_a_plan_the_norm_counts_the_sinks_of_all_ranks():
    assert mended("stock_tensor_parallel.py", "--nproc", "2")[-1] == "norm of attention sinks: 5.477 on 2 ranks, 5.477 on one"


@pytest.mark.long
def test_under_a_plan_losses_of_routers_weigh_what_is_configured():
    before, after = printed("stock_loss_weights.py", *TWO_RANKS), mended("stock_loss_weights.py", "--nproc", "2")
    assert [line.endswith("0.500, z-loss 0.500") for line in before] == [False, True, False, True]
    assert all(line.endswith("1.000, z-loss 1.000") for line in after)


@pytest.fixture(scope="module")
def fixes() -> Iterator[None]:
    """The fixes of Megatron, and no feature."""
    mindspeed.activate(mindspeed.plan(level=0, platform="cpu"))
    yield
    mindspeed.deactivate()


@pytest.mark.parametrize("name", bug_proofs.PROOFS)
@pytest.mark.usefixtures("fixes")
def test_a_bug_shows_in_its_releases_until_it_is_mended(name):
    (bug,) = [bug for bug in BUGS if bug.name == name]
    seen = bug_proofs.look(partial(bug_proofs.without_fixes, bug))
    if seen.state == "not run":
        pytest.skip(seen.text)
    assert (seen.state == "shown") == version_in(str(registry.probe("cpu").megatron), bug.megatron), seen
    if bug.mended:
        assert bug_proofs.look(bug_proofs.PROOFS[name]).state in ("right", "absent")


def test_every_proof_of_one_process_is_of_a_bug():
    file = Path(bug_proofs.__file__).relative_to(ROOT).as_posix()
    assert {bug.name for bug in BUGS if bug.proof == file} == set(bug_proofs.PROOFS)


ETP = "--num-experts 4 --expert-tensor-parallel-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8"


def test_bugs_lists_those_of_a_release_and_those_that_hit_a_command():
    def listed(*words: str) -> dict[str, bool]:
        done = CliRunner().invoke(main, ["bugs", "--json", *words], catch_exceptions=False)
        assert done.exit_code == 0
        return {row["name"]: row["mended"] for row in json.loads(done.stdout)["bugs"]}

    assert listed("--megatron", "0.16.1")["expert-gradients-of-other-shards"] is True
    assert "expert-gradients-of-other-shards" not in listed("--megatron", "0.19.1")
    assert listed("--megatron", "0.16.1")["sinkhorn-by-layout"] is False
    words = ["--", "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *ETP.split()]
    assert listed("--megatron", "0.16.1", *words)["expert-gradients-of-other-shards"] is True
    words = ["--", "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *ETP.replace("size 2", "size 1", 1).split()]
    assert "expert-gradients-of-other-shards" not in listed("--megatron", "0.16.1", *words)


def test_a_release_without_records_is_refused():
    done = CliRunner().invoke(main, ["bugs", "--megatron", "nonsense"])
    assert done.exit_code == 2
    assert registry.probe("cpu").megatron in done.output or "release" in done.output
