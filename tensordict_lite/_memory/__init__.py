"""Where tensors lie in memory, and how they get to another device. Knows tensors and devices, no dict."""
