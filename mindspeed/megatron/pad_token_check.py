"""A token that both pads and ends documents: Megatron before 0.16 then drops every document end from the loss.

A sample in which no label is left divides zero by zero, and the norm of the gradient is not finite. From 0.16 on Megatron
pads with an id of its own instead, unless ``--allow-ambiguous-pad-tokens`` asks it not to. Light.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.resolution.environment import version_in
from mindspeed.problems import MindSpeedError

PADS_ANYWAY: Final = "<0.16"
"""Versions of Megatron that pad with the token that the tokenizer names, whatever else it is."""
SEQUENCES: Final = 256
"""Sequences whose last token is looked at; a document is one or more of them."""


@dataclass(frozen=True, slots=True)
class SharedToken:
    """The token that a tokenizer uses for both; ``number`` is None where its files do not say."""

    text: str
    number: int | None


def shared_token(tokenizer: str | Path) -> SharedToken | None:
    """The token that pads and ends documents in a folder of Hugging Face files, or next to a ``tokenizer.json``.

    None when these are two tokens, or when nothing here says.
    """
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    named = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    pad, end = (_text(named.get(key)) for key in ("pad_token", "eos_token"))
    if pad is None or pad != end:
        return None
    decoder = {int(number): _text(token) for number, token in dict(named.get("added_tokens_decoder") or {}).items()}
    added = {token["id"]: token["content"] for token in _json(folder / "tokenizer.json").get("added_tokens") or ()}
    return SharedToken(pad, next((number for number, text in (decoder | added).items() if text == pad), None))


def ends_documents(prefix: str, number: int) -> bool | None:
    """Return whether documents of indexed data end with this token, from the first of them; None when there is no such data."""
    try:
        from mindspeed.megatron.indexed_data import read_index

        index = read_index(prefix)
    except (ImportError, MindSpeedError):  # numpy need not be where a job is checked
        return None
    lengths = index.lengths[:SEQUENCES]
    tokens = index.read(0, len(lengths))
    last = [int(tokens[end - 1]) for end, length in zip(lengths.cumsum(), lengths, strict=True) if length]
    return number in last


def warning(tokenizer: str, data: Sequence[str], megatron: str | None, ambiguous: bool = False) -> str | None:
    """Warn of a job of Megatron-LM that pads with the end of documents, in one sentence, or None.

    ``data`` are prefixes of indexed data; where there is none here, the sentence has an if. ``ambiguous`` is
    ``--allow-ambiguous-pad-tokens``.
    """
    token = shared_token(tokenizer)
    if token is None or not (ambiguous or (megatron is not None and version_in(megatron, PADS_ANYWAY))):
        return None
    known = [ends_documents(prefix, token.number) for prefix in data] if token.number is not None else []
    looked = [answer for answer in known if answer is not None]
    if looked and not any(looked):
        return None
    condition = "" if looked else "if the data was prepared with --append-eod, "
    what = f"the token {token.text} of {tokenizer} is used both for padding and as the end of documents: {condition}"
    effect = "document ends are then excluded from the loss, and a sample of only document ends makes the gradient norm NaN"
    return f"{what}{effect}; use a tokenizer with a separate padding token, or prepare the data without --append-eod"


def warning_of_arguments(given: Mapping[str, Any], megatron: str | None) -> str | None:
    """`warning` for the values of Megatron-LM's arguments by dest."""
    tokenizer = given.get("tokenizer_model")
    if not tokenizer or not Path(tokenizer).exists() or given.get("mock_data"):
        return None
    paths = [word for dest in ("data_path", "train_data_path") for word in given.get(dest) or ()]
    return warning(str(tokenizer), [str(word) for word in paths], megatron, bool(given.get("allow_ambiguous_pad_tokens")))


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(token: Any) -> str | None:
    """A token is written as its text, or as an object with its content."""
    return token.get("content") if isinstance(token, dict) else token
