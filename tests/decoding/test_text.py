"""Text as it grows: what `Tokenizer.decode` gives, in pieces, up to a stop text."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from toolkit.decoding.text import TextStream

WORDS = [
    "Hello",
    " world",
    " the",
    " é",
    "€uro",
    "😀😀",
    "日本語",
    " a\n",
    "🇩🇪",
    "\u200d",
    "\ufffd",
    "nai",
    "ï",
    " x.y",
]


def byte_level() -> Tokenizer:
    """Each byte is a token; a few pieces are merged, of which some end or begin within a character."""
    letters = bytes_to_unicode()
    vocab = {letters[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for text in ("th", " t", "é", "€", "😀"):
        pieces = [letters[byte] for byte in text.encode()]
        for size in range(1, min(len(pieces), 3)):  # three of the four bytes of 😀
            left, right = "".join(pieces[:size]), pieces[size]
            merges.append((left, right))
            vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece models are: ▁ for spaces, bytes where there is no piece, the first space is left out."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["<unk>", "▁", "▁the", "▁world", "H", "e", "l", "o", "▁a", "a", "t", "h"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
BYTES = TOKENIZERS["byte level"]


def run(tokenizer: Tokenizer, ids: list[int], *stop: str) -> tuple[list[str], bool]:
    """The pieces, until it stops, and whether it did."""
    stream, pieces = TextStream(tokenizer, stop), []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces, stream.stopped


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(40))
def test_pieces_make_up_what_decode_gives(kind: str, seed: int) -> None:
    """Also where the last character is cut off."""
    draw, tokenizer = random.Random(seed), TOKENIZERS[kind]
    text = "".join(draw.choice(WORDS) for _ in range(draw.randint(1, 8)))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    end = tokenizer.get_vocab()["<end>"]
    for count in range(len(ids) + 1):
        some = ids[:count]
        if draw.random() < 0.3:
            some.insert(draw.randint(0, count), end)
        whole = tokenizer.decode(some, skip_special_tokens=True)
        if kind == "byte level" or text.startswith(whole):  # else see the test of bytes that make no text
            assert "".join(run(tokenizer, some)[0]) == whole


@pytest.mark.parametrize("seed", range(40))
def test_any_bytes(seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(BYTES.get_vocab_size() + 3) for _ in range(30)]  # the last ones are in no vocabulary
    assert "".join(run(BYTES, ids)[0]) == BYTES.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_make_no_text_are_no_error(seed: int) -> None:
    """The decoder makes U+FFFD of all bytes in a row if one is wrong; what was sent is not taken back."""
    draw, tokenizer = random.Random(seed), TOKENIZERS["byte fallback"]
    ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(30)]
    ids += [tokenizer.get_vocab()["▁the"], tokenizer.get_vocab()["▁world"]]
    assert "".join(run(tokenizer, ids)[0]).endswith(" the world")


def test_characters_come_when_they_are_complete() -> None:
    stream = TextStream(BYTES, ())
    assert [stream.push(byte) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert stream.finish() == ""


def test_a_character_that_stays_incomplete_is_replaced() -> None:
    stream = TextStream(BYTES, ())
    assert [stream.push(byte) for byte in "a😀".encode()[:-1]] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.text == "a\ufffd"


def test_special_tokens_are_left_out() -> None:
    end = BYTES.get_vocab()["<end>"]
    assert run(BYTES, [end, 72, end, 105, end])[0] == ["", "H", "", "i", "", ""]


@pytest.mark.parametrize(
    ("text", "stop", "pieces"),
    [
        ("one two", ("two",), ["o", "n", "e", " ", "", "", ""]),
        ("aab", ("ab",), ["", "a", ""]),
        ("aac", ("ab",), ["", "a", "ac"]),
        ("ababac", ("abac",), ["", "", "", "ab", "", ""]),
        ("xENDy", ("END", "x"), [""]),
        ("abcd", ("bcd", "bc"), ["a", "", ""]),
        ("abxd", ("bcd", "bx"), ["a", "", ""]),
        ("a€b", ("€",), ["a", "", "", ""]),
        ("a€b", ("€b",), ["a", "", "", "", ""]),
    ],
)
def test_stop_texts_across_tokens(text: str, stop: tuple[str, ...], pieces: list[str]) -> None:
    """What could begin one is held back, and comes if it does not go on so."""
    found, stopped = run(BYTES, list(text.encode()), *stop)
    assert found[:-1] == pieces
    assert stopped == any(one in text for one in stop)
    assert found[-1] == ""


def test_what_was_held_back_comes_in_the_end() -> None:
    assert run(BYTES, list(b"to be EN"), "END") == (["t", "o", " ", "b", "e", " ", "", "", "EN"], False)


def test_the_first_of_several_stops_within_one_token() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "twothree": 1}, unk_token="one"))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    assert run(tokenizer, [0, 1, 0], "three", "wo") == (["one", "t", ""], True)
    assert run(tokenizer, [0, 1, 0], "et", "wo") == (["on", "", ""], True)


@pytest.mark.parametrize("seed", range(60))
def test_any_stop_texts(seed: int) -> None:
    """Against a search in the text after each token; nothing of a stop text is ever sent."""
    draw = random.Random(seed)
    text = "".join(draw.choice("aab€") for _ in range(12))
    stop = ["".join(draw.choice("ab€") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
    ids = BYTES.encode(text).ids
    pieces, stopped = run(BYTES, ids, *stop)
    expected, ends = text, False
    for count in range(1, len(ids) + 1):
        known = BYTES.decode(ids[:count])
        found = [known.find(one) for one in stop if one in known]
        if found:
            expected, ends = known[: min(found)], True
            break
    assert ("".join(pieces), stopped) == (expected, ends)
    for k in range(len(pieces) - 1):
        sent = "".join(pieces[: k + 1])
        assert expected.startswith(sent)


def test_a_stop_text_before_an_incomplete_character() -> None:
    """Both came in one token, so the stop text is seen in the end."""
    letters = bytes_to_unicode()
    vocab = {letters[byte]: byte for byte in range(256)} | {"b" + letters[0xE2]: 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    assert run(tokenizer, [97, 256], "b") == (["a", "", ""], True)
