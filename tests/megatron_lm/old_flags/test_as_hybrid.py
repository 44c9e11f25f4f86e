"""A command of old flags says what it reads for Megatron's HybridModel."""

from typing import Any

import pytest

from mindspeed.compat.old_flags.dialect import as_hybrid
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.megatron_lm.training_request import read_command_line
from mindspeed.registry import catalog_for

STACK = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
SENTENCE = (
    "Megatron replaces GPTModel by HybridModel; pretrain_hybrid.py takes, in place of {}, --hybrid-layer-pattern '{}' " + STACK
)


@pytest.mark.parametrize(
    ("given", "names", "pattern"),
    [
        ({}, "--num-layers", "*-*-*-*-"),
        ({"num_experts": 4}, "--num-layers", "*E*E*E*E"),
        ({"num_experts": 4, "moe_layer_freq": "2"}, "--num-layers, --moe-layer-freq", "*E*-*E*-"),
        ({"num_experts": 4, "moe_layer_freq": "[0]*1+[1]*3"}, "--num-layers, --moe-layer-freq", "*-*E*E*E"),
        ({"multi_latent_attention": True, "mtp_num_layers": 1}, "--num-layers, --mtp-num-layers", "+-+-+-+-/+-"),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
            "--num-layers, --num-layers-per-virtual-pipeline-stage",
            "*-|*-|*-|*-",
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
            "--num-layers, --num-virtual-stages-per-pipeline-rank",
            "*-|*-|*-|*-",
        ),
    ],
)
def test_the_layers_of_a_command_become_a_pattern(given: dict[str, Any], names: str, pattern: str) -> None:
    assert as_hybrid({"num_layers": 4, **given}, "0.19.0") == SENTENCE.format(names, pattern)


@pytest.mark.parametrize(
    ("given", "version"),
    [
        ({"num_layers": 4}, "0.18.2"),
        ({"num_layers": 4}, None),
        ({}, "0.19.0"),
        ({"num_layers": 8, "hybrid_layer_pattern": "*-*-*-*-"}, "0.19.0"),
        ({"num_layers": 4, "decoder_first_pipeline_num_layers": 1}, "0.19.0"),
        ({"num_layers": 4, "num_experts": 4, "moe_layer_freq": "[0, 1]"}, "0.19.0"),
    ],
)
def test_a_command_without_such_a_model_gets_no_sentence(given: dict[str, Any], version: str | None) -> None:
    assert as_hybrid(given, version) == ""


def test_the_sentence_is_a_note_of_the_plan_of_old_flags_alone() -> None:
    words = ["--num-layers", "2", "--normalization", "RMSNorm"]
    old, plain = (read_command_line([*words, *more], {}, "0.19.0", catalog_for).notes for more in (["--use-fused-rmsnorm"], []))
    note = PlanNote("note", "HybridModel", SENTENCE.format("--num-layers", "*-*-"))
    assert note in old
    assert note not in plain
