"""The library of C++ operators is loaded where it fits, and where it does not the references run and say so."""

import shutil
from dataclasses import replace

import pytest
import torch

import mindspeed.ops
from mindspeed.ops import OPERATORS, build_cache, native_library
from mindspeed.ops.building import build
from mindspeed.ops.variants import sources_digest
from tests.ops.built import pretend_built, run, write_sources

LOAD = """
import warnings
warnings.showwarning = lambda message, category, *rest: print(f"{category.__name__}: {message}")
import mindspeed.ops.registration
from mindspeed.ops import native_library
print(native_library.loaded())
"""

TEAM = """
extern "C" int team() {
  int members = 0;
#pragma omp parallel reduction(+ : members)
  members += 1;
  return members;
}
"""
ASK_TEAM = """
import ctypes, re, torch
import mindspeed.ops.registration
from mindspeed.ops import native_library
torch.set_num_threads(3)
print(ctypes.CDLL(str(native_library.loaded().library)).team())
maps = open("/proc/self/maps").read()
print(len(set(re.findall(r"\\S*/lib(?:gomp|iomp5|omp)\\S*", maps))))
"""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no g++")


def lines(program, cache, sources, **variables):
    done = run(program, cache, sources, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
@needs_compiler
def test_what_is_built_is_loaded_with_the_first_operator(sources, cache):
    built, _ = build(print, sources=sources, cache=cache)
    assert sorted(lines(LOAD, cache, sources)) == [str(built), "first is loaded", "second is loaded"]
    assert lines(LOAD, cache, sources, MINDSPEED_OPS="reference") == ["None"]


@pytest.mark.long
@needs_compiler
def test_loops_in_parallel_run_on_the_threads_of_torch(tmp_path, cache):
    """A second OpenMP runtime would have threads of its own, and not know what torch was told of their number."""
    sources = write_sources(tmp_path / "csrc", {"cpu/team.cpp": TEAM})
    build(print, sources=sources, cache=cache)
    assert lines(ASK_TEAM, cache, sources) == ["3", "1"]


def test_nothing_is_built_by_an_import(sources, cache):
    assert lines(LOAD, cache, sources) == ["None"]
    assert not cache.exists()


def test_a_library_of_another_torch_is_left_alone_and_said(sources, cache):
    built = pretend_built(cache, sources, torch="2.6.0")
    here = build_cache.torch_version()
    assert lines(LOAD, cache, sources) == [
        (
            f"OperatorWarning: MS513 the library was built for torch 2.6.0, but the process uses {here}, so operators use "
            "their plain-torch references"
        ),
        f"  where: {built.library}",
        "  fix: mindspeed ops build",
        "None",
    ]


@pytest.mark.long
def test_a_library_of_other_sources_is_left_alone_and_said(sources, cache):
    built = pretend_built(cache, sources)
    (sources / "cpu" / "first.cpp").write_text("// changed\n")
    assert lines(LOAD, cache, sources)[:2] == [
        "OperatorWarning: MS513 the library was built from other sources, so operators use their plain-torch references",
        f"  where: {built.library}",
    ]


@pytest.mark.long
def test_a_library_that_does_not_load_is_said(sources, cache):
    built = pretend_built(cache, sources)
    first, where, fix, loaded = lines(LOAD, cache, sources)
    assert first.startswith(
        "OperatorWarning: MS512 the C++ operators cannot be loaded, so operators use their plain-torch references: "
    )
    assert (where, fix, loaded) == (f"  where: {built.library}", "  fix: mindspeed ops build --force", "None")


def test_a_library_that_is_not_whole_is_none(sources, cache):
    built = pretend_built(cache, sources)
    assert build_cache.find(built.key, cache) == built
    built.library.write_bytes(b"no")
    assert build_cache.find(built.key, cache) is None
    build_cache.record_of(built.library).write_text("{")
    assert build_cache.find(built.key, cache) is None


def test_the_nearest_of_several_libraries_says_what_is_different(sources, cache):
    pretend_built(cache, sources, torch="2.6.0", processor="aarch64 default 0")
    near = pretend_built(cache, sources, processor="x86_64 avx2 0123456789abcdef")
    key = replace(near.key, processor="x86_64 avx512 fedcba9876543210")
    found = build_cache.nearest(key, cache)
    assert found == near
    assert build_cache.why_not(key, near) == "the library was built for another processor (x86_64 avx2), not x86_64 avx512"
    assert (
        build_cache.why_not(replace(near.key, libc="glibc 2.17"), near)
        == f"the library was built for {near.key.libc}, but the machine has glibc 2.17"
    )


def test_the_place_of_the_sources_is_no_part_of_what_they_are(sources, tmp_path):
    assert sources_digest(write_sources(tmp_path / "elsewhere")) == sources_digest(sources)
    (sources / "cpu" / "first.cpp").rename(sources / "cpu" / "third.cpp")
    assert sources_digest(sources) != sources_digest(tmp_path / "elsewhere")


def test_processors_with_other_instructions_have_libraries_of_their_own(monkeypatch, sources):
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}
    keys = []
    for flags in (wide, wide - {"avx512bw"}, {"avx2"}):
        monkeypatch.setattr(build_cache, "instructions", lambda flags=flags: frozenset(flags))
        keys.append(build_cache.wanted("2.13.0", sources))
    assert [key.processor.split()[1] for key in keys] == ["avx512", "avx2", "default"]
    assert len({key.folder for key in keys}) == 3


def test_every_source_has_kernels_of_operators_that_exist():
    if native_library.loaded() is None:
        pytest.skip("the C++ operators are not built here, or MINDSPEED_OPS=reference: mindspeed ops build")
    for op in OPERATORS:
        getattr(mindspeed.ops, op)
    missing = [
        op
        for op in native_library.loaded().operators
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"mindspeed::{op}", "CPU")
    ]
    assert missing == []
    dangling = [line for line in torch._C._dispatch_find_dangling_impls() if "mindspeed::" in line]
    assert dangling == []
