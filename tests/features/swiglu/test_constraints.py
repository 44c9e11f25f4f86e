from dataclasses import replace

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.training_plan import plan_training


def test_megatrons_own_flag_takes_it_out():
    environment = replace(made_up("cpu", "0.16.1"), world_size=1)
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --swiglu"
    for flags, expected in (("", True), (" --no-bias-swiglu-fusion", False)):
        _, plan = plan_training(f"{shape}{flags}".split(), {}, environment)
        assert ("swiglu" in plan.names) is expected
    (row,) = [row for row in plan.rows if row.feature == "swiglu"]
    assert (row.kind, row.text) == ("left-out", "removed by Megatron's --no-bias-swiglu-fusion")
