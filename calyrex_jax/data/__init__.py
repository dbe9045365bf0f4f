"""From messages and files to tokens, spans, targets and batches."""
