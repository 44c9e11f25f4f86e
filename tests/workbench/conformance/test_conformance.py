"""The conformance kit: a sound feature passes, and each kind of mistake is found by the check that looks for it."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed import registry
from mindspeed.cli import main
from mindspeed.plugins import MindSpeedError, Wrap
from mindspeed.problems import PatchError
from mindspeed.workbench.conformance import suite
from mindspeed.workbench.conformance.application import application, import_cost
from mindspeed.workbench.conformance.subjects import rows_of, subjects
from mindspeed.workbench.conformance.suite import CHECKS, examine
from mindspeed.workbench.verification.pool import WorkerPool
from tests.plugins.synthetic import make

pytest_plugins = ["pytester"]

HEAD = """
from pydantic import field_serializer
from mindspeed.plugins import (
    Category, Feature, FeatureArgs, FeatureSpec, Field, Fix, Numerics, Requires, Wrap, condition, hookimpl
)
"""
SOUND = """
class MadeArgs(FeatureArgs):
    rate: float = Field(1e-5, description="a rate")
    names: tuple[str, ...] = Field(("a", "b"), description="names")

@condition("{args.rate} is too much for {world.tp}", fix=(Fix.give_setting("rate", 0.1),))
def is_slow(args, world):
    '''Check that the rate is small.'''
    return args.rate < 1

class Made(Feature[MadeArgs]):
    '''Made up.'''
    spec = FeatureSpec("acme-made", Category.TOOL, constraints=(is_slow,))

    @hookimpl
    def patches(self):
        return [Wrap("megatron.core.utils:divide", "acme_made:around", reason="a test")]

def around(original):
    return original
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install the package acme with one feature acme-made; ``acme(("text", "replacement"), ...)`` changes its source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme-made = acme_made:Made\n")

    def put(*changes):
        source = HEAD + SOUND
        for text, replacement in changes:
            assert text in source
            source = source.replace(text, replacement)
        (tmp_path / "acme_made.py").write_text(source)
        importlib.invalidate_caches()
        registry.catalog.cache_clear()
        return subjects("acme")[0]

    yield put
    registry.catalog.cache_clear()
    sys.modules.pop("acme_made", None)


@pytest.mark.parametrize("check", ["schema", "metadata", "references", "targets", "order"])
def test_a_sound_feature_passes(acme, check):
    outcome = getattr(suite, check)(acme())
    assert (outcome.feature, outcome.check, outcome.state, outcome.details) == ("acme-made", check, "ok", ())


MISTAKES = {
    "a setting without description": (
        "schema",
        ('Field(1e-5, description="a rate")', "1e-5"),
        "the setting rate has no description",
    ),
    "a setting that changes on its way": (
        "schema",
        (
            'description="a rate")\n',
            'description="a rate")\n    @field_serializer("rate")\n    def _round(self, value):\n        return 0.0\n',
        ),
        "the setting rate does not survive YAML: 1e-05 becomes 0.0",
    ),
    "a class without docstring": ("metadata", ("    '''Made up.'''\n", ""), "the class has no docstring"),
    "a long summary": (
        "metadata",
        ("Made up.", 100 * "ab"),
        "the summary, its first line, is 200 characters long, not 1 to 100",
    ),
    "a claim without reason": (
        "metadata",
        ("Category.TOOL,", "Category.TOOL, numerics=Numerics.reordered(),"),
        "the numerics are reordered, but no reason is given",
    ),
    "a message that cannot be formatted": (
        "metadata",
        ("{args.rate}", "{args.speed}"),
        (
            "the condition is_slow has a message or fix that cannot be formatted: AttributeError: 'MadeArgs' object has no "
            "attribute 'speed'"
        ),
    ),
    "a condition without docstring": (
        "metadata",
        ("    '''Check that the rate is small.'''\n", ""),
        "the condition is_slow at acme_made.py:11 has no docstring",
    ),
    "a requirement without reason": (
        "metadata",
        ("constraints=(", 'constraints=(Requires("recompute"),'),
        "the Requires has no reason",
    ),
    "a hook without its marker": (
        "metadata",
        ("    @hookimpl\n    def patches(self):", "    def patches(self):"),
        "the method patches has the name of a hook but lacks @hookimpl, so it is never called",
    ),
    "a method that is nearly a hook": (
        "metadata",
        ("def around(original):", "    def config_redy(self, config):\n        pass\n\ndef around(original):"),
        "the method config_redy is not a hook; did you mean config_ready, with @hookimpl?",
    ),
    "code in a module that does not exist": (
        "references",
        ("acme_made:around", "acme_layers:around"),
        "acme_layers:around: module acme_layers does not exist",
    ),
    "code that does not exist": (
        "references",
        ("acme_made:around", "acme_made:round"),
        "acme_made:round: acme_made has no round",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(acme, mistake):
    check, change, text = MISTAKES[mistake]
    outcome = getattr(suite, check)(acme(change))
    assert (outcome.state, outcome.text) == ("failed", text)


def test_a_target_that_does_not_exist_fails_before_anything_else(acme):
    subject = acme(("utils:divide", "utils:divid"))
    assert subject.plan is None
    assert suite.metadata(subject).text.startswith("MS401 acme-made patches megatron.core.utils:divid, which does not exist")


def test_a_module_that_imports_torch_fails_with_its_cure(acme):
    subject = acme(("def around", "import torch.nn\ndef around"))
    (outcome,) = import_cost([subject])
    assert (outcome.state, outcome.text) == ("failed", "it imports torch; do that inside the method that needs it")


def test_a_light_module_passes_with_its_time(acme):
    (outcome,) = import_cost([acme()])
    assert outcome.state == "ok"
    assert outcome.text.endswith(" ms, and neither torch nor megatron is imported")


@pytest.mark.long
def test_a_feature_that_leaves_something_behind_is_not_reversible(acme):
    leaves = "def around(original):\n    original.__globals__['left_behind'] = object()\n"
    outcome = application([acme(("def around(original):\n", leaves))])[0]
    assert (outcome.state, outcome.text) == ("failed", "not restored: megatron.core.utils")


@pytest.mark.long
def test_a_feature_with_a_target_in_mindspeed_is_reversible():
    assert [outcome.state for outcome in application(subjects("rms-norm"))] == ["ok", "ok"]


def test_without_torch_what_needs_it_says_so(acme, monkeypatch):
    monkeypatch.setattr("mindspeed.workbench.conformance.application.find_spec", lambda name: None)
    outcomes = application([acme()])
    assert [(outcome.check, outcome.state, outcome.text) for outcome in outcomes] == [
        ("reversible", "not run", "torch and megatron not installed"),
        ("idempotent", "not run", "torch and megatron not installed"),
    ]


def test_a_feature_that_cannot_be_loaded_fails_with_its_problem(acme):
    acme()
    acme(("class MadeArgs", "import no_such_package\nclass MadeArgs"))
    sys.modules.pop("acme_made", None)
    registry.catalog.cache_clear()
    (outcome,) = examine("acme")
    assert (outcome.check, outcome.state) == ("metadata", "failed")
    assert outcome.text == ("MS101 feature acme-made cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'")


def test_a_name_that_nobody_has_gets_near_names(acme):
    acme()
    with pytest.raises(MindSpeedError) as caught:
        rows_of("acme-mad")
    assert str(caught.value) == (
        "MS201 'acme-mad' is neither a feature nor an installed package with features\n  fix: did you mean acme-made or acme?"
    )


@pytest.mark.long
def test_a_failed_check_is_status_one_and_json_holds_everything(acme):
    acme(("utils:divide", "utils:divid"))
    done = CliRunner().invoke(main, ["features", "test", "acme", "--json"], catch_exceptions=False)
    data = json.loads(done.stdout)
    assert (done.exit_code, data["name"], data["passed"]) == (1, "acme", False)
    assert {row["check"]: row["state"] for row in data["checks"]} == dict.fromkeys(CHECKS, "not run") | {
        "schema": "ok",
        "metadata": "failed",
        "references": "ok",
        "targets": "ok",
        "import cost": "ok",
    }


@pytest.mark.budget(8)
def test_pytest_runs_the_suite_for_a_distribution_without_any_test_file(acme, pytester, monkeypatch, tmp_path):
    acme(("Field(1e-5, description=", "Field(1e-5, title="))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = pytester.runpytest_subprocess("--mindspeed-dist", "acme", "-k", "schema or references or order")
    done.assert_outcomes(passed=2, failed=1, deselected=7)
    done.stdout.fnmatch_lines(["*acme-made: schema failed: the setting rate has no description*"])


@pytest.mark.budget(8)
def test_a_test_file_has_a_case_for_each_check(acme, pytester, monkeypatch, tmp_path):
    acme()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pytester.makepyfile(
        "from mindspeed.workbench.conformance.testing import conformance\ntest_acme = conformance('acme-made')\n"
    )
    done = pytester.runpytest_subprocess("--collect-only", "-q")
    assert [line.partition("::")[2] for line in done.outlines if "::" in line] == [f"test_acme[acme-made-{c}]" for c in CHECKS]


DIVIDE = Wrap("megatron.core.utils:divide", "tests.workbench.conformance.test_conformance:doubled", reason="a test")
METHOD = "megatron.core.transformer.mlp:MLP.forward"


def doubled(original):
    return lambda *args, **kwargs: (original(*args, **kwargs), original(*args, **kwargs))


def feature(patch):
    made = make("acme-made")
    made.patches = lambda self: [patch]
    return made


def test_patches_can_be_tried_on_a_made_up_megatron(fake_megatron):
    tree = fake_megatron(METHOD, sources={"megatron.core.utils": "def divide(a, b): return a // b"})
    utils = tree.module("megatron.core.utils")
    assert Path(utils.__file__).is_relative_to(tree.folder)
    with tree.patched(feature(DIVIDE)):
        assert utils.divide(6, 2) == (3, 3)
    assert utils.divide(6, 2) == 3
    mlp = tree.module("megatron.core.transformer.mlp").MLP()
    assert mlp.forward(1, x=2) == ("MLP.forward", (1,), {"x": 2})


def test_a_patch_of_what_the_made_up_megatron_lacks_is_refused(fake_megatron):
    tree = fake_megatron(METHOD)
    with (
        pytest.raises(PatchError, match=r"MS401 acme-made patches megatron\.core\.utils:divide"),
        tree.patched(feature(DIVIDE)),
    ):
        pass


def test_the_real_megatron_is_back_after_the_made_up_one(tmp_path):
    from mindspeed.workbench.conformance.testing import fake_megatron

    before = {name: module for name, module in sys.modules.items() if name.startswith("megatron")}
    with fake_megatron(tmp_path, METHOD) as tree:
        tree.module("megatron.core.transformer.mlp")
    assert {name: module for name, module in sys.modules.items() if name.startswith("megatron")} == before


def rank_and_sum(number):
    import torch
    import torch.distributed as dist

    total = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), total


def fails_on_one():
    import torch.distributed as dist

    assert dist.get_rank() == 0, "rank 1 is odd"


def groups_of_megatron():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_world_size()


@pytest.mark.budget(8)
def test_a_function_runs_on_ranks_with_and_without_a_plan(pool: WorkerPool):
    found = pool.call(rank_and_sum, 2, 10)
    assert [(rank, int(total)) for rank, total in found] == [(0, 21), (1, 21)]
    plan = registry.plan(platform="cpu", world={"tp": 2, "world_size": 2}, level=0)
    assert pool.call(groups_of_megatron, 2, plan=plan) == [2, 2]
    with pytest.raises(MindSpeedError, match="rank 1 failed: AssertionError: rank 1 is odd"):
        pool.call(fails_on_one, 2)
    assert len(pool.call(rank_and_sum, 1, 0)) == 1, "a failed call leaves the pool usable"


BESIDE = {
    "an unknown hook": "@hookimpl\n    def no_such_hook(self): pass",
    "a constructor that fails": "def __init__(self, *given): raise ValueError('boom')",
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", BESIDE)
def test_a_broken_feature_beside_fails_no_check_of_another(acme, mistake, tmp_path):
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nbad-one = bad_one:One\n")
    spec = "spec = FeatureSpec('bad-one', Category.TOOL, level=1)"
    (tmp_path / "bad_one.py").write_text(f"{HEAD}\nclass One(Feature):\n    {spec}\n    {BESIDE[mistake]}\n")
    outcome = suite.order(acme())
    assert (outcome.state, outcome.details) == ("ok", ()), outcome.text
    sys.modules.pop("bad_one", None)
