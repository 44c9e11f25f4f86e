"""Fixes in the arguments of Megatron-LM, found by what `mindspeed.job.megatron_arguments` declares of each field. Light."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

from mindspeed.engine.inspection.cli_arguments import Argument
from mindspeed.job.fields import FIELDS
from mindspeed.job.megatron_arguments import dests_of, world_of
from mindspeed.megatron_lm.given_arguments import constant, surface_or_nearest
from mindspeed.problems import CommandLine, Fix, Fixes


@dataclass(frozen=True)
class MegatronCommandLine(CommandLine):
    """Say fixes in the arguments of Megatron-LM ``version``; ``given`` are the dests of those on the command line."""

    version: str | None = None
    given: frozenset[str] = frozenset()

    def option(self, field: str) -> str:
        arguments = self._arguments(field)
        return arguments[0].options[0] if arguments else super().option(field)

    def give_field(self, name: str, value: Any) -> str:
        arguments = self._arguments(name)
        if not arguments or value is None:
            return super().give_field(name, value)
        if world_of({}).get(name, (None,))[0] == value or _is_default(name, value, arguments):
            return self.drop_field(name)
        for chosen in _few(arguments):
            for values in _values(chosen, value):
                if world_of(values).get(name, (None,))[0] == value:
                    return " ".join(_option(argument, values[argument.dest]) for argument in chosen)
        return self.drop_field(name)

    def either(self, option: str) -> str:
        """Return a switch, which Megatron-LM has off where it is not given."""
        return option

    def drop_field(self, name: str) -> str:
        dests = [dest for dest in dests_of(name) if self._known(dest)]
        named = [dest for dest in dests if dest in self.given] or dests
        if not named:
            return super().drop_field(name)
        options = [self._known(dest)[0].options[0] for dest in named]
        return self.say("remove {names}", self.translate(" and ").join(filter(None, (", ".join(options[:-1]), options[-1]))))

    def give_option(self, option: str, value: Any) -> str:
        """Of the two names of an option that ``mindspeed run`` takes, torchrun has one."""
        return super().give_option("--nproc-per-node" if option == "--nproc" else option, value)

    def one(self, fix: Fix) -> str:
        """A setting that an argument gives is removed with it."""
        argument = self._argument_of(fix.name) if fix.verb == "drop-setting" else None
        return super().one(fix) if argument is None else self.say("remove {names}", argument.options[0])

    def give_setting(self, setting: str, value: Any) -> str:
        """A setting that an argument gives gets its value from it: both must not differ."""
        argument = self._argument_of(setting)
        if argument is None or value is None:
            return super().give_setting(setting, value)
        if not argument.takes_value:
            is_given = constant(argument, argument.options[0]) == value
            return argument.options[0] if is_given else self.say("remove {names}", argument.options[0])
        items = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, str) and argument.nargs in ("+", "*"):  # a list, as YAML writes it
            items = [item.strip() for item in value.strip("[]").split(",") if item.strip()]
        return " ".join([argument.options[0], *map(str, items)]) if items else self.say("remove {names}", argument.options[0])

    def _argument_of(self, setting: str) -> Argument | None:
        """Return the argument on the command line that gives a setting as it is."""
        from mindspeed.registry import catalog_for

        feature, _, name = setting.partition(".")
        specs = catalog_for(()).specs
        flags = specs[feature].megatron_flags if feature in specs else ()
        dests = [flag.dest for flag in flags if flag.setting == name and flag.convert is None and flag.dest in self.given]
        return next((argument for dest in dests for argument in self._known(dest)), None)

    def add_features(self, names: Sequence[str]) -> str:
        from mindspeed.registry import catalog_for

        specs, texts = catalog_for(()).specs, list[str]()
        for name in names:
            flags = specs[name].megatron_flags if name in specs else ()
            options = (
                " ".join((argument.options[0], *flag.values[:1]))
                for flag in flags
                if flag.switch == "on"
                for argument in self._known(flag.dest)
            )
            texts.append(next(options, super().add_features([name])))
        return self.translate(", or ").join(texts)

    def together(self, steps: Fixes) -> str:
        """Several fields may be one option: ``--activation silu --gated-linear-unit`` is ``--swiglu``."""
        wanted = {step.name: step.value for step in steps if step.verb == "give-field"}
        if len(wanted) == len(steps) and None not in wanted.values():
            for dest in chain.from_iterable(map(dests_of, wanted)):
                for argument in self._known(dest):
                    for values in _values((argument,), True):
                        world = world_of(values)
                        if all(world.get(name, (None,))[0] == value for name, value in wanted.items()):
                            return _option(argument, values[dest])
        return super().together(tuple(chain.from_iterable(map(self._without_defaults, steps))))

    def _without_defaults(self, step: Fix) -> Iterator[Fix]:
        """Yield a step, or for a field that gets its default the removal of each option that gives it now."""
        if step.verb != "give-field" or not _is_default(step.name, step.value, self._arguments(step.name)):
            yield step
            return
        for argument in self._arguments(step.name):
            if argument.dest in self.given or not self.given:
                yield Fix.drop_option(argument.options[0])

    def _arguments(self, field: str) -> list[Argument]:
        return [argument for dest in dests_of(field) for argument in self._known(dest)]

    def _known(self, dest: str) -> list[Argument]:
        return [argument for argument in surface_or_nearest(self.version).by_dest.get(dest, ()) if argument.options]


def _is_default(field: str, value: Any, arguments: Iterable[Argument]) -> bool:
    """Return whether a field has ``value`` where Megatron is given None; the value itself may be none that Megatron takes."""
    return FIELDS[field].default == value and all(argument.default is None for argument in arguments)


def _few(arguments: Iterable[Argument]) -> Iterator[tuple[Argument, ...]]:
    """Yield each argument alone, then each pair of different ones: grouped queries take a switch and a number."""
    known = list(arguments)
    yield from ((argument,) for argument in known)
    yield from (pair for pair in combinations(known, 2) if pair[0].dest != pair[1].dest)


def _values(chosen: tuple[Argument, ...], value: Any) -> Iterator[dict[str, Any]]:
    """Yield values of these arguments that may give a field ``value``: the value itself, the constant of a switch, a word."""
    for values in product(*(list(_of_argument(argument, value)) for argument in chosen)):
        yield {argument.dest: one for argument, one in zip(chosen, values, strict=True)}


def _of_argument(argument: Argument, value: Any) -> Iterator[Any]:
    if not argument.takes_value:
        yield constant(argument, argument.options[0])
    elif argument.choices:
        yield from (value,) if value in argument.choices else argument.choices
    elif not isinstance(value, bool):
        yield value


def _option(argument: Argument, value: Any) -> str:
    return f"{argument.options[0]} {value}" if argument.takes_value else argument.options[0]
