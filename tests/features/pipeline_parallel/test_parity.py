"""Pipeline parallelism against one process."""

from tests.features.parity import given, trains

test_stages_train_as_one_process = trains(
    "pipeline-parallel",
    {f"{size} stages": given(settings={"pipeline-parallel": {"size": size}}) for size in (2, 4)}
    | {
        "freed outputs": given(settings={"pipeline-parallel": {"free_outputs": True}}, pp=2),
        "bf16": given(dtype="bf16"),
        "replicas": given("data-parallel"),
    },
)
