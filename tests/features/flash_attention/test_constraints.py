from mindspeed.compat.old_flags.flags import read_old_flags
from mindspeed.ops.variants import has_variant
from tests.features.resolving import CATALOG, active, ask, refusals


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


def test_a_softmax_that_the_operator_does_not_compute_is_refused_and_left_out_of_level_1():
    assert refusals("flash-attention", world_size=1, softmax_type="learnable") == [
        (
            "MS304 flash-attention: softmax_type is learnable, but the operator computes only the vanilla softmax | "
            "--softmax-type vanilla, or remove flash-attention"
        )
    ]
    assert "flash-attention" not in active(world_size=1, has_variant=has_variant, softmax_type="learnable")


def test_context_parallelism_leaves_it_nothing_to_do():
    notes = [row.text for row in ask("flash-attention", "ring-attention", cp=2).rows if row.kind == "note"]
    text = "cp is 2, and the context-parallel algorithm already calls the same attention operator"
    assert text in notes
