# The program and its pinned packages; `docker run --rm IMAGE` trains tiny_cpu. See docs/launching.md.
#
#   GPUs:  docker build --tag mlperf-bert --build-arg REVISION="$(git rev-parse HEAD)" .
#   CPUs:  docker build --tag mlperf-bert-cpu --build-arg BASE=python:3.12-slim-bookworm --build-arg EXTRAS= .
#          (gigabytes smaller with --secret id=pip,src=FILE, where FILE is a pip.conf with the index of PyTorch's CPU builds)
#
# BASE needs bash and CPython 3.11 or newer with pip. If it contains PyTorch, as NGC's images do, the base's PyTorch, NumPy and
# setuptools are used; this PyTorch must be 2.11 or newer (26.02 and 26.03 have 2.11). Otherwise, the pinned PyTorch is installed.
# A tag may be moved: for the same image every time, give BASE the digest that `docker buildx imagetools inspect TAG` prints.
ARG BASE=nvcr.io/nvidia/pytorch:26.03-py3
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN useradd --create-home --uid 10001 bert
WORKDIR /workspace/bert

# Install packages first, so that this layer is rebuilt only when a pin changes. NGC's image pins other versions of packages with
# PIP_CONSTRAINT. Its packages stay unchanged, and .venv holds this repository's versions. The configuration that pip needs to
# reach an index may hold a password. It is a build secret, which the image does not keep, because the image's history would show
# a build argument.
COPY pyproject.toml constraints.txt hashes.txt ./
COPY launch/environment.sh launch/venv.sh launch/
ARG EXTRAS="dali"
# hadolint ignore=SC2086  # one word per extra
RUN --mount=type=secret,id=pip,target=/run/secrets/pip.conf \
    set -eu; [ ! -e /run/secrets/pip.conf ] || export PIP_CONFIG_FILE=/run/secrets/pip.conf; \
    unset PIP_CONSTRAINT; export PIP_NO_CACHE_DIR=1; \
    ! python3 -c 'import torch' 2>/dev/null || export SYSTEM_TORCH=1; \
    . launch/venv.sh; \
    prepare_venv ${EXTRAS}; \
    .venv/bin/python -m compileall -qq .venv/lib || true; \
    .venv/bin/python -c 'import numpy, torch; print(torch.__version__, torch.__file__, torch.from_numpy(numpy.zeros(1)))'

COPY . .
RUN mkdir data results && chown bert: data results && .venv/bin/python -m compileall -qq bert cluster compliance console dataloading kernels \
    && .venv/bin/python -c 'import importlib, kernels.libraries as adapters, pkgutil; \
[importlib.import_module(found.name) for found in pkgutil.iter_modules(adapters.__path__, "kernels.libraries.")]'

ARG REVISION=unknown
LABEL org.opencontainers.image.title="mlperf-bert" \
      org.opencontainers.image.description="MLPerf Training BERT, from Wikipedia text to a log that the official checkers accept" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"

# Any user can run the image (docker run --user), because runs write only to data/, results/ and /tmp. Results name the commit.
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1 MLPERF_BERT_COMMIT=${REVISION}
USER 10001
VOLUME ["/workspace/bert/data", "/workspace/bert/results"]

# The container is healthy while a Python process runs. The check is cheap, so that it does not disturb the timed run.
HEALTHCHECK --interval=60s --timeout=5s --start-period=30s --retries=3 \
    CMD ["bash", "-c", "grep -qs '[.]venv/bin/python' /proc/[0-9]*/cmdline"]

# If the driver is older than the image, NGC's entrypoint puts CUDA's compatibility libraries on the path.
ENTRYPOINT ["bash", "-c", "exec $(ls /opt/nvidia/nvidia_entrypoint.sh 2>/dev/null) ./run_and_time.sh \"$@\"", "run_and_time.sh"]
CMD ["tiny_cpu"]
