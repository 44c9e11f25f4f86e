"""A process with torch that runs a checkout's real ``validate_args``: one line of JSON with the first error of each command."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sys
import traceback
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

from packaging.version import Version

CAPABILITY = (9, 0)
_KERNEL_NAMES = {
    "megatron.core.models.common.embeddings.rope_utils": ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"),
    "megatron.core.transformer.moe.moe_utils": (
        *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
        *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
    ),
}
_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
"""Needs triton, and holds no rules."""


class ParserError(Exception):
    """Megatron's parser refuses the command line."""


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ParserError(message)


def main() -> None:
    task = json.load(sys.stdin)
    sys.path.insert(0, task["checkout"])
    import torch

    if find_spec("triton") is None:
        sys.modules[_KERNELS] = MagicMock()
    torch.cuda.get_device_capability = lambda *_: CAPABILITY  # type: ignore[assignment,misc]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)  # type: ignore[assignment,misc]
    _pretend_transformer_engine()
    argparse.ArgumentParser.error = _refuse  # type: ignore[method-assign,assignment]
    answer, sys.stdout = sys.stdout, io.StringIO()
    inherited = dict(os.environ)
    for command in task["commands"]:
        os.environ.clear()
        os.environ.update(inherited | {"RANK": "0", "WORLD_SIZE": str(command["world_size"])} | command["environ"])
        print(json.dumps(_first_error(command["words"], task["checkout"])), file=answer, flush=True)


def _pretend_transformer_engine() -> None:
    """Let Megatron-LM find the kernels and the version of a Transformer Engine, as the check assumes."""
    import_module("megatron.core.utils").get_te_version = lambda: Version("2.14.0")
    for module, names in _KERNEL_NAMES.items():
        for name in names:
            if getattr(import_module(module), name, None) is None:
                setattr(import_module(module), name, MagicMock())


def _first_error(words: list[str], checkout: str) -> dict[str, Any] | None:
    """Return the first error of a command as Megatron-LM's start would raise it, with the statements that were running."""
    from megatron.training import arguments as module

    sys.argv = ["pretrain_gpt.py", *words]
    try:
        arguments = module.parse_args(ignore_unknown_args=True)
        module.validate_args(arguments, {"tokenizer_type": "GPT2BPETokenizer"})
        module.core_transformer_config_from_args(arguments)
        import_module("megatron.training.training").get_megatron_optimizer_config(arguments)
        _make_calculator_of_micro_batches(arguments)
    except (Exception, SystemExit) as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(checkout)]
        places = [f"{os.path.relpath(one.filename, checkout)}:{_statement(one.filename, one.lineno or 0)}" for one in frames]
        return {"type": type(error).__name__, "text": " ".join(str(error).split()), "places": places}
    return None


def _make_calculator_of_micro_batches(arguments: argparse.Namespace) -> None:
    """Set Megatron-LM's globals without writers and timers, which no rule is about."""
    module: Any = import_module("megatron.training.global_vars")
    for name in [name for name in vars(module) if name.startswith("_set_")]:
        setattr(module, name, lambda *_: None)
    module.unset_global_variables()
    module.set_global_variables(argparse.Namespace(**vars(arguments) | {"enable_experimental": False}), build_tokenizer=False)


def _statement(file: str, line: int) -> int:
    """Return the first line of the innermost statement of a line."""
    nodes = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.stmt))
    around = [(node.lineno, node.end_lineno or 0) for node in nodes if node.lineno <= line <= (node.end_lineno or 0)]
    return max(around)[0] if around else line


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
