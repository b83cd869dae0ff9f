"""Pieces of passages: their length, their order, their names."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragr1_actors.core.errors import ConfigError
from retrieval.base import Passage
from retrieval.corpora.text import has_word, is_empty, split_passages


def test_long_passages_become_pieces_with_the_title() -> None:
    text = "  one two\n\nthree  four five "
    assert list(split_passages([Passage("a", "A", text), Passage("b", "B", " x ")], 2)) == [
        Passage("a#0", "A", "one two"),
        Passage("a#1", "A", "three  four"),
        Passage("a#2", "A", "five"),
        Passage("b", "B", " x "),
    ]


def test_a_passage_of_as_many_words_is_one_piece() -> None:
    pieces = list(split_passages([Passage("a", "A", "w " * 100), Passage("b", "B", "w " * 101)], 100))
    assert [(piece.id, len(piece.text.split())) for piece in pieces] == [("a", 100), ("b#0", 100), ("b#1", 1)]


def test_a_passage_called_like_a_piece_is_not_taken_for_one() -> None:
    passages = [Passage("Riga", "Riga", "a b c d e f"), Passage("Riga#2", "Riga", "g"), Passage("#", "", "")]
    assert [piece.id for piece in split_passages(passages, 2)] == ["Riga#0", "Riga#1", "Riga#2", "Riga#2#0", "#"]


@pytest.mark.parametrize("num_words", [0, -5, 10**10])
def test_no_words_and_too_many_are_refused_at_once(num_words: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 1,000,000"):
        split_passages([], num_words)


def test_letters_and_digits_of_every_script_count_and_nothing_else() -> None:
    wrong = [number for number in range(sys.maxunicode + 1) if has_word(chr(number)) != chr(number).isalnum()]
    assert wrong == []


@pytest.mark.parametrize(("title", "text"), [("Рига", ""), ("", "東京"), ("", "١٩"), ("", "- ½ -"), ("_", "नमस्ते")])
def test_a_passage_with_one_of_them_is_not_empty(title: str, text: str) -> None:
    assert not is_empty(Passage("a", title, text))


@pytest.mark.parametrize("text", ["", " \n\t", "_", "—…·", "\u200b\u00a0", "\u0301", "👍", "\x00"])
def test_a_passage_of_spaces_and_signs_is_empty(text: str) -> None:
    assert is_empty(Passage("a", text, text))


IDS = st.lists(st.sampled_from(["a", "a#0", "a#1", "a#1#0", "b", "#0", "", "#", "a#x"]), unique=True)


@given(
    ids=IDS, text=st.text(alphabet=st.sampled_from("ab \n\t\u00a0\u2028é"), max_size=60), num_words=st.integers(1, 5)
)
def test_words_are_kept_in_order_and_ids_unique(ids: list[str], text: str, num_words: int) -> None:
    pieces = list(split_passages([Passage(passage_id, "T", text) for passage_id in ids], num_words))
    assert len({piece.id for piece in pieces}) == len(pieces)
    assert [word for piece in pieces for word in piece.text.split()] == text.split() * len(ids)
    assert all(len(piece.text.split()) <= num_words and piece.title == "T" for piece in pieces)
    if len(text.split()) > num_words:
        assert all(piece.text and piece.text == piece.text.strip() and piece.text in text for piece in pieces)
