"""Megatron-LM's pretrain_hybrid.py: with the line, by ``mindspeed run``, from old flags, and pretrain_gpt.py's same model.

MEGATRON_LM_PATH names one checkout, MINDSPEED_MEGATRONS folders with others; those from 0.19 on are run. Results go to
build/hybrid_training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from shlex import split
from typing import Any, Final

import pytest

from tests.features.transformer_engine_layers.test_pretrain_gpt import LAYOUTS, TEN_STEPS, checkouts, with_experts_over_ranks
from tests.megatron_lm.checkout import LLAMA, MOE, ROOT, VARIABLE, Run, minor_version
from tests.megatron_lm.warm_ranks import WarmCheckout

pytestmark = pytest.mark.long

SIX: Final = ("one", "dp2", "tp2-sp", "pp2", "tp2-dp2", "tp2-pp2")
MODELS: Final = {"dense": (LLAMA, "*-" * 4), "moe": ([*LLAMA, *MOE, "--moe-grouped-gemm"], "*E" * 4)}
STACK: Final = split("--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec")
FEATURES: Final = split("--features rms-norm,rotary-embedding,swiglu,flash-attention")
OLD_FLAGS: Final = split("--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-flash-attn")
STOCK: Final = split("--optimization-level 0")
"""Megatron's own code on the platform, with the roles of Transformer Engine's layers, without which no HybridModel is built."""
_MODULES: Final = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.optimizer",
    "mindspeed.megatron_lm.training_plan",
    "mindspeed.workbench.lint.locked_command",
)
"""Modules that are imported once: not those of HybridModel, which keep the classes of Transformer Engine that they find."""
NAMES: Final = [name for name, root in checkouts().items() if minor_version(root) >= 19] or [
    pytest.param("", marks=pytest.mark.skip(f"{VARIABLE} names no checkout from 0.19 on"))
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], WarmCheckout]]:
    """Give a checkout by its name, whose modules are imported once."""
    made: dict[str, WarmCheckout] = {}

    def give(name: str) -> WarmCheckout:
        if name not in made:
            made[name] = WarmCheckout(tmp_path_factory.mktemp("checkout"), checkouts()[name], _MODULES)
        return made[name]

    yield give
    for checkout in made.values():
        checkout.close()


@pytest.fixture(scope="module")
def stock(warm: Any) -> Callable[[str, str, str], Run]:
    """Give the run of stock Megatron-LM: ``stock("0.19.0", "moe", "pp2")``."""
    made: dict[tuple[str, str, str], Run] = {}

    def give(name: str, model: str, layout: str) -> Run:
        if (name, model, layout) not in made:
            checkout = warm(name)
            nproc, flags = command(checkout, model, layout, *STOCK)
            made[name, model, layout] = hybrid(checkout, nproc, flags)
        return made[name, model, layout]

    return give


def command(checkout: WarmCheckout, model: str, layout: str, *more: str) -> tuple[int, list[str]]:
    """Return the processes and the arguments of pretrain_hybrid.py."""
    nproc, given = LAYOUTS[layout]
    shape, pattern = MODELS[model]
    flags = list(checkout.flags)
    at = flags.index("--num-layers")
    del flags[at : at + 2]
    words = [*flags, *TEN_STEPS, *shape, "--hybrid-layer-pattern", pattern, *STACK, *split(given)]
    return nproc, [*words, *with_experts_over_ranks(model, layout), *more]


def hybrid(checkout: WarmCheckout, nproc: int, flags: Sequence[str]) -> Run:
    """Run pretrain_hybrid.py with the line."""
    return checkout.train(nproc, *flags, script=checkout.script_with_line("pretrain_hybrid.py")).ended_well()


def keep(name: str, what: str, model: str, layout: str, run: Run, other: Run) -> float:
    """Return the largest relative difference of the losses of ten steps, which is also stored."""
    difference = max(abs(a - b) / b for a, b in zip(run.losses, other.losses, strict=True))
    folder = ROOT / "build" / "hybrid_training"
    folder.mkdir(parents=True, exist_ok=True)
    result = {"difference": difference, "losses": run.losses}
    (folder / f"{name} {what} {model} {layout}.json").write_text(json.dumps(result))
    assert len(set(run.losses)) == 10
    return difference


@pytest.mark.cover(1, because="tests/megatron/versions/test_hybrid.py has every feature")
@pytest.mark.parametrize("layout", SIX)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_the_line_with_features_trains_as_stock(warm: Any, stock: Any, name: str, model: str, layout: str) -> None:
    checkout = warm(name)
    nproc, flags = command(checkout, model, layout, *FEATURES)
    run = hybrid(checkout, nproc, flags)
    assert keep(name, "line", model, layout, run, stock(name, model, layout)) <= 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_mindspeed_run_trains_the_script_without_the_line(warm: Any, stock: Any, name: str) -> None:
    checkout = warm(name)
    nproc, flags = command(checkout, "dense", "dp2", *FEATURES)
    script = str(checkout.root / "pretrain_hybrid.py")
    run = checkout.run([sys.executable, "-m", "mindspeed", "run", "--nproc", str(nproc), "--", script, *flags], {}).ended_well()
    assert keep(name, "mindspeed run", "dense", "dp2", run, stock(name, "dense", "dp2")) <= 2e-6


@pytest.mark.cover(1, because="the flags are translated the same way in every layout")
@pytest.mark.parametrize("layout", SIX)
@pytest.mark.parametrize("name", NAMES)
def test_old_flags_train_as_stock(warm: Any, stock: Any, name: str, layout: str) -> None:
    checkout = warm(name)
    nproc, flags = command(checkout, "dense", layout, *OLD_FLAGS)
    run = hybrid(checkout, nproc, flags)
    assert keep(name, "old flags", "dense", layout, run, stock(name, "dense", layout)) <= 2e-6


@pytest.mark.cover(1, because="tests/megatron/versions/test_hybrid_parity.py compares gradients and weights")
@pytest.mark.parametrize("layout", SIX)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_pretrain_gpt_trains_the_same_model_alike(warm: Any, stock: Any, name: str, model: str, layout: str) -> None:
    checkout, (nproc, given) = warm(name), LAYOUTS[layout]
    flags = [*checkout.flags, *TEN_STEPS, *MODELS[model][0], *split(given), *with_experts_over_ranks(model, layout)]
    run = checkout.train(nproc, *flags).ended_well()
    assert keep(name, "gpt", model, layout, run, stock(name, model, layout)) <= 2e-6
