"""MindSpeed's flags and programs as a dialect: the entry point through which command lines are translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from mindspeed.compat.old_flags.flags import flags_of, read_old_flags, takes_text
from mindspeed.compat.old_flags.other_flags import refused_program
from mindspeed.engine.resolution.environment import version_in
from mindspeed.job.derivations import expert_layers
from mindspeed.job.hybrid_pattern import EXPERTS, MLP, segmented
from mindspeed.megatron_lm.dialects import Dialect

_SINCE: Final = ">=0.19"
_STACK: Final = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
_SCHEDULE: Final = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_OTHER_SPLITS: Final = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def as_hybrid(given: Mapping[str, Any], version: str | None) -> str:
    """Return a sentence with the arguments of the same HybridModel; empty if Megatron or the command has no such model.

    ``given`` has the values of Megatron's arguments by dest.
    """
    layers = given.get("num_layers")
    if version is None or not version_in(version, _SINCE) or not isinstance(layers, int) or layers <= 0:
        return ""
    if given.get("hybrid_layer_pattern") or any(given.get(dest) for dest in _OTHER_SPLITS):
        return ""
    kinds = _mlp_of_layers(given, layers)
    if kinds is None:
        return ""
    attention = "+" if given.get("multi_latent_attention") else "*"
    pattern = "".join(attention + kind for kind in kinds)
    if given.get("mtp_num_layers"):
        pattern += f"/{pattern[-2:]}" * int(given["mtp_num_layers"])
    stages, chunks = int(given.get("pipeline_model_parallel_size") or 1), _chunks(given, layers)
    instead = [dest for dest in ("num_layers", *_SCHEDULE, "mtp_num_layers", "moe_layer_freq") if given.get(dest)]
    names = ", ".join(f"--{dest.replace('_', '-')}" for dest in instead)
    text = segmented(pattern, stages * chunks) if chunks > 1 else pattern
    return (
        f"Megatron replaces GPTModel by HybridModel; pretrain_hybrid.py takes, in place of {names}, "
        f"--hybrid-layer-pattern '{text}' {_STACK}"
    )


def _mlp_of_layers(given: Mapping[str, Any], layers: int) -> Sequence[str] | None:
    """Return what follows the attention of each layer, experts or an MLP; None for a frequency of other layers."""
    if not given.get("num_experts"):
        return MLP * layers
    every = expert_layers(str(given.get("moe_layer_freq", 1)), layers)
    if every is None or len(every) != layers:
        return None
    return [EXPERTS if has_experts else MLP for has_experts in every]


def _chunks(given: Mapping[str, Any], layers: int) -> int:
    """Return the model chunks of a pipeline stage."""
    if chunks := given.get(_SCHEDULE[1]):
        return int(chunks)
    stages, share = int(given.get("pipeline_model_parallel_size") or 1), given.get(_SCHEDULE[0])
    return max(1, layers // (stages * int(share))) if share else 1


MINDSPEED: Final[Dialect] = SimpleNamespace(
    name="old flags",
    translate=read_old_flags,
    advice=as_hybrid,
    flags_of=flags_of,
    takes_text=takes_text,
    refusal_of=refused_program,
)
