"""Names of features on the command line, which a shell completes."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


class FeatureName(click.ParamType):  # type: ignore[type-arg]
    """A feature's name, or with ``listed`` several joined by commas; the verb itself refuses an unknown one."""

    name = "name"

    def __init__(self, listed: bool = False) -> None:
        self.listed = listed

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the last name; nothing is imported."""
        from mindspeed.plugins.found import installed

        before, comma, last = incomplete.rpartition(",") if self.listed else ("", "", incomplete)
        names = sorted({row.name for row in installed() if row.name.startswith(last)})
        return [CompletionItem(f"{before}{comma}{name}") for name in names]
