import numpy as np
import pytest

from calyrex_jax.analysis import pairs
from calyrex_jax.analysis.pairs import PairSettings
from calyrex_jax.core.errors import UserError
from calyrex_jax.data.chat import ChatPolicy
from calyrex_jax.data.rules_checks import Constraint, follows
from calyrex_jax.data.tokenizer import load_tokenizer
from tests import tiny_runs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    place = tiny_runs.write_model(tmp_path_factory.mktemp("pairs") / "model")
    return load_tokenizer(place, "directory", {"eos_token_id": [256, 258]}, {"vocab_size": tiny_runs.ROWS})


@pytest.mark.parametrize("rules", [("begin", "end"), ("begin", "begin"), ("upper", "lower"), ("json", "upper")])
def test_pairs_differ_in_the_rule_alone(tokenizer, rules):
    made = pairs.make_pairs(PairSettings(rules, 5), tokenizer, ChatPolicy())
    assert len({pair.fact for pair in made}) == 5
    for pair in made:
        assert pair.systems[0] != pair.systems[1]
        assert [pair.systems[0].replace(pair.marks[0], "…")] == [pair.systems[1].replace(pair.marks[1], "…")]
        for one, other in (pair.plain, pair.first, pair.second):
            assert len(one.tokens) == len(other.tokens)
            np.testing.assert_array_equal(one.tokens[~one.system], other.tokens[~other.system])
            assert (one.tokens != other.tokens).any()
        constraints = [Constraint(k, w if k in pairs.WORD_RULES else None) for k, w in zip(rules, pair.words)]
        for i, two in enumerate((pair.first, pair.second)):
            said = tokenizer.decode(two[0].tokens[two[0].targets])
            assert said == pair.replies[i] and follows([constraints[i]], said)
            assert not follows([constraints[1 - i]], said)
            assert tokenizer.decode(two[0].tokens[two[0].rule]) == pair.marks[i]
            assert tokenizer.decode(two[0].tokens[two[0].word]) == (pair.words[i] if rules[i] in pairs.WORD_RULES else "")
        plain = tokenizer.decode(pair.plain[0].tokens[pair.plain[0].targets])
        assert not any(follows([one], plain) for one in constraints)
    if rules[0] == rules[1]:
        assert len({pair.words for pair in made}) == 1, "the probe's classes are two fixed words"


def test_the_same_seed_gives_the_same_pairs(tokenizer):
    def systems(seed):
        return [pair.systems for pair in pairs.make_pairs(PairSettings(count=3, seed=seed), tokenizer, ChatPolicy())]

    assert systems(0) == systems(0) != systems(1)


def test_text_between_system_prompt_and_question(tokenizer):
    pair = pairs.make_pairs(PairSettings(count=1), tokenizer, ChatPolicy())[0]
    near, far = (pairs.at_distance(pair, tokens, tokenizer, ChatPolicy()) for tokens in (0, 300))
    np.testing.assert_array_equal(near.tokens, pair.first[0].tokens)
    assert 150 < len(far.tokens) - len(near.tokens) <= 310
    np.testing.assert_array_equal(far.tokens[far.targets], near.tokens[near.targets])
    np.testing.assert_array_equal(np.flatnonzero(far.rule), np.flatnonzero(near.rule))


@pytest.mark.parametrize("text", ["", "begin", "begin,start", "upper,upper", "begin,end,json"])
def test_rules_that_are_none(text):
    with pytest.raises(UserError, match=r"config\.analyze\.rules is .*; expected two of begin, end, json, upper, lower"):
        pairs.parse_rules(text)


def test_more_pairs_than_facts(tokenizer):
    with pytest.raises(UserError, match=r"config\.analyze\.pairs is 100000, but only \d+ pairs"):
        pairs.make_pairs(PairSettings(("begin", "begin"), 100_000), tokenizer, ChatPolicy())


def test_conversations_that_are_not_aligned_are_refused(tokenizer):
    pair = pairs.make_pairs(PairSettings(count=1), tokenizer, ChatPolicy())[0]
    with pytest.raises(ValueError, match="differ beyond the system text"):
        pairs.Pair("fact", pair.plain, pair.first, (pair.second[0], pair.first[0]))
