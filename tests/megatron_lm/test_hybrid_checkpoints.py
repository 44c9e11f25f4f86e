"""A checkpoint of pretrain_gpt.py goes on in pretrain_hybrid.py, and back, with the state of the optimizer.

MEGATRON_LM_PATH names one checkout, MINDSPEED_MEGATRONS folders with others; those from 0.19 on are run.
"""

from __future__ import annotations

from pathlib import Path
from shlex import split
from typing import Any, Final

import pytest

from tests.features.transformer_engine_layers.test_pretrain_gpt import TEN_STEPS
from tests.megatron_lm.checkout import Run
from tests.megatron_lm.test_pretrain_hybrid import FEATURES, MODELS, NAMES, STACK, warm  # noqa: F401
from tests.megatron_lm.warm_ranks import WarmCheckout

pytestmark = pytest.mark.long

_OPTIMIZER: Final = split("--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable")
_TENSOR_AND_STAGES: Final = split("--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2")
LAYOUTS: Final = {
    "tp2-pp2": ("dense", _TENSOR_AND_STAGES),
    "ep2-pp2": ("moe", split("--expert-model-parallel-size 2 --pipeline-model-parallel-size 2")),
}


class Training:
    """Both scripts on one model, with the line, on four ranks."""

    def __init__(self, checkout: WarmCheckout, layout: str) -> None:
        model, split_over_ranks = LAYOUTS[layout]
        shape, self.pattern = MODELS[model]
        self.checkout = checkout
        self._flags = [*checkout.flags, *TEN_STEPS, *shape, *split_over_ranks, *_OPTIMIZER, *FEATURES]
        at = self._flags.index("--num-layers")
        self._layers = self._flags[at : at + 2]
        del self._flags[at : at + 2]

    def gpt(self, *more: str) -> Run:
        return self.checkout.train(4, *self._flags, *self._layers, *more).ended_well()

    def hybrid(self, *more: str) -> Run:
        script = self.checkout.script_with_line("pretrain_hybrid.py")
        words = [*self._flags, "--hybrid-layer-pattern", self.pattern, *STACK, *more]
        return self.checkout.train(4, *words, script=script).ended_well()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_pretrain_hybrid_goes_on_from_a_checkpoint_of_pretrain_gpt_and_back(
    warm: Any,  # noqa: F811
    tmp_path: Path,
    name: str,
    layout: str,
) -> None:
    training = Training(warm(name), layout)
    training.gpt("--save", str(tmp_path / "gpt"), *split("--save-interval 4 --exit-interval 4 --train-iters 8"))
    start = ["--load", str(tmp_path / "gpt"), "--train-iters", "8"]
    transformer = training.gpt(*start)
    hybrid = training.hybrid(*start)
    assert hybrid.steps == transformer.steps
    assert list(hybrid.steps) == [5, 6, 7, 8]
    training.hybrid(*start, "--save", str(tmp_path / "hybrid"), *split("--save-interval 6 --exit-interval 6"))
    back = training.gpt("--load", str(tmp_path / "hybrid"), "--train-iters", "8")
    assert back.steps == training.hybrid("--load", str(tmp_path / "hybrid"), "--train-iters", "8").steps
    assert list(back.steps) == [7, 8]
