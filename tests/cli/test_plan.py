import json

import pytest

from mindspeed.engine.planning.plan import plan_from_json
from tests.cli.conftest import LAPTOP


@pytest.fixture
def sections(mindspeed):
    """The whole printed plan: section titles with their lines."""

    def run(*arguments):
        done = mindspeed("features", "plan", "--all", *LAPTOP, *arguments)
        assert (done.exit_code, done.stderr) == (0, "")
        found: dict[str, list[str]] = {}
        title = ""
        for line in done.stdout.splitlines():
            if line.startswith("  "):
                found[title].append(line[2:])
            else:
                title = line
                found[title] = []
        return found

    return run


@pytest.mark.guards(43)
def test_every_feature_says_why_and_every_setting_where_from(sections, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("features: [sequence-parallel]\nworld: {tp: 4}\n")
    found = sections("-f", job, "--tp", 2, "--world-size", 2, "--optimization-level", 0)
    assert found["features, in activation order"] == [
        "tensor-parallel  (mindspeed 0.2.0, level 0)",
        "  because  the tensor-parallel size is 2",
        "  setting  tensor-parallel.size = 2  (command line, overrode job file: 4)",
        "sequence-parallel  (mindspeed 0.2.0, level 0)",
        "  because  requested",
    ]
    assert found["for"][1] == "world_size 2, tp 2, pp 1, vpp 1, cp 1, ep 1, sequence_parallel True"
    assert (
        "tensor_model_parallel_size = 2  tensor-parallel: tensor-parallel.size sets the number of ranks that "
        "split a layer" in found["Megatron arguments"]
    )
    assert len(found["digest"][0]) == 32


def test_a_patch_says_what_who_and_why(sections):
    lines = sections("swiglu", "--activation", "silu", "--gated-linear-unit", "--optimization-level", 2)["patches"]
    start = lines.index("swiglu: computes SwiGLU of an MLP by the operator mindspeed::swiglu")
    assert lines[start : start + 4] == [
        "swiglu: computes SwiGLU of an MLP by the operator mindspeed::swiglu",
        "  wrap megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl",
        "swiglu: computes SwiGLU of an expert by the operator mindspeed::swiglu, and multiplies it by the routing "
        "probability of each token",
        "  wrap megatron.core.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl",
    ]


def test_the_base_plan_is_counted_by_reason_unless_its_targets_are_asked_for(sections):
    found = sections()
    counted = found["patches of the base plan"]
    (line,) = [line for line in counted if line.startswith("cpu-platform: replaces CUDA streams:")]
    assert (
        line == "cpu-platform: replaces CUDA streams: CPU work runs in program order, so every stream is the current one  (4)"
    )
    listed = sections("--base")["patches of the base plan"]
    assert listed[listed.index(line.removesuffix("  (4)")) + 1] == "  replace torch.cuda:current_stream"
    assert sum(int(line.rsplit("(", 1)[1][:-1]) for line in counted) == sum(line.startswith("  ") for line in listed)


def test_what_level_one_leaves_out_has_its_reason(sections):
    found = sections("--normalization", "LayerNorm", "--optimization-level", 1, "--without", "swiglu")
    assert "swiglu: removed by --without" in found["left out"]
    assert any(line.startswith("rms-norm: ") for line in found["left out"])


def test_the_json_plan_can_be_read_back(mindspeed):
    done = mindspeed("features", "plan", *LAPTOP, "--tp", 2, "--world-size", 2, "--json")
    data = json.loads(done.stdout)
    assert plan_from_json(data["plan"]).digest == data["plan"]["digest"]


def test_environment_variables_stand_between_job_file_and_command_line(sections, tmp_path, monkeypatch):
    job = tmp_path / "job.yaml"
    job.write_text("settings: {recompute: {granularity: full, method: uniform, num_layers: 1}}\n")
    monkeypatch.setenv("MINDSPEED_FEATURES", "recompute")
    monkeypatch.setenv("MINDSPEED_SET", "recompute.granularity=selective")
    monkeypatch.setenv("MINDSPEED_SET", "recompute.num_layers=2")
    found = sections("-f", job, "--set", "recompute.num_layers=4", "--optimization-level", 0)
    assert (
        "  setting  recompute.num_layers = 4  (command line, overrode job file: 1, overrode environment variable: 2)"
        in found["features, in activation order"]
    )


def test_level_0_without_features_is_the_platform_alone_on_any_number_of_ranks(mindspeed):
    for ranks in (1, 2, 6):
        done = mindspeed("features", "plan", *LAPTOP, "--optimization-level", 0, "--world-size", ranks, "--json")
        plan = json.loads(done.stdout)["plan"]
        assert (plan["features"], plan["rows"]) == ([], []), ranks


def test_level_0_with_a_batch_still_checks_its_share_per_replica(mindspeed):
    sizes = ("--world-size", 2, "--global-batch-size", 3, "--micro-batch-size", 1)
    done = mindspeed("features", "plan", *LAPTOP, "--optimization-level", 0, *sizes)
    assert done.stderr.splitlines()[0].startswith("MS304 data-parallel: global batch size 3 is not divisible by")


DENSE = (
    *(
        "--num-layers",
        16,
        "--hidden-size",
        4096,
        "--ffn-hidden-size",
        11264,
        "--num-attention-heads",
        32,
        "--vocab-size",
        32000,
    ),
    *("--num-query-groups", 8, "--seq-length", 4096, "--micro-batch-size", 1, "--global-batch-size", 64, "--dtype", "bf16"),
    *("--normalization", "RMSNorm", "--gated-linear-unit", "--activation", "silu", "--rotary", "--num-experts", 0),
)
FOUR = ("ring-attention", "nano-pipe", "swap-optimizer", "norm-recompute")


@pytest.fixture
def screen(mindspeed, monkeypatch):
    """The lines of one screen, for a number of columns."""

    def run(columns, *arguments):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = mindspeed("features", "plan", *LAPTOP, *arguments)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


def test_four_requested_features_are_one_screen(screen):
    for sizes in (DENSE, ()):
        lines = screen(80, *FOUR, *sizes, "--world-size", 16, "--tp", 2, "--cp", 2, "--pp", 2)
        assert len(lines) <= 45
        assert max(map(len, lines)) <= 80
        assert {"for", "features, in activation order", "Megatron arguments", "left out"} <= {*lines}


def test_the_screen_shows_why_and_what_is_no_default_and_adds_the_rest_to_counts(screen):
    lines = screen(80, "swiglu", "--set", "profiler.ranks=[0]", "profiler", *DENSE, "--tp", 2)
    features = lines[lines.index("features, in activation order") + 1 : lines.index("added by optimization level 1")]
    assert "  profiler         requested; ranks = [0] (command line)" in features
    assert "  tensor-parallel  tp is 2; size = 2 (command line)" in features
    assert lines[lines.index("added by optimization level 1") + 1].startswith("  flash-attention, ")
    (counts,) = [line for line in lines if " by the base plan; " in line]
    assert "patches by " in counts
    assert lines[-1] == "--all shows patches, notes and the base plan; --why NAME explains one feature"
    assert not [line for line in lines if "megatron.core" in line]


def test_what_depends_on_unknown_sizes_is_one_line_for_all_features_with_the_same_reason(screen):
    lines = screen(80, "--tp", 1)
    (place,) = [number for number, line in enumerate(lines) if line.startswith("  grouped-matmul-add, ")]
    assert lines[place : place + 2] == [
        "  grouped-matmul-add, moe-grouped-gemm, moe-token-permute: it depends on",
        "    --num-experts, which is not set",
    ]


def test_what_is_not_checked_names_every_option_that_decides_it_within_80_columns(screen):
    lines = screen(80, "swap-attention", "--tp", 2)
    at = lines.index("not checked")
    assert lines[at + 1 : at + 4] == [
        "  tensor-parallel: give --num-experts, --num-attention-heads,",
        "    --num-query-groups, --ffn-hidden-size, --vocab-size",
        "  swap-attention: give --num-layers",
    ]


def test_why_explains_one_feature_as_features_explain_does(mindspeed):
    for name in ("sequence_parallel", "swiglu"):
        job = ("sequence-parallel", "--tp", 2, "--world-size", 2, "--without", "swiglu", *LAPTOP)
        done = mindspeed("features", "plan", *job, "--why", name)
        explained = mindspeed("features", "explain", name, *job[1:], "--features", "sequence-parallel")
        assert done.exit_code == explained.exit_code == 0
        assert done.stdout == explained.stdout
        assert done.stdout.splitlines()[0].startswith(f"{name.replace('_', '-')} is")


def test_twenty_columns_are_readable(screen):
    lines = screen(20, "swiglu")
    assert [line for line in lines if "..." in line] == []
    assert "    requested" in lines
    unbroken = [line.strip() for line in lines if len(line) > 20]
    assert all(" " not in word or " = " in word or word.startswith("digest ") for word in unbroken), unbroken
