"""Text in, text out: streaming, characters cut at block edges, statistics, odd prompts, refused configs."""

import jax
import numpy as np
import pytest

from diffjax.config import SamplingConfig
from diffjax.errors import UserError
from diffjax.sampling import generate, summary
from tests.sampling.nets import BOS, EOS, FIRST, FORBID, MASK, PAD, UNK, ScriptNet

pytestmark = pytest.mark.xdist_group("sampling_generate")

G = 4
NET = ScriptNet(G, vocab_size=FIRST + 256)


class Bytes:
    """Id FIRST + b is the byte b; special ids stand for nothing."""

    vocab_size = FIRST + 256
    pad_id, bos_id, eos_id, unk_id, mask_id = PAD, BOS, EOS, UNK, MASK

    def encode(self, text):
        return [FIRST + byte for byte in text.encode()]

    def to_bytes(self, ids):
        return bytes(i - FIRST for i in ids if i >= FIRST)

    def decode(self, ids):
        return self.to_bytes(ids).decode(errors="replace")


TOKENIZER = Bytes()


def saying(text, blocks=8):
    """Parameters whose generated text, after BOS, is this one; then it stops."""
    tokens = [BOS, *TOKENIZER.encode(text), EOS]
    return NET.saying(tokens + [FIRST] * (blocks * G - len(tokens)))


def test_streamed_text_is_whole_characters_and_adds_up():
    """The euro sign and the emojis are cut by block edges: each arrives whole, in the block that completes it."""
    text = "né 10€ 😀😀!"
    pieces = []
    hand_out = lambda row, piece: pieces.append(piece)
    [result] = generate(NET, saying(text), TOKENIZER, [""], SamplingConfig(), on_block=hand_out)
    assert result.text == "".join(pieces) == text
    assert pieces == ["né", " 10", "€ ", "😀", "😀!"]
    assert result.tokens.tolist() == [*TOKENIZER.encode(text), EOS] and result.finish_reason == "stop"
    assert result.length == 1 + len(text.encode()) + 1
    assert generate(NET, saying(text), TOKENIZER, [""], SamplingConfig())[0].text == text


def test_random_bytes_stream_as_they_decode():
    """Mostly invalid UTF-8, several rows of unequal prompts: the pieces of each row add up to its decoded tokens."""
    table = NET.script(16, np.random.default_rng(0).normal(size=(16, 1, G, NET.vocab_size)) * 2)
    table[..., FIRST + 0xC0 : FIRST + 0xF8] += 2  # first bytes of longer characters
    table[..., FIRST + 0x80 : FIRST + 0xC0] += 2
    prompts = ["", "a", "€€€ long", "é" * 9, "xyz"]
    sampling = SamplingConfig(temperature=1.0, top_p=0.98, blocks=5, threshold=0.02, seed=3)
    pieces = [""] * 5

    def hand_out(row, piece):
        assert piece
        pieces[row] += piece

    streamed = generate(NET, table, TOKENIZER, prompts, sampling, on_block=hand_out)
    whole = generate(NET, table, TOKENIZER, prompts, sampling)
    for row, (prompt, result) in enumerate(zip(prompts, streamed, strict=True)):
        assert result.text == pieces[row] == TOKENIZER.decode(result.tokens) == whole[row].text
        assert result.tokens.tolist() == whole[row].tokens.tolist()
        assert not set(result.tokens.tolist()) & set(FORBID)
        start = 1 + len(prompt.encode())
        assert result.length == start + len(result.tokens)
        if result.finish_reason == "length":
            assert result.length == (start // G + 5) * G
            assert (5 - 1) * G < len(result.tokens) <= 5 * G
    assert any("\N{REPLACEMENT CHARACTER}" in result.text for result in streamed)


def test_statistics():
    results = generate(NET, saying("abcdefghi"), TOKENIZER, ["", "abcde"], SamplingConfig(blocks=2))
    first, second = (result.statistics for result in results)
    # BOS a b c | d e f g | h i EOS: from nothing it reaches its second block's end, from "abcde" the stop
    assert [result.text for result in results] == ["abcdefg", "fghi"]
    assert (first.tokens, first.denoise_calls, first.commit_calls, first.prefill_calls) == (7, 2, 1, 0)
    assert (second.tokens, second.denoise_calls, second.commit_calls, second.prefill_calls) == (5, 2, 1, 1)
    assert (first.tpf, first.tpf_all) == (3.5, 7 / 3) and not first.forced and first.seconds > 0
    total = summary(results)
    assert (total["tpf"], total["tpf_all"], total["tokens"]) == (12 / 4, 12 / 6, 12)


def test_quota_steps():
    slow = generate(NET, saying("abcdefg"), TOKENIZER, [""], SamplingConfig(rule="quota", blocks=2))[0]
    fast = generate(NET, saying("abcdefg"), TOKENIZER, [""], SamplingConfig(rule="quota", blocks=2, steps=2))[0]
    assert slow.text == fast.text and slow.statistics.denoise_calls == 7 and fast.statistics.denoise_calls == 4


def test_prompts_of_every_kind():
    run = lambda prompts: generate(NET, saying(""), TOKENIZER, prompts, SamplingConfig(blocks=1))
    assert run([]) == []
    assert run(["", "\0", "\n \t"])[0].tokens.tolist() == [EOS]
    with pytest.raises(UserError, match="prompt 1 is not valid Unicode: character 2 is a lone surrogate"):
        run(["fine", "ab\ud800"])
    with pytest.raises(UserError, match="prompt 0 is int"):
        run([3])
    with pytest.raises(UserError, match="list of strings"):
        run("text")


def test_bad_logits_name_the_row():
    table = saying("abcdefghi")
    table[1, 2**G - 1] = np.nan
    with pytest.raises(UserError, match=r"row 0 .*'a'.* block 1"):
        generate(NET, table, TOKENIZER, ["a", "abcdefgh"], SamplingConfig(blocks=3))


@pytest.mark.parametrize(
    "key, value, rule",
    [
        ("rule", "nonesuch", "nonesuch"),
        ("steps", 8, "threshold"),
        ("score", "random", "threshold"),
        ("threshold", 0.9, "quota"),
        ("threshold", 1.5, "threshold"),
        ("threshold", float("nan"), "threshold"),
        ("steps", 0, "quota"),
        ("score", "nonesuch", "quota"),
        ("temperature", -1.0, "quota"),
        ("temperature", float("inf"), "quota"),
        ("top_p", 0.0, "quota"),
        ("top_p", 1.01, "quota"),
        ("blocks", 0, "quota"),
        ("seed", -1, "quota"),
        ("seed", 2**32, "quota"),
    ],
)
def test_refusals_name_the_key(key, value, rule):
    sampling = SamplingConfig(**{"rule": rule, key: value})
    with pytest.raises(UserError, match=rf"sampling\.{key}={value}"):
        generate(NET, None, TOKENIZER, ["a"], sampling)


def test_a_tokenizer_of_another_size_is_refused():
    with pytest.raises(UserError, match="261 ids and the model 24"):
        generate(ScriptNet(G), None, TOKENIZER, ["a"], SamplingConfig())


def test_results_hold_no_device_arrays():
    [result] = generate(NET, saying("abc"), TOKENIZER, [""], SamplingConfig())
    assert not [leaf for leaf in jax.tree.leaves(vars(result)) if isinstance(leaf, jax.Array)]
