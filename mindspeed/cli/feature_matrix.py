"""``mindspeed features matrix``: judge every pair of features and every feature in every layout, and show the verdicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed.cli.lazy import Group
from mindspeed.cli.matrix_options import budget_option, show_progress, store_option
from mindspeed.cli.output import OK, PROBLEMS, json_option, print_result, print_table, wants_json
from mindspeed.cli.request_options import names_argument, names_option

if TYPE_CHECKING:
    from mindspeed.workbench.verification.matrix.cases import MatrixCase
    from mindspeed.workbench.verification.matrix.verdicts import CaseResult


@click.group(cls=Group)
def matrix() -> None:
    """Verify combinations of features: pairs, larger sets, and each feature in parallel layouts."""


@matrix.command()
@click.option("--only", metavar="NAME,...", help="Test only combinations with one of these features")
@click.option(
    "--layout",
    "layouts",
    metavar="NAME,...",
    help="Test single features in these parallel layouts, such as tp2 or tp2-pp2, instead of pairs; all = every layout",
)
@click.option(
    "--stock",
    is_flag=True,
    help="Test unmodified Megatron with one of its options at a time, such as qk-layernorm, instead of features. Each test "
    "compares a parallel layout with a run on one process",
)
@click.option(
    "--switch",
    "switches",
    metavar="NAME,...",
    help="With --stock, test only these options of unmodified Megatron, such as qk-layernorm or aux-loss",
)
@click.option(
    "--strength",
    type=click.IntRange(2, 3),
    metavar="N",
    help="Test groups of --set-size features instead of pairs, chosen so that every combination of N features (2 or 3) is in "
    "at least one group",
)
@click.option(
    "--set-size",
    type=click.IntRange(2),
    default=14,
    show_default=True,
    metavar="N",
    help="With --strength, number of features that one test switches on together. Larger groups cover all combinations with "
    "fewer tests. Without --strength, this option has no effect, because tests switch on pairs",
)
@budget_option
@click.option("--again", is_flag=True, help="Test combinations again even if a result is stored")
@store_option
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    only: str | None,
    layouts: str | None,
    stock: bool,
    switches: str | None,
    strength: int | None,
    set_size: int,
    budget_seconds: float | None,
    again: bool,
    store: Path | None,
) -> None:
    """Test the combinations of features that have no stored result for their current code.

    Each test trains a small model for two steps with its features and with unmodified Megatron, and compares losses,
    gradients and weights. Each result is stored immediately, so a stopped run continues where it stopped. Combinations
    that failed before are tested first. The exit status is 1 when a combination fails, or when the processes of a test
    reject the plan that mindspeed accepted before their start.
    """
    from mindspeed import registry
    from mindspeed.workbench.verification.matrix.reach import Sources
    from mindspeed.workbench.verification.matrix.run import judge_all, to_judge
    from mindspeed.workbench.verification.matrix.store import VerdictStore, default_store, is_stale
    from mindspeed.workbench.verification.matrix.verdicts import count

    kept, sources = VerdictStore(store or default_store()), Sources(registry.catalog())
    fresh = {name: result for name, result in kept.read().items() if not is_stale(result, sources)} if strength else {}
    cases = _stock(switches, layouts) if stock else _selected(only, layouts, strength, set_size, fresh)
    todo = to_judge(cases, {} if again else kept.read(), sources)
    found = judge_all(todo, kept, sources, budget_seconds, show_progress)
    known = kept.read()
    verdicts = count(known[case.name] for case in cases if case.name in known)
    defects = [result for result in found if result.outcome.is_defect]
    lines = [f"ran {len(found)} of {len(todo)} cases without a current verdict; {len(cases)} cases in total"]
    lines.append(", ".join(f"{number} {outcome}" for outcome, number in verdicts.items()))
    lines += [f"smallest failing subset of {r.case.name}: {', '.join(r.culprits)}" for r in defects if r.culprits]
    print_result({"cases": len(cases), "judged": found, "verdicts": verdicts, "store": str(kept.path)}, lines)
    ctx.exit(PROBLEMS if defects else OK)


@matrix.command()
@names_argument("NAME...")
@names_option("--features", help="Names of one or two features, instead of the arguments NAME")
@click.option(
    "--layout", default="", metavar="NAME", help="Show the result of the feature in this parallel layout, such as tp2"
)
@store_option
@json_option
def show(names: tuple[str, ...], features: tuple[str, ...], layout: str, store: Path | None) -> None:
    """Show the test result of two features together, or of one feature in a parallel layout.

    For a single feature without --layout, show all of its results.
    """
    from mindspeed import registry
    from mindspeed.workbench.verification.matrix.cases import MatrixCase
    from mindspeed.workbench.verification.matrix.reach import Sources
    from mindspeed.workbench.verification.matrix.store import VerdictStore, default_store, is_stale

    names = (*names, *features)
    if not names:
        raise click.UsageError("name at least one feature")
    known = VerdictStore(store or default_store()).read()
    one = MatrixCase(tuple(sorted(names)), layout)
    results = [known[one.name]] if one.name in known else []
    if len(names) == 1 and not layout:
        results = [result for result in known.values() if names[0] in result.case.features]
    sources = Sources(registry.catalog())
    stale = {result.case.name: is_stale(result, sources) for result in results}
    if wants_json():
        data = [result.to_json() | {"stale": stale[result.case.name]} for result in results]
        print_result({"results": data}, ())
        return
    rows = []
    for result in results:
        verdict = f"{result.outcome.value}{' (stale)' if stale[result.case.name] else ''}"
        difference = f"{result.ratio:.2g}" if result.what else ""
        rows.append((result.case.name, result.case.dtype, verdict, difference, f"{result.code} {result.reason}".strip()))
    if rows:
        print_table(("case", "dtype", "verdict", "difference / allowed", "reason"), rows)
    else:
        click.echo(f"no verdict yet; to run it: mindspeed features matrix run --only {','.join(names)}")
    for result in results if len(results) == 1 else ():
        click.echo(f"by hand: {result.case.command}")
        if result.culprits:
            click.echo(f"smallest failing subset: {', '.join(result.culprits)}")
        if result.fix:
            click.echo(f"fix: {result.fix}")


@matrix.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default="build/matrix",
    show_default=True,
    metavar="FOLDER",
    help="Output folder",
)
@store_option
@json_option
def page(output: Path, store: Path | None) -> None:
    """Write the test results of all combinations of features to matrix.html (self-contained) and matrix.json.

    The results are those that mindspeed features matrix run has stored.
    """
    from mindspeed import registry
    from mindspeed.files.text_files import write_files
    from mindspeed.workbench.verification.matrix.page import as_json, html, summary
    from mindspeed.workbench.verification.matrix.reach import Sources
    from mindspeed.workbench.verification.matrix.store import VerdictStore, default_store

    data = summary(VerdictStore(store or default_store()).read(), registry.catalog(), Sources(registry.catalog()))
    files = {output / "matrix.html": html(data), output / "matrix.json": as_json(data)}
    write_files(files, fix="choose another --output FOLDER")
    stale = f"{data['stale']} of {len(data['cases'])} verdicts are stale; mindspeed features matrix run judges these again"
    fields = {"files": list(map(str, files)), "verdicts": data["verdicts"], "stale": data["stale"]}
    print_result(fields, [*(f"wrote {path}" for path in files), stale])


def _selected(
    only: str | None, layouts: str | None, strength: int | None, set_size: int, known: Mapping[str, CaseResult]
) -> list[MatrixCase]:
    """The cases that the options ask for: without any, all pairs and all layouts. ``known`` pairs are not planned again."""
    from mindspeed import registry
    from mindspeed.workbench.verification.matrix.cases import FEATURE_LAYOUTS, MatrixCase, in_layouts, pairs, resolves
    from mindspeed.workbench.verification.matrix.covering import by_verdicts, covering_sets

    names = registry.catalog().usable
    chosen = set(_names(only, names, "--only", ()))
    cases: list[MatrixCase] = []
    if strength is not None:
        cases += map(MatrixCase, covering_sets(names, strength, set_size, by_verdicts(known, resolves)))
    elif layouts is None:
        cases += pairs(names)
    if strength is None:
        cases += in_layouts(names, _names(layouts, FEATURE_LAYOUTS, "--layout", FEATURE_LAYOUTS))
    return [case for case in cases if not chosen or chosen.intersection(case.features)]


def _stock(switches: str | None, layouts: str | None) -> list[MatrixCase]:
    from mindspeed.workbench.verification.matrix.cases import STOCK_LAYOUTS, SWITCHES, of_stock

    named = _names(switches, SWITCHES, "--switch", tuple(SWITCHES))
    return list(of_stock(named, _names(layouts, STOCK_LAYOUTS, "--layout", STOCK_LAYOUTS)))


def _names(words: str | None, known: Collection[str], option: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """The names of an option, ``all`` and nothing being the default. Raises BadParameter for an unknown one."""
    from mindspeed.engine.resolution.request import split_names

    if words in (None, "all"):
        return default
    names = split_names(words or "")
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"unknown: {', '.join(unknown)}; known are {', '.join(sorted(known))}", param_hint=option)
    return tuple(names)
