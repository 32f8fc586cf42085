"""Torch kernels for NVFP4 weights: one folder per operation. Never imports vLLM."""
