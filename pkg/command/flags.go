// Package command holds what the command lines of this module share: flags, exit
// codes and output. Volume is the command that calls any CSI plugin by hand, as
// kubelet and external-provisioner do.
//
// Read volume.go first; node.go and controller.go hold its subcommands. The commands
// that ask csi-node itself are in pkg/driver.
package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/client"
)

// usageError is an error in the use of the command line: exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// WrongUse returns an error for which the exit code is 2.
func WrongUse(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// ExitCode returns the exit code of the process for what a command returned.
func ExitCode(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usageError{}):
		return 2
	}
	return 1
}

// Strict turns errors about the arguments of all commands into usage errors, those of cobra's
// help and completion, too.
func Strict(cmd *cobra.Command) {
	switch {
	case cmd.Name() == "help" && cmd.HasParent():
		cmd.Run, cmd.RunE = nil, help
	case cmd.HasSubCommands() && !cmd.Runnable():
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return WrongUse("%w%s; `%s --help` shows how", err, meant(cmd, args), cmd.CommandPath())
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		Strict(sub)
	}
}

// help shows the help of the command that the arguments name.
func help(cmd *cobra.Command, args []string) error {
	of, left, err := cmd.Root().Find(args)
	if err != nil {
		return usageError{err}
	}
	if len(left) > 0 {
		return WrongUse("unknown command %q for %q%s; `%s --help` shows how", left[0], of.CommandPath(), meant(of, left), of.CommandPath())
	}
	of.InitDefaultHelpFlag()
	of.InitDefaultVersionFlag()
	return of.Help()
}

// meant asks whether a command was meant that is called almost like the first argument.
func meant(cmd *cobra.Command, args []string) string {
	if len(args) > 0 && (args[0] == "true" || args[0] == "false") {
		return " (a flag takes that as --FLAG=" + args[0] + ")"
	}
	if len(args) == 0 || len(args[0]) < 3 || !cmd.HasSubCommands() {
		return ""
	}
	cmd.SuggestionsMinimumDistance = 2 // letters that differ
	var commands []string
	for _, name := range cmd.SuggestionsFor(args[0]) {
		commands = append(commands, fmt.Sprintf("`%s %s`", cmd.CommandPath(), name))
	}
	if len(commands) == 0 {
		return ""
	}
	return " (did you mean " + strings.Join(commands, " or ") + "?)"
}

// One accepts exactly one argument; what describes it.
func One(what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 || args[0] == "" {
			return fmt.Errorf("`%s` takes one argument, %s, not %q", cmd.CommandPath(), what, args)
		}
		return nil
	}
}

// EndpointDefault is the default of --endpoint. The environment can set the defaults
// of flags that many commands have, so that they need to be typed only once.
func EndpointDefault() string { return cmp.Or(os.Getenv("CSI_ENDPOINT"), "unix:///csi/csi.sock") }

// KubeletDirDefault is the default of --kubelet-dir.
func KubeletDirDefault() string { return cmp.Or(os.Getenv("CSI_NODE_KUBELET_DIR"), "/var/lib/kubelet") }

// Output is --output: table, json or yaml, and wide where a command offers that.
type Output string

// outputs are the values that every command has; those of AddWide have Wide, too.
var outputs = []string{Table, "json", "yaml"} // the default first

// Table is the output for people, and Wide the one with all columns.
const (
	Table = "table"
	Wide  = "wide"
)

// Add adds the flag to a command.
func (o *Output) Add(cmd *cobra.Command) { o.add(cmd, outputs...) }

// AddWide is Add for a command that has a wide table, too.
func (o *Output) AddWide(cmd *cobra.Command) { o.add(cmd, append(slices.Clone(outputs), Wide)...) }

// AddObjects is Add for a command that prints objects of Kubernetes.
func (o *Output) AddObjects(cmd *cobra.Command) { o.add(cmd, "yaml", "json") }

func (o *Output) add(cmd *cobra.Command, values ...string) {
	*o = Output(values[0])
	cmd.Flags().VarP(&outputFlag{o, values}, "output", "o", oneOf(values))
	Complete(cmd, "output", values...)
}

// outputFlag is the flag of an Output: it knows the values that its command has.
type outputFlag struct {
	output *Output
	values []string
}

// Set implements pflag.Value.
func (f *outputFlag) Set(text string) error {
	if !slices.Contains(f.values, text) {
		return fmt.Errorf("must be %s", oneOf(f.values))
	}
	*f.output = Output(text)
	return nil
}

// String implements pflag.Value.
func (f *outputFlag) String() string { return string(*f.output) }

// Type implements pflag.Value.
func (f *outputFlag) Type() string { return "string" }

// oneOf lists the values that a flag can have.
func oneOf(values []string) string {
	return strings.Join(values[:len(values)-1], ", ") + " or " + values[len(values)-1]
}

// Complete offers the values of a flag to the shell.
func Complete(cmd *cobra.Command, flag string, values ...string) {
	CompleteBy(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// CompleteBy offers to the shell, for a flag, what a function returns.
func CompleteBy(cmd *cobra.Command, flag string, offer cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, offer); err != nil {
		panic(err) // the flag is not defined, or completed twice
	}
}

// Timeout is a flag such as --timeout: a time that is more than 0.
type Timeout time.Duration

// Add adds --timeout to a command, with its default; what says what is waited for.
func (t *Timeout) Add(cmd *cobra.Command, byDefault time.Duration, what string) {
	*t = Timeout(byDefault)
	cmd.Flags().Var(t, "timeout", "how long to wait for "+what)
}

// Context returns the context of a command, which ends after the time.
func (t Timeout) Context(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	return context.WithTimeout(cmd.Context(), time.Duration(t))
}

// Set implements pflag.Value.
func (t *Timeout) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err == nil && d <= 0 {
		err = errors.New("must be more than 0")
	}
	*t = Timeout(d)
	return err
}

// String implements pflag.Value.
func (t *Timeout) String() string { return time.Duration(*t).String() }

// Type implements pflag.Value.
func (t *Timeout) Type() string { return "duration" }

// accessFlags say how a volume is to be used.
type accessFlags struct{ client.Access }

func (a *accessFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&a.Mode, "access-mode", "ReadWriteOnce", "ReadWriteOnce, ReadWriteOncePod, ReadOnlyMany, ReadWriteMany, or a CSI name such as SINGLE_NODE_WRITER")
	f.BoolVar(&a.Block, "block", false, "as a raw block device, without a file system")
	f.StringVar(&a.FSType, "fs-type", "", "file system, such as ext4, xfs or btrfs (default: the driver chooses)")
	f.StringArrayVar(&a.Flags, "mount-flag", nil, "mount flag, such as noatime; may be given several times")
	Complete(cmd, "access-mode", client.AccessModes()...)
	Complete(cmd, "fs-type", "ext4", "xfs", "btrfs")
	Complete(cmd, "mount-flag", "noatime", "nodev", "noexec", "nosuid", "ro")
}

func (a *accessFlags) check() error {
	if err := a.Check(); err != nil {
		return usageError{err}
	}
	return nil
}

// pairs parses the values of a flag that holds key=value and may be repeated.
func pairs(flag string, values []string) (map[string]string, error) {
	var all map[string]string
	for _, pair := range values {
		key, value, ok := strings.Cut(pair, "=")
		switch _, twice := all[key]; {
		case !ok || key == "":
			return nil, WrongUse("--%s %q: must be key=value", flag, pair)
		case twice:
			return nil, WrongUse("--%s %s: given twice", flag, key)
		}
		if all == nil {
			all = map[string]string{}
		}
		all[key] = value
	}
	return all, nil
}

// secretFlag is --secret. Its values come from files, because every user of the
// machine can read command lines.
type secretFlag []string

func (s *secretFlag) add(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar((*[]string)(s), "secret", nil, "secret as key=@file, without the file's last newline; may be given several times")
}

func (s secretFlag) read() (map[string]string, error) {
	for _, pair := range s {
		key, file, ok := strings.Cut(pair, "=@")
		if !ok || key == "" || file == "" || strings.Contains(key, "=") {
			return nil, WrongUse("--secret: must be key=@file, so that no secret is on a command line") // the error does not quote it
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
		return WrongUse("--%s %q: must be an absolute path", flag, path)
	}
	return nil
}
