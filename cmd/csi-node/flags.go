package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/client"
)

// usageError is a wrong use of the command line: exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func wrongUse(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// exitCode returns the exit code of the process for what a command returned.
func exitCode(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usageError{}):
		return 2
	}
	return 1
}

// strict makes errors about arguments wrong uses, in all commands.
func strict(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return wrongUse("%w; `%s --help` shows how", err, cmd.CommandPath())
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		strict(sub)
	}
}

// one takes exactly one argument.
func one(what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 || args[0] == "" {
			return fmt.Errorf("`%s` takes one argument, %s, not %q", cmd.CommandPath(), what, args)
		}
		return nil
	}
}

// The environment sets the defaults of the flags that many commands have, so
// that they need to be typed once.
func endpointDefault() string   { return cmp.Or(os.Getenv("CSI_ENDPOINT"), "unix:///csi/csi.sock") }
func stateDirDefault() string   { return cmp.Or(os.Getenv("CSI_NODE_STATE_DIR"), "/run/csi-node") }
func kubeletDirDefault() string { return cmp.Or(os.Getenv("CSI_NODE_KUBELET_DIR"), "/var/lib/kubelet") }

// outputFlag is --output.
type outputFlag string

func (o *outputFlag) add(cmd *cobra.Command) {
	cmd.Flags().StringVar((*string)(o), "output", "table", "table or json")
	complete(cmd, "output", "table", "json")
}

func (o outputFlag) check() error {
	if o != "table" && o != "json" {
		return wrongUse("--output %q: must be table or json", string(o))
	}
	return nil
}

// complete offers the values of a flag to the shell.
func complete(cmd *cobra.Command, flag string, values ...string) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag is not defined, or completed twice
	}
}

// timeoutFlag is --timeout.
type timeoutFlag time.Duration

func (t *timeoutFlag) add(cmd *cobra.Command, usual time.Duration, what string) {
	cmd.Flags().DurationVar((*time.Duration)(t), "timeout", usual, "how long to wait for "+what)
}

func (t timeoutFlag) check() error {
	if t <= 0 {
		return wrongUse("--timeout %s: must be more than nothing", time.Duration(t))
	}
	return nil
}

// accessFlags say how a volume is to be used.
type accessFlags struct{ client.Access }

func (a *accessFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&a.Mode, "access-mode", "ReadWriteOnce", "ReadWriteOnce, ReadWriteOncePod, ReadOnlyMany, ReadWriteMany, or a name of CSI as SINGLE_NODE_WRITER")
	f.BoolVar(&a.Block, "block", false, "as a raw block device, without a file system")
	f.StringVar(&a.FSType, "fs-type", "", "file system, as ext4, xfs or btrfs (default: the driver chooses)")
	f.StringArrayVar(&a.Flags, "mount-flag", nil, "mount flag, as noatime; may be given several times")
	complete(cmd, "access-mode", client.AccessModes()...)
	complete(cmd, "fs-type", "ext4", "xfs", "btrfs")
	complete(cmd, "mount-flag", "noatime", "nodev", "noexec", "nosuid", "ro")
}

func (a *accessFlags) check() error {
	if err := a.Check(); err != nil {
		return usageError{err}
	}
	return nil
}

// pairs reads a flag that holds key=value several times.
func pairs(flag string, values []string) (map[string]string, error) {
	var all map[string]string
	for _, pair := range values {
		key, value, ok := strings.Cut(pair, "=")
		switch _, twice := all[key]; {
		case !ok || key == "":
			return nil, wrongUse("--%s %q: must be key=value", flag, pair)
		case twice:
			return nil, wrongUse("--%s %s: given twice", flag, key)
		}
		if all == nil {
			all = map[string]string{}
		}
		all[key] = value
	}
	return all, nil
}

// secretFlag is --secret: its values come from files, because what stands on a
// command line can be read by every user of the machine.
type secretFlag []string

func (s *secretFlag) add(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar((*[]string)(s), "secret", nil, "secret as key=@file, without the file's last newline; may be given several times")
}

func (s secretFlag) read() (map[string]string, error) {
	for _, pair := range s {
		key, file, ok := strings.Cut(pair, "=@")
		if !ok || key == "" || file == "" || strings.Contains(key, "=") {
			return nil, wrongUse("--secret: must be key=@file, so that no secret stands on a command line") // does not repeat it
		}
	}
	files, err := pairs("secret", s)
	if err != nil {
		return nil, err
	}
	for key, file := range files {
		text, err := os.ReadFile(file[1:])
		if err != nil {
			return nil, fmt.Errorf("--secret %s: %w", key, err)
		}
		files[key] = strings.TrimSuffix(string(text), "\n")
	}
	return files, nil
}

// absolute checks a flag that holds a path.
func absolute(flag, path string) error {
	if path != "" && !filepath.IsAbs(path) {
		return wrongUse("--%s %q: must be an absolute path", flag, path)
	}
	return nil
}
