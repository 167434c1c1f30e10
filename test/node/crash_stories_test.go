package node

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// story is a life in which a step of the planner has its place. Each part
// of it may be called again when it was cut off.
type story struct {
	v     *volume
	parts []func(ctx context.Context) error
	down  bool // it begins with a plugin that has died
}

// driftStory is that of a target whose attributes somebody changes.
func driftStory(t *testing.T, p *harness.Plugin) story {
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "noatime"))
	pod := v.Target("pod")
	return story{v: v, parts: []func(context.Context) error{
		v.Stage,
		func(ctx context.Context) error { return v.Publish(ctx, pod) },
		func(context.Context) error { // somebody takes noatime away
			return unix.MountSetattr(unix.AT_FDCWD, pod, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR__ATIME})
		},
		func(ctx context.Context) error { return v.Publish(ctx, pod) },
		func(ctx context.Context) error { return v.Unpublish(ctx, pod) },
		v.Unstage,
	}}
}

// viewStory is that of a raw block volume with a read-only target.
func viewStory(t *testing.T, p *harness.Plugin) story {
	v := create(t, p, "volume", 32*mib, blockAs(multiWriter))
	pod := v.Target("pod")
	return story{v: v, parts: []func(context.Context) error{
		v.Stage,
		func(ctx context.Context) error { return v.PublishReadOnly(ctx, pod) },
		func(context.Context) error { refuseWrite(t, pod); return nil },
		func(ctx context.Context) error { return v.Unpublish(ctx, pod) },
		v.Unstage,
	}}
}

// repairStory is that of an ext4 whose superblock asks for a check.
func repairStory(t *testing.T, p *harness.Plugin) story {
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	file := filepath.Join(v.Staging, "file")
	return story{v: v, parts: []func(context.Context) error{
		v.Stage,
		func(context.Context) error { return os.WriteFile(file, []byte("kept"), 0o640) },
		v.Unstage,
		func(context.Context) error { // "errors detected"
			harness.Command(t, "debugfs", "-w", "-R", "set_super_value state 2", v.Data())
			return nil
		},
		v.Stage,
		func(context.Context) error { mustRead(t, file, "kept"); return nil },
		v.Unstage,
	}}
}

// eraseStory is that of an ext4 whose first format is cut off half-way.
func eraseStory(t *testing.T, p *harness.Plugin) story {
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	p.Restart(harness.Options{Faults: true, Env: []string{"CSI_NODE_FAULT=before:format=die"}})
	if err := v.Stage(t.Context()); status.Code(err) != codes.Unavailable {
		t.Fatalf("the plugin is to die before the format: %v", err)
	}
	p.Wait(t)
	// What an mkfs that dies may leave.
	for _, loop := range p.Loops() {
		writeAt(t, loop.Path, []byte("half a file system"), 1024)
	}
	return story{v: v, parts: []func(context.Context) error{v.Stage, v.Unstage}, down: true}
}
