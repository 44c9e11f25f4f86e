"""What alibi asks of a plan, and what its old flags say."""

from dataclasses import replace

import pytest

from mindspeed.compat.old_flags.flags import read_old_flags
from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.command_line_fixes import MegatronCommandLine
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.problems import Fix, MindSpeedError
from tests.features.resolving import CATALOG, active, ask, refusals


def test_rotary_positions_are_refused():
    (problem,) = refusals("alibi", rotary=True)
    assert problem == (
        "MS304 alibi: the model uses rotary positions, but alibi replaces position embeddings | --no-rotary, or remove alibi"
    )
    text = "remove --position-embedding-type and --use-rotary-position-embeddings"
    assert MegatronCommandLine("0.16.1")((Fix.give_field("rotary", False),)) == text


def test_the_operator_that_takes_the_bias_comes_along():
    assert active("alibi", rotary=False, world_size=1) == ["flash-attention", "alibi"]
    assert active("alibi", rotary=False, world_size=1, settings={"alibi": {"fused": False}}) == ["alibi"]


@pytest.mark.parametrize("kind", [2, 3])
@pytest.mark.parametrize("form", ["square", "opposite", "fill"])
def test_a_matrix_is_not_made_from_slopes(form, kind):
    assert refusals("alibi", rotary=False, world_size=1, settings={"alibi": {form: True, "fused_type": 0}}) == []
    assert refusals("alibi", rotary=False, world_size=1, settings={"alibi": {form: True, "fused_type": kind}}) == [
        (
            f"MS301 alibi: square, opposite and fill need a bias matrix, but fused_type={kind} does not use one | --set "
            "alibi.fused_type=0"
        )
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
        "MS605 Megatron's --position-embedding-type sets 'learned_absolute', but alibi needs the value 'none': the ALiBi bias "
        "replaces position embeddings\n"
        "  where: Megatron's --position-embedding-type\n"
        "  fix: remove --position-embedding-type or alibi"
    )
    with pytest.raises(MindSpeedError) as error:
        planned("--features alibi --position-embedding-type rope")
    assert "MS304 alibi: the model uses rotary positions, but alibi replaces position embeddings" in str(error.value)
    assert "fix: remove --position-embedding-type" in str(error.value)
