package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/report"
)

// watchEvery is how often --watch asks the nodes.
const watchEvery = 5 * time.Second

// Command returns the command line of the plugin of kubectl. command.ExitCode gives the
// exit code for the errors that it returns.
func Command(version string) *cobra.Command {
	c := &cluster{program: "kubectl"}
	root := &cobra.Command{
		Use:   "kubectl-csi_node",
		Short: "See the volumes of csi-node on all nodes",
		Long: `kubectl csi-node asks csi-node on all nodes of the cluster, by kubectl exec in its pods.

Exit codes: 0 done, 1 refused or failed, 2 wrong use.`,
		Example:          `  kubectl csi-node status --failing`,
		Version:          cmp.Or(version, "v0.0.0-dev"),
		Annotations:      map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl csi-node"},
		Args:             cobra.NoArgs,
		RunE:             func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceUsage:     true,
		SilenceErrors:    true,
		PersistentPreRun: func(cmd *cobra.Command, _ []string) { c.connect(cmd) },
	}
	c.addFlags(root)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp) // but --kubeconfig and --directory nothing is a file
	root.AddCommand(c.statusCommand(), c.topCommand(), c.volumesCommand(), c.explainCommand(), c.uiCommand(), c.orphansCommand(), c.retryCommand(), c.reportCommand())
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	command.Strict(root)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return command.WrongUse("%w; `%s --help` lists the flags", err, cmd.CommandPath())
	})
	return root
}

func (c *cluster) statusCommand() *cobra.Command {
	var output command.Output
	var filter report.Filter
	var watch bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the volumes of all nodes in one table",
		Long: `status asks csi-node on each node what is asked of it and what is, as csi-node status
does there. With --watch it prints again whenever something changed. To name claims it
lists PersistentVolumes; without the right to do that it names volumes by their ids. With
the right to list CSIStorageCapacity objects it tells of those that nobody keeps any more.
Volumes of all namespaces are shown, or those of --namespace.`,
		Example: `  kubectl csi-node status
  kubectl csi-node status --pod default/writer
  kubectl csi-node status -n default
  kubectl csi-node status --class csi-node-xfs -o wide
  kubectl csi-node status --failing --watch`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.within(&filter)
			known := &claims{cluster: c}
			read := func(ctx context.Context) (report.Cluster, error) {
				all, _, err := c.status(ctx)
				if err != nil {
					return all, err
				}
				all.StaleRoom = c.staleRoom(ctx, all)
				if err := known.name(ctx, all); err != nil && filter.Claim+filter.Class+filter.Namespace != "" {
					return all, err
				}
				return all.Pick(filter), nil
			}
			if watch {
				return command.Watch(cmd, watchEvery, output, read, withoutAges, func(all report.Cluster) error { return output.PrintTables(cmd.OutOrStdout(), all) })
			}
			all, err := read(cmd.Context())
			if err != nil {
				return err
			}
			return errors.Join(output.PrintTables(cmd.OutOrStdout(), all), all.Err())
		},
	}
	output.AddWide(cmd)
	f := cmd.Flags()
	f.StringArrayVar(&filter.Volumes, "volume", nil, "only the volume of this id; may be given several times")
	f.StringVar(&filter.Pod, "pod", "", "only volumes of this pod: namespace/name, or a name")
	f.StringVar(&filter.Claim, "claim", "", "only volumes of this claim: namespace/name, or a name")
	f.StringVar(&filter.Class, "class", "", "only volumes of this StorageClass")
	f.BoolVar(&filter.Failing, "failing", false, "only volumes that are not as asked, or for which a call was refused")
	f.BoolVarP(&watch, "watch", "w", false, "print again whenever something changed, until interrupted")
	c.completeFlag(cmd, "claim", c.claimNames)
	return cmd
}

// within applies --namespace to a filter: to a pod or a claim that is named without one, or
// else to all volumes.
func (c *cluster) within(f *report.Filter) {
	if c.namespace == "" {
		return
	}
	if f.Pod+f.Claim == "" {
		f.Namespace = c.namespace
	}
	for _, word := range []*string{&f.Pod, &f.Claim} {
		if *word != "" && !strings.Contains(*word, "/") {
			*word = c.namespace + "/" + *word
		}
	}
}

// withoutAges returns a report without what changes while nothing happens.
func withoutAges(all report.Cluster) report.Cluster {
	all.Nodes = slices.Clone(all.Nodes)
	for i := range all.Nodes {
		all.Nodes[i].Node = all.Nodes[i].WithoutAges()
	}
	return all
}

func (c *cluster) topCommand() *cobra.Command {
	var output command.Output
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show how full the storage of all nodes is",
		Long: `top asks csi-node on each node how full its pool, its volume groups and its thin pools
are, the fullest first.`,
		Example: `  kubectl csi-node top`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, plugins, err := c.status(cmd.Context())
			if err != nil {
				return err
			}
			called := map[string]string{} // by pod
			for i, name := range names(plugins) {
				called[all.Nodes[i].Pod] = name
			}
			fills := all.Fills()
			return errors.Join(output.Print(cmd.OutOrStdout(), fills, func(out io.Writer) {
				fmt.Fprintln(out, "NODE\tSTORAGE\tUSED\tROOM")
				for _, f := range fills {
					fmt.Fprintf(out, "%s\t%s\t%.0f%%\t%s\n", called[f.Pod], f.Name, 100*f.Used, f.Text)
				}
				for _, n := range all.Nodes {
					measured := slices.ContainsFunc(fills, func(f report.FillOf) bool { return f.Pod == n.Pod })
					if !measured && len(n.StorageProblems) > 0 { // such as without its pool
						fmt.Fprintf(out, "%s\t-\t-\t%s, as `kubectl csi-node status` tells\n", called[n.Pod], n.StorageProblems[0].Reason)
					}
				}
			}), all.Err())
		},
	}
	output.Add(cmd)
	return cmd
}

// explained is the explanation of a volume on one of several nodes. The JSON is the contract of
// explain's --output json, a list of them.
type explained struct {
	Node string `json:"node"`
	Pod  string `json:"pod"` // of the plugin there, as namespace/name
	report.Explanation
}

func (c *cluster) explainCommand() *cobra.Command {
	var output command.Output
	cmd := &cobra.Command{
		Use:   "explain POD|CLAIM|VOLUME",
		Short: "Explain the state of the volumes of a pod, of a claim, or of one volume",
		Long: `explain finds the volumes of a pod (namespace/name, or a name in --namespace) by its
claims, and tells of each what csi-node explain tells on the pod's node. A name that
is no pod's is taken for a claim's, and else for the id of a volume.`,
		Example: `  kubectl csi-node explain default/writer
  kubectl csi-node explain pvc-1ba1c44d-7b0f-4f5e-8f2e-0a3c5d2a4a5e`,
		Args: command.One("a POD, a CLAIM, or the id of a VOLUME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			all, between := []explained{}, ""
			told := func(p plugin, volume string) error {
				var text bytes.Buffer
				if err := c.run(cmd.Context(), p, &text, "explain", volume); err != nil {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "%sOn node %s: %s", between, p.node, text.String())
				between = "\n"
				return err
			}
			listed := func(p plugin, volume string) error {
				e := explained{Node: p.node, Pod: p.pod()}
				err := c.ask(cmd.Context(), p, &e.Explanation, "explain", "--output=json", "--", volume)
				if err == nil {
					all = append(all, e)
				}
				return err
			}
			tell := map[bool]func(plugin, string) error{true: told, false: listed}[output == command.Table]
			err := c.atVolumes(cmd, args[0], func(p plugin, volume string) error {
				if err := tell(p, volume); err != nil {
					return fmt.Errorf("node %s: volume %s: %w", p.node, volume, err)
				}
				return nil
			})
			if len(all) > 0 {
				err = errors.Join(output.Print(cmd.OutOrStdout(), all, nil), err)
			}
			return err
		},
		ValidArgsFunction: c.completeClaim,
	}
	output.Add(cmd)
	return cmd
}

func (c *cluster) retryCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "retry POD|CLAIM|VOLUME",
		Short:   "Retry now what fails for a pod, for a claim, or for one volume",
		Long:    `retry runs csi-node volume retry for each volume that explain would tell of.`,
		Example: `  kubectl csi-node retry default/writer`,
		Args:    command.One("a POD, a CLAIM, or the id of a VOLUME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.atVolumes(cmd, args[0], func(p plugin, volume string) error {
				return c.run(cmd.Context(), p, cmd.OutOrStdout(), "volume", "retry", volume, c.timeout())
			})
		},
		ValidArgsFunction: c.completeClaim,
	}
}

// atVolumes calls do for each volume that a word names, on each node where csi-node
// knows it. A volume of a pod is looked for on the pod's node, and no other node is asked:
// one that is down would be waited for.
func (c *cluster) atVolumes(cmd *cobra.Command, word string, do func(p plugin, volume string) error) error {
	places, notes, err := c.find(cmd.Context(), word)
	if err != nil {
		return err
	}
	for _, note := range notes {
		fmt.Fprintln(cmd.ErrOrStderr(), note)
	}
	none := fmt.Errorf("%s has no volume that a driver is asked for yet", word)
	if len(places) == 0 {
		return none
	}
	all, plugins, err := c.status(cmd.Context(), nodesOf(places)...)
	if err != nil {
		return err
	}
	var errs []error
	known := false
	for _, at := range places {
		if at.driver != "" && !slices.ContainsFunc(all.Nodes, func(n report.NodeOf) bool { return n.Driver == at.driver || n.Driver == "" }) {
			fmt.Fprintf(cmd.ErrOrStderr(), "Volume %s is of the driver %s, of which no plugin was asked.\n", at.volume, at.driver)
			continue
		}
		found := false
		for i, p := range plugins {
			if at.is(all.Nodes[i]) {
				found = true
				errs = append(errs, do(p, at.volume))
			}
		}
		known = known || found || !at.maybe
		if !found && !at.maybe {
			errs = append(errs, fmt.Errorf("volume %s: csi-node knows of it on no node that was asked", at.volume))
		}
	}
	if !known {
		errs = append(errs, none)
	}
	all.Nodes = slices.DeleteFunc(all.Nodes, func(n report.NodeOf) bool { // of another driver
		return n.Driver != "" && !slices.ContainsFunc(places, func(at place) bool { return at.driver == "" || at.driver == n.Driver })
	})
	return errors.Join(append(errs, all.Err())...)
}

// orphansOf are those of one of several nodes. The JSON is the contract of orphans' --output json,
// a list of them.
type orphansOf struct {
	Node    string          `json:"node"`
	Pod     string          `json:"pod"`     // of the plugin there, as namespace/name
	Orphans json.RawMessage `json:"orphans"` // as csi-node orphans lists them
}

func (c *cluster) orphansCommand() *cobra.Command {
	var output command.Output
	cmd := &cobra.Command{
		Use:     "orphans",
		Short:   "List devices and mounts that no record explains, of all nodes",
		Long:    `orphans runs csi-node orphans on each node. It changes nothing.`,
		Example: `  kubectl csi-node orphans`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			plugins, err := c.plugins(cmd.Context())
			if err != nil {
				return err
			}
			asked := []string{"orphans"}
			if output != command.Table {
				asked = append(asked, "--output=json")
			}
			texts, errs := make([]bytes.Buffer, len(plugins)), make([]error, len(plugins))
			each(plugins, func(i int, p plugin) {
				if err := c.run(cmd.Context(), p, &texts[i], asked...); err != nil {
					errs[i] = fmt.Errorf("node %s: %w", p.node, err)
				}
			})
			all := []orphansOf{}
			for i, name := range names(plugins) {
				switch {
				case errs[i] != nil:
				case output == command.Table:
					fmt.Fprintf(cmd.OutOrStdout(), "Node %s:\n%s", name, texts[i].String())
				default:
					all = append(all, orphansOf{plugins[i].node, plugins[i].pod(), texts[i].Bytes()})
				}
			}
			if output != command.Table {
				errs = append(errs, output.Print(cmd.OutOrStdout(), all, nil))
			}
			return errors.Join(errs...)
		},
	}
	output.Add(cmd)
	return cmd
}

func (c *cluster) reportCommand() *cobra.Command {
	dir := ""
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Write the bug report of each node to a file",
		Long: `report runs csi-node report on each node (or on --node) and writes what it gathers to
csi-node-report-NODE.tar.gz in a directory, or csi-node-report-NODE_POD.tar.gz where a
node has several drivers. csi-node report --stdout shows on a node what is in it.`,
		Example: `  kubectl csi-node report --node worker-1`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			plugins, err := c.plugins(cmd.Context())
			if err != nil {
				return err
			}
			errs := make([]error, len(plugins))
			files := names(plugins)
			each(plugins, func(i int, p plugin) {
				files[i] = filepath.Join(dir, "csi-node-report-"+strings.ReplaceAll(files[i], "/", "_")+".tar.gz")
				if err := command.WriteNew(files[i], func(out io.Writer) error { return c.run(cmd.Context(), p, out, "report", "--file=-", c.timeout()) }); err != nil {
					errs[i] = fmt.Errorf("node %s: %w", p.node, err)
				}
			})
			for i, file := range files {
				if errs[i] == nil {
					fmt.Fprintf(cmd.OutOrStdout(), "%s is written.\n", file)
				}
			}
			return errors.Join(errs...)
		},
	}
	cmd.Flags().StringVar(&dir, "directory", ".", "directory of the files")
	command.CompleteBy(cmd, "directory", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return nil, cobra.ShellCompDirectiveFilterDirs
	})
	return cmd
}
