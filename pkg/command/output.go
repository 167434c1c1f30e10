package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/csi-node/csi-node/pkg/state"
)

// Print writes value as JSON or YAML, or what table writes, in columns.
func (o Output) Print(out io.Writer, value any, table func(io.Writer)) error {
	switch o {
	case "json":
		return WriteJSON(out, value)
	case "yaml":
		return writeYAML(out, value)
	}
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	table(t)
	return t.Flush()
}

// Tables is a report that prints itself as a table, and as one with all columns.
type Tables interface {
	Print(out io.Writer) error
	PrintWide(out io.Writer) error
}

// PrintTables is Print, with AddWide, for a report that has both tables.
func (o Output) PrintTables(out io.Writer, report Tables) error {
	switch o {
	case Table:
		return report.Print(out)
	case Wide:
		return report.PrintWide(out)
	}
	return o.Print(out, report, nil)
}

// WriteJSON writes a value as people read JSON.
func WriteJSON(out io.Writer, value any) error {
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(value)
}

// writeYAML writes the JSON of a value as YAML, with its fields in the same order.
func writeYAML(out io.Writer, value any) error {
	var text bytes.Buffer
	if err := WriteJSON(&text, value); err != nil {
		return err
	}
	var node yaml.Node // JSON is YAML
	if err := yaml.Unmarshal(text.Bytes(), &node); err != nil {
		return err
	}
	inBlocks(&node)
	e := yaml.NewEncoder(out)
	e.SetIndent(2)
	return errors.Join(e.Encode(&node), e.Close())
}

// wordsOfYAML11 are no strings for kubectl, which reads YAML 1.1, unless they are quoted.
var wordsOfYAML11 = regexp.MustCompile(`^(?i:y|n|yes|no|on|off)$`)

// inBlocks takes the braces and quotes of JSON from what does not need them.
func inBlocks(node *yaml.Node) {
	if node.Kind != yaml.ScalarNode || !wordsOfYAML11.MatchString(node.Value) {
		node.Style = 0
	}
	for _, child := range node.Content {
		inBlocks(child)
	}
}

// WriteNew makes a file, which only its owner can read, and removes it if write fails. It is an
// error if there is one.
func WriteNew(name string, write func(io.Writer) error) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err = errors.Join(write(f), f.Close()); err != nil {
		err = errors.Join(err, os.Remove(name))
	}
	return err
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
