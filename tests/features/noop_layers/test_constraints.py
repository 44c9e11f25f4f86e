from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.noop_layers.feature import missing_layout
from mindspeed.plugins import World
from tests.features.resolving import CATALOG, MODEL, ask, refusals

NAME = "noop-layers"


def with_places(*places: int) -> dict[str, dict[str, Any]]:
    return {NAME: {"layers": places}}


def test_empty_places_that_fill_up_every_chunk_are_accepted():
    assert refusals(NAME, settings=with_places(0, 7), pp=2, vpp=2, num_layers=6) == []
    assert refusals(NAME, settings={NAME: {"layers": "0,7"}}, pp=2, vpp=2, num_layers=6) == []
    assert refusals(NAME, pp=2, vpp=2, num_layers=7) == []


@pytest.mark.parametrize(
    ("places", "job", "refusal"),
    [
        (
            (3, 3),
            {},
            (
                "MS301 noop-layers.layers is (3, 3): a position is given twice | --set noop-layers.layers=VALUE (give each "
                "position once)"
            ),
        ),
        (
            (0, 8),
            {},
            (
                "MS304 noop-layers: a no-op position in layers=(0, 8) is too large: the maximum is 6 layers + number of no-ops "
                "- 1 | --set noop-layers.layers=1 (positions up to layers + no-ops - 1), or --set noop-layers.layers=auto"
            ),
        ),
        (
            (0,),
            {"vpp": 2},
            (
                "MS304 noop-layers: 6 layers plus no-ops at positions (0,) cannot be split evenly into pp x vpp = 2 x 2 model "
                "chunks | --set noop-layers.layers=auto, or remove the setting noop-layers.layers"
            ),
        ),
    ],
)
def test_places_that_do_not_fit_are_refused(places, job, refusal):
    assert refusals(NAME, settings=with_places(*places), pp=2, num_layers=6, **job) == [refusal]


def test_groups_of_recomputed_layers_fill_the_real_chunks():
    settings = with_places(0, 7) | {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 2}}
    request = {"settings": settings, "pp": 2, "vpp": 2, "num_layers": 6}
    assert refusals(NAME, "recompute", **request) == [
        "MS304 recompute: the setting num_layers=2 requires a multiple of 2 layers per model chunk, but 6 layers are "
        "split into "
        f"{request['pp']} x {request['vpp']} (pp x vpp) chunks | --set recompute.num_layers=1 (or another number that "
        "divides the layers of every model chunk)"
    ]
    settings["recompute"]["num_layers"] = 1
    assert refusals(NAME, "recompute", **request) == []


def test_the_world_has_the_layers_of_each_chunk():
    assert ask(NAME, settings=with_places(0, 7), pp=2, vpp=2, num_layers=6).world.layers_per_chunk == (1, 2, 2, 1)
    assert ask("pipeline-parallel", pp=2, num_layers=6).world.layers_per_chunk == (3, 3)


def layout(world: dict[str, Any], **settings: Any) -> Any:
    feature = CATALOG.feature(NAME)
    made: Any = feature(feature.Args(**settings), World(world))
    return made.megatron_args()[0]


def test_megatron_receives_a_layout():
    override = layout({"pp": 2, "vpp": 2, "num_layers": 6}, layers=(0, 7))
    assert (override.argument, override.value) == ("pipeline_model_parallel_layout", "Et|tt|tt|tL")
    assert (
        override.reason == "gives each model chunk its number of layers: 1, 2, 2, 1. FLOPs of the stages are unknown because "
        "hidden_size is not set"
    )


def test_a_large_output_layer_takes_layers_off_the_last_stage():
    override = layout(MODEL | {"pp": 2, "vocab_size": 5120, "num_layers": 8})
    assert (override.value, override.reason) == (
        "Etttttt|ttL",
        "gives each model chunk its number of layers: 6, 2. Relative FLOPs of each chunk (1.000 = mean of all chunks): "
        "0.923, 1.077. Relative FLOPs of the largest stage (1.000 = balanced): 1.077",
    )


@pytest.mark.parametrize(
    ("feature", "settings", "counts"),
    [
        ("nano-pipe", {}, (5, 5, 5, 0, 5, 5, 5, 0)),
        ("dualpipev", {}, (0, 5, 5, 5, 5, 5, 5, 0)),
        ("zero-bubble", {"placement": "v"}, (0, 5, 5, 5, 5, 5, 5, 0)),
    ],
)
def test_the_rank_that_has_the_output_layer_in_a_schedule_gets_fewer_layers(
    feature: str, settings: dict[str, Any], counts: tuple[int, ...]
) -> None:
    sizes = {"hidden_size": 1024, "ffn_hidden_size": 4096, "vocab_size": 128000, "num_layers": 30, "mtp_num_layers": 1}
    made = ask(NAME, feature, settings={feature: settings}, pp=4, vpp=2, **sizes)
    assert not made.problems
    assert made.world.layers_per_chunk == counts
    assert layout(made.world.known()).reason.endswith("Relative FLOPs of the largest stage (1.000 = balanced): 1.486")


def test_a_model_that_the_plan_does_not_know_is_refused_when_it_is_built():
    feature = CATALOG.feature(NAME)
    made: Any = feature(feature.Args(), World({"pp": 2}))
    assert made.megatron_args() == []
    assert list(missing_layout(made, None, SimpleNamespace(pipeline_model_parallel_layout="Et|tL"))) == []
    assert list(missing_layout(made, None, SimpleNamespace(pipeline_model_parallel_layout=None))) == [
        "the plan does not contain the shape of the model"
    ]
