"""Save dicts to files and load them: the manifest, safetensors files and ``torch.save`` files."""
