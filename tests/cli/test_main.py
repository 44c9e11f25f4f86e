import json
import subprocess
import sys

import pytest

from mindspeed.cli.output import program

COMMANDS = """
import json, sys
from click.testing import CliRunner
from mindspeed.cli import main

HEAVY = {"torch", "megatron", "torch_npu", "numpy"}
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    print(json.dumps([done.exit_code, done.stdout, done.stderr, sorted(HEAVY & set(sys.modules))]))
"""
WORLD = ["--platform", "cpu", "--megatron", "0.16.1", "--world-size", "4", "--tp", "2"]
LIGHT = [
    ["--help"],
    ["features", "--help"],
    ["pretrain", "--help"],
    ["run", "--help"],
    ["data", "prepare", "--help"],
    ["features", "list"],
    ["features", "verify", "--help"],
    ["features", "check", "sequence-parallel", *WORLD],
    ["features", "plan", "sequence-parallel", *WORLD],
    ["features", "diff", "examples/pretrain_gpt.yaml", "examples/pretrain_gpt.yaml"],
    ["explain", "MS201"],
    ["ops", "list"],
    ["patches", "drift", "--json"],
]


@pytest.mark.guards(22, 51, processes=True)
def test_asking_imports_neither_torch_nor_megatron():
    done = subprocess.run([sys.executable, "-c", COMMANDS, json.dumps(LIGHT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for arguments, line in zip(LIGHT, done.stdout.splitlines(), strict=True):
        status, stdout, stderr, imported = json.loads(line)
        assert (arguments, status, stderr, imported) == (arguments, 0, "", [])
        assert stdout
        assert "\x1b" not in stdout


def test_an_unknown_code_is_a_usage_error(mindspeed):
    done = mindspeed("explain", "MS999")
    assert done.exit_code == 2
    assert "Error: there is no code MS999; did you mean MS902 or MS901" in done.stderr


def test_an_unknown_option_is_a_usage_error(mindspeed):
    done = mindspeed("features", "check", "--tpp", "2")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "No such option" in done.stderr
    assert "--tpp" in done.stderr


def test_a_size_that_is_no_number_is_a_usage_error(mindspeed):
    done = mindspeed("features", "check", "--tp", "two")
    assert done.exit_code == 2
    assert "Invalid value for '--tp': 'two' is not a valid integer." in done.stderr


def test_the_command_is_named_as_the_shell_reaches_it(monkeypatch):
    monkeypatch.setattr("sys.argv", [".venv/bin/mindspeed", "pretrain"])
    monkeypatch.setattr("mindspeed.cli.output.which", lambda name: None)
    assert program() == ".venv/bin/mindspeed"
    monkeypatch.setattr("mindspeed.cli.output.which", lambda name: f"/usr/bin/{name}")
    assert program() == "mindspeed"


def test_a_misspelt_verb_gets_near_names(mindspeed):
    done = mindspeed("featurs", "list")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith("Error: no such command 'featurs'; did you mean features?\n")
    assert "no such command 'chek'; did you mean check?" in mindspeed("features", "chek").stderr
    assert "no such command 'zzz'; there are list, build" in mindspeed("ops", "zzz").stderr
