"""Losses, optimiser and the pure train step."""
