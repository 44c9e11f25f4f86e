"""`examples/own_trainer.py`: a loop without Megatron that learns, on the operators."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "own_trainer.py"
WATCHED = """
import json, runpy, sys
from torch.utils._python_dispatch import TorchDispatchMode

class Watch(TorchDispatchMode):
    seen = set()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mindspeed":
            self.seen.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))

sys.argv = ["own_trainer.py", "--steps", "12", "--batch", "4"]
with Watch():
    runpy.run_path(SCRIPT, run_name="__main__")
print(json.dumps({"operators": sorted(Watch.seen), "megatron": any(name.startswith("megatron") for name in sys.modules)}))
"""


@pytest.mark.long
@pytest.mark.budget(10)
def test_it_learns_with_five_operators_and_without_megatron() -> None:
    program = f"SCRIPT = {str(SCRIPT)!r}\n{WATCHED}"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    *steps, last = done.stdout.splitlines()
    losses = [float(line.split()[3]) for line in steps]
    assert losses[-1] < losses[0] - 1.5
    forward = ("fusion_attention", "npu_fused_moe_token_permute", "npu_fused_moe_token_unpermute", "npu_gmm")
    further = ("npu_rotary_position_embedding", "rms_norm", "swiglu")
    seen = json.loads(last)
    assert {*forward, *further} <= set(seen["operators"])
    assert not seen["megatron"]
