package report

import (
	"slices"
	"strings"
)

// Filter picks volumes. Its zero value picks all.
type Filter struct {
	Volumes []string // ids; none: any
	Pod     string   // namespace/name, or a name in any namespace; empty: any
	Claim   string   // likewise
	Class   string   // a StorageClass; empty: any
	// Namespace is that of the claim or of a pod; empty: any.
	Namespace string
	Failing   bool // only those that are not as asked, or for which a call was refused
}

// Pick returns the report of the volumes that a filter picks.
func (n Node) Pick(f Filter) Node {
	refused := map[string]bool{}
	for _, r := range n.Refusals {
		refused[r.Volume] = true
	}
	picked, all := map[string]bool{}, len(n.Volumes)
	n.Volumes = slices.DeleteFunc(slices.Clone(n.Volumes), func(v Status) bool {
		in := f.picks(v) && (!f.Failing || v.Worst() != Settled || refused[v.Volume])
		picked[v.Volume] = in
		return !in
	})
	n.left += all - len(n.Volumes)
	n.Refusals = slices.DeleteFunc(slices.Clone(n.Refusals), func(r Refusal) bool {
		waits := f.names(r.Volume) && f.claims(r.Claim, r.Class) && (f.within(r.Claim) || f.within(r.Pod)) && (f.Pod == "" || called(r.Pod, f.Pod))
		return !picked[r.Volume] && !waits
	})
	return n
}

// Pick is that of a Node.
func (c Cluster) Pick(f Filter) Cluster {
	c.Nodes = slices.Clone(c.Nodes)
	for i := range c.Nodes {
		c.Nodes[i].Node = c.Nodes[i].Node.Pick(f)
	}
	return c
}

// picks reports whether a volume is one of those that the filter names.
func (f Filter) picks(v Status) bool {
	inNamespace := func(p PartStatus) bool { return f.within(p.Pod) }
	isFor := func(p PartStatus) bool { return called(p.Pod, f.Pod) }
	return f.names(v.Volume) && f.claims(v.Claim, v.Class) &&
		(f.within(v.Claim) || slices.ContainsFunc(v.Parts, inNamespace)) &&
		(f.Pod == "" || slices.ContainsFunc(v.Parts, isFor))
}

func (f Filter) names(volume string) bool {
	return len(f.Volumes) == 0 || slices.Contains(f.Volumes, volume)
}

func (f Filter) claims(claim, class string) bool {
	return (f.Claim == "" || called(claim, f.Claim)) && (f.Class == "" || class == f.Class)
}

// within reports whether an object, namespace/name, is in the namespace.
func (f Filter) within(object string) bool {
	return f.Namespace == "" || strings.HasPrefix(object, f.Namespace+"/")
}

// called reports whether an object, namespace/name, is called so with its namespace or
// without.
func called(object, word string) bool {
	_, name, _ := strings.Cut(object, "/")
	return object != "" && (object == word || name == word)
}
