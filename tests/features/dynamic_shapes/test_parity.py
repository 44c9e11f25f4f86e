"""Shapes that travel ahead of tensors, under Megatron's schedules and under lists of operations."""

from tests.features.parity import RINGS, cp, given, trains

test_pipelines_with_shapes_train_as_one_process = trains(
    "dynamic-shapes",
    {
        "stages": given(nproc=2, pp=2, vpp=1),
        "interleaved": given("virtual-pipeline", nproc=2, pp=2, vpp=2),
        "ragged chunks": given(pp=2, vpp=2),
        "ragged, bf16": given(pp=2, dtype="bf16"),
        "ragged, tensor ranks": given(pp=2, tp=2),
        "ragged, split sequence": given("sequence-parallel", pp=2, tp=2),
        "ragged, experts": given(also=["moe-token-permute"], nproc=2, pp=2),
        "ragged, four stages": given(nproc=4, pp=4, num_layers=8),
        **{f"ragged, shares of {name}": given(name, settings=cp(2), nproc=4, pp=2) for name in RINGS},
    },
)
test_a_list_of_operations_announces_shapes_and_keeps_megatrons_bits = trains(
    "nano-pipe",
    {
        "chunks": given(also=["virtual-pipeline", "dynamic-shapes"], nproc=2, pp=2, vpp=2),
        "ragged, four stages": given(also=["pipeline-parallel", "dynamic-shapes"], nproc=4, pp=4, num_layers=8),
    },
)
