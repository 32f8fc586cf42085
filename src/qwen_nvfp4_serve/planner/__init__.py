"""Weights, KV, recurrent state, graphs and workspaces against a card's memory, in bytes, each with its reason."""

from __future__ import annotations

from qwen_nvfp4_serve.planner.alternatives import alternatives
from qwen_nvfp4_serve.planner.plan import plan
from qwen_nvfp4_serve.planner.request import PlanModel, PlanRequest
from qwen_nvfp4_serve.planner.result import JSON_KEYS, Plan, PlanBytes, Roofline
from qwen_nvfp4_serve.planner.weights import WeightBytes, weight_bytes

__all__ = [
    "JSON_KEYS",
    "Plan",
    "PlanBytes",
    "PlanModel",
    "PlanRequest",
    "Roofline",
    "WeightBytes",
    "alternatives",
    "plan",
    "weight_bytes",
]
