package report

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/csi-node/csi-node/pkg/state"
)

// Finding is one thing that is wrong with a volume, for NodeGetVolumeHealth.
type Finding struct {
	Kind FindingKind
	// Reason is one word for programs. There is one finding for each kind and reason.
	Reason  string
	Message string // for people
}

// FindingKind says how bad a Finding is.
type FindingKind int

const (
	// Degraded: the volume can be used, but not as asked.
	Degraded FindingKind = iota
	// Inaccessible: the volume cannot be used on this node.
	Inaccessible
	// DataLoss: data is lost, and somebody must restore it.
	DataLoss
)

// Health renders the report for NodeGetVolumeHealth: what is wrong with the volume,
// nothing if nothing is. A part that is under way or waits is not wrong.
func (v Volume) Health() []Finding {
	all := v.dataLoss()
	add := func(kind FindingKind, reason, message string) {
		for i := range all {
			if all[i].Kind == kind && all[i].Reason == reason {
				all[i].Message += "; " + message
				return
			}
		}
		all = append(all, Finding{kind, reason, message})
	}
	byName := slices.SortedFunc(slices.Values(v.Parts), func(a, b Part) int { return cmp.Compare(a.Part.String(), b.Part.String()) })
	for _, p := range byName {
		if p.Is != Failing {
			continue
		}
		message := cmp.Or(p.Problem, p.Refusal)
		switch p.Part.Kind {
		case state.StageKind:
			add(Inaccessible, "StageUnusable", message)
		case state.SizeKind:
			add(Degraded, "SizeNotReached", message)
		case state.TargetKind:
			add(Degraded, "TargetUnusable", message)
		}
	}
	return all
}

// dataLoss compares what is on the volume with what its backend's facts say of it.
func (v Volume) dataLoss() []Finding {
	d, source := v.Have.Device, v.Have.Lowest()
	lacks := source.Lacks
	if !source.Attached() { // an attached device lags behind its backing while it grows
		lacks = max(lacks, source.Capacity-source.Size)
	}
	switch {
	case d.Formatted != "" && v.Have.Contents.Kind == state.ContentsBlank:
		return []Finding{{DataLoss, "FilesystemLost", fmt.Sprintf("the volume was formatted as %s and is blank now", d.Formatted)}}
	case lacks > 0:
		return []Finding{{DataLoss, "BackingTruncated", fmt.Sprintf("the volume has %d bytes of %d", source.Capacity-lacks, source.Capacity)}}
	}
	return nil
}
