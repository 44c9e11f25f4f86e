"""An old feature class named by an entry point: every verb knows it, and a plan made elsewhere finds its patches."""

import json
import sys
import textwrap

import pytest
from click.testing import CliRunner

from mindspeed import registry
from mindspeed.cli import main

FEATURE = """
    from mindspeed.features_manager.feature import MindSpeedFeature


    class GreetingFeature(MindSpeedFeature):
        '''Greet in another way.'''

        def __init__(self):
            super().__init__("greeting")

        def register_args(self, parser):
            parser.add_argument("--greeting-word", default="good day", help="what to say")

        def register_patches(self, patch_manager, args):
            word = args.greeting_word

            def greet(name):
                return f"{word} {name}"

            patch_manager.register_patch("old_acme_target.greet", greet)
"""
METADATA = "Metadata-Version: 2.1\nName: old-acme\nVersion: 1.2\n"


@pytest.fixture
def old_acme(tmp_path, monkeypatch):
    """An installed distribution whose entry point names an old feature class."""
    (tmp_path / "old_acme.py").write_text(textwrap.dedent(FEATURE))
    (tmp_path / "old_acme_target.py").write_text("def greet(name):\n    return f'hello {name}'\n")
    info = tmp_path / "old_acme-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "RECORD").write_text("old_acme.py,,\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\ncompat:greeting = old_acme:GreetingFeature\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.catalog.cache_clear()
    yield
    registry.deactivate()
    for name in ("old_acme", "old_acme_target"):
        sys.modules.pop(name, None)
    registry.catalog.cache_clear()


def test_an_old_class_in_an_entry_point_is_listed_and_planned(old_acme):
    done = CliRunner().invoke(main, ["features", "list", "--json"])
    (row,) = [row for row in json.loads(done.stdout)["features"] if row["name"] == "compat:greeting"]
    assert (row["distribution"], row["version"]) == ("old-acme", "1.2")
    plan = registry.plan(features=["compat:greeting"], settings={"compat:greeting": {"greeting_word": "hi"}})
    assert plan.features[0].args == {"greeting_word": "hi"}
    assert [planned.site for planned in plan.patches if planned.owner == "compat:greeting"] == ["old_acme_target:greet"]
    near = CliRunner().invoke(main, ["features", "check", "greeting"])
    assert "the feature 'greeting' does not exist" in near.output
    assert "did you mean compat:greeting" in near.output


def test_a_plan_made_elsewhere_finds_the_closures_that_the_feature_registers(old_acme, tmp_path):
    from mindspeed.compat import object_refs

    registry.write_plan(registry.plan(features=["compat:greeting"]), tmp_path / "plan.json")
    object_refs._objects.clear()  # as in the process that reads the plan
    registry.activate(registry.read_plan(tmp_path / "plan.json"))
    import old_acme_target

    assert old_acme_target.greet("you") == "good day you"
    registry.deactivate()
    assert old_acme_target.greet("you") == "hello you"


@pytest.mark.long
def test_the_checks_for_feature_authors_hold_for_an_old_class_too(old_acme):
    done = CliRunner().invoke(main, ["features", "test", "old-acme", "--json"])
    failed = [check for check in json.loads(done.stdout)["checks"] if check["state"] == "failed"]
    assert failed == [], done.output


def test_an_object_that_nobody_holds_is_an_error():
    from mindspeed.compat import object_refs

    with pytest.raises(AttributeError, match="has no attribute 'compat_nobody__x__0'"):
        object_refs.compat_nobody__x__0  # noqa: B018
