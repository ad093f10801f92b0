"""A target on ONNX Runtime, for the Llama-like families on a CPU."""
