package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/test/require"
)

type spelt struct{ Field string }

func (spelt) String() string { return "spelt out" }

// A line of the JSON log is an object with the keys of Kubernetes, whose values are what a text log prints: no fields of
// what prints itself, and so no secrets.
func TestJSONLog(t *testing.T) {
	var out bytes.Buffer
	log := jsonLogger(&out, 3).WithValues("volume", "v-1")
	log.V(3).Info("Done", "took", 1500*time.Millisecond, "device", spelt{"hidden"}, "paths", []string{"/a"}, "count", 7)
	log.Error(fmt.Errorf("step: %w", errors.New("no room")), "Failed", "request",
		withoutSecrets{&csi.NodeStageVolumeRequest{VolumeId: "v-1", Secrets: map[string]string{"key": "hidden"}}})
	log.V(4).Info("Too much")
	if strings.Contains(out.String(), "hidden") || strings.Contains(out.String(), "Too much") {
		t.Errorf("it tells of secrets or fields, or too much:\n%s", &out)
	}
	var lines []map[string]any
	for line := range strings.Lines(out.String()) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		if caller, _ := fields["caller"].(string); !strings.HasPrefix(caller, "logging_test.go:") {
			t.Errorf("the caller is %v", fields["caller"])
		}
		if ts, _ := fields["ts"].(float64); time.Since(time.UnixMilli(int64(ts))).Abs() > time.Hour {
			t.Errorf("the time is %v", fields["ts"])
		}
		delete(fields, "caller")
		delete(fields, "ts")
		lines = append(lines, fields)
	}
	got, err := json.Marshal(lines)
	require.NoError(t, err)
	want := `[{"count":7,"device":"spelt out","msg":"Done","paths":["/a"],"took":"1.5s","v":3,"volume":"v-1"},` +
		`{"err":"step: no room","msg":"Failed","request":` + quoted(withoutSecrets{&csi.NodeStageVolumeRequest{VolumeId: "v-1", Secrets: map[string]string{"key": "x"}}}.String()) + `,"volume":"v-1"}]`
	if string(got) != want {
		t.Errorf("logs\n%s\nwant\n%s", got, want)
	}
}

// What panics when it is written ends no plugin.
func TestJSONLogOfWhatPanics(t *testing.T) {
	var out bytes.Buffer
	jsonLogger(&out, 0).Info("Odd", "time", time.Second, "nobody", (*os.PathError)(nil))
	if !strings.Contains(out.String(), `"time":"1s"`) || !strings.Contains(out.String(), `"nobody":"<panic: `) {
		t.Error(out.String())
	}
}

func quoted(text string) string {
	q, _ := json.Marshal(text) // a string has no errors
	return string(q)
}

func TestUnknownLoggingFormat(t *testing.T) {
	root := Command(testOptions())
	root.SetArgs([]string{"serve", "--logging-format=xml"})
	if err := root.ExecuteContext(t.Context()); err == nil || command.ExitCode(err) != 2 || !strings.Contains(err.Error(), `--logging-format "xml": must be text or json`) {
		t.Errorf("says %v", err)
	}
}

func TestLogTailIsBounded(t *testing.T) {
	var tail logTail
	line := strings.Repeat("x", 99) + "\n"
	for range 10 * maxLogTail / len(line) {
		if n, err := tail.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	if text := tail.String(); len(text) > maxLogTail || len(text) < maxLogTail-len(line) || !strings.HasPrefix(text, line) || len(tail.text) > 3*maxLogTail {
		t.Errorf("%d bytes are kept, and %d told", len(tail.text), len(text))
	}
	if n, err := tail.Write(bytes.Repeat([]byte("y"), 10*maxLogTail)); n != 10*maxLogTail || err != nil || len(tail.text) > 3*maxLogTail {
		t.Errorf("of a long line %d are kept (%d, %v)", len(tail.text), n, err)
	}
}
