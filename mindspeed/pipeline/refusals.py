"""What a schedule of operations cannot run with, read from Megatron's configuration and from a model. Light."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from packaging.specifiers import SpecifierSet

from mindspeed.plugins.conditions import Predicate
from mindspeed.plugins.megatron_flags import MegatronRefusal

_FLAGS: Final = {
    "overlap_moe_expert_parallel_comm": "expert communication overlaps in combined forward and backward steps",
    "defer_embedding_wgrad_compute": "Megatron defers the weight gradient of the output layer with a queue of its own",
    "enable_cuda_graph": "a CUDA graph replays forward and backward in the order in which they were captured",
    "external_cuda_graph": "a CUDA graph replays forward and backward in the order in which they were captured",
    "fine_grained_activation_offloading": "offloaded activations come back in the order of Megatron's schedule",
    "cpu_offloading": "offloaded activations come back in the order of Megatron's schedule",
    "use_ring_exchange_p2p": "ring exchange sends and receives at once",
    "delay_wgrad_compute": "Megatron delays weight gradients with a queue of its own",
}


def refusals(config: Any, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the argument and the reason for each argument of Megatron, ``without`` some, that a list of operations refuses."""
    for name, reason in _FLAGS.items():
        if name not in without and getattr(config, name, False):
            yield f"{name} is set: {reason}"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        yield f"cuda_graph_impl={config.cuda_graph_impl}: {_FLAGS['enable_cuda_graph']}"
    if (count := getattr(config, "num_microbatches_with_partial_activation_checkpoints", None)) is not None:
        yield f"num_microbatches_with_partial_activation_checkpoints={count}: the list of operations decides what is recomputed"


_NO_FORWARD: Final = ("defer_embedding_wgrad_compute", "delay_wgrad_compute", "use_ring_exchange_p2p")
"""Arguments that leave forward passes as they are: weight gradients come later, or messages leave nothing to wait for."""


def recompute_refusals(config: Any) -> Iterator[str]:
    """Yield the argument and the reason for each argument of Megatron that early recomputation cannot run with."""
    return refusals(config, _NO_FORWARD)


_FUSED: Final = "linear layers of Transformer Engine compute both gradients at once"
_GATHERED: Final = "fully sharded parameters are gathered in the order of Megatron's schedule"
_MODULES: Final = {
    "megatron.core.extensions.transformer_engine": _FUSED,
    "transformer_engine": _FUSED,
    "megatron.core.distributed.fsdp": _GATHERED,
    "megatron.core.distributed.torch_fully_sharded_data_parallel": _GATHERED,
}


_SHARDED: Final = {package: reason for package, reason in _MODULES.items() if package.startswith("megatron.core.distributed")}


def sharded_refusals(chunks: Iterable[Any]) -> set[str]:
    """Return the class and the reason for sharded parameters, which are not there when a forward pass is repeated early."""
    return model_refusals(chunks, _SHARDED)


def model_refusals(chunks: Iterable[Any], modules: Mapping[str, str] = _MODULES) -> set[str]:
    """Return the class and the reason for modules of a model that a list of operations cannot run with."""
    kinds = {type(module) for chunk in chunks for module in chunk.modules() if next(module.parameters(False), None) is not None}
    kinds |= {type(chunk) for chunk in chunks}
    return {
        f"the model has {kind.__qualname__}: {reason}"
        for kind in kinds
        for package, reason in modules.items()
        if f"{kind.__module__}.".startswith(f"{package}.") and ("Linear" in kind.__name__ or "Parallel" in kind.__name__)
    }


_UNEVEN: Final = {
    "pipeline_model_parallel_layout": "layers are dealt out by a layout",
    "num_layers_in_first_pipeline_stage": "the first stage has a number of layers of its own",
    "num_layers_in_last_pipeline_stage": "the last stage has a number of layers of its own",
    "account_for_embedding_in_pipeline_split": "the embedding counts as a layer",
    "account_for_loss_in_pipeline_split": "the output layer counts as a layer",
    "mtp_num_layers": "multi-token prediction needs the embedding and the output layer on two ranks",
}


TIED: Final = "placement v has the embedding and the output layer in two chunks of one rank, where Megatron does not tie them"
UNTIE: Final = "untie them (--untie-embeddings-and-output-weights), or take placement loop"


def v_refusals(config: Any) -> Iterator[str]:
    """Yield the argument and the reason for each argument of Megatron that stages placed as a V cannot have."""
    for name, reason in _UNEVEN.items():
        if value := getattr(config, name, None):
            yield f"placement v with {name}={value}: {reason}"


def can_place_v(megatron: str) -> bool:
    """Return whether a version of Megatron asks for stages where the wraps of a V answer: by chunk, and no loss by stage."""
    return megatron in SpecifierSet(">=0.14,<0.19", prereleases=True)


IN_WORLD: Final = {
    "cuda_graphs": (
        f"layers are captured as CUDA graphs: {_FLAGS['enable_cuda_graph']}",
        "--no-cuda-graphs (Megatron-LM: --cuda-graph-impl none)",
    ),
    "overlapped_micro_batches": (
        f"Megatron hides the transfers of experts: {_FLAGS['overlap_moe_expert_parallel_comm']}",
        "--no-overlapped-micro-batches (Megatron-LM: no --overlap-moe-expert-parallel-comm)",
    ),
}
"""Fields of a world with which no list of operations runs where they are set: reason and fix."""

RECOMPUTE_ARGUMENTS: Final = (
    MegatronRefusal("fine_grained_activation_offloading", _FLAGS["fine_grained_activation_offloading"]),
    MegatronRefusal("cpu_offloading_num_layers", _FLAGS["cpu_offloading"]),
    *(MegatronRefusal(name, _GATHERED) for name in ("use_megatron_fsdp", "use_torch_fsdp2")),
)
"""Arguments of Megatron-LM that early recomputation cannot run with, beside those of `IN_WORLD`."""

ARGUMENTS: Final = (
    *RECOMPUTE_ARGUMENTS,
    *(MegatronRefusal(name, _FLAGS[name]) for name in _NO_FORWARD),
    MegatronRefusal("transformer_impl", _FUSED, values=("transformer_engine",)),
)
"""Arguments of Megatron-LM that a list of operations cannot run with, beside those of `IN_WORLD`."""

_AS_ARGUMENT: Final = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}


def v_arguments(when: Predicate) -> tuple[MegatronRefusal, ...]:
    """Return the arguments of Megatron-LM that stages placed as a V cannot have, beside those that a world knows."""
    return tuple(
        MegatronRefusal(_AS_ARGUMENT.get(name, name), f"placement v has equal stages, and {reason}", when=when)
        for name, reason in _UNEVEN.items()
        if name != "mtp_num_layers"
    )
