"""Expert parallelism against one process, with each dispatcher."""

from tests.features.parity import TENSOR, given, trains

DISPATCHERS = {name: {"expert-parallel": {"dispatcher": name}} for name in ("alltoall", "allgather")}
test_spread_experts_train_as_one_process = trains(
    "expert-parallel",
    {name: given(settings=settings) for name, settings in DISPATCHERS.items()}
    | {f"{name}, tensor ranks": given(*TENSOR, settings=settings, nproc=4) for name, settings in DISPATCHERS.items()}
    | {
        "whole experts beside split attention": given(settings={"expert-parallel": {"expert_tensor_size": 1}}, tp=2, ep=2),
        "bf16": given(dtype="bf16"),
        "sharded optimizer": given("distributed-optimizer", nproc=4),
    },
)
