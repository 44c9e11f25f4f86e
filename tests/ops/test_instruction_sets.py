"""Kernels that need an instruction set are declared in one table: it decides what is compiled, and compilers agree with it."""

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from mindspeed.ops import instruction_sets
from mindspeed.ops.build_cache import FLAGS
from mindspeed.ops.building import build
from mindspeed.ops.compiler import includes, run
from mindspeed.ops.instruction_sets import NEEDED, SETS
from mindspeed.ops.variants import SOURCES, source_files

FILES = {file.stem: file for file in source_files()}
PORTABLE = sorted(FILES.keys() - NEEDED.keys())
PRODUCT = "grouped_product"
CALLERS = {name for name, file in FILES.items() if f'#include "{PRODUCT}.h"' in file.read_text() and name != PRODUCT}
"""Sources that compile anywhere, and call one that does not."""
AARCH64 = "aarch64-linux-gnu"
WITHOUT = "no compiler for aarch64: install g++-aarch64-linux-gnu or ziglang, or name one in AARCH64_CXX"


def cross_compiler() -> tuple[str, ...]:
    """The command that compiles C++ for aarch64: of AARCH64_CXX, of GNU, or of the package ziglang; empty without one."""
    if named := os.environ.get("AARCH64_CXX"):
        return tuple(shlex.split(named))
    if shutil.which(f"{AARCH64}-g++"):
        return (f"{AARCH64}-g++",)
    zig = (sys.executable, "-m", "ziglang", "c++", "-target", AARCH64)
    return zig if importlib.util.find_spec("ziglang") else ()


needs_cross_compiler = pytest.mark.skipif(not cross_compiler(), reason=WITHOUT)


def compile_for_aarch64(file: Path, made: Path):
    """Compile as for a Kunpeng 920, without OpenMP, whose header not every cross compiler has, and with little optimizing."""
    other = {
        "-march=native": "-mcpu=tsv110",
        "-O3": "-O1",
        "-fopenmp": "",
        "-Wno-maybe-uninitialized": "-Wno-unknown-warning-option",
    }
    flags = [name for flag in FLAGS if (name := other.get(flag, flag))]
    return run([*cross_compiler(), *flags, *includes(), f"-I{SOURCES / 'common'}", "-c", str(file), "-o", str(made)])


def test_every_source_of_the_table_exists_and_needs_a_set_that_is_defined():
    assert NEEDED.keys() <= FILES.keys()
    assert set(NEEDED.values()) == SETS.keys()
    assert PORTABLE == [
        "logit_statistics",
        "memory",
        "npu_dropout_add_layer_norm",
        "npu_fused_moe_token_permute",
        "npu_fused_moe_token_unpermute",
        "npu_ring_attention_update",
        "npu_rotary_position_embedding",
        "rms_norm",
        "swiglu",
    ]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no g++")
def test_a_source_whose_instruction_set_the_processor_lacks_is_not_compiled(sources, cache, monkeypatch):
    monkeypatch.setattr(instruction_sets, "instructions", lambda: frozenset({"fp", "asimd"}))
    monkeypatch.setitem(NEEDED, "second", "AVX-512")
    steps: list[str] = []
    built, _ = build(steps.append, sources=sources, cache=cache)
    assert built.operators == ("first",)
    assert steps[0] == "compiling 1 of 1 sources, once for this machine"


@pytest.mark.long
@needs_cross_compiler
@pytest.mark.parametrize("source", PORTABLE)
def test_a_portable_source_compiles_for_aarch64(source, tmp_path):
    done = compile_for_aarch64(FILES[source], tmp_path / "made.o")
    assert (done.status, done.output) == (0, "")
    header = (tmp_path / "made.o").read_bytes()[:20]
    assert (header[:4], int.from_bytes(header[18:20], "little")) == (b"\x7fELF", 183)  # the machine number of aarch64


def test_a_source_that_calls_the_product_needs_what_the_product_needs():
    assert {name for name in NEEDED if NEEDED[name] == NEEDED[PRODUCT]} == {PRODUCT, *CALLERS}


@pytest.mark.long
@needs_cross_compiler
@pytest.mark.parametrize("source", sorted(NEEDED.keys() - CALLERS))
def test_a_source_that_needs_an_instruction_set_names_the_table_where_it_lacks(source, tmp_path):
    done = compile_for_aarch64(FILES[source], tmp_path / "made.o")
    assert done.status != 0
    assert "this source needs AVX-512: mindspeed/ops/instruction_sets.yaml" in done.output
