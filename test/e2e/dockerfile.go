package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// dockerScript is docker, as far as docs/install.md needs it: buildah does it, without a daemon. What its steps must not
// fetch anew is this machine's.
const dockerScript = `#!/bin/bash
set -euo pipefail
case $1 in
build)
	buildah bud --isolation chroot --pull-never \
		--volume "$(go env GOROOT):/usr/local/go:ro" --volume "$(go env GOMODCACHE):/go/pkg/mod" \
		--volume "$(go env GOCACHE):/go/cache" --volume /etc/ssl/certs:/etc/ssl/certs:ro "${@:2}";;
push)
	buildah push "$2" "docker-archive:$ARCHIVE:$2"
	buildah rmi "$2";;
esac
`

// storage is where buildah keeps images; vfs can do so on any file system.
const storage = `[storage]
driver = "vfs"
graphroot = "%[1]s"
runroot = "%[1]s.run"
`

// buildPlugin builds the plugin's image from the Dockerfile, by the commands of docs/install.md, and writes it to dir.
// The images that the Dockerfile begins with stay in the cache.
func buildPlugin(ctx context.Context, cache, dir string) (err error) {
	commands, err := commandsAfter("docs/install.md", "## The image", "REGISTRY", registry)
	if err != nil {
		return err
	}
	text, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		return err
	}
	bases := regexp.MustCompile(`(?m)^FROM (?:--platform=\S+ )?((\w+):\S+)`).FindAllStringSubmatch(string(text), -1)
	if len(bases) != 2 || bases[0][2] != "golang" || bases[1][2] != "debian" {
		return fmt.Errorf("the Dockerfile begins with %q, not with golang and debian", bases)
	}
	work := filepath.Join(cache, "docker")
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	err = errors.Join(os.RemoveAll(work), os.Mkdir(work, 0o755), os.WriteFile(filepath.Join(work, "docker"), []byte(dockerScript), 0o755),
		os.WriteFile(filepath.Join(work, "storage.conf"), fmt.Appendf(nil, storage, filepath.Join(cache, "images")), 0o600))
	if err != nil {
		return err
	}
	b := builder(work)
	if err := b.makeBases(ctx, bases[1][1], bases[0][1]); err != nil {
		return err
	}
	defer heartbeat("still building the plugin's image")()
	return b.run(ctx, "../..", strings.Join(commands, "\n"), "ARCHIVE="+filepath.Join(dir, "csi-node.tar"))
}

// builder builds images. It is a directory with the program docker and storage.conf.
type builder string

// run runs commands in a directory.
func (b builder) run(ctx context.Context, dir, commands string, environment ...string) error {
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+string(b)+":"+os.Getenv("PATH"), "CONTAINERS_STORAGE_CONF="+filepath.Join(string(b), "storage.conf"))
	cmd.Env = append(cmd.Env, environment...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", commands, err, out)
	}
	return nil
}

// makeBases makes the base images where they are not there, as registries may be out of reach: Debian's of its packages,
// Go's with what building needs beside Go.
func (b builder) makeBases(ctx context.Context, debian, golang string) error {
	suite, _, _ := strings.Cut(strings.TrimPrefix(debian, "debian:"), "-") // of debian:bookworm-slim
	proxy, err := exec.CommandContext(ctx, "go", "env", "GOPROXY").Output()
	if err != nil {
		return fmt.Errorf("go env: %w", err)
	}
	for _, base := range []struct{ name, prepare, dockerfile string }{
		{debian, `unshare --mount debootstrap --variant=minbase ` + suite + ` .
			echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; }; Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' >etc/apt/apt.conf.d/docker-clean
			rm -rf var/cache/apt/* var/lib/apt/lists/* usr/share/doc/* usr/share/man/* usr/share/locale/*`, `
			FROM scratch
			COPY . /`},
		{golang, "true", `
			FROM ` + debian + `
			RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
			ENV PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin GOPATH=/go GOCACHE=/go/cache GOTOOLCHAIN=local GOPROXY=` + strings.TrimSpace(string(proxy))},
	} {
		name := "docker.io/library/" + base.name
		if b.run(ctx, ".", "buildah inspect --type image "+name) == nil {
			continue
		}
		say("making the image %s", base.name)
		files, err := os.MkdirTemp(string(b), "")
		if err != nil {
			return err
		}
		dockerfile := files + ".Dockerfile"
		if err := os.WriteFile(dockerfile, []byte(base.dockerfile), 0o600); err != nil {
			return err
		}
		if err := b.run(ctx, files, base.prepare+"\ndocker build --file "+dockerfile+" --tag "+name+" ."); err != nil {
			return err
		}
	}
	return nil
}

// commandsAfter returns the first block of commands that follows some words on a page, with the words in it replaced that
// stand for names or are others here. A command of several lines is one.
func commandsAfter(page, words string, replaced ...string) (commands []string, err error) {
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		return nil, err
	}
	_, after, _ := strings.Cut(string(text), "\n"+words)
	for line := range strings.Lines(strings.ReplaceAll(after, "\\\n", " ")) {
		switch command := strings.TrimSpace(line); {
		case strings.HasPrefix(line, "    ") && (len(commands) > 0 || beginning.MatchString(command)):
			commands = append(commands, strings.NewReplacer(replaced...).Replace(command))
		case len(commands) > 0:
			return commands, nil
		}
	}
	return nil, fmt.Errorf("%s has no command after %q", page, words)
}

// beginning is that of a command.
var beginning = regexp.MustCompile(`^(docker|kubectl|helm|on\(\)) `)
