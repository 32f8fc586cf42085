"""What can be wrong with a checkpoint: one record for each kind, and the findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from qwen_nvfp4_serve.errors import printable

MAX_NAMES = 16
MOST_CHARS = 400  # of a sentence: names come from the checkpoint, and may be anything


class Severity(Enum):
    """ERROR stops `serve`, WARNING does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One finding. names: modules, files or keys, at most MAX_NAMES of them; says: a sentence; do: what to do."""

    code: str
    names: tuple[str, ...]
    says: str
    do: str


# code -> what to do about it. The sentence is made where the fault is found.
DO = {
    "config": "Download config.json again, or choose another checkpoint.",
    "architecture": "Choose a checkpoint of the Qwen3.5 family (3.5, 3.6 or 3.8); other models are not served here.",
    "transformers": "Install a newer transformers: pip install -U transformers.",
    "remote-code": "Nothing: its code is never run, the model type is built in.",
    "unknown-method": "Choose a checkpoint in compressed-tensors or ModelOpt NVFP4.",
    "unknown-algorithm": "Choose a checkpoint quantized with FP8, NVFP4, W4A16_NVFP4 or MIXED_PRECISION.",
    "slow-pattern": "Write it without repetitions inside repetitions, or choose another export.",
    "fused-split": "Add the missing names to the ignore list, or take the others out: vLLM runs these matrices as one.",
    "ignored-but-packed": "Take it off the ignore list or name it among the targets, or choose a consistent export.",
    "quantized-but-plain": "Add the module to the ignore list, or choose an export that is consistent.",
    "scheme-differs": "Correct the module's entry in the quantization config, or choose another export.",
    "nvfp4-in-name-only": "Choose an export with packed weights: this one is as large as the BF16 original.",
    "undeclared": "Restore quantization_config in config.json or hf_quant_config.json.",
    "missing-scale": "Download the shard again, or choose another export: without its scale a matrix is noise.",
    "scale-shape": "Download the shard again, or choose another export: vLLM could not load this matrix.",
    "bad-scale": "Download the shard again, or choose another export: every answer would be noise.",
    "unequal-scales": "Keep NVFP4_BACKEND=auto: stock vLLM takes one scale for all parts, row-scaled ones are exact.",
    "quantized-mtp-fc": "Set SPECULATIVE_TOKENS=0: drafts from a quantized mtp.fc are never accepted.",
    "gated-q-proj": "Compare answers with an export that keeps attention in FP8 or BF16.",
    "kernel-dims": "Choose an export that leaves these modules in BF16.",
    "odd-dims": "Nothing where the kernel pads; on a card without native FP4 choose another export.",
    "no-mtp": "Set SPECULATIVE_TOKENS=0, or choose a checkpoint that ships its mtp.* tensors.",
    "no-vision": "Set VISION=0, or choose a checkpoint that ships its vision tower.",
    "kv-scales": "Nothing: vLLM uses a scale of 1. If long answers degrade, set KV_CACHE_DTYPE=bfloat16.",
    "shard": "Delete the file and download it again: qwen-nvfp4 fetch.",
    "missing-shard": "Download what is missing: qwen-nvfp4 fetch.",
    "missing": "Download the shards and config.json again from one revision: qwen-nvfp4 fetch.",
    "shape": "Download the shards and config.json again from one revision: one of them belongs to another model.",
    "duplicate": "Keep one of the files: without an index, which of the two counts is the loader's choice.",
    "index": "Download model.safetensors.index.json and the shards again from one revision.",
    "short": "Download the shards again: qwen-nvfp4 fetch.",
    "no-weights": "Download the *.safetensors files: qwen-nvfp4 fetch.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One place where something is wrong. Findings of one code, severity and `topic` become one fault."""

    severity: Severity
    code: str
    name: str
    says: str
    topic: str = ""


def collect(findings: Iterable[Finding], severity: Severity) -> tuple[Fault, ...]:
    """The faults of one severity, in the order of their first finding; the first one's sentence speaks for all."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.severity is severity:
            groups.setdefault((finding.code, finding.topic), []).append(finding)
    return tuple(_fault(group) for group in groups.values())


def _fault(group: list[Finding]) -> Fault:
    names = tuple(dict.fromkeys(finding.name for finding in group))
    more = f" (and {len(names) - 1:,} more like it)" if len(names) > 1 else ""
    says = printable(group[0].says, MOST_CHARS) + more
    return Fault(code=group[0].code, names=names[:MAX_NAMES], says=says, do=DO[group[0].code])
