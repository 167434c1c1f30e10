package state

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Volume is the desired state of one volume: the record that the store keeps.
type Volume struct {
	ID string `json:"id"`
	// Backend is the name of the volume's backend; empty for a record of a version
	// that had one only, and of a volume of which nothing but the id is known.
	Backend  string             `json:"backend,omitempty"`
	Revision uint64             `json:"revision"` // grows with every committed edit
	Stage    *Stage             `json:"stage,omitempty"`
	Targets  map[string]*Target `json:"targets,omitempty"` // by target path
	Size     *Size              `json:"size,omitempty"`

	Unknown Unknown `json:",embed"`
}

// Unknown holds the fields of a stored object that this version does not know: a
// newer one wrote them, and they are written again with what they were read with.
// It is never changed in place.
type Unknown map[string]json.RawMessage

// Intent is what a stage, a target and a size have in common.
type Intent struct {
	// Gone makes the intent a tombstone: what it describes must not be there.
	// It stays until that is observed.
	Gone bool `json:"gone,omitzero"`
	// Withdrawn marks a tombstone that undoes a refused request. It removes nothing but
	// mounts, unlike a tombstone that the CO asked for.
	Withdrawn bool `json:"withdrawn,omitzero"`
	// Accepted is set once an observation found the intent fulfilled. An accepted intent
	// is never withdrawn, unless it is Unconfirmed.
	Accepted bool `json:"accepted,omitzero"`
	// Unconfirmed marks a stage or target that was accepted after the last caller who
	// waited for it had given up. The CO does not know that it is there, so another request
	// supersedes it. The mark goes when a caller waits for the intent again. Records of
	// earlier versions have it under this name.
	Unconfirmed bool `json:"unheard,omitzero"`
	// Begun is set before the first step for the intent. Until then a withdrawal has
	// nothing to undo, and whatever is there was not made for the intent.
	Begun bool `json:"begun,omitzero"`
	// Revision is that of the record when this intent last changed its meaning.
	Revision uint64 `json:"revision"`
	// Since is when it did so.
	Since time.Time `json:"since"`

	// CallerWaits is set by the reconciler while a caller waits for the intent. Only then
	// may a missing directory be made again that was there before. Meanwhile a different
	// request for the same part is refused with Aborted.
	CallerWaits bool `json:"-"`
}

// Confirmed reports whether the CO was told that the intent is fulfilled.
func (i *Intent) Confirmed() bool { return i.Accepted && !i.Unconfirmed }

// AccessType is how a volume appears to a pod.
type AccessType string

const (
	MountAccess AccessType = "mount"
	BlockAccess AccessType = "block"
)

// Capability is a CSI VolumeCapability, normalised.
type Capability struct {
	Access AccessType `json:"access"`
	Mode   string     `json:"mode"`             // the name of the CSI access mode
	FSType string     `json:"fsType,omitempty"` // of mount access; empty: the worker chooses one before it begins, see Choose
	Flags  []string   `json:"flags,omitempty"`  // as given

	Unknown Unknown `json:",embed"`
}

// Equal reports whether two capabilities ask for the same: mount flags by what
// they mean, see Flags.Same, not by how they are written.
func (c Capability) Equal(o Capability) bool {
	return c.Access == o.Access && c.Mode == o.Mode && c.FSType == o.FSType && sameFlags(c.Flags, o.Flags)
}

func sameFlags(a, b []string) bool {
	if slices.Equal(a, b) {
		return true
	}
	x, y, err := parseBoth(a, b)
	return err == nil && x.Same(y)
}

// String leaves the mount flags out, which may be sensitive (CSI spec v1.13,
// MountVolume).
func (c Capability) String() string {
	words := []string{string(c.Access), c.Mode}
	if c.FSType != "" {
		words = append(words, c.FSType)
	}
	if len(c.Flags) > 0 {
		words = append(words, "with mount flags")
	}
	return strings.Join(words, " ")
}

// Stage is the intent that a volume is staged: its device attached and, for
// mount access, its file system mounted at Path.
type Stage struct {
	Intent
	Path       string            `json:"path"`
	Capability Capability        `json:"capability"`
	ReadOnly   bool              `json:"readOnly,omitzero"` // nobody writes: the device itself is attached read-only
	Context    map[string]string `json:"context,omitempty"` // volume and publish context without secrets
	// Adopted marks a stage that was found mounted or attached without a record: its
	// access mode, flags and context are guesses until the CO names them.
	Adopted bool `json:"adopted,omitzero"`
	// Provisional marks a stage that nobody asked for and that a publish or an
	// expansion needs, because the store was lost: nothing is done for it. It is
	// adopted if the volume is seen to be staged so, else what needs it is refused. A
	// provisional tombstone ends an inline volume, if the backend says that it is one.
	Provisional bool `json:"provisional,omitzero"`
	// Backend, of a stage that is asked for, is the name of its backend. The
	// record has it once the stage is the volume's, and then it is empty here.
	Backend string `json:"backend,omitempty"`
	// Found is what the kernel showed of the options of the superblock of an
	// adopted stage.
	Found string `json:"found,omitempty"`
	// UUID is that of the file system that the stage was first seen to hold
	// with, in other words the data that pods have used: another one is not
	// shown to them.
	UUID string `json:"uuid,omitempty"`
	// Identity is what the device said that it is when the stage was first seen to
	// hold, see Device.Identity: another device is not used in its place.
	Identity string `json:"identity,omitempty"`
	// Inline, when set, makes the volume one that lives as long as one publish.
	Inline *Inline `json:"inline,omitempty"`
	// Next is the stage that was asked for in place of this one, which was never
	// confirmed and is a tombstone now: it takes its place once that holds.
	Next *Stage `json:"next,omitempty"`

	Unknown Unknown `json:",embed"`
}

// SameAs reports whether two intents ask for the same stage. The pod's
// information does not count.
func (s *Stage) SameAs(o *Stage) bool {
	return s.Path == o.Path && s.ReadOnly == o.ReadOnly && s.Capability.Equal(o.Capability) && sameContext(s.Context, o.Context) && s.Inline.sameAs(o.Inline)
}

// LivesFor reports whether the stage is that of an inline volume which lives for
// the publish at a target path.
func (s *Stage) LivesFor(target string) bool {
	return s != nil && s.Inline != nil && s.Inline.Target == target
}

// Inline is what is asked of an inline ephemeral volume, and what became of it.
type Inline struct {
	// PodUID and Target name its owner: the one publish that it lives for.
	PodUID     string            `json:"podUID,omitempty"`
	Target     string            `json:"target"`
	Attributes map[string]string `json:"attributes,omitempty"` // the pod author's
	// Made: the backend has it, as asked, and it was not deleted since.
	Made bool `json:"made,omitzero"`
	// Used: it may hold a pod's data, because it was formatted before it was asked
	// for, or was published. A refusal does not delete it then.
	Used bool `json:"used,omitzero"`
	// Ended: its publish has ended, and the volume is to be deleted with its data.
	Ended bool `json:"ended,omitzero"`

	Unknown Unknown `json:",embed"`
}

// sameAs compares what is asked.
func (i *Inline) sameAs(o *Inline) bool {
	if i == nil || o == nil {
		return i == o
	}
	return i.PodUID == o.PodUID && i.Target == o.Target && maps.Equal(i.Attributes, o.Attributes)
}

// Fresh reports whether the volume was made for what is asked now, so that it holds
// nobody's data.
func (i *Inline) Fresh() bool { return i != nil && i.Made && !i.Used }

// Target is the intent that a staged volume is published at Path.
type Target struct {
	Intent
	Path       string            `json:"path"`
	Capability Capability        `json:"capability"`
	ReadOnly   bool              `json:"readOnly,omitzero"`
	Context    map[string]string `json:"context,omitempty"`
	SeenDevice `json:"device,omitzero"`
	// From is what the target of a volume without a device was last mounted from, or is to be; nil
	// for others. It is replaced, and never changed.
	From *SeenSource `json:"from,omitempty"`
	// Next is the publish that was asked for in place of this one, as Stage.Next.
	Next *Target `json:"next,omitempty"`

	Unknown Unknown `json:",embed"`
}

// SeenDevice is what is remembered of the device of a block target.
type SeenDevice struct {
	// Device is the number that the target was first seen with: a pod keeps the
	// number, so another one cannot heal it.
	Device DeviceNumber `json:",embed"`

	Unknown Unknown `json:",embed"`
}

// SeenSource is what is remembered of a Source: another one may be mounted for the volume by now,
// as when the plugin was started with other flags.
type SeenSource struct {
	FSType string `json:"fsType"`
	Source string `json:"source"`

	Unknown Unknown `json:",embed"`
}

// Is reports whether m is a mount of the source.
func (s *SeenSource) Is(m Mount) bool {
	return s != nil && (&Source{FSType: s.FSType, Source: s.Source}).Is(m)
}

// Remembers reports whether s is what is remembered of a source.
func (s *SeenSource) Remembers(source *Source) bool {
	return s != nil && s.FSType == source.FSType && s.Source == source.Source
}

// SameAs reports whether two intents ask for the same publish. The pod's
// information does not count: kubelet publishes again, with and without it, as
// the CSIDriver's podInfoOnMount says at the moment.
func (t *Target) SameAs(o *Target) bool {
	return t.Path == o.Path && t.ReadOnly == o.ReadOnly && t.Capability.Equal(o.Capability) && sameContext(t.Context, o.Context)
}

// KubernetesPrefix begins the keys that Kubernetes adds to contexts and parameters. Backends
// never see them in a context: WithoutKubernetes.
const KubernetesPrefix = "csi.storage.k8s.io/"

// WithoutKubernetes returns a volume context without the keys that Kubernetes adds, some of
// which are secret: the context itself if it has none.
func WithoutKubernetes(context map[string]string) map[string]string {
	for key := range context {
		if strings.HasPrefix(key, KubernetesPrefix) {
			own := maps.Clone(context)
			maps.DeleteFunc(own, func(key, _ string) bool { return strings.HasPrefix(key, KubernetesPrefix) })
			return own
		}
	}
	return context
}

// Keys of the volume context with which kubelet names the pod, where the
// CSIDriver has podInfoOnMount.
const (
	podNamespaceKey = KubernetesPrefix + "pod.namespace"
	podNameKey      = KubernetesPrefix + "pod.name"
	PodUIDKey       = KubernetesPrefix + "pod.uid"
)

// Keys of the parameters with which external-provisioner names the claim.
const (
	claimNamespaceKey = KubernetesPrefix + "pvc/namespace"
	claimNameKey      = KubernetesPrefix + "pvc/name"
)

// EphemeralKey comes and goes with them, and is the only key of Kubernetes by which requests
// differ. False means what its absence means.
const EphemeralKey = KubernetesPrefix + "ephemeral"

// TokensKey is the key of the volume context with the pod's tokens, which are secret.
const TokensKey = KubernetesPrefix + "serviceAccount.tokens"

// The keys of a Context that are of the publish context have one of these
// prefixes: those that count when requests are compared, and those that do not.
const (
	publishPrefix = "publish:"
	detailPrefix  = "publish-detail:"
)

// JoinContext returns a volume and a publish context as one; nil if both are
// empty. counts says which keys of the publish context count when requests are
// compared; nil: all of them.
func JoinContext(volume, publish map[string]string, counts func(key string) bool) map[string]string {
	if len(volume)+len(publish) == 0 {
		return nil
	}
	joined := make(map[string]string, len(volume)+len(publish))
	maps.Copy(joined, volume)
	for key, value := range publish {
		if counts == nil || counts(key) {
			joined[publishPrefix+key] = value
		} else {
			joined[detailPrefix+key] = value
		}
	}
	return joined
}

// SplitContext is the inverse of JoinContext.
func SplitContext(joined map[string]string) (volume, publish map[string]string) {
	for key, value := range joined {
		to := &volume
		for _, prefix := range []string{publishPrefix, detailPrefix} {
			if rest, found := strings.CutPrefix(key, prefix); found {
				key, to = rest, &publish
				break
			}
		}
		if *to == nil {
			*to = map[string]string{}
		}
		(*to)[key] = value
	}
	return volume, publish
}

// sameContext compares two contexts without the keys that describe the pod, and without
// those that do not identify the storage.
func sameContext(a, b map[string]string) bool {
	return maps.Equal(a, b) || maps.Equal(withoutDetails(a), withoutDetails(b))
}

func withoutDetails(context map[string]string) map[string]string {
	c := withoutPod(context)
	maps.DeleteFunc(c, func(key, _ string) bool { return strings.HasPrefix(key, detailPrefix) })
	return c
}

// withoutPod returns a context without the keys that describe the pod, and not the volume that
// is asked for: those that kubelet adds today (getPodInfoAttrs in its
// pkg/volume/csi/csi_mounter.go), and whatever a later one adds. A volume that a kubelet has
// asked for before its upgrade is the same after it.
func withoutPod(context map[string]string) map[string]string {
	c := maps.Clone(context)
	maps.DeleteFunc(c, func(key, value string) bool {
		return strings.HasPrefix(key, KubernetesPrefix) && (key != EphemeralKey || value == "false")
	})
	return c
}

var namespacedName = regexp.MustCompile(`^[a-z0-9.-]+/[a-z0-9.-]+$`)

// Pod names the pod that the target is for, as namespace/name; empty when the
// caller did not tell.
func (t *Target) Pod() string {
	return object(t.Context[podNamespaceKey], t.Context[podNameKey])
}

// ClaimOf names the claim for which a volume with these parameters is created, as
// namespace/name; empty when the caller did not tell.
func ClaimOf(parameters map[string]string) string {
	return object(parameters[claimNamespaceKey], parameters[claimNameKey])
}

// object is namespace/name; empty if that is the name of no object.
func object(namespace, name string) string {
	if both := namespace + "/" + name; namespacedName.MatchString(both) {
		return both
	}
	return ""
}

// Size is the intent that a volume has at least Bytes.
type Size struct {
	Intent
	Bytes int64 `json:"bytes"`
	// Limit is the size in bytes that the volume must not exceed; 0: none.
	Limit int64 `json:"limit,omitzero"`
	// Before is the last accepted size in bytes, to which a refused growth
	// returns; 0 when there was none.
	Before int64 `json:"before,omitzero"`

	Unknown Unknown `json:",embed"`
}

// sizeUnit is what sizes are rounded up to, in bytes: the largest sector size.
const sizeUnit = 4096

// RoundUp returns the size in bytes to which a volume grows that is to have so many.
func RoundUp(bytes int64) int64 { return (bytes + sizeUnit - 1) / sizeUnit * sizeUnit }

// Empty reports whether nothing is left to do or to keep for the volume.
func (v *Volume) Empty() bool { return v.Stage == nil && len(v.Targets) == 0 }

// Clone returns a copy that shares nothing that changes with v.
func (v *Volume) Clone() *Volume {
	c := *v
	c.Stage = v.Stage.clone()
	if v.Size != nil {
		s := *v.Size
		c.Size = &s
	}
	c.Targets = make(map[string]*Target, len(v.Targets))
	for path, target := range v.Targets {
		c.Targets[path] = target.clone()
	}
	return &c
}

// ForgetCallers clears CallerWaits of all intents: it is never stored.
func (v *Volume) ForgetCallers() {
	for s := v.Stage; s != nil; s = s.Next {
		s.CallerWaits = false
	}
	for _, t := range v.Targets {
		for ; t != nil; t = t.Next {
			t.CallerWaits = false
		}
	}
	if v.Size != nil {
		v.Size.CallerWaits = false
	}
}

func (s *Stage) clone() *Stage {
	if s == nil {
		return nil
	}
	c := *s
	c.Capability.Flags, c.Context, c.Next = slices.Clone(s.Capability.Flags), maps.Clone(s.Context), s.Next.clone()
	if s.Inline != nil {
		i := *s.Inline
		i.Attributes = maps.Clone(i.Attributes)
		c.Inline = &i
	}
	return &c
}

func (t *Target) clone() *Target {
	if t == nil {
		return nil
	}
	c := *t
	c.Capability.Flags, c.Context, c.Next = slices.Clone(t.Capability.Flags), maps.Clone(t.Context), t.Next.clone()
	return &c
}
