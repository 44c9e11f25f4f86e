"""Old flags: each switches on its feature and says the new spelling, or says that the feature is not there yet."""

import argparse
from pathlib import Path

import pytest

from mindspeed.arguments import process_args
from mindspeed.compat.old_flags.flags import BY_FLAG, MEGATRON_VALUES, OLD_FLAGS, read_old_flags
from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.plugins.discovery import Catalog
from mindspeed.registry import catalog
from tools.docs.migration_guide import filled

ROOT = Path(__file__).resolve().parents[3]

TWO_FEATURES = Catalog(row for row in catalog().rows if row.name in ("rms-norm", "swiglu"))


def read(*argv, known=()):
    return read_old_flags(argv, known, TWO_FEATURES)


def test_a_flag_of_a_feature_that_exists_switches_it_on_and_is_taken_out():
    found = read("--lr", "1", "--use-fused-swiglu", "--use-fused-rmsnorm", "--seed", "-1")
    assert found.layer.features == ("swiglu", "rms-norm")
    assert found.layer.source == "old flag of MindSpeed"
    assert found.rest == ("--lr", "1", "--seed", "-1")
    assert found.notes == (
        "--use-fused-swiglu switches on swiglu; the new spelling is --features swiglu",
        "--use-fused-rmsnorm switches on rms-norm; the new spelling is --features rms-norm",
    )
    assert found.problems == ()


def test_empty_layers_are_no_layers_of_the_model():
    flags = ("--num-layers", "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage")
    argv = ["--num-layers=8", flags[1], "2", flags[2], "2", "--noop-layers", "0,7", "--lr", "1"]
    found = read_old_flags(argv, flags, catalog())
    assert found.layer.settings == {"noop-layers": {"layers": "0,7"}}
    assert found.rest == (flags[1], "2", "--lr", "1", "--num-layers", "6", "--num-virtual-stages-per-pipeline-rank", "2")
    assert found.notes[1:] == (
        "--num-layers 8 includes the no-op positions 0,7 of --noop-layers: the model has 6 layers",
        "--num-layers-per-virtual-pipeline-stage 2 includes them too: it is --num-virtual-stages-per-pipeline-rank 2",
    )


@pytest.mark.parametrize(("places", "group"), [("7,15", 1), ("4,5,6,7", 4), ("6,7,14,15", 2)])
def test_groups_of_recomputation_fill_chunks_without_their_empty_layers(places: str, group: int):
    flags = ("--num-layers", "--pipeline-model-parallel-size", "--recompute-method", "--recompute-num-layers")
    argv = ["--num-layers", "16", flags[1], "2", flags[2], "uniform", flags[3], "4", "--noop-layers", places]
    found = read_old_flags(argv, flags, catalog())
    assert found.rest[found.rest.index(flags[3]) + 1] == str(group)
    assert [problem.message for problem in found.left_out] == [
        f"--recompute-num-layers 4 is {group}: without the no-op positions {places} not every model chunk is a multiple of 4 "
        "layers. The same layers are recomputed, in smaller groups, which keep more inputs"
        for _ in range(group != 4)
    ]


def test_deterministic_training_leaves_out_the_attention_of_legacy_models():
    known = frozenset(surface_or_nearest("0.16.1").by_option)
    for flag in ("--npu-deterministic", "--use-deter-comp"):
        found = read_old_flags([flag, "--use-flash-attn", "--lr", "1"], known, catalog())
        assert found.rest == ("--lr", "1")
        note = "--use-flash-attn is not needed: only Megatron's legacy models read it, and deterministic mode refuses it"
        assert note in found.notes
    kept = ["--npu-deterministic", "--use-flash-attn", "--use-legacy-models"]
    assert read_old_flags(kept, known, catalog()).rest == tuple(kept[1:])
    assert read_old_flags(kept[1:2], known, catalog()).rest == ("--use-flash-attn",)


def test_a_flag_of_a_feature_that_is_not_there_yet_is_a_problem_that_says_so():
    found = read("--moe-zero-memory", "level0")
    assert [(problem.code, problem.message) for problem in found.problems] == [
        (
            "MS111",
            "--moe-zero-memory maps to the feature moe-zero-memory, which this version of mindspeed does not have yet",
        ),
    ]
    assert found.rest == ()
    assert found.problems[0].fix_text == "remove --moe-zero-memory"


@pytest.mark.parametrize(
    ("value", "feature"),
    [
        ("megatron_cp_algo", "ring-attention"),
        ("ulysses_cp_algo", "ulysses-attention"),
        ("hybrid_cp_algo", "hybrid-attention"),
        ("adaptive_cp_algo", "adaptive-cp"),
        ("hybrid_adaptive_cp_algo", "adaptive-cp"),
        ("kvallgather_cp_algo", "kv-allgather-cp"),
    ],
)
def test_the_value_of_context_parallel_algo_chooses_the_feature(value, feature):
    assert BY_FLAG["--context-parallel-algo"].feature_for(value, {}) == feature


def test_the_hybrid_of_adaptive_attention_without_its_degree_is_no_plain_one():
    algorithm = ["--context-parallel-algo", "hybrid_adaptive_cp_algo"]
    (problem,) = read_old_flags(algorithm, (), catalog()).problems
    assert (problem.code, problem.message, problem.fix_text) == (
        "MS301",
        "--context-parallel-algo hybrid_adaptive_cp_algo needs --ulysses-degree-in-cp",
        "set --ulysses-degree-in-cp to 2 or more",
    )
    assert read_old_flags([*algorithm, "--ulysses-degree-in-cp", "2"], (), catalog()).problems == ()


@pytest.mark.parametrize(
    ("before", "feature"), [("alltoall", "moe-alltoall-dispatcher"), ("allgather", "moe-allgather-dispatcher")]
)
def test_the_dispatcher_chooses_what_asynchronous_permutation_means_and_stays_on_the_command_line(before, feature):
    found = read("--moe-permutation-async-comm", "--moe-token-dispatcher-type", before)
    assert [problem.features for problem in found.problems] == [(feature,)]
    assert found.rest == ("--moe-token-dispatcher-type", before)


@pytest.mark.parametrize(
    "argv",
    [
        ["--moe-zero-memory", "disable"],
        ["--ampipe-degree=1"],
        ["--adaptive-recompute-device-size", "-1"],
        ["--moe-model-type", "megatron_moe"],
    ],
)
def test_the_default_of_a_flag_leaves_its_feature_off(argv):
    found = read(*argv)
    assert (found.layer.features, found.problems, found.rest) == ((), (), ())


def test_wrong_and_missing_values_are_problems_all_at_once():
    found = read("--coc-parallel-num", "two", "--context-parallel-algo", "ring", "--tp-x")
    assert [problem.message for problem in found.problems] == [
        "--coc-parallel-num is 'two', not a whole number",
        "--context-parallel-algo is 'ring'",
        "--tp-x has no value",
    ]
    assert found.problems[1].fix_text.startswith("use one of megatron_cp_algo, ulysses_cp_algo")


def test_a_flag_that_the_other_parser_has_is_left_to_it():
    found = read("--use-fused-swiglu", known={"--use-fused-swiglu"})
    assert (found.rest, found.layer.features) == (("--use-fused-swiglu",), ())


def test_of_megatrons_flags_only_mindspeeds_extra_value_is_taken():
    known = {"--position-embedding-type"}
    assert read("--position-embedding-type", "rope", known=known).rest == ("--position-embedding-type", "rope")
    (problem,) = read("--position-embedding-type", "alibi", known=known).problems
    assert problem.features == ("alibi",)


def test_after_two_dashes_nothing_is_read():
    assert read("a", "--", "--use-fused-swiglu").rest == ("a", "--", "--use-fused-swiglu")


@pytest.mark.parametrize("version", recorded_releases("command_line"))
def test_no_flag_of_megatron_is_registered_again(version):
    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="error")
    theirs = [option for argument in surface(version).arguments for option in argument.options]
    for option in theirs:
        parser.add_argument(option, dest=f"theirs_{option}")
    process_args(parser)  # raises on a conflict
    for option in set(theirs) & BY_FLAG.keys():
        assert parser._option_string_actions[option].dest == f"theirs_{option}"
    assert set(theirs) >= MEGATRON_VALUES


def test_registering_the_arguments_twice_is_harmless_and_the_help_names_the_new_spelling():
    parser = process_args(process_args(argparse.ArgumentParser(allow_abbrev=False)))
    assert parser.parse_args([]).use_fused_rmsnorm is False
    assert parser.parse_args([]).optimization_level == 2
    assert "old spelling of --features rms-norm" in parser.format_help()


@pytest.mark.parametrize("old", [old for old in OLD_FLAGS if any(name in catalog().usable for name in old.features)])
def test_a_setting_that_a_flag_gives_exists_once_its_feature_does(old):
    for name in old.features:
        if name in catalog().usable and old.setting:
            assert old.setting in catalog().models[name].model_fields


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (
            ["--attention-mask-type", "general"],
            "--attention-mask-type is not needed: context parallelism uses the attention mask of the model, and a causal "
            "mask if the model has none",
        ),
        (
            ["--attention-mask-on-cpu"],
            (
                "--attention-mask-on-cpu is not needed: causal masks are never created, and each rank creates only its part of "
                "any other mask"
            ),
        ),
        (
            ["--megatron-cp-in-bnsd"],
            (
                "--megatron-cp-in-bnsd is not needed: the attention operator reads tensors in Megatron's layout without "
                "transposing them"
            ),
        ),
    ],
)
def test_a_flag_that_asks_for_what_is_so_anyway_is_taken_and_says_why(argv, note):
    found = read_old_flags([*argv, "--lr", "1"], (), catalog())
    assert (found.problems, found.rest, found.notes, found.layer.features) == ((), ("--lr", "1"), (note,), ())


@pytest.mark.parametrize(
    ("algorithm", "feature"),
    [
        ([], "ring-attention"),
        (["--context-parallel-algo", "megatron_cp_algo"], "ring-attention"),
        (["--context-parallel-algo", "ulysses_cp_algo"], "ulysses-attention"),
        (["--context-parallel-algo", "hybrid_cp_algo"], "hybrid-attention"),
    ],
)
def test_the_policy_of_the_cache_is_a_setting_of_the_algorithm(algorithm, feature):
    policy = ["--context-parallel-kv-cache-policy", "half", "--context-parallel-cache-interval", "1"]
    found = read_old_flags([*policy, *algorithm], (), catalog())
    assert found.problems == ()
    assert found.layer.settings == {feature: {"keep": "half", "interval": 1}}
    assert found.layer.features == ((feature,) if algorithm else ())


def test_a_flag_that_means_nothing_with_the_algorithm_says_so():
    argv = ["--context-parallel-algo", "kvallgather_cp_algo", "--context-parallel-kv-cache-policy", "half"]
    found = read_old_flags([*argv, "--cp-window-size", "2"], (), catalog())
    assert (found.problems, found.layer.settings) == ((), {})
    assert found.notes[1:] == (
        "--context-parallel-kv-cache-policy has no effect with this --context-parallel-algo",
        "--cp-window-size has no effect with this --context-parallel-algo",
    )


def test_the_tables_of_the_guide_are_made_from_the_code():
    page = filled((ROOT / "docs" / "moving-from-mindspeed.md").read_text(encoding="utf-8"), catalog())
    assert '| <a id="use-fused-rmsnorm"></a>`--use-fused-rmsnorm` | rms-norm | `--features rms-norm` |\n' in page
    assert "*A table" not in page
