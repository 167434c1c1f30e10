# The main targets run as root on a machine with nothing but Go installed:
#   make demo      one volume's life, from creation to deletion (make demo-vm: in a virtual machine, by anybody)
#   make test      what to run before a commit: unit, property, real-kernel tests, csi-sanity
#   make test-all  the same at length, with the race detector
#   make test-vm   the real-kernel tests on another kernel, and power cuts
#   make test-crash       hundreds of kills of the plugin, and a saboteur at work
#   make test-histories   100,000 random histories of a simulated node
#   make e2e       pods on a real Kubernetes (make e2e-upstream: the storage tests of Kubernetes itself)
SHELL := /bin/bash
.DEFAULT_GOAL := build

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-dev)
LDFLAGS := -s -w -X main.version=$(VERSION)

# Versions are fixed, so that what was clean stays so until somebody looks at a newer one.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

STORM ?= 20000
KILLS ?= 300
ACTS  ?= 300
HISTORIES ?= 100000
POWER_CUTS ?= 200

# Walk millions of states, or thousands of histories: the race detector would only slow them down.
WALK := (TestPlanForEveryState|TestHistories)

# Disturb whoever else attaches loop devices: they freeze or shut down the disk beneath one, or
# bind the nodes of those that the kernel is about to give away.
ALONE := (TestSilentDeviceIsNotAbsent|TestBoundNumbersAreNotTaken|TestDeadDiskOfThePool|TestDeviceOfADeadDiskIsTakenDown)

# Nothing is cached: what was left out, or met another kernel, says nothing of this
# machine now. Many tests wait for the kernel, or for a deadline, and do so together.
SUITE := $(GO) run ./test/suite -count 1 -timeout 30m -p 3 -parallel 6
# The longest first.
TESTS := ./test/node ./pkg/filesystem ./test/chaos ./...

# What the archives of the kubectl plugin are built for.
PLATFORMS ?= linux-amd64 linux-arm64 darwin-amd64 darwin-arm64
# The same files make the same archive, so that whoever builds a release again gets its checksums.
TAR := tar --create --owner 0 --group 0 --numeric-owner --mtime @0

.PHONY: build kubectl-plugin release demo demo-vm test test-all test-crash test-histories test-vm test-vm-long e2e e2e-upstream test-mutants fuzz storm lint deps bench clean

build: ## bin/csi-node, a static binary
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/csi-node ./cmd/csi-node

kubectl-plugin: ## bin/kubectl-csi_node, and its archives for PLATFORMS in bin/
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/kubectl-csi_node ./cmd/kubectl-csi_node
	@set -e; for p in $(PLATFORMS); do \
		CGO_ENABLED=0 GOOS=$${p%-*} GOARCH=$${p#*-} $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/$$p/kubectl-csi_node ./cmd/kubectl-csi_node; \
		$(TAR) LICENSE -C cmd/kubectl-csi_node kubectl_complete-csi_node -C $(CURDIR)/bin/$$p kubectl-csi_node | gzip -n > bin/kubectl-csi_node-$$p.tar.gz; rm -r bin/$$p; \
	done

release: kubectl-plugin ## bin/release/, what a release publishes beside its image: VERSION=v1.2.3
	rm -rf bin/release && mkdir bin/release
	cp $(PLATFORMS:%=bin/kubectl-csi_node-%.tar.gz) bin/release
	hack/release "$(VERSION)" bin/release

demo: build ## play kubelet for one volume (root)
	@[ "$$(id -u)" != 0 ] || hack/install-deps || : # the demo says what it lacks
	@bin/csi-node demo

demo-vm: build ## the same in a virtual machine, emulated: some 20 s (anybody who has QEMU; Debian)
	@hack/install-vm-deps
	@$(GO) build -trimpath -o bin/demo-vm ./test/vm/demo
	@bin/demo-vm bin/csi-node test/vm

test: lint ## what to run before a commit: every test, the random ones for a short time (root, some 5 minutes on 2 cores)
	@hack/install-deps --try
	CGO_ENABLED=0 $(SUITE) -short -skip '^$(ALONE)$$' $(TESTS)

test-all: ## the whole: race detector, every state, random histories, crashes, the chart, the page (root, within 15 minutes on 2 cores)
	@hack/install-deps --try race
	@hack/install-deps --try lvm
	@# Helm and Prometheus take minutes to build: as test/vm builds them, too
	cd test/deploy && export CGO_ENABLED=0 && $(GO) vet -tags vm ./... && $(GO) run $(STATICCHECK) -tags vm ./... && $(GO) test -count 1 ./...
	@hack/install-deps --try browser
	cd test/ui && $(GO) vet ./... && $(GO) run $(STATICCHECK) ./... && $(GO) test -count 1 ./... # the page, in Chromium
	CGO_ENABLED=1 $(SUITE) -race -skip '^($(WALK)|$(ALONE))$$' $(TESTS) \
		+ -run '^$(WALK)$$' ./pkg/reconciler -histories.count 5000 \
		+ -race -p 1 -run '^$(ALONE)$$' ./pkg/devices/pool ./test/node \
		+ ./test/chaos -chaos.kills 100 -chaos.acts 100

fuzz: deps ## each fuzz target for FUZZTIME (5m)
	hack/fuzz

storm: deps ## random calls on the real kernel, STORM of them (20000; root)
	$(GO) test -count 1 -timeout 2h -v -run '^TestChaos$$' ./test/chaos -chaos.calls $(STORM) -chaos.kills 0 -chaos.acts 0

test-crash: deps ## KILLS (300) of the plugin, ACTS (300) of a saboteur (root, 6 minutes on 2 cores)
	$(GO) test -count 1 -timeout 30m -v ./test/chaos -chaos.kills $(KILLS) -chaos.acts $(ACTS)

test-histories: ## random histories of a simulated node, HISTORIES of them (100000, some 10 minutes on 2 cores)
	$(GO) test -count 1 -timeout 4h -v -run '^TestHistories$$' ./pkg/reconciler -histories.count $(HISTORIES)

test-vm: ## in virtual machines: another kernel, power cuts (root, Debian)
	hack/install-vm-deps
	@# a guest waits for its disks a third of the time: three keep two cores at work
	$(GO) test -tags vm -v -count 1 -timeout 90m -parallel 3 ./test/vm

test-vm-long: ## POWER_CUTS (200) of each life of a node, and bad days of LVM at length (root, Debian; hours)
	hack/install-vm-deps
	CSI_NODE_VM_CUTS=$(POWER_CUTS) $(GO) test -tags vm -v -count 1 -timeout 24h -run '^TestPowerCuts$$' ./test/vm
	CSI_NODE_VM_FLAGS='-test.run ^TestPowerCuts$$ -lvm.cuts 20' $(GO) test -tags vm -v -count 1 -timeout 2h -run '^TestOtherKernel$$/^lvm$$' ./test/vm
	CSI_NODE_VM_FLAGS='-test.run ^TestD(isk|ata) -test.short=false' $(GO) test -tags vm -v -count 1 -timeout 2h -run '^TestOtherKernel$$/^node-A-M$$' ./test/vm

e2e: deps ## pods on a real Kubernetes, built first: twenty minutes in all (root, Debian; E2E='-run TestX -hold')
	hack/install-e2e-deps
	cd test/e2e && $(GO) vet ./... && $(GO) test -v -count 1 -timeout 120m -parallel 4 . $(E2E)

e2e-upstream: deps ## the storage tests of Kubernetes itself there, writes docs/upstream.md: half an hour, once built (root, Debian; E2E='-upstream.focus=subPath')
	hack/install-e2e-deps upstream
	cd test/e2e && $(GO) vet -tags upstream . && $(GO) test -tags upstream -v -count 1 -timeout 5h -run '^TestUpstream$$' . -upstream.report $(CURDIR)/docs $(E2E)

test-mutants: deps ## small faults, one at a time: a test must notice each (root, 6 minutes on 2 cores)
	$(GO) run ./test/mutants

lint: ## formatting, vet, staticcheck, go.mod, workflows, shell scripts, known vulnerabilities (within a minute, once built)
	@hack/install-deps --try lint
	@test -z "$$(gofmt -l .)" || { echo "gofmt these files:"; gofmt -l .; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags faults ./cmd/...
	$(GO) vet -tags vm ./test/vm/... ./test/selinux ./test/node ./pkg/devices/...
	$(GO) run $(STATICCHECK) ./...
	$(GO) run $(STATICCHECK) -tags vm ./test/vm/... ./test/selinux ./test/node ./pkg/devices/...
	cd test/e2e && $(GO) run $(STATICCHECK) ./...
	cd test/e2e && $(GO) run $(STATICCHECK) -tags upstream .
	$(GO) mod tidy -diff
	cd test/e2e && $(GO) mod tidy -diff
	cd test/deploy && $(GO) mod tidy -diff
	cd test/ui && $(GO) mod tidy -diff
	$(GO) run $(ACTIONLINT)
	@hack/shellcheck
	@hack/govulncheck

deps: ## the programs that the plugin runs
	hack/install-deps

bench: deps ## writes docs/performance.md: what volumes cost, beside other drivers (root, within 15 minutes on 2 idle cores)
	$(GO) test -count 1 -timeout 60m -v -run '^TestPerformance$$' ./test/bench -bench.report $(CURDIR)/docs
	$(GO) test -run '^$$' -bench . -benchtime 200ms ./pkg/... ./test/bench

clean:
	rm -rf bin
