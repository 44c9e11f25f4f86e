"""Contracts: what a target looked like in a Megatron release, and how another one differs from it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from mindspeed.engine.inspection.releases import recorded_section

BASELINE: Final = "0.16.1"
"""The release that the features are written against."""

ABSENT: Final = "absent"
CORE: Final = "core"
CHECKOUT: Final = "megatron-lm"
Part = Literal["core", "megatron-lm"]
_SCRIPTS: Final = ("pretrain_gpt", "gpt_builders", "model_provider")

ContractVerdict = Literal["same", "appended", "body changed", "changed", "gone", "new", "not applied", "not recorded"]
"""Name the way in which a target differs from its contract.

appended: every call that was valid means the same; body changed: equal signature; changed: another signature or kind;
new: absent in the contract, here now; not applied: every patch of it is guarded for other versions; not recorded: a
release file has no row for it, or this Megatron lacks the part that has it. It fails nothing.
"""


@dataclass(frozen=True, slots=True)
class Contract:
    """Describe one target: ``kind`` as of a site (``absent`` when there is none), ``signature`` without annotations.

    ``body`` is a hash of the definition without its name, parameters, docstrings and layout. ``site`` is where the
    definition is, when the target is another name of it. ``near`` names what took the place of an absent target.
    """

    kind: str
    signature: str = ""
    body: str = ""
    site: str = ""
    near: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


def part_of(target: str) -> Part | None:
    """Tell which part of a Megatron-LM checkout has a target; None for one outside Megatron."""
    module = target.partition(":")[0]
    if module == "megatron.core" or module.startswith("megatron.core."):
        return CORE
    return CHECKOUT if module.startswith("megatron.") or is_script(target) else None


def is_script(target: str) -> bool:
    """Return whether a target lies in a script next to ``megatron/``, which the megatron-core distribution lacks."""
    return target.partition(":")[0] in _SCRIPTS


@lru_cache(maxsize=16)
def recorded_contracts(version: str) -> tuple[str, Mapping[str, Contract]] | None:
    """``(release, contracts by target)`` of the recorded release most like ``version``; None when every one is above."""
    known = recorded_section(version, "targets")
    if known is None:
        return None
    release, rows = known
    return release, {target: Contract(**{**row, "near": tuple(row.get("near", ()))}) for target, row in rows.items()}


def contract_for(target: str, version: str) -> tuple[str, Contract] | None:
    """``(recorded release, contract)`` that holds for a target in a version; None when nothing is recorded for it."""
    known = recorded_contracts(version)
    contract = known[1].get(target) if known is not None else None
    return (known[0], contract) if known is not None and contract is not None else None


def compare(recorded: Contract, found: Contract, by_name: bool = False) -> ContractVerdict:
    """Compare the contract that was found with the recorded one; ``by_name``: new optional parameters may stand anywhere."""
    if found.kind == ABSENT:
        return "same" if recorded.kind == ABSENT else "gone"
    if recorded.kind == ABSENT:
        return "new"
    if recorded.kind != found.kind:
        return "changed"
    if recorded.signature == found.signature:
        return "same" if recorded.body == found.body else "body changed"
    accepts = _accepts_all_by_name if by_name else _accepts_all_of
    return "appended" if accepts(found.signature, recorded.signature) else "changed"


def difference(recorded: Contract, found: Contract) -> str:
    """Describe the change in few words: ``kind: class (was function)``, ``parameters: +a, -b, c=2 (was 1)``; else empty."""
    if ABSENT in (recorded.kind, found.kind):
        return ""
    if recorded.kind != found.kind:
        return f"kind: {found.kind} (was {recorded.kind})"
    if recorded.signature == found.signature:
        return ""
    before, after = _parameters(recorded.signature), _parameters(found.signature)
    if before is None or after is None:
        return f"parameters: {found.signature or 'none'} (were {recorded.signature or 'none'})"
    old, new = before.defaults(), after.defaults()
    words = [f"+{_assigned(name, new[name])}" for name in new if name not in old]
    words += [f"-{name}" for name in old if name not in new]
    words += [
        f"{_assigned(name, new[name])} (was {_assigned(name, old[name])})"
        for name in new
        if name in old and old[name] != new[name]
    ]
    return f"parameters: {', '.join(words) or 'in another order'}"


def _assigned(name: str, default: str) -> str:
    return f"{name}={default}" if default else name


def _accepts_all_of(new: str, old: str) -> bool:
    """Return whether every call that fits ``old`` fits ``new`` and gives each old parameter the same value."""
    before, after = _parameters(old), _parameters(new)
    if before is None or after is None:
        return False
    kept = len(before.positional)
    appended = after.positional[kept:]
    if after.positional[:kept] != before.positional or not set(before.collecting) <= set(after.collecting):
        return False
    if appended and any(not name.startswith("**") for name in before.collecting):
        return False
    added = dict(appended) | {name: after.named[name] for name in after.named.keys() - before.named.keys()}
    return all(after.named.get(name) == default for name, default in before.named.items()) and "" not in added.values()


def _accepts_all_by_name(new: str, old: str) -> bool:
    """Return whether ``new`` has the parameters of ``old`` in their order, with their defaults, and else optional ones."""
    before, after = _parameters(old), _parameters(new)
    if before is None or after is None or before.collecting != after.collecting:
        return False
    names, known = dict(before.positional), before.defaults()
    kept = tuple(pair for pair in after.positional if pair[0] in names)
    added = {name: default for name, default in after.defaults().items() if name not in known}
    named = {name: default for name, default in after.named.items() if name in known}
    return (
        kept == before.positional
        and named == before.named
        and all(default or name.startswith("*") for name, default in added.items())
    )


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters with their defaults as text, ``""`` when required; ``*args`` and ``**kwargs`` are ``collecting``."""

    positional: tuple[tuple[str, str], ...]
    named: dict[str, str]
    collecting: tuple[str, ...]

    def defaults(self) -> dict[str, str]:
        names = {name.removesuffix(", /"): default for name, default in self.positional}
        return names | self.named | dict.fromkeys(self.collecting, "")


def _parameters(signature: str) -> _Parameters | None:
    """Read a signature; None for alternatives, which are no signature."""
    try:
        (function,) = ast.parse(f"def f{signature}: ...").body
    except SyntaxError:
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    arguments = function.args
    names = [*(f"{argument.arg}, /" for argument in arguments.posonlyargs), *(argument.arg for argument in arguments.args)]
    defaults = [""] * (len(names) - len(arguments.defaults)) + [ast.unparse(default) for default in arguments.defaults]
    named = {
        argument.arg: "" if default is None else ast.unparse(default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    stars = (("*", arguments.vararg), ("**", arguments.kwarg))
    collecting = tuple(f"{star}{argument.arg}" for star, argument in stars if argument is not None)
    return _Parameters(tuple(zip(names, defaults, strict=True)), named, collecting)


def near_by_content(vanished: Contract, candidates: Mapping[str, Contract]) -> list[str]:
    """Candidates that have the body of a vanished definition, else those that have its signature.

    A signature says something only from two named parameters on.
    """
    alike = {name: contract for name, contract in candidates.items() if contract.kind == vanished.kind}
    same_body = [name for name, contract in alike.items() if contract.body == vanished.body]
    if same_body or vanished.signature.replace("self", "").replace("cls", "").count(",") < 1:
        return sorted(same_body)
    return sorted(name for name, contract in alike.items() if contract.signature == vanished.signature)
