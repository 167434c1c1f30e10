module github.com/csi-node/csi-node

go 1.26.0
