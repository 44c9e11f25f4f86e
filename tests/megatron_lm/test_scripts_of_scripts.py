"""Scripts that a script sources or calls are read with it, as bash would, each with the lines of its words."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.problems import ResolutionError
from mindspeed.workbench.lint.launched_command import command_of_file, commands_of_file
from mindspeed.workbench.lint.shell_script import shell_commands

TRAIN = "torchrun --nproc-per-node 2 pretrain_gpt.py --micro-batch-size 1"
SCRIPTS = {
    "common.sh": 'A=common\nexport E=exported\ntwice() { show $1 $1; }\nif [ -n "$1" ]; then show common $1 $#; fi\n',
    "sub/more.sh": 'B=$A-more\nshow $0 "${BASH_SOURCE[0]}"\n',
    "other.sh": 'show other $# "$@" A=$A E=$E T=$T\nA=changed\n. ./common.sh\nshow $A $1\n',
    "sub/where.sh": 'show $(dirname $0)/..\n. `dirname "$0"`/more.sh\n',
    "sub/again.sh": "show again $0\nbash other.sh again\n",
    "cycle.sh": 'show cycle $N\nif [ -z "$N" ]; then N=1; . cycle.sh; fi\n',
}
SNIPPETS = [
    "source common.sh; show $A; twice x",
    ". ./common.sh a 'b c'; show $1 $# $A",
    "A=1; D=sub; source $D/more.sh; show $B",
    "A=1; T=2 bash other.sh 'x y' z; show $A $#",
    "A=1; export A; sh other.sh; show $A; E=own; sh other.sh",
    "INHERITED=changed; bash sub/again.sh; bash -e other.sh $INHERITED",
    "source common.sh; source sub/more.sh; bash -c 'show $E; . ./common.sh; show $A'",
    "f() { source common.sh $2; local L=$1; show $L $1; }; f a b; show $1",
    "bash nowhere.sh; source nowhere.sh; show end",
    "./other.sh direct; show end",
    'D=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); . $D/common.sh; show $A $D $(basename $0); bash sub/where.sh',
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in SCRIPTS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_words_are_those_of_bash(folder: Path, snippet: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (folder / "bin").mkdir()
    (folder / "bin/show").write_text('#!/bin/bash\nprintf "%s\\0" "$@"; printf "\\1"\n')
    (folder / "bin/show").chmod(0o700)
    environ = {"INHERITED": "yes", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    (folder / "main.sh").write_text(snippet)
    ran = subprocess.run(["bash", "main.sh", "one"], capture_output=True, text=True, check=False, env=environ).stdout
    expected = [call.split("\0")[:-1] for call in ran.split("\1")[:-1]]
    commands = shell_commands(snippet, ["one"], environ, "main.sh")
    assert [[word.text for word in one.words[1:]] for one in commands if one.words[0].text == "show"] == expected
    assert expected


def test_a_script_is_found_beside_its_caller_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (folder / "main.sh").write_text(f". common.sh x\nbash sub/last.sh\n{TRAIN}")
    (folder / "sub/last.sh").write_text("bash ../other.sh\nshow last")
    found = shell_commands((folder / "main.sh").read_text(), (), {}, str(folder / "main.sh"))
    assert [one.words[1].text for one in found if one.words[0].text == "show"] == ["common", "other", "common", "last"]


def test_a_script_is_not_read_inside_itself(folder: Path) -> None:
    (folder / "main.sh").write_text("show main\nbash ./main.sh\n. cycle.sh")
    found = shell_commands((folder / "main.sh").read_text(), (), {}, "main.sh")
    assert [[word.text for word in one.words] for one in found] == [
        ["show", "main"],
        ["bash", "./main.sh"],
        ["show", "cycle"],
        [".", "cycle.sh"],
    ]


def test_words_have_the_file_and_the_line_where_their_text_stands(folder: Path) -> None:
    (folder / "common.sh").write_text("\nSIZE='\n  --num-layers 2'\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n")
    (folder / "other.sh").write_text(f"\n\nsrun {TRAIN} \\\n  $@ $SIZE\n")
    (folder / "main.sh").write_text(f". common.sh\nexport SIZE\nbash other.sh --seed 1\n{TRAIN} $SIZE --bf16\n")
    called, direct = commands_of_file("main.sh", {})
    assert (called.source, called.line, called.launcher) == ("other.sh", 3, "srun")
    assert (direct.source, direct.line, direct.launcher) == ("main.sh", 4, "torchrun")
    assert called.environ == (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("SIZE", "\n  --num-layers 2"))
    places = [command.place_of(option) for command in (called, direct) for option in ("--num-layers", "--seed")]
    assert places == [("common.sh", 3), ("main.sh", 3), ("common.sh", 3), None]
    assert command_of_file("main.sh", {}).others == ("main.sh:4",)


def test_a_problem_of_a_script_that_two_others_have_is_told_once_with_its_place(folder: Path) -> None:
    (folder / "common.sh").write_text("MODEL='--nosuch 1'\n")
    (folder / "main.sh").write_text(f". common.sh\n{TRAIN} $MODEL\nbash other.sh\n")
    (folder / "other.sh").write_text(f"source common.sh\n{TRAIN} $MODEL\n")
    printed = CliRunner().invoke(main, ["check", "--platform", "cuda", "."]).stdout
    assert printed.count("MS114 --nosuch is not an option") == printed.count("where: common.sh:1\n") == 1
    assert "main.sh:2: 1 problem\nother.sh:2: 1 problem\n" in printed


def test_a_limit_in_another_script_is_told_with_its_line(folder: Path) -> None:
    (folder / "common.sh").write_text("\nrun " + "${a:-" * 100)
    (folder / "main.sh").write_text(". common.sh")
    with pytest.raises(ResolutionError, match=r"main\.sh cannot be read: line 2 of common\.sh is nested more than 50"):
        commands_of_file("main.sh", {})
