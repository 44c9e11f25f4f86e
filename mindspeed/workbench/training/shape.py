"""The trainer's choices for world values that are not set: the lowest layer of a request. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from mindspeed.engine.resolution.environment import Environment, version_in
from mindspeed.engine.resolution.request import Layer
from mindspeed.files.tables import table_beside
from mindspeed.job.hybrid_pattern import facts_of_pattern, pattern_of
from mindspeed.job.world import FIELDS, LATENT_WIDTHS, PARALLEL_SIZES, World
from mindspeed.megatron.configuration import EXPERT_FIELDS
from mindspeed.problems import Fix, GivenValue, MindSpeedError, Problem, advice
from mindspeed.workbench.training.config import JOB_FILE, TrainConfig, train_config

_TABLES: Final[dict[str, dict[str, Any]]] = table_beside(__file__)
SIZES: Final = _TABLES["sizes"]
"""A model that learns something within minutes on two processor cores."""
STYLES: Final[dict[str, dict[str, Any]]] = _TABLES["styles"]
ACTIVATIONS: Final = ("gelu", "silu", "relu")
PATTERN: Final = "hybrid_layer_pattern"
HYBRID_LAYERS: Final = "*-E|"
"""Layers of a HybridModel that the trainer builds, in as many segments as stages have."""
_HYBRID_SINCE: Final = ">=0.19"
NOT_BUILT: Final = (
    "multi_latent_attention",
    "mtp_num_layers",
    "moe_layers",
    "transformer_engine_layers",
    "transformer_engine_experts",
    "zero_centered_norm",
    "q_lora_rank",
    *LATENT_WIDTHS,
    *(name for name, field in FIELDS.items() if field.has_default and name not in (*PARALLEL_SIZES, *SIZES, PATTERN)),
)
"""Fields of a world whose models the trainer does not build where they are set, to another value than Megatron's default."""
_FIXED: Final = {
    "multi_latent_attention": False,
    "mtp_num_layers": 0,
    "transformer_engine_layers": False,
    "zero_centered_norm": False,
    "optimizer": "adam",
}
"""Values of every model that the trainer builds."""
OTHER_SCRIPT: Final = Fix.advise("train this model with another script: mindspeed run -- pretrain_gpt.py ...")
VOCABULARY_MULTIPLE: Final = 64
"""The vocabulary is padded to a multiple of this, whatever the layout, so that every layout has the same model."""
_FFN_MULTIPLE: Final = 32


def trainer_layer(config: TrainConfig, layers: Sequence[Layer], platform: str, vocab_size: int) -> Layer:
    """Add the trainer's values below the request: sizes, the style's modules, and what follows from what was given.

    ``vocab_size`` is the tokenizer's, 0 when it is not known.
    """
    style = STYLES[config.style]
    given = given_world(layers)
    world = {**SIZES, **style, **_FIXED, "dtype": "fp32" if platform == "cpu" else "bf16"}
    heads, hidden = (_positive(given.get(name), SIZES[name]) for name in ("num_attention_heads", "hidden_size"))
    for name in facts_of_pattern(given[PATTERN], 1) if given.get(PATTERN) else ():
        world.pop(name, None)
    llama = config.style == "llama"
    world["num_query_groups"] = heads // 2 if llama and heads % 2 == 0 else heads
    world["ffn_hidden_size"] = -(-hidden * 8 // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE if llama else 4 * hidden
    world["linear_bias"] = not llama and not given.get("num_experts")  # unless spread, experts fail with biases
    world["kv_channels"] = max(1, hidden // heads)
    world["moe_ffn_hidden_size"] = _positive(given.get("ffn_hidden_size"), world["ffn_hidden_size"])
    if vocab_size:
        world["vocab_size"] = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return Layer(f"trainer ({config.style})", world=world)


def trainer_request(
    layers: Sequence[Layer], train: Mapping[str, Any], environment: Environment, is_built: bool
) -> tuple[Layer, list[Problem]]:
    """Return the trainer's layer for a job file with the section ``train``, and what is wrong with the section and the model.

    Only a model that ``is_built`` has to be one that the trainer builds.
    """
    config, problems = train_config({JOB_FILE: train})
    vocab_size = vocabulary(config)
    lowest = trainer_layer(config, layers, environment.platform, vocab_size)
    world = given_world([lowest, *layers])
    problems += check_built(world) if is_built else []
    return lowest, problems + check_values(world, vocab_size, environment.megatron)


def vocabulary(config: TrainConfig) -> int:
    """Tokens of the vocabulary that the job's data has; 0 when the data or a package to read them are not here."""
    with suppress(ImportError, MindSpeedError):
        from mindspeed.workbench.training.tokenizer import BYTES, load_tokenizer, tokenizer_of

        if config.tokenizer or not config.data:
            return load_tokenizer(config.tokenizer or BYTES).vocab_size
        return tokenizer_of(config.data).vocab_size
    return 0


def given_world(layers: Sequence[Layer]) -> dict[str, Any]:
    """The values of the world that a request gives; later layers win."""
    world: dict[str, Any] = {}
    for layer in layers:
        world |= {name: value for name, value in layer.world.items() if value is not None}
    return world


def saved_layer(model: Mapping[str, Any]) -> Layer:
    """Make the lowest layer of a request from the model of a checkpoint (`Job.model`)."""
    world = {name: value for name, value in model.items() if name in FIELDS and value is not None}
    return Layer("checkpoint", world=world | {"rotary": "rotary_base" in model})


def asked_model(model: Mapping[str, Any], layers: Sequence[Layer], train: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values of a request that a checkpoint has of its model (`Job.model`)."""
    given = {**STYLES.get(str(train.get("style")), {}), **train, **given_world(layers)}
    return {name: given[name] for name in model if name in given}


def check_world(world: Mapping[str, Any], vocab_size: int, megatron: str | None) -> list[Problem]:
    """Find the values of a request that the trainer cannot train with this version of Megatron."""
    return check_built(world) + check_values(world, vocab_size, megatron)


def check_built(world: Mapping[str, Any]) -> list[Problem]:
    """Find the values of models that the trainer does not build."""
    problems = []
    activation = world.get("activation")
    if activation in FIELDS["activation"].words and activation not in ACTIVATIONS:
        text = f"activation is {activation!r}, but mindspeed pretrain supports only {', '.join(ACTIVATIONS)}"
        problems.append(Problem("MS301", text, fix=Fix.give_field("activation", ACTIVATIONS[0])))
    for name in (name for name in NOT_BUILT if not _is_built(name, world)):
        text = f"{name} is {world[name]}, but mindspeed pretrain does not build such a model"
        fix = (Fix.drop_field(name), OTHER_SCRIPT)
        problems.append(Problem("MS301", text, fix=fix, facts=(GivenValue(name, world[name]),)))
    return problems


def _is_built(name: str, world: Mapping[str, Any]) -> bool:
    """Return whether the trainer builds models with the value of a field: of a transformer all layers have experts, or none."""
    value = world.get(name)
    if name == "moe_layers":
        every = world.get("num_layers") if world.get("num_experts") else 0
        return value in (None, every) or bool(world.get(PATTERN))
    return not value or value == FIELDS[name].default


def check_values(world: Mapping[str, Any], vocab_size: int, megatron: str | None) -> list[Problem]:
    """Find the values of a request that contradict each other, the data or the version of Megatron."""
    problems = []
    if pattern := world.get(PATTERN):
        problems += _check_pattern(pattern, world.get("megatron") or megatron)
    rows = world.get("vocab_size")
    if isinstance(rows, int) and rows < vocab_size:
        text = f"vocab_size is {rows}, but the tokenizer of the data has {vocab_size} tokens"
        problems.append(Problem("MS302", text, fix=Fix.advise("remove vocab_size; it then follows from the data")))
    heads, hidden = world.get("num_attention_heads"), world.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden % heads:
        text = f"hidden size {hidden} is not a multiple of the {heads} attention heads"
        problems.append(Problem("MS302", text, fix=Fix.give_field("hidden_size", -(-hidden // heads) * heads)))
    batch, part = world.get("global_batch_size"), world.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(part, int) and part > 0 and batch % part:
        text = f"global batch size {batch} is not a multiple of micro batch size {part}"
        problems.append(Problem("MS302", text, fix=Fix.give_field("global_batch_size", -(-batch // part) * part)))
    return problems


def without_effect(world: World) -> frozenset[str]:
    """Return the fields that say nothing of the model that is built."""
    return frozenset() if world.num_experts else frozenset(EXPERT_FIELDS)


def check_layers(world: World, source: Callable[[str], str]) -> list[Problem]:
    """MS302 for sizes of a planned model with which Megatron cannot build a layer.

    ``source`` says where a field comes from. The fixes are candidates: each of them may break another rule.
    """
    problems = []

    def refuse(text: str, names: Sequence[str], *fix: Fix) -> None:
        facts = tuple(GivenValue(name, getattr(world, name), source(name)) for name in names)
        problems.append(Problem("MS302", text, fix=fix, facts=facts))

    heads, groups = world.num_attention_heads, world.num_query_groups
    if heads % groups:
        fewer = next(number for number in range(groups, 0, -1) if heads % number == 0)
        fixes = [Fix.give_field("num_query_groups", number) for number in sorted({fewer, heads})]
        refuse(
            f"{heads} attention heads are not divisible by {groups} query groups",
            ("num_attention_heads", "num_query_groups"),
            *fixes,
        )
    if world.num_experts and world.router_topk > world.num_experts:
        fixes = [Fix.give_field("router_topk", world.num_experts), Fix.give_field("num_experts", world.router_topk)]
        text = f"router_topk is {world.router_topk}, but a MoE layer has {world.num_experts} experts"
        refuse(text, ("num_experts", "router_topk"), *fixes)
    return problems


def _check_pattern(pattern: str, megatron: str | None) -> list[Problem]:
    """Find what the trainer cannot build of a HybridModel."""
    problems = []
    if megatron is not None and not version_in(megatron, _HYBRID_SINCE):
        text = f"a HybridModel needs megatron-core {_HYBRID_SINCE}, but the version is {megatron}"
        fix = (Fix.advise("install a newer megatron-core"), Fix.drop_field(PATTERN))
        problems.append(Problem("MS302", text, fix=fix))
    at = next((at for at, layer in enumerate(pattern) if layer not in HYBRID_LAYERS), None)
    if at is not None:
        text = (
            f"mindspeed pretrain supports only {' '.join(HYBRID_LAYERS[:-1])} (attention, MLP, experts) in a hybrid layer "
            "pattern\n"
            f"{pattern_of(pattern).marked(at)}"
        )
        fix_text = "train this model with another script: mindspeed run -- pretrain_hybrid.py ..."
        problems.append(Problem("MS301", text, fix=advice(fix_text)))
    return problems


def _positive(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise
