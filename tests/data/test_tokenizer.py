"""The tokenizer keeps text byte for byte, never reads a special token out of it, and trains the same twice."""

import io
import random

import numpy as np
import pytest
import sentencepiece

from diffjax.data.tokenizer import Tokenizer, frequent_newline_runs, train_tokenizer
from diffjax.errors import UserError

from .texts import random_text

AWKWARD = [
    "",
    " ",
    "   two  spaces ",
    "\n\n\tx\r\n  y\r",
    "a\x00b",
    "\u2581 and\u2581\u2581 word marks",
    "<mask><s></s><pad><unk><0x0A>",
    "\ufb01 \ufb03 caf\u00e9 e\u0301 \u00a0\u2028\u0085\ufeff\ufffd",
    "\U0001f469\u200d\U0001f52c \U0010ffff",
    "\u4e2d\u6587\u0440\u0443\u0441\u0441\u043a\u0438\u0439",
]


@pytest.fixture(scope="module")
def texts():
    import numpy as np

    generator = np.random.default_rng(0)
    return [random_text(generator, 100) for _ in range(30)]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts, 320)


def spm_model(texts, **settings) -> bytes:
    """A model trained with other settings than ours, by SentencePiece itself."""
    model = io.BytesIO()
    ours = {
        "model_type": "bpe",
        "vocab_size": 320,
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "control_symbols": ["<mask>"],
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, minloglevel=2, **(ours | settings)
    )
    return model.getvalue()


def random_strings(count: int):
    generator = random.Random(0)
    for _ in range(count):
        yield "".join(
            generator.choice("\n\t \r\0\u2581<>x_")
            if generator.random() < 0.5
            else chr(generator.choice([generator.randrange(0xD800), generator.randrange(0xE000, 0x110000)]))
            for _ in range(generator.randrange(20))
        )


def test_decode_inverts_encode_and_no_text_gives_a_special_id(tokenizer, texts):
    for text in [*AWKWARD, *texts, *random_strings(2000)]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.special_ids.values())
        assert sum(tokenizer.byte_lengths[index] for index in ids) == len(text.encode())


def test_decode_agrees_with_sentencepiece(tokenizer, texts):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    for text in texts:
        assert processor.encode(text) == tokenizer.encode(text)
        assert processor.decode(tokenizer.encode(text)) == text


def test_encode_many_equals_encode(tokenizer, texts):
    mixed = [*AWKWARD, *texts]
    assert tokenizer.encode_many(mixed) == [tokenizer.encode(text) for text in mixed]


def test_special_ids_and_their_bytes(tokenizer):
    assert tokenizer.special_ids == {"pad": 0, "bos": 1, "eos": 2, "unk": 3, "mask": 4}
    assert tokenizer.vocab_size == 320
    assert tokenizer.byte_lengths[:5].tolist() == [0] * 5 and (tokenizer.byte_lengths[5:] > 0).all()
    assert tokenizer.decode([1, *tokenizer.encode("if x"), 4, 2, 0]) == "if x"


def test_a_cut_character_decodes_to_the_replacement_character(tokenizer):
    ids = tokenizer.encode("\U0001f600")
    assert tokenizer.decode(ids[:-1]) == "\ufffd" and tokenizer.to_bytes(ids[:-1]) == "\U0001f600".encode()[:-1]


def test_newline_and_indentation_are_one_token(tokenizer):
    assert len(tokenizer.encode("\n    ")) == len(tokenizer.encode("\n\n")) == 1


def test_frequent_newline_runs_by_count_then_by_text():
    texts = ["a\n  b\n  c\n\n\td\r\nx\ny"]
    assert frequent_newline_runs(texts, limit=3) == ["\n  ", "\n", "\n\n\t"]
    assert frequent_newline_runs(["\n" * 2 + "a", *["\n a"] * 2000], limit=8) == ["\n "]


def test_training_repeats_byte_for_byte(tokenizer, texts):
    again = train_tokenizer(texts, 320)
    assert again.model_bytes == tokenizer.model_bytes and again.identity == tokenizer.identity
    assert train_tokenizer(texts[1:], 320).identity != tokenizer.identity


def test_load_gives_the_same_tokenizer(tokenizer, tmp_path):
    (tmp_path / "t.model").write_bytes(tokenizer.model_bytes)
    assert Tokenizer.load(tmp_path / "t.model").identity == tokenizer.identity


def test_text_without_a_space_still_gives_a_tokenizer_that_keeps_spaces():
    bases = np.random.default_rng(0).choice(list("ACGT"), (30, 200))
    tokenizer = train_tokenizer(["".join(row) + "\n" for row in bases], 300)
    assert tokenizer.decode(tokenizer.encode("ACG T  A")) == "ACG T  A"


def test_a_vocabulary_that_does_not_fit_the_text_is_refused(texts):
    for size in (200, 100_000):
        with pytest.raises(UserError, match=f"vocab_size = {size}"):
            train_tokenizer(texts, size)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"control_symbols": []}, "lacks mask"),
        ({"control_symbols": [], "user_defined_symbols": ["<mask>"]}, "lacks mask"),
        ({"pad_id": -1, "bos_id": -1}, "lacks pad, bos"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes text"),
        ({"add_dummy_prefix": True}, "changes text"),
        ({"remove_extra_whitespaces": True}, "changes text"),
        ({"byte_fallback": False, "vocab_size": 100}, "changes text"),
    ],
)
def test_a_given_model_that_cannot_serve_is_refused(texts, tmp_path, settings, complaint):
    path = tmp_path / "given.model"
    path.write_bytes(spm_model(texts, **settings))
    with pytest.raises(UserError, match=complaint) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "x.model").write_bytes(b"no model at all")
    for name in ("x.model", "absent.model"):
        with pytest.raises(UserError, match=name):
            Tokenizer.load(tmp_path / name)
