# syntax=docker/dockerfile:1
FROM --platform=$BUILDPLATFORM golang:1.26-bookworm AS build
ARG TARGETOS TARGETARCH VERSION=v0.0.0-dev
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd cmd
COPY pkg pkg
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /csi-node ./cmd/csi-node

FROM debian:bookworm-slim
# Exactly the programs that csi-node runs: mkfs.ext4, e2fsck, resize2fs; mkfs.xfs; mkfs.btrfs; cryptsetup.
RUN apt-get update \
    && apt-get install -y --no-install-recommends e2fsprogs xfsprogs btrfs-progs cryptsetup-bin \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /csi-node /usr/local/bin/csi-node
LABEL org.opencontainers.image.title="csi-node" \
      org.opencontainers.image.description="A CSI node plugin built around a reconciler" \
      org.opencontainers.image.source="https://github.com/csi-node/csi-node" \
      org.opencontainers.image.licenses="Apache-2.0"
ENTRYPOINT ["/usr/local/bin/csi-node"]
