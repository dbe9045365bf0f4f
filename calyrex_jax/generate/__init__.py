"""Generation with a key/value cache, and the log-probabilities of given conversations."""
