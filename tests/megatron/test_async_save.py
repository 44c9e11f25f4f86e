"""Megatron's asynchronous checkpoint writers, forked and spawned, on the cpu platform."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.warm_processes import warm_python

SCRIPT = Path(__file__).with_name("async_save.py")


@pytest.mark.long
@pytest.mark.parametrize("writers", ["forked", "persistent"])
def test_later_writes_to_a_weight_do_not_reach_the_file(writers, tmp_path):
    command = [
        *warm_python(),
        "-m",
        "mindspeed",
        "run",
        "--platform",
        "cpu",
        "--",
        str(SCRIPT),
        str(tmp_path / "save"),
        writers,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1.0]
