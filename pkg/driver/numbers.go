package driver

import (
	"errors"

	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// numbers tells the loop devices which of their numbers are somebody's: by the publishes
// of the store, also of what is not bound just now, and by what is bound on this
// node, also of what no record explains or another plugin has bound.
func (p *plugin) numbers() loop.Numbers {
	return loop.Numbers{Owner: p.store.VolumeOfDevice, Bound: p.bound, Published: p.published}
}

// bound reports whether a node of the device is bound anywhere on this node.
func (p *plugin) bound(number state.DeviceNumber) (bool, error) {
	if p.watcher == nil {
		return false, errors.New("what is bound on this node is not known yet")
	}
	return p.watcher.Bound(number)
}

// published returns the numbers with which a raw volume is published. A target
// that reads only, of a stage that is written, shows the view.
func (p *plugin) published(volume string, view bool) (numbers []state.DeviceNumber) {
	v := p.store.Get(volume)
	if v == nil || v.Stage == nil {
		return nil
	}
	for _, path := range v.TargetPaths() {
		t := v.Targets[path]
		if (t.Device != state.DeviceNumber{}) && (t.ReadOnly && !v.Stage.ReadOnly) == view {
			numbers = append(numbers, t.Device)
		}
	}
	return numbers
}
