"""What `verify` asks when it is told little: model, layout, baseline and claim are chosen by what the features own."""

from itertools import combinations
from typing import Any

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError
from mindspeed.registry import catalog
from mindspeed.workbench.verification.case import CaseRequest, VerificationCase, build_case

HERE = made_up("cpu", "0.16.1")


def asked(*features: str, also: tuple[str, ...] = (), nproc: int | None = None, **layer: Any) -> VerificationCase:
    return build_case(features, [Layer("test", **layer)], also, nproc, HERE)


def layout(case: VerificationCase) -> tuple[int, int]:
    """Processes of baseline and feature."""
    return case.baseline.world.world_size, case.plan.world.world_size


@pytest.mark.parametrize(
    ("features", "model", "processes"),
    [
        (("tensor-parallel",), "gpt", 2),
        (("data-parallel",), "gpt", 2),
        (("virtual-pipeline",), "gpt", 2),
        (("tensor-parallel", "pipeline-parallel"), "gpt", 4),
        (("expert-parallel",), "moe", 2),
        (("rms-norm",), "llama", 1),
        (("swiglu", "tensor-parallel"), "llama", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_first_model_and_the_fewest_processes_that_suit_are_taken(
    features: tuple[str, ...], model: str, processes: int
) -> None:
    case = asked(*features)
    assert case.recipe.shape.name == model
    assert layout(case) == (1, processes)
    assert case.baseline.names == ()


def test_a_feature_brings_what_it_requires_under_test() -> None:
    case = asked("async-param-gather")
    assert set(case.plan.names) == {"async-ddp", "async-param-gather", "data-parallel", "distributed-optimizer"}
    assert case.baseline.names == ()


def test_a_feature_that_trains_another_model_is_in_the_baseline_by_its_reference() -> None:
    case = asked("alibi", "ring-attention", settings={"alibi": {"fused_type": 2}})
    assert case.baseline.names == ("alibi",)
    assert layout(case) == (1, 2)
    fused = [next(f for f in plan.features if f.name == "alibi").args for plan in (case.baseline, case.plan)]
    assert [(args["fused"], args["fused_type"]) for args in fused] == [(False, 2), (True, 2)]


def test_what_a_feature_may_require_is_invited_and_not_taken_out() -> None:
    assert asked("alibi").plan.names == ("flash-attention", "alibi")
    assert asked("rms-norm").plan.names == ("rms-norm",)


def test_features_beside_are_on_both_sides_with_their_settings_and_layout() -> None:
    case = asked("sequence-parallel", also=("tensor-parallel",), settings={"tensor-parallel": {"size": 4}})
    assert case.baseline.names == ("tensor-parallel",)
    assert case.baseline.world.tp == 4
    assert layout(case) == (4, 4)


def test_an_exact_feature_is_compared_with_dropout_in_the_same_layout() -> None:
    case = asked("recompute", nproc=2)
    assert case.recipe.shape.dropout > 0
    assert layout(case) == (2, 2)
    assert case.numerics.claim == "exact"
    assert case.baseline.names == ("data-parallel",)


def test_sizes_that_were_given_are_those_of_an_exact_baseline_too() -> None:
    case = asked("recompute", world={"tp": 2})
    assert (case.plan.world.tp, case.baseline.world.tp) == (2, 2)
    assert "tensor-parallel" in case.baseline.names
    assert layout(case) == (2, 2)


def test_a_reordered_feature_is_compared_without_dropout() -> None:
    assert asked("tensor-parallel").recipe.shape.dropout == 0


def test_the_weakest_claim_under_test_counts() -> None:
    assert asked("recompute", "tensor-parallel").numerics.claim == "reordered"
    assert asked("recompute", also=("tensor-parallel",)).numerics.claim == "exact"


def test_given_sizes_model_and_dtype_win() -> None:
    case = asked("tensor-parallel", world={"tp": 4, "num_layers": 2, "seq_length": 32, "dtype": "bf16"})
    assert case.plan.world.tp == 4
    assert (case.recipe.shape.num_layers, case.recipe.shape.seq_length) == (2, 32)
    assert case.recipe.dtype == "bf16"
    assert case.baseline.world.num_layers == 2


@pytest.mark.parametrize("name", catalog(frozenset()).specs)
def test_every_feature_has_a_case_without_any_option(name: str) -> None:
    case = asked(name)
    assert name in case.plan.names
    assert case.features == (name,)


def test_what_is_given_wins_over_the_surroundings_that_a_feature_declares() -> None:
    case = asked("hybrid-attention", settings={"context-parallel": {"size": 8}}, world={"seq_length": 32}, nproc=8)
    assert case.plan.world.cp == 8


@pytest.mark.parametrize(
    ("features", "present", "missing", "note"),
    [
        (
            ("ring-attention-update", "kv-allgather-cp"),
            "kv-allgather-cp",
            "ring-attention",
            "ring-attention-update is verified without ring-attention",
        ),
        (
            ("ampipe", "moe-alltoall-dispatcher"),
            "moe-alltoall-overlap",
            "deepspeed-moe",
            "ampipe is verified without deepspeed-moe, with moe-alltoall-overlap",
        ),
    ],
    ids=" ".join,
)
def test_a_feature_is_verified_without_surroundings_that_the_others_exclude_and_says_so(
    features: tuple[str, ...], present: str, missing: str, note: str
) -> None:
    case = asked(*features)
    assert present in case.plan.names
    assert missing not in case.plan.names
    assert case.note == note


def test_a_setting_that_the_others_exclude_is_left_out_and_the_note_says_so() -> None:
    case = asked("adaptive-recompute", "moe-shared-experts")
    assert case.note == "moe-shared-experts is verified without moe-shared-experts.overlap=True"
    (experts,) = [planned.args for planned in case.plan.features if planned.name == "moe-shared-experts"]
    assert (experts["count"], experts["overlap"]) == (1, False)


def test_a_baseline_has_the_declared_settings_and_those_that_were_given() -> None:
    case = asked("deepspeed-moe", settings={"deepspeed-moe": {"capacity_factor": 0.5}})
    for plan in (case.baseline, case.plan):
        (layer,) = [planned.args for planned in plan.features if planned.name == "deepspeed-moe"]
        assert (layer["groups"], layer["capacity_factor"]) == (4, 0.5)


@pytest.mark.parametrize("features", [("coc", "tensor-parallel"), ("dynamic-shapes", "nano-pipe")], ids=" ".join)
def test_what_one_member_is_compared_without_is_in_the_baseline_of_no_other(features: tuple[str, ...]) -> None:
    case = asked(*features)
    assert (case.baseline.names, layout(case)) == ((), (1, 2))
    assert case.numerics.claim == "reordered"


def test_of_the_numbers_that_members_declare_the_greatest_counts() -> None:
    case = asked("noop-layers", "coc")
    assert (case.plan.world.num_layers, case.plan.world.seq_length, case.plan.world.world_size) == (3, 32, 4)


def test_more_processes_are_taken_where_the_sizes_need_them() -> None:
    case = asked("hybrid-attention", "tensor-parallel")
    assert (case.plan.world.tp, case.plan.world.cp, case.plan.world.world_size) == (2, 4, 8)


@pytest.mark.parametrize(
    ("features", "model"),
    [
        (("alibi", "moe-load-report"), "moe-learned"),
        (("alibi", "moe-grouped-gemm"), "moe-grouped-learned"),
        (("alibi", "rms-norm"), "llama-learned"),
        (("tensor-parallel", "moe-grouped-gemm"), "moe-grouped"),
    ],
    ids=str,
)
def test_the_model_suits_all_members(features: tuple[str, ...], model: str) -> None:
    assert asked(*features).recipe.shape.name == model


@pytest.mark.parametrize(
    ("features", "refusal"),
    [
        (("alibi", "rotary-embedding"), "MS304 rotary-embedding: the model does not use rotary positions"),
        (
            ("deepspeed-moe", "moe-tp-extend-ep"),
            (
                "MS202 deepspeed-moe conflicts with moe-tp-extend-ep, because deepspeed-moe exchanges tokens itself and never "
                "calls Megatron's token dispatcher, so features that change or use this dispatcher would have no effect"
            ),
        ),
    ],
    ids=str,
)
def test_a_refusal_is_what_no_model_and_no_number_of_processes_avoids(features: tuple[str, ...], refusal: str) -> None:
    with pytest.raises(ResolutionError) as error:
        asked(*features)
    (problem,) = error.value.problems
    assert f"{problem.code} {problem.message}" == refusal


def test_a_request_that_no_model_suits_says_why() -> None:
    with pytest.raises(ResolutionError, match=r"MS304 tensor-parallel: .*3"):
        asked("tensor-parallel", settings={"tensor-parallel": {"size": 3}})


def test_an_unknown_name_is_told_with_near_ones() -> None:
    with pytest.raises(ResolutionError, match="MS201 the feature 'tensor-paralel' does not exist"):
        asked("tensor-paralel")


def test_two_features_that_models_suit_alone_are_suited_by_one_together() -> None:
    """Positions are either biases of attention or rotations of queries and keys: no model has both."""

    def suitable(name: str) -> set[str]:
        request = CaseRequest((name,), (), (), None, HERE, catalog(), {}, level_one=False)
        return {recipe.shape.name for recipe in request.recipes() if not request.obstacles(recipe)}

    models = {name: found for name in sorted(catalog().usable) if (found := suitable(name))}
    apart = {pair for pair in combinations(models, 2) if not models[pair[0]] & models[pair[1]]}
    assert apart == {("alibi", "mla-split"), ("alibi", "rotary-embedding")}
