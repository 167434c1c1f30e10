// Package kubectl holds the commands of the plugin `kubectl csi-node`: it shows the
// volumes of all nodes at once. It runs kubectl, which knows the cluster and who the
// user is, and asks csi-node in each of its pods by `kubectl exec`. It changes nothing
// but by `retry`.
//
// Read this file for how the cluster is asked, find.go for how the volumes of a pod are
// found, commands.go and volumes.go for the commands, complete.go for what the shell offers, and ui.go for
// the page.
package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/report"
)

// cluster is how the cluster is reached, and where csi-node is in it.
type cluster struct {
	program     string   // kubectl
	connection  []string // its flags, such as --context=x
	selector    string   // of the plugin's pods
	container   string   // in them
	command     string   // that is run there
	groups      []string // as which --as asks
	node        string   // only this one; empty: all
	namespace   string   // of pods that are named without one; empty: that of the context
	nodeTimeout command.Timeout
}

// allPlugins selects the pods of all releases, and ofDriver is their label that names the driver.
const (
	allPlugins = "app.kubernetes.io/part-of=csi-node"
	ofDriver   = "csi-node.local/driver"
)

// connectionFlags are those of kubectl that say which cluster is meant, and who asks.
var connectionFlags = []string{"kubeconfig", "context", "cluster", "user", "as", "server", "request-timeout"}

func (c *cluster) addFlags(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVarP(&c.namespace, "namespace", "n", "", "namespace of a pod or claim that is named without one (default: that of the context; status: only volumes of this one)")
	f.StringVar(&c.node, "node", "", "only this node")
	f.StringVarP(&c.selector, "selector", "l", allPlugins, "label selector of the plugin's pods, in whatever namespace they are")
	f.StringVar(&c.container, "container", "csi-node", "container of the plugin in its pods")
	f.StringVar(&c.command, "command", "csi-node", "program to run there")
	c.nodeTimeout = command.Timeout(30 * time.Second)
	f.Var(&c.nodeTimeout, "node-timeout", "how long to wait for each node")
	for _, name := range connectionFlags {
		f.String(name, "", "as kubectl's")
	}
	f.StringArrayVar(&c.groups, "as-group", nil, "as kubectl's; may be given several times")
	c.completeFlag(cmd, "node", c.nodeNames)
	command.CompleteBy(cmd, "kubeconfig", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return nil, cobra.ShellCompDirectiveDefault // a file
	})
}

// connect takes over the flags of kubectl.
func (c *cluster) connect(cmd *cobra.Command) {
	for _, name := range connectionFlags {
		if f := cmd.Flag(name); f.Changed {
			c.connection = append(c.connection, "--"+name+"="+f.Value.String())
		}
	}
	for _, group := range c.groups {
		c.connection = append(c.connection, "--as-group="+group)
	}
}

// kubectl runs kubectl and returns what it prints. The error holds what it says.
func (c *cluster) kubectl(ctx context.Context, args ...string) ([]byte, error) {
	var out bytes.Buffer
	err := c.kubectlTo(ctx, &out, args...)
	return out.Bytes(), err
}

func (c *cluster) kubectlTo(ctx context.Context, out io.Writer, args ...string) error {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, c.program, append(slices.Clone(c.connection), args...)...)
	cmd.Stdout, cmd.Stderr = out, &said
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	switch text := strings.Join(strings.Fields(withoutLog(said.String())), " "); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("kubectl %s: no answer in time: %w", args[0], ctx.Err())
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("kubectl is not in the PATH: %w", err)
	default:
		return fmt.Errorf("kubectl %s: %s", args[0], cmp.Or(text, err.Error()))
	}
}

// logged matches the lines that kubectl logs, such as `E1129 17:45:18.443348 10596 memcache.go:265] …`.
var logged = regexp.MustCompile(`(?m)^[EWI]\d{4} .*\n?`)

// withoutLog returns what kubectl says beside its log; if that is all, the log.
func withoutLog(said string) string {
	if rest := logged.ReplaceAllString(said, ""); strings.TrimSpace(rest) != "" {
		return rest
	}
	return said
}

// get reads an object of the cluster, or a list.
func (c *cluster) get(ctx context.Context, into any, args ...string) error {
	raw, err := c.kubectl(ctx, append(append([]string{"get"}, args...), "--output=json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, into)
}

// persistentVolumes returns those of the cluster.
func (c *cluster) persistentVolumes(ctx context.Context) ([]persistentVolume, error) {
	var list struct{ Items []persistentVolume }
	err := c.get(ctx, &list, "persistentvolumes")
	return list.Items, err
}

// plugin is a pod of csi-node.
type plugin struct {
	node, namespace, name string

	driver string // by its label; empty: it has none

	waits bool // its containers have not all been started yet
	ends  bool // it is being deleted, and no other one is there for its node yet
}

func (p plugin) pod() string { return p.namespace + "/" + p.name }

// pods returns the pods of csi-node, whatever their state.
func (c *cluster) pods(ctx context.Context) ([]pod, error) {
	var list struct{ Items []pod }
	err := c.get(ctx, &list, "pods", "--all-namespaces", "--selector="+c.selector)
	return list.Items, err
}

// plugins returns the pods of csi-node that run, or are to start, or end without another one, in
// the order of their nodes.
func (c *cluster) plugins(ctx context.Context) ([]plugin, error) {
	pods, err := c.pods(ctx)
	if err != nil {
		return nil, err
	}
	var all, ending []plugin
	for _, p := range pods {
		if p.Spec.NodeName != "" && (c.node == "" || c.node == p.Spec.NodeName) && (p.Status.Phase == "Running" || p.Status.Phase == "Pending") && p.has(c.container) {
			one := plugin{p.Spec.NodeName, p.Metadata.Namespace, p.Metadata.Name, p.Metadata.Labels[ofDriver], p.Status.Phase == "Pending", p.Metadata.DeletionTimestamp != ""}
			if one.ends {
				ending = append(ending, one)
			} else {
				all = append(all, one)
			}
		}
	}
	for _, p := range ending { // such as one of a node that is down, which stays until the node is back
		if !slices.ContainsFunc(all, func(o plugin) bool { return o.node == p.node && (o.driver == p.driver || p.driver == "") }) {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no pod of csi-node runs%s: see --selector (%s) and --container (%s)", map[bool]string{true: " on node " + c.node}[c.node != ""], c.selector, c.container)
	}
	slices.SortFunc(all, func(a, b plugin) int { return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.name, b.name)) })
	return all, nil
}

// names returns what each plugin is called: its node, and its pod, too, where a node has
// the plugins of several drivers.
func names(plugins []plugin) []string {
	on := map[string]int{}
	for _, p := range plugins {
		on[p.node]++
	}
	all := make([]string, len(plugins))
	for i, p := range plugins {
		all[i] = p.node
		if on[p.node] > 1 {
			all[i] += "/" + p.name
		}
	}
	return all
}

// run runs csi-node in its pod on a node. If it does not run there, the error says which
// command of kubectl tells why.
func (c *cluster) run(ctx context.Context, p plugin, out io.Writer, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.nodeTimeout))
	defer cancel()
	switch {
	case p.ends:
		return fmt.Errorf("the pod is being ended, and no other one is there: `kubectl --namespace=%s describe pod %s` tells why", p.namespace, p.name)
	case p.waits:
		return fmt.Errorf("the pod has not started: `kubectl --namespace=%s describe pod %s` tells why", p.namespace, p.name)
	}
	err := c.kubectlTo(ctx, out, append([]string{"exec", "--namespace=" + p.namespace, p.name, "--container=" + c.container, "--", c.command}, args...)...)
	if err != nil && strings.Contains(err.Error(), "container not found") {
		return fmt.Errorf("%w: it does not run now: `kubectl --namespace=%s logs %s --container=%s` tells why", err, p.namespace, p.name, c.container)
	}
	return err
}

// ask runs csi-node in its pod on a node, and reads what it prints as JSON.
func (c *cluster) ask(ctx context.Context, p plugin, into any, args ...string) error {
	var text bytes.Buffer
	err := c.run(ctx, p, &text, args...)
	if err == nil {
		err = json.Unmarshal(text.Bytes(), into)
	}
	return err
}

// timeout is --timeout of a command on a node: it ends by itself, with what it has, before the
// node counts as one that does not answer.
func (c *cluster) timeout() string { return "--timeout=" + time.Duration(c.nodeTimeout*4/5).String() }

// mostAtOnce bounds how many nodes are asked at a time.
const mostAtOnce = 16

// each calls do for all plugins, some at a time, and waits for all of them.
func each(plugins []plugin, do func(i int, p plugin)) {
	var group sync.WaitGroup
	turns := make(chan struct{}, mostAtOnce)
	for i, p := range plugins {
		turns <- struct{}{}
		group.Go(func() {
			defer func() { <-turns }()
			do(i, p)
		})
	}
	group.Wait()
}

// status asks these nodes, or all, how they stand. A node that does not answer is in the
// report.
func (c *cluster) status(ctx context.Context, nodes ...string) (report.Cluster, []plugin, error) {
	plugins, err := c.plugins(ctx)
	if err != nil {
		return report.Cluster{}, nil, err
	}
	plugins = slices.DeleteFunc(plugins, func(p plugin) bool { return len(nodes) > 0 && !slices.Contains(nodes, p.node) })
	all := report.Cluster{Nodes: make([]report.NodeOf, len(plugins))}
	each(plugins, func(i int, p plugin) {
		n := report.NodeOf{Name: p.node, Pod: p.pod()}
		n.Driver = p.driver
		if err := c.ask(ctx, p, &n.Node, "status", "--output=json"); err != nil {
			n.Error = err.Error()
		}
		all.Nodes[i] = n
	})
	return all, plugins, nil
}
