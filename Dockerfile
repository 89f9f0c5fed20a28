# The training image: from a base with or without Python, torch, Open MPI and ssh to one that runs a job.
#
# make image                  CPU, on a Debian base built on this machine
# make image BASE_IMAGE=...   on another base; what it has (torch, Open MPI, EFA and NCCL plug-ins) is kept
ARG BASE_IMAGE=smp-estimator-base:bookworm
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Only what the base lacks is installed: a base for EFA brings its own Open MPI, built against its libfabric.
# The host keys that the ssh package makes are removed: every host of a job makes its own when it starts.
# Versions are the base's choice: pinned ones vanish from Debian's and Ubuntu's archives with each update.
# hadolint ignore=DL3008
RUN missing=() \
    && { command -v python3 >/dev/null || missing+=(python3); } \
    && { python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip); } \
    && { command -v mpirun >/dev/null || missing+=(openmpi-bin); } \
    && { command -v ssh >/dev/null || missing+=(openssh-client); } \
    && { command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || missing+=(openssh-server); } \
    && if [ "${#missing[@]}" -gt 0 ]; then \
        apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}" \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    fi \
    && rm -f /etc/ssh/ssh_host_*

# What the project depends on. The wheels are mounted and so add no layer.
RUN --mount=type=bind,source=build/wheels,target=/mnt/wheels \
    --mount=type=bind,source=docker/dependencies.sh,target=/mnt/dependencies.sh \
    /mnt/dependencies.sh /mnt/wheels sagemaker-training==5.1.4 \
        "pydantic>=2.7" "rich>=13" "click>=8.1" numpy "mpi4py>=4" safetensors "xxhash>=3"

RUN --mount=type=bind,source=build/project,target=/mnt/project \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps --root-user-action ignore \
        --disable-pip-version-check /mnt/project/*.whl \
    && python3 -c 'import smp_launch, smp_runtime, smdistributed.modelparallel, sagemaker_training'

# A user's requirements.txt installs into the same Python.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 \
    SAGEMAKER_TRAINING_MODULE=smp_launch.sagemaker.toolkit:main

ARG VERSION=unknown
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="smp-estimator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.licenses="Apache-2.0"

WORKDIR /opt/ml
# The platform runs the image with the argument "train".
ENTRYPOINT ["smp-launch"]
CMD ["train"]
