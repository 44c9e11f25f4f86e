"""Verify the features of a distribution together with every built-in feature and with each other."""

from __future__ import annotations

from mindspeed.plugins.discovery import BUILT_IN
from mindspeed.registry import catalog
from mindspeed.workbench.conformance.subjects import rows_of
from mindspeed.workbench.verification.matrix.cases import MatrixCase


def pairs_of(name: str) -> list[MatrixCase]:
    """Return the pairs of a distribution or feature. Raises ResolutionError (MS201) when nothing is called ``name``."""
    known = catalog()
    tested = {row.name for row in rows_of(name)} & known.usable.keys()
    others = tested | {row.name for row in known.usable.values() if row.distribution == BUILT_IN}
    pairs = {tuple(sorted((one, other))) for one in tested for other in others if one != other}
    return [MatrixCase(pair) for pair in sorted(pairs)]
