"""Texts become token ids: by the words of the training texts, or by a tokenizer that somebody gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError

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

        Where its padding is not 0, its ids are moved up by one, so that 0 is free.
        """
        encode: Callable[[str], Sequence[int]]
        if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "get_vocab_size"):  # tokenizers.Tokenizer
            encode, size = (lambda text: tokenizer.encode(text).ids), tokenizer.get_vocab_size()
            padding = next((i for i in map(tokenizer.token_to_id, ("[PAD]", "<pad>")) if i is not None), None)
        elif hasattr(tokenizer, "encode") and hasattr(tokenizer, "__len__"):  # transformers
            encode, size, padding = tokenizer.encode, len(tokenizer), getattr(tokenizer, "pad_token_id", None)
        elif callable(tokenizer):
            encode, size, padding = tokenizer, 0, None
        else:
            raise InputError(
                f"tokenizer is a {type(tokenizer).__name__}: give a function from text to a list of ids, or a "
                "tokenizer of Hugging Face tokenizers or transformers."
            )
        shift = int(padding != PADDING)
        name = getattr(tokenizer, "__qualname__", type(tokenizer).__name__)
        return Words((), lambda text: [int(i) + shift for i in encode(text)], name, size + shift if size else 0)

    def ids(self, texts: Iterable[str | None], what: str) -> np.ndarray:
        """Return the ids of each text; an empty text has none."""
        if self.learned:
            places = {word: place + 2 for place, word in enumerate(self.vocabulary)}
            found = [[places.get(word, UNKNOWN) for word in PIECES.findall(str(t or "").lower())] for t in texts]
        elif self.tokenize is None:
            raise InputError(f"The tokenizer '{self.name}' was given as an object: pass it again (tokenizer=...).")
        else:
            found = [list(self.tokenize(str(text or ""))) for text in texts]
        rows = np.empty(len(found), dtype=object)
        rows[:] = found
        return rows

    def dump(self) -> dict[str, Any]:
        """Return the vocabulary for a JSON file; a function is only named."""
        return {"vocabulary": list(self.vocabulary), "name": self.name, "ceiling": self.ceiling}

    @staticmethod
    def load(dumped: Mapping[str, Any]) -> Words:
        """Read what `dump` gave."""
        return Words(tuple(dumped["vocabulary"]), None, dumped["name"], dumped["ceiling"])


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
