"""What MindSpeed's flags make of Megatron's arguments of recomputation: no count changes, and each change has a note."""

from typing import Any

import pytest

from mindspeed.compat.old_flags.flags import read_old_flags
from mindspeed.megatron_lm.dialects import Translation
from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.registry import catalog

KNOWN = frozenset(surface_or_nearest("0.16.1").by_option)
CHUNKS = "--num-layers 16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
BLOCK = "--recompute-granularity full --recompute-method block"
PER_RANK = "--enable-recompute-layers-per-pp-rank"
SWAP = "swap-attention"


def read(line: str) -> Translation:
    translation = read_old_flags(line.split(), KNOWN, catalog())
    assert translation.problems == ()
    return translation


@pytest.mark.parametrize(
    ("line", "settings", "note"),
    [
        ("--recompute-num-layers 1", {"mlp_layers": 1}, "the MLPs of 1 layers of each model chunk are recomputed"),
        (
            f"--recompute-num-layers 3 {PER_RANK}",
            {"mlp_layers": 3, "per_rank": True},
            "the MLPs of 3 layers of each pipeline rank are recomputed",
        ),
        (
            f"{BLOCK} --recompute-num-layers 1",
            {"attention_layers": 1, "mlp_layers": 1},
            "the MLPs of 1 layers of each model chunk are recomputed",
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"mlp_layers": 2},
            "the MLPs of 2 layers of each model chunk are recomputed",
        ),
        (f"--recompute-num-layers 0 {PER_RANK}", {}, "no MLP is recomputed"),
    ],
)
def test_offloaded_attention_replaces_full_recomputation(line: str, settings: dict[str, Any], note: str) -> None:
    read_line = read(f"{CHUNKS} --swap-attention {line}")
    assert read_line.layer.settings.get(SWAP, {}) == settings
    assert read_line.rest == tuple(CHUNKS.split())
    flags = ", ".join(word for word in line.split() if word.startswith("--") and word != PER_RANK)
    text = f"--swap-attention replaces {flags}: attention is offloaded, and {note} instead of whole layers"
    assert text in read_line.notes


@pytest.mark.parametrize("line", ["", "--recompute-granularity selective"])
def test_other_recomputation_stays_beside_offloaded_attention(line: str) -> None:
    read_line = read(f"{CHUNKS} --swap-attention {line}")
    assert read_line.layer.settings == {}
    assert read_line.rest == (*CHUNKS.split(), *line.split())


def test_offloaded_attention_recomputes_nothing_in_advance() -> None:
    read_line = read(f"{CHUNKS} --swap-attention --recompute-in-advance --recompute-num-layers 2")
    assert read_line.layer.features == (SWAP,)
    assert [problem.message for problem in read_line.left_out] == [
        "--recompute-in-advance is skipped: with --swap-attention, the MLPs are recomputed when backward reaches them"
    ]


@pytest.mark.parametrize(
    ("count", "per_rank", "rest"),
    [(3, "", "3"), (3, PER_RANK, "3"), (8, PER_RANK, "2")],
)
def test_layers_of_a_rank_are_not_rounded_up(count: int, per_rank: str, rest: str) -> None:
    read_line = read(f"{CHUNKS} {BLOCK} --recompute-num-layers {count} {per_rank}")
    assert read_line.rest == (*CHUNKS.split(), *BLOCK.split(), "--recompute-num-layers", rest)
    counts = per_rank and count < 8
    assert read_line.layer.settings == ({"recompute": {"per_rank": True}} if counts else {})
    assert bool(read_line.notes) == bool(per_rank)


@pytest.mark.parametrize(("count", "per_rank", "every"), [(1, "", 2), (3, PER_RANK, 8)])
def test_fewer_layers_than_all_are_recomputed_without_the_feature_for_all(count: int, per_rank: str, every: int) -> None:
    read_line = read(f"{CHUNKS} --recompute-in-advance {BLOCK} --recompute-num-layers {count} {per_rank}")
    assert read_line.layer.features == ()
    assert read_line.rest == (*CHUNKS.split(), *BLOCK.split(), "--recompute-num-layers", str(count))
    assert [problem.message for problem in read_line.left_out] == [
        f"--recompute-in-advance is skipped: {count} of {every} layers are recomputed, but mindspeed recomputes in advance "
        "only all layers; these are recomputed when backward reaches them"
    ]


def test_a_count_without_granularity_recomputes_no_layer_in_advance() -> None:
    read_line = read(f"{CHUNKS} --recompute-in-advance --recompute-num-layers 2")
    assert read_line.layer.features == ()
    text = "--recompute-in-advance has no effect without --recompute-granularity full, because no layer is recomputed"
    assert text in read_line.notes


def test_all_layers_are_recomputed_in_advance() -> None:
    read_line = read(f"{CHUNKS} --recompute-in-advance {BLOCK} --recompute-num-layers 8 {PER_RANK}")
    assert read_line.layer.features == ("recompute-in-advance",)
    assert read_line.rest == tuple(CHUNKS.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--recompute-granularity selective --recompute-modules mla_up_proj"),
        ("--recompute-granularity selective", "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"),
        ("--recompute-activations", "--recompute-activations --recompute-modules core_attn mla_up_proj"),
        (
            "--recompute-granularity selective --recompute-modules moe",
            "--recompute-granularity selective --recompute-modules moe mla_up_proj",
        ),
        (
            "--recompute-granularity selective --recompute-modules mla_up_proj",
            "--recompute-granularity selective --recompute-modules mla_up_proj",
        ),
        ("--recompute-granularity full --recompute-method uniform", "--recompute-granularity full --recompute-method uniform"),
    ],
)
def test_recomputed_up_projections_are_a_module_of_selective_recomputation(line: str, words: str) -> None:
    made = read(f"--recompute-mla-up-proj {line}")
    assert (" ".join(made.rest), made.left_out) == (words, ())
    assert len(made.notes) == 1


def test_up_projections_of_layers_that_a_block_leaves_are_not_recomputed() -> None:
    made = read(f"--recompute-mla-up-proj {BLOCK}")
    assert " ".join(made.rest) == BLOCK
    assert [str(problem.message) for problem in made.left_out] == [
        "--recompute-mla-up-proj is skipped: Megatron recomputes up-projections only with --recompute-granularity selective, "
        "but this command recomputes layers as a whole"
    ]


@pytest.mark.parametrize(("tp", "overlaps"), [(1, False), (2, True)])
def test_split_projections_of_latent_attention_are_a_feature(tp: int, overlaps: bool) -> None:
    made = read(f"--mla-mm-split --mla-up-proj-tp-overlap --tensor-model-parallel-size {tp}")
    assert made.layer.features == ("mla-split",)
    skipped = "--mla-up-proj-tp-overlap has no effect with --tensor-model-parallel-size 1"
    assert (skipped in made.notes) != overlaps


def test_an_offloaded_output_of_core_attention_is_a_setting_of_its_feature() -> None:
    made = read("--mla-swap-core-attn-out --schedules-method dualpipev --pipeline-model-parallel-size 2")
    assert "mla-split" in made.layer.features
    assert made.layer.settings["mla-split"] == {"offload_output": True}


@pytest.mark.parametrize("variant", ["--enable-dsa-indexer", "--experimental-attention-variant dsa"])
def test_absorbed_projections_of_sparse_attention_are_a_setting(variant: str) -> None:
    made = read(f"--enable-mla-absorb {variant}")
    assert made.layer.features == ("mla-split",)
    assert made.layer.settings["mla-split"] == {"absorb": True}
    assert made.left_out == ()


def test_projections_of_other_attention_are_not_absorbed() -> None:
    made = read("--enable-mla-absorb --multi-latent-attention")
    assert made.layer.features == ()
    assert [str(problem.message) for problem in made.left_out] == [
        "--enable-mla-absorb is skipped: MindSpeed-LLM absorbs up-projections only in sparse attention"
    ]


@pytest.mark.parametrize(
    ("given", "modules", "note"),
    [
        ("input_norm,self_attention,post_attention_norm", None, "input_norm,post_attention_norm has no effect"),
        ("self_attention", None, ""),
        ("core_attention, linear_proj", ("core_attention", "linear_proj"), ""),
        ("input_norm", None, "input_norm has no effect"),
    ],
)
def test_offloaded_modules_are_parts_of_attention(given: str, modules: tuple[str, ...] | None, note: str) -> None:
    translation = read_old_flags(["--swap-attention", "--swap-modules", given], KNOWN, catalog())
    assert translation.problems == ()
    assert translation.layer.settings.get(SWAP, {}) == ({} if modules is None else {"modules": modules})
    assert any(note in text for text in translation.notes)


def test_modules_outside_of_attention_are_refused() -> None:
    (problem,) = read_old_flags(["--swap-attention", "--swap-modules", "mlp,self_attention"], KNOWN, catalog()).problems
    assert problem.message == "--swap-modules names mlp, but mindspeed offloads only parts of attention"


def test_offloaded_modules_stay_beside_recomputed_mlps() -> None:
    settings = read(f"{CHUNKS} --swap-attention --swap-modules linear_proj --recompute-num-layers 1").layer.settings
    assert settings == {SWAP: {"mlp_layers": 1, "modules": ("linear_proj",)}}


@pytest.mark.parametrize(
    ("flag", "feature"),
    [("--recompute-norm", "norm-recompute"), ("--recompute-activation-function", "activation-recompute")],
)
def test_layers_of_a_rank_are_dealt_out_to_its_chunks(flag: str, feature: str) -> None:
    four = read(f"{CHUNKS} {flag} {flag}-num-layers 4 {PER_RANK}")
    assert four.layer.settings == {feature: {"num_layers": 1}}
    assert f"{PER_RANK}: {flag}-num-layers 4 of each pipeline rank is 1 of each of its 4 model chunks" in four.notes
    assert not any("is not needed" in note for note in four.notes)
    five = read(f"{CHUNKS} {flag} {flag}-num-layers 5 {PER_RANK}")
    assert five.layer.settings == {feature: {"num_layers": 2}}
    assert [problem.fix_text for problem in five.left_out] == [f"{flag}-num-layers 8"]
    every = read(f"{CHUNKS} {flag} {flag}-num-layers 12 {PER_RANK}")
    assert (every.layer.settings, every.layer.features) == ({}, (feature,))
    assert read(f"{CHUNKS} {flag} {flag}-num-layers 2").layer.settings == {feature: {"num_layers": 2}}


@pytest.mark.parametrize("flag", ["--recompute-norm", "--recompute-activation-function"])
def test_no_layers_switch_the_feature_off(flag: str) -> None:
    none = read(f"{CHUNKS} {flag} {flag}-num-layers 0")
    assert (none.layer.features, none.layer.settings) == ((), {})
    assert none.notes == (f"{flag}-num-layers 0 recomputes nothing, so that {flag} has no effect",)
