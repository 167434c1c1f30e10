package report

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Node is the report of a whole node: what `csi-node status` prints. The JSON is
// the contract of `csi-node status --output json`.
type Node struct {
	Running bool     `json:"running"`          // a plugin answered; else store and kernel were looked at
	NodeID  string   `json:"nodeID,omitempty"` // what the plugin calls the node
	Driver  string   `json:"driver,omitempty"`
	Version string   `json:"version,omitempty"`
	Volumes []Status `json:"volumes"`
	// Refusals are the last refused calls of volumes, by their ids: also of volumes of
	// which nothing is asked, because the call was refused.
	Refusals []Refusal `json:"refusals,omitempty"`
	// Registration is what kubelet answered, if the plugin registers itself.
	Registration *Registration `json:"registration,omitempty"`
	// Storage is what the plugin measured of its backends' places.
	Storage []Place `json:"storage,omitempty"`
	// StorageProblems is what is wrong with them.
	StorageProblems []StorageProblem `json:"storageProblems,omitempty"`
	// Orphans are devices and mounts that the plugin made and that no record explains, such as
	// after the loss of the store: of volumes that pods may use.
	Orphans int `json:"orphans,omitempty"`

	left int // how many volumes a filter left out
}

// Registration is the last answer of kubelet to a plugin that registers itself.
type Registration struct {
	Socket     string    `json:"socket"` // at which kubelet asks
	Registered bool      `json:"registered"`
	Error      string    `json:"error,omitempty"` // why kubelet refused, or cannot be reached
	Since      time.Time `json:"since,omitzero"`  // of the answer; zero: kubelet has not asked yet
}

// Unsettled gives the condition of each part that is not as asked, and why.
func (n Node) Unsettled() []string {
	var all []string
	for _, v := range n.Volumes {
		for _, p := range v.Parts {
			if p.Is != Settled {
				all = append(all, strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", p.Part, p.Is, p.Error), ": "))
			}
		}
	}
	return all
}

// Knows reports whether the node's report has anything about a volume.
func (n Node) Knows(volume string) bool {
	return slices.Contains(n.IDs(), volume)
}

// IDs returns the ids of the volumes of which the report has anything.
func (n Node) IDs() (ids []string) {
	for _, v := range n.Volumes {
		ids = append(ids, v.Volume)
	}
	for _, r := range n.Refusals {
		if !slices.Contains(ids, r.Volume) {
			ids = append(ids, r.Volume)
		}
	}
	return ids
}

// Told returns what there is to say about the node as a whole, in sentences.
func (n Node) Told() []string {
	var all []string
	if !n.Running {
		all = append(all, "No plugin is running. This is what the store asks for and what is on the node; nothing is done about it until one is started.")
	}
	if n.Registration != nil {
		all = append(all, n.Registration.Tell())
	}
	for _, problem := range n.StorageProblems {
		all = append(all, "Storage: "+problem.tell())
	}
	if n.Orphans > 0 {
		all = append(all, n.tellOrphans("csi-node"))
	}
	return all
}

func (n Node) tellOrphans(program string) string {
	return fmt.Sprintf("Volumes that are attached or mounted, and that no record explains: %d. `%s orphans` lists them.", n.Orphans, program)
}

// WithoutAges returns the report without the ages, which change even while nothing happens.
func (n Node) WithoutAges() Node {
	n.Volumes = slices.Clone(n.Volumes)
	for i, v := range n.Volumes {
		if v.Step != nil {
			step := *v.Step
			step.Age = 0
			n.Volumes[i].Step = &step
		}
	}
	n.Storage = nil // which every write of a pod changes
	n.left = 0
	return n
}

// Tell says in a sentence how that stands.
func (r Registration) Tell() string {
	switch {
	case r.Registered:
		return fmt.Sprintf("Registered with kubelet %s ago.", time.Since(r.Since).Round(time.Second))
	case r.Error != "":
		return fmt.Sprintf("The plugin is not registered with kubelet, as of %s ago: %s", time.Since(r.Since).Round(time.Second), r.Error)
	}
	return fmt.Sprintf("kubelet has not asked at %s yet: is it running, and is this its plugins_registry?", r.Socket)
}
