"""``--load`` with a model of Hugging Face: what it needs, and how the command differs from the model. Light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
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
_DEFAULTS: Final = {"norm_epsilon": ("--norm-epsilon", 1e-5), "rotary_base": ("--rotary-base", 10000)}
"""Megatron's values of arguments that no shape of a weight tells, where they are not given."""
_NORMS_OF_QUERIES: Final = ("deepseek_v3", "qwen3", "qwen3_moe")
"""Models with norms of queries and keys."""
_TRACKER: Final = "latest_checkpointed_iteration.txt"
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
        return []
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        text = f"{what} is a Hugging Face model, which is loaded with {' and '.join(missing)}; not installed here"
        problems.append(problem_of_flags("MS501", text, [load.option], Fix.advise(f"pip install {' '.join(missing)}")))
    if "save" in given and (Path(str(save := given["save"].value)) / _TRACKER).is_file():
        text = f"{save} has a checkpoint of a run, but {what} would begin again with the weights of the Hugging Face model"
        fix = Fix.advise(f"{load.option} {save} to go on with the run, or another folder for --save")
        problems.append(problem_of_flags("MS602", text, [load.option], fix))
    problems += [*_differences(config, given), *_missing_parts(config, given)]
    text = f"{what} is a Hugging Face model of type {kind}: mbridge loads its weights into the model when training starts"
    return [PlanNote("prepared-first", "weights", text)]


def _differences(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 for each argument on the command line that describes another model."""
    values = {**config, **(config.get("rope_parameters") or {})}
    if "layernorm_epsilon" in given:  # the name since Megatron-LM 0.16
        given = {**given, "norm_epsilon": given["layernorm_epsilon"]}
    for key, dest in _ARGUMENTS.items():
        value = values.get(key)
        if not isinstance(value, int | float) or (key in _NOT_LATENT and "kv_lora_rank" in values):
            continue
        if dest in given:
            option, own, asked = given[dest].option, given[dest].value, [given[dest].option]
        elif dest in _DEFAULTS:
            (option, own), asked = _DEFAULTS[dest], []
        else:  # the shapes of the weights do not fit then
            continue
        if float(own) != float(value):
            text = f"{option} is {own}, but the model in {given['load'].value} has {key} {value}"
            yield problem_of_flags("MS602", text, asked, Fix.give_option(option, value))
    is_tied = values.get("tie_word_embeddings")
    if is_tied is False and "untie_embeddings_and_output_weights" not in given:
        text = f"{_UNTIED} is missing, but the model in {given['load'].value} has an output layer with its own weights"
        yield problem_of_flags("MS602", text, [], Fix.advise(f"add {_UNTIED}"))
    elif is_tied and "untie_embeddings_and_output_weights" in given:
        text = f"{_UNTIED} is given, but the model in {given['load'].value} shares the weights of embedding and output layer"
        yield problem_of_flags("MS602", text, [_UNTIED], Fix.drop_option(_UNTIED))


def _missing_parts(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 for each part of the model that the command line does not ask for, and whose weights would not be read."""
    kind = config["model_type"]
    parts = {
        "add_qkv_bias": (
            "--add-qkv-bias",
            "biases of queries, keys and values",
            kind == "qwen2" or config.get("attention_bias"),
        ),
        "qk_layernorm": ("--qk-layernorm", "norms of queries and keys", kind in _NORMS_OF_QUERIES),
    }
    for dest, (option, part, has) in parts.items():
        if has and dest not in given:
            text = f"{option} is missing, but the model in {given['load'].value} has {part}"
            yield problem_of_flags("MS602", text, [], Fix.advise(f"add {option}"))
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaled != "default" and not {"use_rope_scaling", "rope_type", "yarn_rotary_scaling_factor"} & given.keys():
        text = f"the model in {given['load'].value} scales its rotary embedding ({scaled}), but the command does not"
        yield problem_of_flags(
            "MS602", text, [], Fix.advise("add --use-rope-scaling (llama3) or --rope-type yarn with its factors")
        )
