"""The child process for configurations: for each line with ``configurations`` and ``overrides`` it writes one of JSON.

An answer has the ``failed`` rules with the values that they read, the places that are ``undecided``, and the fields of the job
that is ``built``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Final

from mindspeed.job.config import world_of_config
from mindspeed.workbench.lint.upstream.child import prepared
from mindspeed.workbench.lint.upstream.rewriting import Rules
from mindspeed.workbench.lint.upstream.stand_ins import ImportStandIn

_USUAL: Final = "megatron.core.transformer.transformer_config"
"""The module that every job needs. It is imported before there is a job."""


def main() -> None:
    _, answer, rules, imports = prepared()
    ImportStandIn.absent = True
    import_module(_USUAL)
    ImportStandIn.absent = False
    for line in iter(sys.stdin.readline, ""):
        built, errors = _make(json.loads(line), rules)
        states, sites = rules.states(), [dataclasses.asdict(site) for site in rules.sites]
        failed = [{**sites[failure["site"]], **failure} for failure in states["failed"]]
        undecided = [sites[site] for site, _ in states["undecided"]]
        errors += imports.failures()
        answer.write(json.dumps({"failed": failed, "undecided": undecided, "errors": errors, "built": built}) + "\n")
        answer.flush()


def _make(job: dict[str, Any], rules: Rules) -> tuple[dict[str, Any], list[str]]:
    """Make the configurations of a job with the values of its plan. Return the job that they give, and what ended that."""
    rules.forget()
    built: dict[str, Any] = {}
    errors = []
    for one in job["configurations"]:
        try:
            kind: Any = resolve_name(one["kind"])
            known = {field.name for field in dataclasses.fields(kind)}
            symbols = {name: resolve_name(symbol) for name, symbol in one["symbols"].items()}
            overrides = {name: value for name, value in job["overrides"].items() if name in known}
            built |= world_of_config(kind(**one["values"] | symbols | overrides))
        except (Exception, SystemExit) as error:
            errors.append(f"{one['kind']}: {type(error).__name__}: {error}")
    return built, errors


if __name__ == "__main__":
    main()
