# One image for everything in a cluster: agents, the pods that supervise runs, worker and keeper,
# the Prefect servers.
#
#   docker build -t registry.example.com/perdure:0.1.0-910b .
#   docker build -t registry.example.com/perdure:0.1.0 --build-arg EXTRAS=kubernetes,ha \
#     --build-arg BASE_IMAGE=python:3.12-slim .        # no NPUs
#
# CANN and its Python come with the base; its tag names chip (910b: A2, a3: A3), system and Python.
# torch and torch_npu are brought to the pair that pyproject.toml pins.
ARG BASE_IMAGE=quay.io/ascend/torch-npu:2.12.0-cann9.1.0-910b-ubuntu22.04-py3.12
FROM ${BASE_IMAGE}
ARG EXTRAS=npu,kubernetes,ha

USER root
WORKDIR /opt/perdure
COPY pyproject.toml prefect.yaml README.md LICENSE ./
COPY perdure perdure
COPY flows flows
COPY tasks tasks
COPY training training
COPY storage storage
COPY docs docs
COPY deploy deploy
# Editable, and the links in perdure/ lead to the other folders: there is one copy of the code. pip
# compiles no editable code, and user 1000 may not write beside it: each process would compile all
# of it anew, 1.4 s instead of 0.95 s for an agent's imports.
RUN python3 -m pip install --no-cache-dir --editable ".[${EXTRAS}]" \
    && python3 -m compileall -q flows tasks training storage perdure \
    && install -m 0755 deploy/perdure-python /usr/local/bin/perdure-python \
    && install -d -o 1000 -g 1000 /home/perdure

# By number: the base may have a user 1000 of its own. It is the one that Ascend's driver gives its
# devices to (HwHiAiUser), so agents need not be root; docs/kubernetes.md says when they must be.
ENV HOME=/home/perdure USER=perdure LOGNAME=perdure PYTHONUNBUFFERED=1
# Where flow runs start.
ENV PERDURE_FOLDER=/opt/perdure
USER 1000:1000
# Flow runs come as arguments, agents and servers as commands: nothing may stand before them.
ENTRYPOINT []
CMD ["perdure", "--help"]
