"""A compressed-tensors config, applied as vLLM 0.33 does.

Read from vLLM 0.33.0: quantization/compressed_tensors/compressed_tensors.py (get_scheme_dict, from_config),
quantization/compressed_tensors/utils.py (targets), quantization/utils/config_utils.py (ignore lists).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qwen_nvfp4_serve.checkpoint.naming import CLASSES, FUSED, Unit, vllm_module
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN, Patterns, SchemeError, SplitError, mapped, matched, name_list

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors:
    """`quantization_config` of llm-compressor and others. targets: label by pattern; named: the same patterns."""

    ignore: Patterns
    targets: Mapping[str, str]
    named: Patterns
    declares_kv_scales: bool
    text_only: bool
    unknown: tuple[str, ...] = ()

    def scheme(self, unit: Unit) -> str:
        """The label for `unit`."""
        if unit.is_plain:
            return PLAIN
        name = vllm_module(unit, text_only=self.text_only)
        if unit.leaf == "experts":
            labels = {part: self._part(f"{name}.0.{part}", "RoutedExperts") for part in EXPERT_PARTS}
            if len(set(labels.values())) > 1:
                raise SplitError(unit.name, ", ".join(f"{part} is {label}" for part, label in labels.items()))
            return labels["gate_proj"]
        return self._part(name, CLASSES[unit.leaf], unit.name)

    def _part(self, name: str, class_name: str, shown: str = "") -> str:
        if self._is_ignored(name, shown):
            return PLAIN
        target = self.named.first(name) or self._fused_target(name) or self._class_target(class_name)
        return PLAIN if target is None else self.targets[target]

    def _is_ignored(self, name: str, shown: str) -> bool:
        if self.ignore.first(name):
            return True
        leaf = name.rpartition(".")[2]
        parts = {part: name.replace(leaf, part) for part in FUSED.get(leaf, ())}
        ignored = [part for part, path in parts.items() if self.ignore.first(path)]
        if ignored and len(ignored) < len(parts):
            others = [part for part in parts if part not in ignored]
            raise SplitError(shown or name, f"{' and '.join(ignored)} ignored, {' and '.join(others)} not")
        return bool(ignored)

    def _fused_target(self, name: str) -> str | None:
        leaf = next((fused for fused in FUSED if name.endswith(fused)), None)
        if leaf is None:
            return None
        found = [self.named.first(name.replace(leaf, part)) for part in FUSED[leaf]]
        labels = {self.targets[target] for target in found if target is not None}
        if len(labels) > 1:
            raise SplitError(name, f"parts are {' and '.join(sorted(labels))}")
        return found[0] if all(found) else None

    def _class_target(self, class_name: str) -> str | None:
        wanted = "linear" if class_name == "RoutedExperts" else class_name.lower()
        for target in self.targets:
            if target.startswith("re:"):
                if matched(re.compile(target[3:]), target, class_name):
                    return target
            elif target.lower() in wanted or target == class_name:
                return target
        return None


def read_compressed_tensors(config: Mapping[str, object], *, text_only: bool) -> CompressedTensors:
    """The resolver of a config. Raises SchemeError for what vLLM would not understand."""
    targets: dict[str, str] = {}
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise SchemeError("config", ("config_groups",), "config_groups is not an object")
    for group_name, group in groups.items():
        names = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SchemeError("config", (str(group_name),), f"config group {group_name} has no list of targets")
        if len(names) == 1 and names[0].endswith("Attention"):
            continue  # vLLM leaves such groups to the KV cache
        label = _group_label(str(group_name), group, str(config.get("format", "")))
        targets |= {mapped(name, text_only=text_only): label for name in names}
    ignore = name_list(config.get("ignore"), "ignore")
    for pattern in (*ignore, *targets):
        _check_pattern(pattern)
    return CompressedTensors(
        ignore=Patterns(mapped(name, text_only=text_only) for name in ignore),
        targets=targets,
        named=Patterns(targets),
        declares_kv_scales=bool(config.get("kv_cache_scheme")),
        text_only=text_only,
    )


def _group_label(name: str, group: Mapping[str, object], file_format: str) -> str:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if weights is None:
        # The published minimum: a group without numbers takes them from the format.
        if "nvfp4" in str(group.get("format") or file_format):
            return "NVFP4 W4A4"
        raise SchemeError("unknown-algorithm", (name,), f"config group {name} says nothing about its weights")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping | None):
        raise SchemeError("config", (name,), f"config group {name}: weights or input_activations is not an object")
    bits, kind, size = weights.get("num_bits"), str(weights.get("type", "int")), weights.get("group_size")
    if kind == "float" and bits == 4 and size == 16:
        if inputs is not None and inputs.get("num_bits") != 4:
            seen = f"{inputs.get('num_bits')}-bit activations"
            raise SchemeError("unknown-algorithm", (name,), f"config group {name}: NVFP4 weights with {seen}")
        return "NVFP4 W4A16" if inputs is None else "NVFP4 W4A4"
    if kind == "float" and bits == 8:
        return "MXFP8" if size == 32 else "FP8"
    if kind == "float" and bits == 4 and size == 32:
        return "MXFP4"
    if kind == "int" and bits in (4, 8):
        return f"INT{bits}"
    raise SchemeError(
        "unknown-algorithm", (name,), f"config group {name}: {bits}-bit {kind} in groups of {size} is unknown"
    )


def _check_pattern(pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except (re.error, OverflowError, RecursionError) as error:
            raise SchemeError("config", (pattern,), f"pattern {pattern!r} is no regular expression: {error}") from None
