package driver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/state"
)

func newReportCommand(o Options) *cobra.Command {
	var stateDir, file, log string
	var all bool
	var timeout command.Timeout
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Gather what a bug report needs in one archive",
		Long: `report gathers what somebody needs who is to find out what is wrong: status,
explanations, orphans, metrics, the end of the log, mounts and devices of the
plugin, versions, settings and facts about the kernel. It works while the plugin is
down, too, and changes nothing.

It lists what it has gathered, and writes it only if --file names where; --stdout
prints every text, so that you can read what you would give away. Secrets and the names
of files on volumes are in none of them. Names of nodes, namespaces, pods and volumes
are. The log of a plugin that has ended is known to kubectl alone: --log adds it.`,
		Example: `  csi-node report
  csi-node report --file report.tar.gz
  csi-node report --stdout | less`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if all && file != "" {
				return command.WrongUse("--stdout prints all texts, and --file writes them: give one of them")
			}
			given, err := readLog(cmd, log)
			if err != nil {
				return err
			}
			if file != "" && file != "-" {
				if err := tryFile(file); err != nil {
					return err
				}
			}
			ctx, cancel := timeout.Context(cmd)
			defer cancel()
			b := readBundle(ctx, stateDir, o, given)
			if all {
				return b.print(cmd.OutOrStdout())
			}
			listing := cmd.OutOrStdout()
			if file == "-" {
				listing = cmd.ErrOrStderr()
			}
			if err := b.list(listing); err != nil {
				return err
			}
			switch file {
			case "":
				_, err = fmt.Fprintf(listing, "\nNothing is written yet: --stdout prints all of it, --file FILE writes it.\n")
			case "-":
				err = b.write(cmd.OutOrStdout(), time.Now())
			default:
				if err = command.WriteNew(file, func(out io.Writer) error { return b.write(out, time.Now()) }); err == nil {
					_, err = fmt.Fprintf(listing, "\n%s is written.\n", file)
				}
			}
			return err
		},
	}
	addStateDir(cmd, o, &stateDir)
	timeout.Add(cmd, time.Minute, "the plugin")
	cmd.Flags().StringVar(&file, "file", "", "write the archive (tar.gz) to this new file; - for standard output")
	cmd.Flags().BoolVar(&all, "stdout", false, "print all texts instead")
	cmd.Flags().StringVar(&log, "log", "", "a file with the plugin's log, of which the end is added; - for standard input, such as from kubectl logs --previous")
	return cmd
}

// readLog reads the end of the log that --log names.
func readLog(cmd *cobra.Command, name string) (text string, err error) {
	from := cmd.InOrStdin()
	switch name {
	case "":
		return "", nil
	case "-":
	default:
		f, err := os.Open(name)
		if err != nil {
			return "", fmt.Errorf("--log: %w", err)
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		from = f
	}
	var tail logTail // bounds what is kept, however long the log is
	if _, err := io.Copy(&tail, from); err != nil {
		return "", fmt.Errorf("--log: %w", err)
	}
	return tail.String(), nil
}

// list writes which texts there are.
func (b bundle) list(out io.Writer) error {
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "FILE\tSIZE\tWHAT IS IN IT")
	for _, f := range b {
		fmt.Fprintf(t, "%s\t%s\t%s\n", f.Name, state.FormatSize(int64(len(f.Text))), f.What)
	}
	return t.Flush()
}

// print writes all texts.
func (b bundle) print(out io.Writer) error {
	for _, f := range b {
		if _, err := fmt.Fprintf(out, "==> %s: %s <==\n%s\n", f.Name, f.What, f.Text); err != nil {
			return err
		}
	}
	return nil
}

// tryFile says before all the work why the file cannot be made, and leaves none: who is ended
// in the middle of the work may try again.
func tryFile(name string) error {
	if err := command.WriteNew(name, func(io.Writer) error { return nil }); err != nil {
		return fmt.Errorf("--file: %w", err)
	}
	return os.Remove(name)
}
