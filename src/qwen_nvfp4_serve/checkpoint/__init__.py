"""What a checkpoint really is: config.json and safetensors headers -> precision by module, faults, bytes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from qwen_nvfp4_serve.checkpoint.faults import Fault
from qwen_nvfp4_serve.checkpoint.report import Report, inspect_source
from qwen_nvfp4_serve.checkpoint.source import Source, open_folder, without_collector
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.models import MODELS
from qwen_nvfp4_serve.planner import PlanModel

__all__ = [
    "Fault",
    "Report",
    "Source",
    "inspect_folder",
    "inspect_source",
    "knows_type",
    "open_folder",
    "plan_model",
    "require_servable",
]


@without_collector()
def inspect_folder(folder: Path, *, speculative_tokens: int = 0, vision: bool = False) -> Report:
    """The report on a checkpoint folder. Raises UsageError when there is none or its JSON files are broken."""
    source = open_folder(folder)
    known = knows_type(str(source.config.get("model_type")))
    return inspect_source(source, speculative_tokens=speculative_tokens, vision=vision, knows_type=known)


def knows_type(model_type: str) -> bool | None:
    """Whether the installed transformers or vLLM has `model_type`; None when neither is installed. Imports nothing."""
    base = model_type.removesuffix("_text")
    if not re.fullmatch(r"\w{1,64}", base):
        return False  # it becomes a file name below
    found = [
        (Path(spec.submodule_search_locations[0]) / where).exists()
        for package, where in (
            ("transformers", f"models/{base}"),
            ("vllm", f"transformers_utils/configs/{base}.py"),
        )
        if (spec := importlib.util.find_spec(package)) is not None and spec.submodule_search_locations
    ]
    return any(found) if found else None


def plan_model(report: Report, name: str) -> PlanModel:
    """The checkpoint as the planner sees it. Raises UsageError when config.json does not give its dimensions."""
    if report.dims is None or report.weights is None:
        broken = next((fault for fault in report.errors if fault.code in ("config", "architecture")), None)
        if broken is not None:
            raise UsageError(f"checkpoint {report.place}: {broken.says}", do=broken.do)
        raise UsageError(
            f"checkpoint {report.place}", seen="no model_type in config.json", expected="one of the Qwen3.5 family"
        )
    dims = report.dims
    shape = (dims.hidden, dims.layers, dims.experts)
    row = next(
        (row for row in MODELS if row.dims and shape == (row.dims.hidden, row.dims.layers, row.dims.experts)), None
    )
    return PlanModel(
        name=name,
        dims=dims,
        weights=report.weights,
        has_mtp=report.mtp if report.size_bytes else None,
        weights_read=report.weights_read,
        recommended=row.recommended if row else (),
    )


def require_servable(report: Report) -> None:
    """Raises QwenNvfp4Error with the first error of the report; warnings pass."""
    if report.errors:
        first, rest = report.errors[0], len(report.errors) - 1
        more = f" ({rest} more: qwen-nvfp4 inspect {report.place})" if rest else ""
        raise QwenNvfp4Error(f"checkpoint {report.place}: {first.says}", do=first.do + more)
