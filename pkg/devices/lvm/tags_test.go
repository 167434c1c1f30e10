package lvm

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestTags(t *testing.T) {
	for name, v := range map[string]tags{
		"new, thick":  {driver: "csi-node.local", name: "pvc-1", fsType: "ext4", fresh: true, unzeroed: true},
		"new, thin":   {driver: "d", name: "pvc-1", overcommit: 250, fresh: true},
		"formatted":   {driver: "d", name: "n", formatted: "xfs"},
		"in a format": {driver: "d", name: "n", formatting: true},
		"raw":         {driver: "d", name: "n", raw: true},
		"encrypted":   {driver: "d", name: "n", layers: map[string]string{"encryption": "luks2"}},
		"growth":      {driver: "d", growth: true},
		"any name":    {driver: "d", name: "a/b =,\tÜ@\"'{}", fresh: true},
	} {
		t.Run(name, func(t *testing.T) {
			list := v.list()
			if again := parseTags(strings.Join(list, ",") + ",somebody's"); !reflect.DeepEqual(again, v) {
				t.Errorf("%+v is written as %q and read as %+v", v, list, again)
			}
			for _, tag := range list {
				if strings.Trim(tag, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+.-/=!:&#") != "" || len(tag) > 1024 {
					t.Errorf("%q is no tag of LVM", tag)
				}
			}
		})
	}
}

func TestChanges(t *testing.T) {
	from := tags{driver: "d", name: "n", fresh: true, unzeroed: true}
	to := from
	to.fresh, to.formatting = false, true
	want := []string{"--deltag", "csi-node.fresh", "--addtag", "csi-node.formatting"}
	if got := changes(from, to); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := changes(to, to); len(got) > 0 {
		t.Errorf("nothing changes, and lvm is to do %q", got)
	}
}
