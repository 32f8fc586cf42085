# Three images from one file: `gpu` (vLLM's own image and our package), `cpu` (the packages of scripts/serve) and
# `tools` (smoke and bench, without vLLM). Build one with `docker compose build gpu`, `cpu` or `smoke`.
# /opt/qwen-nvfp4 holds what an image was made from: our wheel, the check that it passed, on `gpu` the kernels.
ARG GPU_BASE=vllm/vllm-openai:v0.33.0
ARG CPU_BASE=python:3.11-slim-bookworm


FROM ${CPU_BASE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md ./
COPY src ./src
COPY patches ./patches
RUN python3 -m venv /build \
    && /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist .
COPY docker/check_image.py /dist/


FROM ${CPU_BASE} AS python
# libnuma: vLLM's CPU backend is linked with it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && (getent passwd 1000 || useradd --uid 1000 --user-group --home-dir /cache --no-create-home qwen) \
    && install --directory --owner=1000 --group=1000 /cache /cache/huggingface
ENV HOME=/cache \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
RUN python3 -m venv /opt/venv
ARG CPU_BASE
LABEL org.opencontainers.image.base.name="${CPU_BASE}"
WORKDIR /config


FROM python AS tools
COPY requirements/cpu.lock /opt/qwen-nvfp4/
COPY --from=wheel /dist /opt/qwen-nvfp4
RUN pip install --no-cache-dir --constraint /opt/qwen-nvfp4/cpu.lock /opt/qwen-nvfp4/*.whl \
    && install --directory --owner=1000 --group=1000 /results
ENV MPLCONFIGDIR=/tmp/matplotlib
LABEL org.opencontainers.image.title="qwen-nvfp4-serve: smoke test and benchmark of a running server"
USER 1000:1000
ENTRYPOINT ["qwen-nvfp4"]


FROM python AS cpu
# Packages first: they change seldom, and take minutes.
COPY requirements/cpu.lock /opt/install/requirements/
COPY src/qwen_nvfp4_serve/__init__.py src/qwen_nvfp4_serve/bootstrap.py src/qwen_nvfp4_serve/host.py /opt/install/src/qwen_nvfp4_serve/
RUN mkdir /opt/install/.venv \
    && PYTHONPATH=/opt/install/src python -c "from qwen_nvfp4_serve import bootstrap; bootstrap.install_locked([bootstrap.sys.executable, '-m', 'pip', 'install', '--quiet', '--no-cache-dir', '--no-deps'], 'cpu')" \
    && rm -r /opt/install
COPY --from=wheel /dist /opt/qwen-nvfp4
RUN pip install --no-cache-dir --no-deps /opt/qwen-nvfp4/*.whl \
    && python /opt/qwen-nvfp4/check_image.py cpu
# No C++ compiler here: serving runs without compilation, and says nothing about it since this is how the image is meant.
ENV QWEN_NVFP4_CONTAINER=cpu \
    DEVICE=cpu \
    ENFORCE_EAGER=1 \
    CACHE_DIR=/cache/qwen-nvfp4 \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    XDG_CACHE_HOME=/cache/xdg \
    XDG_CONFIG_HOME=/cache/config
LABEL org.opencontainers.image.title="qwen-nvfp4-serve: a small Qwen3.5 in NVFP4 on vLLM's CPU backend"
VOLUME ["/cache"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=40s --start-period=30m --retries=2 CMD ["qwen-nvfp4", "ready"]
USER 1000:1000
ENTRYPOINT ["qwen-nvfp4", "serve"]


# Our kernels, for every card in the table of kernels/build.py. Only what they are compiled from: it takes minutes.
FROM ${GPU_BASE} AS kernels
WORKDIR /source
COPY src/qwen_nvfp4_serve/__init__.py src/qwen_nvfp4_serve/errors.py ./src/qwen_nvfp4_serve/
COPY src/qwen_nvfp4_serve/kernels/__init__.py src/qwen_nvfp4_serve/kernels/build.py ./src/qwen_nvfp4_serve/kernels/
COPY src/qwen_nvfp4_serve/kernels/nvfp4_linear/csrc ./src/qwen_nvfp4_serve/kernels/nvfp4_linear/csrc
COPY src/qwen_nvfp4_serve/kernels/nvfp4_moe/csrc ./src/qwen_nvfp4_serve/kernels/nvfp4_moe/csrc
COPY src/qwen_nvfp4_serve/kernels/bf16_linear/csrc ./src/qwen_nvfp4_serve/kernels/bf16_linear/csrc
COPY src/qwen_nvfp4_serve/kernels/gdn_decode/csrc ./src/qwen_nvfp4_serve/kernels/gdn_decode/csrc
RUN PYTHONPATH=src python3 -m qwen_nvfp4_serve.kernels.build /kernels


FROM ${GPU_BASE} AS gpu
USER 0
WORKDIR /config
RUN (getent passwd 1000 || useradd --uid 1000 --user-group --home-dir /cache --no-create-home qwen) \
    && install --directory --owner=1000 --group=1000 /cache /cache/huggingface
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
ARG PIP_BREAK_SYSTEM_PACKAGES=1
# FlashInfer's prebuilt kernels, where the base lacks them: without them a first start compiles for minutes. By
# FlashInfer's own command, since vLLM's needs a card to start; vLLM says at every start when they are missing.
ARG FLASHINFER_KERNELS=download
RUN if [ "$FLASHINFER_KERNELS" = download ] && ! python3 -c "import flashinfer_cubin, flashinfer_jit_cache" 2>/dev/null; then \
    PIP_NO_CACHE_DIR=1 python3 -m flashinfer download-kernels \
    || echo "WARNING: no prebuilt kernels for this FlashInfer could be had"; fi
COPY --from=kernels /kernels /opt/qwen-nvfp4/kernels
COPY --from=wheel /dist /opt/qwen-nvfp4
# The base keeps vLLM in the system's Python, and what it has is not replaced.
RUN python3 -m pip install --no-cache-dir --upgrade-strategy only-if-needed /opt/qwen-nvfp4/*.whl \
    && ln -s /opt/qwen-nvfp4/kernels "$(python3 -c 'from qwen_nvfp4_serve.kernels.build import PREBUILT; print(PREBUILT)')" \
    && python3 /opt/qwen-nvfp4/check_image.py gpu
# HOME comes last: what root's imports leave there must not be in a volume of user 1000.
ENV HOME=/cache \
    QWEN_NVFP4_CONTAINER=gpu \
    DEVICE=cuda \
    CACHE_DIR=/cache/qwen-nvfp4 \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    CUDA_CACHE_PATH=/cache/cuda \
    CUDA_CACHE_MAXSIZE=4294967296 \
    XDG_CACHE_HOME=/cache/xdg \
    XDG_CONFIG_HOME=/cache/config
ARG GPU_BASE
LABEL org.opencontainers.image.title="qwen-nvfp4-serve: Qwen3.5 in NVFP4 on one NVIDIA card, with vLLM as the engine" \
      org.opencontainers.image.base.name="${GPU_BASE}"
VOLUME ["/cache"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=40s --start-period=2h --retries=2 CMD ["qwen-nvfp4", "ready"]
USER 1000:1000
ENTRYPOINT ["qwen-nvfp4", "serve"]
