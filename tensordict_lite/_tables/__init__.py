"""Save dicts and load them: safetensors files, tables, ``torch.save`` files, and the manifest that they share."""
