package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// image is a container image of one layer, in the form that `ctr images import` reads.
type image struct {
	name       string
	aliases    []string
	entrypoint []string

	files bytes.Buffer
	layer *tar.Writer
	seen  map[string]bool
}

func newImage(name string, entrypoint ...string) *image {
	i := &image{name: name, entrypoint: entrypoint, seen: map[string]bool{}}
	i.layer = tar.NewWriter(&i.files)
	return i
}

// add copies a file, symlink or directory of the host (a directory without what is in it) to a path in the image.
func (i *image) add(host, path string) error {
	info, err := os.Lstat(host)
	if err != nil {
		return err
	}
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(host); err != nil {
			return err
		}
	}
	header, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return i.entry(header, path, nil)
	}
	text, err := os.ReadFile(host)
	if err != nil {
		return err
	}
	return i.entry(header, path, text)
}

func (i *image) directory(path string, mode int64) error {
	return i.entry(&tar.Header{Typeflag: tar.TypeDir, Mode: mode}, path, nil)
}

func (i *image) symlink(path, target string) error {
	return i.entry(&tar.Header{Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}, path, nil)
}

func (i *image) entry(header *tar.Header, path string, text []byte) error {
	if i.seen[path] {
		return nil
	}
	i.seen[path] = true
	header.Name, header.Format = strings.TrimPrefix(path, "/"), tar.FormatPAX
	header.Uid, header.Gid, header.Uname, header.Gname = 0, 0, "", ""
	if err := i.layer.WriteHeader(header); err != nil {
		return fmt.Errorf("image %s: %s: %w", i.name, path, err)
	}
	_, err := i.layer.Write(text)
	return err
}

// write writes the image to dir and returns the file's path.
func (i *image) write(dir string) (string, error) {
	if err := i.layer.Close(); err != nil {
		return "", err
	}
	digest := sha256.Sum256(i.files.Bytes())
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": i.entrypoint, "WorkingDir": "/",
			"Env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(digest[:])}},
	})
	if err != nil {
		return "", err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": append([]string{i.name}, i.aliases...), "Layers": []string{"layer.tar"}}})
	if err != nil {
		return "", err
	}
	var all bytes.Buffer
	out := tar.NewWriter(&all)
	for _, file := range []struct {
		name string
		text []byte
	}{{"manifest.json", manifest}, {"config.json", config}, {"layer.tar", i.files.Bytes()}} {
		if err := errors.Join(out.WriteHeader(&tar.Header{Name: file.name, Mode: 0o644, Size: int64(len(file.text))})); err != nil {
			return "", err
		}
		if _, err := out.Write(file.text); err != nil {
			return "", err
		}
	}
	if err := out.Close(); err != nil {
		return "", err
	}
	path := filepath.Join(dir, regexp.MustCompile(`[^a-z0-9.]+`).ReplaceAllString(i.name, "_")+".tar")
	return path, os.WriteFile(path, all.Bytes(), 0o644)
}

const (
	registry    = "e2e.local"
	pauseImage  = registry + "/pause:1"
	shellImage  = registry + "/shell:1"
	pluginImage = registry + "/csi-node:v1" // as docs/install.md calls it
	olderImage  = registry + "/csi-node:older"
	acmeImage   = "registry.example.com/acme/csi:v1.0.0" // of examples/acme/values.yaml

	exampleImage = "docker.io/library/busybox:1.37" // of deploy/examples, which the shell of the tests stands in for
)

// makeImages makes what the cluster needs beside the plugin's image, from this machine's files only. older is the tree of the
// older version.
func makeImages(dir string, built map[string]string, older string) error {
	// The sidecars have the names that deploy/base gives them, so that it is tested as it is.
	sidecars, err := sidecarImages("../../deploy/base/daemonset.yaml")
	if err != nil {
		return err
	}
	for _, one := range []struct{ name, program string }{
		{pauseImage, "pause"}, {sidecars["csi-provisioner"], "csi-provisioner"}, {sidecars["csi-resizer"], "csi-resizer"},
	} {
		i := newImage(one.name, "/"+one.program)
		if err := i.add(built[one.program], "/"+one.program); err != nil {
			return err
		}
		if _, err := i.write(dir); err != nil {
			return err
		}
	}
	err = errors.Join(makeShell(dir), makePlugin(dir, olderImage, "/usr/local/bin/csi-node", built["csi-node-older"], filepath.Join(older, "Dockerfile")),
		makePlugin(dir, acmeImage, "/usr/local/bin/acme", built["acme"], "../../Dockerfile"))
	if err != nil || !upstream {
		return err
	}
	return makeUpstreamImages(dir, built)
}

// sidecarImages finds the images of Kubernetes' registry that a manifest names, by their last element.
func sidecarImages(manifest string) (map[string]string, error) {
	text, err := os.ReadFile(manifest)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for _, m := range regexp.MustCompile(`image: (registry\.k8s\.io/\S*/([a-z-]+):\S+)`).FindAllStringSubmatch(string(text), -1) {
		found[m[2]] = m[1]
	}
	return found, nil
}

// makeShell makes the image of the tests' pods.
func makeShell(dir string) error {
	i := newImage(shellImage, "/bin/sh")
	i.aliases = []string{exampleImage}
	if err := i.addBusybox(); err != nil {
		return err
	}
	_, err := i.write(dir)
	return err
}

// addBusybox adds busybox, with a link for each of its programs.
func (i *image) addBusybox() error {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	names, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	errs := []error{i.directory("/bin", 0o755), i.directory("/tmp", 0o1777), i.directory("/etc", 0o755), i.add(busybox, "/bin/busybox")}
	for name := range strings.FieldsSeq(string(names)) {
		errs = append(errs, i.symlink("/bin/"+name, "/bin/busybox"))
	}
	return errors.Join(errs...)
}

// makePlugin makes the image that a Dockerfile describes: the packages that it names and what they depend on, as they are
// installed on this machine, and at path the plugin.
func makePlugin(dir, name, path, plugin, dockerfile string) error {
	text, err := os.ReadFile(dockerfile)
	if err != nil {
		return err
	}
	m := regexp.MustCompile(`apt-get install -y --no-install-recommends ([a-z0-9 .+-]+)`).FindSubmatch(text)
	if m == nil {
		return fmt.Errorf("%s: no list of packages found", dockerfile)
	}
	i := newImage(name, path)
	if err := i.addPackages(append(strings.Fields(string(m[1])), "base-files")...); err != nil {
		return err
	}
	if err := errors.Join(i.directory("/tmp", 0o1777), i.add(plugin, path)); err != nil {
		return err
	}
	_, err = i.write(dir)
	return err
}

// addPackages adds packages and what they depend on, as they are installed on this machine.
func (i *image) addPackages(names ...string) error {
	packages, err := withDependencies(names)
	if err != nil {
		return err
	}
	// As on Debian since 12, so that a file listed as /lib/x and as /usr/lib/x is one.
	for _, name := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := errors.Join(i.directory("/usr", 0o755), i.directory("/usr/"+name, 0o755), i.symlink("/"+name, "usr/"+name)); err != nil {
			return err
		}
	}
	for _, pkg := range packages {
		if err := i.addPackage(pkg); err != nil {
			return fmt.Errorf("package %s: %w", pkg, err)
		}
	}
	return nil
}

// addPackage adds the files of an installed package, without its documentation.
func (i *image) addPackage(pkg string) error {
	list, err := exec.Command("dpkg", "-L", pkg).Output()
	if err != nil {
		return err
	}
	for path := range strings.Lines(string(list)) {
		path = strings.TrimSpace(path)
		if !filepath.IsAbs(path) || path == "/." || strings.HasPrefix(path, "/usr/share/") {
			continue
		}
		for _, name := range []string{"/bin", "/sbin", "/lib", "/lib64"} {
			if path == name || strings.HasPrefix(path, name+"/") {
				path = "/usr" + path
			}
		}
		if err := i.add(path, path); err != nil && !errors.Is(err, fs.ErrNotExist) { // excluded by dpkg's configuration
			return err
		}
	}
	return nil
}

// withDependencies returns installed packages and all that they depend on.
func withDependencies(wanted []string) (all []string, err error) {
	names := slices.Clone(wanted)
	for len(names) > 0 {
		name := names[0]
		names = names[1:]
		if slices.Contains(all, name) {
			continue
		}
		out, err := exec.Command("dpkg-query", "-W", "-f", "${db:Status-Status},${Pre-Depends},${Depends}", name).Output()
		status, dependencies, _ := strings.Cut(string(out), ",")
		if err != nil || status != "installed" {
			if slices.Contains(wanted, name) {
				return nil, errors.Join(fmt.Errorf("package %s is not installed", name), err)
			}
			continue // a virtual package, or an alternative that is not there
		}
		all = append(all, name)
		for dependency := range strings.FieldsFuncSeq(dependencies, func(r rune) bool { return r == ',' || r == '|' }) {
			if dependency, _, _ = strings.Cut(strings.TrimSpace(dependency), " "); dependency != "" {
				dependency, _, _ = strings.Cut(dependency, ":")
				names = append(names, dependency)
			}
		}
	}
	return all, nil
}
