"""Which weights an engine ran, by the bytes that it loaded: a bound of other weights says nothing about its rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qwen_nvfp4_serve.bench.engine import EngineRun
from qwen_nvfp4_serve.models import ModelRow
from qwen_nvfp4_serve.planner import PlanModel
from qwen_nvfp4_serve.units import GIB

TOLERANCE = 0.05  # of the counted bytes: above padding and repacked copies, below another precision of a module class


def measured_model(row: ModelRow, runs: Sequence[EngineRun]) -> PlanModel:
    """The entry's shape in the precision that was measured: the table's, or GDN in BF16, as llm-compressor leaves it.

    The table's where neither comes to what the runs loaded: `is_measured` is then False.
    """
    if row.dims is None:
        raise ValueError(f"{row.name} has no dimensions in the table")
    kept = replace(row.precision, gdn="BF16")
    models = [
        replace(
            PlanModel.from_row(replace(row, precision=stored), row.dims), name=f"{row.title} with GDN in {stored.gdn}"
        )
        for stored in (row.precision, kept)
    ]
    return next((model for model in models if is_measured(model, runs)), models[0])


def is_measured(model: PlanModel, runs: Sequence[EngineRun]) -> bool:
    """True where every run says what it loaded, and all loaded about what these weights come to."""
    counted = text_bytes(model)
    return all(run.model_bytes is not None and abs(run.model_bytes - counted) <= TOLERANCE * counted for run in runs)


def text_bytes(model: PlanModel) -> int:
    """Bytes of the weights that a text-only engine loads without a drafter."""
    return model.weights.decoder + model.weights.embeddings


def weights_line(model: PlanModel, runs: Sequence[EngineRun]) -> str:
    """What the weights were, or why no share of a bound is said."""
    kind = "Dummy weights" if all(run.options.get("load_format") == "dummy" for run in runs) else "Weights"
    counted = f"{text_bytes(model) / GIB:.2f} GiB"
    if is_measured(model, runs):
        return f"{kind} of the shape of {model.name}, {counted} as the byte roofline counts them."
    sizes = [f"{run.model_bytes / GIB:.2f} GiB" for run in runs if run.model_bytes is not None]
    loaded = f"the engines loaded {', '.join(sizes)}" if sizes else "the engines do not say what they loaded"
    return f"No share of the byte roofline: {model.name} comes to {counted}, and {loaded}."
