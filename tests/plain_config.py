"""The defaults alone, for command lines that name every field they need."""

from calyrex_jax.config import default_config


def get_config():
    return default_config()
