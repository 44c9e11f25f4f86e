"""Commands of Megatron-LM's functional tests, which are kept as YAML files and started by recipes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.shell_script import Word

FAMILIES: Final = ("gpt", "moe", "hybrid")
_PROGRAM: Final = re.compile(r"TRAINING_SCRIPT_PATH=\\?\"?([\w./-]+\.py)")


@dataclass(frozen=True, slots=True)
class FunctionalTest:
    """Hold a functional test that trains: its name, its command, and the compute capability of its machine."""

    name: str
    command: LaunchedCommand
    arch: str


def functional_tests(checkout: Path) -> list[FunctionalTest]:
    """Every functional test of the families that starts a training script."""
    launches = dict(_launches(checkout / "tests" / "test_utils" / "recipes"))
    found = []
    for family in FAMILIES:
        for file in sorted((checkout / "tests" / "functional_tests" / "test_cases" / family).glob("*/model_config.yaml")):
            name = file.parent.name
            program, processes = launches.get(name, ("pretrain_gpt.py", 8))
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
            if "inference" in name or not Path(program).name.startswith("pretrain") or not isinstance(data, dict):
                continue
            if isinstance(options := data.get("MODEL_ARGS"), dict):
                alone = (data.get("MODEL_ENV_VARS") or {}).get("MODEL_ARGS") or {}
                processes = int(alone.get("GPUS_PER_NODE", processes))
                environ = tuple((str(key), str(value)) for key, value in (data.get("ENV_VARS") or {}).items())
                words = tuple(Word(word, 0) for word in _words(options))
                command = LaunchedCommand(program, words, processes, environ=environ)
                found.append(FunctionalTest(f"{family}/{name}", command, "10.0" if "b200" in name else "9.0"))
    return found


def _launches(recipes: Path) -> Iterator[tuple[str, tuple[str, int]]]:
    """The program and the number of processes of each test that a recipe starts."""
    for file in sorted(recipes.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        spec = data.get("spec") or {}
        program = _PROGRAM.search(str(spec.get("script")))
        processes = int(spec.get("gpus") or 8) * int(spec.get("nodes") or 1)
        for product in data.get("products") or ():
            for name in product.get("test_case") or ():
                yield name, (program[1] if program else "pretrain_gpt.py", processes)


def _words(options: dict[str, Any]) -> Iterator[str]:
    """The words of MODEL_ARGS as the tests' launcher makes them."""
    for option, value in options.items():
        if not str(option).startswith("-") or value is False:
            continue
        yield option
        text = str(value).replace("${REPEAT}", "1").replace("\\", "")
        if value is True or value is None:
            continue
        if text.startswith("["):
            yield from text.strip("[]").split()
        elif text.startswith('"'):
            yield text.strip('"')
        else:
            yield from text.split()
