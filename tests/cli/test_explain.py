"""``features explain`` and ``explain``: every line about a feature that is on, off, broken or unknown."""

import json
import sys

import pytest

from mindspeed.engine.inspection.sites import find_site
from mindspeed.plugins.discovery import discover
from mindspeed.plugins.found import declared_at
from tests.cli.conftest import LAPTOP

WRAP = """
from mindspeed.plugins import *
class {name}(Feature):
    spec = FeatureSpec("acme-{lower}", Category.TOOL, constraints=({constraints}))
    @hookimpl
    def patches(self):
        return [Wrap("megatron.core.utils:divide", "acme_{lower}:around", reason="to count it")]
def around(original):
    return original
"""


@pytest.fixture
def explain(mindspeed):
    """What ``features explain`` prints: its first line, and its titles with their lines."""

    def run(*arguments):
        done = mindspeed("features", "explain", *LAPTOP, *arguments)
        assert (done.exit_code, done.stderr) == (0, "")
        first, *rest = done.stdout.splitlines()
        found: dict[str, list[str]] = {}
        title = ""
        for line in rest:
            if line.startswith("  "):
                found[title].append(line[2:])
            else:
                title = line
                found[title] = []
        return first, found

    return run


@pytest.fixture
def two_wraps(install, tmp_path):
    """Packages acme and bolt, whose features wrap one function of Megatron; that of bolt asks to come later."""
    install("acme", {"acme-one": "", "acme-two": ""})
    for name, constraints in {"One": "", "Two": 'After("acme-one"),'}.items():
        lower = name.lower()
        (tmp_path / f"acme_{lower}.py").write_text(WRAP.format(name=name, lower=lower, constraints=constraints))
    (tmp_path / "acme_features.py").write_text("from acme_one import One as Made0\nfrom acme_two import Two as Made1\n")
    yield tmp_path
    for name in ("acme_one", "acme_two", "acme_features"):
        sys.modules.pop(name, None)


def test_a_feature_that_is_on_says_why_where_its_settings_come_from_and_who_ordered_it(explain, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("features: [sequence-parallel]\nworld: {tp: 4}\n")
    first, found = explain("tensor-parallel", "-f", job, "--tp", 2, "--world-size", 2, "--optimization-level", 0)
    assert first == "tensor-parallel is on: Split weights and vocabulary over ranks"
    assert found["from"][0] == f"mindspeed 0.2.0, {declared_at(discover().feature('tensor-parallel'))}"
    assert found["why"] == ["the tensor-parallel size is 2"]
    assert found["settings"] == [
        "tensor-parallel.size = 2  (command line, overrode job file: 4)",
        "  Number of ranks over which the weights of a layer are split (tensor-parallel size)",
    ]
    assert (
        "tensor-parallel comes before sequence-parallel: sequence-parallel declares Requires, because sequence-parallel "
        "splits the sequence over tensor-parallel ranks"
    ) in next(lines for title, lines in found.items() if title.startswith("position"))
    assert (
        "tensor_model_parallel_size = 2  tensor-parallel.size sets the number of ranks that split a layer"
        in found["Megatron arguments"]
    )


@pytest.mark.guards(32)
def test_a_patch_says_where_its_target_and_its_code_are_and_what_else_stands_at_the_site(explain, two_wraps):
    site = find_site("megatron.core.utils:divide")
    _, found = explain("acme-two", "--features", "acme-two,acme-one", "--optimization-level", 2, "--without", "rms-norm,swiglu")
    assert found["patches"] == [
        "wrap megatron.core.utils:divide",
        "  because  to count it",
        f"  target   megatron.core.utils:divide  {site.file}:{site.line}",
        f"  code     acme_two:around  {two_wraps / 'acme_two.py'}:8",
        "  at site  the original <- wrapped by acme-one: acme_one:around <- wrapped by acme-two: acme_two:around",
    ]
    (position,) = [lines for title, lines in found.items() if title.startswith("position")]
    assert position == ["acme-one comes before acme-two: acme-two declares After"]


def test_a_feature_that_is_off_says_why_and_what_would_switch_it_on(explain):
    first, found = explain("async-param-gather", "--world-size", 2, "--optimization-level", 0)
    assert first.startswith("async-param-gather is not active: ")
    assert found["why not"] == ["not requested, and not required by any active feature"]
    assert found["switched on by"] == ["--features async-param-gather"]
    assert found["it would add"] == ["data-parallel", "async-ddp", "distributed-optimizer"]
    assert "result of requesting it" not in found


def test_a_feature_that_belongs_to_a_size_is_off_while_the_size_is_one(explain):
    _, found = explain("pipeline-parallel", "--optimization-level", 0)
    assert (found["why not"], found["switched on by"]) == (
        ["the pp size is 1"],
        ["--pp N, N above 1", "--features pipeline-parallel"],
    )


def test_what_asking_for_it_would_give_is_said_with_its_fix(explain, install):
    install("acme", {"acme-clip": 'Conflicts("recompute", reason="both clip"),'})
    _, found = explain("acme-clip", "--features", "recompute", "--optimization-level", 2, "--without", "rms-norm,swiglu")
    assert found["result of requesting it"][0] == "MS202 acme-clip conflicts with recompute, because both clip"
    assert found["result of requesting it"][-1] == "  fix: remove acme-clip or recompute"


def test_a_broken_feature_is_off_with_its_problem_and_fix(explain, install, tmp_path):
    install("acme", {"acme-clip": ""})
    (tmp_path / "acme_features.py").write_text("import no_such_package")
    first, found = explain("acme-clip")
    text = "feature acme-clip cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"
    assert (first, found["why not"], found["switched on by"]) == ("acme-clip is not active", [text], ["fix or uninstall acme"])


def test_what_level_one_leaves_out_has_its_reason(explain, monkeypatch):
    monkeypatch.setattr("mindspeed.ops.variants.variants", lambda platform: frozenset())
    _, found = explain("swiglu", "--activation", "silu", "--gated-linear-unit", "--optimization-level", 2)
    assert found["why not"] == ["swiglu has only a plain-torch reference on cpu"]


def test_json_has_the_same_of_a_feature_that_is_on(mindspeed, two_wraps):
    request = ["--features", "acme-one,acme-two", "--optimization-level", 2, "--without", "rms-norm,swiglu"]
    done = mindspeed("features", "explain", *LAPTOP, "acme-two", *request, "--json")
    data = json.loads(done.stdout)
    assert (data["feature"], data["active"]) == ("acme-two", True)
    assert [(row["feature"], row["kind"], row["source"]) for row in data["why"]] == [("acme-two", "requested", "command line")]
    assert data["position"]["edges"] == [
        {"first": "acme-one", "second": "acme-two", "kind": "After", "owner": "acme-two", "reason": ""}
    ]
    (patch,) = data["patches"]
    assert (patch["code"]["file"], patch["code"]["line"]) == (str(two_wraps / "acme_two.py"), 8)
    assert len(patch["chain"]) == 3


def test_json_has_the_same_of_a_feature_that_is_off(mindspeed):
    data = json.loads(mindspeed("features", "explain", *LAPTOP, "virtual-pipeline", "--json").stdout)
    assert (data["feature"], data["active"]) == ("virtual-pipeline", False)
    assert data["off"]["because"] == ["the vpp size is 1"]


def test_a_feature_of_the_base_plan_is_explained_too(explain):
    first, found = explain("cpu-platform")
    assert first == "cpu-platform is on: Run code written for CUDA and NCCL on the CPU with gloo"
    assert found["why"] == ["part of every plan"]


def test_an_unknown_name_gets_near_names(mindspeed):
    done = mindspeed("features", "explain", *LAPTOP, "swigl")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("MS201 the feature 'swigl' does not exist\n")


@pytest.mark.parametrize("verb", [("explain",), ("features", "explain")])
def test_a_code_is_explained_by_both_verbs(mindspeed, verb):
    done = mindspeed(*verb, "ms207")
    assert done.stdout == (
        "MS207: A requested feature has a higher optimization level than the job allows. Raise\n"
        "--optimization-level, or remove the feature.\n"
    )
