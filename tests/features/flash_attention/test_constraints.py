import pytest

from mindspeed.megatron_lm.old_flags.flags import read_old_flags
from mindspeed.ops.variants import has_variant
from tests.features.resolving import CATALOG, active, ask, refusals


def test_level_one_switches_it_on_where_it_has_a_variant():
    assert "flash-attention" in active(world_size=1, has_variant=has_variant)
    assert "flash-attention" not in active(world_size=1, has_variant=lambda op, platform: False)


def test_old_flags_give_it_and_its_settings():
    old = read_old_flags(
        ["--use-fusion-attn-v2", "--sparse-mode", "4", "--pre-tockens", "128", "--next-tockens", "0", "--lr", "1"],
        {"--lr"},
        CATALOG,
    )
    assert old.problems == ()
    assert old.rest == ("--lr", "1")
    assert old.layer.features == ("flash-attention",)
    assert old.layer.settings == {"flash-attention": {"sparse_mode": 4, "pre_tokens": 128, "next_tokens": 0}}


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (
            {"softmax_type": "learnable"},
            "softmax_type is learnable, and the operator computes the vanilla softmax | --softmax-type vanilla, ",
        ),
        (
            {"qk_clip": True},
            "qk_clip needs the largest attention logits, which the operator does not return | --no-qk-clip, ",
        ),
        (
            {"logged_attention_logits": True},
            "log_max_attention_logit needs the largest attention logits, which the operator does not return "
            "| --no-logged-attention-logits, ",
        ),
        (
            {"transformer_engine_layers": True},
            "layers are Transformer Engine's, and flash-attention works on Megatron's local layers "
            "| --no-transformer-engine-layers, ",
        ),
    ],
)
def test_what_the_operator_does_not_compute_is_refused_and_left_out_of_level_1(world, text):
    assert refusals("flash-attention", world_size=1, **world) == [f"MS304 flash-attention: {text}or remove flash-attention"]
    assert "flash-attention" not in active(world_size=1, has_variant=has_variant, **world)


def test_context_parallelism_leaves_it_nothing_to_do():
    notes = [row.text for row in ask("flash-attention", "ring-attention", cp=2).rows if row.kind == "note"]
    text = "cp is 2, and the algorithm of context parallelism has a core attention that calls the same operator"
    assert text in notes
