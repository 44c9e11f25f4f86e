"""Megatron-LM's pretrain_gpt.py without ``--transformer-impl`` against local layers, in checkouts of several releases.

MEGATRON_LM_PATH names one checkout, MINDSPEED_MEGATRONS folders with others. Results go to build/engine_training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import split
from typing import Any, Final

import pytest

from tests.megatron_lm.checkout import LATENT, LLAMA, MOE, ROOT, VARIABLE
from tests.megatron_lm.warm_ranks import WarmCheckout

pytestmark = pytest.mark.long

MODELS: Final = {
    "dense": LLAMA,
    "moe": [*LLAMA, *MOE],
    "grouped moe": [*LLAMA, *MOE, "--moe-grouped-gemm"],
    "latent attention": LATENT,
    "multi-token prediction": [*LLAMA, "--mtp-num-layers", "1"],
}
_TENSOR, _STAGES = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
LAYOUTS: Final = {
    "one": (1, ""),
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp2-sp": (2, _TENSOR),
    "pp2": (2, _STAGES),
    "tp2-dp2": (4, f"{_TENSOR} --use-distributed-optimizer"),
    "tp2-pp2": (4, f"{_TENSOR} {_STAGES}"),
    "cp2": (2, "--context-parallel-size 2 --features ring-attention"),
}
FROM_CHECKPOINT: Final = ("grouped moe", "latent attention")
"""Models that local layers give other initial weights; the others start with the same ones from the same seed."""
TEN_STEPS: Final = split("--train-iters 10 --lr-decay-iters 20")


def checkouts() -> dict[str, Path]:
    """Return the checkouts with the script, by the name of their folder."""
    given = [Path(path) for path in [os.environ.get(VARIABLE)] if path]
    folders = [Path(folder) for folder in os.environ.get("MINDSPEED_MEGATRONS", "").split(os.pathsep) if folder]
    given += [root for folder in folders if folder.is_dir() for root in sorted(folder.iterdir())]
    return {root.name: root.resolve() for root in given if (root / "pretrain_gpt.py").is_file()}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], WarmCheckout]]:
    """Give a checkout by its name, whose modules are imported once."""
    made: dict[str, WarmCheckout] = {}

    def give(name: str) -> WarmCheckout:
        if name not in made:
            made[name] = WarmCheckout(tmp_path_factory.mktemp("checkout"), checkouts()[name])
        return made[name]

    yield give
    for checkout in made.values():
        checkout.close()


@pytest.fixture(scope="module")
def started(warm: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, list[str]]]:
    """Give the flags by which both layers of a model start from one checkpoint: ``started("0.16.1", "grouped moe")``."""
    made: dict[tuple[str, str], dict[str, list[str]]] = {}

    def give(name: str, model: str) -> dict[str, list[str]]:
        if model not in FROM_CHECKPOINT:
            return {"engine": [], "local": []}
        if (name, model) not in made:
            folder = tmp_path_factory.mktemp("initial")
            saving = split(f"--transformer-impl local --train-iters 1 --save-interval 1 --save {folder}/local")
            warm(name).train(1, *warm(name).flags, *MODELS[model], *saving).ended_well()
            warm(name).convert(folder / "local", folder / "engine")
            loading = split("--finetune --no-load-optim --no-load-rng")
            made[name, model] = {layers: ["--load", f"{folder}/{layers}", *loading] for layers in ("engine", "local")}
        return made[name, model]

    return give


def with_experts_over_ranks(model: str, layout: str) -> list[str]:
    return split("--expert-model-parallel-size 2") if "moe" in model and "dp2" in layout else []


@pytest.mark.cover(1, because="test_parity.py has the models in the layouts")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", checkouts() or [pytest.param("", marks=pytest.mark.skip(f"{VARIABLE} names no checkout"))])
def test_the_default_layers_train_as_local_layers_do(warm: Any, started: Any, name: str, model: str, layout: str) -> None:
    nproc, given = LAYOUTS[layout]
    flags = [*warm(name).flags, *TEN_STEPS, *MODELS[model], *split(given), *with_experts_over_ranks(model, layout)]
    start = started(name, model)
    engine = warm(name).train(nproc, *flags, *start["engine"]).ended_well()
    local = warm(name).train(nproc, *flags, *start["local"], "--transformer-impl", "local").ended_well()
    assert "transformer-engine-layers" in engine.log
    assert "transformer-engine-layers" not in local.log
    pairs = list(zip(engine.losses, local.losses, strict=True))
    difference = max(abs(one - other) / other for one, other in pairs)
    folder = ROOT / "build" / "engine_training"
    folder.mkdir(parents=True, exist_ok=True)
    result = {"difference": difference, "losses": engine.losses}
    (folder / f"{name} {model} {layout}.json").write_text(json.dumps(result))
    assert len(set(engine.losses)) == 10
    assert difference <= 2e-6
