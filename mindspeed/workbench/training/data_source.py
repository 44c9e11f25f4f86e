"""Indexed data with its tokenizer: opened, identified and found long enough for a run. Light."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mindspeed.files.data_digest import content_digest
from mindspeed.files.indexed_paths import bin_path, idx_path
from mindspeed.megatron.indexed_data import Index, read_index
from mindspeed.problems import Problem, RunError, advice
from mindspeed.workbench.training.tokenizer import Tokenizer, load_tokenizer, tokenizer_of


@dataclass(frozen=True, slots=True)
class DataSource:
    """Indexed data with its tokenizer."""

    index: Index
    tokenizer: Tokenizer

    @property
    def identity(self) -> str:
        """Identify this data: the tokenizer that made it, its index and its content."""
        lengths = hashlib.blake2b(self.index.lengths.tobytes(), digest_size=8).hexdigest()
        return f"{self.tokenizer.name}, {self.index.tokens} tokens, {lengths}, {content_digest(bin_path(self.index.prefix))}"

    def is_that_of(self, identity: str) -> bool:
        """Return whether a checkpoint's identity is that of this data; those of earlier versions say nothing of the content."""
        own = self.identity
        return identity in (own, own.rpartition(", ")[0])

    def held_out_from(self, share: float) -> int:
        """The first sequence of the held-out part, rounded as Megatron's dataset builder does it."""
        return round((1 - share) * len(self.index.lengths))


def open_data(prefix: str, tokenizer: str | None) -> DataSource:
    """Indexed data and its tokenizer. Raises RunError with MS601."""
    if len(words := prefix.split()) > 1 and not idx_path(prefix).is_file():
        text = f"the data {prefix!r} names {len(words)} words, but mindspeed pretrain reads one indexed data set"
        fix = "give one prefix; mindspeed run with Megatron-LM's script mixes several by weight (--data-path)"
        raise RunError([Problem("MS601", text, fix=advice(fix))])
    index = read_index(prefix)
    return DataSource(index, load_tokenizer(tokenizer) if tokenizer else tokenizer_of(prefix))


def enough_data(data: DataSource, share: float, seq_length: int) -> list[Problem]:
    first = data.held_out_from(share)
    """MS601 for a part of the data that is shorter than one sample."""
    problems = []
    for what, part in (("training", data.index.lengths[:first]), ("held-out", data.index.lengths[first:])):
        tokens = int(part.sum())
        if tokens <= seq_length:
            text = f"the {what} part of {data.index.prefix} has {tokens} tokens, but a sample needs {seq_length + 1}"
            fix = "prepare more text, or change --held-out or --seq-length"
            problems.append(Problem("MS601", text, where=data.index.prefix, fix=advice(fix)))
    return problems
