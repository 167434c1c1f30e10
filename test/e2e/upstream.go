package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"path"
	"strings"
)

// upstreamPrograms are Kubernetes' own end-to-end tests, what runs in their pods, and what runs them.
func upstreamPrograms() []program {
	return []program{
		{pkg: "k8s.io/kubernetes/test/e2e", ldflags: kubernetesLdflags(), test: true},
		{pkg: "k8s.io/kubernetes/test/images/agnhost"},
		{pkg: "github.com/onsi/ginkgo/v2/ginkgo"},
	}
}

// makeUpstreamImages makes the images that the storage tests of Kubernetes use, by the names that the tests
// have for them. Of nginx they use a shell only, and of glibc-dns-testing a dd that knows oflag=nocache.
func makeUpstreamImages(dir string, built map[string]string) error {
	names, err := exec.Command(built["e2e.test"], "-list-images").Output()
	if err != nil {
		return fmt.Errorf("e2e.test -list-images: %w", err)
	}
	program := func(name string) func(*image) error {
		return func(i *image) error {
			i.entrypoint = []string{"/" + name}
			return errors.Join(i.add(built[name], "/"+name), i.addBusybox())
		}
	}
	for _, one := range []struct {
		name string
		fill func(*image) error
	}{
		{"agnhost", program("agnhost")},
		{"pause", program("pause")},
		{"busybox", (*image).addBusybox},
		{"nginx", (*image).addBusybox},
		{"glibc-dns-testing", func(i *image) error { return i.addPackages("base-files", "coreutils", "dash", "grep", "util-linux") }},
	} {
		var tags []string
		for name := range strings.Lines(string(names)) {
			if repository, _, _ := strings.Cut(path.Base(strings.TrimSpace(name)), ":"); repository == one.name {
				tags = append(tags, strings.TrimSpace(name))
			}
		}
		if len(tags) == 0 {
			return fmt.Errorf("the tests of Kubernetes use no image %s any more", one.name)
		}
		i := newImage(tags[0], "/bin/sh")
		i.aliases = tags[1:]
		if err := one.fill(i); err != nil {
			return err
		}
		if _, err := i.write(dir); err != nil {
			return err
		}
	}
	return nil
}
