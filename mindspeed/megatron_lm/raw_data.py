"""Raw text as the data of a Megatron-LM command: tokenized before training, once, into indexed data. Light.

Its options, of which each requests it, are those of Megatron-LM's own ``tools/preprocess_data.py``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.files.cache_folder import why_unwritable
from mindspeed.files.indexed_paths import bin_path, idx_path
from mindspeed.files.raw_text import is_raw, missing_package, mixed_formats, raw_files, unreadable_start
from mindspeed.megatron_lm.argument_words import ArgumentWords, Count, problem_of_flags
from mindspeed.megatron_lm.given_arguments import DATA, Given, flattened, surface_or_nearest, without_option
from mindspeed.megatron_lm.separate_process import call_separately
from mindspeed.problems import Fix, Problem, RunError, advice

DATA_OPTIONS: Final[dict[str, Count]] = {"--json-keys": "+", "--append-eod": 0, "--workers": 1, "--output-prefix": 1}
_KEY: Final = "text"
"""The default field of a record with its text, as in Megatron-LM's tool."""
FOLDER: Final = "mindspeed_data"
"""Folder of prepared data, beside the raw data."""
_TOKENIZER: Final = re.compile(
    r"tokenizer_\w+|tiktoken_\w+|vocab_file|merge_file|vocab_extra_ids|trust_remote_code|legacy_tokenizer"
)
"""Arguments that decide the tokens of a text."""
_PATHS: Final = ("tokenizer_model", "vocab_file", "merge_file")
_BY_FILES: Final = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
"""Tokenizers that read the files of a vocabulary, also by relative paths."""
_PACKAGES: Final = {
    **dict.fromkeys(("HuggingFaceTokenizer", "SFTTokenizer"), "transformers"),
    **dict.fromkeys(("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"), "sentencepiece"),
    "TikTokenizer": "tiktoken",
}
"""Packages without which Megatron does not build a tokenizer."""
_NO_TEXT: Final = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers that cannot read text."""
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp")
"""Files in the folder of a tokenizer that are none of its own."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Hold how raw text is tokenized: ``key`` is the field of a record with its text, ``output`` the prefix of the result."""

    key: str
    append_eod: bool = False
    workers: int = 1
    output: str = ""


@dataclass(frozen=True, slots=True)
class RawData:
    """Hold raw text on a command line, its files, and the prefix of the indexed data that is made of it."""

    path: str
    files: tuple[str, ...]
    options: DataOptions
    prefix: str

    @property
    def is_prepared(self) -> bool:
        return _is_indexed(self.prefix)


def split_data_options(arguments: Sequence[str], problems: list[Problem]) -> tuple[DataOptions | None, list[str]]:
    """The options of raw data, None unless they request its preparation, and everything else in its order."""
    words = ArgumentWords(list(arguments))
    taken = {flag: words.take(flag, count) for flag, count in DATA_OPTIONS.items()}
    if all(values is None for values in taken.values()):
        return None, words.words
    keys = taken["--json-keys"] if taken["--json-keys"] is not None else [_KEY]
    workers = " ".join(taken["--workers"] if taken["--workers"] is not None else ["1"])
    if len(keys) != 1:
        text = f"--json-keys names {len(keys)} fields, but data is prepared from the text of one"
        problems.append(problem_of_flags("MS301", text, ["--json-keys"], Fix.give_option("--json-keys", "FIELD")))
    if not re.fullmatch("[1-9][0-9]{0,3}", workers):
        text = f"--workers is {workers or 'empty'!r}, not a number of processes"
        problems.append(problem_of_flags("MS301", text, ["--workers"], Fix.give_option("--workers", "N")))
        workers = "1"
    output = " ".join(taken["--output-prefix"] or [])
    return DataOptions(keys[0] if keys else "", taken["--append-eod"] is not None, int(workers), output), words.words


def read_raw_data(
    given: Mapping[str, Given], options: DataOptions | None, version: str | None, problems: list[Problem]
) -> tuple[tuple[RawData, ...], list[PlanNote]]:
    """Find the raw text among the data of a command, with a note for each; ``given`` are its arguments by dest."""
    if "mock_data" in given:
        return (), []
    if options is None:
        return (), [] if "sft" in given else list(_not_requested(given))
    raw, notes = [], []
    for argument, path in _paths(given):
        what = f"{argument.option} {path}"
        files = () if _is_indexed(path) else raw_files(Path(path))
        if not files:
            if problem := _missing(argument, path):
                problems.append(problem)
            elif _is_indexed(path):
                notes.append(PlanNote("note", "data", f"{what} is indexed already, and nothing is prepared"))
            continue
        data = RawData(path, tuple(map(str, files)), options, _prefix(path, files, options, given, version))
        problems += _problems(data, given, files)
        text = f"{what} is prepared already: training reads {data.prefix}"
        if not data.is_prepared:
            text = (
                f"{what} is raw text: before training, one process tokenizes the field {options.key!r} of its "
                f"{len(files)} {'file' if len(files) == 1 else 'files'} into {data.prefix}"
            )
        notes.append(PlanNote("note" if data.is_prepared else "prepared-first", "data", text))
        raw.append(data)
    return tuple(raw), notes


def _not_requested(given: Mapping[str, Given]) -> Iterator[PlanNote]:
    """Yield a warning for each file of raw text that nothing requests to tokenize."""
    for argument, path in _paths(given):
        if is_raw(Path(path)) and Path(path).is_file():
            text = f"{argument.option} {path} is raw text, which Megatron does not read: add --json-keys {_KEY} to tokenize it"
            yield PlanNote("warning", "data", text)


def with_prepared_data(
    arguments: Sequence[str], given: Mapping[str, Given], raw: Sequence[RawData], version: str | None
) -> tuple[str, ...]:
    """Tokenize raw text that is not prepared yet, and return the arguments with the prepared data in its place.

    Raises RunError with MS601 where that fails, and MS603 where the result cannot be written.
    """
    if not raw:
        return tuple(arguments)
    prefixes = {data.path: data.prefix for data in raw}
    for data in raw:
        _prepare(data, arguments)
    words = list(arguments)
    for dest in DATA:
        if dest in given and any(str(word) in prefixes for word in flattened(given[dest].value)):
            made = ArgumentWords(without_option(words, dest, surface_or_nearest(version)))
            values = (str(word) for word in flattened(given[dest].value))
            made.put(given[dest].option, *(prefixes.get(word, word) for word in values))
            words = made.words
    return tuple(words)


def _prepare(data: RawData, arguments: Sequence[str]) -> None:
    from mindspeed.files.made_once import make_once

    options = data.options
    specification = {
        "files": data.files,
        "key": options.key,
        "prefix": data.prefix,
        "append_eod": options.append_eod,
        "workers": options.workers,
        "arguments": list(arguments),
    }
    try:
        make_once(
            Path(data.prefix),
            lambda: data.is_prepared,
            lambda: call_separately(
                "mindspeed.megatron.text_tokenizing:tokenize_by_arguments",
                specification,
                f"tokenizing {data.path} into {data.prefix}",
                Path(f"{data.prefix}.log"),
                "MS601",
            ),
        )
    except OSError as error:
        raise RunError([_unwritable(data, error.strerror or str(error))]) from error


def _paths(given: Mapping[str, Given]) -> Iterator[tuple[Given, str]]:
    """Yield the paths of the data on a command line, without the weights between them."""
    for dest in DATA:
        for word in flattened(given[dest].value) if dest in given else ():
            if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d+)?", str(word)):
                yield given[dest], str(word)


def _is_indexed(prefix: str) -> bool:
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


def _missing(argument: Given, path: str) -> Problem | None:
    """Return MS601 for raw text that its folder does not have, or a folder without any."""
    file = Path(path)
    if file.is_dir():
        text, fix = f"{path} contains no raw text: no file of JSON, CSV, text, Parquet or Arrow", "give a folder with raw text"
    elif is_raw(file) and file.absolute().parent.is_dir() and not file.exists():
        text, fix = f"{path} does not exist", f"give {argument.option} the path of raw text, or the prefix of indexed data"
    else:
        return None
    return Problem("MS601", text, where=argument.source, fix=advice(fix), facts=(argument.fact,))


def _problems(data: RawData, given: Mapping[str, Given], files: Sequence[Path]) -> Iterator[Problem]:
    """Yield what would make the preparation fail."""
    if data.is_prepared:
        return
    if problem := missing_package(files) or mixed_formats(Path(data.path), files) or unreadable_start(files, data.options.key):
        yield problem
    if reason := why_unwritable(Path(data.prefix).parent):
        yield _unwritable(data, reason)
    kind = given.get("tokenizer_type")
    if kind is None or kind.value in _NO_TEXT:
        text = f"{data.path} is raw text, but {f'{kind.value} cannot read text' if kind else 'there is no --tokenizer-type'}"
        fix = Fix.advise("use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH")
        yield problem_of_flags("MS601", text, [kind.option] if kind else [], fix)
    elif (package := _PACKAGES.get(kind.value)) and find_spec(package) is None:
        text = f"{kind.option} {kind.value} needs the package {package}, which is not installed"
        yield problem_of_flags("MS501", text, [kind.option], Fix.advise(f"pip install {package}"))
    for dest, argument in ((dest, given[dest]) for dest in _PATHS if dest in given):
        path = Path(str(argument.value))
        is_read = path.is_absolute() or (dest != "tokenizer_model" and kind is not None and kind.value in _BY_FILES)
        if is_read and not path.exists():
            text = f"{data.path} is tokenized with {argument.option} {path}, which does not exist"
            yield problem_of_flags("MS601", text, [argument.option], Fix.give_option(argument.option, "PATH"))


def _unwritable(data: RawData, reason: str) -> Problem:
    folder = Path(data.prefix).parent
    fix = Fix.give_option("--output-prefix", "FOLDER/NAME")
    return Problem("MS603", f"prepared data cannot be written to {folder}: {reason}", where=str(folder), fix=fix)


def _prefix(path: str, files: Sequence[Path], options: DataOptions, given: Mapping[str, Given], version: str | None) -> str:
    """The prefix of prepared data, which differs with everything that decides its tokens."""
    source = Path(path).absolute()
    folder = source if source.is_dir() else source.parent
    facts = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    facts += [str(version), options.key, str(options.append_eod)]
    facts += [f"{dest} {_content(argument.value)}" for dest, argument in sorted(given.items()) if _TOKENIZER.fullmatch(dest)]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
    return f"{options.output or folder / FOLDER / source.stem}_{options.key}_document-{digest}"


def _content(value: Any) -> str:
    """The content of the files of a tokenizer, or the value itself."""
    path = Path(str(value))
    try:
        if not path.exists():
            return str(value)
        files = [path] if path.is_file() else sorted(path.iterdir())
        own = [file for file in files if file.is_file() and file.suffix not in _WEIGHTS]
        return " ".join(f"{file.name} {hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()}" for file in own)
    except OSError:
        return str(value)
