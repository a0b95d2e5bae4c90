# The gateway in a container: docs/container.md has how to build, run and extend it.
#
#     scripts/image            # docker, podman or buildah, whichever is installed
#
# BASE is any image with a python3 (3.11 or newer) that has venv. Both stages need the same one, because the environment
# that the first one makes moves into the second. By default it is the image that is named here by the digest of its
# index for all architectures: in a FROM, because Dependabot raises no ARG. It was read in public repositories, since no
# registry could be asked, and has not been pulled.
ARG BASE=pinned
FROM python:3.11.17-slim-trixie@sha256:45037981b62b34b44602584fccbc4d884d5f7dc92c7ee86bb38a698a79fe1e51 AS pinned

FROM ${BASE} AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# Two environments: the tools of the build stay behind, and the environment for the image has not even pip.
# A lock file has the hash of every downloaded file. Only wheels are allowed, so no package runs code during the build.
# The secrets are a pip configuration and its authorities, for packages from another index; they are in no layer.
COPY requirements.lock requirements-build.lock ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/mrtr-build/ca.crt \
    python3 -m venv /tools \
 && python3 -m venv --without-pip /opt/mrtr-gateway \
 && /tools/bin/pip install --quiet --no-compile --only-binary :all: --require-hashes -r requirements-build.lock \
 && /tools/bin/pip --python /opt/mrtr-gateway/bin/python install --quiet --no-compile --only-binary :all: \
        --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY docs docs
# --no-index: a package that the lock files lack is an error here, and not a download. The bytecode names no time, so
# that two builds are the same.
RUN /tools/bin/pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /tools/bin/pip --python /opt/mrtr-gateway/bin/python install --quiet --no-compile --no-index \
        --find-links /wheels mrtr-gateway \
 && /tools/bin/pip --python /opt/mrtr-gateway/bin/python check \
 && PYTHONHASHSEED=0 python3 -m compileall -qf --invalidation-mode unchecked-hash /opt/mrtr-gateway/lib \
 && mkdir -p /opt/mrtr-gateway/share/sbom \
 && /tools/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
        --output-file /opt/mrtr-gateway/share/sbom/mrtr-gateway.cdx.json /opt/mrtr-gateway/bin/python

FROM ${BASE}
ARG VERSION=0.0.0+local
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="mrtr-gateway" \
      org.opencontainers.image.description="A stateless reverse proxy that makes a legacy MCP server a modern one" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
COPY --from=build /opt/mrtr-gateway /opt/mrtr-gateway
COPY deploy/container/config.yaml /etc/mrtr-gateway/config.yaml
ENV PATH=/opt/mrtr-gateway/bin:$PATH PYTHONUNBUFFERED=1
# Some bases come without the bytecode of the standard library, and a read-only container would compile it at every
# start. So the program runs here once, as root, and shows that it can.
RUN PYTHONHASHSEED=0 MRTR_UPSTREAM=http://127.0.0.1:9000/mcp mrtr-gateway check --config /etc/mrtr-gateway/config.yaml \
 && mrtr-gateway --version
# Numeric, for Kubernetes' runAsNonRoot. The user owns nothing and needs no home.
USER 65532:65532
WORKDIR /
# Clients, peers, probes and metrics.
EXPOSE 8080 8081 9464
# Alive, not ready: a container that drains is healthy until it ends.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["mrtr-gateway", "health", "--config", "/etc/mrtr-gateway/config.yaml"]
# Without a shell or an init in between, SIGTERM reaches the gateway, which drains and exits with 0. Allow it 45 s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["mrtr-gateway"]
CMD ["serve", "--config", "/etc/mrtr-gateway/config.yaml"]
