"""Text to token ids: a byte-level BPE trained on the files themselves."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Parts of a Python installation that are not the standard library's own source.
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3"}


def standard_library() -> Path:
    """The folder of Python's own source, which every machine that runs this has."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_files(paths: Sequence[Path], limit: int) -> Iterator[str]:
    """Texts of `paths` (folders: their ``*.py`` files, sorted) until `limit` characters are read."""
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            if limit <= 0:
                return
            if path.is_dir() and SKIPPED.intersection(file.relative_to(path).parts):
                continue
            text = file.read_text(encoding="utf-8", errors="ignore")[:limit]
            limit -= len(text)
            yield text


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eof>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """One stream of ids, files parted by ``<eof>``."""
    end = tokenizer.token_to_id("<eof>")
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        ids += [*encoding.ids, end]
    return np.asarray(ids, dtype=np.uint16 if tokenizer.get_vocab_size() < 2**16 else np.uint32)
