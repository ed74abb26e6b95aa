"""A dict as plain data, and as a file."""
