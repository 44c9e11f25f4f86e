"""Libraries that let the real torch_npu load on a machine with neither NPU nor CANN.

torch_npu links a dozen CANN libraries. Each is replaced by an empty one, and one of them defines every symbol that the others
lack: most fail, as a machine without a device does; those asked for while torch_npu initialises answer as a machine with one
device of the kind in ``NPU_STUB_SOC`` would. Memory on the device cannot be had and no kernel runs, so no value ever comes out.
"""

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

SOC = "Ascend910B1"
_SYSTEM = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6")
_LOADER = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
_RUNTIME = "libascendcl.so"
_EXPECTED = re.compile(r"acl|rt[A-Z]|Msprof|Hccl|(v?snprintf|strcpy)_s$|_ZN.*3atb|_ZN.*2ge")
_UNAVAILABLE = 507899
_HEADER = f"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long size;
static __thread int current = -1;
static const char *soc(void) {{ return getenv("NPU_STUB_SOC"); }}
static int answer(void) {{ return soc() ? 0 : {_UNAVAILABLE}; }}
"""
_POINTERS = ("aclCreateDataBuffer", "aclCreateTensorDesc", "aclopCreateAttr")
_ANSWERING = (
    "aclInit",
    "aclFinalize",
    "aclrtResetDevice",
    "aclrtSetCurrentContext",
    "aclrtSynchronizeStream",
    "aclrtSynchronizeDevice",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeStreamWithTimeout",
    "aclrtDestroyStream",
    "aclrtDestroyStreamForce",
    "MsprofRegisterCallback",
    "aclrtSetDeviceSatMode",
    "aclSetCompileopt",
    "aclrtSetOpExecuteTimeOut",
    "aclrtCtxSetSysParamOpt",
    "aclrtSetSysParamOpt",
)
"""Calls that succeed and give nothing back."""
_BODIES = {
    "aclAppLog": "void aclAppLog(int level, const char *f, const char *file, unsigned line, const char *text, ...) {}",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "stub of CANN: this machine has no NPU"; }',
    "aclrtGetSocName": "const char *aclrtGetSocName(void) { return soc(); }",
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { *n = soc() ? 1 : 0; return 0; }",
    "aclrtSetDevice": "int aclrtSetDevice(int d) { if (soc()) current = d; return answer(); }",
    "aclrtGetDevice": f"""int aclrtGetDevice(int *d) {{
        if (!soc()) return {_UNAVAILABLE}; if (current < 0) return 107002; *d = current; return 0; }}""",
    "aclrtGetCurrentContext": "int aclrtGetCurrentContext(void **c) { *c = (void *)1; return answer(); }",
    "aclrtCreateStream": "int aclrtCreateStream(void **s) { *s = (void *)2; return answer(); }",
    "aclrtCreateStreamWithConfig": """int aclrtCreateStreamWithConfig(void **s, unsigned p, unsigned f) {
        *s = (void *)2; return answer(); }""",
    "aclrtMallocHost": "int aclrtMallocHost(void **p, size n) { *p = malloc(n); return *p ? answer() : 207000; }",
    "aclrtFreeHost": "int aclrtFreeHost(void *p) { free(p); return 0; }",
    "aclrtGetSysParamOpt": "int aclrtGetSysParamOpt(int o, long *v) { *v = 0; return answer(); }",
    "aclrtCtxGetSysParamOpt": "int aclrtCtxGetSysParamOpt(int o, long *v) { *v = 0; return answer(); }",
    "aclGetCompileoptSize": 'size aclGetCompileoptSize(int o) { return sizeof("disable"); }',
    "aclGetCompileopt": 'int aclGetCompileopt(int o, char *v, size n) { snprintf(v, n, "disable"); return answer(); }',
    "strcpy_s": "int strcpy_s(char *d, size n, const char *s) { if (strlen(s) >= n) return 34; strcpy(d, s); return 0; }",
    "vsnprintf_s": "int vsnprintf_s(char *d, size n, size c, const char *f, va_list a) { return vsnprintf(d, n, f, a); }",
    "snprintf_s": """int snprintf_s(char *d, size n, size c, const char *f, ...) {
        va_list a; va_start(a, f); int r = vsnprintf(d, n, f, a); va_end(a); return r; }""",
}
_BY_NAME = (
    "aclrtGetSysParamOpt",
    "aclrtCtxGetSysParamOpt",
    "aclGetCompileopt",
    "aclGetCompileoptSize",
    "aclrtSetDeviceSatMode",
    "aclSetCompileopt",
    "aclrtSetOpExecuteTimeOut",
    "aclrtCtxSetSysParamOpt",
    "aclrtSetSysParamOpt",
    "aclrtSynchronizeDevice",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeStreamWithTimeout",
    "aclrtDestroyStreamForce",
)
"""Looked up while the runtime starts, not linked."""


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _symbols(library: Path, flag: str) -> dict[str, str]:
    """Dynamic symbols and their kinds."""
    lines = (line.split() for line in _output("nm", "-D", flag, str(library)).splitlines())
    return {line[-1]: line[-2] for line in lines if len(line) > 1}


def _defined_by_system() -> set[str]:
    """Symbols of the C and C++ libraries: some are wanted without a version and must never be replaced."""
    found: set[str] = set()
    for name in (*_SYSTEM, *_LOADER):
        library = Path(_output("gcc", f"-print-file-name={name}").strip())
        if library.exists():
            found |= {symbol.partition("@")[0] for symbol in _symbols(library, "--defined-only")}
    return found


def _body(symbol: str) -> str:
    if symbol in _BODIES:
        return _BODIES[symbol]
    if symbol in _POINTERS:
        return f"void *{symbol}() {{ return 0; }}"
    return f"int {symbol}() {{ return {'answer()' if symbol in _ANSWERING else _UNAVAILABLE}; }}"


def build(package: Path, torch_libraries: Path, folder: Path) -> None:
    """Compile the stubs that ``package`` (the folder torch_npu) needs beside torch's own libraries into ``folder``."""
    patterns = ("lib/*.so", "_C*.so", "dynamo/torchair/core/*.so")
    own = sorted(file for pattern in patterns for file in package.glob(pattern))
    wanted = {s for file in own for s, kind in _symbols(file, "--undefined-only").items() if "@" not in s and kind not in "wv"}
    there = _defined_by_system()
    for file in (*own, *torch_libraries.glob("*.so*")):
        there |= set(_symbols(file, "--defined-only"))
    missing = sorted(s for s in wanted - there if not re.match(r"_?Py[A-Z_]", s))
    strange = [symbol for symbol in missing if not _EXPECTED.match(symbol)]
    if strange:
        raise RuntimeError(f"torch_npu misses symbols that are not of CANN: {', '.join(strange)}")
    needed = {name for file in own for name in re.findall(r"NEEDED.*\[(.+?)\]", _output("readelf", "-d", str(file)))}
    bundled = {file.name for file in own} | {file.name for file in torch_libraries.iterdir()} | {*_SYSTEM, *_LOADER}
    begun = folder.with_name(folder.name + ".begun")
    begun.mkdir(parents=True, exist_ok=True)
    source = begun / "stubs.c"
    source.write_text("\n".join([_HEADER, *map(_body, sorted({*missing, *_BY_NAME}))]) + "\n")
    _compile(begun / _RUNTIME, str(source))
    # torch_npu looks symbols up in one library or the other: each finds them in the first
    through = ("-xc", "/dev/null", "-xnone", "-Wl,--no-as-needed", str(begun / _RUNTIME), "-Wl,-rpath,$ORIGIN")
    for name in sorted(needed - bundled - {_RUNTIME}):
        _compile(begun / name, *through)
    begun.rename(folder)  # at once: a folder that is there is whole


def _compile(library: Path, *source: str) -> None:
    flags = ("-w", "-std=gnu11", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}")
    subprocess.run(["gcc", *flags, *source, "-o", str(library)], check=True)


def load(folder: Path) -> None:
    """Import torch_npu from ``folder``, where ``pip install --target`` put it, with stubs in a folder beside it."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported; torch_npu and its stubs come first")
    os.environ |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "NPU_STUB_SOC": SOC}
    spec = importlib.util.find_spec("torch")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    torch_libraries = Path(places[0], "lib")
    stubs = folder.resolve().with_name(folder.name + "_stubs")
    if not stubs.exists():
        build(folder / "torch_npu", torch_libraries, stubs)
    for library in sorted(stubs.glob("*.so"), key=lambda file: file.name != _RUNTIME):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # later found by name, without a search path
    sys.path.append(str(folder.resolve()))
    importlib.import_module("torch_npu")
