"""Report what this machine has and lacks for training: one finding per subject, without importing torch here."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed._version import __version__
from mindspeed.engine.inspection.megatron_copies import megatron_copies, mixed_roots
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON, installed_version, version_in
from mindspeed.ops.availability import CPP, standings
from mindspeed.ops.compiler import find_compiler
from mindspeed.ops.instruction_sets import missing
from mindspeed.plugins.discovery import BUILT_IN, discover
from mindspeed.problems import Problem, Text, marked
from mindspeed.workbench.diagnostics import ascend
from mindspeed.workbench.diagnostics.finding import Finding

_SIZES: Final = {"cpu": 1024, "cuda": 8192, "npu": 8192}
_ROUNDS: Final = 5


def measure_peaks(platform: str) -> dict[str, float]:
    """Return the best TFLOP/s of a few square products on one device, by the name of the precision."""
    import torch

    device = torch.device(platform)
    size = _SIZES[platform]
    peaks = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = []
        for _ in range(_ROUNDS + 1):
            start = time.perf_counter()
            c = a @ b
            c[-1, -1].item()  # waits for the device
            seconds.append(time.perf_counter() - start)
        peaks[name] = 2 * size**3 / min(seconds[1:]) / 1e12
    return peaks


INSTALL: Final = "pip install 'mindspeed[train]'"
PROBE_SECONDS: Final = 120
_NO_TORCH: Final = Finding("torch", marked("not installed"), "missing", INSTALL)
NEEDED: Final = {
    "numpy": marked("tensors in host memory"),
    "psutil": marked("saving checkpoints (Megatron hangs without it)"),
    "six": "Megatron",
}
USEFUL: Final = {
    "pybind11": marked("Megatron's data set helpers"),
    "tensorboard": marked("logging scalars of a run"),
    "matplotlib": marked("drawing the loss curve"),
    "tokenizers": marked("reading tokenizer.json files"),
}


def examine() -> Iterator[Finding]:
    """Every finding, in the order of the report. Takes as long as torch takes to import."""
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("mindspeed", f"{__version__} ({Path(__file__).parents[2]})")
    torch = probe_torch()
    yield from _torch(torch)
    yield from ascend.findings()
    yield from _npu(torch)
    yield from megatron()
    yield from packages()
    yield from _devices(torch)
    yield from _operators()
    yield from _features()


def problems() -> list[Problem]:
    """Find obstacles to an import of torch or megatron, without importing them."""
    missing = [] if find_spec("torch") is not None else [_NO_TORCH]
    return [problem for finding in (*missing, *megatron()) if (problem := finding.problem()) is not None]


_PROBE: Final = """
import json, torch
import torch.distributed as dist
found = {"version": torch.__version__, "gloo": dist.is_available() and dist.is_gloo_available(), "cuda": torch.version.cuda}
found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps(found))
"""


def probe_torch() -> dict[str, Any]:
    """``version``, ``gloo``, ``cuda`` and ``gpus`` of torch, or ``error`` with the last line of what went wrong."""
    return probe(_PROBE)


def probe(program: str, *arguments: str) -> dict[str, Any]:
    """Return the JSON object that a Python program prints in a separate process, or ``error`` with its last line.

    There a broken build of torch is a finding and not a crash.
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"the import did not end within {PROBE_SECONDS} seconds"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the import ended with status {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _torch(answer: dict[str, Any]) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield _NO_TORCH
    elif "error" in answer:
        yield Finding(
            "torch",
            Text.of("cannot be imported: {error}", error=answer["error"]),
            "missing",
            Text.of("reinstall it: {command}", command=INSTALL),
        )
    else:
        yield Finding("torch", answer["version"])
        absent = Finding(
            "gloo", marked("not in this torch build"), "missing", marked("install a torch build with gloo, as on PyPI")
        )
        yield Finding("gloo", marked("available")) if answer["gloo"] else absent


def _npu(torch: dict[str, Any]) -> Iterator[Finding]:
    if find_spec("torch_npu") is None:
        fix = marked("pip install 'mindspeed[npu]' on a machine with CANN, see docs/ascend.md")
        yield Finding("torch_npu", marked("not installed"), "optional", fix)
        return
    answer = probe("import json, torch, torch_npu; print(json.dumps({'version': torch_npu.__version__}))")
    if "error" in answer:
        fix = marked("install the torch_npu for this torch version, and source CANN's set_env.sh")
        yield Finding("torch_npu", Text.of("cannot be imported: {error}", error=answer["error"]), "warning", fix)
    elif "version" in torch and _series(answer["version"]) != _series(torch["version"]):
        text = Text.of("{version} was built for another torch than {torch}", version=answer["version"], torch=torch["version"])
        yield Finding("torch_npu", text, "warning", f"pip install torch_npu=={_series(torch['version'])}.*")
    else:
        yield Finding("torch_npu", answer["version"])
    if find_spec("transformer_engine") is not None and find_spec("transformer_engine_torch") is not None:
        text = Text.of("a CUDA build is installed together with torch_npu; Megatron imports it and fails in a search for cuDNN")
        yield Finding("transformer_engine", text, "warning", "pip uninstall transformer_engine transformer_engine_torch")


def _series(version: str) -> str:
    """``2.9.0.post2`` -> ``2.9``."""
    return ".".join(version.split(".")[:2])


def megatron() -> Iterator[Finding]:
    """Every importable copy of megatron-core; the first one wins."""
    copies = megatron_copies()
    if not copies:
        yield Finding("megatron-core", marked("not installed"), "missing", INSTALL)
    for copy in copies:
        version = copy.version or marked("unknown version")
        found = f"{version} ({copy.root})"
        supported = copy.version is not None and version_in(copy.version, SUPPORTED_MEGATRON)
        if not copy.wins:
            fix = marked("remove the other copy from PYTHONPATH or uninstall it, unless you need it")
            yield Finding("megatron-core", Text.of("{copy}, never imported: the first one is used", copy=found), "warning", fix)
        elif supported and version in recorded_releases():
            yield Finding("megatron-core", Text.of("{copy}, a tested release", copy=found))
        elif supported:
            tested = ", ".join(one for one in recorded_releases() if version_in(one, SUPPORTED_MEGATRON))
            text = Text.of("{copy}, which is not tested; tested releases: {releases}", copy=found, releases=tested)
            yield Finding("megatron-core", text, "warning", "mindspeed patches drift")
        else:
            text = Text.of("{copy} is not supported; supported is {range}", copy=found, range=SUPPORTED_MEGATRON)
            yield Finding("megatron-core", text, "missing", "pip install megatron-core==0.16.1")
    if (mixed := mixed_roots()) is not None:
        yield Finding("megatron", mixed.message, "missing", mixed.fix_text)


def packages() -> Iterator[Finding]:
    """Python packages that training needs or uses."""
    for names, state in ((NEEDED, "missing"), (USEFUL, "optional")):
        for name, purpose in names.items():
            if find_spec(name) is not None:
                yield Finding(name, installed_version(name) or marked("unknown version"))
            else:
                yield Finding(
                    name, Text.of("not installed; it is for {purpose}", purpose=Text.of(purpose)), state, f"pip install {name}"
                )


def _devices(torch: dict[str, Any]) -> Iterator[Finding]:
    from mindspeed.platforms import detect

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("cpu", Text.of("{cores} cores, {memory:.0f} GiB memory", cores=os.cpu_count(), memory=memory))
    gpus = torch.get("gpus") or []
    yield Finding(marked("cuda devices"), ", ".join(gpus) or marked("none"), "ok" if gpus else "optional")
    npus = ascend.AscendHost().devices()
    yield Finding(marked("npu devices"), ", ".join(npus) or marked("none"), "ok" if npus else "optional")
    yield Finding(marked("platform"), Text.of("{platform} is used unless --platform selects another one", platform=detect()))


def _operators() -> Iterator[Finding]:
    """The compiler of the C++ operators, and whether they are built for this machine."""
    compiler = find_compiler(os.environ.get("CXX"))
    if compiler is not None:
        yield Finding(marked("C++ compiler"), f"{' '.join(compiler.command)} {compiler.version}")
    else:
        text = marked("not found; C++ operators need it, and use slower plain-torch references without it")
        yield Finding(marked("C++ compiler"), text, "optional", marked("apt-get install g++, or set CXX"))
    rows = [row for row in standings("cpu") if row.variant == CPP and not missing(row.name)]
    absent = [row for row in rows if row.runs != CPP]
    if absent:
        fix = "mindspeed ops build" if compiler is not None else ""
        yield Finding(
            marked("C++ operators"),
            Text.of("{reason}, so operators use their plain-torch references", reason=absent[0].reason),
            "optional",
            fix,
        )
    elif rows:
        yield Finding(marked("C++ operators"), Text.of("{count} are built", count=len(rows)))


def _features() -> Iterator[Finding]:
    catalog = discover()
    third = sorted({f"{row.distribution} {row.version}" for row in catalog.usable.values() if row.distribution != BUILT_IN})
    yield Finding(
        marked("features"),
        Text.of("{count}, some from {packages}" if third else "{count}", count=len(catalog.usable), packages=", ".join(third)),
    )
    for row in catalog.broken.values():
        if row.problem is not None:
            yield Finding(
                row.name,
                Text.of("{code} {text}", code=row.problem.code, text=row.problem.message),
                "warning",
                row.problem.fix_text,
            )
