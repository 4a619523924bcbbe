"""Texts become token ids: by the words of the training texts, or by a tokenizer that somebody gives."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.own_code import imported, is_reference, own_code

PADDING, UNKNOWN = 0, 1
MOST_WORDS = 10_000  # the most frequent ones are kept
PIECES = re.compile(r"\w+|[^\w\s]")  # words, and marks one by one


@dataclass(frozen=True)
class Words:
    """A tokenizer: a vocabulary of words, or a function that was given.

    With a vocabulary, id 0 is padding, 1 is a word that training does not know, and the words follow by frequency.
    """

    vocabulary: tuple[str, ...] = ()
    tokenize: Callable[[str], Sequence[int]] | None = field(default=None, repr=False, compare=False)
    name: str = "words"
    ceiling: int = 0  # of a tokenizer that was given: ids are below this
    content: str = field(default="", repr=False)  # of one of `tokenizers`: its JSON, from which it is made again
    shift: int = 0  # how far its ids are moved up

    @property
    def learned(self) -> bool:
        """Whether the vocabulary comes from training texts."""
        return self.name == "words"

    @property
    def count(self) -> int:
        """How many ids there are."""
        return len(self.vocabulary) + 2 if self.learned else self.ceiling

    @staticmethod
    def learn(texts: Iterable[str | None], most: int = MOST_WORDS) -> Words:
        """Take the most frequent words of texts, in lower case; equally frequent ones by the alphabet."""
        counts = Counter(word for text in texts for word in PIECES.findall(str(text or "").lower()))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return Words(tuple(ordered[:most]))

    @staticmethod
    def given(tokenizer: Any) -> Words:
        """Use a tokenizer: a function from text to ids, or one of Hugging Face `tokenizers` or `transformers`.

        A text names one: a `tokenizer.json`, a folder with such a file, or `package.module:name`. Where its padding is
        not 0, its ids are moved up by one, so that 0 is free.
        """
        content = ""
        encode: Callable[[str], Sequence[int]]
        tokenizer = opened(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "get_vocab_size"):  # tokenizers.Tokenizer
            encode, size, content = _plain_ids(tokenizer), tokenizer.get_vocab_size(), tokenizer.to_str()
            padding = next((i for i in map(tokenizer.token_to_id, ("[PAD]", "<pad>")) if i is not None), None)
        elif hasattr(tokenizer, "encode") and hasattr(tokenizer, "__len__"):  # transformers
            encode, size, padding = tokenizer.encode, len(tokenizer), getattr(tokenizer, "pad_token_id", None)
            content = tokenizer.backend_tokenizer.to_str() if hasattr(tokenizer, "backend_tokenizer") else ""
        elif callable(tokenizer):
            encode, size, padding = tokenizer, 0, None
        else:
            raise InputError(
                f"tokenizer is a {type(tokenizer).__name__}: give a function from text to a list of ids, a tokenizer "
                "of Hugging Face tokenizers or transformers, or the path of a tokenizer.json."
            )
        shift = int(padding != PADDING)
        name = getattr(tokenizer, "__qualname__", type(tokenizer).__name__)
        return Words((), _moved(encode, shift), name, size + shift if size else 0, content, shift)

    def ids(self, texts: Iterable[str | None], what: str) -> np.ndarray:
        """Return the ids of each text; an empty text has none."""
        if self.learned:
            places = {word: place + 2 for place, word in enumerate(self.vocabulary)}
            found = [[places.get(word, UNKNOWN) for word in PIECES.findall(str(t or "").lower())] for t in texts]
        elif self.tokenize is None and not self.content:
            raise InputError(f"The tokenizer '{self.name}' was given as an object: pass it again (tokenizer=...).")
        else:
            tokenize = self.tokenize or _moved(_plain_ids(_library().Tokenizer.from_str(self.content)), self.shift)
            with own_code(f"The tokenizer {self.name}"):
                found = [list(tokenize(str(text or ""))) for text in texts]
        rows = np.empty(len(found), dtype=object)
        rows[:] = found
        return rows

    def dump(self) -> dict[str, Any]:
        """Return the vocabulary, or the JSON of a tokenizer, for a JSON file; a function is only named."""
        kept = {"content": self.content, "shift": self.shift} if self.content else {}
        return {"vocabulary": list(self.vocabulary), "name": self.name, "ceiling": self.ceiling, **kept}

    @staticmethod
    def load(dumped: Mapping[str, Any]) -> Words:
        """Read what `dump` gave."""
        kept = dumped.get("content", ""), dumped.get("shift", 0)
        return Words(tuple(dumped["vocabulary"]), None, dumped["name"], dumped["ceiling"], *kept)


def opened(source: str | os.PathLike[str]) -> Any:
    """Return a tokenizer by name: a `tokenizer.json`, a folder with such a file, or `package.module:name`.

    Raises
    ------
    InputError
        If there is none, or it cannot be read.
    """
    path = Path(source).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file() and isinstance(source, str) and is_reference(source):
        return imported(source, "--tokenizer")
    if not path.is_file():
        raise InputError(
            f"There is no tokenizer {source}: give a tokenizer.json of Hugging Face tokenizers, a folder with such a "
            "file, or package.module:function, a function from text to ids."
        )
    library = _library()
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # it raises plain exceptions
        raise InputError(f"{path} cannot be read as a tokenizer ({error}): give a tokenizer.json.") from error


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            f"A tokenizer.json needs the package tokenizers ({error}): pip install 'polyfed[transformers]'."
        ) from error
    return tokenizers


def _plain_ids(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that gives the ids of a text without padding, which a tokenizer's file may ask for."""

    def ids(text: str) -> list[int]:
        found = tokenizer.encode(text)
        return [number for number, counts in zip(found.ids, found.attention_mask, strict=True) if counts]

    return ids


def _moved(encode: Callable[[str], Sequence[int]], shift: int) -> Callable[[str], list[int]]:
    return lambda text: [int(number) + shift for number in encode(text)]


def zeros_inside(rows: Iterable[Sequence[int]], what: str) -> tuple[str, ...]:
    """Say how many rows have a 0 before other ids: here it is padding, which comes last and is not looked at."""
    number = 0
    for row in rows:
        ids = np.asarray(row)
        number += bool((ids[: ids.nonzero()[0].max(initial=0)] == 0).any())
    if not number:
        return ()
    return (f"{number} rows of {what} have a 0 before other ids, which is padding here (else add 1 to all ids)",)


def padded(rows: np.ndarray, length: int, count: int, what: str) -> Tensor:
    """Return ids as one table: rows are cut at `length` or padded with 0, an empty one is one unknown word.

    Ids that training does not have become the unknown word.

    Raises
    ------
    InputError
        If an id is negative or not a whole number.
    """
    table = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        ids = np.asarray(row[:length])
        if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0):
            raise InputError(f"Row {number} of {what} holds token ids that are no whole numbers from 0 on: {row[:5]}.")
        table[number, : len(ids)] = np.where(ids < count, ids, UNKNOWN) if ids.size else 0
        if not (table[number] != PADDING).any():
            table[number, 0] = UNKNOWN
    return torch.from_numpy(table)
