"""Expected outcomes of Megatron-LM's unit tests: classes of what does not pass, and files that record them per version.

    python -m tests.megatron_lm.own_unit_tests.outcomes 0.16.1 1=RESULTS.jsonl 2=RESULTS.jsonl roles=RESULTS.jsonl

writes these runs into the file of a version, from results of ``runner.py``. A run is a number of ranks at optimization level 0,
or ``roles``: one rank with layers in the roles of Transformer Engine's (`ROLES`). It prints how many cases have each class.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
ROLES: Final = {"features": ["transformer-engine-layers"], "level": 0, "world": {"transformer_engine_layers": True}}
PASSES: Final = "passes"
LOCAL: Final = "asks for local layers"
"""Such a test passes with local layers in its plan; a plan with the roles refuses it (MS605)."""
OTHER: Final = "bug of Megatron or of the test"
CLASSES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (LOCAL, (r"MS605 the script sets transformer_impl='local'",)),
    (
        "needs more ranks",
        (
            r"is not divisible by",
            r"Grid shape .* over sized",
            r"should be divisible by partial DistOpt",
            r"[Ww]orld[ _]size",
            r"at least \d+ (GPUs|ranks)",
            r"requires \d+ (GPUs|ranks)",
            r"multiple of \d",
        ),
    ),
    (
        "needs Transformer Engine or Triton",
        (
            r"[Tt]ransformer.?[Ee]ngine|\bTE|HAVE_TE|fused_permute|[Tt]riton|[Ff][Pp]8",
            r"Mock object has no attribute|MagicMock|_GeneratorContextManager",  # stand-ins for what is not installed
            r"not enough values to unpack \(expected 2, got 0\)|Expected value to be not None",
        ),
    ),
    (
        "needs a GPU feature",
        (
            r"'cpu' == 'cuda'|device\(type='cpu'\)|GPU peak memory",
            r"cuda.?graph|NCCL|nccl|cuBLAS|Grouped GEMM|NVLS|nvshmem|symmetric memory",
        ),
    ),
    (
        "needs another package",
        (r"No module named|[Ii]nstall|is not available|ImportError|async def|'AutoTokenizer' is not defined",),
    ),
    (
        "needs data or a network",
        (r"No such file|FileNotFoundError|HTTP|ConnectionError|download|Max retries|Tokenizer \w+ (file )?doesn't exist",),
    ),
)
"""Classes of what does not pass, with patterns of their reasons; the first that fits counts."""
BY_NAME: Final = (
    ("test_reduce_scatter_with_fp32_accumulation.py", "needs more ranks"),  # of one rank nothing is summed
    ("test_parallel_state.py::test_initialize_and_destroy_model_parallel", "needs more ranks"),  # two sizes of one rank fit
    ("test_parallel_state.py::test_pipeline_parallel_initializations", "needs more ranks"),
    ("test_fully_parallel.py::TestCrossRanksReads", "needs more ranks"),
    ("test_parallel_state.py::test_different_initialize_order_unconsistency", "needs more ranks"),
    ("test_te_layers_batch_invariant.py", "needs Transformer Engine or Triton"),
    ("test_mla_yarn_rope_apply.py", "needs Transformer Engine or Triton"),
    ("test_gpu_forward_with_yarn_rope_fusion", "needs Transformer Engine or Triton"),
    ("test_gpu_forward_thd_precision", "needs Transformer Engine or Triton"),  # equal bits of its kernels in bf16
    ("test_transformer_engine_version", "needs Transformer Engine or Triton"),  # other versions than the stand-in has
)
"""Classes of tests whose error does not name its reason, by a part of the test's name."""


def class_of(test: str, state: str, reason: str) -> str:
    """The class of an outcome, from its state and the first line of its error."""
    if state == "passed":
        return PASSES
    if state == "skipped":
        return "skipped by Megatron"
    if state in ("hung", "crashed"):
        return "ends its process" if state == "crashed" else "takes more than a minute"
    named = next((kind for part, kind in BY_NAME if part in test), OTHER)
    return next((kind for kind, patterns in CLASSES if any(re.search(one, reason) for one in patterns)), named)


def split(test: str) -> tuple[str, str]:
    """The file and the name of a test."""
    file, _, name = test.partition("::")
    return file, name


def compact(tests: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """``{file: {class: [names]}}``; parameters of a test whose cases have one class are left out."""
    functions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for test, kind in tests.items():
        file, name = split(test)
        functions[file, name.partition("[")[0]].add(kind)
    files: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for test, kind in tests.items():
        file, name = split(test)
        function = name.partition("[")[0]
        files[file][kind].add(function if len(functions[file, function]) == 1 else name)
    return {file: {kind: sorted(names) for kind, names in sorted(kinds.items())} for file, kinds in sorted(files.items())}


class Expected:
    """The recorded outcomes of one run of a Megatron-LM version: a number of ranks, or ``roles``."""

    def __init__(self, version: str, run: int | str) -> None:
        content: dict[str, Any] = json.loads((FOLDER / f"{version}.json").read_text(encoding="utf-8"))
        self._files: dict[str, dict[str, list[str]]] = content.get(str(run), {})
        self._kinds = {
            (file, name): kind for file, kinds in self._files.items() for kind, names in kinds.items() for name in names
        }

    def folders(self) -> dict[str, list[str]]:
        """``{folder: files with a test that passes}``."""
        folders: dict[str, list[str]] = defaultdict(list)
        for file, kinds in self._files.items():
            if PASSES in kinds:
                folders[str(Path(file).parent)].append(file)
        return dict(folders)

    def tests(self) -> Iterator[tuple[str, str]]:
        """Yield every recorded test with its class."""
        for (file, name), kind in self._kinds.items():
            yield f"{file}::{name}", kind

    def of(self, test: str) -> str | None:
        """The class of a test; None for one that is not recorded."""
        file, name = split(test)
        return self._kinds.get((file, name)) or self._kinds.get((file, name.partition("[")[0]))


def read_results(path: str | Path) -> dict[str, tuple[str, str]]:
    """``{test: (state, reason)}`` from the lines that ``runner.py`` writes."""
    rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return {test: (state, reason) for row in rows for test, (state, reason) in row["tests"].items()}


def main(version: str, *results: str) -> None:
    file = FOLDER / f"{version}.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for text in results:
        run, _, path = text.partition("=")
        kinds = {test: class_of(test, *outcome) for test, outcome in read_results(path).items()}
        content[run] = compact(kinds)
        sys.stdout.write(f"{run}: {dict(Counter(kinds.values()).most_common())}\n")
    lines = re.sub(r"\n {4,}", " ", json.dumps(content, indent=1)).replace("[ ", "[")  # one line per class of a file
    file.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
