"""What a checkpoint really is: precision by module class, faults, and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from qwen_nvfp4_serve.checkpoint import patience
from qwen_nvfp4_serve.checkpoint.check_files import check_files
from qwen_nvfp4_serve.checkpoint.check_modules import SeverityOf, check_modules, is_packed
from qwen_nvfp4_serve.checkpoint.check_scales import check_scales
from qwen_nvfp4_serve.checkpoint.check_whole import check_whole
from qwen_nvfp4_serve.checkpoint.contents import Contents, group_tensors
from qwen_nvfp4_serve.checkpoint.declared import resolver_for
from qwen_nvfp4_serve.checkpoint.faults import Fault, Finding, Severity, collect
from qwen_nvfp4_serve.checkpoint.naming import Area
from qwen_nvfp4_serve.checkpoint.schemes import Resolver, SchemeError, SplitError, Unquantized
from qwen_nvfp4_serve.checkpoint.sizes import weights_of
from qwen_nvfp4_serve.checkpoint.source import Source
from qwen_nvfp4_serve.dims import MODEL_TYPES, Dims, dims_from_config
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.planner.weights import WeightBytes

# vLLM 0.33.0, model_executor/models/registry.py: it picks the model by these names, not by model_type.
ARCHITECTURES = tuple(
    f"Qwen3_5{kind}For{head}" for kind in ("", "Moe") for head in ("ConditionalGeneration", "CausalLM")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """Label by module class, as vLLM will see it, and the layers of a class that differ from most of it."""

    by_class: Mapping[str, str]
    exceptions: tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An inspected checkpoint. dims and weights are None when config.json does not give them; bytes_per_token too.

    errors stop `serve`, warnings do not. mtp, vision: whether such tensors are there. weights_read: False when weights
    are estimated from config.json, since shards are not there or cannot be read.
    """

    place: str
    precision: Precisions
    errors: tuple[Fault, ...]
    warnings: tuple[Fault, ...]
    mtp: bool
    vision: bool
    kv_scales_declared: bool
    kv_scales_shipped: bool
    bytes_per_token: int | None
    size_bytes: int
    dims: Dims | None
    weights: WeightBytes | None
    weights_read: bool


def inspect_source(
    source: Source, *, speculative_tokens: int = 0, vision: bool = False, knows_type: bool | None = None
) -> Report:
    """The report on a checkpoint whose parts were read.

    speculative_tokens, vision: what will be asked of it; faults of parts that stay unused are warnings.
    knows_type: whether the installed transformers has the model type, None when it is not installed.
    """
    contents = group_tensors(shard.tensors for shard in source.shards)
    findings = [*check_files(source), *_check_config(source, knows_type)]
    readable = not any(finding.severity is Severity.ERROR for finding in findings)
    resolver = _resolver(source, findings)
    dims = _dims(source, findings)

    def severity_of(area: Area) -> Severity:
        used = {Area.LANGUAGE: True, Area.MTP: speculative_tokens > 0, Area.VISUAL: vision}
        return Severity.ERROR if used[area] else Severity.WARNING

    if resolver is not None:
        try:
            with patience.limited():
                findings += _named_only(list(check_modules(contents, resolver, severity_of)), contents)
                findings += check_scales(source, contents, severity_of)
                findings += _check_extras(contents, resolver, dims, severity_of)
        except SchemeError as error:
            resolver = _refused(error, findings)
    if dims is not None and readable:  # what a broken file held is not known
        findings += check_whole(contents, dims, source.config)
    if speculative_tokens and not contents.has_mtp:
        findings.append(
            _error("no-mtp", "mtp", f"{speculative_tokens} draft tokens asked, but no tensor is named mtp.*")
        )
    if vision and not contents.has_vision and contents.groups:
        findings.append(_error("no-vision", "visual", "the vision tower is asked for, but no tensor belongs to one"))
    if not contents.groups and not any(finding.severity is Severity.ERROR for finding in findings):
        findings.append(_error("no-weights", "*.safetensors", f"{source.place} has no *.safetensors file with tensors"))
    whole = bool(source.shards) and not any(finding.code in ("shard", "missing-shard") for finding in findings)
    held = contents if whole else group_tensors(())
    weights = weights_of(held, dims, resolver or Unquantized(), source.config)
    return Report(
        place=source.place,
        precision=_precisions(contents, resolver or Unquantized()),
        errors=collect(findings, Severity.ERROR),
        warnings=collect(findings, Severity.WARNING),
        mtp=contents.has_mtp,
        vision=contents.has_vision,
        kv_scales_declared=resolver is not None and resolver.declares_kv_scales,
        kv_scales_shipped=contents.has_kv_scales,
        bytes_per_token=weights.per_token if weights else None,
        size_bytes=sum(shard.size_bytes or 0 for shard in source.shards),
        dims=dims,
        weights=weights,
        weights_read=whole,
    )


def _error(code: str, name: str, says: str) -> Finding:
    return Finding(severity=Severity.ERROR, code=code, name=name, says=says)


def _warning(code: str, name: str, says: str) -> Finding:
    return Finding(severity=Severity.WARNING, code=code, name=name, says=says)


def _check_config(source: Source, knows_type: bool | None) -> list[Finding]:
    config, findings = source.config, []
    model_type = config.get("model_type")
    if model_type is not None and model_type not in MODEL_TYPES:
        says = f"config.json says model_type {model_type!r}, which is not of the Qwen3.5 family"
        findings.append(_error("architecture", "model_type", says))
    elif model_type is None and not config.get("quantization_config") and not source.hf_quant:
        findings.append(_error("config", "model_type", "config.json names no model_type"))
    elif model_type is not None and knows_type is False:
        says = f"the installed transformers does not know model type {model_type!r}"
        findings.append(_error("transformers", str(model_type), says))
    named = config.get("architectures")
    if isinstance(named, list) and named and not any(name in ARCHITECTURES for name in named):
        says = f"config.json names the architecture {named[0]!r}, which is not of the Qwen3.5 family"
        findings.append(_error("architecture", "architectures", says))
    if config.get("auto_map"):
        findings.append(_warning("remote-code", "auto_map", "config.json names code to run (auto_map)"))
    return findings


def _resolver(source: Source, findings: list[Finding]) -> Resolver | None:
    text_only = str(source.config.get("model_type", "")).endswith("_text")
    try:
        resolver = resolver_for(source.config, source.hf_quant, text_only=text_only)
    except SchemeError as error:
        return _refused(error, findings)
    findings += [
        _error("unknown-algorithm", name, f"{name} has an algorithm that vLLM does not know")
        for name in resolver.unknown
    ]
    return resolver


def _refused(error: SchemeError, findings: list[Finding]) -> Resolver | None:
    """No resolver, and the reason among the findings."""
    findings += [_error(error.code, name, error.says) for name in error.names]
    return None


def _dims(source: Source, findings: list[Finding]) -> Dims | None:
    if source.config.get("model_type") not in MODEL_TYPES:
        return None
    try:
        return dims_from_config(source.config)
    except UsageError as error:
        findings.append(_error("config", error.what.removeprefix("config.json: "), error.sentence()))
        return None


def _named_only(findings: list[Finding], contents: Contents) -> list[Finding]:
    """One finding in place of many, for an export that declares NVFP4 and packed nothing."""
    plain = [finding for finding in findings if finding.code == "quantized-but-plain" and "NVFP4" in finding.says]
    if not plain or any(is_packed(module) for group in contents.groups.values() for module in group.modules):
        return findings
    says = "the config declares NVFP4, but every matrix is stored in BF16"
    rest = [finding for finding in findings if finding not in plain]
    return [Finding(severity=plain[0].severity, code="nvfp4-in-name-only", name=plain[0].name, says=says), *rest]


def _check_extras(contents: Contents, resolver: Resolver, dims: Dims | None, severity_of: SeverityOf) -> list[Finding]:
    findings = []
    fc = contents.groups.get("mtp.fc")
    if fc is not None and any(is_packed(module) for module in fc.modules):
        says = f"mtp.fc is stored as {fc.modules[0].label}: drafts will not be accepted"
        findings.append(Finding(severity=severity_of(Area.MTP), code="quantized-mtp-fc", name="mtp.fc", says=says))
    gated = [
        module.name
        for group in contents.groups.values()
        if group.unit.kind == "qkv_proj" and (dims is None or dims.output_gate)
        for module in group.modules
        if module.name.endswith("q_proj") and module.label == "NVFP4"
    ]
    findings += [
        _warning("gated-q-proj", name, f"{name} holds query and output gate, both in 4 bits") for name in gated
    ]
    if resolver.declares_kv_scales and not contents.has_kv_scales and "lm_head" in contents.groups:
        findings.append(_warning("kv-scales", "k_scale", "a quantized KV cache is declared, but no scales are shipped"))
    return findings


def _precisions(contents: Contents, resolver: Resolver) -> Precisions:
    labels: dict[str, dict[str, list[int]]] = {}
    for group in contents.groups.values():
        unit = group.unit
        if unit.is_plain and unit.leaf not in ("embed_tokens", "gate"):
            continue
        try:
            label = resolver.scheme(unit)
        except SplitError:
            label = "mixed"
        labels.setdefault(unit.kind, {}).setdefault(label, []).append(-1 if unit.layer is None else unit.layer)
    by_class, exceptions = {}, []
    for kind, layers in labels.items():
        most = Counter({label: len(found) for label, found in layers.items()}).most_common(1)[0][0]
        by_class[kind] = most
        exceptions += [(kind, label, tuple(sorted(found))) for label, found in layers.items() if label != most]
    return Precisions(by_class=by_class, exceptions=tuple(exceptions))
