package driver

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
)

func newStatusCommand(o Options) *cobra.Command {
	var stateDir string
	var output command.Output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what is asked of this node against what is",
		Long: `status asks the running plugin; if none runs it looks at the store and the kernel
itself. It changes nothing. Paths that are not needed to tell things apart are left
out; explain and --output json have them.`,
		Example: `  csi-node status
  csi-node status --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Check(); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			report, err := ReadReport(ctx, stateDir, o.Backends...)
			if err != nil {
				return err
			}
			return show(cmd.OutOrStdout(), output, report)
		},
	}
	addStateDir(cmd, o, &stateDir)
	output.Add(cmd)
	return cmd
}

// show prints a report in the format that was asked for.
func show(out io.Writer, format command.Output, report Report) error {
	if format == "json" {
		return format.Print(out, report, nil)
	}
	return report.Print(out)
}

// Print writes a report as the status command does.
func (report Report) Print(out io.Writer) error {
	if !report.Running {
		fmt.Fprintln(out, "No plugin is running. This is what the store asks for and what is on the node; nothing is done about it until one is started.")
	}
	if r := report.Registration; r != nil {
		switch {
		case r.Registered:
			fmt.Fprintf(out, "Registered with kubelet %s ago.\n", time.Since(r.Since).Round(time.Second))
		case r.Error != "":
			fmt.Fprintf(out, "The plugin is not registered with kubelet, as of %s ago: %s\n", time.Since(r.Since).Round(time.Second), r.Error)
		default:
			fmt.Fprintf(out, "kubelet has not asked at %s yet: is it running, and is this its plugins_registry?\n", r.Socket)
		}
	}
	if len(report.Volumes) == 0 {
		_, err := fmt.Fprintln(out, "No volume is asked of this node.")
		return err
	}
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "VOLUME\tPART\tASKED\tIS\tSINCE\tNEXT TRY\tDETAIL")
	for _, v := range report.Volumes {
		detail := "device " + v.Device
		if v.Holder != "" {
			detail += "; held by " + v.Holder
		}
		if v.Step != nil {
			detail += fmt.Sprintf("; step %s has been running for %s", v.Step.Step, v.Step.Age.Round(time.Millisecond))
			if v.Step.Progress != "" {
				detail += " (" + v.Step.Progress + ")"
			}
		}
		fmt.Fprintf(t, "%s\t\t\t%s\t\t\t%s\n", v.Volume, v.Worst(), detail)
		for _, p := range v.Parts {
			next := ""
			if p.NextTry != nil {
				next = "in " + max(time.Until(*p.NextTry), 0).Round(time.Second/10).String()
			}
			part := p.Part
			if p.Pod != "" {
				part = "target of pod " + p.Pod
			}
			fmt.Fprintf(t, "\t%s\t%s\t%s\t%s ago\t%s\t%s\n", part, strings.Replace(p.Asked, " at "+p.Path, "", 1), p.Is, time.Since(p.Since).Round(time.Second), next, detailOf(p))
		}
	}
	return t.Flush()
}

// detailOf says what is wrong with a part, in one line, and how often it was lost.
func detailOf(p PartStatus) string {
	words := strings.Fields(p.Error)
	if p.Losses > 0 {
		words = append(words, fmt.Sprintf("(lost %d times in a row, last %s ago)", p.Losses, time.Since(p.Lost).Round(time.Second)))
	}
	return strings.Join(words, " ")
}
