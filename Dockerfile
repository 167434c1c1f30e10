# syntax=docker/dockerfile:1
FROM --platform=$BUILDPLATFORM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
# All of it, with .git: the program's version is that of the commit, or a --build-arg VERSION. Sources without either
# are refused, as nobody could tell such a build from another.
COPY . .
ARG TARGETOS TARGETARCH VERSION=
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /csi-node ./cmd/csi-node \
    && if [ -z "$VERSION" ] && go version -m /csi-node | grep -q 'mod.*(devel)'; then \
        echo "there is no .git to tell the version: build with --build-arg VERSION=v1.2.3" >&2; exit 1; \
    fi

FROM debian:bookworm-slim
# Exactly the programs that csi-node runs: mkfs.ext4, e2fsck, resize2fs; mkfs.xfs; mkfs.btrfs; lvm,
# which runs thin_check and modprobe; cryptsetup.
RUN apt-get update \
    && apt-get install -y --no-install-recommends e2fsprogs xfsprogs btrfs-progs lvm2 thin-provisioning-tools kmod cryptsetup-bin \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /csi-node /usr/local/bin/csi-node
LABEL org.opencontainers.image.title="csi-node" \
      org.opencontainers.image.description="A CSI node plugin built around a reconciler" \
      org.opencontainers.image.source="https://github.com/csi-node/csi-node" \
      org.opencontainers.image.licenses="Apache-2.0"
ENTRYPOINT ["/usr/local/bin/csi-node"]
