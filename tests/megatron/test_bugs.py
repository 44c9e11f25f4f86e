"""The bugs of Megatron in ``traps.yaml``: each is mended by a patch of every plan or shown by a test."""

import importlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import mindspeed
from mindspeed import registry
from mindspeed.cli import main
from mindspeed.engine.resolution.environment import version_in
from mindspeed.megatron.fixes.feature import MENDED, bugs_mended_by, mended_bugs
from mindspeed.workbench.lint.traps import known_traps
from tests.megatron import bug_proofs

BUGS = [trap for trap in known_traps() if trap.is_bug]
ROOT = Path(__file__).resolve().parents[2]


def test_every_fix_of_megatron_mends_a_bug_that_is_listed():
    assert {bug.name for bug in BUGS if bug.proof} >= MENDED


def test_every_proof_exists():
    assert [bug.name for bug in BUGS if bug.proof and not (ROOT / bug.proof).is_file()] == []


@pytest.fixture(scope="module")
def fixes() -> Iterator[None]:
    """The fixes of Megatron, and no feature; most proofs import these layers."""
    mindspeed.activate(mindspeed.plan(level=0, platform="cpu"))
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    yield
    mindspeed.deactivate()


SLOW = ("expert-gradients-of-other-shards", "router-losses-per-token", "router-z-loss-per-token")
"""Bugs whose proofs train, or compare several layouts."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in bug_proofs.PROOFS]
)
@pytest.mark.usefixtures("fixes")
def test_a_bug_shows_in_its_releases_until_it_is_mended(name):
    (bug,) = [bug for bug in BUGS if bug.name == name]
    seen = bug_proofs.look(partial(bug_proofs.without_fixes, bug))
    if seen.state == "not run":
        pytest.skip(seen.text)
    assert (seen.state == "shown") == version_in(str(registry.probe("cpu").megatron), bug.megatron), seen
    if name in mended_bugs(str(registry.probe("cpu").megatron)):
        assert bug_proofs.look(bug_proofs.PROOFS[name]).state in ("right", "absent")


def test_every_proof_is_of_a_bug():
    assert {bug.name for bug in BUGS if bug.proof} == set(bug_proofs.PROOFS)


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


@pytest.mark.parametrize("name", sorted(MENDED))
def test_one_bug_is_left_unmended_and_the_others_are_mended(name):
    plan = mindspeed.plan(settings={"megatron-fixes": {"unmended": [name]}}, level=0, platform="cpu")
    assert bugs_mended_by(plan) == mended_bugs(str(registry.probe("cpu").megatron)) - {name}


def test_check_warns_of_a_bug_that_is_left_unmended():
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8"
    experts = "--num-experts 4 --moe-z-loss-coeff 0.1 --calculate-per-token-loss --tensor-model-parallel-size 2"
    training = "--micro-batch-size 1 --train-iters 2 --eval-interval 2 --lr 1e-4 --tokenizer-type NullTokenizer"
    words = f"{training} --swiglu --sequence-parallel {sizes} {experts}".split()
    command = ["--", "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *words]

    def warned(*options: str) -> bool:
        done = CliRunner().invoke(main, ["check", "--platform", "cuda", "--megatron", "0.16.1", *options, *command])
        assert done.exit_code == 0, done.output
        return "the router's z-loss is scaled by the tokens of one rank" in done.output

    assert warned("--set", 'megatron-fixes.unmended=["router-z-loss-per-token"]')
    assert not warned()


def test_a_release_without_records_is_refused():
    done = CliRunner().invoke(main, ["bugs", "--megatron", "nonsense"])
    assert done.exit_code == 2
    assert registry.probe("cpu").megatron in done.output or "release" in done.output
