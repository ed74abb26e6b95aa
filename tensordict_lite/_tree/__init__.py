"""A tree of dicts on one device: state, copies, options and conversion of values."""
