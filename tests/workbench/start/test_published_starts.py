"""Every training command that MindSpeed and MindSpeed-LLM publish, and those of Megatron-LM's functional tests, starts on each
distinct rank, or check refuses it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest
from mindspeed.megatron_lm.script_options import script_options
from mindspeed.problems import MindSpeedError, ResolutionError, RunError
from mindspeed.registry import probe
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.upstream.process import find_checkout
from mindspeed.workbench.start import script_start
from mindspeed.workbench.verification.pool import WorkerPool
from tests.megatron_lm.checkout import VARIABLE
from tools.functional_tests import functional_tests
from tools.published_commands import PLATFORM, VARIABLES, published

NAMES = (VARIABLE, *VARIABLES.values())
MISSING = [name for name in NAMES if name not in os.environ]


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Case:
    """A command, the folder and the platform of its script, the compute capability, and its name."""

    command: LaunchedCommand
    folder: Path
    platform: str
    arch: str
    name: str


def cases() -> Iterator[Case]:
    for folder in map(Path, (os.environ[name] for name in VARIABLES.values())):
        for command in published(folder):
            yield Case(command, folder, PLATFORM, "9.0", f"{command.source}:{command.line}")
    checkout = Path(os.environ[VARIABLE])
    for test in functional_tests(checkout):
        yield Case(test.command, checkout, "cuda", test.arch, test.name)


def kinds() -> Iterator[Case]:
    """Yield of the commands that differ only in numbers the one with the fewest layers."""
    smallest: dict[frozenset[str], tuple[int, Case]] = {}
    for case in cases():
        words = [word.text for word in case.command.arguments]
        given = given_arguments(words, surface_or_nearest(None)).get("num_layers")
        layers = given.value if given is not None else 0
        key = frozenset(word for word in words if not is_number(word))
        if key not in smallest or layers < smallest[key][0]:
            smallest[key] = layers, case
    return (case for _, case in smallest.values())


CASES = [] if MISSING else [pytest.param(case, id=case.name) for case in kinds()]
BEYOND_A_CPU = {
    "is not installed": "needs a package that is not here",
    "mamba_ssm": "needs kernels of Mamba",
}
"""Why some commands cannot be started without their devices, by a part of the message."""


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
@pytest.mark.parametrize("case", CASES)
def test_a_published_command_that_check_accepts_starts(case, checkout, at_checkout, monkeypatch):
    monkeypatch.chdir(case.folder)  # files of its arguments
    version = checkout.version
    job = CheckedJob(case.command, replace(made_up(case.platform, version), training=True), checkout)
    [(plan, _)] = check_jobs([job], case.arch)
    if isinstance(plan, MindSpeedError):
        assert all(problem.message and problem.fix for problem in plan.problems)
        return
    environment = replace(probe("cpu"), world_size=int(plan.world.world_size), megatron=version)
    own = script_options(case.command.program, Path(case.command.source), checkout.folder)
    try:
        script_start.start(at_checkout, case.command, checkout.folder, environment, registered=own)
    except ResolutionError as error:
        pytest.skip(f"it cannot be started on a CPU: {error.problems[0].message}")
    except RunError as error:
        reason = next((why for part, why in BEYOND_A_CPU.items() if part in error.problems[0].message), None)
        if reason is None:
            raise
        pytest.skip(reason)
