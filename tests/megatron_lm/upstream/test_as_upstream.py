"""Upstream's real validation, with torch, ends at an error that the list of the check contains, or at none like it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import split

import pytest

from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.problems import Problem
from mindspeed.workbench.lint.upstream.process import find_checkout
from mindspeed.workbench.lint.upstream.rules import Command, judge
from tests.megatron_lm.checkout import VARIABLE
from tools.functional_tests import functional_tests
from tools.lint_results import DENSE, ENVIRON, mutations

pytestmark = [pytest.mark.long, pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")]

RUNNER = Path(__file__).with_name("real_validation.py")


def places(problem: Problem) -> list[str]:
    """Return where a problem is told, and the rules that would refuse the same."""
    also = "also refused at "
    return [problem.where, *(line.removeprefix(also) for line in problem.chain if line.startswith(also))]


@pytest.mark.budget(600)
def test_the_first_error_of_200_commands_is_among_those_that_are_told():
    folder = Path(os.environ[VARIABLE])
    commands = [
        Command([word.text for word in test.command.arguments], test.command.world_size or 8, dict(test.command.environ))
        for test in functional_tests(folder)
    ]
    commands += [Command(split(f"{DENSE} {mutation}"), 16, ENVIRON) for mutation in mutations()]
    assert len(commands) >= 200
    task = {"checkout": str(folder), "commands": [asdict(command) for command in commands]}
    done = subprocess.run([sys.executable, RUNNER], input=json.dumps(task), capture_output=True, text=True, check=True)
    checkout = find_checkout("pretrain_gpt.py", {}, str(folder))
    assert checkout is not None
    verdicts = judge(checkout, commands, surface_or_nearest(checkout.version), "9.0")
    disagreements, undecided = [], 0
    for command, line, verdict in zip(commands, done.stdout.splitlines(), verdicts, strict=True):
        error, told = json.loads(line), {place for problem in verdict.problems for place in places(problem)}
        if error is None:
            agrees = not told
        elif error["type"] == "ParserError":  # a dry run tells those
            agrees = True
        else:
            needs_package = not told.intersection(error["places"])
            agrees = not needs_package or not set(verdict.undecided).isdisjoint(error["places"])
            undecided += needs_package
        if not agrees:
            disagreements.append((command.words, error, told))
    assert disagreements == []
    assert undecided <= 20, "rules that need Transformer Engine, which is not installed here"
