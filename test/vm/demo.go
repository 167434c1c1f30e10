package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

const (
	demoDisk      = "scratch"
	demoDiskBytes = 4 << 30 // sparse
)

const demoJob = `#!/bin/bash
mkfs.ext4 -q /dev/by-serial/` + demoDisk + ` && mount /dev/by-serial/` + demoDisk + ` /tmp || exit 1
exec ./csi-node demo 2>&1
`

// Demo runs `csi-node demo` in a guest and writes what it prints to out; binary
// is the path of a static csi-node. The error is a JobError if the demo failed.
// It blocks for some twenty seconds.
func Demo(ctx context.Context, image, binary string, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "csi-node-demo-vm-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	job, disk := filepath.Join(dir, "job"), Disk{Serial: demoDisk, Path: filepath.Join(dir, demoDisk+".raw")}
	program, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	if err := errors.Join(os.Mkdir(job, 0o755), os.WriteFile(disk.Path, nil, 0o600), os.Truncate(disk.Path, demoDiskBytes),
		os.WriteFile(filepath.Join(job, "csi-node"), program, 0o755), os.WriteFile(filepath.Join(job, "run"), []byte(demoJob), 0o755)); err != nil {
		return err
	}
	var told error
	over := false // then the kernel says that it turns the power off
	g := Guest{Image: image, Job: job, Disks: []Disk{disk}, Line: func(line string) bool {
		if over = over || strings.HasPrefix(line, ended); !over {
			_, told = fmt.Fprintln(out, line)
		}
		return told != nil
	}}
	return errors.Join(g.Run(ctx), told)
}
