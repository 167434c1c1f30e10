package state

import (
	"reflect"
	"slices"
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
		if mustParse(t, test.flags).Met(test.is) != test.want {
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

// FuzzParseFlags gives flags separated by newlines, which no flag may hold.
func FuzzParseFlags(f *testing.F) {
	for _, flags := range []string{"", "ro\nrw", "noatime,nodiratime\nstrictatime", `context="a:b,c",nodev`, `a"b,c` + "\n" + `d"`, "bind", "x-a=,comment=b,rw=1", "\x00"} {
		f.Add(flags)
	}
	f.Fuzz(func(t *testing.T, text string) {
		given := strings.Split(text, "\n")
		got, err := ParseFlags(given)
		if err != nil {
			if ClassOf(err) != InvalidArgument || !reflect.DeepEqual(got, Flags{}) {
				t.Fatalf("%q: %+v, %s: %v", given, got, ClassOf(err), err)
			}
			return
		}
		if got.Set&got.Clear&^AtimeMask != 0 || (got.Set|got.Clear)&AtimeMask != 0 && got.Clear&AtimeMask != AtimeMask {
			t.Errorf("%q contradicts itself: %+v", given, got)
		}
		for _, word := range got.Super {
			if word == "" || !strings.Contains(text, word) {
				t.Errorf("%q became %q", text, word)
			}
		}
		if !got.Met(got.Set) {
			t.Errorf("%q is not met by what it sets: %+v", given, got)
		}
		again, err := ParseFlags(append(words(got), got.Super...))
		if err != nil || !reflect.DeepEqual(again, got) {
			t.Errorf("%q is %+v, and its own words are %+v (%v)", given, got, again, err)
		}
		twice, err := ParseFlags(append(slices.Clone(given), given...))
		if err != nil || twice.Set != got.Set || twice.Clear != got.Clear || len(twice.Super) != 2*len(got.Super) {
			t.Errorf("%q said twice is %+v (%v), once %+v", given, twice, err, got)
		}
	})
}

// words says flags' attributes in the words of mount(8).
func words(f Flags) []string {
	var list []string
	for word, a := range attributeWords {
		if a.Set&^AtimeMask != 0 && f.Set&a.Set == a.Set || a.Set == 0 && a.Clear&AtimeMask == 0 && f.Clear&a.Clear == a.Clear {
			list = append(list, word)
		}
	}
	switch {
	case !f.atime():
	case f.Set&AtimeMask == 0:
		list = append(list, "relatime")
	default:
		list = append(list, (f.Set & AtimeMask).String())
	}
	return list
}
