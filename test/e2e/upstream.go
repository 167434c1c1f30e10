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

// makeUpstreamImages makes the images that the storage tests of Kubernetes use, by the names that the
// tests have for them. agnhost and pause are what they are elsewhere; of busybox, nginx (a shell in
// it writes a script and runs it) and of glibc-dns-testing (dd) only the shell's tools are used.
func makeUpstreamImages(dir string, built map[string]string) error {
	names, err := exec.Command(built["e2e.test"], "-list-images").Output()
	if err != nil {
		return fmt.Errorf("e2e.test -list-images: %w", err)
	}
	for _, one := range []struct {
		name       string
		entrypoint []string
		files      map[string]string
	}{
		{"agnhost", []string{"/agnhost"}, map[string]string{"/agnhost": built["agnhost"]}},
		{"pause", []string{"/pause"}, map[string]string{"/pause": built["pause"]}},
		{"busybox", []string{"/bin/sh"}, nil},
		{"nginx", []string{"/bin/sh"}, nil},
		{"glibc-dns-testing", []string{"/bin/sh"}, nil},
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
		i := newImage(tags[0], one.entrypoint...)
		i.aliases = tags[1:]
		errs := []error{i.addBusybox()}
		for path, host := range one.files {
			errs = append(errs, i.add(host, path))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		if _, err := i.write(dir); err != nil {
			return err
		}
	}
	return nil
}
