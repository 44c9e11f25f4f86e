"""Jobs in which passes can be paired, and those that are refused with the number that would do."""

import pytest

from tests.features.resolving import MODEL, ask, refusals


@pytest.mark.parametrize(
    ("world", "sentence", "fix"),
    [
        ({"pp": 2}, "pairs passes in Megatron's interleaved schedule, but pp is 2 and vpp is 1", "--vpp 2"),
        (
            {"pp": 2, "vpp": 2, "global_batch_size": 8},
            "the number of micro-batches per step is 2, but moe-fb-overlap needs at least 4",
            "--global-batch-size 16 or more",
        ),
        ({"ep": 1}, "expert parallelism is off (ep=1)", "--ep 2"),
    ],
)
def test_a_job_without_pairs_is_refused(world: dict[str, int], sentence: str, fix: str) -> None:
    found = refusals("moe-fb-overlap", **{"num_experts": 4, "ep": 2, "global_batch_size": 16, **world})
    assert any(sentence in text and fix in text for text in found), found


def test_one_micro_batch_is_a_warning() -> None:
    found = ask("moe-fb-overlap", model=MODEL | {"num_experts": 4, "ep": 2, "global_batch_size": 8})
    assert found.problems == []
    assert [row.kind for row in found.rows if "has no other one to overlap its all-to-alls with" in row.text] == ["warning"]
