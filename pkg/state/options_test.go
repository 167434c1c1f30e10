package state

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestSameFlags(t *testing.T) {
	for _, test := range []struct {
		a, b string // flags separated by spaces
		want bool
	}{
		{"", "", true},
		{"", "defaults", true},
		{"noatime nodev", "nodev,noatime", true},
		{"noatime,nodev", "noatime nodev", true},
		{"noatime", "noatime noatime", true},
		{"discard commit=5", "commit=5,discard", true},
		{"discard discard", "discard", true},
		{"commit=5 commit=10", "commit=10", true},
		{"nodiscard discard", "discard", true},
		{"relatime", "noatime,relatime", true},
		{"exec,noexec", "noexec", true},
		{`context="a:b,c" ro`, `ro,context="a:b,c"`, true},

		{"ro rw", "rw ro", false},
		{"noatime relatime", "relatime noatime", false},
		{"discard nodiscard", "nodiscard discard", false},
		{"commit=5 commit=10", "commit=10 commit=5", false},
		{"sync async", "async sync", false},
		{"usrquota noquota", "noquota usrquota", false},
		{"usrquota grpquota", "grpquota", false},
		{"inode32 inode64", "inode64 inode32", false},
		{"compress=zstd nodatacow", "nodatacow compress=zstd", false},
		{"rescue=a rescue=b", "rescue=b", false},
		{"data=journal", "data=ordered", false},
		{"barrier", "nobarrier", false},
		{"discard", "", false},
		{"exec", "", false}, // a publish may undo the stage's noexec
		{"bind", "rbind", false},
	} {
		a, b := Capability{Flags: strings.Fields(test.a)}, Capability{Flags: strings.Fields(test.b)}
		if a.Equal(b) != test.want || b.Equal(a) != test.want {
			t.Errorf("%q and %q are the same: %v", test.a, test.b, !test.want)
		}
	}
}

func TestBeyond(t *testing.T) {
	for _, test := range []struct{ publish, stage, want string }{
		{"noexec,ro", "", ""},
		{"discard", "commit=5,discard", ""},
		{"commit=5", "commit=5,commit=6", "commit"},
		{"discard", "discard,nodiscard", "discard"},
		{"nodiscard,discard", "discard", ""},
		{"data=s3cret", "data=ordered", "data"},
		{"usrquota", "usrquota,grpquota", ""},
		{"lazytime,b,a", "lazytime", "b"},
	} {
		publish, stage := mustParse(t, test.publish), mustParse(t, test.stage)
		if got := publish.Beyond(stage); got != test.want {
			t.Errorf("%q goes beyond %q by %q, not %q", test.publish, test.stage, got, test.want)
		}
	}
}

func mustParse(t *testing.T, flags ...string) Flags {
	t.Helper()
	f, err := ParseFlags(flags)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// model is what a file system makes of options, independent of the way in which
// they are compared.
type model map[string]string

var modelWords = map[string]func(model){
	"ro": func(m model) { m["ro"] = "on" }, "rw": func(m model) { m["ro"] = "off" },
	"noexec": func(m model) { m["exec"] = "off" }, "exec": func(m model) { m["exec"] = "on" },
	"noatime": func(m model) { m["atime"] = "no" }, "relatime": func(m model) { m["atime"] = "rel" }, "strictatime": func(m model) { m["atime"] = "strict" },
	"discard": func(m model) { m["discard"] = "on" }, "nodiscard": func(m model) { m["discard"] = "off" }, "discard=async": func(m model) { m["discard"] = "async" },
	"commit=5": func(m model) { m["commit"] = "5" }, "commit=10": func(m model) { m["commit"] = "10" },
	"sync": func(m model) { m["sync"] = "on" }, "async": func(m model) { m["sync"] = "off" },
	"usrquota": func(m model) { m["usr"] = "on" }, "grpquota": func(m model) { m["grp"] = "on" },
	"noquota": func(m model) { m["usr"], m["grp"] = "off", "off" },
	"inode32": func(m model) { m["inode"] = "32" }, "inode64": func(m model) { m["inode"] = "64" },
	"compress=lzo": func(m model) { m["compress"], m["cow"] = "lzo", "on" },
	"nodatacow":    func(m model) { m["compress"], m["cow"] = "off", "off" },
	"datacow":      func(m model) { m["cow"] = "on" },
	"grpid":        func(m model) { m["groups"] = "bsd" }, "sysvgroups": func(m model) { m["groups"] = "sysv" },
	"defaults": func(model) {}, "x-note": func(model) {},
}

// Lists of flags that are taken for the same mean the same, and a list is the
// same as itself written in another way.
func TestSameFlagsMeanTheSame(t *testing.T) {
	words := slices.Sorted(maps.Keys(modelWords))
	for seed := range uint64(200) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			var lists [][]string
			for range 60 {
				list := make([]string, r.IntN(4))
				for i := range list {
					list[i] = words[r.IntN(len(words))]
				}
				lists = append(lists, list)
			}
			for _, a := range lists {
				if other := rewritten(r, a); !sameFlags(a, other) {
					t.Errorf("%q and %q are told apart", a, other)
				}
				for _, b := range lists {
					if sameFlags(a, b) && !maps.Equal(meaning(a), meaning(b)) {
						t.Errorf("%q and %q are taken for the same", a, b)
					}
				}
			}
		})
	}
}

func meaning(flags []string) model {
	m := model{}
	for _, word := range flags {
		modelWords[word](m)
	}
	return m
}

// rewritten joins flags to lists, repeats some and adds words of no meaning.
func rewritten(r *rand.Rand, flags []string) []string {
	var out []string
	add := func(word string) {
		if len(out) > 0 && r.IntN(2) == 0 {
			out[len(out)-1] += "," + word
		} else {
			out = append(out, word)
		}
	}
	for _, word := range flags {
		for range 1 + r.IntN(2) {
			add(word)
		}
		if r.IntN(3) == 0 {
			add("defaults")
		}
	}
	return out
}
