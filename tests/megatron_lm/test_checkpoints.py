"""Saving and resuming Megatron-LM's runs: asynchronous writers, spawned or forked, and another layout."""

import os
from shlex import split

import pytest

from tests.megatron_lm.checkout import LLAMA, ROOT

FEATURES = split("--features rms-norm,swiglu")
DP = split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
TP = split("--tensor-model-parallel-size 2 --sequence-parallel")


def resume_at(folder, iteration):
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "saving", "nproc", "resumed"),
    [
        pytest.param(DP, [], 2, DP, id="dp2"),
        pytest.param(DP, ["--async-save"], 2, DP, id="dp2-async"),
        pytest.param(TP, split("--async-save --use-persistent-ckpt-worker"), 1, [], id="tp2-spawned-writer-to-1"),
    ],
)
@pytest.mark.guards(42, processes=True)
def test_a_resumed_run_goes_on_where_the_saved_one_was(checkout, layout, saving, nproc, resumed):
    folder = checkout.folder / "checkpoints"
    flags = [*LLAMA, "--train-iters", "4", *FEATURES]
    whole = checkout.adapted(2, *flags, *layout, "--save", str(folder), "--save-interval", "2", *saving).ended_well()
    assert whole.log.count("successfully saved checkpoint from iteration") == 2
    resume_at(folder, 2)
    rest = checkout.adapted(nproc, *flags, *resumed, "--load", str(folder)).ended_well()
    assert list(rest.steps) == [3, 4]
    if nproc == 2:
        assert rest.steps[3] == whole.steps[3]
    else:
        assert float(rest.steps[3][0]) == pytest.approx(float(whole.steps[3][0]), rel=1e-5)
    # Megatron prints the mean of the first two losses after a start as the second one, but not so for the norm
    assert float(rest.steps[4][1]) == pytest.approx(float(whole.steps[4][1]), abs=1.1e-3)
    assert rest.report["problems"] == []


@pytest.mark.long
def test_a_checkpoint_is_refused_with_the_reason_where_its_features_are_gone(checkout):
    flags = [*LLAMA, "--train-iters", "2", *split("--tensor-model-parallel-size 1")]
    folder = checkout.folder / "checkpoints"
    checkout.adapted(2, *flags, *DP, "--save", str(folder), "--save-interval", "1").ended_well()
    refused = checkout.adapted(2, *flags, "--load", str(folder))
    assert refused.status != 0
    assert "MS613 distributed-optimizer was removed" in refused.log
    weights = checkout.adapted(2, *flags, "--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng").ended_well()
    assert list(weights.steps) == [1, 2]


COUNTER = """
from mindspeed.plugins import Category, Feature, FeatureSpec, hookimpl

class Counter(Feature):
    spec = FeatureSpec("counter", Category.TOOL)

    def __init__(self, args, world):
        super().__init__(args, world)
        self.saved = 0

    @hookimpl
    def save_extra(self, state):
        self.saved += 1
        return {"saved": self.saved, "step": state.step}

    @hookimpl
    def load_extra(self, state, data):
        self.saved = data["saved"]
        print(f"the counter was saved {data['saved']} times, last in step {data['step']}")
"""


@pytest.mark.long
@pytest.mark.parametrize("saving", [[], ["--async-save"]], ids=["at once", "asynchronous"])
def test_what_a_feature_saves_comes_back_when_the_run_is_resumed(checkout, saving):
    package = checkout.folder / "packages"
    (package / "counter_1-1.dist-info").mkdir(parents=True)
    (package / "counter_feature.py").write_text(COUNTER)
    (package / "counter_1-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: counter-1\nVersion: 1\n")
    (package / "counter_1-1.dist-info" / "entry_points.txt").write_text(
        "[mindspeed.features]\ncounter = counter_feature:Counter\n"
    )
    search = {"PYTHONPATH": os.pathsep.join(map(str, [package, checkout.root, ROOT]))}
    folder = checkout.folder / "checkpoints"
    flags = [*LLAMA, "--train-iters", "4", "--features", "counter", *DP]
    checkout.adapted(2, *flags, "--save", str(folder), "--save-interval", "2", *saving, **search).ended_well()
    resume_at(folder, 2)
    rest = checkout.adapted(2, *flags, "--load", str(folder), **search).ended_well()
    assert rest.log.count("the counter was saved") == 2
    assert rest.log.count("the counter was saved 1 times, last in step 2") == 2
    assert list(rest.steps) == [3, 4]
