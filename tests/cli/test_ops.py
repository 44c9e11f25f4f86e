"""``mindspeed ops``: what runs here and why, and the build of what is in C++."""

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed.cli import ops
from mindspeed.job.world import PLATFORMS
from mindspeed.ops import OPERATORS, availability, building, instruction_sets, speeds
from mindspeed.ops.availability import variant
from mindspeed.ops.compiler import Compiler
from mindspeed.ops.measuring import CASES, Case, measure
from mindspeed.ops.speeds import Speed
from mindspeed.ops.variants import operator_files
from tests.ops.built import pretend_built, write_sources


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, on a machine with a compiler whose operator swiglu is in C++ and ffn is not."""
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINDSPEED_OPS", raising=False)
    monkeypatch.setattr(availability, "native_variants", lambda platform: {"swiglu"} if platform == "cpu" else set())
    monkeypatch.setattr(availability, "find_compiler", lambda named: Compiler(("g++",), "acme 1.0"))
    return tmp_path / "cache"


@pytest.fixture
def listed(mindspeed):
    """One row of the list: ``listed("swiglu", "--platform", "npu")`` gives variant, runs, why."""

    def ask(name, *options):
        done = mindspeed("ops", "list", "--json", *options)
        assert (done.exit_code, done.stderr) == (0, "")
        rows = json.loads(done.stdout)["operators"]
        assert [row["name"] for row in rows] == list(OPERATORS)
        assert all(list(row) == ["name", "platform", "variant", "needs", "runs", "why", "speeds"] for row in rows)
        (row,) = [row for row in rows if row["name"] == name]
        return row["variant"], row["runs"], row["why"]

    return ask


def test_what_is_not_built_says_how_to_build_it(cache, listed):
    assert listed("swiglu", "--platform", "cpu") == ("C++", "reference", "not built: mindspeed ops build")


def test_without_a_compiler_it_says_that(cache, listed, monkeypatch):
    monkeypatch.setattr(availability, "find_compiler", lambda named: None)
    assert listed("swiglu", "--platform", "cpu") == ("C++", "reference", "not built, and no C++ compiler is available")


@pytest.fixture
def kunpeng(monkeypatch):
    """The processor flags of a Kunpeng 920."""
    monkeypatch.setattr(instruction_sets, "instructions", lambda: frozenset({"fp", "asimd", "atomics", "fphp", "asimddp"}))


def test_a_kernel_that_needs_an_instruction_set_says_so_where_the_processor_lacks_it(cache, listed, kunpeng, monkeypatch):
    assert listed("swiglu", "--platform", "cpu") == ("C++", "reference", "not built: mindspeed ops build")
    monkeypatch.setitem(instruction_sets.NEEDED, "swiglu", "AVX-512 VNNI")
    assert listed("swiglu", "--platform", "cpu") == ("C++", "reference", "this processor has no AVX-512 VNNI")


def test_the_table_names_the_instruction_set_of_a_kernel_and_none_of_a_portable_one(mindspeed):
    lines = mindspeed("ops", "list", "--platform", "cpu").stdout.splitlines()
    named = {line.split()[0]: re.findall(r"C\+\+(?: \(([^)]*)\))?", line)[0] for line in lines if "  C++" in line}
    assert {op: needs for op, needs in named.items() if needs} == {
        "npu_gmm": "AVX-512",
        "npu_groupmatmul_add_fp32": "AVX-512",
        "npu_matmul_add_fp32": "AVX-512",
        "quant_gmm": "AVX-512 VNNI",
    }
    assert set(named) == {file.stem for file in operator_files()}


def test_what_is_built_runs(cache, listed):
    pretend_built(cache, operators=["swiglu"])
    assert listed("swiglu", "--platform", "cpu") == ("C++", "C++", "")


def test_built_for_another_torch_it_says_which(cache, listed):
    pretend_built(cache, torch="2.6.0")
    here = availability.build_cache.torch_version()
    why = f"the library was built for torch 2.6.0, but the process uses {here}: mindspeed ops build"
    assert listed("swiglu", "--platform", "cpu") == ("C++", "reference", why)


def test_the_variable_that_asks_for_references_is_named(cache, listed, monkeypatch):
    monkeypatch.setenv("MINDSPEED_OPS", "reference")
    assert listed("swiglu", "--platform", "cpu") == ("C++", "reference", "MINDSPEED_OPS is reference")


def test_what_has_no_variant_says_why(cache, listed):
    why = "it combines the device's matrix products and an activation"
    assert listed("ffn", "--platform", "cpu") == ("reference", "reference", why)


def test_every_reference_has_a_reason_and_no_reason_is_out_of_date():
    bare = {(op, platform) for op in OPERATORS for platform in PLATFORMS if variant(op, platform) == "reference"}
    assert [place for place in sorted(bare) if availability.reason(*place) == availability.NOT_YET] == []
    assert {place for place in availability.BY_PLATFORM if place not in bare} == set()
    assert {op for op in availability.EVERYWHERE if op not in {op for op, _ in bare}} == set()


def test_for_another_platform_nothing_runs_here(cache, listed, monkeypatch):
    monkeypatch.setattr(availability, "is_here", lambda platform: platform == "cpu")
    monkeypatch.setattr(availability, "python_variants", lambda platform: {"swiglu"})
    assert listed("swiglu", "--platform", "npu") == ("torch_npu", "", "this machine has no NPU")


def test_a_package_that_a_variant_needs_is_named(cache, listed, monkeypatch):
    monkeypatch.setattr(availability, "is_here", lambda platform: True)
    monkeypatch.setattr(availability, "python_variants", lambda platform: {"swiglu"})
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    assert listed("swiglu", "--platform", "npu") == ("torch_npu", "reference", "torch_npu is not installed")


def test_the_table_has_one_line_for_each_operator(cache, mindspeed):
    lines = mindspeed("ops", "list", "--platform", "cpu").stdout.splitlines()
    assert lines[0].split() == ["OPERATOR", "BEST", "ON", "CPU", "RUNS", "HERE", "MEASURED", "WHY"]
    assert lines[-1].split(maxsplit=3) == ["swiglu", "C++", "reference", "not built: mindspeed ops build"]
    assert len(lines) == 1 + len(OPERATORS)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """The sources are two tiny ones."""
    folder = write_sources(tmp_path / "csrc")
    monkeypatch.setattr(ops, "SOURCES", folder)
    return folder


@pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no g++")
def test_build_says_what_it_made_and_the_second_time_that_it_is_there(mindspeed, sources, cache):
    first = mindspeed("ops", "build", "--verbose")
    (library,) = cache.glob("ops/*/*.so")
    assert first.exit_code == 0
    assert first.stdout.splitlines()[0].startswith("2 C++ operators built in ")
    assert first.stdout.splitlines()[0].endswith(f" s: {library}")
    assert first.stderr.splitlines()[0] == "compiling 2 of 2 sources, once for this machine"
    assert sorted(line.split()[0] for line in first.stderr.splitlines()[1:]) == ["first.cpp", "second.cpp"]
    second = mindspeed("ops", "build")
    assert (second.stdout, second.stderr) == (f"2 C++ operators are already built: {library}\n", "")
    data = json.loads(mindspeed("ops", "build", "--json").stdout)
    assert list(data) == ["library", "key", "compiler", "operators", "size", "seconds", "compiled", "speeds"]
    assert (data["library"], data["operators"], data["compiled"]) == (str(library), ["first", "second"], False)


def test_build_without_a_compiler_is_a_problem_of_the_environment(mindspeed, sources, cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    done = mindspeed("ops", "build")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith("MS510 no C++ compiler was found: ")
    assert json.loads(mindspeed("ops", "build", "--json").stdout)["problems"][0]["code"] == "MS510"


def test_where_a_compiler_is_optional_its_absence_is_said_and_no_error(mindspeed, sources, cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    done = mindspeed("ops", "build", "--optional")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("MS510 no C++ compiler was found: ")


def test_without_sources_there_is_nothing_to_build(mindspeed, tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "SOURCES", tmp_path)
    done = mindspeed("ops", "build")
    assert (done.exit_code, done.stdout) == (0, f"nothing to build: {tmp_path / 'cpu'} contains no C++ sources\n")


PLAN = ("features", "plan", "swiglu", "--platform", "cpu", "--activation", "silu", "--gated-linear-unit")


def test_a_plan_for_this_machine_says_that_an_operator_runs_its_reference(cache, mindspeed):
    (row,) = [row for row in planned(mindspeed, *PLAN)["rows"] if row["feature"] == "swiglu"]
    text = "swiglu has only a plain-torch reference on cpu, which is slower; mindspeed ops list shows why"
    assert (row["kind"], row["text"]) == ("note", text)


def test_strict_refuses_it(cache, mindspeed):
    done = mindspeed(*PLAN, "--strict", "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.exit_code, problem["code"]) == (3, "MS515")
    assert problem["message"] == "swiglu: swiglu has only a plain-torch reference on cpu"
    assert problem["fix"] == "mindspeed ops build, or see mindspeed ops list for the cause, or remove swiglu"


def test_a_plan_for_another_machine_takes_what_is_declared(cache, mindspeed, monkeypatch):
    monkeypatch.setattr("mindspeed.ops.variants.variants", lambda platform: {"swiglu"})
    assert not [
        row for row in planned(mindspeed, *PLAN, "--megatron", "0.16.1", "--strict")["rows"] if row["feature"] == "swiglu"
    ]


def test_level_one_takes_an_operator_whether_it_is_built_here_or_not(cache, mindspeed, monkeypatch):
    monkeypatch.setattr("mindspeed.ops.variants.variants", lambda platform: {"swiglu"})
    level_one = [argument for argument in PLAN if argument != "swiglu"]
    here, made_up = (
        planned(mindspeed, *level_one, "--strict"),
        planned(mindspeed, *level_one, "--strict", "--megatron", "0.16.1"),
    )
    assert "swiglu" in [feature["name"] for feature in here["features"]]
    assert here["digest"] == made_up["digest"]
    text = "swiglu has only a plain-torch reference on cpu, which is slower; mindspeed ops list shows why"
    assert {"kind": "note", "feature": "swiglu", "text": text} in here["rows"]


def test_level_one_leaves_operators_out_that_run_their_reference_on_request(cache, mindspeed, monkeypatch):
    monkeypatch.setenv("MINDSPEED_OPS", "reference")
    level_one = [argument for argument in PLAN if argument != "swiglu"]
    left_out = {row["feature"]: row["text"] for row in planned(mindspeed, *level_one)["rows"] if row["kind"] == "left-out"}
    assert left_out["swiglu"] == "swiglu has only a plain-torch reference on cpu"


@pytest.mark.parametrize(("without", "added"), [(0.91, True), (0.5, False)], ids=["as fast as torch", "a slow kernel"])
def test_level_one_leaves_out_what_torch_beats_on_this_processor(without, added, cache, mindspeed, monkeypatch):
    monkeypatch.setattr("mindspeed.ops.variants.variants", lambda platform: {"swiglu"})
    built = pretend_built(cache, operators=["swiglu"])
    times = (
        Speed("swiglu", dtype, 1.0, None, time, "silu and a product") for dtype, time in (("bf16", without), ("fp32", 2.0))
    )
    speeds.write(built.library, tuple(times))
    level_one = [argument for argument in PLAN if argument != "swiglu"]
    plan = planned(mindspeed, *level_one, "--dtype", "bf16")
    assert ("swiglu" in [feature["name"] for feature in plan["features"]]) is added
    text = "swiglu has 0.50 times the speed of silu and a product in bf16 on this processor"
    assert ([row["text"] for row in plan["rows"] if row["feature"] == "swiglu"] == [text]) is not added
    asked = planned(mindspeed, *PLAN, "--dtype", "bf16")
    assert ({"kind": "note", "feature": "swiglu", "text": text} in asked["rows"]) is not added
    assert "swiglu" in [feature["name"] for feature in planned(mindspeed, *level_one, "--dtype", "fp32")["features"]]


@pytest.mark.parametrize(
    ("ratios", "dtype", "text"),
    [
        ((0.5, 0.5), None, "{bf16}; {fp32}"),
        ((0.5, 0.5), "fp16", "{bf16}; {fp32}"),
        ((0.5, 2.0), None, "{bf16}; it depends on --dtype, which is not set"),
        ((0.5, 2.0), "fp16", "{bf16}; it was not measured in fp16"),
        ((0.5, 2.0), "bf16", "{bf16}"),
    ],
)
def test_level_one_leaves_out_what_may_lose_in_the_data_type_of_the_job(ratios, dtype, text, cache, mindspeed, monkeypatch):
    monkeypatch.setattr("mindspeed.ops.variants.variants", lambda platform: {"swiglu"})
    times = measured_times(*ratios)
    speeds.write(pretend_built(cache, operators=["swiglu"]).library, times)
    given = ["--dtype", dtype] if dtype else []
    plan = planned(mindspeed, *(argument for argument in PLAN if argument != "swiglu"), *given)
    expected = text.format_map({speed.dtype: speed.comparison for speed in times})
    assert "swiglu" not in [feature["name"] for feature in plan["features"]]
    assert [(row["kind"], row["text"]) for row in plan["rows"] if row["feature"] == "swiglu"] == [("left-out", expected)]
    assert {"kind": "note", "feature": "swiglu", "text": expected} in planned(mindspeed, *PLAN, *given)["rows"]


@pytest.mark.parametrize(("dtype", "measured"), [("fp32", ["fp32"]), ("fp16", ["bf16", "fp32"]), (None, ["bf16", "fp32"])])
def test_the_reason_of_a_feature_of_level_one_has_its_measured_ratio(dtype, measured, cache, mindspeed, monkeypatch):
    monkeypatch.setattr("mindspeed.ops.variants.variants", lambda platform: {"swiglu"})
    times = measured_times(3.0, 2.0)
    speeds.write(pretend_built(cache, operators=["swiglu"]).library, times)
    level_one = [*(argument for argument in PLAN if argument != "swiglu"), *(["--dtype", dtype] if dtype else [])]
    ratios = "; ".join(speed.comparison for speed in times if speed.dtype in measured)
    assert f"because  switched on by optimization level 1; {ratios}\n" in mindspeed(*level_one, "--all").stdout


def measured_times(*ratios):
    return tuple(
        Speed("swiglu", dtype, 1.0, None, ratio, "a product") for dtype, ratio in zip(speeds.DTYPES, ratios, strict=True)
    )


def test_the_table_has_the_measured_speeds(cache, mindspeed):
    built = pretend_built(cache, operators=["swiglu"])
    measured = [Speed("swiglu", dtype, 1.0, None, ratio, "a product") for dtype, ratio in (("bf16", 3.4), ("fp32", 2.4))]
    speeds.write(built.library, tuple(measured))
    row = mindspeed("ops", "list", "--platform", "cpu").stdout.splitlines()[-1]
    assert row.split(maxsplit=3) == ["swiglu", "C++", "C++", "bf16 3.4x, fp32 2.4x"]


def test_small_and_large_matrices_are_measured_apart(cache, listed, mindspeed, monkeypatch):
    monkeypatch.setattr(availability, "native_variants", lambda platform: {"npu_gmm"})
    library = pretend_built(cache, operators=["npu_gmm"]).library
    fast, slow = replace(LEFT, kernel=1.0, without=2.0), replace(LEFT, without=0.5, small=True)
    speeds.write(library, (fast, slow))
    assert speeds.read(library) == (fast, slow)
    assert availability.kinds(["npu_gmm"], "cpu") == {"npu_gmm": "C++, torch's products in small bf16"}
    text = "npu_gmm has 0.50 times the speed of mm of each expert in bf16 with small matrices on this processor"
    assert listed("npu_gmm", "--platform", "cpu") == ("C++", "C++", text)
    assert "bf16 2.0x, small bf16 0.5x" in mindspeed("ops", "list", "--platform", "cpu").stdout


def test_the_table_and_the_facts_of_a_rank_have_whose_products_run(cache, listed, monkeypatch):
    left = tuple(replace(speed, library=0.5) for speed in measured_times(3.0, 0.2))
    library = pretend_built(cache, operators=["swiglu"]).library
    speeds.write(library, measured_times(3.0, 3.0))
    assert availability.kinds(["swiglu"], "cpu") == {"swiglu": "C++"}
    speeds.write(library, left)
    assert availability.kinds(["swiglu"], "cpu") == {"swiglu": "C++, torch's products in bf16 and fp32"}
    why = f"swiglu runs products of torch in bf16, which are faster here; {left[1].comparison}"
    assert listed("swiglu", "--platform", "cpu") == ("C++", "C++", why)
    monkeypatch.setenv("MINDSPEED_OPS", "reference")
    assert availability.kinds(["swiglu"], "cpu") == {"swiglu": "reference"}


def test_an_operator_that_fails_while_it_is_measured_is_a_problem(cache, mindspeed, monkeypatch):
    built = pretend_built(cache)
    monkeypatch.setattr(building, "build", lambda *_: (built, False))
    done = mindspeed("ops", "build")
    assert (done.exit_code, done.stderr.partition(": ")[0]) == (3, "MS512 the C++ operators cannot be measured")


LEFT = Speed("npu_gmm", "bf16", 2.0, 1.0, 1.0, "mm of each expert")
"""Times of an operator that leaves its products to torch and loses nothing by it."""


def test_processors_of_two_models_that_share_a_cache_keep_their_times(cache, monkeypatch):
    built = pretend_built(cache)
    speeds.write(built.library, (LEFT,))
    assert (LEFT.leaves_to_library, LEFT.loses) == (True, False)
    with monkeypatch.context() as another:
        another.setattr(speeds, "processor_model", lambda: "another one")
        assert speeds.read(built.library) == ()
        speeds.write(built.library, (replace(LEFT, kernel=1.0),))
    assert speeds.read(built.library) == (LEFT,)
    assert {file.stat().st_mode & 0o777 for file in built.library.parent.glob("*.speeds")} == {0o600}


DAMAGED = [
    *({key: value} for key in ("kernel", "library", "without") for value in (0.0, -1.0, float("nan"), float("inf"), "1", True)),
    *({"kernel": None}, {"without": None}, {"dtype": "fp16"}, {"op": "none"}, {"op": []}, {"peer": None}, {"more": 1}),
]


@pytest.mark.parametrize("change", DAMAGED, ids=str)
def test_a_damaged_row_of_times_counts_as_none(change, cache):
    library = pretend_built(cache).library
    speeds.write(library, (LEFT,))
    (file,) = library.parent.glob("*.speeds")
    row = json.loads(file.read_text())[0]
    file.write_text(json.dumps([row | change, row, None, "row"]))
    assert speeds.read(library) == (LEFT,)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"1", b"null", b'{"speeds": []}'])
def test_a_damaged_file_of_times_counts_as_none(content, cache):
    library = pretend_built(cache).library
    speeds.write(library, ())
    (file,) = library.parent.glob("*.speeds")
    file.write_bytes(content)
    assert speeds.read(library) == ()


EVERY = tuple(Speed("swiglu", dtype, 1.0, None, 2.0, "silu and a product") for dtype in speeds.DTYPES)


def test_builds_at_the_same_time_measure_once_and_never_together(cache, monkeypatch):
    built = pretend_built(cache, operators=["swiglu"])
    speeds.write(built.library, EVERY[:1])  # a type is missing, so this is no measurement to reuse
    running, most = [], []

    def probe(library):
        running.append(library)
        time.sleep(0.05)
        most.append(len(running))
        running.pop()
        return EVERY

    monkeypatch.setattr(building, "_measure", probe)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: building.measured(built, print), range(3))) == [EVERY] * 3
        assert most == [1]
        assert list(pool.map(lambda _: building.measured(built, print, again=True), range(3))) == [EVERY] * 3
    assert most == [1] * 4


def test_times_that_cannot_be_stored_are_said_before_they_are_measured(cache, mindspeed, monkeypatch):
    built = replace(pretend_built(cache, operators=["swiglu"]), library=Path("/proc/no/such/lib.so"))
    monkeypatch.setattr(building, "build", lambda *_: (built, False))
    monkeypatch.setattr(building, "_measure", lambda built: pytest.fail("it was measured"))
    message = "MS514 the folder of built operators is not writable: No such file or directory"
    done = mindspeed("ops", "build")
    assert (done.exit_code, done.stdout, done.stderr.splitlines()[0]) == (3, "", message)
    done = mindspeed("ops", "build", "--optional")
    text = "1 C++ operators are already built: /proc/no/such/lib.so\n"
    assert (done.exit_code, done.stdout, done.stderr.splitlines()[0]) == (0, text, message)


def planned(mindspeed, *arguments):
    return json.loads(mindspeed(*arguments, "--json").stdout)["plan"]


def test_a_planted_slow_kernel_is_measured_and_left_out_of_level_one_with_its_ratio(cache, mindspeed, monkeypatch):
    def spin(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    planted = Case(lambda: spin(4e-3), "silu and a product", lambda: spin(1e-3))
    monkeypatch.setitem(CASES, "swiglu", lambda dtype: planted)
    monkeypatch.setattr("mindspeed.ops.variants.variants", lambda platform: {"swiglu"})
    speeds.write(pretend_built(cache, operators=["swiglu"]).library, (measure("swiglu", "bf16"),))
    plan = planned(mindspeed, *(argument for argument in PLAN if argument != "swiglu"), "--dtype", "bf16")
    assert "swiglu" not in [feature["name"] for feature in plan["features"]]
    (row,) = [row for row in plan["rows"] if row["feature"] == "swiglu"]
    assert row["kind"] == "left-out"
    assert re.fullmatch(r"swiglu has 0\.2\d times the speed of silu and a product in bf16 on this processor", row["text"])
