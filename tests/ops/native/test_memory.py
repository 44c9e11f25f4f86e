"""Memory of large results: left by one, taken by the next, bounded."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mindspeed.ops import swiglu
from tests.ops.native.kernels import needs_library, normal

pytestmark = needs_library

MIB = 1 << 20
PROGRAM = """
import torch
from mindspeed.ops import swiglu
x = torch.ones(1, 2 << 23)
def resident():
    status = open("/proc/self/status").read()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10
swiglu(x[:, :8])
before = resident()
results = [swiglu(x) for _ in range(3)]
held = resident()
del results
print(held - before, resident() - before)
"""


def large(seed):
    """What makes a result of 4 MiB."""
    return normal(2 * MIB, seed=seed)


def test_a_result_has_the_memory_that_one_before_it_left():
    x = large(1)
    first = swiglu(x)
    place = first.data_ptr()
    del first
    assert swiglu(x).data_ptr() == place


def test_memory_that_a_view_still_shows_is_not_given_away():
    x, other = large(1), large(2)
    view = swiglu(x)[-3:]
    kept = view.clone()
    swiglu(other)
    assert torch.equal(view, kept)


def test_a_result_can_grow_and_be_shared_with_processes():
    y = swiglu(large(1))
    expected = y.clone()
    y.resize_(2 * MIB)
    assert torch.equal(y[:MIB], expected)
    assert torch.equal(y.share_memory_()[:MIB], expected)


def test_threads_do_not_get_one_anothers_memory():
    def train(seed):
        x = large(seed)
        expected = swiglu(x).clone()
        return all(torch.equal(swiglu(x), expected) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(train, range(4))) == [True] * 4


@pytest.mark.budget(8)
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize(("limit", "kept"), [pytest.param(0, 0, marks=pytest.mark.long), (40, 32)])
def test_no_more_is_kept_than_asked_for(limit, kept):
    """Three results of 32 MiB each, in MiB."""
    environment = {**os.environ, "MINDSPEED_KEPT_MEMORY": str(limit), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    held, left = map(int, done.stdout.split())
    assert 90 <= held <= 110
    assert kept - 4 <= left <= kept + 8
