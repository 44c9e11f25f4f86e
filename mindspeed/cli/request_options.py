"""The options that describe a job, the same for every verb, their part of the help, and the `Request` that they become."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from gettext import gettext
from itertools import takewhile
from shlex import join
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from mindspeed.job.fields import FIELDS, PLATFORMS
from mindspeed.problems import marked

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.engine.resolution.environment import Environment
    from mindspeed.engine.resolution.request import Layer
    from mindspeed.engine.resolution.resolution_state import Suggestions
    from mindspeed.plugins.discovery import Catalog
    from mindspeed.problems import Problem

COMMAND_LINE: Final = marked("command line")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class JobOption(click.Option):
    """An option that every verb with a job has."""


class SizeOption(JobOption):
    """A size of the job or a part of the model's shape."""


_TYPED: Final = "mindspeed.typed"
_IN_CHECK: Final = {"device_memory": "--device-memory", "budget_mib": "--device-memory"}
"""Values of verbs that ``mindspeed check`` has as well, and its options for them, beside the options of a job."""
TITLES: Final = {
    click.Option: "Options",
    JobOption: marked("Job"),
    SizeOption: marked("Sizes of the job and shape of the model"),
}


class JobCommand(click.Command):
    """A verb with a job: its help shows specific options first. Only `FullJobCommand` lists the sizes."""

    lists_sizes = False
    in_check: Sequence[str] = ()
    """Options by which ``mindspeed check`` does for a training command what the verb does for a job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[type[click.Parameter], list[tuple[str, str]]] = {kind: [] for kind in TITLES}
        for parameter in self.get_params(ctx):
            if type(parameter) in rows and (row := parameter.get_help_record(ctx)) is not None:
                rows[type(parameter)].append(row)
        if not self.lists_sizes:
            names = ", ".join(row[0].split()[0].partition("/")[0] for row in rows[SizeOption][:4])
            more = gettext("{count} options: mindspeed features check --help").format(count=len(rows[SizeOption]))
            rows[SizeOption] = [(f"{names} ...", more)]
        for kind, title in TITLES.items():
            with formatter.section(gettext(title)):
                formatter.write_dl(rows[kind])


class FullJobCommand(JobCommand):
    """A verb whose help lists the sizes as well."""

    lists_sizes = True


class FeatureNames(click.ParamType):  # type: ignore[type-arg]
    """Feature names joined by commas or spaces; the verb itself refuses an unknown one."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the last name; nothing is imported."""
        from click.shell_completion import CompletionItem

        from mindspeed.plugins.found import installed

        before, comma, last = incomplete.rpartition(",")
        names = sorted({row.name for row in installed() if row.name.startswith(last)})
        return [CompletionItem(f"{before}{comma}{name}") for name in names]


def unknown_feature(known: Catalog, name: str, where: str = COMMAND_LINE) -> Problem:
    """Return the MS201 of a name that no feature has; ``where`` is the source of the name."""
    from mindspeed.problems import Problem, advice, suggestion

    fix = advice(suggestion(known.near(name), "mindspeed features list shows every name"))
    return Problem("MS201", f"the feature {name!r} does not exist", (name,), where=where, fix=fix)


def split_words(ctx: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Read the feature names of an option or argument, which may stand in several words or in one.

    A training command, a script or a folder is refused with the verb that reads it.
    """
    if any(word.startswith("-") for word in words):
        first = list(takewhile(_is_feature, words))
        features = ["--features", ",".join(first)] if first else []
        refuse_command(ctx, ["--", *words[len(first) :], *features])
    elif scripts := list(filter(_is_of_command, words)):
        refuse_command(ctx, ["--", *scripts] if any(word.endswith(".py") for word in scripts) else scripts)
    names = spelled_names(words)
    if value := next((name for name in names if name in ("true", "false") or name.isdecimal()), None):
        text = f"{value!r} is not a feature; a switch takes no value: use --NAME to switch it on and --no-NAME to switch it off"
        raise click.BadParameter(text, ctx, parameter)
    if words and not names:
        raise click.BadParameter(f"{' '.join(words)!r} names no feature", ctx, parameter)
    return names


def spelled_names(words: Iterable[str]) -> tuple[str, ...]:
    """Return the feature names in some words, each of which may hold several."""
    from mindspeed.engine.resolution.request import spelled, split_names

    return tuple(map(spelled, split_names(",".join(words))))


def names_argument(metavar: str, required: bool = False) -> Decorator:
    """Make the argument ``names`` of a verb that takes feature names."""
    return click.argument("names", metavar=metavar, nargs=-1, required=required, type=FeatureNames(), callback=split_words)


def _is_feature(word: str) -> bool:
    """Return whether a word holds names of installed features alone."""
    from mindspeed.plugins.found import installed

    return {row.name for row in installed()}.issuperset(spelled_names([word]))


def _is_of_command(word: str) -> bool:
    """Return whether a word is a script, or a folder whose name no feature has."""
    return "/" in word or word.endswith((".sh", ".json", ".py")) or (os.path.isdir(word) and not _is_feature(word))


def refuse_command(ctx: click.Context, words: Iterable[str]) -> NoReturn:
    """Raise UsageError with the line to type for a command, script or folder in the place of feature names."""
    line = join(["mindspeed", "check", *_words_for_check(ctx), *words])
    raise click.UsageError(f"this verb takes feature names; for a training command use: {line}")


def _words_for_check(ctx: click.Context) -> Iterator[str]:
    """Yield the options of a command line of another verb that ``mindspeed check`` has too."""
    if not isinstance(ctx.command, JobCommand):
        return
    yield from ctx.command.in_check
    typed = ctx.command.make_parser(ctx).parse_args(list(ctx.meta[_TYPED]))[0]
    for option in ctx.command.params:
        name = _IN_CHECK.get(option.name or "", option.opts[-1] if isinstance(option, JobOption) else "")
        for value in _listed(typed.get(option.name)) if name else ():
            yield from (name, value) if isinstance(value, str) else [name if value else option.secondary_opts[-1]]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _refuse_script(ctx: click.Context, parameter: click.Parameter, file: str | None) -> None:
    if file is not None:
        refuse_command(ctx, [file])


former_script_option = click.option("--script", hidden=True, expose_value=False, callback=_refuse_script)
"""An option of verbs that read training commands before; it says which one does now."""


_NAMES: Final[dict[str, Any]] = {
    "metavar": "NAME,...",
    "multiple": True,
    "type": FeatureNames(),
    "callback": split_words,
}


def names_option(*names: str, help: str) -> Decorator:
    """Make an option that takes feature names and may be repeated."""
    return click.option(*names, help=help, **_NAMES)


class Words(click.ParamType):  # type: ignore[type-arg]
    """Words joined by commas."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return tuple(word.strip() for word in value.split(","))


@dataclass(frozen=True, slots=True)
class Request:
    """Hold the request of one command line.

    ``layers`` go from low to high: job file, environment variables, command line. ``train`` is the job file's
    section for the trainer. ``megatron`` is the version to plan for when it is not the installed one.
    """

    layers: tuple[Layer, ...]
    train: dict[str, Any] = field(default_factory=dict)
    megatron: str | None = None

    def naming(self, names: tuple[str, ...]) -> Request:
        """The same request with more features, named on the command line."""
        *lower, command_line = self.layers
        return replace(self, layers=(*lower, replace(command_line, features=(*command_line.features, *names))))

    def of_dense(self) -> Request:
        """The same request, for a dense model where no number of experts is given."""
        from mindspeed.engine.resolution.request import Layer

        return replace(self, layers=(Layer("a dense model", world={"num_experts": 0}), *self.layers))

    def subject(self, names: tuple[str, ...]) -> tuple[tuple[str, ...], Request]:
        """Return the features that a verb is about, and the request without them.

        They are those of the argument, or without one those of ``--features``. Raises UsageError where there are none.
        """
        *lower, command_line = self.layers
        if names:
            return names, self
        if not command_line.features:
            raise click.UsageError("name at least one feature")
        return command_line.features, replace(self, layers=(*lower, replace(command_line, features=())))

    def environment(self, world_size: int | None = None) -> Environment:
        """The environment to plan for: what is installed, except for what the command line made up."""
        from mindspeed.registry import probe

        environment = probe(next((layer.platform for layer in reversed(self.layers) if layer.platform), None))
        if self.megatron is not None:
            environment = replace(environment, megatron=self.megatron, source=COMMAND_LINE)
        return environment if world_size is None else replace(environment, world_size=world_size)

    def resolve(self, world_size: int | None = None, *more: Layer, untried: Suggestions | None = None) -> ActivationPlan:
        """The plan for this request. ``world_size`` is that of the job that will run it; ``more`` layers come lowest.

        Raises ResolutionError with every problem, with fixes as `mindspeed.registry.resolve`.
        """
        from mindspeed import registry

        return registry.resolve([*more, *self.layers], self.environment(world_size), untried=untried)

    def plan_of_run(self, names: tuple[str, ...] = (), untried: Suggestions | None = None) -> ActivationPlan:
        """The plan that a run of this request has, with more features: a section ``train`` gives the trainer's values as well.

        Raises ResolutionError with every problem, those of the section included.
        """
        request = self.naming(names)
        if not self.train:
            return request.resolve(untried=untried)
        from mindspeed.workbench.training.planning import plan_of_file

        return plan_of_file(request.layers, self.train, self.environment())


def gather_options(
    command: Callable[..., Any],
    options: dict[str, click.Option],
    argument: str,
    make: Callable[[Mapping[str, Any]], Any],
) -> Callable[..., Any]:
    """Add options, by the name of their value; the command gets what ``make`` makes of the values as one ``argument``.

    Verbs share the options, of which a help text would otherwise make hundreds.
    """

    @functools.wraps(command)
    def with_argument(**values: Any) -> Any:
        own = {name: values.pop(name) for name in options}
        return command(**{argument: make(own)}, **values)

    declared = [*getattr(command, "__click_params__", ()), *reversed(options.values())]  # as the decorators of click do
    with_argument.__dict__["__click_params__"] = declared
    return with_argument


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option that describes a job; the command gets them as one argument ``request``."""
    return gather_options(command, _OPTIONS, "request", _request)


def _request(options: Mapping[str, Any]) -> Request:
    """Read the job file and the environment variables and put the command line above them.

    Raises ResolutionError with every unreadable part of the three.
    """
    from mindspeed.engine.resolution.request import JobFile, layer_from_environment
    from mindspeed.problems import CollectedProblems, ResolutionError

    def job_file() -> JobFile:
        from mindspeed.engine.resolution.job_file import load_job_file

        return load_job_file(options["file"])

    problems = CollectedProblems()
    job = problems.collect(job_file) if options["file"] else None
    environment = problems.collect(lambda: layer_from_environment(os.environ))
    command_line = problems.collect(lambda: _command_line(options))
    if problems or environment is None or command_line is None:
        raise ResolutionError([*(job.layer.problems if job else ()), *problems])
    lowest = (job.layer,) if job else ()
    return Request((*lowest, environment, command_line), job.train if job else {}, options["megatron"])


def _command_line(options: Mapping[str, Any]) -> Layer:
    from mindspeed.engine.resolution.request import Layer, parse_assignments

    return Layer(
        source=COMMAND_LINE,
        features=options["features"],
        settings=parse_assignments(list(map(_spelled_assignment, options["assignments"])), "--set"),
        world={name: options[name] for name in _WORLD if options[name] is not None},
        without=options["without"],
        level=options["level"],
        strict=options["strict"] or None,
        only=options["only"] or None,
        platform=options["platform"],
    )


def _spelled_assignment(text: str) -> str:
    from mindspeed.engine.resolution.request import spelled

    feature, dot, rest = text.partition(".")
    return f"{spelled(feature)}{dot}{rest}"


_WORLD: Final = tuple(name for name in FIELDS if name not in ("platform", "megatron"))


def _world_option(name: str) -> click.Option:
    field = FIELDS[name]
    flag = "--" + name.replace("_", "-")
    if name == "platform":
        choice = click.Choice(PLATFORMS)
        return SizeOption([flag], type=choice, help="Device to plan for  [default: detected]")
    if field.kind is bool:
        return SizeOption([f"{flag}/--no-{flag[2:]}", name], default=None, help=field.meaning)
    metavar = "VERSION" if name == "megatron" else field.metavar
    kind = Words() if field.kind is tuple else field.kind
    return SizeOption([flag, name], type=kind, metavar=metavar, help=field.meaning)


_LEVELS: Final = (
    "Highest level of features in the job. 0 = parts of Megatron, 1 = safe accelerations, added automatically, 2 = features "
    "that must be requested  [default: 2]"
)
_ONLY: Final = (
    "Use only the requested features and those that they require. Without --only, mindspeed also adds safe accelerations "
    "(features of optimization level 1)"
)
_STRICT: Final = (
    "Also report as problems: required features that were not requested, and checks that need a value that the job does "
    "not give"
)
_OPTIONS: Final[dict[str, click.Option]] = {
    "file": JobOption(["-f", "--file"], metavar="JOB.yaml", help="Job file (YAML) with features, settings and sizes"),
    "features": JobOption(["--features"], help="Features to switch on; may be repeated", **_NAMES),
    "without": JobOption(["--without"], help="Features to remove; may be repeated", **_NAMES),
    "assignments": JobOption(
        ["--set", "assignments"], metavar="FEATURE.FIELD=VALUE", multiple=True, help="Value of a setting; may be repeated"
    ),
    "level": JobOption(["--optimization-level", "level"], type=int, metavar="N", help=_LEVELS),
    "strict": JobOption(["--strict"], is_flag=True, help=_STRICT),
    "only": JobOption(["--only"], is_flag=True, help=_ONLY),
    **{name: _world_option(name) for name in FIELDS},
}
