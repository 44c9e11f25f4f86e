"""MINDSPEED_DISABLE, MINDSPEED_PLUGINS, MINDSPEED_TRACE, and that nothing is loaded that nobody named."""

import json
import subprocess
import sys

import pytest

from mindspeed import registry
from mindspeed.engine.planning import kill_switch
from mindspeed.plugins import MindSpeedError
from mindspeed.plugins.discovery import discover
from tests.cli.conftest import LAPTOP

OWN = ("--optimization-level", "2", "--without", "rms-norm,swiglu")


@pytest.fixture
def run(mindspeed):
    return lambda *arguments: mindspeed("features", *arguments)


@pytest.fixture
def disable(monkeypatch):
    def names(text):
        kill_switch._announce.cache_clear()
        monkeypatch.setenv("MINDSPEED_DISABLE", text)

    yield names
    kill_switch._announce.cache_clear()


def test_a_disabled_feature_is_taken_out_recorded_and_announced_once(run, disable):
    disable("recompute")
    done = run("plan", *LAPTOP, "recompute", "--optimization-level", "0", "--json")
    plan = json.loads(done.stdout)["plan"]
    assert plan["features"] == []
    row = {"kind": "disabled", "feature": "recompute"}
    assert plan["rows"] == [row | {"text": "removed by MINDSPEED_DISABLE, though requested (command line)"}]
    assert done.stderr == "mindspeed: MINDSPEED_DISABLE removes recompute from every plan\n"
    again = run("plan", *LAPTOP, "recompute", "--optimization-level", "0")
    assert again.stderr == ""
    assert "disabled\n  recompute: removed by MINDSPEED_DISABLE, though requested (command line)\n" in again.stdout


def test_the_python_interface_keeps_to_it_and_other_ranks_are_silent(disable, monkeypatch, capsys):
    disable("recompute")
    monkeypatch.setenv("RANK", "1")
    assert registry.plan(["recompute"], level=0, platform="cpu").names == ()
    assert capsys.readouterr().err == ""


def test_what_requires_a_disabled_feature_cannot_be_planned(run, disable):
    disable("data-parallel")
    done = run("check", *LAPTOP, "distributed-optimizer", "--optimization-level", "0", "--json")
    assert done.exit_code == 1
    (problem,) = json.loads(done.stdout)["problems"]
    fix = "also disable distributed-optimizer, or keep data-parallel enabled, or remove distributed-optimizer"
    assert (problem["code"], problem["fix"]) == ("MS211", fix)
    assert problem["message"] == (
        "distributed-optimizer requires data-parallel, because distributed-optimizer shards the optimizer state over "
        "data-parallel replicas, and MINDSPEED_DISABLE removes data-parallel"
    )


def test_a_size_whose_owner_is_disabled_cannot_be_planned(run, disable):
    disable("tensor-parallel")
    done = run("check", *LAPTOP, "--tp", "2", "--optimization-level", "0", "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    text = "the tensor-parallel size is 2, but MINDSPEED_DISABLE removes tensor-parallel, which provides it"
    assert (problem["code"], problem["message"]) == ("MS211", text)


def test_a_disabled_name_that_means_nothing_is_said_to_mean_nothing(run, disable):
    disable("swigl")
    rows = json.loads(run("plan", *LAPTOP, "--json").stdout)["plan"]["rows"]
    assert [row for row in rows if row["kind"] == "warning"] == [
        {
            "kind": "warning",
            "feature": "swigl",
            "text": "MINDSPEED_DISABLE names swigl, which is not a feature; did you mean swiglu?",
        }
    ]


def test_a_plan_made_before_is_not_activated_with_a_disabled_feature(disable):
    plan = registry.plan(["recompute"], level=0, platform="cpu")
    disable("recompute")
    with pytest.raises(MindSpeedError) as caught:
        registry.activate(plan)
    assert str(caught.value) == (
        "MS211 the plan contains recompute, but MINDSPEED_DISABLE switches it off\n"
        "  where: MINDSPEED_DISABLE\n"
        "  fix: make the plan again, or remove recompute from the variable"
    )


def test_a_disabled_third_party_is_not_even_imported(run, disable, install, tmp_path):
    install("acme", {"acme-clip": ""})
    (tmp_path / "acme_features.py").write_text("raise RuntimeError('imported')")
    disable("acme-clip")
    done = run("check", *LAPTOP, "acme-clip", "--optimization-level", "0")
    assert (done.exit_code, done.stdout.partition(";")[0]) == (0, "no problems: no features")


def test_only_what_is_named_and_what_that_requires_is_imported(run, install, tmp_path):
    for name, constraints in {"acme": 'Requires("bolt-base"),', "bolt": "", "crow": "", "dove": ""}.items():
        feature = f"{name}-base" if name == "bolt" else f"{name}-top"
        install(name, {feature: constraints})
    for name in ("crow", "dove"):
        (tmp_path / f"{name}_features.py").write_text(f"raise RuntimeError('{name} was imported')")
    done = run("plan", *LAPTOP, "acme-top", "--without", "dove-top", "--optimization-level", "2", "--json")
    plan = json.loads(done.stdout)["plan"]
    assert [feature["name"] for feature in plan["features"] if feature["level"] == 2] == ["bolt-base", "acme-top"]
    assert {"acme_features", "bolt_features"} <= sys.modules.keys()
    assert sys.modules.keys().isdisjoint({"crow_features", "dove_features"})
    states = {row.name: row.state for row in registry.catalog(frozenset({"acme-top"})).rows}
    assert (states["acme-top"], states["bolt-base"], states["crow-top"]) == ("ok", "ok", "not loaded")


def test_a_slot_that_nothing_loaded_holds_makes_everything_load(run, install):
    install("acme", {"acme-top": 'RequiresSlot("clipping"),'})
    install("bolt", {"bolt-clip": ""}, slots='("clipping",)')
    done = run("check", *LAPTOP, "acme-top", *OWN)
    assert done.stderr.splitlines()[0] == "MS205 acme-top needs a feature for clipping"
    assert done.stderr.splitlines()[-1] == "  fix: add bolt-clip to the features"


def test_a_conflict_with_a_feature_that_is_not_loaded_is_no_mistake(run, install):
    install("acme", {"acme-top": 'Conflicts("bolt-clip"),'})
    install("bolt", {"bolt-clip": ""})
    assert run("check", *LAPTOP, "acme-top", *OWN).exit_code == 0
    assert run("check", *LAPTOP, "acme-top", "bolt-clip", *OWN).stderr.startswith("MS202 acme-top conflicts with bolt-clip")


def test_near_names_include_what_is_not_loaded(run, install):
    install("bolt", {"bolt-clip": ""})
    assert run("check", *LAPTOP, "bolt-clap").stderr.endswith("  fix: did you mean bolt-clip?\n")


@pytest.fixture
def two(install, tmp_path):
    install("acme", {"acme-clip": ""})
    install("bolt", {"bolt-clip": ""})
    (tmp_path / "acme_features.py").write_text("raise RuntimeError('imported')")


def states(run):
    rows = json.loads(run("list", "--json").stdout)["features"]
    return {row["name"]: (row["state"], row["error"]) for row in rows if row["distribution"] != "mindspeed"}


@pytest.mark.parametrize("wanted", ["bolt", " Bolt , another"])
def test_only_the_allowed_distributions_may_load(run, two, monkeypatch, wanted):
    monkeypatch.setenv("MINDSPEED_PLUGINS", wanted)
    text = f"feature acme-clip is not loaded, because MINDSPEED_PLUGINS is {wanted.strip()!r}"
    assert states(run) == {"acme-clip": ("left out", text), "bolt-clip": ("ok", None)}


def test_none_leaves_every_third_party_out_and_the_list_says_so(run, two, monkeypatch):
    monkeypatch.setenv("MINDSPEED_PLUGINS", "none")
    assert {state for state, _ in states(run).values()} == {"left out"}
    assert run("list").stdout.splitlines()[-1] == "2 not loaded, because MINDSPEED_PLUGINS is 'none'"


def test_an_allowed_name_that_nobody_has_is_said(run, two, monkeypatch):
    monkeypatch.setenv("MINDSPEED_PLUGINS", "Bolt,crow")
    last = run("list").stdout.splitlines()[-1]
    assert last == "MINDSPEED_PLUGINS names crow, but no distribution with features has that name"


def test_asking_for_what_is_left_out_is_a_problem_with_its_fix(run, two, monkeypatch):
    monkeypatch.setenv("MINDSPEED_PLUGINS", "none")
    assert run("check", *LAPTOP, "bolt-clip", *OWN).stderr == (
        "MS105 feature bolt-clip is not loaded, because MINDSPEED_PLUGINS is 'none'\n"
        "  where: bolt 1.0, bolt_features:Made0\n"
        "  fix: MINDSPEED_PLUGINS=bolt, if you trust bolt, or remove bolt-clip\n"
    )


def test_what_is_left_out_takes_no_name_from_others(run, install, monkeypatch):
    install("acme", {"clip": ""})
    install("bolt", {"clip": ""})
    monkeypatch.setenv("MINDSPEED_PLUGINS", "bolt")
    rows = json.loads(run("list", "--json").stdout)["features"]
    found = {row["distribution"]: row["state"] for row in rows if row["name"] == "clip"}
    assert found == {"acme": "left out", "bolt": "ok"}


def test_a_package_that_takes_a_built_in_name_is_refused_before_its_code_runs(install, tmp_path):
    install("acme", {"tensor-parallel": ""})
    (tmp_path / "acme_features.py").write_text("raise SystemExit('imported')")
    rows = [row for row in discover().rows if row.name == "tensor-parallel"]
    assert [(row.distribution, row.state) for row in rows] == [("mindspeed", "ok"), ("acme", "broken")]


def test_a_package_that_exits_at_import_is_a_row(install, tmp_path):
    install("acme", {"acme-clip": ""})
    (tmp_path / "acme_features.py").write_text("raise SystemExit(3)")
    assert discover().broken["acme-clip"].problem.message == "feature acme-clip cannot be loaded: SystemExit: 3"


def test_more_than_two_hundred_third_parties_are_listed_from_metadata_in_plain_lines(run, install):
    for number in range(201):
        install(f"acme{number}", {f"acme-{number}": ""})
    lines = run("list", "--wide").stdout.splitlines()
    assert lines[0] == "NAME  LEVEL  STABILITY  PLATFORMS  SLOTS  FROM  STATE  SUMMARY"
    assert lines[1] == "acme-0  -  -  -  -  acme0 1.0  not loaded  -"
    assert "acme0_features" not in sys.modules
    assert any(line.startswith("recompute  0  prototype  npu cuda cpu  recompute-policy  mindspeed") for line in lines)


TRACED = """
import mindspeed, fakelib
mindspeed.activate(mindspeed.plan(["acme-trace"], platform="cpu", level=2, without=["rms-norm", "swiglu"]))
from mindspeed.engine.runtime import session
session.call("optimizer_built", optimizer=None)
mindspeed.deactivate()
"""
FEATURE = """
from mindspeed.plugins import *
class Made(Feature):
    spec = FeatureSpec("acme-trace", Category.TOOL)
    @hookimpl
    def patches(self):
        return [Wrap("fakelib:traced", "acme_trace:around", reason="a test")]
    @hookimpl
    def optimizer_built(self, optimizer):
        pass
def around(original):
    return lambda: original()
"""


@pytest.mark.parametrize("on", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_trace_has_a_line_for_each_step_patch_and_hook(tmp_path, on):
    (tmp_path / "acme_trace.py").write_text(FEATURE)
    (tmp_path / "fakelib.py").write_text("def traced(): pass\n")
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme-trace = acme_trace:Made\n")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "RANK": "1"} | ({"MINDSPEED_TRACE": "1"} if on else {})
    done = subprocess.run([sys.executable, "-c", TRACED], env=environment, capture_output=True, text=True, check=True)
    lines = [line.removeprefix("mindspeed[1] ") for line in done.stderr.splitlines() if line.startswith("mindspeed[1] ")]
    if not on:
        assert lines == []
        return
    assert any(line.startswith("loaded    acme-trace of acme 1.0 in ") for line in lines)
    (resolved,) = [line for line in lines if line.startswith("resolved  ")]
    assert "acme-trace" in resolved.partition("; plan ")[0].removeprefix("resolved  ").split(", ")
    assert "patched   fakelib:traced: wrap of acme-trace" in lines
    assert "hook      optimizer_built of acme-trace" in lines
    assert any(line.startswith("undone    ") for line in lines)


@pytest.mark.parametrize("way", ["option", "job file"])
def test_only_leaves_out_what_level_one_adds_and_the_replicas_of_a_size(run, tmp_path, way):
    job = tmp_path / "job.yaml"
    job.write_text("only: true\n")
    given = ["--only"] if way == "option" else ["-f", str(job)]
    plan = json.loads(run("plan", *LAPTOP, "recompute", "--world-size", "2", *given, "--json").stdout)["plan"]
    assert [feature["name"] for feature in plan["features"]] == ["recompute"]


def test_a_script_of_megatron_lm_with_only_keeps_the_layers_that_its_default_needs(mindspeed):
    command = ("--", "pretrain_gpt.py", "--features", "recompute", "--only")
    plan = json.loads(mindspeed("check", *LAPTOP, "--json", *command).stdout)["commands"][0]["plan"]
    assert [feature["name"] for feature in plan["features"]] == ["recompute", "transformer-engine-layers"]
