"""A ModelOpt config, applied as vLLM 0.33 does.

Read from vLLM 0.33.0: quantization/modelopt.py (LINEAR_ALGOS, is_layer_excluded, _resolve_quant_algo, the name
mapping), quantization/utils/quant_utils.py (is_layer_skipped), models/qwen3_5_mtp.py (mtp.fc).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qwen_nvfp4_serve.checkpoint.naming import FUSED, Unit, vllm_module
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN, SchemeError, SplitError, mapped, name_list

ALGORITHMS = {
    "FP8": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8",
    "FP8_PB_WO": "FP8",
    "FP8_BLOCK_SCALES": "FP8",
    "NVFP4": "NVFP4 W4A4",
    "W4A16_NVFP4": "NVFP4 W4A16",
    "MXFP8": "MXFP8",
}
MIXED = "MIXED_PRECISION"
LAYERS = "quantized_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOpt:
    """ModelOpt's config. algorithm: one for all, or MIXED with an algorithm by module in `layers`.

    exclude: names and globs. below: the first algorithm in `layers` under each name that is a beginning of theirs.
    unknown: modules in `layers` whose algorithm is in no table.
    """

    algorithm: str
    exclude: frozenset[str]
    layers: Mapping[str, str]
    below: Mapping[str, str]
    unknown: tuple[str, ...]
    declares_kv_scales: bool
    text_only: bool

    def scheme(self, unit: Unit) -> str:
        """The label for `unit`."""
        if unit.is_plain:
            return PLAIN
        name = vllm_module(unit, text_only=self.text_only)
        is_mixed = self.algorithm == MIXED
        if unit.name == "mtp.fc" and not is_mixed and self.algorithm in ("NVFP4", "W4A16_NVFP4"):
            return PLAIN  # forced by vLLM for ModelOpt's pure NVFP4
        if self._is_excluded(name, unit.name):
            return PLAIN
        algorithm = self._layer_algorithm(name, unit.name) if is_mixed else self.algorithm
        return ALGORITHMS.get(algorithm or "", PLAIN)

    def _is_excluded(self, name: str, shown: str) -> bool:
        if self._is_skipped(name, shown):
            return True
        short = name.removeprefix("language_model.")
        # vLLM also takes an entry as a part of a name, so `layers.1` covers `layers.10`.
        if any(entry != name and (entry in name or entry in short) for entry in self.exclude):
            return True
        return any(fnmatchcase(name, entry) for entry in self.exclude if "*" in entry or "?" in entry or "[" in entry)

    def _is_skipped(self, name: str, shown: str) -> bool:
        leaf = name.rpartition(".")[2]
        if name in self.exclude:
            return True
        if leaf in FUSED:
            parts = FUSED[leaf]
            skipped = [part for part in parts if name.replace(leaf, part) in self.exclude]
            if skipped and len(skipped) < len(parts):
                others = [part for part in parts if part not in skipped]
                raise SplitError(shown, f"{' and '.join(skipped)} excluded, {' and '.join(others)} not")
            return bool(skipped)
        return leaf == "experts" and any(name in entry for entry in self.exclude if "experts" in entry)

    def _layer_algorithm(self, name: str, shown: str) -> str | None:
        leaf = name.rpartition(".")[2]
        for candidate in self._candidates(name):
            if candidate in self.layers:
                return self.layers[candidate]
        stem = name.removesuffix(leaf)
        found = {
            self.layers[c] for part in FUSED.get(leaf, ()) for c in self._candidates(stem + part) if c in self.layers
        }
        if len(found) > 1:
            raise SplitError(shown, f"parts are {' and '.join(sorted(found))}")
        if found:
            return found.pop()
        owners = [*self._candidates(name), *([stem.removesuffix(".")] if leaf == "experts" else [])]
        return next((self.below[owner] for owner in owners if owner in self.below), None)

    def _candidates(self, name: str) -> tuple[str, ...]:
        if name.endswith(".lm_head"):
            return (name, "lm_head")
        if name.startswith("language_model.model."):
            return (name, "model.language_model." + name.removeprefix("language_model.model."))
        return (name,)


def read_modelopt(config: Mapping[str, object], *, text_only: bool) -> ModelOpt:
    """The resolver of a config, as in config.json or nested as in hf_quant_config.json. Raises SchemeError."""
    inner = config.get("quantization")
    nested = isinstance(inner, Mapping)
    body: Mapping[str, object] = inner if isinstance(inner, Mapping) else config
    algorithm = str(body.get("quant_algo") or "").upper()
    if algorithm not in (*ALGORITHMS, MIXED):
        what = f"quant_algo {algorithm}" if algorithm else "no quant_algo"
        raise SchemeError(
            "unknown-algorithm", (algorithm or "quant_algo",), f"ModelOpt config with {what}, unknown to vLLM"
        )
    layers = body.get(LAYERS) or {}
    if not isinstance(layers, Mapping) or (algorithm == MIXED and not layers):
        raise SchemeError("config", (LAYERS,), "MIXED_PRECISION without a list of quantized_layers")
    keys = ("exclude_modules",) if nested else ("ignore", "exclude_modules")
    exclude = next((name_list(body[key], key) for key in keys if key in body), [])
    declares = bool(body.get("kv_cache_quant_algo")) if nested else bool(body.get("kv_cache_scheme"))
    algorithms = {name: _algorithm(name, entry) for name, entry in layers.items()}  # 30,000 of a large model
    by_name = {mapped(name, text_only=text_only): found for name, found in algorithms.items()}
    return ModelOpt(
        algorithm=algorithm,
        exclude=frozenset(mapped(name, text_only=text_only) for entry in exclude for name in _without_star(entry)),
        layers=by_name,
        below=_first_below(by_name),
        unknown=tuple(name for name, found in algorithms.items() if found not in ALGORITHMS),
        declares_kv_scales=declares,
        text_only=text_only,
    )


def _first_below(layers: Mapping[str, str]) -> dict[str, str]:
    """For every beginning of the names, at a dot, the algorithm of the first name that has it."""
    below: dict[str, str] = {}
    for name, algorithm in layers.items():
        owner = name.rpartition(".")[0]
        while owner and owner not in below:
            below[owner] = algorithm
            owner = owner.rpartition(".")[0]
    return below


def _algorithm(name: str, entry: object) -> str:
    if not isinstance(entry, Mapping):
        raise SchemeError("config", (name,), f"quantized_layers entry {name} is not an object")
    return str(entry.get("quant_algo", "")).upper()


def _without_star(entry: str) -> tuple[str, ...]:
    """`path*` as vLLM splits it before it maps names: the module, and everything below it."""
    if len(entry) >= 2 and entry.endswith("*") and not entry.endswith(".*"):
        return (entry[:-1], entry[:-1] + ".*")
    return (entry,)
