"""Text to token ids and back: raw bytes, or a ``tokenizer.json`` through the package ``tokenizers``. Light."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from mindspeed.problems import Fix, Problem, RunError, advice

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BYTES: Final = "bytes"
END_OF_TEXT: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<end_of_turn>", "[SEP]")
"""Names that tokenizers give to the token between documents, tried in this order."""


class Tokenizer(Protocol):
    """A tokenizer for preparing, training and generating. ``eod`` is the id between documents, or -1."""

    name: str
    vocab_size: int
    eod: int

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Token ids of UTF-8 text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""


class ByteTokenizer:
    """Every byte is a token, 256 is the end of a document."""

    name = BYTES
    vocab_size = 257
    eod = 256

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        import numpy as np

        return np.frombuffer(text, np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A ``tokenizer.json`` as Hugging Face's tokenizers write it. Raises RunError with MS601 when it cannot be read."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Backend

            content = Path(path).read_bytes()
            self._backend: Any = Backend.from_str(content.decode("utf-8"))
        except ImportError as error:
            fix = "pip install tokenizers"
            raise RunError([Problem("MS501", f"{path} needs the package tokenizers: {error}", fix=advice(fix))]) from error
        except Exception as error:  # the package raises bare Exception for every malformed file
            text = f"{path} is not a tokenizer: {error}"
            fix = "give the tokenizer as the path of a tokenizer.json of Hugging Face, or as 'bytes' (every byte is a token)"
            raise RunError([Problem("MS601", text, where=path, fix=Fix.advise(fix))]) from error
        self.name = f"tokenizer.json {hashlib.blake2b(content, digest_size=8).hexdigest()}"
        self.vocab_size = int(self._backend.get_vocab_size())
        ids = (self._backend.token_to_id(token) for token in END_OF_TEXT)
        self.eod = next((int(i) for i in ids if i is not None), -1)

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        import numpy as np

        ids = self._backend.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.array(ids, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids)))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called ``bytes``, or the one in a ``tokenizer.json``."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(name)


def description_path(prefix: str) -> Path:
    """The file next to prepared data that names the tokenizer."""
    return Path(prefix + ".json")


def describe(prefix: str, source: str) -> None:
    """Note next to the data that the tokenizer ``source`` made it; a ``tokenizer.json`` is copied there."""
    if source != BYTES:
        copy = Path(prefix + ".tokenizer.json")
        copy.write_bytes(Path(source).read_bytes())
        source = copy.name
    description_path(prefix).write_text(json.dumps({"tokenizer": source}) + "\n", encoding="utf-8")


def tokenizer_of(prefix: str) -> Tokenizer:
    """The tokenizer that made prepared data. Raises RunError with MS601 when the data does not say."""
    path = description_path(prefix)
    try:
        source = str(json.loads(path.read_text(encoding="utf-8"))["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        text = f"{prefix} does not contain the tokenizer that created it: {path} {reason}"
        fix = "--tokenizer bytes, or --tokenizer with its tokenizer.json"
        raise RunError([Problem("MS601", text, where=str(path), fix=advice(fix))]) from error
    return load_tokenizer(source if source == BYTES else str(path.parent / source))


class DatasetTokenizer:
    """The part of a tokenizer that Megatron's datasets use: its size, its end of document, and what identifies it."""

    pad = -1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod = self.eos = tokenizer.eod if tokenizer.eod >= 0 else -2
        self.unique_identifiers = OrderedDict(name=tokenizer.name)
