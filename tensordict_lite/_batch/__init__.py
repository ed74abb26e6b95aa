"""Join dicts, collate samples, prefetch batches, and move plain containers."""
