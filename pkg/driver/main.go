package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/command"
)

// Main is a whole driver: a program that serves, or reports on what is served, as
// its command line says (Command). It does not return. SIGTERM and SIGINT end it, and
// mounts stay. A driver with wrong Options prints what is wrong and ends.
func Main(o Options) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends it at once
	_, err := o.check()
	if err == nil {
		err = Command(o).ExecuteContext(ctx)
	}
	if err != nil && !errors.As(err, &loggedError{}) {
		stderr := newLogWriter(os.Stderr, func(int) {}) // which nobody may read
		fmt.Fprintf(stderr, "%s: %s\n", o.program(), o.inOwnName(err.Error()))
		stderr.End()
	}
	os.Exit(command.ExitCode(err))
}

// engine is how help texts in this module call the program.
const engine = "csi-node"

// Command returns the command line of a driver. command.ExitCode gives the exit code
// for the errors that it returns.
func Command(o Options) *cobra.Command {
	serve := newServeCommand(o)
	root := &cobra.Command{
		Use:   o.program(),
		Short: cmp.Or(o.Short, "The node plugin of the CSI driver "+o.Name),
		Long: cmp.Or(o.Long, `csi-node serves the volumes of the CSI driver `+o.Name+` on one node.

Each call of kubelet becomes an intent in a small store; a reconciler makes the
node match the intents, and goes on after timeouts, crashes and restarts.
Without a subcommand it serves.

Exit codes: 0 done, 1 refused or failed, 2 wrong use.`),
		Example: cmp.Or(o.Example, `  # Serve on a socket of your own:
  csi-node --endpoint unix:///tmp/csi.sock --state-dir /tmp/csi-state --kubelet-dir /tmp

  # In another terminal, see what is asked of this node and what is:
  csi-node status --state-dir /tmp/csi-state`),
		Args:          cobra.NoArgs,
		Version:       o.version(),
		RunE:          serve.RunE,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.Flags().AddFlagSet(serve.Flags())
	root.SetVersionTemplate("{{.Version}}\n")
	root.AddGroup(&cobra.Group{ID: "plugin", Title: "The plugin:"}, &cobra.Group{ID: "hand", Title: "By hand:"}, &cobra.Group{ID: "more", Title: "More:"})
	for _, c := range []struct {
		group string
		cmd   *cobra.Command
	}{
		{"plugin", serve}, {"plugin", newStatusCommand(o)}, {"plugin", newExplainCommand(o)}, {"plugin", newUICommand(o)}, {"plugin", newOrphansCommand(o)}, {"plugin", newReportCommand(o)}, {"plugin", newProbeCommand(o)},
		{"hand", command.Volume(command.Own{
			Retry: newRetryCommand(o), Clear: newClearDeviceCommand(o), Manifest: newManifestCommand(o), StateDir: o.stateDir(), Details: details,
		})}, {"more", newCSIDriverCommand(o)}, {"more", newVersionCommand(o)},
	} {
		c.cmd.GroupID = c.group
		root.AddCommand(c.cmd)
	}
	addCobraCommands(root)
	if o.program() != engine {
		o.rename(root)
	}
	if o.Commands != nil {
		o.Commands(root)
	}
	command.Strict(root)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return command.WrongUse("%w; `%s --help` lists the flags", err, c.CommandPath())
	})
	return root
}

// rename writes the program's own name into the texts of all commands, and into what they print.
func (o Options) rename(cmd *cobra.Command) {
	texts := []*string{&cmd.Short, &cmd.Long, &cmd.Example}
	if cmd.HasParent() { // the flags of the root are those of serve
		cmd.Flags().VisitAll(func(flag *pflag.Flag) { texts = append(texts, &flag.Usage) })
	}
	for _, text := range texts {
		*text = strings.ReplaceAll(*text, engine, o.program())
	}
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			cmd.SetOut(ownName{cmd.OutOrStdout(), o})
			return run(cmd, args)
		}
	}
	for _, sub := range cmd.Commands() {
		o.rename(sub)
	}
}

// ownName writes each text, which comes in one piece, by Options.inOwnName.
type ownName struct {
	io.Writer
	options Options
}

// Fd is that of the file to which it writes, which may be a terminal.
func (w ownName) Fd() uintptr {
	if f, is := w.Writer.(*os.File); is {
		return f.Fd()
	}
	return ^uintptr(0)
}

func (w ownName) Write(text []byte) (int, error) {
	if _, err := w.Writer.Write([]byte(w.options.inOwnName(string(text)))); err != nil {
		return 0, err
	}
	return len(text), nil
}

// inOwnName returns a text of the engine in which the commands that a person is to run
// are those of the program. What ends in the engine's name is another program.
func (o Options) inOwnName(text string) string {
	for _, words := range []string{" volume ", " orphans"} {
		parts := strings.Split(text, engine+words)
		own := []string{parts[0]}
		for i, part := range parts[1:] {
			program := o.program()
			if before := parts[i]; before != "" && strings.IndexByte(partOfName, before[len(before)-1]) >= 0 {
				program = engine
			}
			own = append(own, program, words, part)
		}
		text = strings.Join(own, "")
	}
	return text
}

// partOfName are the characters that names of programs have, and paths.
const partOfName = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-"

// addCobraCommands adds help and completion, with examples that cobra lacks.
func addCobraCommands(root *cobra.Command) {
	cobra.EnableCommandSorting = false // the examples are in the order of a volume's life
	root.SetHelpCommandGroupID("more")
	root.SetCompletionCommandGroupID("more")
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	examples := map[string]string{
		"help":                  "  csi-node help volume create",
		"completion":            "  csi-node completion bash --help",
		"completion bash":       "  source <(csi-node completion bash)",
		"completion zsh":        "  source <(csi-node completion zsh)",
		"completion fish":       "  csi-node completion fish | source",
		"completion powershell": "  csi-node completion powershell | Out-String | Invoke-Expression",
	}
	for _, c := range root.Commands() {
		c.Example = cmp.Or(c.Example, examples[c.Name()])
		for _, sub := range c.Commands() {
			sub.Example = cmp.Or(sub.Example, examples[c.Name()+" "+sub.Name()])
		}
	}
}

func newVersionCommand(o Options) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  csi-node version",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), o.version())
			return err
		},
	}
}
