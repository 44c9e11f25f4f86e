"""Megatron-LM's arguments in the words of a plan: the world's sizes, features and their settings. Light, data only.

Arguments are named by their *dest*, the attribute that Megatron-LM's parser gives them (``tensor_model_parallel_size``).
The same tables serve what a command line announces and what Megatron-LM has made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from mindspeed.job.fact import Values
from mindspeed.job.fields import FIELDS
from mindspeed.job.hybrid_pattern import facts_of_pattern

_PATTERNS: Final = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that give the layers of a hybrid model; the second is the former name."""


def world_of(values: Values) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """``{field: (value, dests that decide it)}`` for every value of the world that these arguments give."""
    world = {name: (field.of_arguments(values), field.arguments) for name, field in FIELDS.items()}
    for dest in _PATTERNS:
        if pattern := values.get(dest):
            facts = facts_of_pattern(pattern, values.get("pipeline_model_parallel_size") or 1)
            world |= {name: (value, (dest,)) for name, value in facts.items()}
            if values.get("num_layers") is not None:
                world["num_layers"] = (values["num_layers"], ("num_layers",))
            break
    return {name: found for name, found in world.items() if found[0] is not None}


def dests_of(field: str) -> tuple[str, ...]:
    """Return the arguments that give a value of the world, none for the derived ``dp``."""
    return FIELDS[field].arguments if field in FIELDS else ()


@dataclass(frozen=True, slots=True)
class Target:
    """The argument of Megatron-LM for an argument of a configuration; ``negated`` means its opposite."""

    dest: str
    negated: bool = False

    def as_argument(self, value: Any) -> Any:
        """Translate a configuration's ``value`` into Megatron-LM's argument."""
        return not value if self.negated else list(value) if isinstance(value, tuple) else value


RENAMED: Final[dict[str, Target]] = {
    "grad_reduce_in_fp32": Target("accumulate_allreduce_grads_in_fp32"),
    "bucket_size": Target("ddp_bucket_size"),
    "num_moe_experts": Target("num_experts"),
    "virtual_pipeline_model_parallel_size": Target("num_virtual_stages_per_pipeline_rank"),
    "persist_layer_norm": Target("no_persist_layer_norm", negated=True),
}
"""Arguments of Megatron's configurations that Megatron-LM calls otherwise; all others have one name."""

OF_TRAINING: Final = (
    "create_attention_mask_in_dataloader",
    "reset_attention_mask",
    "reset_position_ids",
    "distributed_backend",
    "transformer_impl",
    "dist_ckpt_optim_fully_reshardable",
)
"""Arguments that only Megatron-LM has, no configuration of megatron-core."""


def target_of(argument: str, values: Values) -> Target:
    """Find Megatron-LM's argument for one of a configuration; ``values`` are the arguments that it has."""
    if argument == "bias_activation_fusion":
        return Target("bias_swiglu_fusion" if values.get("swiglu") else "bias_gelu_fusion")
    return RENAMED.get(argument, Target(argument))


_CHUNKS: Final = "num_virtual_stages_per_pipeline_rank"
_LAYERS_OF_CHUNK: Final = "num_layers_per_virtual_pipeline_stage"
_LAYOUT: Final = "pipeline_model_parallel_layout"


@dataclass(frozen=True, slots=True)
class PutValue:
    """Hold an argument of Megatron-LM that a plan sets: its value before, and the plan's, which it has unless ``refused``."""

    dest: str
    before: Any
    wanted: Any
    refused: bool = False


def put_values(
    overrides: Mapping[str, Any], values: MutableMapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, PutValue]:
    """Give Megatron-LM's parsed arguments the values of a plan, except where they have neither their default nor nothing.

    ``overrides`` are the plan's values by names of configurations, ``values`` the arguments, ``defaults`` theirs, both by dest.
    Return what became of each override that is an argument of Megatron-LM.
    """
    put: dict[str, PutValue] = {}
    for argument, value in overrides.items():
        target = target_of(argument, values)
        if target.dest not in values:
            continue
        if target.dest == _CHUNKS and any(values.get(dest) is not None for dest in (_LAYERS_OF_CHUNK, _LAYOUT)):
            continue  # each of them gives the number of chunks, and must stand alone
        before, wanted = values[target.dest], target.as_argument(value)
        refused = before not in (None, defaults.get(target.dest), wanted)
        put[argument] = PutValue(target.dest, before, wanted, refused)
        if not refused:
            values[target.dest] = wanted
    if _LAYOUT in overrides:
        values[_CHUNKS] = values[_LAYERS_OF_CHUNK] = None  # the layout has them
    return put


def put_launch_order(platform: str | None, values: Values, environ: MutableMapping[str, str]) -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS``, which Megatron-LM demands under tensor and context parallelism, where it is unset.

    Only where the variable has no meaning, outside CUDA; fully sharded data parallelism demands another value.
    """
    sharded = values.get("use_torch_fsdp2") or values.get("use_megatron_fsdp")
    if platform not in (None, "cuda") and not sharded:
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
