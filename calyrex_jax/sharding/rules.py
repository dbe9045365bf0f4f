"""Which axis of which leaf lies on which mesh axis: one strict table, no catch-all.

Both dimensions of a matrix are sharded, never the layer axis: that would gather the whole stack at every layer.
"""

from __future__ import annotations

import math
import re

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from calyrex_jax.core import quantized, trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.placing import ROWS, VOCABULARY
from calyrex_jax.core.types import Tree

BATCH = P(ROWS)

# path of a leaf -> its axes; None replicates
BACKBONE_RULES = (
    # along the vocabulary, so that the head is never gathered: logits are cut as it is (core/placing.py)
    (r"embed/tokens", P(VOCABULARY, None)),
    (r"embed/positions", P(None, "fsdp")),
    (r"layers/(attn_norm|mlp_norm)/(scale|bias)", P()),
    (r"layers/attn/w_[qkv]", P(None, "fsdp", "tensor", None)),
    (r"layers/attn/w_o", P(None, "tensor", None, "fsdp")),
    (r"layers/attn/b_[qkv]", P(None, "tensor", None)),
    (r"layers/attn/b_o", P()),
    (r"layers/mlp/w_(gate|up)", P(None, "fsdp", "tensor")),
    (r"layers/mlp/w_down", P(None, "tensor", "fsdp")),
    (r"layers/mlp/b_(gate|up)", P(None, "tensor")),
    (r"layers/mlp/b_down", P()),
    (r"final_norm/(scale|bias)", P()),
    (r"head/w", P(VOCABULARY, None)),
)
ADAPTER_RULES = (
    (r"cal/boundary_\d+/(attn_norm|mlp_norm|copy_scale|q_norm|k_norm)", P()),
    (r"cal/boundary_\d+/w_[qkv]", P("fsdp", "tensor", None)),
    (r"cal/boundary_\d+/w_copy", P("fsdp", "tensor")),
    (r"cal/boundary_\d+/w_o", P("tensor", None, "fsdp")),
    (r"cal/boundary_\d+/w_(gate|up)", P("fsdp", "tensor")),
    (r"cal/boundary_\d+/w_down", P("tensor", "fsdp")),
    (r"parallel_mlp/boundary_\d+/mlp_norm", P()),
    (r"parallel_mlp/boundary_\d+/w_(gate|up)", P("fsdp", "tensor")),
    (r"parallel_mlp/boundary_\d+/w_down", P("tensor", "fsdp")),
    # the rank is never sharded: it may be odd, and it is what both products meet at
    (r"lora/attn/w_(q|k|v|qkv)/a", P(None, "fsdp", None)),
    (r"lora/attn/w_[qkv]/b", P(None, None, "tensor", None)),
    (r"lora/attn/w_qkv/b", P(None, None, None, "tensor", None)),
    (r"lora/attn/w_o/a", P(None, "tensor", None, None)),
    (r"lora/mlp/w_(gate|up)/a", P(None, "fsdp", None)),
    (r"lora/mlp/w_(gate|up)/b", P(None, None, "tensor")),
    (r"lora/mlp/w_down/a", P(None, "tensor", None)),
    (r"lora/(attn/w_o|mlp/w_down)/b", P(None, None, "fsdp")),
    (r"iti/shift", P(None, "fsdp")),
    (r"re_control/boundary_\d+/w_in", P("fsdp", None)),
    (r"re_control/boundary_\d+/(b_in|w_out|b_out)", P()),
    # a few maps of the value space's width: smaller than what it would cost to gather them
    (r"svgt/value_space/(response|conditional/prompt)/(kernel|bias)", P()),
    (r"svgt/value_space/(encoder_[01]|conditional)/attn/(query|key|value|out)/kernel", P()),
    (r"svgt/value_space/(encoder_[01]|conditional)/attn/(query|value|out)/bias", P()),
    (r"svgt/value_space/(encoder|aggregate)_[01]/rest/(up|down)/(kernel|bias)", P()),
    (r"svgt/value_space/(encoder|aggregate)_[01]/rest/(attn|mlp)_norm/(scale|bias)", P()),
    (r"svgt/value_space/aggregate_[01]/(value|out)/(kernel|bias)", P()),
    (r"svgt/value_space/aggregate/map/(kernel|bias)", P()),
    (r"svgt/value_space/(aggregate|conditional)/norm/(scale|bias)", P()),
    (r"svgt/value_space/(conditional/strength|pool)", P()),
    (r"svgt/value_space/discriminator/(hidden|out)/(kernel|bias)", P()),
    # D x D; heads stay whole, for they are few and need not be the backbone's
    (r"svgt/bridge/attn/(query|key|value)/kernel", P("fsdp", None, None)),
    (r"svgt/bridge/attn/out/kernel", P(None, None, "fsdp")),
    (r"svgt/bridge/lift_(hidden|out)/kernel", P(None, "fsdp")),
    (r"svgt/bridge/(attn/(query|value|out)|lift_hidden|lift_out)/bias", P()),
    (r"svgt/bridge/norm/(scale|bias)", P()),
    (r"svgt/bridge/(seeds|strength)", P()),
)


def specs(tree: Tree, rules, mesh: Mesh) -> Tree:
    """The PartitionSpec of every leaf.

    Raises UserError where a leaf matches no rule, or where a dimension does not divide by its mesh axes: the message
    names the leaf, the axis and the remedy. Key/value heads fewer than the tensor axis are replicated instead.
    """

    leaves = trees.flatten(tree)

    def one(path: str, leaf) -> P:
        # a quantised leaf's integers lie as the leaf would, and its factors beside them
        above, _, last = path.rpartition("/")
        own = above if last in quantized.PARTS and f"{above}/q" in leaves else path
        factors = own != path and last != "q"
        found = [spec for pattern, spec in rules if re.fullmatch(pattern, own)]
        if len(found) != 1:
            raise ValueError(f"sharding: leaf {path} matches {len(found)} rules, expected exactly 1; add it to rules.py")
        axes = list(found[0])
        if axes and axes[0] == VOCABULARY and leaf.shape[0] % math.prod(mesh.shape[a] for a in VOCABULARY):
            axes = ["tensor", "fsdp"]  # a vocabulary that does not divide over both
        for dim, axis in enumerate(axes):
            size = math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))
            if size == 1 or leaf.shape[dim] % size == 0:
                continue
            if factors or (re.search(r"[wb]_[kv](/b)?$", own) and axis == "tensor"):
                axes[dim] = None  # fewer key/value heads, or factors, than shards: every shard keeps them all
                continue
            raise UserError(
                f"mesh.{axis}={size}: dimension {dim} of {path}, {leaf.shape[dim]}, does not divide by it; "
                f"choose a mesh.{axis} that divides {leaf.shape[dim]}"
            )
        return P(*axes)

    return trees.map_with_path(one, tree)


def shardings(tree: Tree, rules, mesh: Mesh) -> Tree:
    """The NamedSharding of every leaf, by `specs`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, rules, mesh), is_leaf=lambda s: isinstance(s, P))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the data and fsdp axes."""
    return NamedSharding(mesh, BATCH)
