"""What conditions that features for experts share refuse: by a field of the job, a value, the sentence and the fix."""

from typing import Any, Final

REFUSED: Final[dict[str, tuple[Any, str, str]]] = {
    "num_experts": (0, "the model is dense, but {name} needs a MoE model", "--num-experts 1 or more"),
    "low_precision": (
        True,
        "linear layers compute in fp8 or fp4, which {name} does not support",
        "--no-low-precision",
    ),
    "transformer_engine_experts": (
        True,
        "experts are Transformer Engine's grouped experts, but {name} needs Megatron's local experts",
        "--no-transformer-engine-experts",
    ),
}


def refusal(name: str, field: str) -> str:
    """The problem of a feature with the value of REFUSED."""
    _, sentence, fix = REFUSED[field]
    return f"MS304 {name}: {sentence.format(name=name)} | {fix}, or remove {name}"


def job(field: str) -> dict[str, Any]:
    """The job with that value."""
    return {field: REFUSED[field][0]}
