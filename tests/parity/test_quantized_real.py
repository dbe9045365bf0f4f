"""SmolLM2 in fewer bits: perplexity of the embedded plain chats against bfloat16, and the bytes of its weights."""

import jax.numpy as jnp
import pytest

from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core import quantized, trees
from calyrex_jax.data import chat, rules
from calyrex_jax.data.chat import ChatPolicy
from calyrex_jax.data.tokenizer import load_tokenizer
from calyrex_jax.generate import score
from calyrex_jax.model import Model
from calyrex_jax.weights.load import load_backbone


@pytest.fixture(scope="module")
def perplexity(smollm2_source):
    """kind -> perplexity of the replies of all plain chats."""
    source = smollm2_source
    model = Model(DecoderSpec.from_config(source.config))
    tokenizer = load_tokenizer(source.path, source.kind, source.generation_config, source.config)
    made = [
        chat.encode(tokenizer, talk["messages"], policy=ChatPolicy(), where="plain chats") for talk in rules.plain_chats()
    ]

    def measure(kind):
        params = {"backbone": load_backbone(source, model.spec, "bfloat16", kind=kind), "adapters": {}}
        lines = score.stream_scores(model, params, made, pad_id=tokenizer.pad_id, batch_size=16)
        return score.perplexity(list(lines), [example.targets for example in made])

    return measure


@pytest.mark.slow
def test_perplexity_stays_close(perplexity):
    plain = perplexity("")
    assert abs(perplexity("int8") / plain - 1) < 0.01
    assert abs(perplexity("int4") / plain - 1) < 0.01  # the file's own grid
    assert abs(perplexity("nf4") / plain - 1) < 0.08


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.61), ("int4", 0.36), ("nf4", 0.38)])
def test_bytes_of_the_weights(kind, share, smollm2_source):
    plain = decoder.abstract_params(DecoderSpec.from_config(smollm2_source.config), jnp.bfloat16)

    def bits(leaf):
        own = jnp.iinfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.integer) else 8 * leaf.dtype.itemsize
        return own * leaf.size

    made = quantized.abstract(plain, kind)
    got = sum(map(bits, trees.flatten(made).values())) / sum(map(bits, trees.flatten(plain).values()))
    assert got == pytest.approx(share, abs=0.01)
