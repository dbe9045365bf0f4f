"""Where in depth the system prompt's rule lives: pairs of conversations, compared, probed, patched, and what CAL looks at."""
