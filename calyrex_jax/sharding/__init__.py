"""The device mesh and the strict rules that place every leaf on it."""
