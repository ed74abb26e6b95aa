"""Strings as tensors, and back."""
