"""Products in parts against one process, and against Megatron's sequence parallelism to the bit."""

from typing import Any

from tests.features.parity import BUCKETS, DTYPES, FULL, LLAMA, Given, given, trains


def split(*features: str, settings: Any = None, **world: Any) -> Given:
    return given("sequence-parallel", *features, settings=settings, **{"seq_length": 64, **world})


def parts(count: int, dtype: str) -> Given:
    return split(settings={"coc": {"parts": count, "mode": 2}}, dtype=dtype, **LLAMA)


test_training_is_that_of_one_process = trains(
    "coc",
    {f"{count} parts, {dtype}": parts(count, dtype) for count in (1, 2, 4) for dtype in DTYPES}
    | {
        "pipeline": split("pipeline-parallel", tp=2, pp=2),
        "Ulysses": split("ulysses-attention", tp=2, cp=2),
        "buckets": split(*BUCKETS, tp=2, world_size=4),
        "matmul-add": split("matmul-add", tp=2),
        "experts": split("expert-parallel", tp=2, ep=2),
        "multi-token prediction": split(tp=2, mtp_num_layers=1),
        "layers recomputed": split("recompute", settings=FULL, tp=2),
        "attention recomputed": split("recompute", settings={"recompute": {"granularity": "selective"}}, tp=2),
        # against sequence parallelism: Megatron's own differs from one process in multi-latent attention
        "latent": given(also=["sequence-parallel"], tp=2, seq_length=64, multi_latent_attention=True, rotary=True),
    },
)
