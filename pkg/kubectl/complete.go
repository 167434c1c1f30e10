package kubectl

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
)

// completeTime bounds how long whoever pressed Tab waits.
const completeTime = 5 * time.Second

// completeFlag offers to the shell, for a flag, what is read of the cluster.
func (c *cluster) completeFlag(cmd *cobra.Command, flag string, read func(context.Context) ([]string, error)) {
	command.CompleteBy(cmd, flag, func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return c.offer(cmd, read)
	})
}

// completeClaim offers claims for the only argument.
func (c *cluster) completeClaim(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return c.offer(cmd, c.claimNames)
}

// offer reads words of the cluster. What cannot be read is not offered.
func (c *cluster) offer(cmd *cobra.Command, read func(context.Context) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	c.connect(cmd)
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
	defer cancel()
	words, err := read(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	slices.Sort(words)
	return slices.Compact(words), cobra.ShellCompDirectiveNoFileComp
}

// nodeNames returns the nodes that have the plugin.
func (c *cluster) nodeNames(ctx context.Context) (nodes []string, err error) {
	plugins, err := c.plugins(ctx)
	for _, p := range plugins {
		nodes = append(nodes, p.node)
	}
	return nodes, err
}

// claimNames returns the claims of the plugins' drivers, as namespace/name: all, or those in
// --namespace.
func (c *cluster) claimNames(ctx context.Context) (names []string, err error) {
	plugins, err := c.plugins(ctx)
	if err != nil {
		return nil, err
	}
	drivers := map[string]bool{}
	for _, p := range plugins {
		drivers[p.driver] = true
	}
	all, err := c.claims(ctx)
	for of, by := range all {
		if drivers[of.driver] && (c.namespace == "" || strings.HasPrefix(by.claim, c.namespace+"/")) {
			names = append(names, by.claim)
		}
	}
	return names, err
}
