"""Train a tiny model on the ranks of a job and return the rows that the routers of a rank sent to each expert."""

from unittest.mock import patch

from mindspeed.features.moe_load_report.load import Load
from mindspeed.workbench.verification.shape import Recipe
from mindspeed.workbench.verification.training import train


def rows_of_first_step(recipe: Recipe) -> list[list[int]]:
    """Return the rows by layer and expert that the feature has counted when the step is logged."""
    rows: list[list[int]] = []

    def read_once(load: Load) -> dict[str, float]:
        rows.extend(counted.tolist() for _, counted in sorted(load.rows.items()))
        return read(load)

    read = Load.read
    with patch.object(Load, "read", read_once):
        train(recipe)
    return rows
