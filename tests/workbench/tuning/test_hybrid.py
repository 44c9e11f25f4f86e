"""The search of a HybridModel: the layouts of its pattern, and the predictions of the transformer with the same layers."""

from typing import Any

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError
from mindspeed.workbench.tuning.job import SearchJob, make_search
from mindspeed.workbench.tuning.search import Configuration
from mindspeed.workbench.tuning.time import DEFAULTS, Machine

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "global_batch_size": 8,
    "vocab_size": 512,
}


def search_of(world: dict[str, Any], ranks: int = 4) -> SearchJob:
    layer = Layer("test", world={**SHAPE, **world})
    return make_search([layer], {}, made_up("cpu", "0.19.0"), ranks)


def best(job: SearchJob, top: int = 3) -> list[Configuration]:
    return list(job.search(Machine(DEFAULTS["cpu"]), float("inf"), top).rows)


@pytest.mark.parametrize(("layer", "world"), [("-", {}), ("E", {"num_experts": 4, "grouped_experts": True})])
def test_a_hybrid_model_has_the_times_and_bytes_of_the_transformer_with_its_layers(layer: str, world: dict[str, Any]) -> None:
    fixed = {"micro_batch_size": 1, "vpp": 1, **world}
    transformer, hybrid = ({"num_layers": 4}, {"hybrid_layer_pattern": f"*{layer}" * 4})
    rows = [best(search_of(fixed | model)) for model in (transformer, hybrid)]
    found = [[(row.key, row.predicted_seconds, row.predicted_bytes) for row in some] for some in rows]
    assert found[0] == [(key, pytest.approx(seconds), size) for key, seconds, size in found[1]]


def test_chunks_of_stages_become_segments_of_the_pattern_in_the_job_file() -> None:
    job = search_of({"hybrid_layer_pattern": "*-*-*-*-", "pp": 2, "vpp": 2})
    (row,) = best(job, 1)
    assert (row.sizes["pp"], row.sizes["vpp"]) == (2, 2)
    assert job.job_of(row)["world"]["hybrid_layer_pattern"] == "*-|*-|*-|*-"
    shared = search_of({"hybrid_layer_pattern": "*-*-*-*-", "pp": 2, "vpp": 1})
    assert shared.job_of(best(shared, 1)[0])["world"]["hybrid_layer_pattern"] == "*-*-*-*-"


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 1)])
def test_segments_that_are_given_are_kept(pp: int, vpp: int) -> None:
    job = search_of({"hybrid_layer_pattern": "*-*|-|*-|*-", "pp": pp})
    rows = best(job)
    assert {row.sizes["vpp"] for row in rows} == {vpp}
    assert {job.job_of(row)["world"]["hybrid_layer_pattern"] for row in rows} == {"*-*|-|*-|*-"}


def test_layers_that_the_trainer_does_not_build_are_refused() -> None:
    with pytest.raises(ResolutionError) as error:
        search_of({"hybrid_layer_pattern": "*-M-"})
    assert [problem.message for problem in error.value.problems] == [
        "mindspeed pretrain supports only * - E (attention, MLP, experts) in a hybrid layer pattern\n    *-M-\n      ^"
    ]
