"""dualpipev against Megatron's interleaved schedule of the same chunks: equal bits without dropout."""

from typing import Any

from tests.features.parity import BUCKETS, FULL, Given, given, trains

SPLIT: dict[str, dict[str, Any]] = {"dualpipev": {"split_weights": True}}
NOOPS: dict[str, dict[str, Any]] = {"noop-layers": {"layers": "auto"}}


def staged(*also: str, settings: Any = None, nproc: int = 2, pp: int = 2, **world: Any) -> Given:
    """A case with two chunks on each stage."""
    sizes = {"pp": pp, "vpp": 2, "micro_batch_size": 1, "global_batch_size": 4 * nproc // 2} | world
    return given(also=["virtual-pipeline", *also], settings=settings, nproc=nproc, **sizes)


test_pairs_in_a_v_are_megatrons = trains(
    "dualpipev",
    {
        "layers": staged(),
        "split": staged(settings=SPLIT),
        "four stages": staged(nproc=4, pp=4, num_layers=8, global_batch_size=8),
        "four stages, split": staged(nproc=4, pp=4, num_layers=8, global_batch_size=8, settings=SPLIT),
        "in bf16": staged("matmul-add", dtype="bf16"),
        "experts": staged("expert-parallel", nproc=4, ep=2),
        "experts, split, full recompute": staged("expert-parallel", "recompute", settings=SPLIT | FULL, nproc=4, ep=2),
        "experts without memory": staged("expert-parallel", "moe-zero-memory", nproc=4, ep=2),
        "experts overlapped": staged("expert-parallel", "moe-alltoall-overlap", nproc=4, ep=2),
        "shared experts": staged(
            "expert-parallel", "moe-shared-experts", settings={"moe-shared-experts": {"count": 1}}, nproc=4, ep=2
        ),
        "tied embeddings": staged(tied_embeddings=True, mtp_num_layers=0),
        "multi-token prediction": staged(mtp_num_layers=1, tied_embeddings=False, rotary=True),
        "multi-token prediction, experts": staged(
            "expert-parallel", *BUCKETS, nproc=4, ep=2, mtp_num_layers=2, tied_embeddings=False, rotary=True
        ),
        "uneven chunks": staged("noop-layers", settings=NOOPS, num_layers=7),
        "uneven chunks, prediction": staged(
            "noop-layers", settings=NOOPS, num_layers=7, mtp_num_layers=1, tied_embeddings=False, rotary=True
        ),
        "coc": staged("coc", "sequence-parallel", nproc=4, tp=2),
        "ring": staged("ring-attention", nproc=4, cp=2),
        "buckets": staged(*BUCKETS, nproc=4),
        "latent attention": staged("expert-parallel", nproc=4, ep=2, multi_latent_attention=True),
    },
)
