package devices

import (
	"strings"
	"testing"
)

func TestAgree(t *testing.T) {
	local := Properties{NodeLocal: true, CapacityTracked: true}
	for title, test := range map[string]struct {
		two    func(*Properties)
		differ string // empty: they agree
	}{
		"the same":       {func(*Properties) {}, ""},
		"the usual word": {func(p *Properties) { p.FSGroupPolicy = "File" }, ""},
		"inline":         {func(p *Properties) { p.Inline = true }, ""},
		"place":          {func(p *Properties) { p.NodeLocal = false }, "NodeLocal is true of one and false of the other"},
		"attach":         {func(p *Properties) { p.AttachRequired = true }, "AttachRequired"},
		"capacity":       {func(p *Properties) { p.CapacityTracked = false }, "CapacityTracked"},
		"group":          {func(p *Properties) { p.FSGroupPolicy = "None" }, "FSGroupPolicy is File of one and None of the other"},
		"limit":          {func(p *Properties) { p.VolumeLimit = 9 }, "VolumeLimit is 0 of one and 9 of the other"},
	} {
		two := local
		test.two(&two)
		got, err := Agree([]Kind{{Name: "one", Properties: local}, {Name: "two", Properties: two}})
		switch {
		case test.differ == "" && (err != nil || !got.NodeLocal || got.FSGroupPolicy != "File" || got.Inline != two.Inline):
			t.Errorf("%s: %+v (%v)", title, got, err)
		case test.differ != "" && (err == nil || !strings.Contains(err.Error(), test.differ) || !strings.Contains(err.Error(), "one and two")):
			t.Errorf("%s: %v", title, err)
		}
	}
}
