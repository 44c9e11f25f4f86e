import json
import re
import time
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.cli.memory_measure import accurate
from mindspeed.memory_planner.plans import stages_of
from tests.cli.conftest import LAPTOP

SIZES = {
    "world-size": 16,
    "tp": 4,
    "num-layers": 16,
    "hidden-size": 4096,
    "ffn-hidden-size": 11264,
    "num-attention-heads": 32,
    "num-query-groups": 32,
    "num-experts": 0,
    "vocab-size": 32000,
    "seq-length": 4096,
    "micro-batch-size": 1,
    "global-batch-size": 64,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "dtype": "bf16",
}


@pytest.fixture
def planned(mindspeed):
    """The exit status and the JSON of ``mindspeed memory plan`` for a model of 16 layers."""

    def run(*arguments, **sizes):
        values = [f"--{name}={value}" for name, value in (SIZES | sizes).items()]
        switches = ("--no-gated-linear-unit", "--no-rotary")
        done = mindspeed("memory", "plan", *LAPTOP, *values, *switches, "--json", *arguments)
        return done.exit_code, json.loads(done.stdout)

    return run


def test_every_stage_has_rows_whose_sum_is_the_peak(planned):
    code, found = planned(pp=2)
    assert code == 0
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    for stage in found["stages"]:
        assert stage["peak"] == sum(row["bytes"] * row["live"] for row in stage["rows"])


def test_a_feature_needs_fewer_bytes(planned):
    (_, plain), (_, recomputed) = planned(), planned("norm-recompute")
    row = {"held": "recomputed", "by": "norm-recompute"}
    moved = [one for one in recomputed["stages"][0]["rows"] if row.items() <= one.items()]
    saved = plain["stages"][0]["peak"] - recomputed["stages"][0]["peak"]
    assert saved == sum(one["bytes"] for one in moved) == 16 * 2 * 4096 * (4096 * 2 + 4)


def test_a_model_without_a_number_of_experts_is_dense(mindspeed, planned):
    sizes = [f"--{name}={value}" for name, value in SIZES.items() if name != "num-experts"]
    done = mindspeed("memory", "plan", *LAPTOP, *sizes, "--no-gated-linear-unit", "--no-rotary", "--json")
    assert json.loads(done.stdout) == planned()[1]


def test_layers_with_experts_are_as_many_as_given(mindspeed):
    values = [f"--{name}={value}" for name, value in SIZES.items() if name != "num-experts"]
    words = ("memory", "plan", *LAPTOP, *values, "--tp=1", "--no-gated-linear-unit", "--rotary", "--num-experts=4")

    def peak(*more):
        return json.loads(mindspeed(*words, *more, "--json").stdout)["stages"][0]["peak"]

    dense = json.loads(mindspeed(*words[:-1], "--num-experts=0", "--json").stdout)["stages"][0]["peak"]
    assert dense == peak("--moe-layers=0") < peak("--moe-layers=1") < peak("--moe-layers=2") < peak("--moe-layers=16") == peak()
    mixed, plain = (mindspeed(*words, *more).stdout.splitlines() for more in (("--moe-layers=3",), ()))
    assert "of 16 layers the first 13 are counted as dense, the others as MoE layers" in mixed
    assert not any("counted as dense" in line for line in plain)
    refused = mindspeed(*words, "--moe-layers=17")
    assert refused.exit_code == 1
    assert (
        refused.stderr
        == "MS302 moe_layers is 17, but the model has 16 layers\n  fix: --moe-layers 16, or remove --moe-layers\n"
    )


def test_a_budget_that_fits_is_accepted_and_another_names_what_makes_it_fit(planned):
    assert planned("--budget-mib", 100_000)[0] == 0
    peak = planned()[1]["stages"][0]["peak"] / 2**20
    code, found = planned("--budget-mib", peak - 1)
    assert code == 1
    assert (found["fits"], len(found["cheapest"])) == (False, 1)
    code, found = planned("--budget-mib", 1)
    assert (code, found["cheapest"]) == (1, [])


def test_a_budget_is_a_number(mindspeed):
    done = mindspeed("memory", "plan", *LAPTOP, "--budget-mib", "nan")
    assert done.exit_code == 2
    assert "nan is not in the range x>0" in done.stderr


def test_sizes_that_are_not_known_are_one_problem(mindspeed):
    done = mindspeed("memory", "plan", *LAPTOP, "--world-size", 1)
    assert done.exit_code == 1
    message, fix = done.stderr.splitlines()
    assert message.startswith("MS307 memory cannot be estimated without num_layers, hidden_size, ffn_hidden_size, ")
    assert fix.startswith("  fix: --num-layers N --hidden-size N --ffn-hidden-size N ")
    assert "--normalization WORD --[no-]gated-linear-unit --[no-]rotary --dtype WORD" in fix
    assert sum(-(-len(line) // 80) for line in (message, fix)) <= 8


def test_eight_stages_are_one_screen_with_the_peak_first_and_a_bar_each(mindspeed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    values = [f"--{name}={value}" for name, value in (SIZES | {"world-size": 32, "pp": 8}).items()]
    done = mindspeed("memory", "plan", *LAPTOP, *values, "--no-gated-linear-unit", "--no-rotary")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("peak ")
    assert lines[0].endswith(" MiB on stage 0 of 8; values in MiB per rank")
    assert lines[1].split() == ["stage", "peak", "weights", "gradients", "optimizer", "activations"]
    bars = [line.count("#") for line in lines[2:10]]
    assert bars[0] == max(bars) > bars[6] > 0
    assert lines[10] == "largest on stage 0"
    whole = mindspeed("memory", "plan", *LAPTOP, *values, "--no-gated-linear-unit", "--no-rotary", "--all").stdout
    assert whole.count("attention: residual") == 8 + 1
    monkeypatch.setenv("COLUMNS", "20")
    assert "#" not in mindspeed("memory", "plan", *LAPTOP, *values, "--no-gated-linear-unit", "--no-rotary").stdout


def test_a_thousand_ranks_take_less_than_a_second(planned):
    planned()
    start = time.process_time()
    planned(**{"world-size": 1024, "tp": 8, "pp": 16})
    assert time.process_time() - start < 1


def test_a_plan_and_a_check_know_the_memory_of_each_stage(mindspeed):
    values = [f"--{name}={value}" for name, value in SIZES.items()] + ["--no-gated-linear-unit", "--no-rotary", "--pp=2"]
    planned = mindspeed("features", "plan", "norm-recompute", "--memory", *LAPTOP, *values, "--json")
    peaks = [stage["peak"] / 2**20 for stage in json.loads(planned.stdout)["memory"]]
    shown = mindspeed("features", "plan", "norm-recompute", "--memory", *LAPTOP, *values)
    assert f"stage 1: {peaks[1]:,.1f} MiB at the peak: weights " in shown.stdout
    assert mindspeed("features", "check", *LAPTOP, *values, f"--device-memory={max(peaks) * 2}").exit_code == 0
    refused = mindspeed("features", "check", "norm-recompute", *LAPTOP, *values, f"--device-memory={peaks[1]:.1f}")
    assert refused.exit_code == 1
    assert f"MS347 the peak of stage 0 is {peaks[0]:,.1f} MiB, but a device has {round(peaks[1], 1):,.1f} MiB" in refused.stderr


def test_latent_attention_needs_its_widths(mindspeed):
    values = [f"--{name}={value}" for name, value in SIZES.items()] + ["--no-gated-linear-unit", "--no-rotary"]
    latent = [*LAPTOP, *values, "--multi-latent-attention", "--qk-head-dim=8", "--qk-pos-emb-head-dim=4"]
    done = mindspeed("memory", "plan", *latent)
    assert done.exit_code == 1
    text = "MS307 memory cannot be estimated without kv_lora_rank, v_head_dim\n  fix: --kv-lora-rank N --v-head-dim N\n"
    assert done.stderr == text
    done = mindspeed("memory", "plan", *latent, "--kv-lora-rank=12", "--v-head-dim=10", "--all")
    assert "attention: latent vectors" in done.stdout


KEPT, PEAK = "activations of a micro-batch", "peak of a step"


@pytest.mark.parametrize(
    ("kept", "peak", "dry", "fine"),
    [
        ((100, 100), (100, 100), False, True),
        ((96, 100), (104, 100), False, True),
        ((103_932, 4_276_012), (696_828, 689_836), False, False),  # dense scores under ring attention, once
        ((100, 100), (106, 100), False, False),
        ((100, 100), (106, 100), True, True),
        ((100, 100), (89, 100), True, False),
        ((106, 100), (100, 100), True, False),
    ],
)
def test_a_prediction_that_is_off_by_more_than_its_tolerance_is_a_failure(kept, peak, dry, fine):
    prefix = "stage 0: " if dry else ""
    assert accurate({f"{prefix}{KEPT}": kept, f"{prefix}{PEAK}": peak}, dry) is fine


@pytest.mark.parametrize(("measured", "code"), [(1_000, 1), (None, 0)])
def test_measure_ends_with_1_where_a_prediction_is_off(mindspeed, monkeypatch, measured, code):
    def counted(self, plan, recipe, ranks):
        stages = stages_of(plan, registry.catalog(), recipe.shape.dropout > 0)
        most = max(stages, key=lambda stage: stage.activations)
        return [(measured or most.activations, most.peak)]

    monkeypatch.setattr("mindspeed.workbench.verification.pool.WorkerPool.measure", counted)
    done = mindspeed("memory", "measure", "norm-recompute", "--nproc", 1, "--platform", "cpu", "--json")
    assert (done.exit_code, json.loads(done.stdout)["accurate"]) == (code, not code)


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    [
        ("--kv-channels", 32),
        ("--num-experts", 4, "--moe-ffn-hidden-size", 256),
        ("--pp", 2, "--num-layers", 4, "--first-stage-layers", 1),
        ("--multi-latent-attention", "--kv-lora-rank", 64, "--qk-head-dim", 32, "--v-head-dim", 64),
    ],
)
def test_the_model_that_is_asked_for_is_measured(mindspeed, asked):
    done = mindspeed("memory", "measure", "rms-norm", *asked, "--dry-run", "--platform", "cpu", "--json")
    assert json.loads(done.stdout)["accurate"], done.stdout


def test_a_model_that_cannot_be_measured_is_refused(mindspeed):
    done = mindspeed("memory", "measure", "swiglu", "--low-precision", "--dry-run", "--platform", "cpu")
    assert done.stderr.startswith("MS301 low_precision is True, but mindspeed memory measure cannot build such a model")


@pytest.mark.long
def test_the_guide_shows_what_measure_prints_now(mindspeed):
    guide = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"```console\n\$ mindspeed (memory measure .*?)\n(.*?)```", guide, re.DOTALL)[0]
    assert mindspeed(*command.split()).output == shown
