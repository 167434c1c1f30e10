// Command demo runs `csi-node demo` in a virtual machine, for who may not mount
// on this one. It needs QEMU and, once, Debian's packages; it need not be root.
//
//	demo BINARY DIRECTORY
//
// BINARY is a static csi-node, DIRECTORY the source of package vm. The exit code
// is that of the demo in the machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/csi-node/csi-node/test/vm"
)

// Both are many times what an emulated machine on a slow network takes.
const (
	buildLimit = 15 * time.Minute
	runLimit   = 10 * time.Minute
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: demo BINARY DIRECTORY")
		os.Exit(2)
	}
	err := run(os.Args[1], os.Args[2])
	var failed vm.JobError
	switch {
	case errors.As(err, &failed):
		os.Exit(failed.Code) // the demo has told why
	case err != nil:
		fmt.Fprintf(os.Stderr, "demo-vm: %v\n", err)
		os.Exit(1)
	}
}

func run(binary, source string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	fmt.Println("Guest: Debian's kernel and a small root file system, made of packages (some 60 MB, downloaded once) …")
	building, cancel := context.WithTimeout(ctx, buildLimit)
	defer cancel()
	image, err := vm.Image(building, source)
	if err != nil {
		return err
	}
	fmt.Printf("Boot: the guest in %s, under emulation: some 20 seconds …\n", image)
	running, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	return vm.Demo(running, image, binary, os.Stdout)
}
