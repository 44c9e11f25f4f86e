"""The child process: reads ``{checkout, facts, commands}`` on standard input and writes what the rules say of each command."""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import io
import json
import os
import sys
import typing
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from mindspeed.megatron_lm.upstream.importing import Imports
from mindspeed.megatron_lm.upstream.rewriting import Rules
from mindspeed.megatron_lm.upstream.stand_ins import ImportStandIn

_REFUSED: Final = (
    *("socket.", "subprocess.", "shutil.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir"),
)


class ParserError(Exception):
    """Megatron's parser refuses the command line."""


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse network, processes and writing, which no argument module needs."""
    writes = event == "open" and isinstance(arguments[1], str) and any(sign in arguments[1] for sign in "wax+")
    if writes or event.startswith(_REFUSED):
        raise PermissionError(f"{event} is not allowed in a check")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ParserError(message)


def _same(function: Any) -> Any:
    return function


def _limit() -> None:
    """Bound the memory and the time of this process where the system can."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


def main() -> None:
    task = json.load(sys.stdin)
    answer, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
    _limit()
    ImportStandIn.facts = task["facts"]
    if not hasattr(typing, "override"):
        vars(typing)["override"] = _same  # Python 3.12 has it, and a module with it alone is read by an older one
    rules = Rules()
    vars(builtins).update(rules.names() | {"exit": sys.exit, "quit": sys.exit})
    imports = Imports(Path(task["checkout"]), rules.compiled)
    sys.meta_path.insert(0, imports)
    setattr(argparse.ArgumentParser, "error", _refuse)  # noqa: B010
    sys.addaudithook(_guard)
    results = [_checked(command, rules, imports) for command in task["commands"]]
    json.dump({"results": results, "failed": imports.failed}, answer)


def _checked(command: dict[str, Any], rules: Rules, imports: Imports) -> dict[str, Any]:
    """Run every rule on one command: the parser, the validation, the configurations."""
    os.environ.clear()
    os.environ.update({"RANK": "0", "WORLD_SIZE": str(command["world_size"]), **command["environ"]})
    sys.argv = ["pretrain_gpt.py", *command["words"]]
    errors: list[str] = []
    for site in rules.sites:
        site.state, site.message, site.wanted = "not run", "", []
    try:
        ImportStandIn.absent = True
        module = import_module("megatron.training.arguments")
        if broken := imports.failed.get(module.__name__):
            return {"sites": [], "errors": [f"{module.__name__}: {broken}"]}
        arguments = module.parse_args(ignore_unknown_args=True)
        ImportStandIn.absent = False
        module.validate_args(arguments, {"tokenizer_type": "GPT2BPETokenizer"})
        module.core_transformer_config_from_args(arguments)
        _other_configurations(arguments)
    except (Exception, SystemExit) as error:
        errors.append(f"{type(error).__name__}: {error}" if not isinstance(error, ParserError) else f"parser: {error}")
    return {"sites": [dataclasses.asdict(site) for site in rules.sites], "errors": errors}


def _other_configurations(arguments: Any) -> None:
    """Make the configurations that the training loop makes of arguments of the same names."""
    for module, name in (
        ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
        ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    ):
        made = getattr(import_module(module), name)
        if dataclasses.is_dataclass(made):
            known = [one.name for one in dataclasses.fields(made) if one.init and hasattr(arguments, one.name)]
            made(**{one: getattr(arguments, one) for one in known})  # type: ignore[operator]


if __name__ == "__main__":
    main()
