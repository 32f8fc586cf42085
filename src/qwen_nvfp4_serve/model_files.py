"""The files of the model that is served: looked at before they are there, and brought here."""

from __future__ import annotations

from pathlib import Path

from qwen_nvfp4_serve.checkpoint import Report as CheckpointReport
from qwen_nvfp4_serve.checkpoint import (
    inspect_folder,
    inspect_source,
    knows_type,
    plan_model,
    require_servable,
)
from qwen_nvfp4_serve.fetch import fetch, snapshot_here
from qwen_nvfp4_serve.host import hub_folder
from qwen_nvfp4_serve.hub import HubUnreachableError, open_repo
from qwen_nvfp4_serve.launch import Model
from qwen_nvfp4_serve.models import ModelRef
from qwen_nvfp4_serve.planner import PlanModel
from qwen_nvfp4_serve.settings import Settings
from qwen_nvfp4_serve.stages import Report, Stage, progress_message

PROGRESS_EVERY_S = 5.0


def planned_model(
    ref: ModelRef, model: Model, settings: Settings, report: Report, *, ask_hub: bool = False
) -> PlanModel | None:
    """The model as the planner sees it: by its own headers where they can be read, else the catalogue's row, else None.

    ask_hub: read those of a model that is not on this disk from the hub. Raises QwenNvfp4Error for a model that vLLM
    would fail to load; what is merely odd about it is reported.
    """
    is_embedded = ref.row is not None and ref.row.repo is None
    folder = Path(model.source) if model.local else snapshot_here(model.source, hub_cache(settings), model.revision)
    if folder is not None:
        return plan_model(inspected(folder, settings, _silent if is_embedded else report), model.ids[0])
    found = _on_the_hub(model, settings) if ask_hub and not settings.hf_hub_offline else None
    if found is not None:
        return plan_model(_servable(found, report), model.ids[0])
    return PlanModel.from_row(ref.row, ref.row.dims) if ref.row and ref.row.dims else None


def _silent(_stage: Stage, _message: str) -> None:
    return


def inspected(folder: Path, settings: Settings, report: Report) -> CheckpointReport:
    """What the folder's headers say. Raises QwenNvfp4Error for the first fault that vLLM would stumble over."""
    found = inspect_folder(folder, speculative_tokens=settings.speculative_tokens, vision=settings.vision)
    return _servable(found, report)


def _servable(found: CheckpointReport, report: Report) -> CheckpointReport:
    require_servable(found)
    for warning in found.warnings:
        report("notice", f"checkpoint: {warning.says}. {warning.do}")
    return found


def _on_the_hub(model: Model, settings: Settings) -> CheckpointReport | None:
    """What the headers on the hub say; None where it cannot be reached, which the download will say better."""
    try:
        source = open_repo(model.source, revision=model.revision, token=_token(settings))
    except HubUnreachableError:
        return None
    return inspect_source(
        source,
        speculative_tokens=settings.speculative_tokens,
        vision=settings.vision,
        knows_type=knows_type(str(source.config.get("model_type"))),
    )


def download(model: Model, settings: Settings, report: Report) -> None:
    """Bring the weights of a hub model here, checked, so that what follows neither waits nor fails for them."""
    report("download", f"{model.source}: asking the hub")
    found = fetch(
        model.source,
        cache=hub_cache(settings),
        revision=model.revision,
        token=_token(settings),
        offline=settings.hf_hub_offline,
        on_progress=lambda state: report("download", progress_message(state)),
        interval_s=PROGRESS_EVERY_S,
    )
    if found.notice:
        report("notice", found.notice)
    report("verify", f"{model.source} at {found.commit[:12]} is complete and matches its hashes")
    inspected(found.folder, settings, _silent)


def _token(settings: Settings) -> str | None:
    return settings.hf_token.get_secret_value() if settings.hf_token else None


def hub_cache(settings: Settings) -> Path:
    """Where vLLM will look for the files of a hub model."""
    return hub_folder(settings.hf_home)
