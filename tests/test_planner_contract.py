"""The planner's counting against vLLM's own functions, for dims and settings drawn at random."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_nvfp4_serve import shims
from qwen_nvfp4_serve.dims import Dims
from qwen_nvfp4_serve.gpus import find_gpu
from qwen_nvfp4_serve.models import DIMS_27B, DIMS_35B_A3B, MODELS
from qwen_nvfp4_serve.planner import PlanModel, PlanRequest
from qwen_nvfp4_serve.planner.cache import CacheLayout, cache_layout

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vllm_cache() -> Any:
    """vLLM's planning module: kv_cache_planning since 0.33, kv_cache_utils before."""
    shims.install()
    pytest.importorskip("vllm", reason="vLLM is not installed")
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning
    return planning


def request_for(dims: Dims, **values: Any) -> PlanRequest:
    return PlanRequest(model=PlanModel.from_row(MODELS[0], dims), **values)


def random_request(generator: random.Random) -> PlanRequest:
    """Real dims with other layer counts and heads, and any settings."""
    dims = dataclasses.replace(
        generator.choice([DIMS_35B_A3B, DIMS_27B]),
        attention_layers=generator.randint(2, 24),
        gdn_layers=generator.randint(2, 72),
        kv_heads=generator.choice([1, 2, 4, 8]),
        head_dim=generator.choice([128, 256]),
        gdn_value_heads=generator.choice([16, 32, 48, 64]),
    )
    gpu = generator.choice(["rtx-5090", "h200", "b200", "rtx-4090", None])
    return request_for(
        dims,
        gpu=find_gpu(gpu) if gpu else None,
        kv_dtype=generator.choice(["fp8", "bfloat16"]),
        prefix_caching=generator.random() < 0.7,
        speculative_tokens=generator.choice([0, 0, 1, 2, 3, 7]),
        gdn_prefill=generator.choice([None, "triton", "flashinfer"]),
        state_dtype=generator.choice([None, "bfloat16"]),
    )


def fake_config(request: PlanRequest, context: int) -> Any:
    """As much of a VllmConfig as the planning functions read."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    mode = "align" if request.prefix_caching else "none"
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=context),
        cache_config=SimpleNamespace(
            mamba_cache_mode=mode,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )


def layer_specs(request: PlanRequest, layout: CacheLayout, context: int) -> dict[str, Any]:
    """The specs that vLLM's layers would hand in, with the block size that the planner found."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    dims, drafts, align = request.model.dims, request.speculative_tokens, request.prefix_caching
    channels = 2 * dims.gdn_key_heads * dims.gdn_key_dim + dims.gdn_value_heads * dims.gdn_value_dim
    attention = FullAttentionSpec(
        block_size=layout.block_tokens,
        num_kv_heads=dims.kv_heads,
        head_size=dims.head_dim,
        dtype=torch.uint8 if request.kv_dtype == "fp8" else torch.bfloat16,
    )
    mamba = MambaSpec(
        block_size=layout.block_tokens if align else context,
        shapes=((channels, 3 + drafts), (dims.gdn_value_heads, dims.gdn_value_dim, dims.gdn_key_dim)),
        dtypes=(torch.bfloat16, torch.float32 if request.state == "float32" else torch.bfloat16),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align" if align else "none",
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=int(align and request.prefill == "flashinfer"),
    )
    heads = dims.attention_layers + (dims.mtp_layers if drafts else 0)
    named = {f"gdn.{index}": mamba for index in range(dims.gdn_layers)}
    return named | {f"attention.{index}": attention for index in range(heads)}


@pytest.mark.parametrize("seed", range(200))
def test_cache_layout_random_request_counts_as_vllm_does(vllm_cache: Any, seed: int) -> None:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    generator = random.Random(seed)
    request, context = random_request(generator), generator.randint(100, 400_000)
    layout = cache_layout(request)
    config, specs = fake_config(request, context), layer_specs(request, layout, context)
    groups = vllm_cache.get_kv_cache_groups(config, dict(specs))
    assert len(groups) == layout.attention_groups + layout.gdn_groups
    assert vllm_cache._pool_bytes_per_block(config, groups) == layout.block_bytes
    pool = generator.randint(layout.block_bytes, 400 * layout.block_bytes)
    planned = vllm_cache.get_kv_cache_config_from_groups(config, groups, pool)
    blocks = layout.pool_blocks(pool)
    assert planned.num_blocks == blocks
    concurrency = get_max_concurrency_for_kv_cache_config(config, planned)
    assert int(concurrency * context) == layout.pool_tokens(blocks, context)


@pytest.mark.parametrize("seed", range(30))
def test_largest_context_is_the_one_that_vllm_admits(vllm_cache: Any, seed: int) -> None:
    generator = random.Random(1000 + seed)
    request = random_request(generator)
    layout = cache_layout(request)
    blocks = generator.randint(layout.least_blocks + 1, 300)
    largest = layout.largest_context(blocks)
    specs = layer_specs(request, layout, largest)
    vllm_cache.check_enough_kv_cache_memory(fake_config(request, largest), dict(specs), blocks * layout.block_bytes)
    longer = fake_config(request, largest + 1)
    groups = vllm_cache.get_kv_cache_groups(longer, layer_specs(request, layout, largest + 1))
    taken = [
        group.kv_cache_spec.max_memory_usage_bytes(longer) / group.kv_cache_spec.page_size_bytes for group in groups
    ]
    assert sum(map(math.ceil, taken)) > blocks - 1


@pytest.mark.parametrize("kv_dtype", ["fp8", "bfloat16"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("dims", [DIMS_35B_A3B, DIMS_27B], ids=["35b", "27b"])
@pytest.mark.parametrize("cards", [1, 2, 4])
def test_block_size_is_what_vllms_platform_aligns_to(
    vllm_cache: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dims: Dims,
    kv_dtype: str,
    state_dtype: str,
    drafts: int,
    cards: int,
) -> None:
    """`Platform._align_hybrid_block_size`, driven with the model's shapes and a backend of 16-token pages."""
    import torch
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform

    class Backend:
        @staticmethod
        def get_supported_kernel_block_sizes() -> list[int]:
            return [16, 32, 64]

        @staticmethod
        def customize_spec(spec: Any) -> Any:
            return spec

    channels = 2 * dims.gdn_key_heads * dims.gdn_key_dim + dims.gdn_value_heads * dims.gdn_value_dim
    shapes = (
        (channels // cards, 3 + drafts),
        (dims.gdn_value_heads // cards, dims.gdn_value_dim, dims.gdn_key_dim),
    )
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: shapes,
        get_mamba_state_dtype_from_config=lambda _: (torch.bfloat16, getattr(torch, state_dtype)),
    )
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (model, None))
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", classmethod(lambda *_: [Backend]))
    monkeypatch.setattr("vllm.config.vllm.set_current_vllm_config", lambda _: contextlib.nullcontext())
    cache = SimpleNamespace(
        cache_dtype=kv_dtype,
        kv_cache_dtype_skip_layers=[],
        block_size=16,
        mamba_cache_mode="none",
        mamba_page_size_padded=None,
    )
    config = SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=False,
            architecture="x",
            get_num_kv_heads=lambda _: max(1, dims.kv_heads // cards),
            get_head_size=lambda: dims.head_dim,
        ),
        parallel_config=None,
    )
    Platform._align_hybrid_block_size(config, Backend)
    request = request_for(
        dims,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        speculative_tokens=drafts,
        tensor_parallel=cards,
        gdn_prefill="triton",
    )
    assert cache.block_size == cache_layout(request).block_tokens
