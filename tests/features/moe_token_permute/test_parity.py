"""The permutation operators against Megatron's index functions, with each dispatcher."""

from tests.features.parity import DTYPES, TENSOR, given, trains

BESIDE = {
    "all-to-all": "moe-alltoall-dispatcher",
    "all-gather": "moe-allgather-dispatcher",
    "all-to-all, overlapped": "moe-alltoall-overlap",
    "all-gather, overlapped": "moe-allgather-overlap",
    "level 0": "moe-zero-memory",
}
DISPATCHERS = {name: {"expert-parallel": {"dispatcher": name}} for name in ("alltoall", "allgather")}
test_tokens_go_to_experts_and_back_as_in_megatron = trains(
    "moe-token-permute",
    {dtype: given(dtype=dtype) for dtype in DTYPES}
    | {
        f"{name}, two ranks, {dtype}": given("expert-parallel", settings=settings, nproc=2, dtype=dtype)
        for name, settings in DISPATCHERS.items()
        for dtype in DTYPES
    }
    | {f"{name}, {dtype}": given(BESIDE[name], nproc=2, ep=2, dtype=dtype) for name in BESIDE for dtype in DTYPES}
    | {
        "experts that tensor ranks share": given(also=TENSOR, nproc=2),
        "pairs of a token and a rank": given(
            "moe-alltoall-dispatcher",
            settings={"moe-alltoall-dispatcher": {"once_per_rank": True}},
            nproc=2,
            ep=2,
            router_topk=4,
            num_experts=8,
        ),
    },
)
