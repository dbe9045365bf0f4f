"""SVGT's two trained parts, where on the backbone they sit, and how often the bridge is renewed while decoding."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from calyrex_jax.adapters.value_bridge import Bridge, BridgeConfig, Injection, InjectionConfig
from calyrex_jax.adapters.value_space import ValueSpace, ValueSpaceConfig
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree


def default_layer(num_layers: int) -> int:
    """l* where none is given: L // 2 of more than 20 layers, else L - 3 (the first layer where that is none).

    >>> default_layer(30), default_layer(12)
    (15, 9)
    """
    return num_layers // 2 if num_layers > 20 else max(num_layers - 3, 0)


def check_layer(layer: int, num_layers: int) -> None:
    """UserError where l* lies outside the backbone or is its last layer."""
    if not 0 <= layer < num_layers:
        raise UserError(
            f"config.svgt.layer: layer {layer} lies outside the backbone; its {num_layers} layers are 0 to {num_layers - 1}"
        )
    if layer == num_layers - 1:
        raise UserError(
            f"config.svgt.layer: {layer} is the last of {num_layers} layers, so no layer is left to see the bridge; "
            f"choose at most {num_layers - 2}"
        )


@dataclass(frozen=True)
class Svgt:
    """The value space and the bridge of one backbone.

    layer          l*, from 0: its output is what the value space reads, and the layers above it see the bridge
    refresh_every  R: tokens from one proposal to the next
    momentum       β: B <- β B + (1 - β) proposal
    """

    value: ValueSpaceConfig
    bridge_config: BridgeConfig | InjectionConfig
    layer: int
    refresh_every: int
    momentum: float
    name: str = "svgt"

    def __post_init__(self):
        if self.layer < 0:
            raise UserError(f"config.svgt.layer: layer {self.layer} lies outside the backbone; layers count from 0")
        if self.refresh_every < 1:
            raise UserError(
                f"config.svgt.refresh_every: got {self.refresh_every}, expected at least 1 token; published is 5"
            )
        if not 0 <= self.momentum < 1:
            raise UserError(
                f"config.svgt.momentum: got {self.momentum}, expected in [0, 1): at 1 the bridge would never change; "
                "published is 0.8"
            )
        for field in ("embed_dim", "value_dim"):
            ours, theirs = getattr(self.value, field), getattr(self.bridge_config, field)
            if ours != theirs:
                raise ValueError(f"{field} of the value space is {ours}, of the bridge {theirs}; they are the same width")

    @property
    def boundary(self) -> int:
        """Where the value space reads the stream: after layer l*."""
        return self.layer + 1

    @property
    def value_space(self) -> ValueSpace:
        """The functions of the value space; its parameters are those at `value_space`."""
        return ValueSpace(self.value)

    @property
    def injects(self) -> bool:
        """Whether this is the control SVGT-Inject, which adds to the stream at l* and has no bridge."""
        return isinstance(self.bridge_config, InjectionConfig)

    @property
    def slots(self) -> int:
        """K: how many slots and positions the bridge takes behind a prompt."""
        return 0 if self.injects else self.bridge_config.num_tokens

    @property
    def bridge(self) -> Bridge | Injection:
        """The functions of the bridge; its parameters are those at `bridge`."""
        return Injection(self.bridge_config) if self.injects else Bridge(self.bridge_config)

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters of both, float32."""
        first, second = jax.random.split(key)
        return {"value_space": self.value_space.init(first), "bridge": self.bridge.init(second)}
