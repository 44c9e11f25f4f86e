"""Compiling the kernels that an operator launches for a GPU that is not there, with the compiler that a GPU would get."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from mindspeed.ops.triton import launch

TARGET = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Compiled:
    """One kernel: what its code uses, and how wide its accesses to global memory are, in bits."""

    name: str
    registers: int
    spilled: int
    shared: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    products: int


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Tensors made inside lie on a GPU in name only; kernels that are launched are compiled instead."""
    found: list[Compiled] = []

    def compile_instead(self, *args, grid, warmup, **options):
        found.append(_compiled(self, args, options))

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(patch.object(JITFunction, "run", compile_instead))
        stack.enter_context(patch("torch.cuda.current_device", lambda: 0))
        properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda device: properties))
        launch.cores.cache_clear()
        yield found
    launch.cores.cache_clear()


def _compiled(kernel, args, options) -> Compiled:
    bound = dict(zip(kernel.arg_names, args, strict=False))
    bound |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for n, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        one = isinstance(value, int) and value == 1
        if parameter.is_constexpr or one:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    code = triton.compile(source, target=TARGET, options=options)
    ptx = code.asm["ptx"]
    usage = _usage(code.asm["cubin"])
    return Compiled(
        kernel.__name__,
        int(re.search(r"REG:(\d+)", usage)[1]),
        int(re.search(r"LOCAL:(\d+)", usage)[1]),
        code.metadata.shared,
        _widths(r"(?:ld\.global|cp\.async\.c[ag]\.shared\.global)", ptx),
        _widths(r"st\.global", ptx),
        len(re.findall(r"(?:wgmma\.mma_async|mma\.sync)", ptx)),
    )


def _widths(instruction: str, ptx: str) -> tuple[int, ...]:
    widths = []
    for line in ptx.splitlines():
        if "cp.async" in line and re.search(instruction, line):
            widths.append(8 * int(re.search(r"0x([0-9a-f]+)", line)[1], 16))
        elif found := re.search(instruction + r"(?:\.L1::\w+)?(?:\.\w+::\w+)*(?:\.v(\d))?\.[bfus](\d+)", line):
            widths.append(int(found[1] or 1) * int(found[2]))
    return tuple(widths)


def _usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
