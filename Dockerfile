# An image with the command, the agent and the Python package. The memory tier is /dev/shm: run it with --ipc=host, or --shm-size of two
# checkpoints, as docs/operate.md says.
#
#   docker build -t nebula .
#   docker run --rm --ipc=host -v /scratch:/scratch nebula nebula doctor
FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc git ninja-build pkg-config libc6-dev libcurl4-openssl-dev libjansson-dev libcivetweb-dev liburing-dev libssl-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels --config-settings=setup-args=-Dwerror=false .

FROM python:3.12-slim-bookworm
RUN apt-get update \
 && apt-get install -y --no-install-recommends libcurl4 libjansson4 libcivetweb1 liburing2 libssl3 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[torch]" && rm -r /wheels
RUN useradd --create-home nebula
USER nebula
CMD ["nebula", "doctor"]
