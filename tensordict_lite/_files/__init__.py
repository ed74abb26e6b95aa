"""Save dicts to safetensors files and load them, and replace files atomically."""
