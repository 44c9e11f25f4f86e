"""Every training command that MindSpeed and MindSpeed-LLM publish starts on each distinct rank, or check refuses it."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest
from mindspeed.problems import MindSpeedError, ResolutionError
from mindspeed.registry import probe
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.upstream.process import find_checkout
from mindspeed.workbench.start import script_start
from mindspeed.workbench.verification.pool import WorkerPool
from tests.megatron_lm.checkout import VARIABLE
from tools.published_commands import PLATFORM, VARIABLES, published

NAMES = (VARIABLE, *VARIABLES.values())
MISSING = [name for name in NAMES if name not in os.environ]


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def kinds() -> Iterator[tuple[LaunchedCommand, Path]]:
    """Yield of the commands that differ only in numbers the one with the fewest layers, with its repository."""
    smallest: dict[frozenset[str], tuple[int, LaunchedCommand, Path]] = {}
    for folder in map(Path, (os.environ[name] for name in VARIABLES.values())):
        for command in published(folder):
            words = [word.text for word in command.arguments]
            given = given_arguments(words, surface_or_nearest(None)).get("num_layers")
            layers = given.value if given is not None else 0
            key = frozenset(word for word in words if not is_number(word))
            if key not in smallest or layers < smallest[key][0]:
                smallest[key] = layers, command, folder
    return ((command, folder) for _, command, folder in smallest.values())


CASES = [] if MISSING else [pytest.param(*case, id=f"{case[0].source}:{case[0].line}") for case in kinds()]


@pytest.fixture(scope="module")
def checkout():
    found = find_checkout("pretrain_gpt.py", {}, os.environ[VARIABLE])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def at_checkout(checkout):
    with WorkerPool([str(checkout.folder)]) as pool:
        yield pool


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} do not name checkouts")
@pytest.mark.parametrize(("command", "folder"), CASES)
def test_a_published_command_that_check_accepts_starts(command, folder, checkout, at_checkout, monkeypatch):
    monkeypatch.chdir(folder)  # files of its arguments
    job = CheckedJob(command, replace(made_up(PLATFORM, checkout.version), training=True), checkout)
    [(plan, _)] = check_jobs([job])
    if isinstance(plan, MindSpeedError):
        assert all(problem.message and problem.fix for problem in plan.problems)
        return
    environment = replace(probe("cpu"), world_size=int(plan.world.world_size), megatron=checkout.version)
    try:
        script_start.start(at_checkout, command, checkout.folder, environment)
    except ResolutionError as error:
        pytest.skip(f"it cannot be started on a CPU: {error.problems[0].message}")
