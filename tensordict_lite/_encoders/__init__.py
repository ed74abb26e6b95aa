"""String encoders: encode strings as tensors and decode tensors to strings."""
