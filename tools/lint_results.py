"""Run ``mindspeed check`` on public commands and on wrong ones, and record what it finds.

    MINDSPEED_LINT_CHECKOUTS=FOLDER python -m tools.lint_results

writes ``tools/docs/lint_results.json``, from which the page on checking commands is made: counts, reasons and names of options,
no script text.
FOLDER has a checkout for each name in SOURCES that is to be recorded anew; the others keep their records.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import split
from typing import Any, Final

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.problems import MindSpeedError, Problem
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import LaunchedCommand, command_of_words, commands_of_file
from mindspeed.workbench.lint.upstream.process import Checkout, find_checkout
from mindspeed.workbench.lint.upstream.rules import Command, judge
from tools.functional_tests import functional_tests
from tools.published_commands import MEGATRON, reason_of

VARIABLE: Final = "MINDSPEED_LINT_CHECKOUTS"
RECORD: Final = Path(__file__).parent / "docs" / "lint_results.json"
MUTATIONS: Final = Path(__file__).parent / "lint_mutations.txt"
SOURCES: Final = {
    "Megatron-LM 0.14.0": "23e00ed0963c35382dfe8a5a94fb3cda4d21e133",
    "Megatron-LM 0.16.1": "55ac7082517c3878ae653c07c09c534b8aed49f6",
    "Megatron-LM 0.19.0": "5be9626709af2722333bf54797c954c09edeada3",
    "Megatron-LM main": "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    "MindSpeed": "028de58ca629d035185b00ff7d1eb7eff4f7fd48",
    "MindSpeed-LLM": "c77308a14bfcb1aa7ca61da9c1aa24a893cb1b91",
    "ms-swift": "3602360a562313afbf2ef6065fdf61f271a2c5b9",
    "verl": "b178a3cd56f58b2d502255daba591e92833930a7",
}
"""Public repositories with their commits."""

DENSE: Final = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --bf16 "
    "--micro-batch-size 2 --global-batch-size 32 --train-iters 10 --lr 1e-4 --use-distributed-optimizer "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
)
MOE: Final = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear --sequence-parallel --expert-model-parallel-size 2"
ENVIRON: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold what a check says of one command: the reasons of its problems, none where it is clean."""

    name: str
    reasons: frozenset[str]


def mutations() -> list[str]:
    """Options that make an accepted command wrong, one set for each command."""
    lines = MUTATIONS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def checkout_of(name: str) -> Path | None:
    """The folder of a source, where the variable names one that has it."""
    folder = Path(os.environ.get(VARIABLE, ""), name.removeprefix("Megatron-LM "))
    return folder if VARIABLE in os.environ and folder.is_dir() else None


def rules_of(checkout: Checkout) -> dict[str, Any]:
    """Count the rules that a dense and a MoE command decide, and the mutations that are refused."""
    commands = [Command(split(text), 16, ENVIRON) for text in (DENSE, f"{DENSE} {MOE}")]
    dense, moe = judge(checkout, commands, surface_or_nearest(checkout.version), "9.0")
    launch = split(f"torchrun --nproc-per-node 16 pretrain_gpt.py {DENSE}")
    wrong = [replace(command_of_words([*launch, *split(text)]), environ=tuple(ENVIRON.items())) for text in mutations()]
    mutated = list(findings([(command.program, command) for command in wrong], checkout, "9.0"))
    decided = {*dense.decided, *moe.decided}
    return {
        "rules": len({*decided, *dense.undecided, *dense.unreached, *moe.undecided, *moe.unreached}),
        "decided": len(decided),
        "accepted": not dense.problems and not moe.problems,
        "mutations": len(mutated),
        "let through": [text for text, finding in zip(mutations(), mutated, strict=True) if not finding.reasons],
    }


def findings(
    commands: Sequence[tuple[str, LaunchedCommand]], checkout: Checkout | None, arch: str, platform: str = "cuda"
) -> Iterator[Finding]:
    """Check commands for devices of one platform and architecture."""
    environment = made_up(platform, (checkout.version if checkout else None) or MEGATRON)
    jobs = [CheckedJob(command, environment, checkout) for _, command in commands]
    for (name, _), (plan, _) in zip(commands, check_jobs(jobs, arch), strict=True):
        yield Finding(name, frozenset(map(_reason, plan.problems)) if isinstance(plan, MindSpeedError) else frozenset())


def _reason(problem: Problem) -> str:
    if problem.code == "MS115":
        return problem.message.partition(" refuses this command: ")[2] or problem.message
    return reason_of(problem)


def examples(folder: Path) -> list[tuple[str, LaunchedCommand]]:
    """Every training command of the scripts of a folder."""
    found = []
    for file in sorted(folder.rglob("*.sh")):
        try:
            commands = commands_of_file(file, {})
        except MindSpeedError:
            continue
        found += [(str(file.relative_to(folder)), command) for command in commands if _trains(command)]
    return found


def _trains(command: LaunchedCommand) -> bool:
    return Path(command.program).name.startswith(("pretrain", "train", "finetune"))


def summary(found: Sequence[Finding]) -> dict[str, Any]:
    counts = Counter(reason for finding in found for reason in finding.reasons)
    reasons = sorted(counts, key=lambda reason: (-counts[reason], reason))
    clean = sum(not finding.reasons for finding in found)
    return {"commands": len(found), "clean": clean, "findings": [[counts[reason], reason] for reason in reasons]}


def measured(name: str, folder: Path) -> dict[str, Any]:
    """The record of one source."""
    checkout = find_checkout("pretrain_gpt.py", {}, str(folder))
    if checkout is None:
        platform = "npu" if name.startswith("MindSpeed") else "cuda"
        return {"scripts": summary(list(findings(examples(folder), None, "9.0", platform)))}
    tests = functional_tests(folder)
    groups = {arch: [(test.name, test.command) for test in tests if test.arch == arch] for arch in ("9.0", "10.0")}
    checked = [finding for arch, group in groups.items() for finding in findings(group, checkout, arch)]
    scripts = list(findings(examples(folder / "examples"), checkout, "9.0"))
    return {"rules": rules_of(checkout), "functional tests": summary(checked), "examples": summary(scripts)}


def main() -> None:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    for name, commit in SOURCES.items():
        if (folder := checkout_of(name)) is not None:
            record[name] = {"commit": commit, **measured(name, folder)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
