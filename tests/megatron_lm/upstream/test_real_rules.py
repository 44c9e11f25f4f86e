"""The rules of real Megatron-LMs: accepted commands have no problem, wrong ones are told, and the record is what they give."""

import json
import os
from pathlib import Path
from shlex import split

import pytest

from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.workbench.lint.upstream.process import find_checkout
from mindspeed.workbench.lint.upstream.rules import Command, judge
from tests.megatron_lm.checkout import VARIABLE
from tools import lint_results
from tools.lint_results import RECORD, SOURCES, checkout_of

pytestmark = pytest.mark.long

MEGATRONS = [name for name in SOURCES if name.startswith("Megatron-LM")]
needs_checkout = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")


@pytest.mark.budget(600)
@pytest.mark.parametrize("name", SOURCES)
def test_the_record_is_what_a_checkout_gives(name: str) -> None:
    folder = checkout_of(name)
    if folder is None:
        pytest.skip(f"{lint_results.VARIABLE} names no folder with a checkout of {name}")
    record = json.loads(RECORD.read_text(encoding="utf-8"))[name]
    assert {"commit": SOURCES[name], **json.loads(json.dumps(lint_results.measured(name, folder)))} == record


@needs_checkout
def test_a_yaml_configuration_is_judged_by_the_rules_of_its_own(tmp_path: Path) -> None:
    checkout = find_checkout("pretrain_gpt.py", {}, os.environ[VARIABLE])
    assert checkout is not None
    text = (checkout.folder / "examples" / "gpt3" / "gpt_config.yaml").read_text(encoding="utf-8")
    file = tmp_path / "gpt.yaml"
    file.write_text(f"{text}\nenable_msc: true\n", encoding="utf-8")
    words = split(f"--yaml-cfg {file}")
    known = surface_or_nearest(checkout.version)
    commands = [Command(words, 1, environ) for environ in ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {})]
    accepted, refused = judge(checkout, commands, known, "9.0")
    assert accepted.problems == ()
    assert [problem.where.rpartition(":")[0] for problem in refused.problems] == ["megatron/training/yaml_arguments.py"]
