"""The training command of a launch is found in words, in a shell script and in a launcher's JSON."""

import json

import pytest

from mindspeed.problems import ResolutionError
from mindspeed.workbench.lint.launched_command import command_of_file, command_of_words, training_commands

TRAIN = "pretrain_gpt.py --num-layers 2 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=2", 16),
        ("python -m torch.distributed.launch --nproc-per-node=4", 4),
        ("msrun --worker_num 16 --local_worker_num 8", 16),
        ("mindspeed run --nproc 2 --", 2),
        ("python", 1),
        ("torchrun", None),
        ("torchrun --nproc_per_node auto", None),
        ("nohup torchrun --nproc_per_node 2", 2),
    ],
)
def test_the_launcher_gives_the_number_of_processes(launcher, size):
    (command,) = training_commands(f"{launcher} {TRAIN}", "x.sh")
    assert (command.program, command.world_size) == ("pretrain_gpt.py", size)
    assert [word.text for word in command.arguments] == TRAIN.split()[1:]


def test_other_commands_of_a_script_are_passed_over(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        f"python prepare.py --input x\necho {TRAIN}\ntorchrun --nproc_per_node 2 {TRAIN}\n\n{'torchrun ' + TRAIN}\n"
    )
    command = command_of_file(script, {})
    assert (command.world_size, command.source, command.others) == (2, str(script), (f"{script}:5",))
    assert command.place_of("--num-layers") == (str(script), 3)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (["torchrun", "--nproc-per-node", "2", *TRAIN.split()], 2),
        ({"program": "pretrain_gpt.py", "args": ["--num-layers", "2", "--micro-batch-size", "1"]}, 1),
        ({"script": "pretrain_gpt.py", "nproc_per_node": 4, "args": {"num_layers": 2, "--micro-batch-size": 1, "x": False}}, 4),
        ({"configurations": [{"program": "pretrain_gpt.py", "args": TRAIN.split()[1:]}]}, 1),
    ],
)
def test_a_launchers_json_is_read(tmp_path, data, size):
    file = tmp_path / "launch.json"
    file.write_text("// made by an editor\n" + json.dumps(data, indent=1))
    command = command_of_file(file, {})
    assert [word.text for word in command.arguments] == ["--num-layers", "2", "--micro-batch-size", "1"]
    assert command.world_size == size
    assert command.place_of("--num-layers") > (str(file), 1)


def test_words_without_a_launcher_are_a_command():
    assert command_of_words(["pretrain_gpt.py", "--lr", "1"]).world_size is None


@pytest.mark.parametrize(
    ("name", "text"), [("a.sh", "echo hello"), ("a.json", "{"), ("a.json", '{"args": []}'), ("none.sh", None)]
)
def test_a_file_without_a_training_command_is_a_problem(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ResolutionError) as caught:
        command_of_file(tmp_path / name, {})
    (problem,) = caught.value.problems
    assert problem.code in ("MS301", "MS305")
    assert str(tmp_path) in problem.where


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("deep.json", "[" * 100_000, "{path} is not valid JSON: "),
        ("deep.sh", "run " + "${a:-" * 100, "{path} cannot be read: line 1 is nested more than 50 levels deep"),
        ("long.sh", "#" * 2_000_000, "{path} cannot be read: the script has 1000001 characters, more than 1000000"),
        ("folder.sh", None, "{path} cannot be read: it is not a file"),
    ],
)
def test_a_file_that_goes_beyond_a_limit_is_a_problem(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text) if text is not None else path.mkdir()
    with pytest.raises(ResolutionError) as caught:
        command_of_file(path, {})
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("MS305", str(path))
    assert problem.message.startswith(message.format(path=path))


@pytest.mark.parametrize(
    "data", [5, None, [], {"args": 5}, {"configurations": 5}, {"configurations": [5, None]}, {"args": [None]}]
)
def test_json_that_is_no_command_is_a_problem(tmp_path, data):
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(ResolutionError, match="no command that runs a Python script"):
        command_of_file(tmp_path / "a.json", {})


def test_a_number_of_processes_that_is_none_is_unknown():
    for count in ("²", "9" * 5000, "-"):
        (command,) = training_commands(f"torchrun --nproc_per_node {count} {TRAIN}", "x.sh")
        assert command.world_size is None
