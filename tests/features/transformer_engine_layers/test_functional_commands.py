"""The commands of Megatron-LM's functional tests at toy sizes: two steps on the default layers, and on local ones.

MEGATRON_LM_PATH names one checkout, MINDSPEED_MEGATRONS folders with others. Results go to build/functional_commands.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import split
from typing import Any, Final

import pytest

from tests.features.transformer_engine_layers.functional_commands import Command, commands
from tests.features.transformer_engine_layers.test_pretrain_gpt import checkouts, warm  # noqa: F401
from tests.megatron_lm.checkout import ROOT, VARIABLE, Run
from tests.megatron_lm.warm_ranks import WarmCheckout

pytestmark = pytest.mark.long

FOLDER: Final = ROOT / "build" / "functional_commands"
CASES: Final = [(name, command) for name, root in checkouts().items() for command in commands(root)]
OTHER_WEIGHTS: Final = {"--moe-grouped-gemm", "--multi-latent-attention"}
"""Options with which local layers begin with other weights from the same seed."""
_NO_DROPOUT: Final = split("--attention-dropout 0 --hidden-dropout 0")
"""Layers whose initial weights differ have also drawn other random numbers before their first mask."""
_LOADED: Final = split("--finetune --no-load-optim --no-load-rng")
_LOCAL: Final = ("--transformer-impl", "local")


CANNOT: Final = {
    "FLA is not installed": "needs flash-linear-attention",
    "HybridEP is not installed": "needs HybridEP",
    "DeepEP is not installed": "needs DeepEP",
    "Emerging Optimizers is not installed": "needs Emerging Optimizers",
    "emerging-optimizers package is required": "needs Emerging Optimizers",
    "only supported with bf16 or fp16": "needs 16-bit parameters",
    "only support bf16": "needs 16-bit parameters",
    "fsdp_dtensor": "needs the checkpoint format fsdp_dtensor",
    "--use-torch-fsdp2 requires --untie-embeddings-and-output-weights": "is refused by Megatron itself",
    "Invariant encountered": "needs an older torch: 2.13 does not shard weights that tensor parallelism has split",
    "gradient_accumulation_fusion, whose kernel needs CUDA": "needs a kernel of CUDA",
}
"""Errors of commands that cannot train here for another reason than their layers."""


def trained(checkout: WarmCheckout, command: Command, folder: Path) -> tuple[Run, Run | None]:
    """Train on the default layers and on local ones with the same weights; None where local ones cannot train."""
    options: dict[str, Any] = {"limit": 200, "variables": dict(command.variables)}
    run: Callable[..., Run] = checkout.train
    if not OTHER_WEIGHTS & {*command.flags}:
        engine = run(command.nproc, *command.flags, **options)
        local = run(command.nproc, *command.flags, *_LOCAL, **options) if not engine.status else None
        return engine, local if local is not None and not local.status else None
    flags = [*command.flags, *_NO_DROPOUT]
    saving = ["--save", str(folder / "local"), "--save-interval", "1"]
    saved = run(command.nproc, *flags, *_LOCAL, "--train-iters", "1", *saving, **options)
    if saved.status:
        return run(command.nproc, *flags, **options), None
    checkout.convert(folder / "local", folder / "engine")
    local = run(command.nproc, *flags, *_LOCAL, "--load", str(folder / "local"), *_LOADED, **options).ended_well()
    engine = run(command.nproc, *flags, "--load", str(folder / "engine"), *_LOADED, **options)
    shutil.rmtree(folder)
    return engine, local


@pytest.mark.parametrize(
    ("name", "command"),
    [pytest.param(name, command, id=f"{name} {command.name}") for name, command in CASES]
    or [pytest.param("", None, marks=pytest.mark.skip(f"{VARIABLE} names no checkout"))],
)
def test_a_command_trains_two_steps_as_on_local_layers(
    warm: Callable[[str], WarmCheckout],  # noqa: F811
    tmp_path: Path,
    name: str,
    command: Command,
) -> None:
    known = FOLDER / f"{abs(hash_of(name, command))}.json"
    if not known.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        engine, local = trained(warm(name), command, tmp_path / "saved")
        result = {"status": engine.status, "losses": engine.losses, "local": None if local is None else local.losses}
        result["release"] = name
        known.write_text(json.dumps(result | {"reason": reason(engine) if engine.status else "", "name": command.name}))
    result = json.loads(known.read_text())
    if why := next((why for error, why in CANNOT.items() if error in result["reason"]), ""):
        pytest.skip(why)
    assert result["status"] == 0, result["reason"]
    assert len(result["losses"]) == 2
    assert result["local"] is None or result["losses"] == pytest.approx(result["local"], rel=2e-6)
    assert result["losses"][0] != result["losses"][1]


def hash_of(name: str, command: Command) -> int:
    """Return a number of what a command runs: several tests of Megatron-LM have the same one at these sizes."""
    from zlib import crc32

    return crc32(repr((name, command.nproc, command.flags)).encode())


def reason(run: Run) -> str:
    """Return the last line of a log that names an error, of a rank that did not only lose another one."""
    lines = [line for line in run.log.splitlines() if "Error" in line or " MS" in f" {line}"]
    lines = [line for line in lines if "Connection closed by peer" not in line] or lines
    return lines[-1][:300] if lines else run.log[-300:]
