package kubectl

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/csi-node/csi-node/pkg/report"
)

// The parts of objects of Kubernetes that are read.
type (
	metadata struct {
		Name, Namespace, UID, DeletionTimestamp string

		Labels map[string]string
	}
	pod struct {
		Metadata metadata
		Spec     struct {
			NodeName   string
			Containers []struct{ Name string }
			Volumes    []podVolume
		}
		Status struct{ Phase string }
	}
	podVolume struct {
		Name                  string
		PersistentVolumeClaim *struct{ ClaimName string }
		Ephemeral             *struct{}
		CSI                   *struct{ Driver string }
	}
	claim struct {
		Metadata metadata

		Spec struct {
			VolumeName, StorageClassName string

			Resources struct {
				Requests struct{ Storage resource.Quantity }
			}
		}
		Status struct{ Phase string }
	}
	csiNode struct {
		Spec struct{ Drivers []struct{ Name string } }
	}
	persistentVolume struct {
		Metadata metadata
		Spec     struct {
			CSI      *struct{ Driver, VolumeHandle string }
			ClaimRef *struct{ Namespace, Name string }

			StorageClassName string
			NodeAffinity     struct {
				Required struct{ NodeSelectorTerms []nodeSelectorTerm }
			}
		}
		Status struct{ Phase string }
	}
)

func (p pod) has(container string) bool {
	return slices.ContainsFunc(p.Spec.Containers, func(c struct{ Name string }) bool { return c.Name == container })
}

func (n csiNode) has(driver string) bool {
	return slices.ContainsFunc(n.Spec.Drivers, func(d struct{ Name string }) bool { return d.Name == driver })
}

// place is a volume, and the node and the driver by which a pod uses it; empty: any.
type place struct {
	volume, node, driver string

	maybe bool // it is not there yet: all that is known of it may be a call that was refused
}

// nodesOf returns the nodes on which the places are; none: some may be on any.
func nodesOf(places []place) []string {
	var nodes []string
	for _, at := range places {
		if at.node == "" {
			return nil
		}
		nodes = append(nodes, at.node)
	}
	return nodes
}

// is tells whether the plugin that made a report is asked for the volume.
func (at place) is(n report.NodeOf) bool {
	if at.node == "" {
		return n.Knows(at.volume)
	}
	return at.node == n.Name && (at.driver == n.Driver || n.Driver == "") // none: it did not say
}

// find returns the volumes that a word names: those of a pod, or that of a claim, as
// namespace/name or a name, or else the volume of that id. notes name the volumes of which
// there is nothing to tell.
func (c *cluster) find(ctx context.Context, word string) (places []place, notes []string, err error) {
	namespace, name, full := strings.Cut(word, "/")
	if !full {
		namespace, name = c.namespace, word
	}
	args := []string{"pod", name}
	if namespace != "" {
		args = append(args, "--namespace="+namespace)
	}
	var p pod
	err = c.get(ctx, &p, args...)
	switch {
	case err != nil && strings.Contains(err.Error(), "NotFound"):
		at, note, claimErr := c.claimed(ctx, namespace, name)
		switch {
		case claimErr == nil && note != "":
			return []place{at}, []string{note}, nil
		case claimErr == nil && at.volume != "":
			return []place{{volume: at.volume}}, nil, nil
		case claimErr == nil:
			return nil, nil, nil
		case !full: // also for who may not read claims
			return []place{{volume: word}}, nil, nil
		case !strings.Contains(claimErr.Error(), "NotFound"):
			return nil, nil, claimErr
		}
		return nil, nil, err
	case err != nil:
		return nil, nil, err
	}
	for _, v := range p.Spec.Volumes {
		at, note, err := c.handle(ctx, p, v)
		switch {
		case err != nil:
			return nil, nil, err
		case note != "":
			notes = append(notes, note)
			if p.Spec.NodeName == "" { // one that has a node waits for no volume to be made
				places = append(places, at)
			}
		case at.volume != "":
			at.node = p.Spec.NodeName
			places = append(places, at)
		}
	}
	if p.Spec.NodeName == "" {
		notes = append(notes, fmt.Sprintf("Pod %s/%s has no node yet: `kubectl describe pod` tells why.", p.Metadata.Namespace, name))
	}
	return places, notes, nil
}

// handle returns the driver of a pod's volume and the id that it has there; empty: it has
// none, and the note says why if that is of interest.
func (c *cluster) handle(ctx context.Context, p pod, v podVolume) (at place, note string, err error) {
	switch {
	case v.CSI != nil:
		return place{volume: inlineHandle(p.Metadata.UID, v.Name), driver: v.CSI.Driver}, "", nil
	case v.PersistentVolumeClaim != nil:
		return c.claimed(ctx, p.Metadata.Namespace, v.PersistentVolumeClaim.ClaimName)
	case v.Ephemeral != nil:
		return c.claimed(ctx, p.Metadata.Namespace, p.Metadata.Name+"-"+v.Name)
	}
	return place{}, "", nil
}

// claimed returns the driver and the id of the volume that a claim has; empty: none of CSI. If
// it has none yet, the note says so, and the id is the one that external-provisioner asks for.
func (c *cluster) claimed(ctx context.Context, namespace, name string) (at place, note string, err error) {
	args := []string{"persistentvolumeclaim", name}
	if namespace != "" {
		args = append(args, "--namespace="+namespace)
	}
	var of claim
	if err := c.get(ctx, &of, args...); err != nil {
		return place{}, "", err
	}
	if of.Spec.VolumeName == "" {
		why := cmp.Or(c.untold(ctx, of), "`kubectl describe pvc` tells why.")
		return place{volume: "pvc-" + of.Metadata.UID, maybe: true}, fmt.Sprintf("Claim %s has no volume yet: %s", strings.TrimPrefix(namespace+"/"+name, "/"), why), nil
	}
	var pv persistentVolume
	if err := c.get(ctx, &pv, "persistentvolume", of.Spec.VolumeName); err != nil {
		return place{}, "", err
	}
	if pv.Spec.CSI == nil {
		return place{}, "", nil // of another kind of storage
	}
	return place{volume: pv.Spec.CSI.VolumeHandle, driver: pv.Spec.CSI.Driver}, "", nil
}

// inlineHandle returns the id that kubelet gives to an inline volume of a pod
// (makeVolumeHandle in its CSI volume plugin).
func inlineHandle(podUID, volume string) string {
	sum := sha256.Sum256([]byte(podUID + volume))
	return "csi-" + hex.EncodeToString(sum[:])
}
