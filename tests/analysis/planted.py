"""A backbone with known inner workings: one layer, or one CAL block, alone brings the rule to the answer's positions."""

import jax.numpy as jnp
import numpy as np

from calyrex_jax.adapters.cal import Cal
from calyrex_jax.analysis.pairs import Pair, Reading
from calyrex_jax.backbones import decoder
from calyrex_jax.core import trees
from calyrex_jax.model import Model
from tests import tiny

LAYERS = 6
# tokens: the two rules' words, what follows each rule, the end of a turn; from 10 on anything
RULE, FOLLOWS, END = (1, 2), (3, 4), 5
# dimensions of the stream
IDENTITY, IS_RULE, ALWAYS, MOVED, NOISE = slice(0, 2), 2, 3, slice(8, 10), slice(16, 32)
SPEC = tiny.spec(num_hidden_layers=LAYERS, rope_theta=1e12, tie_word_embeddings=False)
STEADY = SPEC.head_dim // 2 - 1  # the head's slowest phase, which positions do not turn


def backbone(moves_at: int | None, seed: int = 0):
    """All layers add noise of their own to each token; layer `moves_at` alone attends: it takes IDENTITY to MOVED."""
    rng = np.random.default_rng(seed)
    leaves = {path: np.zeros(leaf.shape, np.float32) for path, leaf in trees.flatten(_shapes()).items()}
    for path in leaves:
        if path.endswith("norm/scale"):
            leaves[path] += 1
    tokens = leaves["embed/tokens"]
    tokens[:, ALWAYS], tokens[:, NOISE] = 1, 0.3 * rng.normal(size=(len(tokens), 16))
    # both words look alike but for which they are, so that norms are equal too
    tokens[RULE, NOISE], tokens[RULE, IS_RULE] = 0, 1
    tokens[RULE[0], 0] = tokens[RULE[1], 1] = 2
    leaves["layers/mlp/w_up"][:, NOISE] = 0.5 * rng.normal(size=leaves["layers/mlp/w_up"][:, NOISE].shape)
    leaves["layers/mlp/w_gate"][:, NOISE] = 0.5 * rng.normal(size=leaves["layers/mlp/w_gate"][:, NOISE].shape)
    leaves["layers/mlp/w_down"][..., NOISE] = 0.05 * rng.normal(size=leaves["layers/mlp/w_down"][..., NOISE].shape)
    if moves_at is not None:
        for name, value in mover().items():
            leaves[f"layers/attn/{name}"][moves_at] = value
    leaves["head/w"][FOLLOWS[0], MOVED.start] = leaves["head/w"][FOLLOWS[1], MOVED.start + 1] = 4
    return trees.unflatten({path: jnp.asarray(leaf) for path, leaf in leaves.items()})


def mover():
    """Attention that looks from everywhere at the rule's word and adds its IDENTITY as MOVED."""
    heads = (SPEC.num_heads, SPEC.num_kv_heads)
    made = {
        f"w_{name}": np.zeros((SPEC.embed_dim, count, SPEC.head_dim), np.float32)
        for name, count in zip("qkv", (*heads, heads[1]))
    }
    made["w_q"][ALWAYS, :, STEADY], made["w_k"][IS_RULE, :, STEADY] = 10, 10
    made["w_v"][IDENTITY, :, :2] = np.eye(2)[:, None]
    made["w_o"] = np.zeros((SPEC.num_heads, SPEC.head_dim, SPEC.embed_dim), np.float32)
    made["w_o"][:, :2, MOVED] = np.eye(2) / SPEC.num_heads
    return made


def _shapes():
    return decoder.abstract_params(SPEC, jnp.float32)


def with_cal(boundary: int, copies: int = 1):
    """(model, params) whose backbone moves nothing; CAL blocks, of which the one at `boundary` alone does."""
    cal = Cal(tiny.cal_config(SPEC), tuple(range(boundary - copies + 1, boundary + 1)))
    model = Model(SPEC, (cal,))
    adapters = trees.map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if "norm" not in path else leaf, model.init_adapters(KEY)
    )
    block = adapters["cal"][f"boundary_{boundary}"]
    block |= {name: jnp.asarray(value) for name, value in mover().items()}
    return model, {"backbone": backbone(None), "adapters": adapters}


KEY = np.zeros(2, np.uint32)


def reading(rule: int, question: list[int], reply: list[int]) -> Reading:
    """<| rule |> question reply END, and the masks."""
    head = [6, 10, RULE[rule], 11, 7]
    tokens = np.array([*head, *question, 8, *reply, END], np.int32)
    here = np.arange(len(tokens))
    system, targets = (here >= 1) & (here < 4), here > len(head) + len(question)
    return Reading(tokens, system, targets, here == 2, here == 2, tuple(map(str, tokens)))


def pairs(count: int = 24, seed: int = 0) -> list[Pair]:
    """Each with a question of its own, of three or four tokens."""
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        question = rng.integers(12, tiny.VOCAB, 3 + i % 2).tolist()
        first, second, plain = ([token, 12 + i] for token in (*FOLLOWS, 9))
        found.append(
            Pair(
                f"fact {i}",
                (reading(0, question, plain), reading(1, question, plain)),
                (reading(0, question, first), reading(1, question, first)),
                (reading(1, question, second), reading(0, question, second)),
            )
        )
    return found
