"""Bytes on the loopback interface, counted where no other process sends any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_the_interface_carries_what_the_formulas_say_within_a_hundredth(world: int) -> None:
    asked = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True, text=True)
    if asked.returncode:
        pytest.skip(f"no network namespace of its own: {asked.stderr.strip()}")
    command = ["unshare", "--net", sys.executable, "-W", "ignore", "-m", "tests.context_parallel.loopback_job", str(world)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 12
    for name, (needed, carried) in found.items():
        # headers are 66 bytes of a packet of up to 65,536, and of each acknowledgement
        assert needed <= carried <= 1.01 * needed, name
