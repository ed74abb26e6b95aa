"""Many dicts into one, one loader into batches on a device, and plain containers."""
