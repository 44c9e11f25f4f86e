"""Bad input, as the command line tells it: whole texts, exit status, everything at once."""

import json
import shlex

import pytest

from tests.cli.conftest import LAPTOP


@pytest.fixture
def check(mindspeed):
    """What ``features check`` prints on standard error, after it failed with status 1 and printed nothing else."""

    def run(*arguments, status=1):
        done = mindspeed("features", "check", *LAPTOP, *arguments)
        assert (done.exit_code, done.stdout) == (status, ""), done.output
        return done.stderr

    return run


def test_a_valid_request_names_its_features_and_the_digest(mindspeed):
    done = mindspeed("features", "check", *LAPTOP, "tensor-parallel", "--tp", 2, "--world-size", 2, "--optimization-level", 0)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("no problems: tensor-parallel; plan ")


def test_an_unknown_feature_gets_near_names(check):
    assert check("swigl") == ("MS201 the feature 'swigl' does not exist\n  where: command line\n  fix: did you mean swiglu?\n")


def test_a_name_like_no_other_is_sent_to_the_list(check):
    assert check("zzz") == (
        "MS201 the feature 'zzz' does not exist\n  where: command line\n"
        "  fix: mindspeed features list shows every name, or remove zzz\n"
    )


def test_an_unknown_setting_gets_near_names(check):
    assert check("tensor-parallel", "--set", "tensor-parallel.sise=2") == (
        "MS301 tensor-parallel has no setting 'sise'\n  where: command line\n  fix: did you mean tensor-parallel.size?\n"
    )


def test_an_ill_typed_setting_gets_a_line_that_is_accepted(check):
    assert check("tensor-parallel", "--set", "tensor-parallel.size=many") == (
        "MS301 tensor-parallel.size is 'many': input should be a valid integer, unable to parse string as an integer\n"
        "  where: command line\n"
        "  fix: --set tensor-parallel.size=1 (Number of ranks over which the weights of a layer are split (tensor-parallel "
        "size))\n"
    )


def test_a_setting_without_a_field_is_a_problem(check):
    assert check("--set", "size=2") == (
        "MS301 'size=2' does not have the form feature.field=value\n  where: --set\n  fix: --set FEATURE.SETTING=VALUE\n"
    )


def test_a_value_that_a_fix_gives_can_be_typed_as_it_stands(check, mindspeed):
    (fix,) = [line for line in check("profiler", "--set", "profiler.ranks=(0,)").splitlines() if line.startswith("  fix: ")]
    assert fix == "  fix: --set 'profiler.ranks=[0]' (Ranks to trace; -1 = all)"
    words = shlex.split(fix.removeprefix("  fix: ").partition(" (")[0])
    assert mindspeed("features", "check", "profiler", "--platform", "cpu", *words).exit_code == 0


def test_a_value_from_the_job_file_is_removed_there(check, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        "features: [recompute]\nworld: {recompute_granularity: full}\nsettings: {recompute: {granularity: selective}}\n"
    )
    assert "fix: remove recompute_granularity from the job file, or " in check("-f", job)


def test_a_word_after_a_switch_is_no_feature(mindspeed):
    done = mindspeed("features", "check", "rms-norm", "--gated-linear-unit", "true")
    assert done.exit_code == 2
    text = "'true' is not a feature; a switch takes no value: use --NAME to switch it on and --no-NAME to switch it off"
    assert text in done.stderr


def test_a_check_of_one_problem_has_at_most_eight_lines(mindspeed):
    done = mindspeed(
        "features", "check", "tensor-parallel", "--tp=4", "--num-attention-heads=6", "--platform=cpu", "--megatron=0.16.1"
    )
    assert done.stderr.startswith("MS304 tensor-parallel: 6 attention heads are not divisible by tp=4\n")
    assert len((done.stdout + done.stderr).splitlines()) <= 8


def test_a_size_that_does_not_divide_the_heads_says_which(check):
    text = check("--world-size", 3, "--tp", 3, "--num-attention-heads", 8, "--optimization-level", 0)
    assert text == (
        "MS304 tensor-parallel: 8 attention heads are not divisible by tp=3\n"
        "  because: tensor-parallel: the tensor-parallel size is 3\n"
        f"  where: {_where('tensor-parallel')}\n"
        "  fix: --tp 1\n"
    )


def test_a_deferred_weight_gradient_that_megatron_refuses_on_the_cpu_is_a_problem(check):
    assert check("--platform", "cpu", "--deferred-embedding-gradients") == (
        "MS304 cpu-platform: Megatron defers the weight gradient of the output layer (defer_embedding_wgrad_compute) only with "
        "gradient_accumulation_fusion, whose kernel needs CUDA\n"
        "  fix: --no-deferred-embedding-gradients\n"
    )


def test_a_zero_centered_norm_that_no_layer_on_the_cpu_has_is_a_problem(check, mindspeed):
    norm = ("--platform", "cpu", "--zero-centered-norm", "--normalization")
    assert check(*norm, "LayerNorm") == (
        "MS304 cpu-platform: local layers on the CPU use torch's LayerNorm, which "
        "has no zero-centered weight\n"
        "  fix: --no-zero-centered-norm, or --normalization RMSNorm\n"
    )
    assert mindspeed("features", "check", *LAPTOP, *norm, "RMSNorm").exit_code == 0


@pytest.mark.guards(24)
def test_a_world_that_is_no_multiple_of_the_sizes_is_a_problem(check):
    assert check("--world-size", 4, "--tp", 3, "--optimization-level", 0) == (
        "MS302 world size 4 is not a multiple of tp x pp x cp = 3 x 1 x 1 = 3\n  fix: --world-size 6, or --tp 2\n"
    )


def test_strict_names_the_missing_requirement_instead_of_adding_it(check):
    assert check("distributed-optimizer", "--strict", "--optimization-level", 0) == (
        "MS204 distributed-optimizer requires data-parallel, because distributed-optimizer shards the optimizer state "
        "over data-parallel replicas\n"
        "  because: distributed-optimizer: requested\n"
        f"  where: {_where('distributed-optimizer')}; {_where('data-parallel')}\n"
        "  fix: remove --strict, or add data-parallel to the features\n"
    )


@pytest.mark.guards(22, 25)
def test_features_that_exclude_each_other_are_told_with_the_chain_behind_each(check, install):
    install("acme", {"acme-clip": "", "acme-root": 'Requires("acme-clip", reason="it builds on it"),'}, slots="()")
    install("bolt", {"bolt-clip": 'Conflicts("acme-clip", reason="both clip the gradient"),'})
    assert check("acme-root", "bolt-clip", "--optimization-level", 2, "--without", "rms-norm,swiglu") == (
        "MS202 acme-clip conflicts with bolt-clip, because both clip the gradient\n"
        "  because: acme-clip: required by acme-root, because it builds on it\n"
        "  because: acme-root: requested\n"
        "  because: bolt-clip: requested\n"
        "  where: acme 1.0, acme_features.py:2; bolt 1.0, bolt_features.py:2\n"
        "  fix: remove acme-root or bolt-clip\n"
    )


def test_two_features_in_one_slot_conflict_though_neither_knows_the_other(check, install):
    install("acme", {"acme-clip": ""}, slots='("clipping",)')
    install("bolt", {"bolt-clip": ""}, slots='("clipping",)')
    assert check("acme-clip", "bolt-clip", "--optimization-level", 2, "--without", "rms-norm,swiglu") == (
        "MS203 acme-clip and bolt-clip both hold the slot clipping, a role that only one feature can have\n"
        "  because: acme-clip: requested\n"
        "  because: bolt-clip: requested\n"
        "  where: acme 1.0, acme_features.py:2; bolt 1.0, bolt_features.py:2\n"
        "  fix: remove acme-clip or bolt-clip\n"
    )


def test_a_broken_plugin_stands_in_the_way_only_of_those_who_ask_for_it(check, mindspeed, install, tmp_path):
    install("acme", {"acme-clip": ""})
    (tmp_path / "acme_features.py").write_text("import no_such_package")
    assert check("acme-clip") == (
        "MS101 feature acme-clip cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'\n"
        "  where: acme 1.0, acme_features:Made0\n"
        "  fix: fix or uninstall acme, or remove acme-clip\n"
    )
    assert mindspeed("features", "check", *LAPTOP, "recompute").exit_code == 0


@pytest.mark.guards(5)
def test_an_unsupported_megatron_is_a_problem_of_the_environment(mindspeed):
    done = mindspeed("features", "check", "--platform", "cpu", "--megatron", "0.12.1")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == (
        "MS502 megatron-core 0.12.1 is not supported; supported is >=0.14,<0.21\n"
        "  where: command line\n"
        "  fix: pip install megatron-core==0.16.1\n"
    )


def test_both_spellings_of_a_size_must_agree(check):
    assert check("--tp", 2, "--set", "tensor-parallel.size=4", "--optimization-level", 0) == (
        "MS303 command line gives the tensor-parallel size twice: tp = 2 and tensor-parallel.size = 4\n"
        "  where: command line\n"
        "  fix: remove the setting tensor-parallel.size, or remove --tp\n"
    )


@pytest.mark.guards(21, 23)
def test_every_mistake_is_reported_at_once_and_counted(check):
    text = check("swigl", "recompute", "--set", "recompute.colour=red", "--world-size", 4, "--tp", 3)
    assert [line.split()[0] for line in text.splitlines() if line.startswith("MS")] == ["MS201", "MS301", "MS302"]
    assert text.splitlines()[-1] == "3 problems"


def test_a_job_file_and_a_setting_that_cannot_be_read_are_reported_together(check, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("feature: [recompute]\n")
    assert check("-f", job, "--set", "size") == (
        "MS305 unknown key 'feature' in the job file\n"
        f"  where: {job}\n"
        "  fix: did you mean features?\n"
        "MS301 'size' does not have the form feature.field=value\n"
        "  where: --set\n"
        "  fix: --set FEATURE.SETTING=VALUE\n"
        "2 problems\n"
    )


def test_an_unknown_key_of_a_job_file_hides_no_problem_of_the_rest(check, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("modle: {}\nworld: {hidden_sise: 8}\nfeatures: [swigl]\n")
    text = check("-f", job)
    assert [line.split()[0] for line in text.splitlines() if line.startswith("MS")] == ["MS305", "MS301", "MS201"]


@pytest.mark.guards(23)
def test_json_holds_the_problems_and_nothing_else(mindspeed):
    done = mindspeed("features", "check", *LAPTOP, "swigl", "--json")
    assert (done.exit_code, done.stderr) == (1, "")
    rename = {"kind": "rename", "name": "swigl", "value": "swiglu"}
    near = {"code": "MS201", "message": "the feature 'swigl' does not exist", "features": ["swigl"], "chain": []}
    assert json.loads(done.stdout) == {
        "problems": [near | {"where": "command line", "fix": "did you mean swiglu?", "fixes": [rename], "facts": []}],
        "plan": None,
    }


def test_json_holds_the_plan_when_there_is_no_problem(mindspeed):
    done = mindspeed("features", "check", *LAPTOP, "--tp", 2, "--world-size", 2, "--json")
    data = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, data["problems"]) == (0, "", [])
    assert data["plan"]["world"]["tp"] == 2


def test_what_an_unknown_value_leaves_open_is_said_with_the_option_that_decides_it(mindspeed):
    done = mindspeed("features", "check", *LAPTOP, "--tp", 2, "--world-size", 2, "--optimization-level", 0)
    assert done.exit_code == 0
    assert (
        "not checked  tensor-parallel: '? attention heads are not divisible by tp=2' depends on num_attention_heads; "
        "give --num-attention-heads\n"
    ) in done.stdout


def _where(name):
    from mindspeed import registry

    return registry.catalog().usable[name].described
