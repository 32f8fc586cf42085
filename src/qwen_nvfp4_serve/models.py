"""The checkpoints people serve, as a table, and what a MODEL value means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from qwen_nvfp4_serve.dims import Dims, VisionDims
from qwen_nvfp4_serve.errors import UsageError, printable

Scheme = Literal["BF16", "FP8", "NVFP4 W4A4", "NVFP4 W4A16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The scheme each module class is stored in. `ffn` is the routed experts or the dense MLP."""

    gdn: Scheme
    attention: Scheme
    ffn: Scheme
    shared_expert: Scheme
    lm_head: Scheme
    mtp: Scheme = "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Settings that suit `gpu` (a name of the card table), and why; the context is always the largest that fits."""

    gpu: str
    seqs: int
    batched_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One catalogue entry.

    repo: hub id, None for the embedded model. revision: 40-hex commit, None while none is recorded. download_bytes:
    size on the hub as published, None where unknown (the planner then computes it). also: other checkpoints of the same
    dims. dims None: read them from the folder's config.json.
    """

    name: str
    title: str
    repo: str | None
    revision: str | None
    quantization: str
    dims: Dims | None
    precision: Precision
    has_mtp: bool
    download_bytes: int | None
    recommended: tuple[Recommendation, ...]
    note: str
    also: tuple[str, ...] = ()


def _vision(out_hidden: int) -> VisionDims:
    return VisionDims(
        depth=27,
        hidden=1152,
        intermediate=4304,
        patch=16,
        temporal_patch=2,
        merge=2,
        channels=3,
        positions=2304,
        out_hidden=out_hidden,
    )


# Read from safetensors headers of the 3.6 checkpoints; Qwen3.5's own config.json and the 3.8 sibling agree.
DIMS_35B_A3B = Dims(
    hidden=2048,
    attention_layers=10,
    gdn_layers=30,
    q_heads=16,
    kv_heads=2,
    head_dim=256,
    gdn_key_heads=16,
    gdn_value_heads=32,
    gdn_key_dim=128,
    gdn_value_dim=128,
    conv_kernel=4,
    vocab=248_320,
    max_context=262_144,
    experts=256,
    experts_per_token=8,
    expert_intermediate=512,
    shared_intermediate=512,
    mtp_layers=1,
    vision=_vision(2048),
)
DIMS_27B = Dims(
    hidden=5120,
    attention_layers=16,
    gdn_layers=48,
    q_heads=24,
    kv_heads=4,
    head_dim=256,
    gdn_key_heads=16,
    gdn_value_heads=48,
    gdn_key_dim=128,
    gdn_value_dim=128,
    conv_kernel=4,
    vocab=248_320,
    max_context=262_144,
    intermediate=17_408,
    mtp_layers=1,
    vision=_vision(5120),
)
# From the model card: 60 layers as 15 x (3 GDN + 1 attention), 512 experts of width 1,024, 10 of them per token.
DIMS_397B_A17B = Dims(
    hidden=4096,
    attention_layers=15,
    gdn_layers=45,
    q_heads=32,
    kv_heads=2,
    head_dim=256,
    gdn_key_heads=16,
    gdn_value_heads=64,
    gdn_key_dim=128,
    gdn_value_dim=128,
    conv_kernel=4,
    vocab=248_320,
    max_context=262_144,
    experts=512,
    experts_per_token=10,
    expert_intermediate=1024,
    shared_intermediate=1024,
    mtp_layers=1,
    vision=_vision(4096),
)

_FITS_ALL = "the weights leave room for the full context several times over"
RECOMMENDED_35B: tuple[Recommendation, ...] = (
    Recommendation(
        gpu="rtx-5090",
        seqs=4,
        batched_tokens=4096,
        reason="one 262,144-token request takes 2.64 GiB; others saw prefill 27 times slower here at 12,288 batched",
    ),
    Recommendation(gpu="rtx-pro-6000", seqs=32, batched_tokens=8192, reason=_FITS_ALL),
    Recommendation(
        gpu="gb10",
        seqs=4,
        batched_tokens=4096,
        reason="273 GB/s bounds decode, and the memory is the host's too: budget from MemAvailable",
    ),
    Recommendation(gpu="h200", seqs=64, batched_tokens=8192, reason=_FITS_ALL),
    Recommendation(gpu="b200", seqs=64, batched_tokens=8192, reason=_FITS_ALL),
)
RECOMMENDED_27B: tuple[Recommendation, ...] = (
    Recommendation(
        gpu="rtx-5090",
        seqs=2,
        batched_tokens=4096,
        reason="262,144 tokens take 8.33 GiB beside the weights, so a second sequence is short: two share what is left",
    ),
    Recommendation(gpu="rtx-pro-6000", seqs=16, batched_tokens=8192, reason=_FITS_ALL),
    Recommendation(gpu="gb10", seqs=2, batched_tokens=4096, reason="273 GB/s bounds decode to about 16 tokens/s"),
    Recommendation(gpu="h200", seqs=32, batched_tokens=8192, reason=_FITS_ALL),
    Recommendation(gpu="b200", seqs=32, batched_tokens=8192, reason=_FITS_ALL),
)

MODELS: tuple[ModelRow, ...] = (
    ModelRow(
        name="qwen3.5-35b-a3b",
        title="Qwen3.5-35B-A3B",
        repo="Kbenkhaled/Qwen3.5-35B-A3B-NVFP4",
        revision=None,
        quantization="modelopt",
        dims=DIMS_35B_A3B,
        precision=Precision(
            gdn="BF16", attention="NVFP4 W4A4", ffn="NVFP4 W4A4", shared_expert="NVFP4 W4A4", lm_head="BF16"
        ),
        has_mtp=True,
        download_bytes=23_000_000_000,
        recommended=RECOMMENDED_35B,
        note="GDN, gates, router, lm_head and MTP stay BF16; published size 22 to 24 GB",
        also=("Sehyo/Qwen3.5-35B-A3B-NVFP4", "AxionML/Qwen3.5-35B-A3B-NVFP4", "txn545/Qwen3.5-35B-A3B-NVFP4"),
    ),
    ModelRow(
        name="qwen3.5-27b",
        title="Qwen3.5-27B",
        repo="Kbenkhaled/Qwen3.5-27B-NVFP4",
        revision=None,
        quantization="modelopt",
        dims=DIMS_27B,
        # GDN cannot be BF16 here: that alone would be 11 GB more than the published 19 to 21 GB.
        precision=Precision(
            gdn="NVFP4 W4A4", attention="NVFP4 W4A4", ffn="NVFP4 W4A4", shared_expert="NVFP4 W4A4", lm_head="BF16"
        ),
        has_mtp=True,
        download_bytes=20_000_000_000,
        recommended=RECOMMENDED_27B,
        note="published size 19 to 21 GB, from which a quantized GDN is inferred",
        also=("AxionML/Qwen3.5-27B-NVFP4",),
    ),
    ModelRow(
        name="qwen3.5-397b-a17b",
        title="Qwen3.5-397B-A17B",
        repo="nvidia/Qwen3.5-397B-A17B-NVFP4",
        revision=None,
        quantization="modelopt",
        dims=DIMS_397B_A17B,
        precision=Precision(gdn="BF16", attention="BF16", ffn="NVFP4 W4A4", shared_expert="NVFP4 W4A4", lm_head="BF16"),
        has_mtp=True,
        download_bytes=None,
        recommended=(),
        note="217 GB in its experts alone: several data-centre cards, no single one in the table",
    ),
    ModelRow(
        name="qwen3.6-35b-a3b",
        title="Qwen3.6-35B-A3B",
        repo="nvidia/Qwen3.6-35B-A3B-NVFP4",
        revision=None,
        quantization="modelopt_mixed",
        dims=DIMS_35B_A3B,
        precision=Precision(
            gdn="FP8", attention="FP8", ffn="NVFP4 W4A16", shared_expert="NVFP4 W4A16", lm_head="NVFP4 W4A16"
        ),
        has_mtp=True,
        download_bytes=23_400_000_000,
        recommended=RECOMMENDED_35B,
        note="attention and GDN in FP8, MTP in BF16; declares an FP8 KV cache and ships no scales for it",
        also=("RedHatAI/Qwen3.6-35B-A3B-NVFP4", "unsloth/Qwen3.6-35B-A3B-NVFP4"),
    ),
    ModelRow(
        name="qwen3.6-27b",
        title="Qwen3.6-27B",
        repo="nvidia/Qwen3.6-27B-NVFP4",
        revision=None,
        quantization="modelopt_mixed",
        dims=DIMS_27B,
        precision=Precision(
            gdn="FP8", attention="FP8", ffn="NVFP4 W4A16", shared_expert="NVFP4 W4A16", lm_head="NVFP4 W4A16"
        ),
        has_mtp=True,
        download_bytes=21_900_000_000,
        recommended=RECOMMENDED_27B,
        note="attention and GDN in FP8, MTP in BF16; declares an FP8 KV cache and ships no scales for it",
        also=("unsloth/Qwen3.6-27B-NVFP4",),
    ),
    ModelRow(
        name="qwen3.8-27b",
        title="Qwen3.8-27B",
        repo="RedHatAI/Qwen3.8-27B-NVFP4",
        revision=None,
        quantization="compressed-tensors",
        dims=DIMS_27B,
        precision=Precision(
            gdn="FP8", attention="NVFP4 W4A4", ffn="NVFP4 W4A4", shared_expert="NVFP4 W4A4", lm_head="BF16"
        ),
        has_mtp=True,
        download_bytes=None,
        recommended=RECOMMENDED_27B,
        note="GDN is BF16 or 8-bit in this publisher's exports: run inspect before a plan that must hold",
        also=("RadixArk/Qwen3.8-27B-NVFP4",),
    ),
    ModelRow(
        name="embedded",
        title="embedded model",
        repo=None,
        revision=None,
        quantization="compressed-tensors",
        dims=None,
        precision=Precision(
            gdn="NVFP4 W4A4",
            attention="NVFP4 W4A4",
            ffn="NVFP4 W4A4",
            shared_expert="NVFP4 W4A4",
            lm_head="BF16",
            mtp="NVFP4 W4A4",
        ),
        has_mtp=True,
        download_bytes=0,
        recommended=(),
        note="trained here, answers generated tasks, small enough for a CPU; comes with this package",
    ),
)

MODEL_NAMES: tuple[str, ...] = tuple(row.name for row in MODELS)
# What is served where MODEL is unset.
DEFAULT_ON_CARD, DEFAULT_WITHOUT_CARD = "qwen3.5-35b-a3b", "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """What a MODEL value means: exactly one of a catalogue row, a local folder, a hub id.

    `row` is set for a catalogue name and for a hub id that is a row's `repo`. `repo` and `revision` say what to fetch.
    """

    given: str
    row: ModelRow | None = None
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None


SHOWN_CHARS, SHOWN_PATH_CHARS = 60, 255  # of a MODEL that is refused
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(name: str) -> ModelRow | None:
    """The row called `name` (case ignored), or the one whose `repo` is `name`; None when the table has neither."""
    wanted = name.strip().lower()
    return next((row for row in MODELS if wanted == row.name or (row.repo and wanted == row.repo.lower())), None)


def resolve_model(given: str) -> ModelRef:
    """What `given` names: a catalogue name, a folder (exists, or starts with `/ . ~`), or `owner/name` on the hub.

    Raises UsageError for a folder without config.json and for a name that is none of the three.
    """
    text = given.strip()
    row = find_model(text)
    if row is not None:
        return ModelRef(given=text, row=row, repo=row.repo, revision=row.revision)
    try:
        path = Path(text).expanduser()
        if text and (path.is_dir() or text.startswith(("/", ".", "~"))):
            return ModelRef(given=text, path=_checked_folder(path))
    except (OSError, ValueError, RuntimeError) as error:  # too long, not allowed, NUL, ~user without a home
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).rstrip(".")
        raise _unknown(given, do=f"As a path: {reason}.") from None
    if _HUB_ID.fullmatch(text) and ".." not in text:
        return ModelRef(given=text, repo=text)
    near = get_close_matches(text.lower(), MODEL_NAMES, n=1)
    raise _unknown(given, do=f"Did you mean {near[0]}?" if near else None)


def resolve_knob(given: str) -> ModelRef:
    """`resolve_model` for the knob MODEL, which its errors name."""
    try:
        return resolve_model(given)
    except UsageError as error:
        raise UsageError(f"MODEL: {error.what}", seen=error.seen, expected=error.expected, do=error.do) from None


def _unknown(given: str, *, do: str | None) -> UsageError:
    expected = f"one of {', '.join(MODEL_NAMES)}, a folder with config.json, or a hub id owner/name"
    return UsageError("unknown model", seen=printable(repr(given), SHOWN_CHARS), expected=expected, do=do)


def _checked_folder(path: Path) -> Path:
    what = f"model folder {printable(str(path), SHOWN_PATH_CHARS)}"
    if not path.is_dir():
        seen = "a file" if path.is_file() else "nothing there"
        raise UsageError(what, seen=seen, expected="a folder with config.json and *.safetensors")
    if not (path / "config.json").is_file():
        raise UsageError(what, seen="no config.json", expected="config.json and *.safetensors")
    return path
