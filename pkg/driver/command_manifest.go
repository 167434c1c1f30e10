package driver

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/devices"
)

func newManifestCommand(o Options) *cobra.Command {
	var stateDir, secret string
	var add additions
	var timeout command.Timeout
	output := command.Output("yaml")
	cmd := &cobra.Command{
		Use:   "manifest [VOLUME...]",
		Short: "Print static PersistentVolumes for volumes of this node (csi-node only)",
		Long: `manifest prints a PersistentVolume for each volume that the plugin's backends have
on this node, or for those that are named: with the policy Retain, and with the
affinity to this node. It is for a pool that was carried here from another node,
or whose cluster is gone. It changes nothing, and leaves out inline volumes.

A PersistentVolume of another node that has the same name must be gone first: give
it the policy Retain, then delete it. A claim takes one by its spec.volumeName.`,
		Example: `  csi-node volume manifest
  csi-node volume manifest try --storage-class local
  csi-node volume manifest --secret-ref my-namespace/passphrases`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := add.name(secret); err != nil {
				return err
			}
			ctx, cancel := timeout.Context(cmd)
			defer cancel()
			all, err := readInventory(ctx, stateDir, o)
			if err != nil {
				return fmt.Errorf("volume manifest: %w", err)
			}
			volumes, err := all.manifests(args, add)
			if len(volumes) == 0 && err != nil {
				return err
			}
			if locked := all.withLayers(volumes); len(locked) > 0 && add.secret == nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "Of these, %s need a Secret, such as the passphrase of an encrypted volume: name it by --secret-ref.\n", strings.Join(locked, ", "))
			}
			return errors.Join(printManifests(cmd.OutOrStdout(), output, volumes), err)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			ids, _ := command.CompleteVolume(cmd, nil, "")
			return slices.DeleteFunc(ids, func(id string) bool { return slices.Contains(args, id) }), cobra.ShellCompDirectiveNoFileComp
		},
	}
	addStateDir(cmd, o, &stateDir)
	timeout.Add(cmd, 30*time.Second, "the plugin")
	output.AddObjects(cmd)
	cmd.Flags().StringVar(&add.class, "storage-class", "", "storageClassName of the volumes; a claim must name the same")
	cmd.Flags().StringVar(&secret, "secret-ref", "", "`NAMESPACE/NAME` of the Secret that those with layers, such as encrypted ones, name for stage, publish and expand")
	return cmd
}

// additions are what only the caller knows of the volumes.
type additions struct {
	class  string
	secret *secretReference // of those with layers
}

// name sets the Secret from namespace/name; empty: none is named.
func (a *additions) name(secret string) error {
	if secret == "" {
		return nil
	}
	namespace, name, both := strings.Cut(secret, "/")
	if !both || !domainName.MatchString(namespace) || !domainName.MatchString(name) {
		return command.WrongUse("--secret-ref %q is not NAMESPACE/NAME of a Secret", secret)
	}
	a.secret = &secretReference{name, namespace}
	return nil
}

// persistentVolume is a PersistentVolume, as far as manifest writes it.
type persistentVolume struct {
	APIVersion string               `json:"apiVersion"`
	Kind       string               `json:"kind"`
	Metadata   objectMeta           `json:"metadata"`
	Spec       persistentVolumeSpec `json:"spec"`
}

type objectMeta struct {
	Name string `json:"name"`
}

type persistentVolumeSpec struct {
	Capacity         map[string]string `json:"capacity"`
	AccessModes      []string          `json:"accessModes"`
	VolumeMode       string            `json:"volumeMode"`
	ReclaimPolicy    string            `json:"persistentVolumeReclaimPolicy"`
	StorageClassName string            `json:"storageClassName"`
	CSI              csiSource         `json:"csi"`
	NodeAffinity     *nodeAffinity     `json:"nodeAffinity,omitempty"`
}

type csiSource struct {
	Driver           string            `json:"driver"`
	VolumeHandle     string            `json:"volumeHandle"`
	FSType           string            `json:"fsType,omitempty"`
	VolumeAttributes map[string]string `json:"volumeAttributes,omitempty"`
	// A publish brings the secret after a restart of the plugin.
	StageSecret   *secretReference `json:"nodeStageSecretRef,omitempty"`
	PublishSecret *secretReference `json:"nodePublishSecretRef,omitempty"`
	ExpandSecret  *secretReference `json:"nodeExpandSecretRef,omitempty"`
}

type secretReference struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

type nodeAffinity struct {
	Required nodeSelector `json:"required"`
}

type nodeSelector struct {
	Terms []nodeSelectorTerm `json:"nodeSelectorTerms"`
}

type nodeSelectorTerm struct {
	Expressions []nodeSelectorRequirement `json:"matchExpressions"`
}

type nodeSelectorRequirement struct {
	Key      string   `json:"key"`
	Operator string   `json:"operator"`
	Values   []string `json:"values"`
}

// manifests returns the PersistentVolumes of the named volumes; without names, of all
// that live longer than a pod, and with those an error if the facts of others cannot be read.
func (i inventory) manifests(ids []string, add additions) (all []persistentVolume, err error) {
	found := map[string]bool{}
	for _, v := range i.Volumes {
		named := slices.Contains(ids, v.ID)
		found[v.ID] = true
		switch {
		case len(ids) > 0 && !named, len(ids) == 0 && v.Inline:
			continue
		case v.Inline:
			return nil, fmt.Errorf("volume %s: an inline volume ends with its pod, and no PersistentVolume can be of it", v.ID)
		case v.Error != "" && named:
			return nil, fmt.Errorf("volume %s: its facts cannot be read: %s", v.ID, v.Error)
		case v.Error != "":
			err = errors.Join(err, fmt.Errorf("volume %s: it is left out, as its facts cannot be read: %s", v.ID, v.Error))
			continue
		}
		all = append(all, i.manifest(v, add))
	}
	for _, id := range ids {
		if !found[id] {
			return nil, fmt.Errorf("volume %s: no backend of this plugin has such a volume on this node; `csi-node volume list` shows them", id)
		}
	}
	return all, err
}

// withLayers returns the ids of those that have layers.
func (i inventory) withLayers(volumes []persistentVolume) (ids []string) {
	for _, v := range i.Volumes {
		if len(v.Layers) > 0 && slices.ContainsFunc(volumes, func(pv persistentVolume) bool { return pv.Spec.CSI.VolumeHandle == v.ID }) {
			ids = append(ids, v.ID)
		}
	}
	return ids
}

func (i inventory) manifest(v listedVolume, add additions) persistentVolume {
	attributes := maps.Clone(v.Context)
	if v.Backend != i.Default {
		if attributes == nil {
			attributes = map[string]string{}
		}
		attributes[devices.BackendKey] = v.Backend
	}
	pv := persistentVolume{APIVersion: "v1", Kind: "PersistentVolume", Metadata: objectMeta{objectName(v.ID)}, Spec: persistentVolumeSpec{
		Capacity:         map[string]string{"storage": resource.NewQuantity(v.Bytes, resource.BinarySI).String()},
		AccessModes:      []string{"ReadWriteOnce"},
		VolumeMode:       "Filesystem",
		ReclaimPolicy:    "Retain",
		StorageClassName: add.class,
		CSI:              csiSource{Driver: i.Driver, VolumeHandle: v.ID, VolumeAttributes: attributes},
	}}
	if len(v.Layers) > 0 {
		pv.Spec.CSI.StageSecret, pv.Spec.CSI.PublishSecret, pv.Spec.CSI.ExpandSecret = add.secret, add.secret, add.secret
	}
	switch {
	case v.Block && v.Formatted == "":
		pv.Spec.VolumeMode = "Block"
	case v.Formatted == "": // else it is mounted as what it holds
		pv.Spec.CSI.FSType = v.FSType
	}
	for _, key := range slices.Sorted(maps.Keys(i.Topology)) {
		if pv.Spec.NodeAffinity == nil {
			pv.Spec.NodeAffinity = &nodeAffinity{nodeSelector{[]nodeSelectorTerm{{}}}}
		}
		term := &pv.Spec.NodeAffinity.Required.Terms[0]
		term.Expressions = append(term.Expressions, nodeSelectorRequirement{key, "In", []string{i.Topology[key]}})
	}
	return pv
}

// objectName returns the name of the PersistentVolume of a volume: its id if that can
// be the name of an object, else one made of it.
func objectName(id string) string {
	if len(id) <= 253 && domainName.MatchString(id) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return "csi-" + hex.EncodeToString(sum[:16])
}

func printManifests(out io.Writer, format command.Output, all []persistentVolume) error {
	if format == "json" {
		return format.Print(out, struct {
			APIVersion string             `json:"apiVersion"`
			Kind       string             `json:"kind"`
			Items      []persistentVolume `json:"items"`
		}{"v1", "List", all}, nil)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(out, "# There are no volumes that a backend of this driver could list.")
		return err
	}
	var text strings.Builder
	for i, pv := range all {
		if i > 0 {
			text.WriteString("---\n")
		}
		if err := format.Print(&text, pv, nil); err != nil {
			return err
		}
	}
	_, err := io.WriteString(out, text.String())
	return err
}
