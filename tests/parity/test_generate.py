"""Generation against transformers: greedy replies of a left-padded batch, and what top-k and top-p leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.generate import loop, score
from calyrex_jax.generate.sampling import nucleus
from calyrex_jax.weights.load import load_backbone
from calyrex_jax.weights.sources import resolve
from tests import tiny

torch = pytest.importorskip("torch", reason="the reference is transformers' generate, which needs torch")
transformers = pytest.importorskip("transformers")

NEW = 12


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2"])
def pair(request, tmp_path_factory):
    """transformers' model and ours, from one random checkpoint."""
    config = dict(tiny.CONFIGS[request.param])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.ndim > 1:
                weight.mul_(8)
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory)
    source = resolve(str(directory))
    spec = DecoderSpec.from_config(source.config)
    backbone = load_backbone(source, spec, jnp.float32)
    return theirs, tiny.model(spec), {"backbone": backbone, "adapters": {}}


def greedy(theirs, tokens, stop):
    """transformers' reply to one prompt, and the smallest gap between its two best logits."""
    ids = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    gaps = [float(step[0].topk(2).values.diff().abs()) for step in out.scores]
    return out.sequences[0, len(tokens) :].tolist(), min(gaps)


def test_greedy_replies_equal_transformers(pair):
    theirs, model, params = pair
    prompts = tiny.conversations((9, 14, 5, 12, 30))
    free = [greedy(theirs, prompt.tokens, None)[0] for prompt in prompts]
    stops = [free[0][3], free[2][0]]
    replies = loop.generate(model, params, prompts, max_new_tokens=NEW, stop_ids=stops, pad_id=0, batch_size=3)
    compared = 0
    for prompt, reply in zip(prompts, replies):
        expected, gap = greedy(theirs, prompt.tokens, stops)
        if gap > 1e-3:
            compared += 1
            assert list(reply.tokens) == expected
            assert reply.finish_reason == ("stop" if expected[-1] in stops else "length")
    assert compared >= 3


def test_scores_equal_transformers(pair):
    theirs, model, params = pair
    talks = tiny.conversations((9, 40, 5, 12))
    for talk, line in zip(talks, score.scores(model, params, talks, pad_id=0, batch_size=4)):
        ids = torch.tensor(talk.tokens[None].astype(np.int64))
        with torch.no_grad():
            table = theirs(ids).logits[0].float().log_softmax(-1).numpy()
        expected = table[np.arange(len(talk.tokens) - 1), talk.tokens[1:]]
        np.testing.assert_allclose(line[1:], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
def test_the_nucleus_equals_transformers_warper(p):
    logits = np.random.default_rng(0).normal(size=(16, 500)).astype(np.float32) * 3
    kept = transformers.TopPLogitsWarper(p)(None, torch.tensor(logits)).isfinite().numpy()
    np.testing.assert_array_equal(np.asarray(jax.jit(nucleus, static_argnums=1)(logits, p)), kept)
