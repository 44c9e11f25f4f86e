"""Activation is undone exactly, on the real torch and megatron and with the real base plan."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.warm_processes import warm_python


def run(scenario: str, given: Any = None, python: Sequence[str] = (sys.executable, "-W", "ignore")) -> Any:
    done = subprocess.run(
        [*python, "-m", "tests.engine.patching.process_snapshots", scenario],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("RESULT")[2])


@pytest.mark.budget(20)
@pytest.mark.guards(30, processes=True)
def test_activate_and_deactivate_leave_every_object_as_it_was_twice_in_a_row():
    assert run("twice", python=warm_python()) == []


@pytest.mark.long
def test_activated_before_megatron_is_imported_leaves_the_state_of_a_process_without_us():
    with_us = run("activated")
    without_us = run("fresh", with_us["modules"])
    assert with_us["meta_path"] == without_us["meta_path"]
    assert set(with_us["modules"]) <= set(without_us["modules"])
    state = without_us["state"]
    different = {
        f"{name} {key}": (entry, state.get(name, {}).get(key))
        for name, entries in with_us["state"].items()
        for key, entry in entries.items()
        if entry != state.get(name, {}).get(key)
    }
    assert different == {}
