"""Tiny random models and conversations that several rooms' tests share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.adapters.cal import Cal, CalConfig
from calyrex_jax.adapters.lora import Lora
from calyrex_jax.adapters.parallel_mlp import ParallelMlp, ParallelMlpConfig
from calyrex_jax.adapters.placement import boundaries
from calyrex_jax.adapters.svgt import Svgt
from calyrex_jax.adapters.value_bridge import BridgeConfig, InjectionConfig
from calyrex_jax.adapters.value_space import ValueSpaceConfig
from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core import trees
from calyrex_jax.core.lowrank import LowRank
from calyrex_jax.core.types import Batch, slots
from calyrex_jax.generate import loop
from calyrex_jax.model import Model
from calyrex_jax.weights import peft

VOCAB, LAYERS = 97, 4

_LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_positions": 128,
    "layer_norm_epsilon": 1e-5,
}
CONFIGS = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 5, "tie_word_embeddings": False},
    "dynamic": _LLAMA | {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
}


@dataclass(frozen=True)
class Conversation:
    tokens: np.ndarray
    system: np.ndarray


def spec(name="llama", **changes):
    return DecoderSpec.from_config(CONFIGS[name] | changes)


def backbone(spec, seed=0, dtype=jnp.float32):
    """Random weights large enough for attention to choose and for logits to differ; norms around 1."""
    return noise(decoder.abstract_params(spec, dtype), seed, size=0.2)


def noise(tree, seed, size):
    """Random leaves of the same shapes and types, drawn by numpy: jax would compile each shape's draw."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        around = 1.0 if "norm" in path and not path.endswith("bias") else 0.0
        return jnp.asarray(around + size * rng.normal(size=leaf.shape), leaf.dtype)

    return trees.map_with_path(one, tree)


def cal_config(spec, **changes):
    plain = {
        "embed_dim": spec.embed_dim,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "mlp_dim": 24,
        "norm_eps": 1e-5,
    }
    return CalConfig(**plain | changes)


def model(spec, placement=None, **changes):
    """The spec alone, or with CAL blocks at a placement."""
    if placement is None:
        return Model(spec)
    return Model(spec, (Cal(cal_config(spec, **changes), boundaries(placement, spec.num_layers)),))


def parallel_mlp(spec, placement, **changes):
    plain = {"embed_dim": spec.embed_dim, "mlp_dim": 24, "norm_eps": 1e-5}
    return ParallelMlp(ParallelMlpConfig(**plain | changes), boundaries(placement, spec.num_layers))


def lora(spec, rank, alpha=6.0, layers=None, ranks=None, **changes):
    """LoRA on all maps with one rank, or with `ranks` {kind: rank} where they differ."""
    shapes = peft.shapes_of(spec)
    layers = range(spec.num_layers) if layers is None else layers
    each = tuple((kind, (ranks or {}).get(kind, rank)) for kind in shapes)
    return Lora(LowRank(each, alpha, layers.start, layers.stop, **changes), tuple(shapes.items()))


def svgt(spec, layer=1, tokens=3, refresh_every=2, momentum=0.5, strength=None, **changes):
    """A value space of width 12 and a bridge, or with `strength` an injection; `changes` go to the value space."""
    value = ValueSpaceConfig(**{"embed_dim": spec.embed_dim, "value_dim": 12, "num_heads": 3} | changes)
    bridge = BridgeConfig(spec.embed_dim, value.value_dim, tokens, num_heads=spec.num_heads)
    if strength is not None:
        bridge = InjectionConfig(spec.embed_dim, value.value_dim, strength)
    return Svgt(value, bridge, layer, refresh_every, momentum)


def perturbed(tree, seed=1, size=0.3):
    """Every leaf moved by random numbers, so that no gate or projection is zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + size * rng.normal(size=leaf.shape), leaf.dtype), tree)


def params(model, seed=0, dtype=jnp.float32):
    """A random backbone and adapters in a non-zero state."""
    shapes = jax.eval_shape(model.init_adapters, jax.random.key(0))
    return {"backbone": backbone(model.spec, seed, dtype), "adapters": noise(shapes, seed + 1, 0.25)}


def conversations(lengths=(9, 14, 5, 12), seed=0):
    """Random tokens; in turn the span is at the start, in the middle, absent, and in two pieces."""
    rng = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(lengths):
        system = np.zeros(length, bool)
        pieces = [[(0, 3)], [(length // 2, length // 2 + 3)], [], [(1, 3), (length // 2, length // 2 + 2)]]
        for start, stop in pieces[index % 4]:
            system[start:stop] = True
        made.append(Conversation(rng.integers(0, VOCAB, length).astype(np.int32), system))
    return made


def without_system(conversations):
    """The same tokens, of which none is system text."""
    return [Conversation(c.tokens, np.zeros_like(c.system)) for c in conversations]


def packed(rows, length, width=8, left_pad=False):
    """A Batch whose rows are lists of conversations, one segment each."""
    shape = (len(rows), length)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    system = np.zeros(shape, bool)
    for row, conversations in enumerate(rows):
        at = length - sum(len(c.tokens) for c in conversations) if left_pad else 0
        for segment, conversation in enumerate(conversations, start=1):
            here = slice(at, at + len(conversation.tokens))
            tokens[row, here], system[row, here] = conversation.tokens, conversation.system
            positions[row, here], segments[row, here] = np.arange(len(conversation.tokens)), segment
            at = here.stop
    return Batch(tokens, positions, segments, system, np.zeros(shape, bool), slots(system, width))


def assert_cached_equals_uncached(model: Model, params, new_tokens: int) -> None:
    """Every greedily generated token is the most probable one of a whole forward pass over what stands before it."""
    prompts = conversations((9, 12, 7, 13))
    replies = loop.generate(model, params, prompts, max_new_tokens=new_tokens, stop_ids=[], pad_id=0)
    run = jax.jit(model.logits)
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens, system = prompt.tokens, prompt.system
        for token in reply.tokens:
            logits = run(params, packed([[Conversation(tokens, system)]], 20))[0, len(tokens) - 1]
            assert int(logits.argmax()) == token
            tokens, system = np.append(tokens, np.int32(token)), np.append(system, False)
