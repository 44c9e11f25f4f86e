"""Models of Hugging Face on a disk: a configuration and weights in the format safetensors. Light."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def model_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the configuration of the model in a folder; None where there is no such model with weights."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    has_weights = next(Path(folder).glob("*.safetensors"), None) is not None
    return config if isinstance(config, dict) and "model_type" in config and has_weights else None
