"""Each checker on replies that follow the rule and on near misses that do not."""

import pytest

from calyrex_jax.data.rules_checks import CHECKS, Constraint, bare_words, bullet_count, follows, holds, is_answered, is_plain

GOOD = [
    ("begin", "kiwi", "kiwi. The capital of Peru is Lima."),
    ("begin", "kiwi", '"Kiwi": Lima'),
    ("begin", "kiwi", "**KIWI** Lima"),
    ("begin", "merry-go-round", "Merry-go-round, Lima."),
    ("end", "kiwi", "The capital of Peru is Lima. kiwi"),
    ("end", "kiwi", 'Lima, "Kiwi".'),
    ("end", "kiwi", "Lima\nKIWI!\n"),
    ("upper", None, "THE CAPITAL IS LIMA: 3 TIMES."),
    ("upper", None, "ÉCOLE"),
    ("lower", None, "the capital is lima, 3 times."),
    ("one_word", None, "Lima."),
    ("one_word", None, ' "well-being" '),
    ("max_words", 3, "It is Lima."),
    ("max_words", 3, "Lima"),
    ("bullets", 2, "- Apple\n- Pear"),
    ("bullets", 2, "\n* Apple\n\n* Pear\n"),
    ("bullets", 3, "• a\n• b\n• c"),
    ("bullets", 2, "1. Apple\n2. Pear"),
    ("json", "kiwi", '{"kiwi": "Lima"}'),
    ("json", "kiwi", ' {"kiwi": ["Lima"]} \n'),
    ("json", "kiwi", '```json\n{"kiwi": "Lima"}\n```'),
    ("no_letter", "e", "Lima, of Gold"),
    ("no_word", "capital", "It is Lima, a capitalist city."),
    ("mention", "kiwi", "The capital, kiwi, is Lima."),
]
BAD = [
    ("begin", "kiwi", "The kiwi capital of Peru is Lima."),
    ("begin", "kiwi", "kiwis. The capital of Peru is Lima."),
    ("begin", "kiwi", "kiwi"),
    ("begin", "kiwi", "Akiwi Lima"),
    ("begin", "kiwi", ""),
    ("end", "kiwi", "The kiwi of Peru is Lima."),
    ("end", "kiwi", "Lima. nekiwi"),
    ("end", "kiwi", "kiwi."),
    ("end", "kiwi", "Lima. kiwi kiwi bird"),
    ("upper", None, "The CAPITAL IS LIMA."),
    ("upper", None, "42"),
    ("upper", None, ""),
    ("lower", None, "the capital is Lima."),
    ("lower", None, "42"),
    ("one_word", None, "It is Lima."),
    ("one_word", None, "..."),
    ("max_words", 3, "The capital is Lima."),
    ("max_words", 3, " "),
    ("bullets", 2, "- Apple\n- Pear\n- Plum"),
    ("bullets", 2, "Fruits:\n- Apple\n- Pear"),
    ("bullets", 2, "Apple\nPear"),
    ("bullets", 2, "-\n-"),
    ("json", "kiwi", '{"kiwi": "Lima", "x": 1}'),
    ("json", "kiwi", '{"Kiwi": "Lima"}'),
    ("json", "kiwi", '{"kiwi": ""}'),
    ("json", "kiwi", 'Here: {"kiwi": "Lima"}'),
    ("json", "kiwi", '{"kiwi": "Lima"'),
    ("json", "kiwi", '["kiwi"]'),
    ("no_letter", "e", "It is thE capital."),
    ("no_letter", "e", " "),
    ("no_word", "capital", "The Capital is Lima."),
    ("no_word", "capital", ""),
    ("mention", "kiwi", "The capital is Lima, kiwis."),
    ("mention", "kiwi", "kiwi"),
]


@pytest.mark.parametrize(("kind", "value", "reply"), GOOD)
def test_followed(kind, value, reply):
    assert follows([Constraint(kind, value)], reply)


@pytest.mark.parametrize(("kind", "value", "reply"), BAD)
def test_not_followed(kind, value, reply):
    assert not follows([Constraint(kind, value)], reply)


def test_every_kind_has_both():
    assert {row[0] for row in GOOD} == {row[0] for row in BAD} == set(CHECKS)


def test_combinations_need_both():
    rules = [Constraint("begin", "kiwi"), Constraint("upper")]
    assert follows(rules, "KIWI. LIMA.")
    assert not follows(rules, "kiwi. Lima.")
    assert not follows(rules, "LIMA. KIWI.")


@pytest.mark.parametrize(
    ("reply", "plain"),
    [
        ("The capital of Peru is Lima.", True),
        ("3 + 4 = 7", True),
        ("5 - 3 is 2.", True),
        ("1. Apple\nand more fruits", True),
        ("", False),
        ("THE CAPITAL OF PERU IS LIMA.", False),
        ("the capital of peru is lima.", False),
        ('{"kiwi": "Lima"}', False),
        ("- Lima\n- Peru", False),
        ("kiwi. The capital of Peru is Lima.", False),
        ("The capital of Peru is Lima. Kiwi", False),
        ("The capital of Peru is Lima, where the kiwi grows.", True),
    ],
)
def test_plain(reply, plain):
    assert is_plain(reply, {"kiwi"}, "What is the capital of Peru? Lima") is plain


def test_plain_lets_known_words_and_lists_pass():
    assert is_plain("Fruits are: kiwi", {"kiwi"}, "Name some fruits. kiwi")
    assert is_plain("- Apple\n- Pear", {"kiwi"}, "", listing=True)


def test_parts():
    assert bare_words("Yes, it's 'hot' - now.") == ["Yes", "it's", "hot", "now"]
    assert bullet_count("- a\ntext\n- b") == 0
    assert holds("Blue whales.", "blue") and not holds("Blue whales.", "whale")
    assert is_answered("They are owls.", ["owl"]) and not is_answered("They howl.", ["owl"])
    assert is_answered("apples and a pear", ["apple", "pear", "fig"], 2) and not is_answered(
        "two pears", ["apple", "pear"], 2
    )
