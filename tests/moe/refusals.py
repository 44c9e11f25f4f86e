"""What conditions that features for experts share refuse: by a field of the job, a value, the sentence and the fix."""

from typing import Any, Final

REFUSED: Final[dict[str, tuple[Any, str, str]]] = {
    "num_experts": (0, "the model is dense, and {name} works on experts", "--num-experts N"),
    "low_precision": (
        True,
        "linear layers multiply in fp8 or fp4, which {name} does not support",
        "--no-low-precision",
    ),
    "cuda_graphs": (
        True,
        "layers are captured as CUDA graphs, which {name} does not support",
        "--no-cuda-graphs",
    ),
    "latent_expert_size": (
        8,
        "experts work on latent vectors of width 8, which {name} does not support",
        "--latent-expert-size 0",
    ),
    "overlapped_micro_batches": (
        True,
        "Megatron overlaps expert all-to-alls with another micro-batch, which {name} does not support",
        "--no-overlapped-micro-batches",
    ),
    "padded_routing": (
        True,
        "the tokens of experts are padded for low-precision products, which {name} does not support",
        "--no-padded-routing",
    ),
    "padded_experts": (
        True,
        "experts are padded to their capacity, which {name} does not support",
        "--no-padded-experts",
    ),
    "forced_balancing": (
        True,
        "the router spreads tokens evenly whatever their scores, which {name} does not support",
        "--no-forced-balancing",
    ),
    "linear_bias": (True, "linear layers have biases, which {name} does not support", "--no-linear-bias"),
    "transformer_engine_layers": (
        True,
        "layers are Transformer Engine's, and {name} works on Megatron's local layers",
        "--no-transformer-engine-layers",
    ),
    "transformer_engine_experts": (
        True,
        "experts are Transformer Engine's grouped ones, and {name} works on Megatron's local ones",
        "--no-transformer-engine-experts",
    ),
    "cpu_offloading": (
        True,
        "Megatron offloads activations to host memory, which {name} does not support",
        "--no-cpu-offloading",
    ),
    "fine_grained_offloading": (
        True,
        "Megatron offloads activations of single modules to host memory, which {name} does not support",
        "--no-fine-grained-offloading",
    ),
}
DISPATCHERS: Final = ("low_precision", "cuda_graphs", "latent_expert_size", "overlapped_micro_batches", "padded_routing")
"""Fields that every feature with transfers of its own refuses."""


def refusal(name: str, field: str) -> str:
    """The problem of a feature with the value of REFUSED."""
    _, sentence, fix = REFUSED[field]
    return f"MS304 {name}: {sentence.format(name=name)} | {fix}, or remove {name}"


def job(field: str) -> dict[str, Any]:
    """The job with that value."""
    return {field: REFUSED[field][0]}
