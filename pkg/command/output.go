package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/csi-node/csi-node/pkg/state"
)

// Print writes value as JSON, or what table writes, in columns.
func (o Output) Print(out io.Writer, value any, table func(io.Writer)) error {
	if o == "json" {
		e := json.NewEncoder(out)
		e.SetEscapeHTML(false)
		e.SetIndent("", "  ")
		return e.Encode(value)
	}
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	table(t)
	return t.Flush()
}

// Message is a CSI message that is printed as protobuf JSON, the same bytes each time.
type Message struct{ proto.Message }

// MarshalJSON implements json.Marshaler.
func (m Message) MarshalJSON() ([]byte, error) {
	if !m.ProtoReflect().IsValid() {
		return []byte("null"), nil
	}
	raw, err := protojson.Marshal(m.Message) // inserts spaces at random
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = json.Compact(&out, raw)
	return out.Bytes(), err
}

// Size formats a size in bytes, both rounded for people and exact.
func Size(bytes int64) string { return fmt.Sprintf("%s (%d)", state.FormatSize(bytes), bytes) }

// joined formats a map, sorted by its keys.
func joined(all map[string]string) string {
	var words []string
	for _, key := range slices.Sorted(maps.Keys(all)) {
		words = append(words, key+"="+all[key])
	}
	return strings.Join(words, ",")
}
