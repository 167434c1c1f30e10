package lvm

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices"
)

// The tags of a logical volume, all of which begin with tagPrefix. Tags of others stay.
const (
	tagPrefix = "csi-node."

	driverTag     = "driver"     // whose volume it is
	nameTag       = "name"       // in the request that made it
	fsTypeTag     = "fs"         // that it was made for; empty: a raw block device
	overcommitTag = "overcommit" // percent; of a thin volume
	unzeroedTag   = "unzeroed"   // it has an earlier tenant's bytes
	freshTag      = "fresh"      // nobody has had it since it was made or cleared
	formattingTag = "formatting" // a format was begun, and its end is not known
	formattedTag  = "formatted"  // the type of the last format that ended
	rawTag        = "raw"        // it was published as a raw block device for writing
	layerTag      = "layer."     // and a key of the volume context that asks for a layer
	growthTag     = "growth"     // it is no volume, but what one is about to grow by
)

// tags is what the tags of a logical volume say.
type tags struct {
	driver, name, fsType string
	overcommit           int64 // percent; 0: it is not kept
	unzeroed, fresh      bool
	formatting, raw      bool
	formatted            string
	growth               bool
	layers               map[string]string
}

// parseTags reads the tags of a logical volume as LVM lists them.
func parseTags(list string) (t tags) {
	for _, tag := range strings.Split(list, ",") {
		t.apply(tag)
	}
	return t
}

func (t *tags) apply(tag string) {
	tag, own := strings.CutPrefix(tag, tagPrefix)
	if !own {
		return
	}
	key, value, _ := strings.Cut(tag, "=")
	value = unescapeTag(value)
	switch key {
	case driverTag:
		t.driver = value
	case nameTag:
		t.name = value
	case fsTypeTag:
		t.fsType = value
	case overcommitTag:
		t.overcommit, _ = strconv.ParseInt(value, 10, 64) // 0 where somebody has edited it
	case formattedTag:
		t.formatted = value
	case unzeroedTag:
		t.unzeroed = true
	case freshTag:
		t.fresh = true
	case formattingTag:
		t.formatting = true
	case rawTag:
		t.raw = true
	case growthTag:
		t.growth = true
	}
	if layer, is := strings.CutPrefix(key, layerTag); is {
		if t.layers == nil {
			t.layers = map[string]string{}
		}
		t.layers[layer] = value
	}
}

// overcommitOrNone returns the overcommit of a volume, which somebody may have edited.
func (t tags) overcommitOrNone() int64 {
	if devices.ValidOvercommit(t.overcommit) {
		return t.overcommit
	}
	return devices.NoOvercommit
}

// list returns the tags with their prefix.
func (t tags) list() (list []string) {
	add := func(set bool, key, value string) {
		switch {
		case set && value == "":
			list = append(list, tagPrefix+key)
		case set:
			list = append(list, tagPrefix+key+"="+escapeTag(value))
		}
	}
	add(true, driverTag, t.driver)
	add(t.name != "", nameTag, t.name)
	add(t.fsType != "", fsTypeTag, t.fsType)
	add(t.overcommit != 0, overcommitTag, strconv.FormatInt(t.overcommit, 10))
	add(t.unzeroed, unzeroedTag, "")
	add(t.fresh, freshTag, "")
	add(t.formatting, formattingTag, "")
	add(t.formatted != "", formattedTag, t.formatted)
	add(t.raw, rawTag, "")
	add(t.growth, growthTag, "")
	for _, layer := range slices.Sorted(maps.Keys(t.layers)) {
		add(true, layerTag+layer, t.layers[layer])
	}
	return list
}

// changes returns the arguments that make the tags of one volume those of another.
func changes(from, to tags) (arguments []string) {
	have, want := from.list(), to.list()
	for _, tag := range have {
		if !slices.Contains(want, tag) {
			arguments = append(arguments, "--deltag", tag)
		}
	}
	for _, tag := range want {
		if !slices.Contains(have, tag) {
			arguments = append(arguments, "--addtag", tag)
		}
	}
	return arguments
}

// escapeTag writes what a tag cannot hold as "=" and two digits (lvm(8): tags).
func escapeTag(value string) string {
	var b strings.Builder
	for _, c := range []byte(value) {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("_.+-", c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "=%02x", c)
		}
	}
	return b.String()
}

func unescapeTag(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == '=' && i+2 < len(text) {
			if n, err := strconv.ParseUint(text[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(n))
				i += 2
				continue
			}
		}
		b.WriteByte(text[i])
	}
	return b.String()
}
