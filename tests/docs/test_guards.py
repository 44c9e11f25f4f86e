"""The table of reported cases is complete, and cases that no other test guards."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

import mindspeed
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.runtime import session
from mindspeed.job.world import World
from mindspeed.plugins.manager import FeatureManager
from mindspeed.workbench.training import job
from tests.engine.patching.patch_cases import STATE, wrap
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401
from tests.features.resolving import CATALOG, MODEL, ask
from tools.docs.guards import GUARDS, NUMBERS, Case, Guard, faults, find_guards, read_cases


def test_every_case_is_guarded_or_has_a_reason():
    assert faults(read_cases(), find_guards()) == []


def test_the_page_has_every_case():
    text = GUARDS.text(CATALOG)
    assert [case.number for case in read_cases() if f"\n**{case.number}.** {case.sentence} (" not in text] == []
    assert "- *guarded* by `tests/docs/test_guards.py::test_activating_an_equal_plan_again_wraps_nothing_twice`\n" in text


def test_a_table_with_faults_names_each():
    cases = [Case(number, "A", "it broke", ()) for number in NUMBERS if number not in ("2", "4")]
    cases += [Case("4", "A", "it broke", (), later="not yet"), Case("99", "A", "it broke", (), later="not yet")]
    some = Guard("tests/test_a.py::test_b", processes=False, long=False)
    guards = {number: [some] for number in (*NUMBERS, "77") if number not in ("2", "3", "6")}
    assert faults(cases, guards) == [
        "case 2 has no line",
        "case 99 is none of the 53",
        "tests/test_a.py::test_b guards 77, which is no case",
        "case 3 must be guarded",
        "case 6 has neither a guard nor a reason for later",
        "case 4 is guarded, and its line still says why it is not",
    ]


def test_marks_are_read_from_source(tmp_path):
    (tmp_path / "test_made_up.py").write_text(
        "import pytest\n"
        "@pytest.mark.long\n@pytest.mark.guards(1, '20b', processes=True)\ndef test_one(): ...\n"
        "class TestTwo:\n    @pytest.mark.guards(1)\n    def test_three(self): ...\n"
        "@pytest.mark.guards(2)\ndef helper(): ...\n"
    )
    folder = tmp_path.name
    first = Guard(f"{folder}/test_made_up.py::test_one", processes=True, long=True)
    assert find_guards(tmp_path) == {
        "1": [first, Guard(f"{folder}/test_made_up.py::TestTwo::test_three", processes=False, long=False)],
        "20b": [first],
    }


@pytest.mark.guards(6)
def test_installing_mindspeed_installs_nothing_that_torch_or_megatron_pin():
    always = [requirement for requirement in metadata.requires("mindspeed") or () if "extra ==" not in requirement]
    names = {requirement.partition(">")[0] for requirement in always}
    assert names == {"pluggy", "pydantic", "click", "rich", "packaging", "PyYAML", "filelock"}


@pytest.mark.guards(11)
@pytest.mark.parametrize("name", sorted(CATALOG.usable))
def test_a_feature_that_is_named_is_active_or_refused_with_a_problem(name):
    resolution = ask(name, **MODEL)
    assert (name in [feature.name for feature in resolution.features]) or resolution.problems


@pytest.mark.guards("20b")
@pytest.mark.usefixtures("fake_megatron")
def test_activating_an_equal_plan_again_wraps_nothing_twice(monkeypatch):
    monkeypatch.setattr(session, "_session", None)
    plan = ActivationPlan(features=(), world=World({}), patches=(wrap(f"{STATE}:scale"),))
    first = session.start(plan, FeatureManager([]))
    second = session.start(plan, FeatureManager([]))
    from megatron.core import state

    assert state.scale(1) == ("marked", 2)
    assert (first.digest, first.features) == (second.digest, second.features)
    session.stop()
    assert state.scale(1) == 2


@pytest.mark.guards(29)
def test_a_plan_is_made_from_what_is_given_and_not_from_the_programs_command_line(monkeypatch):
    quiet = mindspeed.plan(["tensor-parallel"], world=MODEL, platform="cpu")
    monkeypatch.setattr(sys, "argv", ["train.py", "--tensor-model-parallel-size", "4", "--features", "recompute"])
    assert mindspeed.plan(["tensor-parallel"], world=MODEL, platform="cpu") == quiet
    assert mindspeed.plan(["tensor-parallel"], world=MODEL | {"tp": 2}, platform="cpu").digest != quiet.digest


DEFAULTS = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "torch_npu", "numpy"):
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Block())
import json, mindspeed
print(json.dumps(mindspeed.defaults()))
"""


@pytest.mark.guards(35, processes=True)
def test_default_settings_are_asked_for_without_torch_and_without_a_parser():
    done = subprocess.run([sys.executable, "-c", DEFAULTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    given = json.loads(done.stdout)
    assert given["tensor-parallel"] == {"size": 1}
    assert given["async-param-gather"] == {}
    assert given["recompute"]["granularity"] == "selective"
    assert given.keys() == mindspeed.defaults().keys()


@pytest.mark.guards(50)
def test_data_helpers_that_are_not_compiled_are_told_before_training(tmp_path, monkeypatch):
    (tmp_path / "core" / "datasets").mkdir(parents=True)
    monkeypatch.setattr(job, "package_root", lambda part: tmp_path)
    (problem,) = [found for found in job._installation() if "helpers" in found.message]
    assert str(problem) == (
        f"MS502 megatron-core in {tmp_path} has no compiled data helpers\n"
        f"  where: {tmp_path / 'core' / 'datasets'}\n"
        "  fix: install its wheel, or compile core/datasets/helpers.cpp with g++ and pybind11"
    )
