# megathunder on CUDA: torch, SGLang, Megatron-Core, Transformer Engine and NVIDIA's apex, every one pinned.
#
#   docker build -t megathunder .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --security-opt seccomp=unconfined --security-opt \
#       apparmor=unconfined -v /models:/models megathunder python tools/train.py --config C.toml --plan
#
# Python packages are those of requirements/, which setup.py reads too. apex is NVIDIA's, from its source: the project
# of that name on the Python package index is another one. The sandboxes need user namespaces inside the container,
# which Docker's default seccomp and AppArmor profiles refuse.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

ARG PIP_VERSION=26.2

ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HF_HUB_OFFLINE=1

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The base image's tag fixes the distribution; its security updates are wanted, so versions are not.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap build-essential ca-certificates git ibverbs-providers libibverbs1 libnuma1 ninja-build numactl \
        python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv \
    && pip install "pip==${PIP_VERSION}"

WORKDIR /opt/megathunder
COPY requirements requirements

# torch first: what follows is built against it, and a build for CUDA 13 is what the index serves for Linux.
RUN pip install -r requirements/torch.txt -r requirements/base.txt \
    && python -c 'import torch; assert torch.version.cuda.split(".")[0] == "13", torch.version.cuda'

# SGLang with its own list of CUDA dependencies, Megatron-Core beside it.
RUN pip install -r requirements/engines.txt -r requirements/torch.txt -r requirements/base.txt

# What is compiled from here on: Transformer Engine's torch part, then apex.
ARG CUDA_ARCHITECTURES="9.0;10.0"
ARG BUILD_JOBS=8
ENV TORCH_CUDA_ARCH_LIST=${CUDA_ARCHITECTURES} MAX_JOBS=${BUILD_JOBS} NVTE_FRAMEWORK=pytorch
RUN pip install --no-build-isolation -r requirements/gpu.txt -r requirements/torch.txt

ARG APEX_TAG=26.09
RUN git clone --depth 1 --branch "${APEX_TAG}" https://github.com/NVIDIA/apex.git /tmp/apex \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps /tmp/apex \
    && rm -rf /tmp/apex \
    && python -c 'import amp_C; from apex.optimizers import FusedAdam'

RUN pip install -r requirements/wandb.txt -r requirements/test.txt

COPY . .
RUN pip install --no-deps --no-build-isolation -e . \
    && python -c 'import megathunder, sglang, megatron.core, transformer_engine.pytorch'

CMD ["python", "tools/train.py", "--help"]
