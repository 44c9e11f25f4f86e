"""Launch scripts are read as bash would expand them, with the lines of their words."""

import shutil
import subprocess

import pytest

from mindspeed.megatron_lm.shell_script import shell_commands


def words(script, *arguments, **environ):
    return [[word.text for word in command.words] for command in shell_commands(script, arguments, environ)]


SNIPPETS = [
    "A=1; B=$A$A; show --b ${B} '$A' \"$A b\" \\$A",
    "A='--x 1\n  --y 2'; show $A \"$A\"",
    'A="--x 1 \\\n  --y $((2*3))"\nshow $A',
    'A="a"; A+=\' --b\'; A+=" c d"; show $A',
    'show ${N:-4} ${N-5} ${N:=6} $N ${M:+no} ${N:+--n "$N"}',
    "E=''; show ${E:-x} ${E-y} ${E:+z} \"$E\" $E end",
    'A=(--x 1  # a comment\n  --y \'two words\' "$HOME_"\n)\nA+=(--z)\nshow ${A[@]} "${A[@]}" ${A[1]} ${#A[@]}',
    "P=/a/b/c.tar.gz; show ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${#P}",
    "N=2; W=$(($N*8 + 1)); show $W $((W / 4)) $((10 % 3))",
    'A=1 B=2\nexport C=$A$B D="x y"\nshow $C $D',
    'if [ "$Q" == "" ]; then A=yes; else A=no; fi; show $A',
    "Q=3; if [[ $Q -eq 2 ]]; then A=two; elif [ $Q -gt 2 ]; then A=more; else A=less; fi; show $A",
    'Q=3; if [ -z $Q ] || [ $Q != 4 ]; then show either; fi; if [ -n "$Q" ] && [ $Q = 4 ]; then show both; fi',
    '[ -z "$Q" ] && Q=filled; show $Q; [[ -n $Q ]] || Q=again; show $Q',
    "for X in a; do show $X; done; show end # not this",
    "show a; show b && show c\nshow d > /dev/null; show e 2>&1",
    "cat <<EOF\n$A 'quoted\nEOF\nshow after",
    "f() {\n show inside\n}\nshow outside",
    "show a\\ b a'b'c\"d\" --x=$((1+1)) --y='1 2'",
    "set -- one 'two three'; show done",
    "show a#b '#c' --d#",
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_words_are_those_of_bash(snippet):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    shown = 'show() { printf "%s\\0" "$@"; printf "\\1"; }\n'
    quiet = snippet.replace("> /dev/null", "").replace("2>&1", "").replace("cat <<", ": <<")
    ran = subprocess.run(["bash", "-c", shown + quiet], capture_output=True, text=True, check=True, env={}).stdout
    expected = [call.split("\0")[:-1] for call in ran.split("\1")[:-1]]
    assert [command[1:] for command in words(snippet) if command[0] == "show"] == expected


def test_arguments_and_variables_of_the_caller_are_known():
    assert words('show $1 "$2" ${3:-third} $# $TP', "a", "b c", TP="4") == [["show", "a", "b c", "third", "2", "4"]]


def test_the_output_of_a_command_stays_as_it_is_written():
    assert words("A=$(hostname -I); show --host $A `date +%s`") == [["show", "--host", "$(hostname_-I)", "$(date_+%s)"]]


def test_every_word_has_the_line_where_its_text_stands():
    script = '#!/bin/bash\nTP=2\nARGS="\n  --tp $TP \\\n  --pp 1\n"\n\nrun x.py $ARGS \\\n  --last'
    (command,) = shell_commands(script)
    assert [(word.text, word.line) for word in command.words] == [
        ("run", 8),
        ("x.py", 8),
        ("--tp", 4),
        ("2", 4),
        ("--pp", 5),
        ("1", 5),
        ("--last", 9),
    ]


def test_variables_without_a_value_are_named():
    (command,) = shell_commands("run $NOWHERE ${ELSE:-1} ${GONE}")
    assert command.unset == ("NOWHERE", "GONE")


@pytest.mark.parametrize(
    "script", ["show 'open", 'show "open $', "show ${A", "show $((1+", "A=(", "if [", "fi", ")", "cat <<EOF\n", "${}"]
)
def test_what_bash_would_refuse_does_not_break_the_reader(script):
    shell_commands(script)


@pytest.mark.parametrize("blank", ["\u00a0", "\f", "\v"])
def test_a_blank_that_bash_does_not_split_at_is_part_of_its_word(blank: str) -> None:
    (command,) = shell_commands(f"python a{blank}b c")
    assert [word.text for word in command.words] == ["python", f"a{blank}b", "c"]
