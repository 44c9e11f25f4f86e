"""Launch scripts are read as bash would expand them, with the lines of their words."""

import random
import re
import shutil
import subprocess
import time
from contextlib import suppress

import pytest

from mindspeed.workbench.lint.shell_script import shell_commands
from mindspeed.workbench.lint.shell_words import ShellLimit


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
    'show a "$@" b $@ "${NONE[@]}" "$NONE" c; A=(); show "${A[@]}" "x${A[@]}"',
    "show $((9**9**9)) $((-7/2)) $((-7%3)) $((7/-2)) $((2**62*4)) $((9223372036854775807+1))",
    "set -- one 'two three'; show done",
    "H=4096; ((F=4*${H})); (( G = F + H )); let I=F/2; show $F $G $I; ((F == 3)) || show other",
    "show a#b '#c' --d#",
    'f() { show inside $1 "$@" $#; }; f a "b c"; show outside $#; function g { show g; }; g; function h() { show h; }\nh',
    'f() { local X=$1; show $X; g $X; }\ng() { if [ $1 = a ]; then show yes; fi; show "$1"; }\nX=outer; f a; show $X',
    "S=7b; case $S in\n  7b) L=32; A=1;;\n  13b|70b) L=40 ;;\n  *) L=1\nesac\nshow $L $A",
    'for S in 70b; do case "$S" in (7b) show 7;; 13b | 7*b) show many; show more;; *) show none;; esac; done; show end',
    "case $NONE in a) show a;; esac; case x in *) case y in y) show nested;; esac; show outer;; esac",
    'export X=1; Y=2; bash -e -c "show $Y \\$X"; bash -ec \'show "$X" $1 "$Y"\' name one; eval "show $Y; show \\$Y"; show end',
    "X=1\nbash <<EOF\nshow $X \\$X\nEOF\nbash <<'EOF'\nshow $X 'a b'\nEOF\nshow end",
    'A=(x y); show "${A[*]}" ${A[*]} "a ${A[*]} b"; eval show \'$A\'',
    'A=2; show $(echo --x $A --y \'a  b\') "$(echo  "c  d" e)" $(echo -n f) `echo g` x$(echo)y "$(echo)" $(echo 1)$(echo 2 3)',
    "P=/a/b/c.sh; show $(basename $P) $(basename -- $P .sh) $(dirname $P) $(dirname -- a) $(basename /)",
    'show "$(pwd)" "$(cd / && pwd)" $(cd -- "$(dirname "/usr/bin")" &>/dev/null && pwd) $(cd /usr >/dev/null 2>&1; pwd -P)',
    "N=4; A=(1 2 3); show $(($(echo 3) * N)) $((${#A[@]} + ${M:-5})) $((${A[1]}*2)) $(echo $((N+1)))",
    "show $(dirname /) $(dirname a//b/) $(dirname /a) $(basename a/b/) $(basename .sh .sh) $(basename a.b .c)",
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_words_are_those_of_bash(snippet):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    shown = 'show() { printf "%s\\0" "$@"; printf "\\1"; }\nexport -f show\n'
    quiet = snippet.replace("> /dev/null", "").replace("2>&1", "").replace("cat <<", ": <<")
    ran = subprocess.run(["bash", "-c", shown + quiet], capture_output=True, text=True, check=True, env={}).stdout
    expected = [call.split("\0")[:-1] for call in ran.split("\1")[:-1]]
    assert [command[1:] for command in words(snippet) if command[0] == "show"] == expected


def test_a_backslash_at_the_end_of_a_file_is_no_word():
    assert words("show a \\") == words("show a\\") == [["show", "a"]]


def test_arguments_and_variables_of_the_caller_are_known():
    assert words('show $1 "$2" ${3:-third} $# $TP', "a", "b c", TP="4") == [["show", "a", "b c", "third", "2", "4"]]


def test_the_output_of_a_command_stays_as_it_is_written():
    assert words("A=$(hostname -I); show --host $A `date +%s`") == [["show", "--host", "$(hostname_-I)", "$(date_+%s)"]]
    for command in (
        "echo a | cat",
        "echo $(cat x)",
        "echo -e 'a\\tb'",
        "echo *.sh",
        "basename",
        "echo a > b",
        "cd a && ls",
        "cd && pwd",
    ):
        assert words(f"show $({command})") == [["show", re.sub(r"\s+", "_", f"$({command})")]]
    assert words("cd a; show $(pwd) $(cd b && pwd) $(cd /b && pwd)")[1:] == [["show", "$(pwd)", "$(cd_b_&&_pwd)", "/b"]]


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


def test_the_environment_of_a_command_is_what_is_exported_or_stands_before_it():
    first, second = shell_commands("A=1; export B=2 C; C=3; export D; F=5 run x; run y")
    assert first.environ == (("B", "2"), ("C", "3"), ("F", "5"))
    assert second.environ == (("B", "2"), ("C", "3"))


def test_variables_without_a_value_are_named():
    (command,) = shell_commands("run $NOWHERE ${ELSE:-1} ${GONE}")
    assert command.unset == ("NOWHERE", "GONE")


def test_variables_without_a_value_are_named_where_others_get_their_value_from_them():
    script = 'A=$1; B=(--tp $A); B+=(--pp $P); C=known; A2=${A:-$C}; run ${B[@]} $C $A2; bash -c "run $A"; A=1; run $A'
    assert [command.unset for command in shell_commands(script)] == [("1", "P"), ("1",), ()]


DOCUMENT = "{}\nrun x.py --tp $TP\nEOF\n"


@pytest.mark.parametrize("reader", ["cat > run.sh <<EOF", "tee run.sh <<EOF", "sbatch <<EOF", "cat <<EOF | ssh host bash"])
def test_a_document_for_a_shell_or_a_file_is_a_script(reader: str) -> None:
    (command,) = [one for one in shell_commands("TP=2\n" + DOCUMENT.format(reader)) if one.words[0].text == "run"]
    assert [(word.text, word.line) for word in command.words] == [("run", 3), ("x.py", 3), ("--tp", 3), ("2", 3)]


@pytest.mark.parametrize("reader", ["cat <<EOF", "python - <<EOF"])
def test_another_document_is_no_script(reader: str) -> None:
    assert [command.words[0].text for command in shell_commands(DOCUMENT.format(reader))] == [reader.split()[0]]


def test_a_script_for_a_shell_keeps_its_launcher() -> None:
    assert words("mpirun -np 8 bash -x -c 'cd a; python b.py'; ssh h 'run c'; eval run d") == [
        ["mpirun", "-np", "8", "cd", "a"],
        ["mpirun", "-np", "8", "python", "b.py"],
        ["ssh", "h", "run", "c"],
        ["run", "d"],
    ]


def test_functions_that_call_themselves_or_many_others_end() -> None:
    assert words("f() { show a; f; }; f") == [["show", "a"]]
    doubling = "".join(f"f{number}() {{ f{number + 1}; f{number + 1}; }}\n" for number in range(40))
    with pytest.raises(ShellLimit, match="take more than 2000000 steps"):
        shell_commands(doubling + "f40() { show x; }\nf0")
    with pytest.raises(ShellLimit, match="nested more than 50 levels deep"):
        shell_commands('A=\'eval "$A"\'\neval "$A"')


UNFINISHED = ["show 'open", 'show "open $', "show ${A", "show $((1+", "A=(", "if [", "fi", ")", "cat <<EOF\n", "${}", "case"]
UNFINISHED += [
    "case x in",
    "case x in a",
    "case x in a)",
    "esac",
    ";;",
    "f() {",
    "f()",
    "f() x",
    "bash -c",
    "bash <<EOF",
    "eval",
]


@pytest.mark.parametrize("script", UNFINISHED)
def test_what_bash_would_refuse_does_not_break_the_reader(script):
    shell_commands(script)


@pytest.mark.parametrize("blank", ["\u00a0", "\f", "\v"])
def test_a_blank_that_bash_does_not_split_at_is_part_of_its_word(blank: str) -> None:
    (command,) = shell_commands(f"python a{blank}b c")
    assert [word.text for word in command.words] == ["python", f"a{blank}b", "c"]


LIMITS = {
    "doubled": ("A=x\n" + 'A="$A $A"\n' * 40, "the expansions of the script take more than 2000000 steps, at line"),
    "nested expansions": ("run " + "${a:-" * 20_000, "line 1 is nested more than 50 levels deep"),
    "closed expansions": ("run " + "${a:-" * 20_000 + "}" * 20_000, "line 1 is nested more than 50 levels deep"),
    "nested arrays": ("A=(" * 20_000, "line 1 is nested more than 50 levels deep"),
    "nested conditions": ("if\n" * 20_000, "line 51 is nested more than 50 levels deep"),
    "words of the grammar": ("! " * 50_000, "the expansions of the script take more than 2000000 steps, at line 1"),
    "a long text trimmed": (
        "A=" + "a" * 100_000 + "\necho ${A%%*b}",
        "the expansions of the script take more than 2000000 steps, at line 2",
    ),
    "a large script": ("#" * 1_000_001, "the script has 1000001 characters, more than 1000000"),
}


@pytest.mark.budget(30)
@pytest.mark.parametrize("name", LIMITS)
def test_what_would_take_for_ever_is_refused_with_its_limit(name: str) -> None:
    script, message = LIMITS[name]
    started = time.process_time()
    with pytest.raises(ShellLimit) as caught:
        shell_commands(script)
    assert str(caught.value).startswith(message)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("expression", ["1+" * 20_000 + "1", "-" * 201 + "1", "1" * 5000, "²+1"])
def test_a_calculation_that_is_none_or_too_long_stays_as_it_is_written(expression: str) -> None:
    assert words(f"A={expression}; show $(({expression}))") == [["show", f"$(({expression}))"]]
    assert len(words(f"A={expression}; show $((A))")) == 1


def test_numbers_that_only_python_knows_are_no_numbers() -> None:
    assert words("A=(x y); if [ ² -gt 1 ]; then show a; else show b ${A[²]}; fi; show ${" + "9" * 5000 + "}") == [
        ["show", "b", "x"],
        ["show"],
    ]


def test_random_bytes_are_read_to_their_end_or_refused() -> None:
    for seed in range(20):
        noise = random.Random(seed).randbytes(5_000 if seed else 100_000).decode("utf-8", "replace")
        for script in (noise, noise.translate(str.maketrans("", "", "'\"`"))):
            with suppress(ShellLimit):
                shell_commands(script, ("a",), {"HOME": "/"})
