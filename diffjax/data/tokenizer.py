"""The tokenizer: a SentencePiece model that keeps every byte of the text, and how one is trained."""

import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import sentencepiece

from diffjax.errors import UserError

PAD, BOS, EOS, UNK, MASK = range(5)
SPECIAL_PIECES = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
WORD_MARK = "\u2581"  # SentencePiece writes a space as this character
NEWLINE_RUN = re.compile(r"(?:\r?\n)+[ \t]*")  # blank lines, then the next line's indentation
NUM_THREADS = 2  # part of the recipe: another number can change the trained bytes
LOSSLESS_PROBE = "def f(x):\r\n\t  return  x\n\n\n    \u2581 \ufb01 caf\u00e9 e\u0301 \U0001f600\x00 <mask><s> "


class Tokenizer:
    """A trained tokenizer. No text encodes to a special id; `decode(encode(text)) == text` for all valid Unicode text.

    identity      sha256 (hex) over the model file, the vocabulary size and the special ids
    byte_lengths  [V] int32: the UTF-8 bytes each id stands for; 0 for pad, bos, eos, unk and mask
    """

    def __init__(self, model_bytes: bytes, name: str = "the tokenizer"):
        """Reads a serialized SentencePiece model; errors call it `name`. Raises UserError when it cannot serve."""
        self.model_bytes = model_bytes
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.load_from_serialized_proto(model_bytes)
        except RuntimeError as error:
            raise UserError(f"{name} is not a SentencePiece model file") from error
        self.vocab_size = self._processor.vocab_size()
        self.pad_id, self.bos_id, self.eos_id = (
            getattr(self._processor, f"{special}_id")() for special in ("pad", "bos", "eos")
        )
        self.unk_id = self._processor.unk_id()
        self.mask_id = self._processor.piece_to_id(SPECIAL_PIECES[MASK])
        self._check(name)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a model file. Raises UserError when it is missing, is not a model or lacks what diffusion needs."""
        try:
            with open(path, "rb") as file:
                model_bytes = file.read()
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {os.fspath(path)}: {error.strerror}") from error
        return cls(model_bytes, name=f"the tokenizer {os.fspath(path)}")

    def _check(self, name: str) -> None:
        missing = [special for special in ("pad", "bos", "eos") if getattr(self, f"{special}_id") < 0]
        if self.mask_id == self.unk_id or not self._processor.is_control(self.mask_id):
            missing.append("mask (a control symbol <mask>)")
        if missing:
            raise UserError(
                f"{name} lacks {', '.join(missing)}: train it with pad, bos and eos ids and with <mask> among its "
                "control_symbols (as a user-defined symbol, ordinary text could contain the mask)"
            )
        if self.decode(self.encode(LOSSLESS_PROBE)) != LOSSLESS_PROBE:
            raise UserError(
                f"{name} changes text: it needs byte_fallback, normalization_rule_name=identity, "
                "add_dummy_prefix=False and remove_extra_whitespaces=False"
            )

    @property
    def special_ids(self) -> dict[str, int]:
        """The five special ids by name."""
        return {name: getattr(self, f"{name}_id") for name in ("pad", "bos", "eos", "unk", "mask")}

    @cached_property
    def identity(self) -> str:
        parts = (hashlib.sha256(self.model_bytes).hexdigest(), self.vocab_size, *self.special_ids.values())
        return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        """The bytes of each id, [V]; empty for control ids."""
        processor, special = self._processor, set(self.special_ids.values())
        table = []
        for index, piece in enumerate(processor.id_to_piece(list(range(self.vocab_size)))):
            if index in special or processor.is_control(index):
                table.append(b"")
            elif processor.is_byte(index):
                table.append(bytes([int(piece[3:5], 16)]))
            else:
                table.append(piece.replace(WORD_MARK, " ").encode())
        return table

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(piece) for piece in self._bytes_of], dtype=np.int32)

    @cached_property
    def _word_mark_ids(self) -> list[int]:
        return [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in WORD_MARK.encode()]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without bos and eos."""
        first, *rest = text.split(WORD_MARK)  # in the text itself it would come back as a space: spell it in bytes
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._word_mark_ids + self._processor.encode(part)
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on several threads."""
        encoded = self._processor.encode([text for text in texts if WORD_MARK not in text], num_threads=NUM_THREADS)
        plain = iter(encoded)
        return [self.encode(text) if WORD_MARK in text else next(plain) for text in texts]

    def to_bytes(self, ids: Sequence[int]) -> bytes:
        """The UTF-8 bytes of ids; special ids stand for nothing. A cut sequence can end inside a character."""
        return b"".join(self._bytes_of[index] for index in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.to_bytes(ids).decode("utf-8", errors="replace")


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-fallback BPE model of exactly `vocab_size` ids. Equal texts in equal order give equal bytes.

    Pieces start at spaces and may mix scripts and punctuation (`self.`, `):`). SentencePiece learns no piece in which
    spaces follow a newline, so the newline runs that are frequent in the texts join as user-defined symbols: on Python
    source this saves an eighth of the tokens. BPE trains ten times as fast as unigram and compresses better here.
    Raises UserError when the texts cannot fill the vocabulary or the vocabulary cannot hold the characters.
    """
    newlines = [run.replace(" ", WORD_MARK) for run in frequent_newline_runs(texts, limit=vocab_size // 64)]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            pad_piece=SPECIAL_PIECES[PAD],
            control_symbols=[SPECIAL_PIECES[MASK]],
            user_defined_symbols=newlines,
            required_chars=WORD_MARK,  # also where the texts hold no space
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_by_unicode_script=False,
            max_sentence_length=1 << 30,
            num_threads=NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"no tokenizer of data.tokenizer.vocab_size = {vocab_size} can be trained on this text: it needs at least "
            f"261 ids plus one for each common character, and a small text cannot fill a large vocabulary"
            + (f" (SentencePiece says: {reason})" if (reason := str(error).rpartition("] ")[2]) else "")
        ) from error
    tokenizer = Tokenizer(model.getvalue(), name="the trained tokenizer")
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"the text fills {tokenizer.vocab_size} of the {vocab_size} ids of data.tokenizer.vocab_size: "
            "lower it or bring more text"
        )
    return tokenizer


def frequent_newline_runs(texts: Sequence[str], limit: int) -> list[str]:
    """The most frequent newline runs, at most `limit`, each at least a thousandth of all runs; most frequent first."""
    counts = Counter(run for text in texts for run in NEWLINE_RUN.findall(text))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]
    return [run for run, count in ranked if 1000 * count >= counts.total()]
