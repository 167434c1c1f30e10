package state

import (
	"reflect"
	"strings"
	"testing"
)

func TestParseFlags(t *testing.T) {
	for given, want := range map[string]Flags{
		"":                           {},
		"ro":                         {Set: ReadOnly},
		"ro rw":                      {Clear: ReadOnly},
		"rw ro":                      {Set: ReadOnly},
		"ro,nosuid nodev":            {Set: ReadOnly | NoSuid | NoDev},
		"noexec,exec,nosymfollow":    {Set: NoSymFollow, Clear: NoExec},
		"noatime":                    {Set: NoAtime, Clear: AtimeMask &^ NoAtime},
		"noatime strictatime":        {Set: StrictAtime, Clear: AtimeMask},
		"noatime relatime":           {Clear: AtimeMask},
		"norelatime,nodiratime":      {Set: StrictAtime | NoDirAtime, Clear: AtimeMask},
		"discard data=ordered":       {Super: []string{"discard", "data=ordered"}},
		`context="a:b:c1,c2",ro`:     {Set: ReadOnly, Super: []string{`context="a:b:c1,c2"`}},
		"defaults,_netdev,x-a=b,X-c": {},
		"comment=x,nofail,user":      {},
		",,ro,":                      {Set: ReadOnly},
		"silent,X-c,x-systemd.a=b":   {},
		`a="b,c",d "e,f"`:            {Super: []string{`a="b,c"`, "d", `"e,f"`}},
	} {
		got, err := ParseFlags(strings.Fields(given))
		if err != nil {
			t.Errorf("%q: %v", given, err)
			continue
		}
		// mount_setattr(2) wants the whole mask cleared where a choice is set.
		if got.Set&AtimeMask != 0 && got.Clear&AtimeMask != AtimeMask {
			t.Errorf("%q clears %#x of the access time mask", given, uint64(got.Clear))
		}
		want.Clear |= want.Set & AtimeMask
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%q is %+v, not %+v", given, got, want)
		}
	}
	for given, words := range map[string]string{
		"bind": `"bind"`, "ro,remount": `"remount"`, "rshared": `"rshared"`, "loop=/dev/loop0": `"loop"`,
		"a\x00b": "control", "a\nb": "control", "a=\x7f": "control", `context="a,b`: "quote",
		"ro=0": "no value", "noatime=": "no value", "X-mount.subdir=s3cret": "more than a mount",
		"logdev=/s3cret": "one device", "device=/dev/sda": "one device", "subvol=s3cret": "whole", "source=x": "one device",
		strings.Repeat("é", 5000) + "\n": strings.Repeat("é", longestName/2) + "…\"",
	} {
		_, err := ParseFlags([]string{given})
		if ClassOf(err) != InvalidArgument || err == nil || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v", given, err)
		}
	}
}

func TestMet(t *testing.T) {
	for _, test := range []struct {
		flags string
		is    Attributes
		want  bool
	}{
		{"", 0, true},
		{"", ReadOnly | NoAtime, true}, // nothing asked, nothing missed
		{"ro", ReadOnly | NoSuid, true},
		{"ro", 0, false},
		{"rw", 0, true},
		{"rw", ReadOnly, false},
		{"noatime", NoAtime, true},
		{"noatime", 0, false},
		{"noatime", StrictAtime, false},
		{"relatime", 0, true},
		{"relatime", NoAtime, false},
		{"ro,noexec", ReadOnly, false},
		{"discard", 0, true},
	} {
		f, err := ParseFlags([]string{test.flags})
		if err != nil {
			t.Fatal(err)
		}
		if f.Met(test.is) != test.want {
			t.Errorf("%q met by %q: %v", test.flags, test.is, !test.want)
		}
	}
}

func TestAttributesString(t *testing.T) {
	for a, want := range map[Attributes]string{0: "", ReadOnly | NoSuid: "ro,nosuid", NoAtime | 0x40000: "noatime,0x40000"} {
		if a.String() != want {
			t.Errorf("%#x reads %q, not %q", uint64(a), a, want)
		}
	}
}

func FuzzParseFlags(f *testing.F) {
	f.Add(`ro,context="a,b",noatime`)
	f.Fuzz(func(t *testing.T, flag string) {
		flags, err := ParseFlags([]string{flag})
		if err != nil {
			return
		}
		if bad := flags.Set & flags.Clear &^ AtimeMask; bad != 0 {
			t.Errorf("%q is set and cleared by %q", bad, flag)
		}
		for _, word := range flags.Super {
			if word == "" || !strings.Contains(flag, word) {
				t.Errorf("%q became %q", flag, word)
			}
		}
	})
}
