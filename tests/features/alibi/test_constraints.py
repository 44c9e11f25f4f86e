"""What alibi asks of a plan, and what its old flags say."""

from dataclasses import replace

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.argument_words import MegatronCommandLine
from mindspeed.megatron_lm.old_flags.flags import read_old_flags
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.plugins.fixes import GiveField
from mindspeed.plugins.problems import MindSpeedError
from tests.features.resolving import CATALOG, active, ask, overrides, refusals

ALGORITHMS = ["ring-attention", "ulysses-attention", "kv-allgather-cp"]


def test_a_bias_says_where_a_token_is_and_no_embedding_does():
    assert overrides("alibi") == {"position_embedding_type": "none"}


def test_rotary_positions_are_refused():
    (problem,) = refusals("alibi", rotary=True)
    assert problem == (
        "MS304 alibi: the positions of the model are rotary, but alibi replaces position embeddings "
        "| --no-rotary, or remove alibi"
    )
    text = "remove --position-embedding-type and --use-rotary-position-embeddings"
    assert MegatronCommandLine("0.16.1")((GiveField("rotary", False),)) == text


def test_latent_attention_is_refused():
    assert refusals("alibi", rotary=False, multi_latent_attention=True) == [
        "MS304 alibi: multi-latent attention has rotary positions, but alibi replaces position embeddings "
        "| --no-multi-latent-attention, or remove alibi"
    ]


def test_adaptive_blocks_take_no_bias():
    problems = refusals("alibi", "adaptive-cp", rotary=False, cp=2)
    assert (
        "MS202 alibi needs position-bias of the feature for context-parallel, and adaptive-cp does not provide it, because the "
        "model has no other positions | use hybrid-attention or kv-allgather-cp or ring-attention or ulysses-attention in its "
        "place, or remove alibi or adaptive-cp"
    ) in problems


def test_the_operator_that_takes_the_bias_comes_along():
    assert active("alibi", rotary=False, world_size=1) == ["flash-attention", "alibi"]
    assert active("alibi", rotary=False, world_size=1, settings={"alibi": {"fused": False}}) == ["alibi"]


def test_megatrons_own_scores_and_the_operator_exclude_each_other():
    (problem,) = refusals("alibi", "flash-attention", rotary=False, world_size=1, settings={"alibi": {"fused": False}})
    assert problem == (
        "MS202 alibi and flash-attention exclude each other, because with alibi.fused=false Megatron's own core attention has "
        "the scores; --without flash-attention | remove alibi or flash-attention"
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_comes_after_the_algorithm_whose_core_attention_gets_the_bias(algorithm):
    names = active("alibi", algorithm, rotary=False, cp=2, world_size=2)
    assert names.index("alibi") > names.index(algorithm)
    assert "flash-attention" not in names


@pytest.mark.parametrize("settings", [{"fused": False}, {"fused_type": 0}, {"fused_type": 3}, {"square": True}, {"fill": True}])
def test_blocks_of_ranks_take_slopes_and_distance_alone(settings):
    assert refusals("alibi", "ring-attention", rotary=False, cp=2, settings={"alibi": {"fused_type": 2}}) == []
    assert refusals("alibi", "ring-attention", rotary=False, cp=2, settings={"alibi": settings}) == [
        "MS304 alibi: under cp=2 the bias comes from slopes and the distance alone (fused_type 2, fused) "
        "| --set alibi.fused_type=2 (without square, opposite and fill), or --cp 1"
    ]


@pytest.mark.parametrize("kind", [2, 3])
@pytest.mark.parametrize("form", ["square", "opposite", "fill"])
def test_a_matrix_is_not_made_from_slopes(form, kind):
    assert refusals("alibi", rotary=False, world_size=1, settings={"alibi": {form: True, "fused_type": 0}}) == []
    assert refusals("alibi", rotary=False, world_size=1, settings={"alibi": {form: True, "fused_type": kind}}) == [
        f"MS301 alibi: square, opposite and fill need a matrix, but fused_type {kind} has none | --set alibi.fused_type=0"
    ]


def test_old_flags_give_it_and_its_settings():
    line = "--position-embedding-type alibi --square-alibi-mask --fill-neg-inf --alibi-diagonal-opposite"
    old = read_old_flags([*line.split(), "--alibi-fusion-attn-type", "0", "--lr", "1"], {"--lr"}, CATALOG)
    assert old.problems == ()
    assert old.rest == ("--lr", "1")
    assert old.layer.features == ("alibi",)
    settings = {"alibi": {"square": True, "fill": True, "opposite": True, "fused_type": 0}}
    assert old.layer.settings == settings
    assert ask("alibi", rotary=False, world_size=1, settings=settings).problems == []


def test_an_old_type_that_does_not_exist_is_refused():
    (problem,) = refusals("alibi", rotary=False, settings={"alibi": {"fused_type": 1}})
    assert problem.startswith("MS301 alibi.fused_type is 1: ")


SIZES = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 2"


def planned(flags: str):
    _, plan = plan_training([*SIZES.split(), *flags.split()], {}, replace(made_up("cpu", "0.16.1"), world_size=1))
    return plan


def test_megatrons_script_trains_without_a_table_of_positions():
    plan = planned("--position-embedding-type alibi")
    assert "alibi" in [feature.name for feature in plan.features]
    assert {o.override.argument: o.override.value for o in plan.overrides}["position_embedding_type"] == "none"


def test_megatrons_script_cannot_ask_for_another_table():
    with pytest.raises(MindSpeedError) as error:
        planned("--features alibi --position-embedding-type learned_absolute")
    assert str(error.value) == (
        "MS605 Megatron's --position-embedding-type gives 'learned_absolute', and alibi needs 'none': "
        "the bias says where a token is\n"
        "  where: Megatron's --position-embedding-type\n"
        "  fix: remove --position-embedding-type or alibi"
    )
    with pytest.raises(MindSpeedError) as error:
        planned("--features alibi --position-embedding-type rope")
    assert "MS304 alibi: the positions of the model are rotary" in str(error.value)
    assert "fix: remove --position-embedding-type" in str(error.value)
