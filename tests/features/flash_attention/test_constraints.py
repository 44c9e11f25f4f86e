from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.features.flash_attention.feature import FlashAttention, FlashAttentionArgs
from mindspeed.features.flash_attention.layers import misfits
from mindspeed.megatron_lm.old_flags.flags import read_old_flags
from mindspeed.ops.variants import has_variant
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, active, refusals


def test_level_one_switches_it_on_where_it_has_a_variant():
    assert "flash-attention" in active(world_size=1, has_variant=has_variant)
    assert "flash-attention" not in active(world_size=1, has_variant=lambda op, platform: False)


@pytest.mark.parametrize("mode", [5, 6, 9])
def test_modes_that_need_what_megatron_does_not_say_are_refused(mode):
    (problem,) = refusals("flash-attention", settings={"flash-attention": {"sparse_mode": mode}}, world_size=1)
    assert problem.startswith("MS301 flash-attention.sparse_mode")
    assert "0, 1, 2, 3, 4, 7 or 8" in problem


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


def test_a_softmax_with_an_offset_and_clipped_logits_are_refused_if_the_feature_is_requested_and_else_stay():
    assert misfits(SimpleNamespace(softmax_type="vanilla", qk_clip=False)) == []
    assert misfits(SimpleNamespace()) == []  # before Megatron 0.15
    unfit = SimpleNamespace(softmax_type="learnable", qk_clip=True, log_max_attention_logit=True)
    feature = FlashAttention(FlashAttentionArgs(), World({}))
    with pytest.raises(MindSpeedError) as error:
        feature.layer_spec(None, unfit)
    assert str(error.value) == (
        "MS304 flash-attention: softmax_type is not vanilla and qk_clip is set and log_max_attention_logit is set "
        "in a model that is being built\n  fix: remove flash-attention"
    )
    feature.requested = False
    spec = object()
    assert feature.layer_spec(spec, unfit) is spec
