"""A package that misbehaves costs only itself: a problem names its feature and distribution, and the others work."""

import os
import signal

import pytest

from mindspeed import registry
from mindspeed.plugins import answers
from mindspeed.plugins.discovery import discover
from mindspeed.plugins.found import installed
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.problems import MindSpeedError
from mindspeed.process import watchdog

FEATURE = """
import os, sys, threading, time
from mindspeed.plugins import *
class AcmeArgs(FeatureArgs):
    n: int = Field(1, description="n")
{before}
class Acme(Feature[AcmeArgs]):
    spec = FeatureSpec("acme-clip", Category.TOOL, slots={{"acme-slot"}}{spec})
    {method}
"""
HOOK = "@hookimpl\n    def {name}(self): {body}"
REPORT = "  fix: report it to the authors of acme 1.2"


def package(before="", spec="", method="pass"):
    return FEATURE.format(before=before, spec=spec, method=method)


def hook(name, body):
    return package(method=HOOK.format(name=name, body=body))


@pytest.fixture
def refusal(install):
    """The problem of a job with the feature of a package."""

    def problem_of(source):
        install("acme", "acme-clip", source)
        registry.catalog.cache_clear()
        try:
            with pytest.raises(MindSpeedError) as caught:
                registry.plan(["acme-clip"], platform="cpu")
        finally:
            registry.catalog.cache_clear()
        (problem,) = caught.value.problems
        return str(problem)

    return problem_of


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
@pytest.mark.parametrize("plugins", ["all", "none"])
def test_metadata_that_is_not_text_is_a_row(install, tmp_path, monkeypatch, file, plugins):
    monkeypatch.setenv("MINDSPEED_PLUGINS", plugins)
    install("acme", "acme-clip", package())
    install("bolt", "bolt-clip", package())
    with open(tmp_path / "acme-1.2.dist-info" / file, "ab") as damaged:
        damaged.write(b"\xff\n")
    rows = {row.name: row for row in installed()}
    assert str(rows["acme-1.2.dist-info"].problem).startswith(
        "MS101 the metadata of acme-1.2.dist-info cannot be read: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"
    )
    assert str(rows["acme-1.2.dist-info"].problem).endswith("\n  fix: fix or uninstall acme")
    assert rows["bolt-clip"].state == ("not loaded" if plugins == "all" else "left out")
    assert "recompute" in discover(only=()).usable


def test_metadata_without_a_name_is_a_row(install, tmp_path):
    install("acme", "acme-clip", package())
    (tmp_path / "acme-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    (row,) = [row for row in installed() if row.name == "acme-1.2.dist-info"]
    assert row.problem.message == (
        "the metadata of acme-1.2.dist-info cannot be read: ValueError: METADATA has no Name or no Version"
    )


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise BaseException('no')", "BaseException: no"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("os._exit(3)", "ProcessEndError: it called os._exit(3)"),
    ],
)
def test_whatever_an_import_raises_is_a_row(install, statement, error):
    install("acme", "acme-clip", package(before=statement))
    known = discover()
    assert str(known.broken["acme-clip"].problem) == (
        f"MS101 feature acme-clip cannot be loaded: {error}\n"
        "  where: acme 1.2, acme_features:Acme\n  fix: fix or uninstall acme"
    )
    assert "recompute" in known.usable


def test_an_interrupt_from_the_keyboard_ends_discovery(install):
    install("acme", "acme-clip", package(before=f"os.kill({os.getpid()}, {int(signal.SIGINT)}); time.sleep(5)"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            discover()
    finally:
        signal.signal(signal.SIGINT, before)


GOOD = """
class Bolt(Feature):
    spec = FeatureSpec("bolt", Category.TOOL)
"""


@pytest.mark.parametrize(
    ("malformed", "error"),
    [
        (
            'class Acme(Feature):\n    spec = FeatureSpec("acme-clip", Category.TOOL, level=7)',
            "MS101 feature acme-clip cannot be loaded: ValueError: acme-clip: level 7 is not 0, 1 or 2",
        ),
        (
            'class Acme(Feature):\n    spec = FeatureSpec("acme-clip", "tool")',
            "MS104 the declaration of feature acme-clip is wrong: FeatureSpec.category is 'tool', not a Category",
        ),
        (
            "class Acme(Feature):\n    spec = Nowhere()",
            "MS101 feature acme-clip cannot be loaded: NameError: name 'Nowhere' is not defined",
        ),
        (
            "class AcmeArgs(FeatureArgs):\n    n = object()\nclass Acme(Feature[AcmeArgs]):\n    spec = None",
            "MS101 feature acme-clip cannot be loaded: PydanticUserError: A non-annotated attribute was detected: `n = <object",
        ),
    ],
)
def test_a_malformed_class_costs_only_itself(install, tmp_path, malformed, error):
    install("acme", "acme-clip", f"from mindspeed.plugins import *\n{malformed}\n{GOOD}")
    with (tmp_path / "acme-1.2.dist-info" / "entry_points.txt").open("a") as entries:
        entries.write("bolt = acme_features:Bolt\n")
    known = discover()
    assert str(known.broken["acme-clip"].problem).startswith(error)
    assert known.usable["bolt"].where.startswith("acme 1.2, acme_features.py:")
    assert set(discover(only=["bolt"]).broken) <= {"acme-clip"}
    assert "recompute" in known.usable


@pytest.mark.parametrize("default", ["10**5000", "object()"])
def test_a_default_that_json_cannot_hold_is_a_row(install, default):
    install("acme", "acme-clip", package(f"    m: object = Field({default}, description='m')"))
    problem = discover().broken["acme-clip"].problem
    assert problem.code == "MS104"
    assert problem.message.startswith(
        "the declaration of feature acme-clip is wrong: the default of the setting m cannot be written as JSON: "
    )


def test_an_annotation_that_names_nothing_is_a_row(install):
    install("acme", "acme-clip", package("    m: 'Nowhere' = Field(1, description='m')"))
    assert (
        discover()
        .broken["acme-clip"]
        .problem.message.startswith(
            "feature acme-clip cannot be loaded: PydanticUndefinedAnnotation: name 'Nowhere' is not defined"
        )
    )


LIST = "a list of Replace, Wrap, Mixin, Set"


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("patches", "None", LIST),
        ("patches", "'abc'", LIST),
        ("patches", "[1, 2]", LIST),
        ("patches", "{}", LIST),
        ("megatron_args", "{'a': 1}", "a list of ArgOverride"),
        ("notes", "5", "a list of strings"),
        ("held_slots", "3", "a list of strings or None"),
        ("job_values", "[1]", "a mapping or None"),
        ("layer_split", "'abc'", "a list of int or None"),
        ("budget", "'x'", "a pair of a string and a number or None"),
    ],
)
def test_a_wrong_answer_of_a_hook_names_feature_and_distribution(refusal, tmp_path, name, answer, expected):
    assert refusal(hook(name, f"return {answer}")) == (
        f"MS108 hook {name} of feature acme-clip returns {answer}, not {expected}\n"
        f"  where: acme 1.2, {tmp_path}/acme_features.py:9\n{REPORT}"
    )


def test_a_field_that_no_job_has_is_a_wrong_answer(refusal, tmp_path):
    assert refusal(hook("job_values", "return {'nonsense': 1}")) == (
        "MS108 hook job_values of feature acme-clip returns nonsense, which is not a field of a job\n"
        f"  where: acme 1.2, {tmp_path}/acme_features.py:9\n{REPORT}"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (hook("patches", "sys.exit(0)"), "SystemExit: 0, raised by the hook 'patches' of feature acme-clip"),
        (
            hook("patches", "os._exit(0)"),
            "ProcessEndError: it called os._exit(0), raised by the hook 'patches' of feature acme-clip",
        ),
        (
            hook("job_values", "1 / 0"),
            "ZeroDivisionError: division by zero, raised by the hook 'job_values' of feature acme-clip",
        ),
        (
            hook("megatron_args", "return [ArgOverride('num_layers', {}, 'why')]"),
            "TypeError: the value for num_layers is {}, not a string, a number, True, False or None, "
            "raised by the hook 'megatron_args' of feature acme-clip",
        ),
    ],
)
def test_an_error_of_a_hook_names_feature_and_distribution(refusal, tmp_path, source, text):
    first, where, fix = refusal(source).splitlines()
    assert first == f"MS901 {text}"
    assert fix == (
        "  fix: remove the feature, or report the error to its authors with the traceback that MINDSPEED_TRACE=1 prints"
    )
    assert where.startswith(f"  where: acme 1.2, {tmp_path}/acme_features.py:10")


def test_a_condition_that_ends_the_process_is_a_problem(refusal):
    source = package(
        "@condition('no')\ndef is_small(args, world):\n    'Check n.'\n    sys.exit(0)", ", constraints=(is_small,)"
    )
    first, *_, fix = refusal(source).splitlines()
    assert first == "MS107 the condition is_small of acme-clip raised SystemExit: 0"
    assert fix == "  fix: report it to the authors of acme, or remove acme-clip"


def test_a_constructor_that_ends_the_process_is_a_problem(refusal):
    assert refusal(package(method="def __init__(self, args, world): sys.exit(0)")) == (
        "MS901 the constructor of feature acme-clip failed with SystemExit: 0\n  where: acme 1.2\n"
        "  fix: remove acme-clip, or --without acme-clip"
    )


@pytest.mark.parametrize("stage", ["import", "hook", "condition"])
def test_code_that_takes_long_is_named_while_it_runs(install, monkeypatch, capsys, tmp_path, stage):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.2)
    monkeypatch.setattr(watchdog, "_LOOK", 0.05)
    wait = "time.sleep(0.5)"
    condition = f"@condition('no')\ndef is_small(args, world):\n    'Check n.'\n    {wait}\n    return True"
    source, what, line = {
        "import": (package(before=wait), "the import of feature acme-clip", 6),
        "hook": (hook("patches", f"{wait}; return []"), "hook patches of feature acme-clip", 10),
        "condition": (package(condition, ", constraints=(is_small,)"), "a condition is_small", 9),
    }[stage]
    install("acme", "acme-clip", source)
    registry.catalog.cache_clear()
    registry.plan(["acme-clip"], platform="cpu")
    registry.catalog.cache_clear()
    assert capsys.readouterr().err == (
        f"MS902 {what} is running for more than 0 s\n  where: acme 1.2, {tmp_path}/acme_features.py:{line}\n"
        "  fix: wait; if it does not end, remove the feature, and report it to the authors of acme 1.2\n"
    )


def test_the_watch_ends_with_what_it_watches():
    with watchdog.watched():
        assert watchdog.is_watched()
    assert not watchdog.is_watched()
    assert os._exit.__module__ == "posix"


@pytest.mark.parametrize("name", HOOKS)
def test_the_type_of_every_hook_can_be_tested(name):
    fits, words = answers._type_of(name)
    assert words
    assert fits(object()) == (words == "anything")
