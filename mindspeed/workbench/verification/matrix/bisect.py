"""Find the features and settings of a job with which a run fails, in as few runs as possible."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import MindSpeedError, ResolutionError
from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.judge import judge
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.reduction import minimal, same_failure
from mindspeed.workbench.verification.matrix.store import VerdictStore, is_stale
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult
from mindspeed.workbench.verification.pool import WorkerPool

SKIP: Final = 125
"""Exit status of a test command that cannot judge its job, as for ``git bisect run``."""
JOB: Final = "{job}"
"""The placeholder in a test command for the path of its job file."""
REPEATS: Final = 2
"""Further runs of the set that was found, which tell a fault that comes and goes."""


class Suspect(NamedTuple):
    """A requested feature, or with ``field`` a setting of one."""

    feature: str
    field: str = ""
    value: Any = None

    def __str__(self) -> str:
        return f"{self.feature}.{self.field}={self.value}" if self.field else self.feature


@dataclass(frozen=True, slots=True)
class Culprits:
    """The result of a search: empty when the whole job does not fail.

    ``shared`` are the patched places that several of the culprits, or one and another active feature, have. ``steady`` is false
    for a fault that did not come every time.
    """

    found: tuple[Suspect, ...]
    result: CaseResult
    runs: int
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steady: bool = True


@dataclass(slots=True)
class Search:
    """A search over the subsets of a job. Verdicts are kept in the store, so a killed search continues there."""

    job: Mapping[str, Any]
    given: Mapping[str, Any]
    store: VerdictStore
    sources: Sources
    pool: WorkerPool
    test: str = ""
    time_limit: float | None = None
    progress: Callable[[CaseResult], None] = lambda _: None
    runs: int = 0
    _known: dict[str, CaseResult] = field(default_factory=dict)

    def find(self, suspects: Sequence[Suspect], suspected: Iterable[str] = ()) -> Culprits:
        """Search these suspects; features that are ``suspected``, since they are known to fail together, come first."""
        with self.store.hold():
            self._known = self.store.read()
            whole = self._judged(suspects)
            if not whole.outcome.is_defect:
                return Culprits((), whole, self.runs)
            first = set(suspected)
            ordered = sorted(suspects, key=lambda suspect: suspect.feature not in first)
            found = minimal(ordered, lambda some: same_failure(whole, self._judged(some)))
            result = self._judged(found)
            again = [self._run(self._case(found)) for _ in range(REPEATS)]
            steady = all(same_failure(whole, repeated) for repeated in again)
        return Culprits(found, result, self.runs, self._shared(found), steady)

    def _case(self, suspects: Iterable[Suspect]) -> MatrixCase:
        features = tuple(sorted({suspect.feature for suspect in suspects if not suspect.field}))
        settings: dict[str, dict[str, Any]] = {}
        for suspect in suspects:
            if suspect.field and suspect.feature in features:
                settings.setdefault(suspect.feature, {})[suspect.field] = suspect.value
        return MatrixCase(features, settings=settings, given=self.given, test=self.test)

    def _judged(self, suspects: Sequence[Suspect]) -> CaseResult:
        case = self._case(suspects)
        if not case.features:
            return CaseResult(case, CaseOutcome.HOLDS)
        known = self._known.get(case.name)
        if known is None or is_stale(known, self.sources):
            known = self._known[case.name] = self._run(case)
            self.store.add(known)
        return known

    def _run(self, case: MatrixCase) -> CaseResult:
        self.runs += 1
        result = self._tested(case) if self.test else judge(case, self.pool, self.sources)
        self.progress(result)
        return result

    def _tested(self, case: MatrixCase) -> CaseResult:
        """Judge by a command: 0 is good, 125 says nothing, everything else and running too long is a failure."""
        try:
            layer = Layer("bisect", features=case.features, settings=case.settings, world=dict(case.given))
            registry.resolve([layer], untried="none")
        except ResolutionError as error:
            problem = error.problems[0]
            return self._result(case, CaseOutcome.REFUSED, problem.message, problem.code)
        with tempfile.TemporaryDirectory(prefix="mindspeed-bisect-") as folder:
            path = Path(folder) / "job.yaml"
            job = {**self.job, "features": list(case.features), "settings": {n: dict(s) for n, s in case.settings.items()}}
            path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
            words = [word.replace(JOB, str(path)) for word in shlex.split(self.test)]
            try:
                done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=self.time_limit)
            except subprocess.TimeoutExpired:
                return self._result(case, CaseOutcome.FAILS, f"the run did not end within {self.time_limit:g} s", "timeout")
        if done.returncode == 0:
            return self._result(case, CaseOutcome.HOLDS)
        if done.returncode == SKIP:
            return self._result(case, CaseOutcome.IDLE, f"exit status {SKIP}: the command cannot judge this job")
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return self._result(case, CaseOutcome.FAILS, " ".join([f"exit status {done.returncode}:", *last]), "test")

    def _result(self, case: MatrixCase, outcome: CaseOutcome, reason: str = "", code: str = "") -> CaseResult:
        result = CaseResult(case, outcome, reason, code, involved=case.features)
        return replace(result, key=self.sources.key(case.features, *case.facts))

    def _shared(self, found: Iterable[Suspect]) -> dict[str, tuple[str, ...]]:
        """The patched places of the culprits' plan that more than one feature patches, one of them a culprit."""
        culprits = {suspect.feature for suspect in found}
        try:
            plan = self._case(found).build().plan
        except MindSpeedError:  # a job that no tiny model suits
            return {}
        return {site: owners for site, owners in _owners(plan).items() if len(owners) > 1 and culprits.intersection(owners)}


def _owners(plan: ActivationPlan) -> dict[str, tuple[str, ...]]:
    sites = {planned.site for planned in plan.patches if not planned.skipped}
    counted = Counter((planned.site, planned.owner) for planned in plan.patches if not planned.skipped)
    return {site: tuple(sorted(owner for at, owner in counted if at == site)) for site in sorted(sites)}


def suspects_of(layers: Iterable[Layer]) -> list[Suspect]:
    """The requested features of a job, then the settings that differ from their defaults."""
    layers = list(layers)
    features = dict.fromkeys(name for layer in layers for name in layer.features)
    settings = {
        (name, key): value for layer in layers for name, given in layer.settings.items() for key, value in given.items()
    }
    known = registry.catalog()
    changed = [
        Suspect(name, key, value)
        for (name, key), value in settings.items()
        if name in known.usable and known.feature(name).Args.model_fields[key].default != value
    ]
    named = [Suspect(name) for name in features if name in known.usable]
    return [*named, *(suspect for suspect in changed if suspect.feature in features)]


def suspected_by(known: Mapping[str, CaseResult], features: Iterable[str]) -> set[str]:
    """Features that the matrix knows to fail together, within these."""
    features = set(features)
    return {
        name
        for result in known.values()
        if result.outcome.is_defect and len(result.case.features) > 1 and features.issuperset(result.case.features)
        for name in result.case.features
    }
