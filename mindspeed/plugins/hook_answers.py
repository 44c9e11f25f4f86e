"""Results of hooks: errors and wrong return values become problems that name the feature."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from traceback import extract_tb
from typing import Any, Final, get_type_hints

from mindspeed.job.world import Signal
from mindspeed.plugins import hookspecs
from mindspeed.plugins.declared_types import Test, test_of, words_of
from mindspeed.problems.fixes import Fix
from mindspeed.problems.problem import MindSpeedError, Problem, brief
from mindspeed.process.providers import provider_of
from mindspeed.process.tracing import trace_error
from mindspeed.process.watchdog import RUNNING, is_watched

_PLUGINS: Final = os.path.join(os.path.dirname(__file__), "")


def asked(hook: str, feature: Any, ask: Callable[[], Any]) -> Any:
    """Return the result of a hook of a feature.

    Raises MindSpeedError: MS901 for an exception in the hook, MS108 for an answer of another type than the hook has.
    """
    RUNNING.append((hook, feature))  # as `running` does, which takes three times as long
    try:
        answer = ask()
    except (MindSpeedError, Signal):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not (isinstance(error, Exception) or is_watched()):
            raise
        trace_error(error)
        raise MindSpeedError([_failure(hook, feature, error)]) from error
    finally:
        RUNNING.pop()
    fits, words = _type_of(hook)
    if not fits(answer):
        raise MindSpeedError([wrong_answer(hook, feature, f"returns {brief(answer)}, not {words}")])
    return answer


@cache
def _type_of(hook: str) -> tuple[Test, str]:
    """A test for the answers of a hook, from the specification, and the type in words."""
    from mindspeed.plugins import constraints, estimates, patches, saved_tensors
    from mindspeed.process import variables

    names = {
        name: value
        for module in (constraints, estimates, patches, variables, saved_tensors)
        for name, value in vars(module).items()
    }
    specification = next(getattr(hooks, hook) for hooks in hookspecs.HOOK_CLASSES if hasattr(hooks, hook))
    hint = get_type_hints(specification, localns=names)["return"]
    return (lambda answer: True, "anything") if hint is type(None) else (test_of(hint), words_of(hint))


def wrong_answer(hook: str, feature: Any, what: str) -> Problem:
    """MS108 for a hook of a feature that returns an unsupported value."""
    name, code = feature.spec.name, inspect.unwrap(getattr(feature, hook)).__code__
    author = provider_of(feature) or f"the feature {name}"
    where = _where(feature, f"{code.co_filename}:{code.co_firstlineno}")
    fix = Fix.advise(f"report it to the authors of {author}")
    return Problem("MS108", f"hook {hook} of feature {name} {what}", (name,), where=where, fix=fix)


def _failure(hook: str, feature: Any, error: BaseException) -> Problem:
    """MS901 for an exception in a hook: the feature, the line of the hook, and the line that raised."""
    name, lines = feature.spec.name, [f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)]
    lines = [line for line in lines if not line.startswith(_PLUGINS)]
    where = _where(feature, f"{lines[0]}, raised at {lines[-1]}" if len(lines) > 1 else "".join(lines))
    text = f"{type(error).__name__}: {error}, raised by the hook '{hook}' of feature {name}"
    fix = Fix.advise("remove the feature, or report the error to its authors with the traceback that MINDSPEED_TRACE=1 prints")
    return Problem("MS901", text, (name,), where=where, fix=fix)


def _where(feature: Any, line: str) -> str:
    return ", ".join(filter(None, (provider_of(feature), line)))
