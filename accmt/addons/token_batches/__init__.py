"""Batches by the lengths of samples: `max_tokens`, `packing`, `group_by_length`, and the largest micro-batch."""
