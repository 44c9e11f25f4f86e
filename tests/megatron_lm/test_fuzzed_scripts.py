"""Scripts and command lines of any form are read to a result or to problems, without a traceback and without hanging."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.resolution.environment import made_up
from mindspeed.problems import ResolutionError
from mindspeed.workbench.lint.dry_run import plan_command
from mindspeed.workbench.lint.launched_command import command_of_words, commands_of_file

PIECES = (
    *(
        "A=",
        'A="$A $A"',
        "$A",
        "${A",
        "${A:-",
        "${A[@]}",
        "${#A}",
        "${A%%",
        "}",
        "$((",
        "))",
        "$(",
        ")",
        "(",
        "`",
        "'",
        '"',
        "\\",
    ),
    *(
        "if ",
        "then",
        "else",
        "fi",
        "for A in ",
        "; do ",
        "done",
        "[ ",
        " ]",
        "[[",
        "&&",
        "||",
        ";",
        "|",
        "&",
        "<<E",
        "\nE\n",
        ">",
    ),
    *(
        "case $A in ",
        "*) ",
        ";;",
        "esac",
        "f ",
        "f() { f; g; }",
        "g() { f; f; }",
        "function ",
        "local ",
        "bash -c ",
        "eval ",
        "ssh h ",
    ),
    *("\n", " ", "\t", "\\\n", "\u00a0", "\f", "²", "9**9**9", "f() {", "{", "#", "$@", '"$@"', "$1", "=", "+=", "\x00"),
    *("torchrun --nproc_per_node 2 ", "pretrain_gpt.py ", "--micro-batch-size 1 ", "--num-layers ", "--features "),
)
SCRIPTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=40).map("".join),
    st.builds(lambda piece, times: piece * times, st.sampled_from(PIECES), st.integers(1, 3000)),
)
OPTIONS = sorted(surface("0.16.1").by_option) if surface("0.16.1") else []
WORDS = st.one_of(
    st.sampled_from([*OPTIONS, "--features", "--set", "--without", "--strict", "--mindspeed-config"]),
    st.sampled_from(
        ["0", "1", "2", "-1", "4", "64", "1e9", "nan", "99999999999999999999", "", "--", "-", "--=", "x=y", "[1,2]", "²"]
    ),
    st.text(max_size=4),
)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def reads_script(folder: Path, text: str) -> None:
    path = folder / "x.sh"
    path.write_text(text, encoding="utf-8", errors="replace")
    with suppress(ResolutionError):
        commands_of_file(path, {"HOME": "/"})


def plans_words(words: list[str]) -> None:
    with suppress(ResolutionError):
        plan_command(command_of_words(["pretrain_gpt.py", *words]), made_up("cpu", "0.16.1"))


@seed(34)
@settings(max_examples=60, deadline=10_000, suppress_health_check=QUIET)
@given(text=SCRIPTS)
def test_any_script_is_read_or_refused(tmp_path: Path, text: str) -> None:
    reads_script(tmp_path, text)


@pytest.mark.long
@seed(35)
@settings(max_examples=2000, deadline=10_000, suppress_health_check=QUIET)
@given(text=SCRIPTS)
def test_two_thousand_scripts_are_read_or_refused(tmp_path: Path, text: str) -> None:
    reads_script(tmp_path, text)


@pytest.mark.long
@seed(36)
@settings(max_examples=2000, deadline=60_000, suppress_health_check=QUIET)
@given(words=st.lists(WORDS, max_size=12))
def test_two_thousand_command_lines_are_planned_or_refused(words: list[str]) -> None:
    plans_words(words)
