"""What every other room stands on: batches, parameter trees, user errors."""
