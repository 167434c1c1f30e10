package reconciler

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// fakeMounts is the mount table and the directories.
type fakeMounts struct {
	*process
	existing bool // it makes nothing
}

func (fakeMounts) CheckOptions(fsType string, flags state.Flags) error {
	if slices.Contains(flags.Super, "bad-for-"+fsType) {
		return state.Errorf(state.InvalidArgument, "%s does not know the option", fsType)
	}
	return nil
}

// Above knows the mounts of volumes.
func (m fakeMounts) Above(at string) (mount state.Mount, point string, err error) {
	m.k.with(func() {
		for dir := path.Dir(at); dir != "/" && point == ""; dir = path.Dir(dir) {
			if stack := m.k.mounts[dir]; len(stack) > 0 {
				mount, point = stack[0].Mount, dir
			}
		}
	})
	return mount, point, nil
}

func (m fakeMounts) Look(ctx context.Context, at string, limit time.Duration) (have state.Mountpoint, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err = m.call(ctx, opLook, volumeOf(at), at, func(bool) error {
		have = m.k.look(at)
		return nil
	})
	return have, err
}

func (k *fakeKernel) look(at string) state.Mountpoint {
	have := state.Mountpoint{File: state.NoFile}
	for _, mount := range k.mounts[at] {
		if v := k.volumes[mount.volume]; v != nil && v.superRO && !mount.Node {
			mount.SuperReadOnly = true
		}
		if v := k.volumes[mount.volume]; v != nil && (v.dead || v.serverAway) && !mount.Node {
			mount.Corrupt, mount.Lost = true, v.dead
		}
		have.Mounts = append(have.Mounts, mount.Mount)
	}
	f := k.files[at]
	switch {
	case len(have.Mounts) > 0 && have.Mounts[0].Node:
		have.File = state.BlockDevice
	case len(have.Mounts) > 0:
		have.File = state.Directory
	case f != nil:
		have.File, have.Empty = f.kind, !f.inUse
	}
	return have
}

// place puts a mount at a path and makes the file beneath it if it is missing.
func (m fakeMounts) place(at string, kind state.FileType, mount fakeMount) error {
	k := m.k
	f := k.files[at]
	switch {
	case len(k.mounts[at]) > 0:
		return k.refuseAt(at, "%s: mounted over %s", at, describe(k.mounts[at][0].Mount))
	case f == nil && m.existing:
		return fmt.Errorf("%s does not exist", at)
	case f == nil:
		k.files[at] = &fakeFile{kind: kind}
	case f.kind != kind:
		return k.refuseAt(at, "%s: mounted over %s", at, f.kind)
	case f.inUse:
		if err := k.rule(volumeOf(at), "%s: mounted over what is in use", at); err != nil {
			return err
		}
	}
	k.mountIDs++
	mount.ID = k.mountIDs
	k.mounts[at] = []fakeMount{mount}
	return nil
}

func (m fakeMounts) MountDevice(ctx context.Context, device state.Device, at, fsType string, flags state.Flags, readOnly bool) error {
	id := volumeOf(at)
	return m.call(ctx, opMount, id, at, func(bool) error {
		v, top := m.k.volumes[id], m.k.volumes[id].top()
		switch {
		case top == nil || top.detaching || top.number != device.Number:
			return m.k.refuse(volumeOf(at), "%s: mount of a device that is not the volume's", at)
		case top.readOnly && !readOnly:
			return m.k.refuse(volumeOf(at), "%s: writable mount of a read-only device", at)
		case v.marked() || v.contents.Kind != state.ContentsFilesystem || v.contents.FSType != fsType:
			return m.k.refuse(volumeOf(at), "%s: mount of %s %s as %s, formatting mark %t", at, v.contents.Kind, v.contents.FSType, fsType, v.marked())
		}
		if v.dead {
			return fmt.Errorf("the file system is broken and kept by %v", v.keepers)
		}
		v.data = v.data || !readOnly
		attributes := flags.Set
		if readOnly {
			attributes |= state.ReadOnly
		}
		return m.place(at, state.Directory, fakeMount{volume: id, Mount: state.Mount{
			Device: device.Number, FSType: fsType, Source: device.Path, Root: "/", Attributes: attributes, Options: strings.Join(flags.Super, ","), SuperReadOnly: readOnly}})
	})
}

func (m fakeMounts) BindMount(ctx context.Context, source string, device state.DeviceNumber, target string, flags state.Flags) error {
	return m.call(ctx, opBind, volumeOf(target), target, func(half bool) error {
		stack := m.k.mounts[source]
		if len(stack) == 0 || !stack[0].Is(device) || stack[0].volume != volumeOf(target) {
			return m.k.refuse(volumeOf(target), "%s: bound from %s, where the volume is not mounted", target, source)
		}
		mount := stack[0]
		mount.Attributes = mount.Attributes&^flags.Clear | flags.Set
		if half {
			m.k.files[target] = &fakeFile{kind: state.Directory}
			return nil
		}
		return m.place(target, state.Directory, mount)
	})
}

func (m fakeMounts) BindDevice(ctx context.Context, device state.Device, target string) error {
	id := volumeOf(target)
	return m.call(ctx, opBindDevice, id, target, func(half bool) error {
		v, top := m.k.volumes[id], m.k.volumes[id].top()
		if top == nil || top.detaching || top.number != device.Number && (v.view == nil || v.view.number != device.Number) {
			return m.k.refuse(volumeOf(target), "%s: bind of a device that is not the volume's", target)
		}
		if top.number == device.Number && !top.readOnly && (!v.raw || v.header == stampedNew) {
			if err := m.k.rule(id, "%s: shown raw for writing, and nothing remembers that", target); err != nil {
				return err
			}
		}
		if half {
			m.k.files[target] = &fakeFile{kind: state.RegularFile}
			return nil
		}
		if top.number == device.Number && !top.readOnly && !m.k.obeys {
			v.data = true // whatever the pod writes
			if v.contents.Kind == state.ContentsBlank {
				v.contents = state.Contents{Kind: state.ContentsOther, Found: "a pod's data"}
			}
		}
		m.k.forgotten[target] = m.k.judged // until the number is in the record
		return m.place(target, state.RegularFile, fakeMount{volume: id, Mount: state.Mount{
			Device: device.Number, Node: true, FSType: "devtmpfs", Source: "devtmpfs", Root: fmt.Sprintf("/loop%d", device.Number.Minor)}})
	})
}

func (m fakeMounts) SetAttributes(ctx context.Context, at string, flags state.Flags) error {
	return m.call(ctx, opSetAttributes, volumeOf(at), at, func(bool) error {
		stack := m.k.mounts[at]
		if len(stack) == 0 || stack[0].volume == "" {
			return m.k.refuse(volumeOf(at), "%s: attributes of a foreign mount", at)
		}
		stack[0].Attributes = stack[0].Attributes&^flags.Clear | flags.Set
		return nil
	})
}

func (fakeFilesystems) Options(m state.Mount) string { return m.Options }

func (m fakeMounts) Elsewhere(_ context.Context, device state.DeviceNumber) (seen *state.Sighting, err error) {
	m.k.with(func() {
		for at, stack := range m.k.mounts {
			if len(stack) > 0 && !stack[0].Node && stack[0].Device == device {
				seen = &state.Sighting{Path: at, Mount: stack[0].Mount}
			}
		}
	})
	return seen, nil
}

func (m fakeMounts) MountedAt(_ context.Context, device state.DeviceNumber) (paths []string, err error) {
	m.k.with(func() {
		m.k.tables++
		for at, stack := range m.k.mounts {
			if slices.ContainsFunc(stack, func(m fakeMount) bool { return !m.Node && m.Is(device) }) {
				paths = append(paths, at)
			}
		}
	})
	slices.Sort(paths)
	return paths, nil
}

func (m fakeMounts) BoundAt(_ context.Context, device state.DeviceNumber) (paths []string, err error) {
	m.k.with(func() {
		m.k.tables++
		if paths = m.k.nodes(device); len(paths) == 0 {
			paths = m.k.copies[device]
		}
	})
	return paths, nil
}

// nodes returns the paths at which the node of a device is bound, be it covered.
// The caller holds mu.
func (k *fakeKernel) nodes(device state.DeviceNumber) (paths []string) {
	for at, stack := range k.mounts {
		if slices.ContainsFunc(stack, func(m fakeMount) bool { return m.Node && m.Device == device }) {
			paths = append(paths, at)
		}
	}
	return paths
}

func (m fakeMounts) Keepers(_ context.Context, device state.DeviceNumber, going []string) (names []string) {
	m.k.with(func() {
		for id, v := range m.k.volumes {
			if v.has(device) {
				names = slices.Clone(v.keepers)
				if v.private || v.copied {
					names = append(names, "a copy of the stage")
				}
				names = append(names, slices.DeleteFunc(m.k.mounted(id, device, ""), func(at string) bool { return slices.Contains(going, at) })...)
			}
		}
	})
	return names
}

func (m fakeMounts) UnmountDevice(ctx context.Context, at string) error { return m.Unmount(ctx, at) }

func (m fakeMounts) Unmount(ctx context.Context, at string) error {
	id := volumeOf(at)
	return m.call(ctx, opUnmount, id, at, func(bool) error {
		k, stack := m.k, m.k.mounts[at]
		if len(stack) == 0 {
			return fmt.Errorf("%s is not a mount point", at)
		}
		if stack[0].volume != id {
			return k.refuse(volumeOf(at), "%s: unmount of a foreign mount", at)
		}
		if at == stagePath(id) && len(stack) == 1 {
			paths := k.mounted(id, stack[0].Device, at)
			paths = slices.DeleteFunc(paths, func(p string) bool { return k.forgotten[p] || p == otherStagePath })
			if len(paths) > 0 {
				if err := k.rule(id, "%s: unmount of a stage that is bound at %v", at, paths); err != nil {
					return err
				}
			}
		}
		k.unmount(at)
		return nil
	})
}

// unmount takes the top mount at a path away, whoever does it.
func (k *fakeKernel) unmount(at string) {
	top, id := k.mounts[at][0], volumeOf(at)
	k.mounts[at] = slices.Clone(k.mounts[at][1:])
	if len(k.mounts[at]) == 0 {
		delete(k.mounts, at)
		delete(k.forgotten, at)
	}
	v := k.volumes[id]
	if v == nil || top.volume != id {
		return
	}
	v.copied = v.copied || v.private && at == stagePath(id)
	k.autoclear(v)
}

func (m fakeMounts) Remove(ctx context.Context, at string) error {
	return m.call(ctx, opRemove, volumeOf(at), at, func(bool) error {
		f := m.k.files[at]
		if len(m.k.mounts[at]) > 0 || f != nil && f.inUse {
			return m.k.refuse(volumeOf(at), "%s: removed while mounted or not empty", at)
		}
		delete(m.k.files, at)
		return nil
	})
}

func (m fakeMounts) Renew(ctx context.Context, at string) error {
	return m.call(ctx, opRenew, volumeOf(at), at, func(half bool) error {
		f := m.k.files[at]
		if len(m.k.mounts[at]) > 0 || f == nil || f.kind != state.Directory || f.inUse {
			return m.k.refuse(volumeOf(at), "%s: renewed while mounted, not empty or no directory", at)
		}
		if half {
			return nil
		}
		v := m.k.volumes[volumeOf(at)]
		v.copied = false
		m.k.autoclear(v)
		return nil
	})
}
