"""The one active plan of this process: applied, reported, undone."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindspeed.engine.patching.apply import AppliedPatches, SiteReport, apply
from mindspeed.engine.planning.fingerprint import Content
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.runtime.call_count import CodeSwap
from mindspeed.engine.runtime.effects import EffectReport, EffectTracker, FunctionsOf
from mindspeed.plugins.active import ActiveFeatures, MakeRange, set_active
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.manager import FeatureManager
from mindspeed.plugins.patches import Phase
from mindspeed.problems import Fix, MindSpeedError, Problem


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Functions that `mindspeed.registry` hands to the session of a plan.

    ``content`` gives the facts of the plan in this process, when they are first needed. ``activate_child`` is a function of
    a module that activates a plan, as JSON text, in a spawned process with this import path. ``operator_functions`` gives the
    public functions of an operator.
    """

    content: Callable[[], Content]
    activate_child: Callable[[str, Sequence[str]], None]
    operator_functions: FunctionsOf | None = None


@dataclass(slots=True)
class Session:
    """An active plan with its feature instances and applied patches."""

    plan: ActivationPlan
    manager: FeatureManager
    applied: AppliedPatches
    proof: EffectTracker
    surroundings: Surroundings | None = None

    @property
    def classes(self) -> dict[str, type[Feature[Any]]]:
        """The class of every feature of the plan, by name."""
        return {feature.spec.name: type(feature) for feature in self.manager.features}


@dataclass(frozen=True, slots=True)
class ActivationReport:
    """Result of an activation: the digest, every site with its owners, and the plan's rows."""

    digest: str
    features: tuple[str, ...]
    sites: tuple[SiteReport, ...]
    rows: tuple[PlanNote, ...]

    def summary(self) -> str:
        """Format a line for a log."""
        pending = sum(site.pending for site in self.sites)
        later = f", {pending} later, when their module is imported" if pending else ""
        names = ", ".join(self.features) or "no features"
        return f"mindspeed: {names}; {len(self.sites)} sites patched{later}; plan {self.digest}"


@dataclass(frozen=True, slots=True)
class DeactivationReport:
    """Result of a deactivation; ``remains`` lists what cannot be restored."""

    digest: str
    sites: int
    remains: str = "models, optimizers, process groups and compiled functions created while the plan was active keep its effect"


_lock = threading.RLock()
_session: Session | None = None


def current() -> Session | None:
    """The active session of this process, or None."""
    return _session


def start(plan: ActivationPlan, manager: FeatureManager, surroundings: Surroundings | None = None) -> ActivationReport:
    """Apply the plan's patches, then call the hook ``activated``; a feature that fails there ends the plan.

    Nothing happens for an equal plan; a different one is refused with MS405.
    """
    global _session
    with _lock:
        if _session is None:
            _session = _started(plan, manager, surroundings)
            atexit.register(_session.proof.finish)
            try:
                manager.call("activated")
            except BaseException:
                stop()
                raise
        elif not _session.plan.is_same(plan):
            active = f"plan {_session.plan.digest} ({_names(_session.plan)}) is active"
            text = f"{active}, but a different plan is requested: {plan.digest} ({_names(plan)})"
            raise MindSpeedError([Problem("MS405", text, plan.names, fix=Fix.advise("call mindspeed.deactivate() first"))])
        return ActivationReport(plan.digest, plan.names, _session.applied.sites, plan.rows)


def _started(plan: ActivationPlan, manager: FeatureManager, surroundings: Surroundings | None) -> Session:
    proof = EffectTracker(plan, manager, surroundings.operator_functions if surroundings is not None else None)
    proof.applied = applied = apply(plan.patches, proof.bound)
    set_active(ActiveFeatures({feature.spec.name: feature for feature in manager.features}, report_problem, named_ranges))
    return Session(plan, manager, applied, proof, surroundings)


def stop() -> DeactivationReport | None:
    """Undo the active plan's patches; None when none is active."""
    global _session
    with _lock:
        if _session is None:
            return None
        session = _session
        session.proof.finish()
        atexit.unregister(session.proof.finish)
        session.applied.undo()
        set_active(None)
        _session = None
        session.manager.call("deactivated")
        return DeactivationReport(session.plan.digest, len(session.applied.sites))


def suspended(site: str) -> AbstractContextManager[None]:
    """Put the original back at one site (``"module:qualname"``) for the length of a with-block."""
    return _session.applied.suspended(site) if _session is not None else nullcontext()


def enter(phase: Phase | None) -> None:
    """Tell the proof of the active plan which phase of the run begins; None is the time between two."""
    if _session is not None:
        _session.proof.enter(phase)


def report() -> EffectReport | None:
    """Report the effects of the active plan in this process so far; None without a plan."""
    return _session.proof.report() if _session is not None else None


def call(hook: str, without: Collection[str] = (), **arguments: Any) -> list[tuple[str, Any]]:
    """Call a hook on the active plan's features, but those of ``without``: ``[(feature, result)]`` in plan order."""
    return _session.manager.call(hook, without, **arguments) if _session is not None else []


def answers(hook: str, **arguments: Any) -> list[tuple[str, Any]]:
    """Call a hook and skip the features that returned None."""
    return _session.manager.answers(hook, **arguments) if _session is not None else []


def around(hook: str, **arguments: Any) -> AbstractContextManager[None]:
    """Enter what the active plan's features return from a hook, the first feature outermost; nothing without a plan."""
    return _session.manager.around(hook, **arguments) if _session is not None else nullcontext()


def tell(hook: str, feature: str, **arguments: Any) -> None:
    """Call a hook on the named feature, where the active plan has it and it has the hook."""
    if _session is not None:
        _session.manager.call(hook, _session.classes.keys() - {feature}, **arguments)


@contextmanager
def named_ranges(make: MakeRange) -> Iterator[None]:
    """Run every patch and hook of the active plan inside ``make(name of its feature)`` for the length of a with-block."""
    if _session is None:
        yield
        return
    manager, functions = _session.manager, dict(_session.proof.functions)
    with ExitStack() as stack:
        for function, owner in functions.items():
            stack.callback(CodeSwap(function, partial(_in_range, make, owner)).stop)
        manager.make_range = make
        try:
            yield
        finally:
            manager.make_range = None


def _in_range(make: MakeRange, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with make(name):
            return function(*args, **kwargs)

    return call


def report_problem(problem: Problem, log: bool = True) -> None:
    """Add a row to the report once, printed where ``log``. Raises MindSpeedError under a strict plan."""
    if _session is None or problem in _session.proof.reported:
        return
    _session.proof.reported[problem] = log and _session.proof.say is not None
    if _session.plan.strict:
        raise MindSpeedError([problem])
    if log and _session.proof.say is not None:
        _session.proof.say(str(problem))


def _names(plan: ActivationPlan) -> str:
    return ", ".join(plan.names) or "no features"
