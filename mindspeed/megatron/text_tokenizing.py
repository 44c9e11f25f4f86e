"""Tokenize raw text into indexed data with the tokenizer that Megatron-LM builds of its arguments."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from mindspeed.files.raw_text import documents
from mindspeed.megatron.indexed_data import Index, write_indexed
from mindspeed.problems import Fix, Problem, RunError

_BATCH: Final = 64
"""Documents that a worker is given at once."""
_SECONDS: Final = 30
"""Between two lines of progress."""


class _Encoder:
    """Turn a document into tokens."""

    def __init__(self, tokenizer: Any, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._end = [tokenizer.eod] if append_eod else []

    def __call__(self, text: str) -> npt.NDArray[Any]:
        tokens = list(self._tokenizer.tokenize(text))
        return np.array([*tokens, *self._end] if tokens else [], np.int32)


_encoder: _Encoder
"""That of the workers, which are forked."""


def _encode(text: str) -> npt.NDArray[Any]:
    return _encoder(text)


def tokenize(tokenizer: Any, files: Sequence[str], key: str, prefix: str, append_eod: bool = False, workers: int = 1) -> Index:
    """Write the texts under a field of some files as indexed data: one sequence for each document that has tokens.

    Raises RunError with MS601 for files that cannot be read, or that have no tokens.
    """
    global _encoder
    _encoder = _Encoder(tokenizer, append_eod)
    texts = documents([Path(file) for file in files], key)
    vocabulary = max(int(tokenizer.vocab_size), int(tokenizer.eod) + 1 if append_eod else 0)
    if workers == 1:
        return write_indexed(prefix, _sequences(map(_encode, texts), files, key), vocabulary)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        index = write_indexed(prefix, _sequences(pool.imap(_encode, texts, _BATCH), files, key), vocabulary)
        pool.close()
        pool.join()
    return index


def _sequences(encoded: Iterable[npt.NDArray[Any]], files: Sequence[str], key: str) -> Iterator[list[npt.NDArray[Any]]]:
    """Yield each document as its one sequence, and print how many there are."""
    count = tokens = 0
    printed = time.monotonic()
    for sequence in encoded:
        if len(sequence):
            count, tokens = count + 1, tokens + len(sequence)
            yield [sequence]
        if time.monotonic() - printed > _SECONDS:
            printed = time.monotonic()
            print(f"{count} documents, {tokens} tokens", flush=True)
    if not count:
        text = f"{', '.join(files)} has no text in the field {key!r}"
        raise RunError([Problem("MS601", text, fix=Fix.give_option("--json-keys", "FIELD"))])
    print(f"{count} documents, {tokens} tokens", flush=True)


def tokenize_by_arguments(arguments: Sequence[str], **given: Any) -> None:
    """Call `tokenize` with the tokenizer that Megatron-LM builds of its arguments."""
    from megatron.training.arguments import parse_args

    with patch.object(sys, "argv", ["tokenize", *arguments]):
        tokenizer = _tokenizer_of(parse_args(ignore_unknown_args=True))
    tokenize(tokenizer, **given)


def _tokenizer_of(args: Any) -> Any:
    """Build the tokenizer of the data sets: releases with two kinds give the other one to the rest of a job."""
    if not getattr(args, "legacy_tokenizer", True):
        with suppress(ImportError):
            from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer

            return build_tokenizer(args)
    from megatron.training import global_vars

    return global_vars._build_tokenizer(args)
