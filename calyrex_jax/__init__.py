"""calyrex_jax: structural safety for frozen language models through small trained modules."""

__version__ = "0.1.0"
