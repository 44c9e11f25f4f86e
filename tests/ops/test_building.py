"""``mindspeed ops build``: one library in the cache, whoever else builds, was killed, or cannot write."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mindspeed.ops import build_cache
from mindspeed.ops.building import build
from mindspeed.problems import PlatformError
from tests.ops.built import write_compiler, write_sources

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no g++")

BUILD = """
import sys
from pathlib import Path
from mindspeed.ops.building import build
built, compiled = build(print, sources=Path(sys.argv[1]), cache=Path(sys.argv[2]))
print("compiled" if compiled else "found", built.library)
"""


def start(sources, cache, compiler):
    """A builder in a process of its own."""
    command = [sys.executable, "-c", BUILD, str(sources), str(cache)]
    environment = {**os.environ, "CXX": str(compiler)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def steps_of(sources, cache, force=False):
    """Build here: the steps that were said, without their times, and what was built."""
    steps = []
    built, compiled = build(steps.append, force, sources, cache)
    assert compiled == bool(steps)
    return [step.partition(" in ")[0] for step in steps if not step.startswith("compiling")], built


def problem_of(sources, cache):
    with pytest.raises(PlatformError) as error:
        build(print, sources=sources, cache=cache)
    (problem,) = error.value.problems
    return problem


@pytest.mark.long
def test_two_processes_at_once_compile_once_and_both_succeed(sources, cache, tmp_path):
    compiler = write_compiler(tmp_path / "slow", "sleep 1")
    builders = [start(sources, cache, compiler) for _ in range(2)]
    outputs = [builder.communicate(timeout=120)[0].splitlines() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    (library,) = cache.glob("ops/*/*.so")
    (maker,) = [number for number in range(2) if outputs[number][-1] == f"compiled {library}"]
    waiter = outputs[1 - maker]
    assert waiter[-1] == f"found {library}"
    assert waiter[-2].startswith(f"waiting for process {builders[maker].pid} on {os.uname().nodename}, building since ")
    assert sorted(line.split()[0] for line in outputs[maker][:-1]) == ["compiling", "first.cpp", "second.cpp"]


@pytest.mark.budget(8)
def test_a_killed_builder_leaves_nothing_that_blocks(sources, cache, tmp_path):
    started = tmp_path / "started"
    compiler = write_compiler(tmp_path / "compiler", f"touch {started}; sleep 100")
    builder = start(sources, cache, compiler)
    try:
        while not started.exists():
            assert builder.poll() is None
            time.sleep(0.02)
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
        assert list(cache.glob("ops/*/building-*"))
        write_compiler(compiler)
        after = start(sources, cache, compiler)
        lines = after.communicate(timeout=60)[0].splitlines()
    finally:
        os.killpg(builder.pid, signal.SIGKILL)  # what it had started lives on
    assert lines[-1].startswith("compiled ")
    assert not any(line.startswith("waiting") for line in lines)
    assert not list(cache.glob("ops/*/building-*"))
    (record,) = cache.glob("ops/*/*.json")
    assert sorted(path.suffix for path in record.parent.iterdir()) == [".json", ".lock", ".so"]


@pytest.mark.budget(8)
def test_what_is_built_is_found_and_nothing_is_written(sources, cache):
    steps, built = steps_of(sources, cache)
    assert sorted(steps) == ["first.cpp compiled", "second.cpp compiled"]
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert steps_of(sources, cache) == ([], built)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert built.operators == ("first", "second")
    assert build_cache.find(built.key, cache) == built


@pytest.mark.long
def test_only_what_changed_is_compiled_again(sources, cache):
    write_sources(sources, {"common/shared.h": "#pragma once\n", "cpu/second.cpp": '#include "shared.h"\n'})
    first = steps_of(sources, cache)[1]
    (sources / "common" / "shared.h").write_text("#pragma once\n// other words\n")
    steps, second = steps_of(sources, cache)
    assert steps == ["second.cpp compiled"]
    assert build_cache.why_not(second.key, first) == "the library was built from other sources"
    (sources / "common" / "shared.h").write_text("#pragma once\n")
    assert steps_of(sources, cache) == ([], first)


@pytest.mark.long
def test_sources_that_share_code_are_no_operators(sources, cache):
    write_sources(sources, {"common/product.cpp": "int product(int a, int b) { return a * b; }\n"})
    write_sources(sources, {"cpu/second.cpp": "int product(int, int);\nint square(int a) { return product(a, a); }\n"})
    steps, built = steps_of(sources, cache)
    assert "product.cpp compiled" in steps
    assert built.operators == ("first", "second")


@pytest.mark.long
def test_forced_it_is_made_again_and_who_has_it_open_keeps_the_old_one(sources, cache):
    _, built = steps_of(sources, cache)
    with built.library.open("rb") as old:
        inode = os.fstat(old.fileno()).st_ino
        steps, again = steps_of(sources, cache, force=True)
        assert sorted(steps) == ["first.cpp compiled", "second.cpp compiled"]
        assert again.library == built.library
        assert again.library.stat().st_ino != inode


@pytest.mark.long
def test_another_compiler_makes_another_library(sources, cache, tmp_path, monkeypatch):
    _, built = steps_of(sources, cache)
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "acme")))
    _, other = steps_of(sources, cache)
    assert (other.compiler, other.key) == ("acme 1.0", built.key)
    assert other.library != built.library
    assert build_cache.find(built.key, cache) == other


@pytest.mark.budget(8)
def test_a_source_that_does_not_compile_is_one_problem_with_its_first_errors(sources, cache):
    write_sources(sources, {"cpu/second.cpp": "int f() { return missing; }\nint g() { return 'a' + ; }\n"})
    problem = problem_of(sources, cache)
    assert problem.code == "MS511"
    assert problem.message.startswith("second.cpp cannot be compiled with g++ (")
    file = sources / "cpu" / "second.cpp"
    assert problem.chain == (
        f"{file}:1:18: error: 'missing' was not declared in this scope",
        f"{file}:2:24: error: expected primary-expression before ';' token",
    )
    assert problem.fix_text == "read the log; if mindspeed is unchanged, report it or set CXX to another compiler"
    with open(problem.where, encoding="utf-8") as log:
        assert log.readline().startswith("$ g++ -std=c++17 -O3 -march=native ")
    assert not list(cache.glob("ops/*/*.json"))
    write_sources(sources)
    assert steps_of(sources, cache)[0] == ["second.cpp compiled"]


def test_a_function_that_nobody_defines_is_found_when_linking(sources, cache):
    write_sources(sources, {"cpu/second.cpp": "int missing();\nint f() { return missing(); }\n"})
    problem = problem_of(sources, cache)
    assert (problem.code, problem.message.split(" with ")[0]) == ("MS511", "the library cannot be linked")
    assert problem.chain[0].endswith("undefined reference to `missing()'")


@pytest.mark.long
def test_a_library_that_ends_the_process_that_loads_it_is_never_put_in_place(sources, cache):
    ends = "#include <cstdlib>\n__attribute__((constructor)) static void end() { std::abort(); }\n"
    write_sources(sources, {"cpu/second.cpp": ends})
    problem = problem_of(sources, cache)
    assert (problem.code, problem.message.split(" with ")[0]) == ("MS511", "the library cannot be loaded")
    assert not list(cache.glob("ops/*/*.so"))


def test_a_cache_that_cannot_be_written_is_said_with_the_way_out(sources, tmp_path):
    (tmp_path / "file").write_text("")
    problem = problem_of(sources, tmp_path / "file")
    assert (problem.code, problem.message) == (
        "MS514",
        "the folder of built operators is not writable: Not a directory",
    )
    assert problem.fix_text == "MINDSPEED_CACHE=FOLDER mindspeed ops build, and set the same variable for training"


def test_without_a_compiler_the_problem_says_what_to_install(sources, cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert str(problem_of(sources, cache)) == (
        "MS510 no C++ compiler was found: none of g++, c++, clang++ runs; operators use their plain-torch references, "
        "which are slower\n"
        "  fix: apt-get install g++ (or dnf install gcc-c++), or set CXX"
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert str(problem_of(sources, cache)).startswith(
        "MS510 no C++ compiler was found: CXX is 'no-such-compiler', which does not run; "
    )


@pytest.mark.budget(8)
def test_without_a_compiler_what_was_built_before_is_enough(sources, cache, monkeypatch):
    _, built = steps_of(sources, cache)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert steps_of(sources, cache) == ([], built)
