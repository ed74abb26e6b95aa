"""A tree of dicts on one device: its state, its copies, and what its values may be."""
