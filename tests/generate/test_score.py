import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.generate import score
from tests import tiny


def expected_logprobs(model, params, talk):
    """From the whole matrix of logits of this conversation alone."""
    batch = tiny.packed([[talk]], 64, width=8)
    table = np.asarray(jax.nn.log_softmax(jax.jit(model.logits)(params, batch)[0].astype(jnp.float32)))
    return table[np.arange(len(talk.tokens) - 1), talk.tokens[1:]]


@pytest.mark.parametrize(
    ("family", "placement"), [("llama", None), ("llama", "1,4"), ("gpt2", "late8th"), ("mistral", "0,3")]
)
def test_scores_equal_the_log_softmax_of_whole_logits(family, placement):
    model = tiny.model(tiny.spec(family), placement)
    params, talks = tiny.params(model), tiny.conversations((9, 40, 5, 12, 1))
    found = score.scores(model, params, talks, pad_id=0, batch_size=2)
    for talk, line in zip(talks, found):
        assert line.dtype == np.float32 and len(line) == len(talk.tokens) and np.isnan(line[0])
        np.testing.assert_allclose(line[1:], expected_logprobs(model, params, talk), rtol=1e-4, atol=1e-4)
        assert (line[1:] <= 0).all()


def test_batch_size_and_company_do_not_matter():
    model = tiny.model(tiny.spec(), "1,4")
    params, talks = tiny.params(model), tiny.conversations((9, 40, 5, 12, 33))
    alone = [score.scores(model, params, [talk], pad_id=3)[0] for talk in talks]
    for size in (2, 8):
        for one, other in zip(alone, score.scores(model, params, talks, pad_id=0, batch_size=size)):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [1, 3 * 97 * 4, 2**25])
def test_chunks_of_any_size_give_the_same(limit, monkeypatch):
    monkeypatch.setattr(score, "_CHUNK_LOGITS", limit)
    rng = np.random.default_rng(0)
    states, head = rng.normal(size=(3, 10, 8)).astype(np.float32), rng.normal(size=(97, 8)).astype(np.float32)
    labels = rng.integers(0, 97, (3, 10)).astype(np.int32)
    found = jax.jit(score.token_logprobs)(states, head, labels)
    table = np.asarray(jax.nn.log_softmax(states @ head.T))
    np.testing.assert_allclose(found, np.take_along_axis(table, labels[..., None], -1)[..., 0], atol=1e-5)


def test_all_logits_never_exist_at_once():
    states, head = jnp.zeros((2, 300, 8)), jnp.zeros((97, 8))
    text = str(jax.make_jaxpr(score.token_logprobs)(states, head, jnp.zeros((2, 300), jnp.int32)))
    assert "[2,100,97]" in text.replace(" ", "") or "[2,128,97]" in text.replace(" ", "")
    assert "300,97" not in text.replace(" ", "")


def test_one_compilation_for_each_length_and_span_bucket():
    model = tiny.model(tiny.spec(), "late8th")
    params = tiny.params(model)
    before = score._score._cache_size()
    score.scores(model, params, tiny.conversations((9, 14, 5, 12, 30)), pad_id=0, batch_size=2)
    score.scores(model, jax.tree.map(lambda leaf: leaf * 1.01, params), tiny.conversations((20, 7)), pad_id=0, batch_size=2)
    assert score._score._cache_size() == before + 1
    score.scores(model, params, tiny.conversations((40, 7)), pad_id=0, batch_size=2)
    assert score._score._cache_size() == before + 2


def test_too_long_is_refused_by_line():
    model = tiny.model(tiny.spec("gpt2"))
    with pytest.raises(UserError, match=r"b\.jsonl:2: 129 tokens, but the backbone has 128 positions"):
        score.stream_scores(model, {}, tiny.conversations((129,)), pad_id=0, where=["b.jsonl:2"])


def test_perplexity_is_one_mean_over_all_tokens():
    lines = [np.array([np.nan, -1.0, -3.0]), np.array([np.nan, -0.5])]
    everywhere = [np.ones(3, bool), np.ones(2, bool)]
    assert score.perplexity(lines, everywhere) == pytest.approx(np.exp(4.5 / 3))
    assert score.perplexity(lines, [np.array([True, False, True]), np.zeros(2, bool)]) == pytest.approx(np.exp(3.0))
    with pytest.raises(ValueError, match="no token"):
        score.perplexity(lines, [np.array([True, False, False]), np.zeros(2, bool)])
