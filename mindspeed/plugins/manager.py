"""The pluggy manager of one plan: plan order, chained values, errors that name the feature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pluggy

from mindspeed.plugins.feature import Feature
from mindspeed.plugins.hookspecs import ANSWERED, CHANGED, HOOK_CLASSES, PROJECT
from mindspeed.plugins.problems import MindSpeedError, Problem
from mindspeed.plugins.tracing import trace

_MARK: Final = f"{PROJECT}_impl"


class FeatureManager(pluggy.PluginManager):
    """Holds the feature instances of one plan, in plan order.

    pluggy calls the last registered implementation first; features are therefore registered in reverse,
    and `call` gives one result per feature that has the hook, in plan order. ``calls`` counts them by (feature, hook),
    ``effects`` those that did something: changed what they were given to change, answered what they were asked, or ran at
    all where a hook is only told of an event.
    """

    def __init__(self, features: Sequence[Feature[Any]]) -> None:
        super().__init__(PROJECT)
        for hooks in HOOK_CLASSES:
            self.add_hookspecs(hooks)
        self.features = tuple(features)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.effects: Counter[tuple[str, str]] = Counter()
        try:
            for feature in reversed(self.features):
                self.register(feature, feature.spec.name)
            self.check_pending()
        except pluggy.PluginValidationError as error:
            plugin: Any = error.plugin
            name = plugin.spec.name
            problem = Problem("MS104", f"feature {name} has a hook that does not match its specification: {error}", (name,))
            raise MindSpeedError([problem]) from error

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """What `hookimpl` has marked a method with. Hooks are methods of the class, so nothing else is looked at."""
        marked = getattr(getattr(type(plugin), name, None), _MARK, None) if name[0] != "_" else None
        if marked is not None:
            vars(plugin)[name] = getattr(plugin, name)  # pluggy looks there first; its static search is most of its time
        return marked

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        """What pluggy finds, asked only of names that a hook can have."""
        return super().parse_hookspec_opts(module_or_class, name) if name[0] != "_" else None

    def owners(self, hook: str) -> set[str]:
        """The features of the plan that implement ``hook``."""
        return {implementation.plugin_name for implementation in getattr(self.hook, hook).get_hookimpls()}

    def forget_calls(self) -> None:
        """Begin to count anew."""
        self.calls.clear()
        self.effects.clear()

    def call(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Call ``hook`` on every feature that has it: ``[(feature, result)]`` in plan order."""
        return [(name, call(arguments)) for name, call in self._implementations(hook)]

    def call_one(self, hook: str, feature: str, **arguments: Any) -> Any:
        """Call ``hook`` on the named feature, which has it."""
        return next(call(arguments) for name, call in self._implementations(hook) if name == feature)

    def fold(self, hook: str, value: str, **arguments: Any) -> Any:
        """Chain ``hook`` through the features: each gets what the one before returned under the name ``value``."""
        for _, call in self._implementations(hook):
            arguments[value] = call(arguments)
        return arguments[value]

    def _implementations(self, hook: str) -> Iterator[tuple[str, Callable[[dict[str, Any]], Any]]]:
        for impl in reversed(getattr(self.hook, hook).get_hookimpls()):

            def call(arguments: dict[str, Any], impl: pluggy.HookImpl = impl) -> Any:
                self.calls[impl.plugin_name, hook] += 1
                trace("hook", f"{hook} of {impl.plugin_name}")
                given = arguments.get(CHANGED.get(hook, ""))
                before = repr(given)
                try:
                    result = impl.function(*(arguments[name] for name in impl.argnames))
                except MindSpeedError:
                    raise
                except Exception as error:
                    note = f"raised by feature {impl.plugin_name} in hook {hook}"
                    raise MindSpeedError(
                        [Problem("MS901", f"{type(error).__name__}: {error}, {note}", (impl.plugin_name,))]
                    ) from error
                if hook in CHANGED:
                    did_something = repr(given if result is None else result) != before
                else:
                    did_something = result is not None or hook not in ANSWERED
                self.effects[impl.plugin_name, hook] += did_something
                return result

            yield impl.plugin_name, call
