"""The trainer, with a checkpoint of a sharded optimizer, on every Megatron version that is at hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed.engine.inspection.megatron_copies import version_of
from mindspeed.engine.resolution.environment import version_in
from tests.megatron.versions.conftest import Megatron

pytestmark = pytest.mark.long
JOB = """\
features: [tensor-parallel, sequence-parallel, distributed-optimizer, async-param-gather, rms-norm, swiglu]
settings: {tensor-parallel: {size: 2}}
platform: cpu
world: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, seq_length: 32,
        micro_batch_size: 2, global_batch_size: 8}
train: {style: llama, train_iters: 4, lr: 1.0e-3, warmup_iters: 0}
"""


HYBRID = JOB.replace("num_layers: 2", 'hybrid_layer_pattern: "*-|*-", pp: 2')


CLASSES = """\
features: [distributed-optimizer, transformer-engine-layers]
platform: cpu
world: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, seq_length: 32,
        micro_batch_size: 1, global_batch_size: 8}
train: {style: llama, train_iters: 2, decay_iters: 6, lr: 1.0e-3, warmup_iters: 0, log_interval: 1, eval_iters: 1,
        sample_tokens: 0, dropout: 0.0}
"""


GROUPED = ("--ep", "2", "--pp", "2", "--num-experts", "4", "--grouped-experts")
OWN_EXPERTS = ("--features", "moe-grouped-gemm")
"""Optimization level 1 adds the feature to the GPTModel alone, and the state of its optimizer is its own."""


def pretrain(megatron: Megatron, *arguments: str) -> dict[str, Any]:
    return json.loads(megatron.run("-m", "mindspeed", "pretrain", *arguments, "--json").splitlines()[-1])


def test_a_model_trains_and_goes_on_from_its_checkpoint(megatron: Megatron, tmp_path: Path) -> None:
    megatron.require_data_helpers()
    job, run = tmp_path / "job.yaml", tmp_path / "run"
    job.write_text(JOB)
    first = pretrain(megatron, "-f", str(job), "--nproc", "4", "--run", str(run))
    assert first["world_size"] == 4
    assert first["heldout_loss"] < first["initial_loss"]
    more = pretrain(megatron, "--resume", str(run), "--nproc", "4", "--train-iters", "8")
    assert more["heldout_loss"] < first["heldout_loss"]


def require_hybrid(megatron: Megatron) -> None:
    if not version_in(version_of(megatron.folder / "megatron") or "0", ">=0.19"):
        pytest.skip(f"the trainer builds no HybridModel with megatron-core {megatron.version}")
    megatron.require_data_helpers()


def test_a_hybrid_model_trains_and_goes_on_from_its_checkpoint(megatron: Megatron, tmp_path: Path) -> None:
    require_hybrid(megatron)
    job, run = tmp_path / "job.yaml", tmp_path / "run"
    job.write_text(HYBRID)
    first = pretrain(megatron, "-f", str(job), "--nproc", "4", "--run", str(run))
    assert first["heldout_loss"] < first["initial_loss"]
    more = pretrain(megatron, "--resume", str(run), "--nproc", "4", "--train-iters", "8")
    assert more["heldout_loss"] < first["heldout_loss"]


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.parametrize(
    ("saved", "resumed", "layer"),
    [
        (("--tp", "2", "--pp", "2"), ("--tp", "2", "--pp", "2"), "-"),
        (("--tp", "2", "--pp", "1"), ("--tp", "1", "--pp", "2"), "-"),
        ((*GROUPED, *OWN_EXPERTS), ("--ep", "2", "--pp", "2", *OWN_EXPERTS), "E"),
    ],
    ids=["tp2-pp2", "tp2 to pp2", "ep2-pp2"],
)
def test_a_transformer_goes_on_as_a_hybrid_and_back(
    megatron: Megatron, tmp_path: Path, saved: tuple[str, ...], resumed: tuple[str, ...], layer: str
) -> None:
    """With a distributed optimizer; both go on with the losses of the model that was saved."""
    require_hybrid(megatron)
    job, pattern = tmp_path / "job.yaml", f"*{layer}" * 2
    job.write_text(CLASSES)
    first = ("-f", str(job), *saved)
    runs = {name: tmp_path / name for name in ("first", "transformer", "hybrid", "hybrid more", "back")}

    def run(name: str, *arguments: str) -> dict[int, float]:
        pretrain(megatron, *arguments, "--nproc", "4", "--run", str(runs[name]))
        return losses(runs[name])

    run("first", *first)
    start = ("--resume", str(runs["first"]), "--train-iters", "4", *resumed)
    assert run("transformer", *start) == run("hybrid", *start, "--hybrid-layer-pattern", pattern)
    more = ("--resume", str(runs["hybrid"]), "--train-iters", "6")
    assert run("hybrid more", *more) == run("back", *more, "--hybrid-layer-pattern", "")
