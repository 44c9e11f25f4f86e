"""A package translates flags of its own program; one that cannot be imported is a problem that names it."""

import sys
from dataclasses import replace

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.dialects import dialects
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.plugins.extensions import extensions

FLAGS = """
from mindspeed.engine.resolution.request import Layer
from mindspeed.megatron_lm.dialects import Translation


class Acme:
    name = "acme flags"

    def translate(self, argv, known, catalog):
        rest = tuple(word for word in argv if word != "--acme-count-flops")
        features = ("tflops",) if len(rest) < len(argv) else ()
        return Translation(Layer("flag of acme", features), rest, notes=tuple(f"{name} is on" for name in features))

    def advice(self, given, version):
        return ""

    def flags_of(self, feature):
        return ["--acme-count-flops"] if feature == "tflops" else []

    def takes_text(self, flag):
        return False

    def refusal_of(self, program):
        return None


ACME = Acme()
"""
MODEL = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"]


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install a distribution with a dialect, and forget it after the test."""

    def install(source):
        (tmp_path / "acme_flags.py").write_text(source)
        info = tmp_path / "acme-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[mindspeed.dialects]\nacme = acme_flags:ACME\n")
        monkeypatch.delitem(sys.modules, "acme_flags", raising=False)
        forget()

    def forget():
        extensions.cache_clear()
        dialects.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    monkeypatch.undo()
    forget()


def plan_of(*words):
    return plan_training([*MODEL, *words], {}, replace(made_up("cpu", "0.16.1"), world_size=1))


def test_a_flag_of_a_package_switches_a_feature_on_and_is_removed_beside_the_flags_of_mindspeed(acme):
    acme(FLAGS)
    request, plan = plan_of("--acme-count-flops", "--use-fused-swiglu", "--swiglu")
    assert {"tflops", "swiglu"} <= set(plan.names)
    assert request.rest == (*MODEL, "--swiglu")
    assert "tflops is on" in [row.text for row in request.notes]
    assert [dialect.name for dialect in dialects()] == ["old flags", "acme flags"]


def test_a_command_that_megatron_reads_alone_loads_no_dialect(acme):
    acme("raise RuntimeError")
    assert plan_of("--swiglu")[1].names


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
        ("ACME = 3", "failed in translate: AttributeError: 'int' object has no attribute 'translate'"),
        (f"{FLAGS}\nAcme.translate = lambda *given: None", "returned None from translate, not a Translation"),
        (f"{FLAGS}\nAcme.translate = lambda *given: {{}}['x']", "failed in translate: KeyError: 'x'"),
    ],
)
def test_a_dialect_that_fails_is_a_warning_that_names_its_distribution_and_the_others_work(acme, source, what):
    acme(source)
    request, plan = plan_of("--use-fused-swiglu", "--swiglu", "--own-flag", "3")
    assert "swiglu" in plan.names
    assert request.rest == (*MODEL, "--swiglu", "--own-flag", "3")
    assert f"MS101 acme of acme {what}; fix or uninstall acme" in [row.text for row in request.notes]


def test_a_distribution_that_is_not_allowed_translates_nothing(acme, monkeypatch):
    acme(FLAGS)
    monkeypatch.setenv("MINDSPEED_PLUGINS", "none")
    registry.catalog.cache_clear()
    extensions.cache_clear()
    dialects.cache_clear()
    assert [dialect.name for dialect in dialects()] == ["old flags"]
    registry.catalog.cache_clear()
