package state

// Part names one thing that a caller can ask of a volume and wait for: the
// stage, the size, or one target. It is comparable.
type Part struct {
	Kind PartKind `json:"kind"`
	Path string   `json:"path,omitempty"` // of a target
}

// PartKind is the kind of a Part.
type PartKind string

const (
	StageKind  PartKind = "stage"
	SizeKind   PartKind = "size"
	TargetKind PartKind = "target"
)

// StagePart is the part of NodeStageVolume and NodeUnstageVolume.
func StagePart() Part { return Part{Kind: StageKind} }

// SizePart is the part of NodeExpandVolume.
func SizePart() Part { return Part{Kind: SizeKind} }

// TargetPart is the part of NodePublishVolume and NodeUnpublishVolume.
func TargetPart(path string) Part { return Part{Kind: TargetKind, Path: path} }

func (p Part) String() string {
	if p.Kind == TargetKind {
		return "target " + p.Path
	}
	return string(p.Kind)
}

// Intent returns the intent of a part, nil when the record has none. It points
// into the record.
func (v *Volume) Intent(p Part) *Intent {
	switch p.Kind {
	case StageKind:
		if v.Stage != nil {
			return &v.Stage.Intent
		}
	case SizeKind:
		if v.Size != nil {
			return &v.Size.Intent
		}
	case TargetKind:
		if t := v.Targets[p.Path]; t != nil {
			return &t.Intent
		}
	}
	return nil
}

// Latest is Intent, or the Next of a tombstone that has one.
func (v *Volume) Latest(p Part) *Intent {
	switch t := v.Targets[p.Path]; {
	case p.Kind == StageKind && v.Stage != nil && v.Stage.Next != nil:
		return &v.Stage.Next.Intent
	case p.Kind == TargetKind && t != nil && t.Next != nil:
		return &t.Next.Intent
	}
	return v.Intent(p)
}

// Parts returns the parts that the record has an intent for, targets in the
// order of their paths, then the stage, then the size.
func (v *Volume) Parts() []Part {
	parts := make([]Part, 0, len(v.Targets)+2)
	for _, path := range v.TargetPaths() {
		parts = append(parts, TargetPart(path))
	}
	if v.Stage != nil {
		parts = append(parts, StagePart())
	}
	if v.Size != nil {
		parts = append(parts, SizePart())
	}
	return parts
}
