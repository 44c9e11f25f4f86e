"""Take over results on Transformer Engine's layers: ``python -m tools.docs.engine_results build/engine_layers``.

The long test tests/features/transformer_engine_layers/test_every_feature.py leaves a file for each feature there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mindspeed.workbench.diagnostics.support_matrix import ENGINE_RESULTS, engine_results


def taken_over(results: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the results with those in a folder in the place of what features had."""
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}
    return dict(sorted((results | found).items()))


if __name__ == "__main__":
    rows = taken_over(engine_results(), Path(sys.argv[1]))
    ENGINE_RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
