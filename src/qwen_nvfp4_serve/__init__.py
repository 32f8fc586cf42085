"""Serve Qwen3.5 in NVFP4 with vLLM: settings, planning, checks and launch. Importable without torch, vLLM or a GPU."""

__version__ = "0.1.0"
