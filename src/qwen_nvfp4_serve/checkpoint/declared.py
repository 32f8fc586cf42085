"""Which quantization a checkpoint declares, and the resolver for it."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_nvfp4_serve.checkpoint.compressed_tensors import read_compressed_tensors
from qwen_nvfp4_serve.checkpoint.modelopt import LAYERS, MIXED, read_modelopt
from qwen_nvfp4_serve.checkpoint.schemes import Resolver, SchemeError, Unquantized


def resolver_for(config: Mapping[str, object], hf_quant: Mapping[str, object] | None, *, text_only: bool) -> Resolver:
    """The resolver for what config.json, else hf_quant_config.json, declares, both as parsed JSON.

    Raises SchemeError naming what vLLM would refuse or misread.
    """
    quantization = _declared(config, hf_quant)
    if not quantization:
        return Unquantized()
    if not isinstance(quantization, Mapping):
        raise SchemeError("config", ("quantization_config",), "quantization_config is not an object")
    method = str(quantization.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        found = read_compressed_tensors(quantization, text_only=text_only)
        return found if found.targets else Unquantized(declares_kv_scales=found.declares_kv_scales)
    if method.startswith("modelopt") or "quantization" in quantization or "quant_algo" in quantization:
        return read_modelopt(quantization, text_only=text_only)
    raise SchemeError(
        "unknown-method", (method or "quant_method",), f"quantization method {method!r} is not known here"
    )


def _declared(config: Mapping[str, object], hf_quant: Mapping[str, object] | None) -> object:
    """Where vLLM 0.33 looks, in its order: transformers_utils/config.py, model_loader/weight_utils.py."""
    text = config.get("text_config")
    in_text = text.get("quantization_config") if isinstance(text, Mapping) else None
    found = config.get("quantization_config") or hf_quant or in_text or config.get("compression_config")
    if hf_quant and isinstance(found, Mapping) and found.get("quant_algo") == MIXED and not found.get(LAYERS):
        return hf_quant  # older ModelOpt names the algorithm in config.json, and its layers in the other file alone
    return found
