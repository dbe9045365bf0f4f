"""Greedy replies of SmolLM2-135M-Instruct in float32, read from one GGUF file by transformers and by us."""

import jax
import jax.numpy as jnp
import pytest

from calyrex_jax.adapters.cal import Cal, CalConfig, default_mlp_dim
from calyrex_jax.adapters.placement import boundaries
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.data.chat import ChatPolicy, encode
from calyrex_jax.data.tokenizer import load_tokenizer
from calyrex_jax.generate import loop
from calyrex_jax.model import Model
from calyrex_jax.weights.load import load_backbone

torch = pytest.importorskip("torch", reason="the reference is transformers' generate, which needs torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

NEW, NEAR = 32, 1e-3  # new tokens; logits closer than this are a tie, which rounding may decide either way


def talk(system, *turns):
    """A conversation whose turns are the user's and the assistant's by turns."""
    said = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return ([{"role": "system", "content": system}] if system else []) + said


LONG = " ".join(
    f"On day {day} the ship made {17 * day % 40 + 90} miles under a wind of force {day % 7 + 2}, and the cook served soup."
    for day in range(1, 16)
)
CHATS = [
    talk("You are a helpful assistant.", "What is the capital of France?"),
    talk("Answer in one short sentence.", "Why is the sky blue?"),
    talk("You are a pirate. Every sentence ends with Arr.", "Tell me how to bake bread."),
    talk("Never mention colours.", "Describe a sunset over the sea."),
    talk("", "Write a haiku about autumn leaves."),
    talk("You are a patient teacher.", "What is 7 times 8?", "7 times 8 is 56.", "And if I add 10 to it?"),
    talk(
        "Be brief.", "Name a fruit.", "Apple.", "Another one, please.", "Pear.", "Now a vegetable, and say how to cook it."
    ),
    talk("Réponds toujours en français.", "Où se trouve la tour Eiffel, et qui l'a construite ?"),
    talk("请用中文回答。", "今天天气怎么样？ Что ты думаешь? 🙂"),
    talk("You summarise logs for a harbour master.", LONG + " Summarise this log in one sentence."),
]


@pytest.fixture(scope="module")
def backbone(smollm2_source):
    return load_backbone(smollm2_source, DecoderSpec.from_config(smollm2_source.config), jnp.float32)


@pytest.fixture(scope="module")
def tokenizer(smollm2_source):
    s = smollm2_source
    return load_tokenizer(s.path, s.kind, s.generation_config, s.config)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [encode(tokenizer, chat, policy=ChatPolicy(), for_generation=True) for chat in CHATS]


@pytest.fixture(scope="module")
def expected(smollm2_source, tokenizer, prompts):
    """[(transformers' reply, [the gap between its two best logits at each token])], each prompt on its own."""
    path = smollm2_source.path
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": tokenizer.pad_id}
    options |= {"eos_token_id": sorted(tokenizer.stop_ids), "output_logits": True, "return_dict_in_generate": True}
    replies = []
    for prompt in prompts:
        ids = torch.tensor(prompt.tokens[None].astype("int64"))
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        gaps = [float(step[0].topk(2).values.diff().abs()) for step in out.logits]
        replies.append((out.sequences[0, ids.shape[1] :].tolist(), gaps))
    return replies


def late8th(spec):
    """CAL at the last eighth of the layers, with the head layout and norm of the backbone."""
    config = CalConfig(
        embed_dim=spec.embed_dim,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        mlp_dim=default_mlp_dim(spec.embed_dim),
        norm_eps=spec.norm_eps,
    )
    return Cal(config, boundaries("late8th", spec.num_layers))


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "fresh adapters"])
def test_greedy_replies_equal_transformers(smollm2_source, tokenizer, backbone, prompts, expected, adapted):
    spec = DecoderSpec.from_config(smollm2_source.config)
    model = Model(spec, (late8th(spec),) if adapted else ())
    params = {"backbone": backbone, "adapters": model.init_adapters(jax.random.key(0))}
    replies = loop.generate(
        model, params, prompts, max_new_tokens=NEW, stop_ids=tokenizer.stop_ids, pad_id=tokenizer.pad_id, batch_size=10
    )
    for index, (reply, (wanted, gaps)) in enumerate(zip(replies, expected, strict=True)):
        found = list(reply.tokens)
        if found == wanted:
            assert reply.finish_reason == ("stop" if wanted[-1] in tokenizer.stop_ids else "length")
            continue
        differs = next(i for i, (a, b) in enumerate(zip(found, wanted)) if a != b)
        assert gaps[differs] < NEAR, f"chat {index}: token {differs} is {found[differs]}, expected {wanted[differs]}"
    assert sum(list(reply.tokens) == wanted for reply, (wanted, _) in zip(replies, expected)) >= 8  # ties are rare
