"""Schemas of the operators of torch_npu that `mindspeed/ops/npu` calls: a committed copy, and how calls are held to it."""

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import mindspeed.ops

FILE = Path(__file__).with_name("schemas.json")
KERNELS = Path(mindspeed.ops.__file__).parent / "npu"


@dataclass(frozen=True)
class Call:
    """One call of ``torch.ops.npu.<operator>`` in a source file."""

    file: str
    line: int
    operator: str
    positional: int
    keywords: tuple[str, ...]


def files() -> list[Path]:
    """The files with kernels, by name the operators."""
    return sorted(file for file in KERNELS.glob("*.py") if file.stem != "__init__")


def calls_in(text: str, file: str) -> Iterator[Call]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.ops.npu."):
            operator = ast.unparse(node.func).removeprefix("torch.ops.npu.")
            keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
            yield Call(file, node.lineno, operator, len(node.args), keywords)


def calls() -> list[Call]:
    return [call for file in files() for call in calls_in(file.read_text(), file.name)]


def committed() -> dict[str, str]:
    found: dict[str, str] = json.loads(FILE.read_text())
    return found


def of_wheel(names: Iterable[str]) -> dict[str, str]:
    """Schemas of the torch_npu that is loaded."""
    return {name: str(getattr(torch.ops.npu, name).default._schema) for name in names}


def as_text(found: dict[str, str]) -> str:
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def complaints(call: Call, known: dict[str, str]) -> list[str]:
    """What a schema says against a call: one sentence each."""
    where = f"{call.file}:{call.line}: {call.operator}"
    if call.operator not in known:
        return [f"{where} is not an operator of the committed schemas"]
    arguments = torch._C.parse_schema(known[call.operator]).arguments
    names = [argument.name for argument in arguments]
    found = [f"{where} has no argument {keyword}" for keyword in call.keywords if keyword not in names]
    by_place = [argument.name for argument in arguments if not argument.kwarg_only]
    if call.positional > len(by_place):
        found.append(f"{where} takes {len(by_place)} arguments by place, not {call.positional}")
    given = {*by_place[: call.positional], *call.keywords}
    found += [f"{where} lacks {a.name}" for a in arguments if not a.has_default_value() and a.name not in given]
    return found
