"""``check`` of a training command runs the rules of the Megatron-LM that it names."""

import json

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from tests.megatron_lm.upstream.checkouts import MISSING, make

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1"
)


def check(*words):
    return CliRunner().invoke(main, ["check", *words])


@pytest.fixture
def script(tmp_path):
    make(tmp_path)
    path = tmp_path / "train.sh"
    path.write_text(f"python {tmp_path}/pretrain_gpt.py {MODEL} \\\n  --bf16 \\\n  --fp16\n")
    return path


@pytest.mark.budget(20)
def test_a_command_that_megatron_refuses_has_problems_with_line_and_rule(script):
    result = check("--platform", "cuda", "--json", str(script))
    assert result.exit_code == 1, result.output
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["code"] == "MS115"
    assert problem["message"] == "Megatron-LM 0.16.1 refuses this command: not args.fp16"
    assert problem["where"].startswith(f"{script}:3 (megatron/training/arguments.py:")
    assert problem["fix"] == "remove --fp16"


@pytest.mark.budget(20)
@pytest.mark.parametrize("value", ["$1", "$(cat layers)"])
def test_a_needed_value_that_only_a_run_would_know_is_not_missing(value, tmp_path):
    make(tmp_path, MISSING)
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun {tmp_path}/pretrain_gpt.py {MODEL.replace('--num-layers 4', f'--num-layers {value}')}\n")
    result = check("--platform", "cuda", str(script))
    assert result.exit_code == 0, result.output
    assert "not checked: launcher: the value of --num-layers (line 1), which is known only when" in result.stdout


@pytest.mark.budget(20)
def test_without_its_rules_it_is_planned(script):
    assert check("--platform", "cuda", "--static", str(script)).exit_code == 0


@pytest.mark.budget(20)
def test_rules_that_are_not_decided_are_listed(script):
    script.write_text(script.read_text().replace("--fp16", ""))
    result = check("--platform", "cuda", str(script))
    assert result.exit_code == 0, result.output
    assert (
        "not checked: megatron-lm: rules that need a device, a package or a file: megatron/training/arguments.py:"
        in result.stdout
    )
    assert "not checked: megatron-lm" not in check("--static", "--platform", "cuda", str(script)).stdout


def test_a_folder_without_rules_is_a_usage_error(tmp_path):
    assert check("--checkout", str(tmp_path), "--", "pretrain_gpt.py", *MODEL.split()).exit_code == 2
    assert check("--arch", "hopper", "--", "pretrain_gpt.py", *MODEL.split()).exit_code == 2
