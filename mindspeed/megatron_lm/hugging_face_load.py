"""``--load`` with a model of Hugging Face: what it needs, and how the command differs from the model. Light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.files.hugging_face import model_config
from mindspeed.megatron_lm.argument_words import problem_of_flags
from mindspeed.megatron_lm.given_arguments import Given
from mindspeed.problems import Fix, Problem

MODEL_TYPES: Final = ("deepseek_v3", "llama", "qwen2", "qwen3", "qwen3_moe")
"""Models whose weights are loaded."""
_PACKAGES: Final = ("mbridge", "transformers", "safetensors", "einops")
_ARGUMENTS: Final = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Megatron's arguments by the keys of a configuration of Hugging Face."""
_NOT_LATENT: Final = ("num_key_value_heads", "head_dim")
"""Keys that mean something else with latent attention."""
_UNTIED: Final = "--untie-embeddings-and-output-weights"


def read_hugging_face_load(given: Mapping[str, Given], problems: list[Problem]) -> list[PlanNote]:
    """Return a note where ``--load`` names a model of Hugging Face, with the problems that its loading would meet."""
    config = model_config(str(given["load"].value)) if "load" in given else None
    if config is None:
        return []
    load, kind = given["load"], config["model_type"]
    what = f"{load.option} {load.value}"
    if kind not in MODEL_TYPES:
        text = (
            f"{what} is a Hugging Face model of type {kind}, whose weights cannot be loaded; known are {', '.join(MODEL_TYPES)}"
        )
        fix = Fix.advise("convert the weights to a Megatron checkpoint before the run")
        problems.append(problem_of_flags("MS602", text, [load.option], fix))
    elif missing := [name for name in _PACKAGES if find_spec(name) is None]:
        text = f"{what} is a Hugging Face model, which is loaded with {' and '.join(missing)}; not installed here"
        problems.append(problem_of_flags("MS501", text, [load.option], Fix.advise(f"pip install {' '.join(missing)}")))
    problems += _differences(config, given)
    text = f"{what} is a Hugging Face model of type {kind}: mbridge loads its weights into the model when training starts"
    return [PlanNote("prepared-first", "weights", text)]


def _differences(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 for each argument on the command line that describes another model."""
    values = {**config, **(config.get("rope_parameters") or {})}
    for key, dest in _ARGUMENTS.items():
        value = values.get(key)
        if value is None or dest not in given or (key in _NOT_LATENT and "kv_lora_rank" in values):
            continue
        if float(given[dest].value) != float(value):
            text = f"{given[dest].option} is {given[dest].value}, but the model in {given['load'].value} has {key} {value}"
            yield problem_of_flags("MS602", text, [given[dest].option], Fix.give_option(given[dest].option, value))
    is_tied = values.get("tie_word_embeddings")
    if is_tied is False and "untie_embeddings_and_output_weights" not in given:
        text = f"{_UNTIED} is missing, but the model in {given['load'].value} has an output layer with its own weights"
        yield problem_of_flags("MS602", text, [], Fix.advise(f"add {_UNTIED}"))
    elif is_tied and "untie_embeddings_and_output_weights" in given:
        text = f"{_UNTIED} is given, but the model in {given['load'].value} shares the weights of embedding and output layer"
        yield problem_of_flags("MS602", text, [_UNTIED], Fix.drop_option(_UNTIED))
