//go:build vm

// Package life is the guest's side of the power cuts. TestLive is the life of a
// node up to a cut, with a note of each thing that was begun and of each that
// was acknowledged; TestAfter looks at disks that a cut has left, each with the
// notes up to that instant.
//
// Both run in a guest of package vm, as jobs of TestPowerCuts.
package life

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/vm"
)

const mib = 1 << 20

func TestMain(m *testing.M) {
	if os.Getpid() == 1 || os.Getenv("CSI_NODE_GUEST") == "" {
		fmt.Println("these tests run in a guest of package vm")
		os.Exit(0)
	}
	harness.Main(m)
}

// life is one of a node: the storage that it has, and its volumes. Each is made, used and
// grown; the last is deleted.
type life struct {
	open    func(t *testing.T, p *harness.Plugin, device string, blank bool) (storage, harness.Options)
	volumes []spec
}

// lives are those that CSI_NODE_LIFE names.
var lives = map[string]life{
	vm.Pool: {openPool, []spec{
		{name: "ext4", fsType: "ext4", class: class("thick"), bytes: 32 * mib, grown: 64 * mib},
		{name: "xfs", fsType: "xfs", class: class("thin"), bytes: 320 * mib, grown: 352 * mib},
		{name: "block", class: class("thick"), bytes: 16 * mib, grown: 32 * mib},
		{name: vm.Encrypted, fsType: "ext4", class: encrypted(class("thick")), bytes: 32 * mib, grown: 64 * mib},
		{name: "brief", fsType: "ext4", class: class("thin"), bytes: 16 * mib, grown: 16 * mib},
	}},
	vm.Group: {openGroup, []spec{
		{name: vm.Encrypted, fsType: "ext4", class: encrypted(logical("")), bytes: 32 * mib, grown: 64 * mib},
		{name: "thin-encrypted", fsType: "ext4", class: encrypted(logical(thinPool)), bytes: 48 * mib, grown: 80 * mib},
		{name: "brief", fsType: "ext4", class: logical(""), bytes: 16 * mib, grown: 16 * mib},
	}},
}

func class(provisioning string) map[string]string {
	return map[string]string{"provisioning": provisioning}
}

// logical is the class of logical volumes, of a thin pool or thick ones.
func logical(pool string) map[string]string {
	c := map[string]string{"backend": "lvm"}
	if pool != "" {
		c["thinPool"] = pool
	}
	return c
}

func encrypted(class map[string]string) map[string]string {
	class[luks.EncryptionKey] = luks.LUKS2
	return class
}

// mine is the life of this guest.
func mine() life { return lives[os.Getenv("CSI_NODE_LIFE")] }

// TestLive never ends: the power is cut.
func TestLive(t *testing.T) {
	n := start(t, os.Getenv("CSI_NODE_GUEST"), true)
	book, err := vm.OpenNotebook(n.device)
	must(t, err)
	noted := func(note vm.Note, do func()) {
		must(t, book.Write(note))
		do()
		note.Done = true
		must(t, book.Write(note))
		fmt.Println(note)
	}
	write := func(v *volume, file string) {
		noted(vm.Note{Do: "write", Volume: v.name, File: file}, func() { v.write(file) })
	}
	var all []*volume
	for _, s := range mine().volumes {
		v := n.of(s)
		all = append(all, v)
		noted(vm.Note{Do: "create", Volume: v.name, Bytes: v.bytes}, v.create)
		noted(vm.Note{Do: "stage", Volume: v.name}, v.stage)
		write(v, "a")
	}
	for _, v := range all[:len(all)-1] {
		noted(vm.Note{Do: "grow", Volume: v.name, Bytes: v.grown}, v.grow)
		write(v, "b")
	}
	brief := all[len(all)-1]
	noted(vm.Note{Do: "unstage", Volume: brief.name}, brief.unstage)
	noted(vm.Note{Do: "delete", Volume: brief.name}, brief.delete)
	write(all[0], "c")
	fmt.Println(vm.Lived)
	select {}
}

// TestAfter looks at each disk in turn: they are as cuts at different instants
// have left them.
func TestAfter(t *testing.T) {
	for _, device := range strings.Fields(os.Getenv("CSI_NODE_GUEST")) {
		t.Run(filepath.Base(device), func(t *testing.T) {
			notes, err := vm.ReadNotes(device)
			must(t, err)
			n := start(t, device, false)
			n.mustBeSwept()
			for _, s := range mine().volumes {
				t.Run(s.name, func(t *testing.T) {
					v := n.in(t).of(s)
					v.survive(vm.PromisesOf(notes, s.name))
				})
			}
			n.mustBeEmpty()
		})
	}
}
