"""`repatch` in a job of two real ranks: plans stay equal, or both ranks stop and say the difference."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.warm_processes import warm_python

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from mindspeed.megatron_adaptor import repatch
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
layers = {"transformer_impl": "local", "normalization": "RMSNorm"}
repatch({"tensor_model_parallel_size": 2, "use_fused_rmsnorm": True, **layers})
if sys.argv[1] == "differ":
    repatch({"sequence_parallel": dist.get_rank() == 0})
total = torch.ones(1)
dist.all_reduce(total)
from mindspeed.engine.runtime import session
names = " ".join(session.current().plan.names)
sys.stdout.write(f"ended {dist.get_rank()} {names} {int(total)}\\n")
"""


def launch(folder, argument):
    (folder / "script.py").write_text(SCRIPT)
    env = (
        os.environ
        | {"PYTHONPATH": str(ROOT), "MINDSPEED_PLATFORM": "cpu", "MINDSPEED_REPORT": ""}
        | {"MINDSPEED_AGREEMENT_TIMEOUT": "60", "MINDSPEED_OPS": "reference"}
    )
    command = [*warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py", argument]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False)


@pytest.mark.long
@pytest.mark.guards(29, processes=True)
def test_a_size_that_is_known_late_reaches_both_ranks(tmp_path):
    done = launch(tmp_path, "same")
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("ended"))
    assert lines == ["ended 0 rms-norm tensor-parallel 2", "ended 1 rms-norm tensor-parallel 2"]


@pytest.mark.long
def test_ranks_that_repatch_differently_stop_and_name_the_difference(tmp_path):
    done = launch(tmp_path, "differ")
    assert done.returncode != 0
    assert "ended" not in done.stdout
    for rank in (0, 1):
        assert f"rank {rank}: MS610 the ranks have different plans: rank 1 has no feature sequence-parallel" in done.stderr
