"""``--load`` with a model of Hugging Face: what it needs, and how the command differs from the model. Light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.files.hugging_face import model_config
from mindspeed.job.derivations import expert_layers
from mindspeed.megatron_lm.argument_words import problem_of_flags
from mindspeed.megatron_lm.given_arguments import Given
from mindspeed.problems import Fix, Problem

MODEL_TYPES: Final = ("deepseek_v3", "llama", "qwen2", "qwen3", "qwen3_moe")
"""Models whose weights are loaded."""
_PACKAGES: Final = ("mbridge", "transformers", "safetensors", "einops")
_SHARED: Final = "n_shared_experts * moe_intermediate_size"
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
    "scoring_func": "moe_router_score_function",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    _SHARED: "moe_shared_expert_intermediate_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Megatron's arguments by the keys of a configuration of Hugging Face."""
_NOT_LATENT: Final = ("num_key_value_heads", "head_dim")
"""Keys that mean something else with latent attention."""
_DEFAULTS: Final[Mapping[str, tuple[str, Any]]] = {
    "norm_epsilon": ("--norm-epsilon", 1e-5),
    "rotary_base": ("--rotary-base", 10000),
    "moe_router_topk": ("--moe-router-topk", 2),
    "moe_router_score_function": ("--moe-router-score-function", "softmax"),
    "moe_router_topk_scaling_factor": ("--moe-router-topk-scaling-factor", 1.0),
    "moe_router_num_groups": ("--moe-router-num-groups", 1),
    "moe_router_group_topk": ("--moe-router-group-topk", 1),
    "moe_shared_expert_intermediate_size": ("--moe-shared-expert-intermediate-size", 0),
}
"""Values of arguments that are not given, for those that no shape of a loaded weight tells."""
_NORMS_OF_QUERIES: Final = ("deepseek_v3", "qwen3", "qwen3_moe")
"""Models with norms of queries and keys."""
_TRACKER: Final = "latest_checkpointed_iteration.txt"
_PRE_SOFTMAX: Final = "--moe-router-pre-softmax"
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
    compared = (_differences, _tied_embeddings, _vocabulary, _expert_layers, _prediction, _routing_weights, _missing_parts)
    problems += [problem for compare in compared for problem in compare(config, given)]
    text = f"{what} is a Hugging Face model of type {kind}: mbridge loads its weights into the model when training starts"
    return [PlanNote("prepared-first", "weights", text)]


def _differences(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 for each argument on the command line that describes another model."""
    values = _values(config)
    if "layernorm_epsilon" in given:  # the name since Megatron-LM 0.16
        given = {**given, "norm_epsilon": given["layernorm_epsilon"]}
    for key, dest in _ARGUMENTS.items():
        value = values.get(key)
        if not isinstance(value, int | float | str) or (key in _NOT_LATENT and "kv_lora_rank" in values):
            continue
        if dest in given:
            option, own, asked = given[dest].option, given[dest].value, [given[dest].option]
        elif dest in _DEFAULTS:
            (option, own), asked = _DEFAULTS[dest], []
        else:  # the shapes of the weights do not fit then
            continue
        if not _is_equal(own, value):
            text = f"{option} is {own}, but the model in {given['load'].value} has {key} {value}"
            yield problem_of_flags("MS602", text, asked, Fix.give_option(option, value))


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration, with those that follow from its type or from several of them."""
    values = {**config, **(config.get("rope_parameters") or {})}
    if _experts(config):
        values.setdefault("scoring_func", "sigmoid" if config["model_type"] == "deepseek_v3" else "softmax")
        values[_SHARED] = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    return values


def _experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer, 0 for a dense model."""
    return next((int(config[key]) for key, dest in _ARGUMENTS.items() if dest == "num_experts" and config.get(key)), 0)


def _is_equal(own: Any, value: float | str) -> bool:
    try:
        return float(own) == float(value)
    except ValueError:
        return bool(own == value)


def _tied_embeddings(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 where the output layer shares the weights of the embedding in only one of both models."""
    is_tied = config.get("tie_word_embeddings")
    if is_tied is False and "untie_embeddings_and_output_weights" not in given:
        text = f"{_UNTIED} is missing, but the model in {given['load'].value} has an output layer with its own weights"
        yield problem_of_flags("MS602", text, [], Fix.advise(f"add {_UNTIED}"))
    elif is_tied and "untie_embeddings_and_output_weights" in given:
        text = f"{_UNTIED} is given, but the model in {given['load'].value} shares the weights of embedding and output layer"
        yield problem_of_flags("MS602", text, [_UNTIED], Fix.drop_option(_UNTIED))


def _vocabulary(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 for a padded vocabulary that is smaller than that of the model."""
    size, padded = config.get("vocab_size"), given.get("padded_vocab_size")
    if padded is None or not isinstance(size, int) or int(padded.value) >= size:
        return
    ranks = int(given["tensor_model_parallel_size"].value) if "tensor_model_parallel_size" in given else 1
    text = f"{padded.option} is {padded.value}, but the model in {given['load'].value} has vocab_size {size}"
    yield problem_of_flags("MS602", text, [padded.option], Fix.give_option(padded.option, -(-size // ranks) * ranks))


def _expert_layers(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 where other layers have experts than in the model."""
    if not _experts(config):
        return
    dense, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    without = config.get("mlp_only_layers") or ()
    layers = range(config.get("num_hidden_layers") or 0)
    expected = [layer >= dense and (layer + 1) % step == 0 and layer not in without for layer in layers]
    option, own = "--moe-layer-freq", str(given["moe_layer_freq"].value) if "moe_layer_freq" in given else "1"
    found = expert_layers(own, len(layers))
    if found is not None and found != expected:
        pattern = "+".join(f"[{int(has)}]*{len([*run])}" for has, run in groupby(expected))
        text = f"{option} is {own}, but the layers with experts of the model in {given['load'].value} are {pattern}"
        asked = [option] if "moe_layer_freq" in given else []
        yield problem_of_flags("MS602", text, asked, Fix.give_option(option, f"'{pattern}'"))


def _prediction(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 for multi-token prediction whose weights mbridge has no names for."""
    depths = given.get("mtp_num_layers")
    if depths is None or not int(depths.value):
        return
    has_names = config["model_type"] == "deepseek_v3" and config.get("num_hidden_layers") == 61
    if not has_names or not config.get("num_nextn_predict_layers") == int(depths.value) == 1:
        text = (
            f"{depths.option} is {depths.value}, but weights of multi-token prediction are loaded only for one depth of a "
            f"deepseek_v3 model with 61 layers, and the model in {given['load'].value} is another one"
        )
        yield problem_of_flags("MS602", text, [depths.option], Fix.drop_option(depths.option))


def _routing_weights(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 where the router's weights of a token are divided by their sum in only one of both models."""
    if not _experts(config):
        return
    has_sigmoid = config["model_type"] == "deepseek_v3"
    normalizes = config.get("norm_topk_prob", has_sigmoid)
    model, is_given = f"the model in {given['load'].value}", "moe_router_pre_softmax" in given
    if has_sigmoid:
        if not normalizes and config.get("num_experts_per_tok", 1) > 1:
            text = f"{model} has norm_topk_prob false, but Megatron's sigmoid router divides its weights by their sum"
            yield problem_of_flags("MS602", text, [given["load"].option], Fix.advise("load a model with norm_topk_prob true"))
    elif normalizes and is_given:
        text = f"{_PRE_SOFTMAX} is given, but {model} has norm_topk_prob true"
        yield problem_of_flags("MS602", text, [_PRE_SOFTMAX], Fix.drop_option(_PRE_SOFTMAX))
    elif not normalizes and not is_given:
        text = f"{_PRE_SOFTMAX} is missing, but {model} has norm_topk_prob false"
        yield problem_of_flags("MS602", text, [], Fix.advise(f"add {_PRE_SOFTMAX}"))


def _missing_parts(config: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield MS602 for each part of the model that the command line does not ask for, and whose weights would not be read."""
    kind, experts = config["model_type"], _experts(config)
    parts = {
        "add_qkv_bias": (
            "--add-qkv-bias",
            "biases of queries, keys and values",
            kind == "qwen2" or config.get("attention_bias"),
        ),
        "qk_layernorm": ("--qk-layernorm", "norms of queries and keys", kind in _NORMS_OF_QUERIES),
        "num_experts": (f"--num-experts {experts}", "experts", experts),
        "moe_router_enable_expert_bias": (
            "--moe-router-enable-expert-bias",
            "a bias per expert in its routers",
            experts and kind == "deepseek_v3",
        ),
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
